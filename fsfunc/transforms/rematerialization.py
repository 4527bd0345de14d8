"""``remat``: free a unit's residuals, and recompute them in the backward.

The interpretation decides which unit calls are recomputed, and by whom: `RepeatedCall`
runs the function a second time when the backward first reads a value; of a unit that
``jit`` compiles, the compiled backward computes again what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.execution_context import running
from fsfunc.core.frames import Frame, Interpretation, transformed
from fsfunc.core.tracers import Tracer
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.transforms.policies import MODES, MinCut, Mode, Policy, recomputes
from fsfunc.transforms.repeated_calls import RepeatedCall
from fsfunc.transforms.sharded_calls import Function, Sharding
from fsfunc.tree.types import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")


@api_boundary
def remat(
    f: Callable[_P, _R], policy: Policy | MinCut | Mode | None = None
) -> Callable[_P, _R]:
    """Saves only the inputs of each unit of ``f``, and recomputes it in the backward.

    The recompute runs under the same autocast, with the same random numbers (of torch's
    default generators, your own ``torch.Generator``, Python's ``random`` and numpy's
    ``numpy.random``), and with the transforms that were in reach of the call.

    Args:
        f: a unit, a loss, or a train step.
        policy: ``SaveOnly(names)`` or ``SaveAllBut(names)``: values named by
            ``checkpoint_name`` that are kept, so that the op which made them does not
            run again. By default nothing is kept. Or, as a string, which microbatches
            of the innermost loop around a call (``accumulate``, ``pipeline``) are
            recomputed: ``"always"`` all, as by default; ``"except_last"`` all but the
            last, and none outside a loop; ``"never"`` none. Or ``MinCut(share)``, of
            units that ``jit`` compiles: what is kept is then the compiler's choice.

    Raises:
        TypeError: another policy.
        ValueError: ``MinCut`` of a unit that ``jit`` does not compile.

    Cost: one more forward of each unit, but for what it computes after the last value
    that the backward reads, such as a block's last product; under ``shard``, in either
    order, each unit is gathered twice, the last one once. Under ``torch.func``
    transforms the function runs as it is: they keep the whole backward differentiable,
    and a recompute with it. Of a unit that ``jit`` compiles the compiled backward
    computes again what it reads, and calls nothing twice.

    Source: Chen et al., 2016, Training deep nets with sublinear memory cost.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda p, x: torch.sin(x * p))
    >>> loss = ff.remat(lambda p: layer(p, torch.ones(2)).sum())
    >>> ff.value_and_grad(loss)(torch.tensor(0.0))[1].item()
    2.0
    """
    return transformed(f, _Remat(policy))


@api_boundary
def remat_calls(
    f: Callable[_P, _R],
    calls: Iterable[int],
    policy: Policy | MinCut | Mode | None = None,
) -> Callable[_P, _R]:
    """Recomputes, in the backward, the given unit calls of the loss in ``f``.

    ``remat`` recomputes every unit; this one the calls of the given numbers, counted
    from 0 in the order in which the loss makes them, as ``program`` lists them. What a
    recomputed unit calls itself is part of it, and not recomputed once more.

    Args:
        f: a loss, or a train step.
        calls: such as ``recompute_points(...).calls``.
        policy: as of ``remat``, for the calls that are recomputed.

    Raises:
        ValueError: a number that is negative or not whole.
        TypeError: another policy.

    Cost: that of ``remat``, of these calls alone. A number that the loss does not reach
    costs nothing, and is not reported.

    >>> import torch, fsfunc as ff
    >>> ran = []
    >>> @ff.unit
    ... def layer(p, x):
    ...     ran.append(x.item())
    ...     return x * p
    >>> loss = lambda p: layer(p, layer(p, torch.tensor(1.0)))
    >>> step = remat_calls(ff.value_and_grad(loss), [1])
    >>> step(torch.tensor(3.0))[1].item(), ran
    (6.0, [1.0, 3.0, 3.0])
    """
    numbers = frozenset(calls)
    for n in numbers:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"calls has {n!r}: unit calls are numbered from 0")
    return transformed(f, _Remat(policy, numbers))


class _Remat(Interpretation):
    """The interpretation of ``remat`` and ``remat_calls``.

    Args:
        policy: which values are saved, or which microbatches recomputed.
        calls: the numbers of the unit calls to recompute; None: all.

    Attributes:
        named_policy: ``policy``, if it is one of named values.
        min_cut: ``policy``, if it leaves the choice to the compiler.
    """

    def __init__(
        self, policy: Policy | MinCut | str | None, calls: frozenset[int] | None = None
    ):
        is_known = policy is None or isinstance(policy, (Policy, MinCut))
        if not (is_known or policy in MODES):
            raise TypeError(
                f"policy={policy!r}: it is SaveOnly(names), SaveAllBut(names), MinCut("
                f"share), one of {', '.join(map(repr, MODES))}, or None"
            )
        self.policy, self.calls = policy, calls
        self.called = "remat" if calls is None else "remat_calls"
        self.named_policy = policy if isinstance(policy, Policy) else None
        self.min_cut = policy if isinstance(policy, MinCut) else None
        self.ends_alike = policy != "except_last"
        self.repeats_calls = calls is None

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        # As values that compare and print alike on all ranks: names are a set.
        policy = self.policy
        if isinstance(policy, Policy):
            policy = (type(policy).__name__, *sorted(policy.names))
        elif isinstance(policy, MinCut):
            policy = ("MinCut", policy.share)
        calls = () if self.calls is None else (("calls", sorted(self.calls)),)
        return (*calls, ("policy", policy))

    def recorded(self, recorder: Tracer) -> Interpretation:
        return Interpretation()  # what is recorded is computed once

    def unit(self, run: Function, call: Call) -> Function:
        f = call.frame
        if not self.applies_to(call):
            return run
        # A compiled backward recomputes by itself. Without a compiler too `MinCut` is
        # asked for its share: it raises.
        if f.compiler is not None or self.min_cut:
            if self.compiled_share(call) is not None:
                return run
        return partial(self._run_repeatable, run, call)

    def applies_to(self, call: Call) -> bool:
        """Returns whether a call is one to recompute."""
        f, calls = call.frame, self.calls
        chosen = calls is None or not f.path and call.number in calls
        return chosen and recomputes(self.policy, f.micro)

    def reads_again(self, call: Call) -> bool:
        return self.compiled_share(call) is not None

    def compiled_share(self, call: Call) -> float | None:
        """Returns the share that a compiled unit's own graph saves; see `saved_share`.

        Its backward computes the rest again, and the call runs once. None: the unit is
        not compiled so, or not recomputed.
        """
        f = call.frame
        # Under torch.func the plain function runs, whatever compiles the unit.
        if f.composable or not self.applies_to(call):
            return None
        is_partitioned = f.compiler is not None and f.compiler.partitions_call(call)
        if self.min_cut is not None:
            # Else nobody would choose what is kept, and the memory be another one.
            if not is_partitioned:
                raise ValueError(_UNCOMPILED.format(call.name))
            return self.min_cut.share
        # Without a policy the inputs alone are saved, where the unit's backward can do
        # all that a second run of the call does. (Fused operators have no named values,
        # and while a step is traced the function runs twice, as without ``jit``.)
        saves_inputs = is_partitioned and f.tracer is None
        saves_inputs = saves_inputs and self.named_policy is None and _runs_alone(f)
        return 0.0 if saves_inputs else None

    def _run_repeatable(
        self,
        run: Function,
        call: Call,
        params: PyTree,
        /,
        *inputs: PyTree,
        **named: PyTree,
    ) -> PyTree:
        """Runs a unit call, which the backward runs again."""
        f = call.frame
        # `torch.func` keeps the whole backward differentiable: it has all residuals. A
        # step that is only recorded or checked has no need to save memory.
        is_tried = f.tracer is not None and not f.tracer.complete
        if is_tried or f.composable or not torch.is_grad_enabled():
            return run(params, *inputs, **named)
        leaves, treedef = tree.flatten((params, inputs, named), is_sharded)
        tensors, positions = [], []
        for i, x in enumerate(leaves):
            if isinstance(x, Sharded):
                # Parts of a packed buffer are gathered from the buffer, which lives as
                # long as the state: only one that autograd differentiates is saved.
                part = x.local if x.packed is None else x._part
                if x.parts is None and part is not None and part.requires_grad:
                    tensors.append(x.local)
                    positions.append(i)
            elif isinstance(x, Tensor):
                tensors.append(x)
                positions.append(i)
        state = running()
        # Outside a sharded gradient call there is no token: a graph can only begin at
        # an argument, and where none requires a gradient there is no backward.
        if state.token is None and not any(x.requires_grad for x in tensors):
            return run(params, *inputs, **named)
        repeated = RepeatedCall(
            run, leaves, positions, treedef, self.named_policy, call, tensors
        )
        out = repeated.run_first(params, inputs, named, tensors, state)
        call.savers.extend(repeated.savers)
        return out


def saved_share(call: Call) -> float | None:
    """Returns the share that the compiler of a unit call is to save for its backward.

    It is a share of the minimum cut (see `MinCut`): of the least that a backward cannot
    compute again for little. 1.0 is all of that, 0.0 none: the unit's inputs alone.
    None is torch's default, which saves more than the cut: what products read, too.

    The transforms around the call each ask for a share, and the smallest counts.
    """
    handlers = call.frame.handlers
    shares = [h.compiled_share(call) for h in handlers if isinstance(h, _Remat)]
    # ZeRO is to save memory, so it asks for the cut and no more: a block of a GPT saves
    # 10 bytes where torch's default saves 16, and takes 2 % longer.
    shares += [1.0 for h in handlers if getattr(h, "zero", 0)]
    return min((s for s in shares if s is not None), default=None)


def saves_named_values(call: Call) -> bool:
    """Returns whether a recompute of a call saves named values."""
    remats = [h for h in call.frame.handlers if isinstance(h, _Remat)]
    return any(h.named_policy is not None and h.applies_to(call) for h in remats)


def _runs_alone(f: Frame) -> bool:
    """Returns whether a recompute would run a unit's function and nothing else.

    Then the compiled backward can stand for the second run. It knows the function
    alone, not what transforms do around it.
    """
    inside_remat = gathered = False
    for h in f.handlers:
        if isinstance(h, _Remat):
            inside_remat = True
        elif isinstance(h, Sharding):
            # In `remat(shard(...))` a recompute gathers anew, too.
            if inside_remat:
                return False
            gathered = gathered or h.zero == 3
        elif type(h).unit is not _DEFAULT_UNIT:  # it has a part in unit calls
            return False
    # Cast parameters are inputs of the compiled function, and inputs are saved: at zero
    # 3 the backward gathers them again, else each cast copy would live until then.
    return f.casts is None or gathered


_DEFAULT_UNIT = Interpretation.unit


_UNCOMPILED = (
    "unit {!r} is under remat(..., MinCut()), and jit does not compile it to one graph "
    "by torch's own compiler, which alone knows what costs least to keep: put jit "
    "around the step (with the unit among its only=), or give remat another policy"
)

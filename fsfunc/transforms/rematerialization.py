"""``remat``: free a unit's residuals, and recompute them in the backward."""

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
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.transforms.policies import MODES, MinCut, Mode, Policy, recomputes
from fsfunc.transforms.repeated_calls import RepeatedCall
from fsfunc.transforms.sharded_calls import Sharding

_P = ParamSpec("_P")
_R = TypeVar("_R")


@api_boundary
def remat(
    f: Callable[_P, _R], policy: Policy | MinCut | Mode | None = None
) -> Callable[_P, _R]:
    """``f`` with each unit keeping its inputs alone, and computing again in backward.

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
    """``f`` with these of its loss's unit calls recomputed in the backward.

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
    def __init__(
        self, policy: Policy | MinCut | str | None, calls: frozenset[int] | None = None
    ):
        known = policy is None or isinstance(policy, (Policy, MinCut))
        if not (known or policy in MODES):
            raise TypeError(
                f"policy={policy!r}: it is SaveOnly(names), SaveAllBut(names), MinCut("
                f"share), one of {', '.join(map(repr, MODES))}, or None"
            )
        self.policy, self.calls = policy, calls
        self.called = "remat" if calls is None else "remat_calls"
        self.kept = policy if isinstance(policy, Policy) else None
        self.least = policy if isinstance(policy, MinCut) else None
        self.ends_alike = policy != "except_last"

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        policy = self.policy
        if isinstance(policy, Policy):
            policy = (type(policy).__name__, *sorted(policy.names))
        elif isinstance(policy, MinCut):
            policy = ("MinCut", policy.share)
        calls = () if self.calls is None else (("calls", sorted(self.calls)),)
        return (*calls, ("policy", policy))

    def recorded(self, recorder: Any) -> Interpretation:
        return Interpretation()  # what is recorded is computed once

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        f = call.frame
        if not self.means(call):
            return run
        if f.compiler is not None or self.least:
            if self.share(call) is not None:
                return run
        return partial(self._recomputed, run, call)

    def means(self, call: Call) -> bool:
        """True if a call is one to recompute."""
        f, calls = call.frame, self.calls
        chosen = calls is None or not f.path and call.number in calls
        return chosen and recomputes(self.policy, f.micro)

    def reads_again(self, call: Call) -> bool:
        return self.share(call) is not None

    def share(self, call: Call) -> float | None:
        """The share that a compiled unit's own graph keeps; None: as without remat.

        Its backward computes the rest again, and the call runs once.
        """
        f = call.frame
        if f.composable or not self.means(call):
            return None
        compiled = f.compiler is not None and f.compiler.parts(call)
        if self.least is not None:
            if not compiled:
                raise ValueError(_UNCOMPILED.format(call.name))
            return self.least.share
        whole = compiled and f.tracer is None and self.kept is None and _alone(f)
        return 0.0 if whole else None

    def _recomputed(
        self,
        run: Callable[..., Any],
        call: Call,
        params: Any,
        /,
        *inputs: Any,
        **named: Any,
    ) -> Any:
        """Runs a unit call, which the backward runs again."""
        f = call.frame
        tried = f.tracer is not None and not f.tracer.complete
        if tried or f.composable or not torch.is_grad_enabled():
            return run(params, *inputs, **named)
        leaves, treedef = tree.flatten((params, inputs, named), is_sharded)
        tensors, places = [], []
        for i, x in enumerate(leaves):
            if isinstance(x, Sharded):
                part = x.local if x.packed is None else x._part
                if x.parts is None and part is not None and part.requires_grad:
                    tensors.append(x.local)
                    places.append(i)
            elif isinstance(x, Tensor):
                tensors.append(x)
                places.append(i)
        now = running()
        if now.token is None and not any(x.requires_grad for x in tensors):
            return run(params, *inputs, **named)
        again = RepeatedCall(run, leaves, places, treedef, self.kept, call, tensors)
        out = again.first(params, inputs, named, tensors, now)
        call.savers.extend(again.savers)
        return out


def share_kept(call: Call) -> float | None:
    """The `share` of a unit call that the compiler parts, by the transforms around it.

    None is the compiler's own choice. Under ``shard`` with ``zero`` above 0, which is
    to save memory, what costs little to compute again is not kept.
    """
    shares = [h.share(call) for h in call.frame.handlers if isinstance(h, _Remat)]
    shares += [1.0 for h in call.frame.handlers if getattr(h, "zero", 0)]
    return min((s for s in shares if s is not None), default=None)


def keeps_names(call: Call) -> bool:
    """True if a recompute of a call keeps named values."""
    remats = [h for h in call.frame.handlers if isinstance(h, _Remat)]
    return any(h.kept is not None and h.means(call) for h in remats)


def _alone(f: Frame) -> bool:
    """True if a recompute would run a unit's function and nothing else."""
    within = gathered = False
    for h in f.handlers:
        if isinstance(h, _Remat):
            within = True
        elif isinstance(h, Sharding):
            if within:  # whose gathers a recompute makes anew
                return False
            gathered = gathered or h.zero == 3
        elif type(h).unit is not _SAME:
            return False
    return f.casts is None or gathered  # or the graph would keep what is cast


_SAME = Interpretation.unit


_UNCOMPILED = (
    "unit {!r} is under remat(..., MinCut()), and jit does not compile it to one graph "
    "by torch's own compiler, which alone knows what costs least to keep: put jit "
    "around the step (with the unit among its only=), or give remat another policy"
)

"""A unit call that is run a second time, when its backward first reads a value.

In the first run a unit's function saves nothing: autograd gets a :class:`_Residual` in
place of each tensor. The second run gives these their values, in the same order, and
ends with the last: what a function computes after it, such as a block's last product,
makes its output alone. The graph is that of the first run, so it may be differentiated
twice or in parts, and buffers are gathered and dropped by it as without ``remat``. It
is torch.utils.checkpoint, in the variant that is not reentrant.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.core.execution_context import Running, UnitToken, run_as, running
from fsfunc.core.frames import frame
from fsfunc.core.units import Call
from fsfunc.runtime.generators import (
    NotedDraws,
    States,
    generator_states,
    generators_kept,
    other_states,
    set_generators,
)
from fsfunc.sharded.leaf import Sharded
from fsfunc.transforms.policies import Policy, Tape


class _Residual:
    """A tensor that a backward reads, from the second run until it has been read."""

    __slots__ = ("value", "version", "__weakref__")
    value: Tensor | None


class _Done(BaseException):
    """All residuals have values. Not an Exception: a unit must not swallow it."""


class _Passing(_torch.HiddenFromCompile):
    """A dispatch mode that only is there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class How(Enum):
    """How the tensors that a function saves are replaced, by what it does.

    Args:
        DROPS: as they are saved.
        KEEPS: the same, and they stay until it returns: it computes gradients itself.
        AFTER: when it has returned: it uses torch.func, which allows no hooks.
    """

    DROPS = auto()
    KEEPS = auto()
    AFTER = auto()


class RepeatedCall:
    """A unit call whose residuals are computed again.

    Args:
        tensors: the arguments' leaves that are saved, at ``places`` of ``leaves``.
        policy: the named values to keep, if any.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        leaves: list[Any],
        places: list[int],
        treedef: Any,
        policy: Policy | None,
        call: Call,
        tensors: Sequence[Tensor],
    ):
        self.run, self.places, self.treedef = run, places, treedef
        # What is differentiated is saved by autograd, not here.
        self.leaves = list(leaves)
        for i in places:
            x = leaves[i]
            self.leaves[i] = x.with_local(None) if isinstance(x, Sharded) else None
        self.needs = [x.requires_grad for x in tensors]
        # An argument given twice is one tensor again: attention asks if k is v.
        first: dict[int, int] = {}
        self.same = [first.setdefault(id(x), i) for i, x in enumerate(tensors)]
        self.tape = None if policy is None else Tape(policy)
        self.casts = {
            kind: torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        }
        # In a gradient call the unit's body sets the generators by itself.
        f = call.frame
        self.states: States = [] if f.seed is not None else generator_states()
        # Calls of one key do the same, as far as anybody can tell.
        kinds = [(x.shape, x.dtype, x.requires_grad) for x in tensors]
        flags: list[Any] = []
        if len(leaves) > len(tensors):  # with `training=False` it may draw nothing
            flags = [x for x in leaves if x.__class__ in _FLAGS]
        self.key = (f.at and f.at.rank, treedef, *kinds, *flags)
        self.quiet, compiler, self.name = call.unit.quiet, f.compiler, call.name
        self.compiled = compiler is not None and compiler.means(call)
        self.others = [] if self.key in self.quiet else other_states()
        # A plan is that of a first call, whoever has planned before.
        self.known = call.unit.derives if f.tracer is None else {}
        self.how = self.known.get(self.key)
        # Each with the shape and dtype of what it stands for.
        self.residuals: list[tuple[weakref.ref[_Residual], Any, Any]] = []
        self.norms: Any = None  # of these, in a first call
        self.modes = 0  # dispatch modes around the function, which see other operators
        self.device: Any = None  # of the unit token
        self.running, self.within = True, False
        self.derives = self.missed = False
        # Results of `_Saver`: their nodes save the arguments, and what is kept.
        self.savers: list[Any] = []

    def first(
        self,
        params: Any,
        inputs: Any,
        named: Any,
        tensors: Sequence[Tensor],
        now: Running,
    ) -> Any:
        """The first run: as without ``remat``, so that torch takes the same kernels."""
        if (thread := now.thread) is None:
            anchor = next(x for x in tensors if x.requires_grad)
        else:
            anchor, self.device = thread.token, thread.start.device
        self.savers = [_Saver.apply(anchor, *tensors)]
        with run_as(replace(now, forgotten=True, around=self._unsaved)):
            out = self.run(params, *inputs, **named)
        if self.tape is not None:
            self.savers.append(_Saver.apply(anchor, *self.tape.tensors()))
        self.running = self.within = False
        if self.others:
            self._forget_others()
        return out

    def _forget_others(self) -> None:
        """Forgets how generators stood of which the first run has not drawn."""
        before, now = ([x for _, x in s] for s in (self.others, other_states()))
        if pickle.dumps(before) == pickle.dumps(now):
            self.quiet.add(self.key)
            self.others = []

    def _unsaved(self, fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Calls the unit's function, which saves residuals."""
        if self.within:  # that of a unit which it calls
            return fn(*args, **keywords)
        self.within, self.modes = True, _torch.dispatch_mode_count()
        with nullcontext() if self.tape is None else self.tape.keep():
            if self.how is None:
                return self._tried(fn, args, keywords)
            if self.how is not How.AFTER:
                return self._hooked(fn, args, keywords)
            out, handles = saving(fn, args, keywords)
            with _torch.beneath_all_modes():  # to which a saved number is no tensor
                for handle in handles:
                    handle.register_hooks(self._pack, self._unpack)
            return out

    def _hooked(self, fn: Callable[..., Any], args: Any, keywords: Any) -> Any:
        with saved_tensors_hooks(self._pack, self._unpack):
            out = fn(*args, **keywords)
        if self.missed:
            raise RuntimeError(_MISSED)
        if self.how is not How.DROPS:
            for each, *_ in self.residuals:
                if (one := each()) is not None:
                    one.value = None
        return out

    def _tried(self, fn: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Calls a function of which it is not known what it does."""
        thread, states = running().thread, [*generator_states(), *self.others]
        token, draws = None if thread is None else thread.token, NotedDraws()
        self.norms, number = [], (counter := frame().counter).count
        try:
            compiled = self.compiled or _torch.is_compiled_function(fn)
            with nullcontext() if compiled else draws:
                out = self._hooked(fn, args, keywords)
            stop = () if token is None else (token.grad_fn,)
            if any(
                map(_torch.saves_before_filling, nodes_of(out, (args, keywords), stop))
            ):
                raise RuntimeError(_RRELU.format(self.name))
            self.how = How.KEEPS if self.derives else How.DROPS
        except RuntimeError as error:
            if not _torch.forbids_hooks(error):
                raise
            self.how = How.AFTER
        if found := draws.found:  # another call may draw of others
            self.states = [*self.states, *found]
        else:
            self.known[self.key] = self.how
        if self.how is How.AFTER:
            if thread is not None and token is not None:
                thread.token = token
            counter.count = number  # units within draw by their numbers
            set_generators([*states, *found])
            self.residuals, self.norms, self.within = [], [], False
            return self._unsaved(fn, *args, **keywords)
        return out

    def _pack(self, x: Tensor) -> _Residual:
        one = _Residual()
        if self.how is None or self.how is How.KEEPS:
            one.value = x = x.detach()
            one.version = x._version
        else:
            one.value = None
        self.residuals.append((weakref.ref(one), x.shape, x.dtype))
        if self.norms is not None:
            self.norms.append(_torch.saved_norms(x))
        return one

    def _unpack(self, one: _Residual) -> Tensor:
        self.derives = self.derives or self.running
        if one.value is None:
            if self.running:
                self.missed = True
                raise RuntimeError(_MISSED)
            self._compute()
        if (value := one.value) is None:
            raise RuntimeError(_UNLIKE.format(self.name))
        if value._version != one.version:
            raise RuntimeError(_CHANGED)
        return value

    def _compute(self) -> None:
        """The second run: gives the residuals their values, and ends with the last."""
        saved, *kept = [x.grad_fn.saved_tensors for x in self.savers]
        leaves = [*self.leaves]
        made: list[Tensor] = []
        for i, x, need, k in zip(
            self.places, saved, self.needs, self.same, strict=True
        ):
            again = k < len(made)
            x, old = made[k] if again else x.detach().requires_grad_(need), leaves[i]
            made.append(x)
            leaves[i] = old.with_local(x) if isinstance(old, Sharded) else x
        params, inputs, named = tree.unflatten(self.treedef, leaves)
        thread = None if self.device is None else UnitToken(self.device)
        self.within = False
        with ExitStack() as stack:
            now = Running(thread, recompute=True, around=self._saved)
            stack.enter_context(run_as(now))
            self._enter_as_before(stack, *kept)
            stack.enter_context(internal())
            with torch.enable_grad(), suppress(_Done):
                self.run(params, *inputs, **named)

    def _enter_as_before(self, stack: ExitStack, kept: Sequence[Tensor] = ()) -> None:
        """Enters the casts and the random numbers of the first run."""
        if states := [*self.states, *self.others]:
            stack.enter_context(generators_kept(g for g, _ in states))
            set_generators(states)
        for kind in ("cpu", "cuda"):
            dtype = self.casts.get(kind)
            if dtype is not None or torch.is_autocast_enabled(kind):
                cast = torch.autocast(kind, dtype, enabled=dtype is not None)
                stack.enter_context(cast)
        if self.casts:  # an autocast around us would keep our leaves' casts
            stack.callback(torch.clear_autocast_cache)
        if self.modes and not _torch.dispatch_mode_count():
            stack.enter_context(_Passing())
        if self.tape is not None:
            stack.enter_context(self.tape.replay(kept))

    def _saved(self, fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Calls the unit's function a second time; residuals get what it saves."""
        if self.within:
            return fn(*args, **keywords)
        self.within = True
        due, norms = iter(self.residuals), iter(self.norms or ())
        left = len(self.residuals)
        made: list[_Residual] = []
        near: list[Tensor] = []  # asked at once: each answer is a wait for the device

        def compare() -> None:
            if not _torch.all_true(near):
                for one in made:
                    one.value = None
                raise RuntimeError(_UNLIKE.format(self.name))
            near.clear()

        def fill(x: Tensor) -> Tensor:
            nonlocal left
            x, left = x.detach(), left - 1
            if left >= 0:
                each, *kind = next(due)
                if kind != [x.shape, x.dtype]:
                    raise RuntimeError(_UNLIKE.format(self.name))
                if (alike := _torch.norms_are_near(next(norms, None), x)) is not None:
                    near.append(alike)
                if (one := each()) is not None:
                    one.value, one.version = x, x._version
                    if self.norms:
                        made.append(one)
            if left <= 0:
                if near:
                    compare()
                raise _Done
            return x

        if self.how is not How.AFTER:
            with saved_tensors_hooks(fill, lambda x: x):
                out = fn(*args, **keywords)
        else:
            out, handles = saving(fn, args, keywords)
            with _torch.beneath_all_modes():
                for handle in handles:
                    fill(handle.data)
        if near:
            compare()  # what it saved less than the first time
        return out


def saving(fn: Callable[..., Any], args: Any, keywords: Any) -> tuple[Any, list[Any]]:
    """The result of ``fn``, and handles on what autograd saved for its backward."""
    given = [x for x in tree.leaves((args, keywords)) if isinstance(x, Tensor)]
    stop = {x.grad_fn for x in given}
    if (thread := running().thread) is not None:
        stop.add(thread.token.grad_fn)
    out = fn(*args, **keywords)
    return out, _torch.saved_handles(nodes_of(out, stop=stop))


def nodes_of(out: Any, given: Any = (), stop: Iterable[Any] = ()) -> list[Any]:
    """The autograd nodes from what a function returned to what it was given."""
    tensors = [x for x in tree.leaves(given) if isinstance(x, Tensor)]
    made = [x for x in tree.leaves(out) if isinstance(x, Tensor)]
    roots = [x.grad_fn for x in made if x.requires_grad]
    return _torch.graph_nodes(roots, {*stop, *(x.grad_fn for x in tensors)})


class _Saver(torch.autograd.Function):
    """Saves tensors, while its result lives. Its node leads to ``anchor`` alone.

    The result has no elements: what ``anchor`` lies in is not kept for it.
    """

    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


_FLAGS = frozenset((bool, str))
_MISSED = (
    "a unit under remat computes gradients itself, and did not when first called with "
    "arguments of these shapes: make what differs a part of its arguments' structure, "
    "or two units of it"
)
_UNLIKE = (
    "unit {!r} under remat saved something else for its backward when it ran again: it "
    "must do the same again, whatever a counter or a list of Python's has come to"
)
_RRELU = (
    "unit {!r} under remat calls torch's rrelu in training, which saves its noise "
    "before it has drawn it: under any hook on saved tensors its gradient is memory "
    "that nobody wrote. Draw the slopes, torch.where(x < 0, x * torch.empty_like(x)."
    "uniform_(lower, upper), x), or leave the unit out of remat, by ff.remat_calls"
)
_CHANGED = (
    "a value that a unit's backward needs was changed by an in-place operation after "
    "it was saved: write into a copy"
)

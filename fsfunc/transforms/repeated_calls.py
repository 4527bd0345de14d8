"""A unit call that is run a second time, when its backward first reads a value.

In the first run a unit's function saves nothing: autograd gets a :class:`_Residual` in
place of each tensor. The second run gives these their values, in the same order, and
ends with the last: what a function computes after it, such as a block's last product,
makes its output alone::

    run_first   fn saves a, b, c    -> residuals  [ ] [ ] [ ]
    backward    reads c: _recompute -> fn again    a   b   c   ends here

The graph is that of the first run, so it may be differentiated twice or in parts, and
buffers are gathered and dropped by it as without ``remat``. It is
torch.utils.checkpoint, in the variant that is not reentrant. `rematerialization` makes
a :class:`RepeatedCall` for each unit call that it recomputes.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.core.execution_context import Running, UnitToken, run_as, running
from fsfunc.core.frames import frame
from fsfunc.core.units import Call
from fsfunc.runtime.generators import (
    RecordedDraws,
    States,
    generator_states,
    generators_restored,
    other_states,
    set_generators,
)
from fsfunc.sharded.leaf import Sharded
from fsfunc.transforms.policies import Policy, Tape
from fsfunc.tree.types import Leaf, PyTree

Function = Callable[..., PyTree]
Args = tuple[PyTree, ...]
Keywords = dict[str, PyTree]


class _Residual:
    """A tensor that a backward reads, from the second run until it has been read.

    ``version`` is that of ``value`` when it was saved.
    """

    __slots__ = ("value", "version", "__weakref__")
    value: Tensor | None
    version: int


class _AllFilled(BaseException):
    """All residuals have values. Not an Exception: a unit must not swallow it."""


class _IdleMode(_torch.HiddenFromCompile):
    """A dispatch mode that changes nothing, but is there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class HookMode(Enum):
    """When the tensors that a function saves are replaced, by what it does.

    Args:
        AS_SAVED: at once.
        AT_RETURN: they are retained until it returns, as it computes gradients itself.
        UNHOOKED: by hooks that are set when it has returned: it uses torch.func, which
            allows none while it runs.
    """

    AS_SAVED = auto()
    AT_RETURN = auto()
    UNHOOKED = auto()


class RepeatedCall:
    """A unit call whose residuals are computed again.

    Args:
        run: runs the call under the transforms further in.
        leaves, treedef: its arguments.
        positions: those of ``tensors`` in ``leaves``: the leaves that are saved.
        policy: the named values to save, if any.

    Attributes:
        key: calls of one key do the same, as far as anybody can tell.
        hook_mode: see `HookMode`; None in the first call of a key.
        hook_modes: by key, those of the unit's earlier calls.
        undrawing: the keys of calls that do not draw of Python's and numpy's
            generators; ``python_states``: how these stood, for others.
        residuals: each with the shape and dtype of what it stands for.
        norms: of these, in the first call of a key, to compare the second run by.
        mode_count: of the dispatch modes around the function in the first run.
        is_first_run, in_function: whether that, and the unit's function, run now.
        computes_gradients: whether the function read a residual itself.
        missed: whether it did where earlier calls of the key had not.
        savers: results of `_Saver`: their nodes save the arguments and named values.
    """

    run: Function
    positions: list[int]
    treedef: tree.TreeDef
    undrawing: set[Hashable]
    name: str
    is_first_run: bool
    in_function: bool
    computes_gradients: bool
    missed: bool

    def __init__(
        self,
        run: Function,
        leaves: list[Leaf],
        positions: list[int],
        treedef: tree.TreeDef,
        policy: Policy | None,
        call: Call,
        tensors: Sequence[Tensor],
    ):
        self.run, self.positions, self.treedef = run, positions, treedef
        # Tensors are saved by `_Saver`'s node, and so freed with the graph.
        self.leaves: list[Leaf] = list(leaves)
        for i in positions:
            x = leaves[i]
            self.leaves[i] = x.with_local(None) if isinstance(x, Sharded) else None
        self.requires_grad: list[bool] = [x.requires_grad for x in tensors]
        # An argument given twice is one tensor again: attention asks if k is v.
        first: dict[int, int] = {}
        self.first_index: list[int] = [
            first.setdefault(id(x), i) for i, x in enumerate(tensors)
        ]
        self.tape: Tape | None = None if policy is None else Tape(policy)
        self.autocast_dtypes: dict[str, torch.dtype] = {
            device: torch.get_autocast_dtype(device)
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        }
        # In a gradient call the unit's body sets the generators by itself.
        f = call.frame
        self.states: States = [] if f.seed is not None else generator_states()
        kinds = [(x.shape, x.dtype, x.requires_grad) for x in tensors]
        # With another flag, such as `training=False`, the function may do something
        # else. Numbers, which change from step to step, are left out of the key.
        flags: list[bool | str] = []
        if len(leaves) > len(tensors):
            flags = [x for x in leaves if x.__class__ in _FLAGS]
        self.key: tuple[Hashable, ...] = (
            f.here and f.here.rank,
            treedef,
            *kinds,
            *flags,
        )
        self.undrawing, compiler, self.name = (
            call.unit.drawless_keys,
            f.compiler,
            call.name,
        )
        self.is_compiled: bool = compiler is not None and compiler.compiles(call)
        # To ask them takes longer than to ask torch's: once for each key.
        self.python_states: States = (
            [] if self.key in self.undrawing else other_states()
        )
        # A plan is that of a first call, whoever has planned before.
        self.hook_modes: dict[Hashable, HookMode] = (
            call.unit.residual_modes if f.tracer is None else {}
        )
        self.hook_mode: HookMode | None = self.hook_modes.get(self.key)
        self.residuals: list[
            tuple[weakref.ref[_Residual], torch.Size, torch.dtype]
        ] = []
        self.norms: list[tuple[Tensor, Tensor] | None] | None = None
        self.mode_count: int = 0
        self.token_device: torch.device | None = None
        self.is_first_run, self.in_function = True, False
        self.computes_gradients = self.missed = False
        self.savers: list[Any] = []

    def run_first(
        self,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        named: dict[str, PyTree],
        tensors: Sequence[Tensor],
        state: Running,
    ) -> PyTree:
        """Runs the call as without ``remat``, so that torch takes the same kernels."""
        # A `_Saver` has a node, which saves, only if something requires gradients: the
        # token does, and without one some argument (`_run_repeatable` has looked).
        if (unit_token := state.token) is None:
            anchor = next(x for x in tensors if x.requires_grad)
        else:
            anchor, self.token_device = unit_token.latest, unit_token.start.device
        self.savers = [_Saver.apply(anchor, *tensors)]
        with run_as(replace(state, saves_nothing=True, run_unit_fn=self._call_first)):
            out = self.run(params, *inputs, **named)
        if self.tape is not None:
            self.savers.append(_Saver.apply(anchor, *self.tape.take_values()))
        self.is_first_run = self.in_function = False
        if self.python_states:
            self._forget_python_states()
        return out

    def _forget_python_states(self) -> None:
        """Forgets how generators stood of which the first run has not drawn."""
        before, after = (
            [x for _, x in s] for s in (self.python_states, other_states())
        )
        # As bytes: numpy's state is an array, whose == is no truth value.
        if pickle.dumps(before) == pickle.dumps(after):
            self.undrawing.add(self.key)
            self.python_states = []

    def _call_first(self, fn: Function, *args: PyTree, **keywords: PyTree) -> PyTree:
        """Calls the unit's function, whose graph gets residuals without values."""
        if self.in_function:  # that of a unit which it calls
            return fn(*args, **keywords)
        self.in_function, self.mode_count = True, _torch.dispatch_mode_count()
        with nullcontext() if self.tape is None else self.tape.record():
            if self.hook_mode is None:
                return self._call_unknown(fn, args, keywords)
            if self.hook_mode is not HookMode.UNHOOKED:
                return self._call_hooked(fn, args, keywords)
            out, handles = call_with_handles(fn, args, keywords)
            with _torch.beneath_all_modes():  # to which a saved number is no tensor
                for handle in handles:
                    handle.register_hooks(self._pack, self._unpack)
            return out

    def _call_hooked(self, fn: Function, args: Args, keywords: Keywords) -> PyTree:
        with saved_tensors_hooks(self._pack, self._unpack):
            out = fn(*args, **keywords)
        if self.missed:
            raise RuntimeError(_MISSED)
        # What the function read itself it has read by now: from here residuals are
        # empty, as if they had been so from the start.
        if self.hook_mode is not HookMode.AS_SAVED:
            for reference, *_ in self.residuals:
                if (residual := reference()) is not None:
                    residual.value = None
        return out

    def _call_unknown(self, fn: Function, args: Args, keywords: Keywords) -> PyTree:
        """Calls a function of which it is not known what it does, and finds out.

        First under hooks, with residuals that have values until it returns. If it uses
        torch.func, which refuses hooks, all that the try has moved is put back, and it
        is called again without.
        """
        unit_token = running().token
        states = [*generator_states(), *self.python_states]
        token = None if unit_token is None else unit_token.latest
        draws = RecordedDraws()
        self.norms, number = [], (counter := frame().counter).count
        try:
            # A compiler would see the mode that notes draws, and compile anew.
            compiled = self.is_compiled or _torch.is_compiled_function(fn)
            with nullcontext() if compiled else draws:
                out = self._call_hooked(fn, args, keywords)
            # Here the graph is at hand, and is walked once for each key.
            stop = () if token is None else (token.grad_fn,)
            if any(
                map(_torch.saves_before_filling, nodes_of(out, (args, keywords), stop))
            ):
                raise RuntimeError(_RRELU.format(self.name))
            self.hook_mode = HookMode.AS_SAVED
            if self.computes_gradients:
                self.hook_mode = HookMode.AT_RETURN
        except RuntimeError as error:
            if not _torch.forbids_hooks(error):
                raise
            self.hook_mode = HookMode.UNHOOKED
        # Of a generator among its arguments: another call may draw of another one, so
        # each call looks again.
        if drawn := draws.states:
            self.states = [*self.states, *drawn]
        else:
            self.hook_modes[self.key] = self.hook_mode
        if self.hook_mode is HookMode.UNHOOKED:
            if unit_token is not None and token is not None:
                unit_token.latest = token
            counter.count = number  # units within draw by their numbers
            set_generators([*states, *drawn])
            self.residuals, self.norms, self.in_function = [], [], False
            return self._call_first(fn, *args, **keywords)
        return out

    def _pack(self, x: Tensor) -> _Residual:
        residual = _Residual()
        # With its value until the function returns, which may read it (see `HookMode`).
        if self.hook_mode is None or self.hook_mode is HookMode.AT_RETURN:
            # A plan has no need of another tensor: to make one takes it longest.
            residual.value = x = x if isinstance(x, _torch.FakeTensor) else x.detach()
            residual.version = x._version
        else:
            residual.value = None
        self.residuals.append((weakref.ref(residual), x.shape, x.dtype))
        if self.norms is not None:
            self.norms.append(_torch.saved_norms(x))
        return residual

    def _unpack(self, residual: _Residual) -> Tensor:
        self.computes_gradients = self.computes_gradients or self.is_first_run
        if residual.value is None:
            if self.is_first_run:
                # Raised again when the function returns, which may have caught this.
                self.missed = True
                raise RuntimeError(_MISSED)
            self._recompute()
        if (value := residual.value) is None:
            raise RuntimeError(_UNLIKE.format(self.name))
        # Hooks turn autograd's own check off.
        if value._version != residual.version:
            raise RuntimeError(_CHANGED)
        return value

    def _recompute(self) -> None:
        """Runs the call again, until the last residual has its value."""
        saved, *named_values = [x.grad_fn.saved_tensors for x in self.savers]
        leaves = [*self.leaves]
        tensors: list[Tensor] = []
        for i, x, requires_grad, k in zip(
            self.positions, saved, self.requires_grad, self.first_index, strict=True
        ):
            # Detached: the graph that the second run makes is not used, and must not
            # reach into that of the first.
            is_repeated, old = k < len(tensors), leaves[i]
            x = tensors[k] if is_repeated else x.detach().requires_grad_(requires_grad)
            tensors.append(x)
            leaves[i] = old.with_local(x) if isinstance(old, Sharded) else x
        params, inputs, named = tree.unflatten(self.treedef, leaves)
        has_token = self.token_device is not None
        unit_token = UnitToken(self.token_device) if has_token else None
        self.in_function = False
        with ExitStack() as stack:
            state = Running(unit_token, recompute=True, run_unit_fn=self._call_again)
            stack.enter_context(run_as(state))
            self._enter_as_before(stack, *named_values)
            stack.enter_context(internal())
            with torch.enable_grad(), suppress(_AllFilled):
                self.run(params, *inputs, **named)

    def _enter_as_before(
        self, stack: ExitStack, named_values: Sequence[Tensor] = ()
    ) -> None:
        """Enters the casts and the random numbers of the first run."""
        if states := [*self.states, *self.python_states]:
            # After it they go on from where the backward found them.
            stack.enter_context(generators_restored(g for g, _ in states))
            set_generators(states)
        # Also off again, where the backward is called within an autocast that the
        # forward was not in.
        for device in ("cpu", "cuda"):
            dtype = self.autocast_dtypes.get(device)
            if dtype is not None or torch.is_autocast_enabled(device):
                cast = torch.autocast(device, dtype, enabled=dtype is not None)
                stack.enter_context(cast)
        if self.autocast_dtypes:  # an autocast around us would keep our leaves' casts
            stack.callback(torch.clear_autocast_cache)
        # Beneath a dispatch mode torch may take other operators, which save other
        # tensors: the second run is beneath one if the first was.
        if self.mode_count and not _torch.dispatch_mode_count():
            stack.enter_context(_IdleMode())
        if self.tape is not None:
            stack.enter_context(self.tape.replay(named_values))

    def _call_again(self, fn: Function, *args: PyTree, **keywords: PyTree) -> PyTree:
        """Calls the unit's function a second time; residuals get what it saves."""
        if self.in_function:
            return fn(*args, **keywords)
        self.in_function = True
        unfilled, norms = iter(self.residuals), iter(self.norms or ())
        left = len(self.residuals)
        filled: list[_Residual] = []
        # Asked at once: each answer is a wait for the device.
        answers: list[Tensor] = []

        def compare() -> None:
            if not _torch.all_true(answers):
                # A caller that goes on after the error must not read these.
                for residual in filled:
                    residual.value = None
                raise RuntimeError(_UNLIKE.format(self.name))
            answers.clear()

        def fill(x: Tensor) -> Tensor:
            nonlocal left
            x, left = x.detach(), left - 1
            # Negative in a unit that saved nothing the first time.
            if left >= 0:
                reference, *kind = next(unfilled)
                if kind != [x.shape, x.dtype]:
                    raise RuntimeError(_UNLIKE.format(self.name))
                if (is_near := _torch.norms_are_near(next(norms, None), x)) is not None:
                    answers.append(is_near)
                # None: the graph's part that would read it is gone.
                if (residual := reference()) is not None:
                    residual.value, residual.version = x, x._version
                    if self.norms:
                        filled.append(residual)
            # The backward has all that it reads: what the function would compute from
            # here on is its output, which nobody reads.
            if left <= 0:
                if answers:
                    compare()
                raise _AllFilled
            return x

        if self.hook_mode is not HookMode.UNHOOKED:
            with saved_tensors_hooks(fill, lambda x: x):
                out = fn(*args, **keywords)
        else:
            out, handles = call_with_handles(fn, args, keywords)
            with _torch.beneath_all_modes():  # as in `_call_first`
                for handle in handles:
                    fill(handle.data)
        if answers:
            compare()  # it saved fewer tensors than the first time
        return out


def call_with_handles(
    fn: Function, args: Args, keywords: Keywords
) -> tuple[PyTree, list[Any]]:
    """Returns the result of ``fn``, and handles on what autograd saved for it."""
    tensors = [x for x in tree.leaves((args, keywords)) if isinstance(x, Tensor)]
    # Looked up before the call, which may move the token on.
    stop = {x.grad_fn for x in tensors}
    if (unit_token := running().token) is not None:
        stop.add(unit_token.latest.grad_fn)
    out = fn(*args, **keywords)
    return out, _torch.saved_handles(nodes_of(out, stop=stop))


def nodes_of(
    out: PyTree, arguments: PyTree = (), stop: Iterable[Node | None] = ()
) -> list[Node]:
    """Returns the autograd nodes from what a function returned to its arguments.

    Args:
        stop: further nodes, at which the walk ends.
    """
    tensors = [x for x in tree.leaves(arguments) if isinstance(x, Tensor)]
    outs = [x for x in tree.leaves(out) if isinstance(x, Tensor)]
    roots = [x.grad_fn for x in outs if x.requires_grad]
    return _torch.graph_nodes(roots, {*stop, *(x.grad_fn for x in tensors)})


class _Saver(torch.autograd.Function):
    """Saves tensors, while its result lives. Its node leads to ``anchor`` alone.

    A node, so that the tensors are freed and checked as what autograd saves, and an
    ``offload`` around finds them. The result is held, not its node: in torch 2.11 and
    2.12 a node loses what it saved when its result dies.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        # Without elements: the memory of `anchor` is not held for it.
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

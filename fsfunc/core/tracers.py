"""Interfaces of what observes steps: ``Tracer``, and ``FirstCalls``, a check of calls.

A `Tracer` stands in the frame while a step is recorded, checked or planned: on tensors
without data, before the step's first real call. The transforms and unit calls tell it
what they do, through its hooks. A `FirstCalls` belongs to one ``shard``. It decides
which real calls are checked before they run.

Both are implemented in ``tracing``, on a floor above, and handed down from there.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
    Set,
)
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.mesh import Here
from fsfunc.core.execution_context import running
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.plain_leaves import WHOLE, placement_of
from fsfunc.tree.types import Args, Keywords, Leaf, PyTree

_T = TypeVar("_T")
Signature: TypeAlias = tuple[Any, ...]  # see `signature`


class UnitCall(Protocol):
    """A unit call, as far as tracers and compilers know it: see `units.Call`."""

    name: str
    path: tuple[str, ...]
    number: int
    numbers: tuple[int, ...]
    unit: Any  # a `units.Unit`


class Tracer:
    """Hooks called while a step is recorded, checked or planned; here they do nothing.

    A frame has at most one: a ``Recorder`` while a state is laid out, a ``Checker``
    while types are checked, an ``Observer`` while a step is planned.

    Attributes:
        complete: whether the whole step runs (planning); otherwise ``donate`` does not
            invalidate its input, and a pipeline may skip its stages.
        draws: whether units seed the generators; fake tensors need no seed.
        forward_only: whether backward passes are skipped; gradients then have only a
            shape.
        fills: whether mutable arguments (a cache) may be written, being copies.
        left_out: the buffers of unit calls that a plan does not run, as they are equal
            to others: the next unit's is the one to prefetch.
    """

    left_out: Set[str] = frozenset()
    complete = False
    draws = False
    forward_only = False
    fills = False

    def replacement_for(self, handler: Any) -> Any:
        """Returns the interpretation to use in place of a transform's own."""
        return handler

    def run_body(
        self, call: UnitCall, params: PyTree, inputs: Args, keywords: Keywords
    ) -> PyTree:
        """Runs a unit's function."""
        fn = self.function_of(call, params, inputs, keywords)
        run_unit_fn = running().run_unit_fn
        fn = fn if run_unit_fn is None else partial(run_unit_fn, fn)
        with internal(False):
            return call.unit.checked(params, inputs, keywords, fn)

    def wrap_call(
        self, call: UnitCall, run: Callable[..., PyTree]
    ) -> Callable[..., PyTree]:
        """Returns the function to run in place of ``run``, which has the transforms."""
        return run

    def wrap_gathered(
        self, call: UnitCall, run: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns the function to run in place of ``run`` on gathered parameters.

        Args:
            run: runs a unit call, under the transforms inside ``shard``, on what
                ``shard`` has gathered for it.
        """
        return run

    def function_of(
        self, call: UnitCall, params: PyTree, inputs: Args, keywords: Keywords
    ) -> Callable[..., Any]:
        """Returns the function that runs for a unit call."""
        return call.unit.fn

    def on_leaf(self, x: Tensor, path: str) -> None:
        """Called with ``x``, which replaces a leaf of the step's first argument."""

    def on_placeholders(
        self, leaves: Sequence[Tensor], placeholders: Sequence[Tensor], aux: PyTree
    ) -> None:
        """Called with placeholders for the gradients with respect to ``leaves``.

        Args:
            aux: the auxiliary outputs of the loss.
        """

    def on_call(
        self, key: Signature | None, args: Args, keywords: Keywords, mean: Sequence[str]
    ) -> None:
        """Called when a sharded function is.

        Args:
            key: the `signature` of its arguments.
            mean: the axes over which the loss is a mean.
        """

    def mark_numbers(self, arguments: _T) -> _T:
        """Returns arguments whose numbers report how a step compares them.

        A step that branches on a number may go another way on another rank.
        """
        return arguments

    def on_return(self, args: Args, out: PyTree) -> None:
        """Called with the arguments and the result of a sharded function."""

    def on_take(self, name: str, leaves: Iterable[Leaf]) -> None:
        """Called with the sharded leaves that ``name``, such as a unit call, takes."""

    def on_gradient(
        self,
        chosen: Sequence[PyTree],
        grads: Sequence[PyTree],
        is_averaged: Callable[[Tensor], bool],
    ) -> None:
        """Called with gradients, before ``shard`` averages them.

        Args:
            chosen: the arguments that are differentiated.
            grads: the gradients, a tree for each argument.
            is_averaged: whether the gradient of a plain leaf becomes the ranks' mean.
        """

    def on_reduced(
        self,
        chosen: Sequence[PyTree],
        grads: Sequence[PyTree],
        of: tuple[Tensor | None, Args, Keywords],
        value: tuple[Tensor, PyTree],
    ) -> None:
        """Called with the gradients and the value when ``shard`` has averaged them.

        Args:
            chosen: the arguments that are differentiated.
            grads: the averaged gradients, a tree for each argument.
            of: the loss of this rank, and the arguments and keywords of the loss.
            value: the averaged loss, and the auxiliary outputs.
        """

    def in_batch(self, leaves: list[Leaf]) -> list[Leaf]:
        """Returns the leaves of a batch, of which plain tensors will be cut."""
        return leaves

    def begin_turn(self, name: str, microbatch: int, stage: int | None = None) -> None:
        """Called as work on a microbatch begins; after the last one with ``name=""``.

        Args:
            name: of the kind of work, such as ``"F"`` of a pipeline's forward.
            stage: of a pipeline in which a rank has several.
        """

    def observe_rounds(self, prefix: str = "") -> RoundObserver | None:
        """Returns the observer of a loop over microbatches; None if every round runs.

        Args:
            prefix: stands before a microbatch's number in the names of messages.
        """
        return None


class RoundObserver(Protocol):
    """Observes a loop over microbatches, and tells it which rounds can be skipped.

    A plan runs a few rounds, sees that they repeat, and notes the others as copies.
    ``begin`` is called before each round, ``end`` after the loop. ``after`` is called
    after each round, and returns how many of the next ones to skip. ``anew`` tells that
    the next round is not like those before. ``stand_in`` returns what stands for ``x``
    in a round ``by`` microbatches later.
    """

    def begin(self, kind: Any, microbatch: int) -> Any: ...
    def after(self, done: Round) -> int: ...
    def anew(self) -> None: ...
    def stand_in(self, x: Tensor, by: int) -> Tensor: ...
    def end(self) -> None: ...


class Carried(NamedTuple):
    """What one object carries on from round to round of a loop.

    Args:
        tensors: always in one order.
        counted: by name, the objects whose ``count`` each round raises.
    """

    tensors: Sequence[Tensor]
    counted: Mapping[Hashable, Any]


@dataclass(frozen=True)
class Round:
    """A round of a loop over microbatches that has ended.

    Args:
        carriers: the objects that the next round goes on with, such as sums of
            gradients; ``carried()`` of each returns a :class:`Carried`.
        state: what else decides what the next round does; two rounds that begin with
            equal states do the same.
        remaining: the number of rounds still to come that do what this one did, if
            they begin in the same state.
        microbatch: the microbatch of the round, or its first one.
        stride: how much ``microbatch`` grows from round to round.
        in_flight: the microbatches whose backward has still to run.
        lasting: tensors of earlier microbatches that live until the loop ends.
    """

    carriers: Sequence[Any]
    state: object
    remaining: int
    microbatch: int
    stride: int = 1
    in_flight: Collection[int] = ()
    lasting: Sequence[Tensor] = ()


class FirstCalls:
    """A check of the first call of each signature; here it checks nothing.

    ``tracing.type_check.TypeCheck`` derives from it.

    Attributes:
        rank_local_paths: the paths of a returned state at which each rank has its own
            value; None until a call has been checked.
        drawing_units: the names of units that draw random numbers outside gradient
            calls.
        ran_without_data: whether the function was run without data since its last real
            call.
    """

    ran_without_data = False

    def __init__(self) -> None:
        self._known: set[tuple[int, Signature | None]] = set()
        self.rank_local_paths: set[str] | None = None
        self.drawing_units: frozenset[str] = frozenset()

    def check(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        at: Here,
        axes: tuple[str, ...],
    ) -> None:
        """Raises where ``call(*args, **keywords)`` has no meaning under ``shard``.

        Args:
            at: the rank that runs.
            axes: the axes over which the loss is a mean.
        """

    def note(
        self,
        rank_local_paths: Iterable[str],
        draws: bool,
        drawing: Iterable[str],
        numbers: bool = False,
    ) -> None:
        """Notes what a check has seen of the step.

        Args:
            rank_local_paths: are added to those of earlier checks.
            draws: whether the step draws from the default generators.
            drawing: names of units, which are added to ``drawing_units``.
            numbers: whether the step combines Python numbers with values that are
                equal on all ranks.
        """
        self.rank_local_paths = (self.rank_local_paths or set()).union(rank_local_paths)
        self.drawing_units |= frozenset(drawing)

    def check_returned(self, out: PyTree) -> None:
        """Raises if a real call returns a tensor of the run that checked it."""

    def compare_whole(
        self,
        chosen: Sequence[PyTree],
        is_whole: Callable[[Tensor], bool],
        where: RankGroup,
    ) -> None:
        """Raises where ranks differentiate unequal values of a replicated leaf."""

    def on_layout(
        self, rank: int, updates: bool, together: Sequence[tuple[tuple[str, ...], str]]
    ) -> None:
        """Called when a state is laid out for the function.

        Args:
            updates: whether the function returns a new state.
            together: the axes whose ranks are given one batch, and why.
        """

    def begin_call(self, batch: PyTree, found: Any) -> AbstractContextManager[Any]:
        """Returns the context in which a call runs, to be given to `compare_state`.

        Raises where ranks that must be given one ``batch`` are not.

        Args:
            found: the frame that the call will run in.
        """
        return nullcontext()

    def compare_state(
        self,
        f: Callable[..., Any],
        found: Any,
        given: tree.TreeDef | None,
        out: PyTree,
        call: AbstractContextManager[Any],
    ) -> None:
        """Raises where ranks make or return unequal values of what is one value.

        Args:
            f: the step.
            found: the frame that it ran in.
            given: the structure of the state that it was given.
            out: what it returned.
            call: what `begin_call` returned.
        """

    def was_checked(self, rank: int, key: Signature | None = None) -> bool:
        """Returns whether the signature ``key`` was checked; without one, any."""
        if key is None:
            return bool(self._known)
        return (rank, key) in self._known or (rank, key[0]) in self._known

    def mark_checked(self, rank: int, keys: Iterable[Signature | None]) -> None:
        """Marks calls of these signatures as checked."""
        self._known.update((rank, key) for key in keys)


def signature(leaves: Sequence[Leaf], treedef: tree.TreeDef) -> Signature:
    """Returns a key of a call by its arguments: structure, kinds and shapes of leaves.

    Its first item is a key for batches of any shape. `mark_checked` with that item
    alone marks calls of all shapes. It has the structure, the truth values, the kinds
    of leaves that are no numbers, and the tensors that are not replicated or have no
    values.
    """
    kinds: list[Any] = list(map(_kind, filter(is_sharded, leaves)))
    marks: list[Any] = []
    for i, x in enumerate(leaves):
        if type(x) is Sharded:  # most leaves are: their kinds were taken above, in C
            continue
        if isinstance(x, Tensor):
            placement = placement_of(x)
            kinds.append((i, x.shape, x.dtype, x.requires_grad, placement))
            if placement != WHOLE or x.is_meta:
                marks.append((i, placement, x.is_meta))
        elif not is_sharded(x):
            # Not `type(x)`: what stands for a number in a recording has its class here.
            kind = x.__class__
            kinds.append((i, kind))
            # A number may differ from call to call; True and False are two programs.
            if kind not in _NUMBERS:
                marks.append(x if kind is bool else kind)
    return (treedef, *marks), *kinds


_NUMBERS: set[type] = {int, float, complex, str}
_kind = attrgetter("layout.shape", "layout.dtype")  # of a sharded leaf

"""Interfaces of what observes steps: ``Tracer``, and ``FirstCalls``, a check of calls.

Both are implemented in ``tracing``, and handed to ``shard`` and the frame from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.mesh import Here
from fsfunc.core.execution_context import running
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.plain_leaves import WHOLE, laid_as


class Tracer:
    """Hooks called while a step is recorded, checked or planned; here they do nothing.

    A frame has at most one: a ``Recorder`` while a state is laid out, a ``Checker``
    while types are checked, an ``Observer`` while a step is planned.

    Attributes:
        complete: whether the whole step runs (planning); otherwise ``donate`` does not
            invalidate its input, and a pipeline may skip its stages.
        draws: whether units seed the generators, which fake tensors do not need.
        forward_only: whether backward is skipped; gradients then have only a shape.
        fills: whether mutable arguments (a cache) may be written, being copies.
    """

    complete = False
    draws = False
    forward_only = False
    fills = False

    def standing_for(self, handler: Any) -> Any:
        """The interpretation to use in place of a transform's own."""
        return handler

    def body(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """Runs a unit's function."""
        fn, around = self.function(call, params, inputs, keywords), running().around
        fn = fn if around is None else partial(around, fn)
        with internal(False):
            return call.unit.checked(params, inputs, keywords, fn)

    def within(self, call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which runs a unit call with what `shard` has gathered for it."""
        return run

    def function(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """The function that runs for a unit call."""
        return call.unit.fn

    def know(self, x: Tensor, path: str) -> None:
        """Called with ``x``, which replaces a leaf of the step's first argument."""

    def gradients(
        self, leaves: Sequence[Tensor], found: Sequence[Tensor], aux: Any
    ) -> None:
        """Called with placeholders for the gradients with respect to ``leaves``.

        Args:
            aux: the auxiliary outputs of the loss.
        """

    def called(self, key: Any, args: Any, keywords: Any, mean: Sequence[str]) -> None:
        """Called when a sharded function is.

        Args:
            key: the `signature` of its arguments; ``mean``: the axes of the mean.
        """

    def heard(self, values: Any) -> Any:
        """The arguments of a sharded function, whose numbers tell how they compare."""
        return values

    def returned(self, args: Any, out: Any) -> None:
        """Called with the arguments and the result of a sharded function."""

    def takes(self, name: str, leaves: Iterable[Any]) -> None:
        """Called with the sharded leaves that ``name``, such as a unit call, takes."""

    def gradient(self, by: Any, found: Any, averaged: Callable[[Tensor], bool]) -> None:
        """Called with a gradient, before ``shard`` averages it.

        Args:
            by: the arguments that are differentiated; ``found``: their gradients.
            averaged: whether the gradient of a plain leaf becomes the ranks' mean.
        """

    def reduced(self, by: Any, grads: Any, of: Any, value: Any) -> None:
        """Called with the gradients and the value when ``shard`` has averaged them.

        Args:
            by: the arguments that are differentiated.
            of: the value before that, and the arguments of its function.
        """

    def in_batch(self, leaves: list[Any]) -> list[Any]:
        """Leaves of which a transform cuts the plain tensors into microbatches."""
        return leaves

    def turn(self, name: str, microbatch: int, stage: int | None = None) -> None:
        """Called as work on a microbatch begins; after the last, ``name`` is "".

        ``stage``: of a pipeline, where a rank has several.
        """

    def rounds(self, named: str = "") -> Any:
        """The observer of a loop over microbatches.

        ``named``: what comes before a microbatch's number in the names of messages.

        Its ``begin`` is called before each, and its ``after`` with each :class:`Round`,
        which returns how many of the next ones can be skipped. None: none of them.
        """
        return None


class Carried(NamedTuple):
    """What a loop hands on from round to round.

    Args:
        tensors: always in one order.
        counted: by name, the objects whose ``count`` each round raises.
    """

    tensors: Sequence[Tensor]
    counted: Mapping[Hashable, Any]


@dataclass(frozen=True)
class Round:
    """A round of a loop over microbatches, which is over.

    Args:
        handed: what the loop hands on to the next round; ``carried()`` of each gives
            a :class:`Carried`.
        state: whatever else decides what that will do.
        left: how many more rounds there are that do what this one did if they find what
            it found.
        microbatch: of the round; ``by``: how much that grows from round to round.
        flying: the microbatches in flight; ``stays``: what others have left, until the
            loop ends.
    """

    handed: Sequence[Any]
    state: object
    left: int
    microbatch: int
    by: int = 1
    flying: Collection[int] = ()
    stays: Sequence[Tensor] = ()


class FirstCalls:
    """A check of the first call of each signature; here it checks nothing.

    ``tracing.type_check.TypeCheck`` derives from it.

    Attributes:
        own_paths: the paths of a returned state at which each rank has its own value;
            None until a call has been checked.
        drawing: the names of units that draw random numbers outside gradient calls.
        ran: whether the function was run without data since its last real call.
    """

    ran = False

    def __init__(self) -> None:
        self._known: set[Any] = set()
        self.own_paths: set[str] | None = None
        self.drawing: frozenset[str] = frozenset()

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
            at: the rank; ``axes``: those over which the loss is a mean.
        """

    def note(
        self,
        own_paths: Iterable[str],
        draws: bool,
        drawing: Iterable[str],
        numbers: bool = False,
    ) -> None:
        """Notes what a check has seen of the step.

        Args:
            own_paths, drawing: are added to the attributes.
            draws: whether the default generators are drawn of.
            numbers: whether it combines numbers with what is one value.
        """
        self.own_paths = (self.own_paths or set()).union(own_paths)
        self.drawing |= frozenset(drawing)

    def check_returned(self, out: Any) -> None:
        """Raises if a real call returns a tensor of the run that checked it."""

    def compare_whole(
        self, chosen: Sequence[Any], is_whole: Callable[[Tensor], bool], where: Any
    ) -> None:
        """Raises where ranks differentiate unequal values of a replicated leaf."""

    def laid_out(self, rank: int, updates: bool, together: Any) -> None:
        """Called when a state is laid out for the function.

        Args:
            updates: whether the function returns a new state.
            together: the axes whose ranks are given one batch, and why.
        """

    def begins(self, batch: Any, found: Any) -> Any:
        """The call that begins: it runs in this context, for `compare_state`.

        Raises where ranks that must be given one ``batch`` are not.

        Args:
            found: the frame that it will run in.
        """
        return nullcontext()

    def compare_state(self, f: Any, found: Any, given: Any, out: Any, call: Any):
        """Raises where ranks make or return unequal values of what is one value.

        Args:
            f: the step; ``found``: the frame that it ran in; ``call``: what `begins`
                returned.
            given: the structure of the state it was given; ``out``: what it returned.
        """

    def knows(self, rank: int, key: Any = None) -> bool:
        """True if the signature ``key`` was checked; without one, if any was."""
        if key is None:
            return bool(self._known)
        return (rank, key) in self._known or (rank, key[0]) in self._known

    def learn(self, rank: int, keys: Iterable[Any]) -> None:
        """Marks calls of these signatures as checked."""
        self._known.update((rank, key) for key in keys)


def signature(leaves: Sequence[Any], treedef: tree.TreeDef) -> Any:
    """A key of a call by the leaves of its arguments: structure, kinds and shapes.

    Its first item is the key for batches of any shape: structure, truth values, kinds
    of leaves that are no numbers, and tensors that are split or without values.
    """
    kinds: list[Any] = list(map(_kind, filter(is_sharded, leaves)))
    marks = []
    for i, x in enumerate(leaves):
        if type(x) is Sharded:
            continue
        if isinstance(x, Tensor):
            kinds.append((i, x.shape, x.dtype, x.requires_grad, how := laid_as(x)))
            if how != WHOLE or x.is_meta:
                marks.append((i, how, x.is_meta))
        elif not is_sharded(x):
            kind = x.__class__  # of a number that stands for one
            kinds.append((i, kind))
            if kind not in _NUMBERS:
                marks.append(x if kind is bool else kind)
    return (treedef, *marks), *kinds


_NUMBERS = {int, float, complex, str}
_kind = attrgetter("layout.shape", "layout.dtype")  # of a sharded leaf

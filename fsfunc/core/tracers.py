"""Hooks while a step is recorded, tried or planned; the check of a first call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.mesh import Here
from fsfunc.core.execution_context import running
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import Own
from fsfunc.sharded.plain_leaves import laid_as


class Tracer:
    """Hooks while a step runs to be recorded, tried or planned; here they do nothing.

    A frame has one at most: a ``Recorder`` while a state is laid out, a ``Checker``
    while a step is tried, an ``Observer`` while one is planned.

    complete: whether the whole step runs (planning); otherwise ``donate`` does not
        invalidate its input, and a pipeline may skip its stages.
    draws: whether units seed the generators: needless for fake tensors.
    forward_only: whether backward is skipped; gradients then have only a shape.
    fills: whether mutable arguments (a cache) may be written: they are copies.
    """

    complete = False
    draws = False
    forward_only = False
    fills = False

    def standing_for(self, handler: Any) -> Any:
        """The interpretation that a transform comes to meanwhile."""
        return handler

    def body(self, call: Any, params: Any, inputs: Any, keywords: Any) -> Any:
        """Runs a unit's function."""
        fn, around = call.unit.fn, running().around
        fn = fn if around is None else partial(around, fn)
        with internal(False):
            return call.unit.checked(params, inputs, keywords, fn)

    def know(self, x: Tensor, path: str) -> None:
        """Hears that ``x`` is in place of a leaf of the step's first argument."""

    def gradients(self, leaves: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Hears that ``found`` stand in place of the gradients by ``leaves``."""

    def called(self, key: Any, args: Any, keywords: Any, mean: Sequence[str]) -> None:
        """Hears that a sharded function is called.

        Args:
            key: on what kinds of things; ``mean``: the axes over which it averages.
        """

    def returned(self, args: Any, out: Any) -> None:
        """Hears what a sharded function was given and returns, as it ends."""

    def takes(self, name: str, leaves: Iterable[Any]) -> None:
        """Hears that ``name``, such as a unit call, takes sharded leaves."""

    def gradient(self, by: Any, found: Any, averaged: Callable[[Tensor], bool]) -> None:
        """Hears that ``found`` is the gradient by the tree ``by``.

        Args:
            averaged: whether the gradient by a plain leaf becomes the ranks' mean.
        """

    def reduced(self, by: Any, grads: Any, of: Any, value: Any) -> None:
        """Hears that ``grads``, by the tree ``by``, and ``value`` are means by now.

        Args:
            of: what the gradient is of, and what its function was given.
        """

    def turn(self, name: str, microbatch: int) -> None:
        """Hears that the work on a microbatch begins; ``name`` is "" after the last."""

    def rounds(self) -> Any:
        """The observer of a loop's rounds, which may note some of them unrun, or None.

        ``after(carried, how, left)`` hears of each, and returns how many.
        """
        return None


class FirstCalls:
    """Remembers which calls were checked; this one lets all of them pass.

    The check of types derives from it (``tracing.type_check.TypeCheck``).
    ``own_paths``: those of a returned state at which each rank has a value of its own;
    None as long as no call was checked.
    """

    def __init__(self) -> None:
        self._known: set[Any] = set()
        self.own_paths: set[str] | None = None

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

    def note_own(self, paths: Iterable[str]) -> None:
        """Notes paths of a returned state at which each rank has its own value."""
        self.own_paths = (self.own_paths or set()).union(paths)

    def check_returned(self, out: Any) -> None:
        """Raises where a real call returns what it made as it was checked."""

    def compare_whole(
        self, chosen: Sequence[Any], is_whole: Callable[[Tensor], bool], where: Any
    ) -> None:
        """Raises where ranks differentiate unequal values of a replicated leaf."""

    def compare_state(
        self, f: Any, handlers: Any, args: tuple[Any, ...], out: Any, at: Here
    ) -> None:
        """Raises where a first step makes ranks differ along axes that nothing names.

        Args:
            f: the step; ``handlers``: the transforms around it.
        """

    def knows(self, rank: int, key: Any = None) -> bool:
        """True if a call was checked, or needs no check.

        Without a ``key``, whether any was.
        """
        if key is None:
            return bool(self._known)
        return (rank, key) in self._known or (rank, key[0]) in self._known

    def learn(self, rank: int, keys: Iterable[Any]) -> None:
        """Marks calls of these signatures as checked."""
        self._known.update((rank, key) for key in keys)


def signature(args: Any, keywords: Any) -> Any:
    """A key of a call's arguments: structure, shapes, dtypes.

    First what does so for batches of any shape: structure, and what is true or false.
    """
    leaves, treedef = tree.flatten((args, keywords), is_leaf=is_sharded)
    kinds: list[Any] = [treedef]
    truths: list[bool] = []
    own: list[int] = []
    for x in leaves:
        if isinstance(x, Tensor):
            kinds.append((x.shape, x.dtype, x.requires_grad, how := laid_as(x)))
            if isinstance(how, Own):
                own.append(len(kinds))
        elif is_sharded(x):
            kinds.append((x.layout.shape, x.layout.dtype))
        else:
            kinds.append(type(x))
            if isinstance(x, bool):
                truths.append(x)
    kinds[0] = (treedef, *truths, *own)
    return tuple(kinds)

"""The check of a sharded function's first call with arguments of new shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.comparison import Lines
from fsfunc.comm.mesh import Here
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.rank_local import is_rank_local

__all__ = ["FirstCalls", "signature"]


class FirstCalls:
    """Remembers which calls were checked; this one lets all of them pass.

    The check of types derives from it (``tracing.type_check.TypeCheck``). By rank,
    ``claims``: the lines of a checked step that are the same on all of them.
    ``rank_local``: the paths of the returned state that each rank has for itself.
    """

    def __init__(self) -> None:
        self._known: set[Any] = set()
        self.claims: dict[int, Lines] = {}
        self.rank_local: set[str] = set()

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

    def check_returned(self, out: Any) -> None:
        """Raises where a real call returns what it made as it was checked."""

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
    for x in leaves:
        if isinstance(x, Tensor):
            kinds.append((x.shape, x.dtype, x.requires_grad, is_rank_local(x)))
        elif is_sharded(x):
            kinds.append((x.layout.shape, x.layout.dtype))
        else:
            kinds.append(type(x))
            if isinstance(x, bool):
                truths.append(x)
    kinds[0] = (treedef, *truths)
    return tuple(kinds)

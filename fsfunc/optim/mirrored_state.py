"""Pieces of an optimizer's state, each for some leaves of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded

__all__ = ["MirroredState"]


class MirroredState:
    """A state, and which trees in it are like the parameters, leaf by leaf.

    A piece of it has ``{path: leaf}`` in place of each such tree, and all else as it
    is: what the optimizer's ``init`` would have made of a dict of these parameters.

    Args:
        state: the optimizer's.
        leaves, treedef, paths: of the parameters.
    """

    def __init__(
        self, state: Any, leaves: Sequence[Any], treedef: Any, paths: Sequence[str]
    ):
        self.treedef, self.paths = treedef, paths

        def column(x: Any) -> list[Any] | None:
            """The leaves of a tree like the parameters, None where they have none."""
            if treedef.type is not None and type(x) is not treedef.type:
                return None  # to find that out of a state is dear: all of it is said
            try:
                found = treedef.flatten_up_to(x)
            except ValueError:
                return None
            pairs = zip(found, leaves, strict=True)
            return found if all(c is None or _like(c, p) for c, p in pairs) else None

        def ends(x: Any) -> bool:
            return is_sharded(x) or column(x) is not None

        self.given, self.spec = tree.flatten(state, ends)
        columns = [column(x) for x in self.given]
        self.columns = [None if c is None else list(c) for c in columns]  # after it
        self.before = columns
        self.after = list(self.given)  # of what is like no parameters

    def part(self, positions: Sequence[int]) -> Any:
        """The piece of the leaves at ``positions``."""
        items = []
        for x, column in zip(self.given, self.before, strict=True):
            if column is not None:
                x = {self.paths[i]: column[i] for i in positions}
            items.append(x)
        return tree.unflatten(self.spec, items)

    def take(self, positions: Sequence[int], piece: Any) -> None:
        """Takes in what has become of the piece at ``positions``."""
        found = self.spec.flatten_up_to(piece)
        for k, (x, column) in enumerate(zip(found, self.columns, strict=True)):
            if column is None:
                self.after[k] = x
                continue
            for i in positions:
                column[i] = x[self.paths[i]]

    def whole(self) -> Any:
        """The state after all pieces."""
        items = []
        for x, column in zip(self.after, self.columns, strict=True):
            items.append(x if column is None else tree.unflatten(self.treedef, column))
        return tree.unflatten(self.spec, items)


def _like(x: Any, leaf: Any) -> bool:
    """True if a leaf of a state may be one for each element of a parameter."""
    if is_sharded(leaf) != is_sharded(x) or not (
        is_sharded(x) or isinstance(x, Tensor)
    ):
        return False
    return tuple(x.shape) == tuple(leaf.shape)

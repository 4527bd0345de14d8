"""Process groups of a packed buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsfunc.comm.groups import RankGroup, group

__all__ = ["BufferGroups", "GroupTable"]


class BufferGroups(NamedTuple):
    """The groups that a buffer is gathered from and its gradient reduced over.

    Args:
        where: the ranks over which it is cut.
        replicas: those that have a copy of this rank's range.
        blocks: those of the mean that have other blocks of its leaves.
    """

    where: RankGroup | None
    replicas: RankGroup | None
    blocks: RankGroup | None = None


class GroupTable(dict[tuple[str, ...], BufferGroups]):
    """The groups of a buffer, by the axes over which its leaves are split.

    Where these are among the axes of ``shard``, as those of experts are, it is the
    ranks that have the same block. Made in the forward pass: a backward has no mesh in
    reach.
    """

    def __init__(self, where: RankGroup, replicas: RankGroup | None):
        self.where, self.replicas = where, replicas
        self[()] = BufferGroups(where, replicas)

    def __missing__(self, split_axes: tuple[str, ...]) -> BufferGroups:
        copies = () if self.replicas is None else self.replicas.axis
        blocks = [a for a in (*copies, *self.where.axis) if a in split_axes]
        found = self[split_axes] = BufferGroups(
            _without(self.where, split_axes),
            _without(self.replicas, split_axes),
            group(tuple(blocks)) if blocks else None,
        )
        return found


def _without(where: RankGroup | None, axes: Sequence[str]) -> RankGroup | None:
    """The ranks of a group that differ along none of these axes."""
    if where is None or not set(where.axis) & set(axes):
        return where
    rest = tuple(axis for axis in where.axis if axis not in axes)
    return group(rest) if rest else None

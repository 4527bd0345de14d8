"""Whom a buffer goes to: ranks that cut it, copy it, or hold other blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fsfunc.comm.groups import RankGroup, group

__all__ = ["Route", "Routes"]


class Route(NamedTuple):
    """Whom a buffer's ranges go to.

    Args:
        where: the ranks over which it is cut.
        replicas: those that have a copy of this rank's range.
        apart: those of the mean that have other blocks of its leaves.
    """

    where: RankGroup | None
    replicas: RankGroup | None
    apart: RankGroup | None = None


class Routes(dict[tuple[str, ...], Route]):
    """Whom to gather a buffer from, by the axes over which its leaves are split.

    Where these are among our axes, as those of experts are, it is the ranks that have
    the same block. Made in the forward pass: a backward has no mesh in reach.
    """

    def __init__(self, where: RankGroup, replicas: RankGroup | None):
        self[()] = Route(where, replicas)

    def __missing__(self, split_axes: tuple[str, ...]) -> Route:
        where, replicas, _ = self[()]
        means = (*(() if replicas is None else replicas.axis), *where.axis)  # type: ignore[union-attr]
        apart = tuple(axis for axis in means if axis in split_axes)
        found = self[split_axes] = Route(
            _without(where, split_axes),
            _without(replicas, split_axes),
            group(apart) if apart else None,
        )
        return found


def _without(where: RankGroup | None, axes: Sequence[str]) -> RankGroup | None:
    """The ranks of a group that differ along none of these axes."""
    if where is None or not set(where.axis) & set(axes):
        return where
    rest = tuple(axis for axis in where.axis if axis not in axes)
    return group(rest) if rest else None

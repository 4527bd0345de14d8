"""Whole matrices, each on the rank that owns it, of leaves that lie in parts.

What reduces over the rows and columns of a matrix needs all of it at one place. Of the
ranks that hold parts of a matrix one owns it: the parts come to it, all matrices in one
exchange, and what it makes of the matrix goes back in parts, in another. Who owns what
follows from the layouts and the cost of a matrix alone, so all ranks know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.linear_maps import Sizes
from fsfunc.comm.mesh import averaged_axes, here
from fsfunc.sharded.layout import Layout, every_coordinate
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import Owned, Placement
from fsfunc.sharded.slices import assemble

Cost = Callable[[tuple[int, ...]], float]  # of a matrix of this shape
Axes = tuple[tuple[str, int], ...]


def balanced(
    costs: Sequence[float], held: Sequence[Sequence[int]], n: int
) -> tuple[int, ...]:
    """An owner for each of some matrices, so that ``n`` ranks have about equal costs.

    The costliest first, each to the rank with the least so far: at most 4/3 of the best
    there is. Of matrices that cost the same, each goes to the rank that holds most of
    it, as far as that leaves the costs as they are.

    Args:
        costs: of each matrix.
        held: by matrix and rank, how many elements are there already.

    Source: Graham, Bounds on multiprocessing timing anomalies, 1969.

    >>> balanced([1, 1, 1, 1, 8], [[6, 0], [6, 0], [0, 6], [0, 6], [3, 3]], 2)
    (1, 1, 1, 1, 0)
    >>> balanced([1, 1, 1, 1], [[6, 0], [4, 2], [0, 6], [0, 6]], 2)
    (0, 0, 1, 1)
    """
    load, slots = [0.0] * n, {cost: [0] * n for cost in costs}
    for cost in sorted(costs, reverse=True):
        rank = min(range(n), key=load.__getitem__)
        load[rank] += cost
        slots[cost][rank] += 1
    owners = [-1] * len(costs)
    ranks = range(n)
    pairs = ((-held[i][r], i, r) for i in range(len(costs)) for r in ranks)
    for _, i, r in sorted(pairs):
        if owners[i] < 0 and slots[costs[i]][r]:
            owners[i] = r
            slots[costs[i]][r] -= 1
    return tuple(owners)


@dataclass(frozen=True)
class Owners:
    """The rank, along some axes, that has each of some matrices whole: data.

    Args:
        layouts: how the matrices lie.
        axes: the axes of the ranks that share them, and their sizes.
        copies: those of them along which every rank holds the same.
        fixed: the coordinates on other axes of the layouts.
        owner: of each matrix the index of its owner along the axes.
    """

    layouts: tuple[Layout, ...]
    axes: Axes
    copies: tuple[str, ...]
    fixed: tuple[tuple[str, int], ...]
    owner: tuple[int, ...]

    @cached_property
    def points(self) -> list[dict[str, int]]:
        """The coordinates of each rank along the axes."""
        return _points(self.axes, self.fixed)

    @cached_property
    def spans(self) -> list[list[tuple[int, int]]]:
        """By matrix and rank: what it holds, in the flattening of its block."""
        return [[layout.span(at) for at in self.points] for layout in self.layouts]

    @cached_property
    def counts(self) -> list[list[int]]:
        """By matrix and rank: how many elements it holds."""
        return [[stop - start for start, stop in row] for row in self.spans]

    @cached_property
    def owned(self) -> list[list[int]]:
        """By rank: the matrices that it owns."""
        by_rank: list[list[int]] = [[] for _ in self.points]
        for i, rank in enumerate(self.owner):
            by_rank[rank].append(i)
        return by_rank

    @cached_property
    def serves(self) -> list[list[bool]]:
        """By sender and owner: whether the sender's parts are those that it takes.

        Of ranks that hold copies only those in the owner's copy send.
        """
        beside = [tuple(at[axis] for axis in self.copies) for at in self.points]
        return [[a == b for b in beside] for a in beside]

    @cached_property
    def inward(self) -> Sizes:
        """Elements of matrices on the way to their owners, by sender and owner.

        What an owner holds itself goes nowhere.
        """
        return self._sizes(
            lambda s, d: self.owned[d] if self.serves[s][d] else [], lambda s, d: s
        )

    @cached_property
    def outward(self) -> Sizes:
        """Elements on the way back, by owner and receiver: to all that hold a part."""
        return self._sizes(lambda s, d: self.owned[s], lambda s, d: d)

    def _sizes(self, which: Callable[..., list[int]], whose: Callable[..., int]):
        ranks = range(len(self.points))
        return tuple(
            tuple(
                sum(self.counts[i][whose(s, d)] for i in which(s, d)) if s != d else 0
                for d in ranks
            )
            for s in ranks
        )

    def joined(self, i: int, parts: Mapping[int, Tensor]) -> Tensor:
        """Matrix ``i`` of its parts, 1-D, by sender."""
        layout = self.layouts[i]
        if layout.splits:
            points = [(self.points[s], parts[s]) for s in parts]
            return assemble(
                [(at, x.view(layout.local_shape(at))) for at, x in points], layout
            )
        order = sorted(
            (s for s in parts if self.counts[i][s]), key=self.spans[i].__getitem__
        )
        pieces = [parts[s] for s in order]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole.view(layout.shape)


def _points(axes: Axes, fixed: Sequence[tuple[str, int]]) -> list[dict[str, int]]:
    return [{**dict(fixed), **at} for at in every_coordinate(dict(axes))]


@lru_cache(maxsize=64)  # a step asks for the same one every time
def owners_of(
    layouts: tuple[Layout, ...],
    axes: Axes,
    copies: tuple[str, ...],
    fixed: tuple[tuple[str, int], ...],
    cost: Cost,
    owner: tuple[int, ...] | None = None,
) -> Owners:
    """The owners of matrices: those that are given, or balanced ones; see `Owners`."""
    if owner is not None:
        return Owners(layouts, axes, copies, fixed, owner)
    points = _points(axes, fixed)
    held = [[b - a for a, b in map(layout.span, points)] for layout in layouts]
    owner = balanced([cost(x.shape) for x in layouts], held, len(points))
    return Owners(layouts, axes, copies, fixed, owner)


def ranks_of(leaf: Any, share: bool) -> tuple[Axes, tuple[str, ...], Any]:
    """The axes of the ranks that share a matrix, those of copies, and fixed ones."""
    if not is_sharded(leaf):
        return (), (), ()
    layout = leaf.layout
    owned = {part.axis: part.coordinate for part in layout.owned}
    held = {a: n for a, n in layout.sizes.items() if a not in owned}
    more = [a for a in averaged_axes() if share and a not in layout.axes]
    if all(n == 1 for n in held.values()) and not more:
        return (), (), tuple((a, owned.get(a, 0)) for a in layout.axes)
    at = here()
    sizes = {a: held.get(a, n) for a, n in at.mesh.axes.items() if a in {*held, *more}}
    axes = tuple((a, n) for a, n in sizes.items() if n > 1)
    mine = {**at.mesh.coordinates(at.rank), **owned}
    fixed = tuple((a, mine.get(a, 0)) for a in layout.axes if sizes.get(a, 1) == 1)
    return axes, tuple(a for a, _ in axes if a in more), fixed


def index_of(leaf: Any, where: tuple[Placement, ...], axes: Axes, what: str) -> int:
    """The index along the axes of an owner that is given."""
    layout = layout_of(leaf)
    at = {p.axis: (p.size, p.coordinate) for p in where if isinstance(p, Owned)}
    mine = {p.axis: (p.size, p.coordinate) for p in layout.owned}
    along = {axis: n for axis, (n, _) in at.items() if axis not in mine}
    if len(at) < len(where) or along != dict(axes) or not mine.items() <= at.items():
        raise ValueError(
            f"{what}: the state of {layout.subject} is laid out as {list(where)}, the "
            f"matrix along {dict(axes)}: make it by optimizer.init of these "
            "parameters, or load it (ff.load) into a state made so"
        )
    index = 0
    for axis, n in axes:
        index = index * n + at[axis][1]
    return index


def layout_of(leaf: Any) -> Layout:
    """The layout of a leaf; a plain tensor lies whole."""
    if is_sharded(leaf):
        return leaf.layout
    return Layout(tuple(leaf.shape), leaf.dtype)

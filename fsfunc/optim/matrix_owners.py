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

from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import claim, issue
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.linear_maps import LinearMap, Sizes
from fsfunc.comm.mesh import asks, averaged_axes, here
from fsfunc.sharded.layout import Layout, every_coordinate
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.slices import assemble, take

__all__ = ["Cost", "MatrixExchange", "Owners", "balanced"]

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
    """Which rank along some axes has each of some matrices whole: data.

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

        Of ranks that hold the same only those beside the owner send.
        """
        beside = [tuple(at[axis] for axis in self.copies) for at in self.points]
        return [[a == b for b in beside] for a in beside]

    @cached_property
    def inward(self) -> Sizes:
        """Elements of matrices on the way to their owners, by sender and owner."""
        ranks = range(len(self.points))
        return tuple(
            tuple(
                sum(self.counts[i][s] for i in self.owned[d])
                if self.serves[s][d]
                else 0
                for d in ranks
            )
            for s in ranks
        )

    @cached_property
    def outward(self) -> Sizes:
        """Elements on the way back, by owner and receiver: to all that hold a part."""
        ranks = range(len(self.points))
        return tuple(
            tuple(sum(self.counts[i][d] for i in self.owned[s]) for d in ranks)
            for s in ranks
        )

    def senders(self, i: int) -> list[int]:
        """Who sends a part of matrix ``i``, in the order of their indices."""
        return [s for s in range(len(self.points)) if self.serves[s][self.owner[i]]]

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
def _owners(
    layouts: tuple[Layout, ...],
    axes: Axes,
    copies: tuple[str, ...],
    fixed: tuple[tuple[str, int], ...],
    cost: Cost,
) -> Owners:
    points = _points(axes, fixed)
    held = [[b - a for a, b in map(layout.span, points)] for layout in layouts]
    owner = balanced([cost(x.shape) for x in layouts], held, len(points))
    return Owners(layouts, axes, copies, fixed, owner)


@dataclass(frozen=True)
class _Bucket:
    """Matrices that the same ranks share; ``where``: those ranks, if several."""

    positions: list[int]
    owners: Owners
    where: RankGroup | None

    @property
    def index(self) -> int:
        return 0 if self.where is None else self.where.index


class MatrixExchange:
    """The way of some leaves, matrices all, to their owners and back.

    Args:
        leaves: the parameters, plain or sharded; a plain one is every rank's own.
        cost: what a matrix costs its owner.
        share: whether ranks that hold the same, along axes of the ``shard`` around,
            share the work too. Their parts must be equal, and stay undifferentiated.
        what: who asks, for ledgers and messages.
    """

    def __init__(self, leaves: Sequence[Any], cost: Cost, share: bool, what: str):
        self.leaves, self.what = leaves, what
        found: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            key = self._ranks(leaf, share)
            if key is not None and leaf.numel():
                found.setdefault((*key, leaf.device), []).append(i)
        self.buckets: list[_Bucket] = []
        for (axes, copies, fixed, _), positions in found.items():
            layouts = tuple(_layout(leaves[i]) for i in positions)
            owners = _owners(layouts, axes, copies, fixed, cost)
            where = group(tuple(a for a, _ in axes)) if axes else None
            if where is not None and where.link.level is not None:
                raise ValueError(
                    f"{what} on a vmap mesh: its ranks own other matrices each, and "
                    "there they all run as one program; use a simulated mesh"
                )
            self.buckets.append(_Bucket(positions, owners, where))

    def _ranks(self, leaf: Any, share: bool) -> Any:
        """(the axes of the ranks that share a matrix, those of copies, fixed ones).

        None where this rank has nothing to do with it.
        """
        if not is_sharded(leaf):
            return (), (), ()
        layout = leaf.layout
        elsewhere = {part.axis for part in layout.owned}
        held = [a for a, n in layout.sizes.items() if n > 1 and a not in elsewhere]
        copies = set(averaged_axes()) - set(layout.axes) if share else set()
        if not (held or copies or elsewhere):
            return (), (), tuple((axis, 0) for axis in layout.axes)
        at = here()
        mine = at.mesh.coordinates(at.rank)
        if elsewhere and layout.block(mine) is None:
            return None
        sizes = {**at.mesh.axes, **layout.sizes}
        order = [a for a in at.mesh.axes if a in held or a in copies]
        axes = tuple((a, sizes[a]) for a in order if sizes[a] > 1)
        taken = {a for a, _ in axes}
        fixed = tuple((a, mine[a]) for a in layout.axes if a not in taken)
        return axes, tuple(a for a in order if a in copies and a in taken), fixed

    def owns(self, i: int) -> bool:
        """Whether this rank has matrix ``i`` whole."""
        return any(
            i in b.positions and b.owners.owner[b.positions.index(i)] == b.index
            for b in self.buckets
        )

    def map(
        self,
        parts: Sequence[Tensor],
        fn: Callable[[dict[int, Tensor]], dict[int, Tensor]],
    ) -> list[Tensor]:
        """The parts of what ``fn`` makes of the matrices, whose parts are given.

        Args:
            parts: of each leaf, what this rank holds; all of one dtype.
            fn: from the matrices that this rank owns, by position, to what goes back:
                matrices of the same shapes, of the dtype of the parts.

        Cost: over each group of ranks two all-to-alls, in which an element goes at most
        once to its owner, and once to each rank that holds it.
        """
        out = list(parts)
        for bucket in self.buckets:
            if bucket.where is not None:
                asks(bucket.where.axis)
            with label("", self.what):
                wholes = self._gathered(bucket, parts)
                made = fn({bucket.positions[k]: x for k, x in wholes.items()})
                back = {k: made[bucket.positions[k]] for k in wholes}
                pieces = self._scattered(bucket, back, parts)
            for k, i in enumerate(bucket.positions):
                out[i] = pieces[k].view(parts[i].shape)
        return out

    def _gathered(self, bucket: _Bucket, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        owners, me = bucket.owners, bucket.index
        for k in bucket.positions if owners.copies else ():
            claim(parts[k], self.what)
        sent = [
            parts[bucket.positions[k]].reshape(-1)
            for rank, owned in enumerate(owners.owned)
            if owners.serves[me][rank]
            for k in owned
        ]
        arrived = self._moved(sent, owners.inward, bucket, parts)
        pieces: dict[int, dict[int, Tensor]] = {k: {} for k in owners.owned[me]}
        senders = [s for s in range(len(arrived)) if owners.serves[s][me]]
        for s in senders:
            cuts = arrived[s].split([owners.counts[k][s] for k in owners.owned[me]])
            for k, piece in zip(owners.owned[me], cuts, strict=True):
                pieces[k][s] = piece
        return {k: owners.joined(k, found) for k, found in pieces.items()}

    def _scattered(
        self, bucket: _Bucket, made: dict[int, Tensor], parts: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        owners, me = bucket.owners, bucket.index
        rows = {k: x.contiguous() for k, x in made.items()}
        sent = [
            take(rows[k], owners.layouts[k], at).reshape(-1)
            for at in owners.points
            for k in owners.owned[me]
        ]
        arrived = self._moved(sent, owners.outward, bucket, parts)
        pieces: dict[int, Tensor] = {}
        for s, owned in enumerate(owners.owned):
            cuts = arrived[s].split([owners.counts[k][me] for k in owned])
            pieces.update(zip(owned, cuts, strict=True))
        return pieces

    def _moved(
        self, sent: list[Tensor], sizes: Sizes, bucket: _Bucket, parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """By sender, what arrives here, where every rank sends its pieces in a row."""
        like = parts[bucket.positions[0]]
        x = torch.cat(sent) if sent else like.new_empty(0)
        if bucket.where is None or not _leaves_home(sizes):
            got = [x if s == bucket.index else x[:0] for s in range(len(sizes))]
            return got
        parted = len(bucket.owners.copies) < len(bucket.owners.axes)
        to = "V" if parted else "I"  # of what every rank holds, one value again
        how = LinearMap("all_to_all", "V", to, what=self.what, sizes=sizes)
        y = issue(x, how, bucket.where)
        return list(y.split([row[bucket.index] for row in sizes]))


def _leaves_home(sizes: Sizes) -> bool:
    return any(n for s, row in enumerate(sizes) for d, n in enumerate(row) if s != d)


def _layout(leaf: Any) -> Layout:
    if is_sharded(leaf):
        return leaf.layout
    return Layout(tuple(leaf.shape), leaf.dtype)

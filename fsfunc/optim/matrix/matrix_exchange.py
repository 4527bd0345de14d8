"""Matrices on their way to the ranks that own them, and back in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import claim, issue
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.linear_maps import LinearMap, Sizes
from fsfunc.comm.mesh import asks, averaged_axes, here
from fsfunc.optim.matrix.matrix_owners import Axes, Cost, Owners, owners_of
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import Owned, Placement
from fsfunc.sharded.slices import take


@dataclass(frozen=True)
class _Bucket:
    """Matrices that the same ranks share; ``where``: those ranks, if several."""

    positions: list[int]
    owners: Owners
    where: RankGroup | None

    @property
    def is_here(self) -> bool:
        """True if this rank holds any of them: on some axes others may own them all."""
        layout = self.owners.layouts[0]
        if not layout.owned:
            return True
        at = here().mesh.coordinates()
        return all(at[part.axis] == part.coordinate for part in layout.owned)

    @property
    def index(self) -> int:
        """This rank's, among those that share them."""
        return 0 if self.where is None else self.where.index


class MatrixExchange:
    """The way of some leaves, matrices all, to their owners and back.

    Args:
        leaves: the parameters, plain or sharded; a plain one is every rank's own.
        cost: what a matrix costs its owner.
        share: whether ranks that hold the same, along axes of the ``shard`` around,
            share the work too. Their parts must be equal, and stay undifferentiated.
        what: who asks, for ledgers and messages.
        given: of each leaf where it is whole, as `owner` has said before.

    Raises:
        ValueError: owners that are given along other axes than the matrix lies on; a
            vmap mesh.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        cost: Cost,
        what: str,
        *,
        share: bool = False,
        given: Sequence[tuple[Placement, ...]] | None = None,
    ):
        self.leaves, self.what = leaves, what
        found: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if leaf.numel():
                key = *_ranks(leaf, share), leaf.device
                found.setdefault(key, []).append(i)
        self.buckets: list[_Bucket] = []
        for (axes, copies, fixed, _), positions in found.items():
            layouts = tuple(_layout(leaves[i]) for i in positions)
            chosen = None
            if given is not None:
                each = [_index(leaves[i], given[i], axes, what) for i in positions]
                chosen = tuple(each)
            owners = owners_of(layouts, axes, copies, fixed, cost, chosen)
            where = group(tuple(a for a, _ in axes)) if axes else None
            if where is not None and where.link.level is not None:
                raise ValueError(
                    f"{what} on a vmap mesh: its ranks own other matrices each, and "
                    "there they all run as one program; use a simulated mesh"
                )
            self.buckets.append(_Bucket(positions, owners, where))
        self._found = {
            i: (b, k) for b in self.buckets for k, i in enumerate(b.positions)
        }

    def owns(self, i: int) -> bool:
        """True if this rank has matrix ``i`` whole."""
        if i not in self._found:
            return False
        bucket, k = self._found[i]
        if bucket.where is not None:
            asks(bucket.where.axis)
        return bucket.is_here and bucket.owners.owner[k] == bucket.index

    def owner(self, i: int) -> tuple[Owned, ...]:
        """The place of matrix ``i``, as parts of a layout; () is everywhere."""
        elsewhere = self.leaves[i].layout.owned if is_sharded(self.leaves[i]) else ()
        if i not in self._found:  # it has no elements, and nobody has them
            return elsewhere
        bucket, k = self._found[i]
        at = bucket.owners.points[bucket.owners.owner[k]]
        owned = [Owned(axis, n, at[axis]) for axis, n in bucket.owners.axes]
        return (*elsewhere, *owned)

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
            if not bucket.is_here:
                continue
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
        rows = [parts[i].reshape(-1) for i in bucket.positions]
        sent = [
            rows[k]
            for rank, owned in enumerate(owners.owned)
            if owners.serves[me][rank] and rank != me
            for k in owned
        ]
        arrived = self._moved(sent, owners.inward, bucket, rows[0])
        mine = owners.owned[me]
        pieces: dict[int, dict[int, Tensor]] = {k: {me: rows[k]} for k in mine}
        for s, row in enumerate(arrived):
            if s != me and owners.serves[s][me]:
                cuts = row.split([owners.counts[k][s] for k in mine])
                for k, piece in zip(mine, cuts, strict=True):
                    pieces[k][s] = piece
        return {k: owners.joined(k, found) for k, found in pieces.items()}

    def _scattered(
        self, bucket: _Bucket, made: dict[int, Tensor], parts: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        owners, me = bucket.owners, bucket.index
        made = {k: x.contiguous() for k, x in made.items()}

        def cut(rank: int) -> list[Tensor]:
            at = owners.points[rank]
            rows = [take(made[k], owners.layouts[k], at) for k in owners.owned[me]]
            return [x.reshape(-1) for x in rows]

        ranks = range(len(owners.points))
        sent = [x for rank in ranks if rank != me for x in cut(rank)]
        arrived = self._moved(sent, owners.outward, bucket, parts[bucket.positions[0]])
        pieces = dict(zip(owners.owned[me], cut(me), strict=True))
        for s, owned in enumerate(owners.owned):
            if s != me:
                cuts = arrived[s].split([owners.counts[k][me] for k in owned])
                pieces.update(zip(owned, cuts, strict=True))
        return pieces

    def _moved(
        self, sent: list[Tensor], sizes: Sizes, bucket: _Bucket, like: Tensor
    ) -> list[Tensor]:
        """By sender, what arrives here, where every rank sends its pieces in a row."""
        x = torch.cat(sent) if sent else like.new_empty(0)
        if bucket.where is None or not any(map(any, sizes)):
            return [x[:0]] * len(sizes)
        parted = len(bucket.owners.copies) < len(bucket.owners.axes)
        to = "V" if parted else "I"  # of what every rank holds, one value again
        how = LinearMap("all_to_all", "V", to, what=self.what, sizes=sizes)
        y = issue(x, how, bucket.where)
        return list(y.split([row[bucket.index] for row in sizes]))


def _ranks(leaf: Any, share: bool) -> tuple[Axes, tuple[str, ...], Any]:
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


def _index(leaf: Any, where: tuple[Placement, ...], axes: Axes, what: str) -> int:
    """The index along the axes of an owner that is given."""
    layout = leaf.layout if is_sharded(leaf) else Layout(tuple(leaf.shape), leaf.dtype)
    at = {p.axis: (p.size, p.coordinate) for p in where if isinstance(p, Owned)}
    mine = {p.axis: (p.size, p.coordinate) for p in layout.owned}
    along = {axis: n for axis, (n, _) in at.items() if axis not in mine}
    if len(at) < len(where) or along != dict(axes) or not mine.items() <= at.items():
        raise ValueError(
            f"{what}: the state of {layout.subject} lies as {list(where)}, the matrix "
            f"along {dict(axes)}: make it by optimizer.init of these parameters, or "
            "load it (ff.load) into a state made so"
        )
    index = 0
    for axis, n in axes:
        index = index * n + at[axis][1]
    return index


def _layout(leaf: Any) -> Layout:
    if is_sharded(leaf):
        return leaf.layout
    return Layout(tuple(leaf.shape), leaf.dtype)

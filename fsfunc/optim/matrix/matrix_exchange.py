"""Matrices on their way to the ranks that own them, and back: the step along these.

What reduces over the rows and columns of a matrix needs all of it at one place. Of the
ranks that hold parts of a matrix one owns it: the parts come to it, all matrices in one
exchange, and what it makes of the matrix goes back in parts, in another. Who owns what
follows from the layouts and the cost of a matrix alone, so all ranks know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import claim, issue
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.linear_maps import LinearMap, Sizes
from fsfunc.comm.mesh import asks, averaged_axes, here
from fsfunc.optim.element_rules import Codec, ElementRule
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    check_real,
    describe_leaf,
    local_tensor,
    paths_of,
    trainable,
)
from fsfunc.optim.matching import Matched, has_decay
from fsfunc.optim.places import copy_to, device_with, readable_on, step_memory_like
from fsfunc.optim.schedules import Schedule, rate_at
from fsfunc.sharded.layout import Layout, every_coordinate
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import Owned, Placement
from fsfunc.sharded.slices import assemble, take

Cost = Callable[[tuple[int, ...]], float]  # of a matrix of this shape
Axes = tuple[tuple[str, int], ...]


def balance_owners(
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
class MatrixOwners:
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
        return _rank_coordinates(self.axes, self.fixed)

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


def _rank_coordinates(
    axes: Axes, fixed: Sequence[tuple[str, int]]
) -> list[dict[str, int]]:
    return [{**dict(fixed), **at} for at in every_coordinate(dict(axes))]


@lru_cache(maxsize=64)  # a step asks for the same one every time
def find_owners(
    layouts: tuple[Layout, ...],
    axes: Axes,
    copies: tuple[str, ...],
    fixed: tuple[tuple[str, int], ...],
    cost: Cost,
    owner: tuple[int, ...] | None = None,
) -> MatrixOwners:
    """The owners of matrices: those that are given, or balanced ones; see `MatrixOwners`."""
    if owner is not None:
        return MatrixOwners(layouts, axes, copies, fixed, owner)
    points = _rank_coordinates(axes, fixed)
    held = [[b - a for a, b in map(layout.span, points)] for layout in layouts]
    owner = balance_owners([cost(x.shape) for x in layouts], held, len(points))
    return MatrixOwners(layouts, axes, copies, fixed, owner)


class SharingRanks(NamedTuple):
    """The axes of the ranks that share a matrix, those of copies, and fixed ones."""

    axes: Axes
    copies: tuple[str, ...]
    fixed: tuple[tuple[str, int], ...]


def sharing_ranks(leaf: Any, share: bool) -> SharingRanks:
    """The ranks that share a matrix."""
    if not is_sharded(leaf):
        return SharingRanks((), (), ())
    layout = leaf.layout
    owned = {part.axis: part.coordinate for part in layout.owned}
    held = {a: n for a, n in layout.sizes.items() if a not in owned}
    more = [a for a in averaged_axes() if share and a not in layout.axes]
    if all(n == 1 for n in held.values()) and not more:
        return SharingRanks((), (), tuple((a, owned.get(a, 0)) for a in layout.axes))
    at = here()
    sizes = {a: held.get(a, n) for a, n in at.mesh.axes.items() if a in {*held, *more}}
    axes = tuple((a, n) for a, n in sizes.items() if n > 1)
    mine = {**at.mesh.coordinates(at.rank), **owned}
    fixed = tuple((a, mine.get(a, 0)) for a in layout.axes if sizes.get(a, 1) == 1)
    return SharingRanks(axes, tuple(a for a, _ in axes if a in more), fixed)


def owner_index(leaf: Any, where: tuple[Placement, ...], axes: Axes, what: str) -> int:
    """The index along the axes of an owner that is given."""
    layout = leaf_layout(leaf)
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


def leaf_layout(leaf: Any) -> Layout:
    """The layout of a leaf; a plain tensor lies whole."""
    if is_sharded(leaf):
        return leaf.layout
    return Layout(tuple(leaf.shape), leaf.dtype)


@dataclass(frozen=True)
class _SharedMatrices:
    """Matrices that the same ranks share; ``where``: those ranks, if several."""

    positions: list[int]
    owners: MatrixOwners
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
                key = *sharing_ranks(leaf, share), device_with(leaf)
                found.setdefault(key, []).append(i)
        self.buckets: list[_SharedMatrices] = []
        for (axes, copies, fixed, _), positions in found.items():
            layouts = tuple(leaf_layout(leaves[i]) for i in positions)
            chosen = None
            if given is not None:
                each = [owner_index(leaves[i], given[i], axes, what) for i in positions]
                chosen = tuple(each)
            owners = find_owners(layouts, axes, copies, fixed, cost, chosen)
            where = group(tuple(a for a, _ in axes)) if axes else None
            if where is not None and where.link.level is not None:
                raise ValueError(
                    f"{what} on a vmap mesh: its ranks own other matrices each, and "
                    "there they all run as one program; use a simulated mesh"
                )
            self.buckets.append(_SharedMatrices(positions, owners, where))
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
            parts: of each leaf, what this rank holds; all of one dtype, on the device
                that computes with the leaf.
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

    def _gathered(
        self, bucket: _SharedMatrices, parts: Sequence[Tensor]
    ) -> dict[int, Tensor]:
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
        self, bucket: _SharedMatrices, made: dict[int, Tensor], parts: Sequence[Tensor]
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
        self, sent: list[Tensor], sizes: Sizes, bucket: _SharedMatrices, like: Tensor
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


PLAIN_CODEC = Codec()


class DescentState(NamedTuple):
    """The count of steps along directions, and their momentum, if any."""

    count: Any
    momentum: Any


def check_matrices(params: Tree, name: str) -> None:
    """Raises where a leaf to train is no matrix, by its global shape.

    Raises:
        ValueError: names the leaf and the way out.
        TypeError: names a complex leaf.
    """
    leaves, treedef = tree.flatten(params, is_sharded)
    for i, leaf in enumerate(leaves):
        if trainable(leaf) and leaf.dtype.is_complex:
            check_real(
                params, f"{name} takes", "whose products here are of real matrices"
            )
        if trainable(leaf) and leaf.ndim != 2:
            raise ValueError(
                f"{name} takes matrices, and {paths_of(treedef)[i]!r} is {describe_leaf(leaf)}: "
                f'write ff.partition({{"matrix": ff.{name}(...), "other": '
                'ff.sharded_adam(...)}, lambda path, leaf: "matrix" if leaf.ndim == 2 '
                'else "other"), and name embeddings and heads as other too'
            )


def match_matrices(name: str, params: Tree, grads: Tree, *moments: Tree) -> Matched:
    """The trees matched; raises where an active leaf is no matrix."""
    matched = Matched.of(params, grads, *moments)
    check_matrices(matched.restore(matched.columns[0], matched.no_updates), name)
    return matched


def descent_rule(
    name: str,
    learning_rate: float | Schedule,
    weight_decay: float,
    mask: Mask | None,
    momentum: float = 0.0,
) -> ElementRule:
    """The step along directions u: ``v = momentum v + u`` and ``p - l (v + decay p)``.

    Its state is a `DescentState`.
    """

    def numbers(count: Any) -> tuple[Any, ...]:
        return (rate_at(learning_rate, count),)

    def equation(numbers: Any, p: Tensor, u: Tensor, *rest: Any):
        (rate,), (*moments, decay) = numbers, rest
        new = [momentum * v + u for v in moments]

        def update() -> Tensor:
            way = -rate * (new[0] if new else u)
            return way - rate * decay * p if has_decay(decay) else way

        return update, *new

    return ElementRule(
        name=f"{name} with weight_decay",
        state=DescentState,
        moments=1 if momentum else 0,
        numbers=numbers,
        equation=equation,
        weight_decay=weight_decay,
        mask=mask,
    )


def map_matrices(
    matched: Matched,
    exchange: MatrixExchange,
    parts: Sequence[Tensor],
    fn: Callable[[dict[int, Tensor]], dict[int, Tensor]],
    factors: Sequence[float] | None = None,
) -> Tree:
    """The tree of what ``fn`` makes of the matrices, times factors.

    It lies as the parameters do, in their dtypes; leaves of one buffer in a buffer.

    Args:
        parts: of each active leaf what this rank holds, of one dtype, wherever.
        fn: as of `MatrixExchange.map`.
    """
    params = matched.buffers[0]
    leaves = matched.columns[0]
    # Products of matrices and messages are the device's.
    pairs = zip(parts, leaves, strict=True)
    parts = [readable_on(x, device_with(leaf)) for x, leaf in pairs]
    made = exchange.map(parts, fn)
    factors = [1.0] * len(made) if factors is None else factors
    rows = list(zip(leaves, made, factors, strict=True))
    if matched.differentiated:
        out = [x.to(leaf.dtype) * factor for leaf, x, factor in rows]
        out = [
            leaf.with_local(x) if is_sharded(leaf) else x
            for leaf, x in zip(leaves, out, strict=True)
        ]
        return matched.restore(out, matched.no_updates)
    out = params.rebuild([step_memory_like(x).zero_() for x in params.tensors])
    for leaf, (_, x, factor) in zip(out, rows, strict=True):
        room = copy_to(local_tensor(leaf), x)
        if factor != 1:
            room.mul_(factor)
    return matched.restore(out, matched.no_updates)

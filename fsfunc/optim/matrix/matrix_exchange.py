"""Sends matrices to the ranks that own them, and back: for Muon and Shampoo.

An update that multiplies a matrix by matrices needs all of it in one place. One of the
ranks that hold parts of a matrix owns it. All parts of all matrices go to their owners
in one all-to-all; each owner computes its matrices; the results go back in parts, in
another all-to-all::

    parts -> all_to_all -> whole matrices on their owners -> fn -> all_to_all -> parts

Who owns what follows from the layouts and the cost of a matrix alone, so all ranks know
it without a message. `map_matrices` does all of that, and `descent_rule` is the step
along the results.
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
from fsfunc.comm.collective_ops import claim_equal, run_map
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.linear_maps import LinearMap, Sizes
from fsfunc.comm.mesh import averaged_axes, here, note_axes_read
from fsfunc.optim.element_rules import Codec, Count, ElementRule, Numbers
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
from fsfunc.tree.types import Leaf, PyTree

Cost = Callable[[tuple[int, ...]], float]  # of a matrix of this shape, to its owner
Axes = tuple[tuple[str, int], ...]  # names and sizes


def balance_owners(
    costs: Sequence[float], counts: Sequence[Sequence[int]], n: int
) -> tuple[int, ...]:
    """Chooses an owner for each matrix, so that ``n`` ranks have about equal costs.

    The costliest matrix first, each to the rank with the least cost so far: at most 4/3
    of the best assignment. Of matrices that cost the same, each goes to the rank that
    holds most of it, as far as that leaves the costs as they are.

    Args:
        costs: of each matrix.
        counts: by matrix and rank, how many elements the rank holds already.

    Source: Graham, Bounds on multiprocessing timing anomalies, 1969.

    >>> balance_owners([1, 1, 1, 1, 8], [[6, 0], [6, 0], [0, 6], [0, 6], [3, 3]], 2)
    (1, 1, 1, 1, 0)
    >>> balance_owners([1, 1, 1, 1], [[6, 0], [4, 2], [0, 6], [0, 6]], 2)
    (0, 0, 1, 1)
    """
    # First how many matrices of each cost a rank owns, then which of them.
    load, slots = [0.0] * n, {cost: [0] * n for cost in costs}
    for cost in sorted(costs, reverse=True):
        rank = min(range(n), key=load.__getitem__)
        load[rank] += cost
        slots[cost][rank] += 1
    owners = [-1] * len(costs)
    ranks = range(n)
    pairs = ((-counts[i][r], i, r) for i in range(len(costs)) for r in ranks)
    for _, i, r in sorted(pairs):
        if owners[i] < 0 and slots[costs[i]][r]:
            owners[i] = r
            slots[costs[i]][r] -= 1
    return tuple(owners)


@dataclass(frozen=True)
class MatrixOwners:
    """Which rank owns each of some matrices that the same ranks share: plain data.

    Ranks are numbered along ``axes``, row by row.

    Args:
        layouts: of the matrices.
        axes: the axes along which ranks share the matrices.
        copies: those of them along which every rank holds the same.
        fixed: the coordinates on other axes of the layouts.
        owner_of: the rank that owns each matrix.
    """

    layouts: tuple[Layout, ...]
    axes: Axes
    copies: tuple[str, ...]
    fixed: tuple[tuple[str, int], ...]
    owner_of: tuple[int, ...]

    @cached_property
    def coordinates(self) -> list[dict[str, int]]:
        """The coordinates of each rank along the axes."""
        return _rank_coordinates(self.axes, self.fixed)

    @cached_property
    def spans(self) -> list[list[tuple[int, int]]]:
        """By matrix and rank: what the rank holds, in the flattening of its block."""
        ranks = self.coordinates
        return [[layout.span(coords) for coords in ranks] for layout in self.layouts]

    @cached_property
    def counts(self) -> list[list[int]]:
        """By matrix and rank: how many elements the rank holds."""
        return [[stop - start for start, stop in row] for row in self.spans]

    @cached_property
    def matrices_of(self) -> list[list[int]]:
        """By rank: the matrices that it owns."""
        by_rank: list[list[int]] = [[] for _ in self.coordinates]
        for i, rank in enumerate(self.owner_of):
            by_rank[rank].append(i)
        return by_rank

    @cached_property
    def sends_to(self) -> list[list[bool]]:
        """By sender and owner: whether the owner takes the sender's parts.

        If several ranks hold the same part, the one that is in the owner's copy sends.
        """
        ranks = self.coordinates
        copy_of = [tuple(coords[axis] for axis in self.copies) for coords in ranks]
        return [[a == b for b in copy_of] for a in copy_of]

    @cached_property
    def inward(self) -> Sizes:
        """Elements of matrices on the way to their owners, by sender and owner.

        What an owner holds itself is not sent.
        """
        return self._sizes(
            lambda sender, owner: (
                self.matrices_of[owner] if self.sends_to[sender][owner] else []
            ),
            lambda sender, owner: sender,
        )

    @cached_property
    def outward(self) -> Sizes:
        """Elements on the way back, by owner and receiver: to all that hold a part."""
        return self._sizes(
            lambda owner, receiver: self.matrices_of[owner],
            lambda owner, receiver: receiver,
        )

    def _sizes(
        self,
        matrices: Callable[[int, int], list[int]],
        holder: Callable[[int, int], int],
    ) -> Sizes:
        """Counts the elements that each rank sends to each other one.

        Args:
            matrices: from (sender, receiver), the matrices that go between them.
            holder: of the two, the rank whose parts of these go.
        """
        ranks = range(len(self.coordinates))
        return tuple(
            tuple(
                sum(self.counts[i][holder(s, d)] for i in matrices(s, d))
                if s != d
                else 0
                for d in ranks
            )
            for s in ranks
        )

    def whole_matrix(self, i: int, parts: Mapping[int, Tensor]) -> Tensor:
        """Puts matrix ``i`` together from its parts, 1-D, by sender."""
        layout = self.layouts[i]
        if layout.splits:  # blocks of the matrix; else ranges of its flattening
            blocks = [(self.coordinates[s], parts[s]) for s in parts]
            return assemble(
                [(coords, x.view(layout.local_shape(coords))) for coords, x in blocks],
                layout,
            )
        order = sorted(
            (s for s in parts if self.counts[i][s]), key=self.spans[i].__getitem__
        )
        pieces = [parts[s] for s in order]
        whole_flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole_flat.view(layout.shape)


def _rank_coordinates(
    axes: Axes, fixed: Sequence[tuple[str, int]]
) -> list[dict[str, int]]:
    return [{**dict(fixed), **coords} for coords in every_coordinate(dict(axes))]


@lru_cache(maxsize=64)  # a step asks for the same one every time
def find_owners(
    layouts: tuple[Layout, ...],
    axes: Axes,
    copies: tuple[str, ...],
    fixed: tuple[tuple[str, int], ...],
    cost: Cost,
    owner_of: tuple[int, ...] | None = None,
) -> MatrixOwners:
    """Returns the owners of matrices: the given ones, or balanced ones."""
    if owner_of is not None:
        return MatrixOwners(layouts, axes, copies, fixed, owner_of)
    ranks = _rank_coordinates(axes, fixed)
    counts = [[b - a for a, b in map(layout.span, ranks)] for layout in layouts]
    owner_of = balance_owners([cost(x.shape) for x in layouts], counts, len(ranks))
    return MatrixOwners(layouts, axes, copies, fixed, owner_of)


class SharingRanks(NamedTuple):
    """The ranks that share a matrix: see `MatrixOwners` for the fields."""

    axes: Axes
    copies: tuple[str, ...]
    fixed: tuple[tuple[str, int], ...]


def sharing_ranks(leaf: Leaf, share_copies: bool) -> SharingRanks:
    """Returns the ranks that share a matrix.

    Args:
        share_copies: whether these include ranks that hold the same, along axes of the
            ``shard`` around.
    """
    if not is_sharded(leaf):
        return SharingRanks((), (), ())
    layout = leaf.layout
    owner_coordinates = {part.axis: part.coordinate for part in layout.owners}
    split_sizes = {a: n for a, n in layout.sizes.items() if a not in owner_coordinates}
    copies = [a for a in averaged_axes() if share_copies and a not in layout.axes]
    if all(n == 1 for n in split_sizes.values()) and not copies:
        return SharingRanks(
            (), (), tuple((a, owner_coordinates.get(a, 0)) for a in layout.axes)
        )
    this_rank = here()
    # In the order of the mesh's axes, whatever that of the layout.
    sizes = {
        a: split_sizes.get(a, n)
        for a, n in this_rank.mesh.axes.items()
        if a in {*split_sizes, *copies}
    }
    axes = tuple((a, n) for a, n in sizes.items() if n > 1)
    coordinates = {**this_rank.mesh.coordinates(this_rank.rank), **owner_coordinates}
    fixed = tuple(
        (a, coordinates.get(a, 0)) for a in layout.axes if sizes.get(a, 1) == 1
    )
    return SharingRanks(axes, tuple(a for a, _ in axes if a in copies), fixed)


def owner_index(
    leaf: Leaf, places: tuple[Placement, ...], axes: Axes, name: str
) -> int:
    """Returns the rank of an owner, given the layout of a state that lies with it.

    Args:
        places: the parts of that layout.
        axes: along which ranks share the matrix.
        name: of the optimizer, for errors.
    """
    layout = leaf_layout(leaf)
    state_owned = {
        p.axis: (p.size, p.coordinate) for p in places if isinstance(p, Owned)
    }
    leaf_owned = {p.axis: (p.size, p.coordinate) for p in layout.owners}
    owner_axes = {
        axis: n for axis, (n, _) in state_owned.items() if axis not in leaf_owned
    }
    if (
        len(state_owned) < len(places)
        or owner_axes != dict(axes)
        or not leaf_owned.items() <= state_owned.items()
    ):
        raise ValueError(
            f"{name}: the state of {layout.subject} is laid out as {list(places)}, the "
            f"matrix along {dict(axes)}: make it by optimizer.init of these "
            "parameters, or load it (ff.load) into a state made so"
        )
    index = 0
    for axis, n in axes:
        index = index * n + state_owned[axis][1]
    return index


def leaf_layout(leaf: Leaf) -> Layout:
    """Returns the layout of a leaf; that of a plain tensor is whole."""
    if is_sharded(leaf):
        return leaf.layout
    return Layout(tuple(leaf.shape), leaf.dtype)


@dataclass(frozen=True)
class _SharedMatrices:
    """Matrices that the same ranks share.

    Args:
        positions: of the matrices among the leaves of the exchange.
        owners: who updates which of them.
        where: the group of these ranks, if there are several.
    """

    positions: list[int]
    owners: MatrixOwners
    where: RankGroup | None

    @property
    def is_here(self) -> bool:
        """Whether this rank holds a part of these matrices.

        Where each leaf has one owner along an axis, this rank may own none of them.
        """
        layout = self.owners.layouts[0]
        if not layout.owners:
            return True
        coordinates = here().mesh.coordinates()
        return all(coordinates[part.axis] == part.coordinate for part in layout.owners)

    @property
    def index(self) -> int:
        """The number of this rank among the ranks that share the matrices."""
        return 0 if self.where is None else self.where.index


class MatrixExchange:
    """Takes matrices to their owners and back.

    Args:
        leaves: the parameters, plain or sharded; a plain one is whole on every rank.
        cost: what a matrix costs its owner.
        name: the optimizer, for ledgers and messages.
        share_copies: whether ranks that hold the same, along axes of the ``shard``
            around, share the work too. Their parts must be equal, and not be
            differentiated.
        places: of each leaf where it is whole, as `owner` has returned before; by
            default owners are balanced.

    Raises:
        ValueError: owners that are given along other axes than the matrix lies on; a
            vmap mesh.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        cost: Cost,
        name: str,
        *,
        share_copies: bool = False,
        places: Sequence[tuple[Placement, ...]] | None = None,
    ):
        self.leaves: Sequence[Leaf] = leaves
        self.name: str = name
        by_ranks: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if leaf.numel():
                # By device too: an exchange concatenates the parts.
                key = *sharing_ranks(leaf, share_copies), device_with(leaf)
                by_ranks.setdefault(key, []).append(i)
        self.buckets: list[_SharedMatrices] = []
        for (axes, copies, fixed, _), positions in by_ranks.items():
            layouts = tuple(leaf_layout(leaves[i]) for i in positions)
            owner_of = None
            if places is not None:
                owner_of = tuple(
                    [owner_index(leaves[i], places[i], axes, name) for i in positions]
                )
            owners = find_owners(layouts, axes, copies, fixed, cost, owner_of)
            where = get_group(tuple(a for a, _ in axes)) if axes else None
            if where is not None and where.link.vmap_level is not None:
                raise ValueError(
                    f"{name} on a vmap mesh: its ranks own other matrices each, and "
                    "there they all run as one program; use a simulated mesh"
                )
            self.buckets.append(_SharedMatrices(positions, owners, where))
        # By position: its bucket, and the number in that.
        self._bucket_of = {
            i: (b, k) for b in self.buckets for k, i in enumerate(b.positions)
        }

    def owns(self, i: int) -> bool:
        """Returns whether this rank owns matrix ``i``."""
        if i not in self._bucket_of:
            return False
        bucket, k = self._bucket_of[i]
        if bucket.where is not None:
            note_axes_read(
                bucket.where.axis
            )  # what follows differs between these ranks
        return bucket.is_here and bucket.owners.owner_of[k] == bucket.index

    def owner(self, i: int) -> tuple[Owned, ...]:
        """Returns the owner of matrix ``i`` as parts of a layout; () for all ranks."""
        leaf_owned = self.leaves[i].layout.owners if is_sharded(self.leaves[i]) else ()
        if i not in self._bucket_of:  # it has no elements, and needs no owner
            return leaf_owned
        bucket, k = self._bucket_of[i]
        coordinates = bucket.owners.coordinates[bucket.owners.owner_of[k]]
        owned = [Owned(axis, n, coordinates[axis]) for axis, n in bucket.owners.axes]
        return (*leaf_owned, *owned)

    def map(
        self,
        parts: Sequence[Tensor],
        fn: Callable[[dict[int, Tensor]], dict[int, Tensor]],
    ) -> list[Tensor]:
        """Returns the parts of what ``fn`` makes of the whole matrices.

        Args:
            parts: of each leaf, what this rank holds; all of one dtype, on the device
                that computes with the leaf.
            fn: from the matrices that this rank owns, by position, to what goes back:
                matrices of the same shapes, of the dtype of the parts.

        Cost: over each group of ranks two all-to-alls, in which an element goes at most
        once to its owner, and once to each rank that holds it.
        """
        new_parts = list(parts)
        for bucket in self.buckets:
            if not bucket.is_here:
                continue
            if bucket.where is not None:
                note_axes_read(bucket.where.axis)
            with label("", self.name):
                wholes = self._gather(bucket, parts)
                computed = fn({bucket.positions[k]: x for k, x in wholes.items()})
                new_wholes = {k: computed[bucket.positions[k]] for k in wholes}
                pieces = self._scatter(bucket, new_wholes, parts)
            for k, i in enumerate(bucket.positions):
                new_parts[i] = pieces[k].view(parts[i].shape)
        return new_parts

    def _gather(
        self, bucket: _SharedMatrices, parts: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Returns the matrices that this rank owns, whole, by number in the bucket."""
        owners, rank_here = bucket.owners, bucket.index
        for k in bucket.positions if owners.copies else ():
            claim_equal(parts[k], self.name)  # one rank's copy is taken for all
        rows = [parts[i].reshape(-1) for i in bucket.positions]
        pieces_to_send = [
            rows[k]
            for rank, matrices in enumerate(owners.matrices_of)
            if owners.sends_to[rank_here][rank] and rank != rank_here
            for k in matrices
        ]
        arrived = self._exchange(pieces_to_send, owners.inward, bucket, rows[0])
        matrices_here = owners.matrices_of[rank_here]
        pieces: dict[int, dict[int, Tensor]] = {
            k: {rank_here: rows[k]} for k in matrices_here
        }
        for sender, row in enumerate(arrived):
            if sender != rank_here and owners.sends_to[sender][rank_here]:
                sizes = [owners.counts[k][sender] for k in matrices_here]
                for k, piece in zip(matrices_here, row.split(sizes), strict=True):
                    pieces[k][sender] = piece
        return {k: owners.whole_matrix(k, by_sender) for k, by_sender in pieces.items()}

    def _scatter(
        self,
        bucket: _SharedMatrices,
        wholes: dict[int, Tensor],
        parts: Sequence[Tensor],
    ) -> dict[int, Tensor]:
        """Returns this rank's parts of all matrices, by number in the bucket.

        Args:
            wholes: the matrices that this rank owns.
        """
        owners, rank_here = bucket.owners, bucket.index
        wholes = {k: x.contiguous() for k, x in wholes.items()}

        def cut(rank: int) -> list[Tensor]:
            coordinates = owners.coordinates[rank]
            rows = [
                take(wholes[k], owners.layouts[k], coordinates)
                for k in owners.matrices_of[rank_here]
            ]
            return [x.reshape(-1) for x in rows]

        ranks = range(len(owners.coordinates))
        pieces_to_send = [x for rank in ranks if rank != rank_here for x in cut(rank)]
        like = parts[bucket.positions[0]]
        arrived = self._exchange(pieces_to_send, owners.outward, bucket, like)
        pieces = dict(zip(owners.matrices_of[rank_here], cut(rank_here), strict=True))
        for owner, matrices in enumerate(owners.matrices_of):
            if owner != rank_here:
                sizes = [owners.counts[k][rank_here] for k in matrices]
                pieces.update(zip(matrices, arrived[owner].split(sizes), strict=True))
        return pieces

    def _exchange(
        self, pieces: list[Tensor], sizes: Sizes, bucket: _SharedMatrices, like: Tensor
    ) -> list[Tensor]:
        """Sends pieces, in the order of receivers; returns what arrives, by sender."""
        x = torch.cat(pieces) if pieces else like.new_empty(0)
        if bucket.where is None or not any(map(any, sizes)):
            return [x[:0]] * len(sizes)
        # If ranks hold only copies, what comes back is one value on all of them again.
        are_parts = len(bucket.owners.copies) < len(bucket.owners.axes)
        to = "V" if are_parts else "I"
        collective = LinearMap("all_to_all", "V", to, name=self.name, sizes=sizes)
        y = run_map(x, collective, bucket.where)
        return list(y.split([row[bucket.index] for row in sizes]))


PLAIN_CODEC = Codec()


class DescentState(NamedTuple):
    """The state of `descent_rule`: the count of steps, and the momentum, if any."""

    count: Count
    momentum: PyTree


def check_matrices(params: Tree, name: str) -> None:
    """Checks that each leaf to train is a real matrix, by its global shape.

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
                f"{name} takes matrices, and {paths_of(treedef)[i]!r} is "
                f"{describe_leaf(leaf)}: write "
                f'ff.partition({{"matrix": ff.{name}(...), "other": '
                'ff.sharded_adam(...)}, lambda path, leaf: "matrix" if leaf.ndim == 2 '
                'else "other"), and name embeddings and heads as other too'
            )


def match_matrices(name: str, params: Tree, grads: Tree, *moments: Tree) -> Matched:
    """Matches trees; raises as `check_matrices` where an active leaf is no matrix."""
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
    """Returns the rule of a step along directions u, which stand for gradients.

    ``v = momentum v + u`` and ``p - l (v + decay p)``. Its state is a `DescentState`.
    """

    def numbers(count: Count) -> Numbers:
        return (rate_at(learning_rate, count),)

    def equation(
        numbers: Numbers, p: Tensor, u: Tensor, *moments_and_decay: Any
    ) -> Sequence[Any]:
        (rate,), (*moments, decay) = numbers, moments_and_decay
        new = [momentum * v + u for v in moments]

        def update() -> Tensor:
            step = -rate * (new[0] if new else u)
            return step - rate * decay * p if has_decay(decay) else step

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
    """Returns the tree of what ``fn`` makes of the whole matrices, times factors.

    It is laid out as the parameters, in their dtypes, packed in buffers as they are.

    Args:
        parts: of each active leaf what this rank holds, all of one dtype, anywhere.
        fn: see `MatrixExchange.map`.
        factors: of each active leaf; 1 by default.
    """
    params = matched.buffers[0]
    leaves = matched.columns[0]
    # Products of matrices and messages are the device's work, also under offload.
    pairs = zip(parts, leaves, strict=True)
    parts = [readable_on(x, device_with(leaf)) for x, leaf in pairs]
    new_parts = exchange.map(parts, fn)
    factors = [1.0] * len(new_parts) if factors is None else factors
    rows = list(zip(leaves, new_parts, factors, strict=True))
    if matched.differentiated:
        tensors = [x.to(leaf.dtype) * factor for leaf, x, factor in rows]
        new_leaves = [
            leaf.with_local(x) if is_sharded(leaf) else x
            for leaf, x in zip(leaves, tensors, strict=True)
        ]
        return matched.restore(new_leaves, matched.no_updates)
    new_leaves = params.rebuild([step_memory_like(x).zero_() for x in params.tensors])
    for leaf, (_, x, factor) in zip(new_leaves, rows, strict=True):
        target = copy_to(local_tensor(leaf), x)
        if factor != 1:
            target.mul_(factor)
    return matched.restore(new_leaves, matched.no_updates)

"""Packing of leaves into buffers, and of trees into lists of buffers.

A user's ``tree_map`` gives every leaf a tensor of its own. Sharded calls pack the
leaves of one buffer again, in their arguments and results, by `repack_leaves`. A unit
call finds its buffers by `group_by_buffer` and `packed_buffer_of`. A
:class:`PackedTree` is a tree as a list of buffers, for optimizers and sums.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, PendingGradient, Sharded, is_sharded
from fsfunc.sharded.placements import largest_block
from fsfunc.tree.types import Leaf, PyTree


def repack_leaves(leaves: list[Leaf], coordinates: Mapping[str, int]) -> bool:
    """Packs leaves that have lost their buffer, and returns if there were any.

    The list is changed in place. A leaf that is differentiated stays as it is.

    Cost: one copy of these leaves, which is what a user's elementwise update costs.
    """
    complete = complete_shards(leaves)
    # The usual case: all leaves are still in their buffers.
    if sum(map(is_sharded, leaves)) == sum([len(members) for members, _ in complete]):
        return False
    packed_already = {i for positions, _ in complete for i in positions}
    others = [
        i for i, x in enumerate(leaves) if is_sharded(x) and i not in packed_already
    ]
    loose = [i for i in others if _can_pack(leaves[i])]
    if not loose:
        return False
    for positions in group_loose_leaves(leaves, loose):
        packed = pack([leaves[i] for i in positions], coordinates)
        for i, leaf in zip(positions, packed.leaves(), strict=True):
            leaves[i] = leaf
    return True


def _can_pack(leaf: Sharded) -> bool:
    """Returns whether a leaf may be copied: not if differentiated or vmapped."""
    if leaf.layout.flat is None or leaf.parts is not None:
        return False
    if leaf._part is None is leaf._range:  # the placeholder of a gradient
        return False
    local = leaf.local
    is_plain = not (local.requires_grad or _torch.is_wrapped(local))
    return is_plain and local.ndim == 1  # vmap adds dims that the layout does not know


def group_loose_leaves(
    leaves: Sequence[Leaf], positions: Sequence[int]
) -> list[list[int]]:
    """Groups positions of leaves that have no buffer by the one that they belong to.

    Each group is in the order of the buffer. A tree may have a buffer's leaves several
    times (moments beside parameters), or two buffers of one name: leaves that would
    overlap get groups of their own.
    """
    groups: list[list[int]] = []
    # By buffer, the group that leaves join, until one would overlap what it has: its
    # positions, its spans in order, its leaves.
    open_groups: dict[Any, tuple[list[int], list[tuple[int, int]], set[Any]]] = {}
    for i in positions:
        layout = leaves[i].layout
        flat = layout.flat
        dtype, owners = leaves[i].local.dtype, layout.owners
        key = flat.buffer, flat.axes, flat.size, flat.chunk, dtype, owners
        # Empty leaves have no span that could overlap: they are told apart by name.
        span, leaf_id = _span(layout), (layout.name, flat.offset)
        group = open_groups.get(key)
        if group is None or leaf_id in group[2] or _overlaps(span, group[1]):
            group = open_groups[key] = ([], [], set())
            groups.append(group[0])
        group[0].append(i)
        group[2].add(leaf_id)
        if span[1] > span[0]:
            insort(group[1], span)
    offset = lambda i: leaves[i].layout.flat.offset  # noqa: E731
    return [sorted(positions, key=offset) for positions in groups]


def _span(layout: Layout) -> tuple[int, int]:
    """Returns (start, stop) of the whole leaf in its buffer."""
    start = layout.flat.offset if layout.flat else 0
    return start, start + largest_block(layout.shape, layout.parts[:-1])


def _overlaps(span: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    """Returns whether a span overlaps one of others, which are sorted and disjoint."""
    if span[0] == span[1]:
        return False
    index = bisect(others, span)
    before, after = others[index - 1 : index], others[index : index + 1]
    return any(stop > span[0] for _, stop in before) or any(
        start < span[1] for start, _ in after
    )


def pack(leaves: Sequence[Sharded], coordinates: Mapping[str, int]) -> FlatShard:
    """Copies leaves of one buffer into a new one; missing leaves are zero."""
    members = tuple(leaf.layout for leaf in leaves)
    buffer_coordinates = {a: coordinates[a] for a in members[0].axes}
    first = leaves[0].local
    chunk = local_chunk(members[0], buffer_coordinates)
    flat = space_of(first).zeros(first, (chunk,))
    packed = FlatShard(members, flat, buffer_coordinates)
    # A copy has no history: `join_differentiably` is for leaves that have one.
    with torch.no_grad():
        for target, leaf in zip(packed.leaves(), leaves, strict=True):
            # `copy_` would repeat a part of one number.
            if leaf.local.shape != target.local.shape:
                leaf.layout.check_part(leaf.local.shape, buffer_coordinates)
            target.local.copy_(leaf.local)
    return packed


def group_by_buffer(
    leaves: Sequence[Leaf], positions: Sequence[int]
) -> list[list[int]]:
    """Groups positions by the buffer that is gathered for them, each in buffer order.

    Leaves of one buffer that are differentiated, and that are not, have two groups.
    """
    by_buffer: dict[tuple[int, int], list[int]] = {}
    loose, offsets = [], {}
    for i in positions:
        leaf = leaves[i]
        if leaf.why_unusable:
            leaf.check()  # which raises
        offsets[i] = leaf.layout.flat.offset
        if leaf.packed is None:
            loose.append(i)
        else:
            by_buffer.setdefault((id(leaf.packed), id(leaf.parts)), []).append(i)
    for members in by_buffer.values():
        members.sort(key=offsets.__getitem__)
    groups = list(by_buffer.values())
    return [*groups, *group_loose_leaves(leaves, loose)] if loose else groups


def packed_buffer_of(
    chosen: Sequence[Sharded], coordinates: Mapping[str, int]
) -> tuple[FlatShard, Tensor]:
    """Returns the buffer of a group of leaves, and its flat tensor.

    The tensor has the autograd history of the leaves.
    """
    packed = chosen[0].packed
    if packed is not None:
        return packed, packed.flat
    packed = pack(chosen, coordinates)
    if not (torch.is_grad_enabled() and any(x.local.requires_grad for x in chosen)):
        return packed, packed.flat
    return packed, join_differentiably(chosen, coordinates)


def join_differentiably(
    chosen: Sequence[Sharded], coordinates: Mapping[str, int]
) -> Tensor:
    """Returns a rank's range of the buffer, concatenated from its leaves.

    Unlike `pack`, which copies, that is differentiable. Missing leaves are zero.
    """
    pieces: list[Tensor] = []
    end = 0
    for x in chosen:
        start, stop = x.layout.buffer_range(coordinates)
        if start < min(end, stop):  # a leaf that occurs twice
            continue
        if stop > start:  # an empty leaf may follow one that begins at its offset
            pieces.append(x.local.new_zeros(start - end))
            end = stop
        pieces.append(x.local)  # an empty part too: it has a gradient, an empty one
    chunk = local_chunk(chosen[0].layout, coordinates)
    return concatenate_flat([*pieces, chosen[0].local.new_zeros(chunk - end)])


def concatenate_flat(pieces: Sequence[Tensor]) -> Tensor:
    """Returns 1-D tensors concatenated, with the history of empty ones too.

    ``torch.cat`` gives a tensor of shape [0] a gradient without history: a second
    derivative would then be taken on other ranks, but not where parts are empty.
    """
    return torch.cat([x.unsqueeze(1) for x in pieces]).squeeze(1)


def local_chunk(layout: Layout, coordinates: Mapping[str, int]) -> int:
    """Returns the length of a rank's range of a leaf's buffer: 0 if others own it."""
    is_absent = layout.flat is None or layout.block(coordinates) is None
    return 0 if is_absent else layout.flat.chunk  # type: ignore[union-attr]


class PackedTree:
    """A tree as a short list of tensors: one a packed buffer, one for each other leaf.

    Args:
        treedef, leaves: the tree, with sharded leaves as leaves.
        groups: (positions, buffer) of leaves that are packed together; the buffer is
            None for a single leaf.
        paths: returns the leaves' paths.

    Attributes:
        tensors: one for each group: the flat tensor of its buffer, or the leaf's own.
    """

    def __init__(
        self,
        treedef: tree.TreeDef,
        leaves: list[Leaf],
        groups: list[tuple[list[int], FlatShard | None]],
        paths: Callable[[], list[str]],
    ):
        self.treedef = treedef
        self.leaves = leaves
        self.groups = groups
        self._paths = paths
        self.tensors: list[Any] = [
            _part(leaves[positions[0]]) if packed is None else packed.flat
            for positions, packed in groups
        ]

    @property
    def paths(self) -> list[list[str]]:
        """The paths of the leaves of each group."""
        paths = self._paths()
        return [[paths[i] for i in positions] for positions, _ in self.groups]

    def rebuild(self, tensors: Sequence[Leaf]) -> PyTree:
        """Returns the tree with other tensors in place of ``self.tensors``.

        Leaves of a buffer get a buffer again.
        """
        leaves = list(self.leaves)
        for (positions, packed), x in zip(self.groups, tensors, strict=True):
            if packed is None:
                old = leaves[positions[0]]
                if not is_sharded(old):
                    leaves[positions[0]] = x
                elif not isinstance(old, PendingGradient):  # that has no tensor
                    leaves[positions[0]] = old.with_local(x)
            else:
                # A tensor that was written in place keeps its buffer.
                packed = packed if x is packed.flat else packed.like(x)
                for i, leaf in zip(positions, packed.leaves(), strict=True):
                    leaves[i] = leaf
        return tree.unflatten(self.treedef, leaves)


def _part(leaf: Leaf) -> Leaf:
    """Returns the tensor of a leaf; None for a gradient that is still to be reduced."""
    if not isinstance(leaf, Sharded):
        return leaf
    return None if isinstance(leaf, PendingGradient) else leaf.local


def complete_shards(leaves: Sequence[Leaf]) -> list[tuple[list[int], FlatShard]]:
    """Returns (positions, buffer) of every buffer of which all leaves are here.

    Leaves that a gradient call differentiates do not count, as ``flat`` has no history
    then.
    """
    by_buffer: defaultdict[FlatShard, list[int]] = defaultdict(list)
    for i, leaf in compress(enumerate(leaves), map(is_sharded, leaves)):
        if leaf.packed is not None and leaf.parts is None:
            if leaf.why_unusable:
                leaf.check()  # which raises
            by_buffer[leaf.packed].append(i)
    complete = []
    for packed, positions in by_buffer.items():
        if len(positions) != len(packed.members):
            continue
        layouts = [leaves[i].layout for i in positions]
        if not all(map(is_, layouts, packed.members)):  # the tree has another order
            position_of = dict(zip(map(id, layouts), positions, strict=True))
            positions = list(map(position_of.get, map(id, packed.members)))
        # None is there if the tree has one leaf twice, and another not at all.
        if None not in positions:
            complete.append((positions, packed))
    return complete


def as_packed_tree(t: PyTree) -> PackedTree:
    """Returns a tree as a `PackedTree`."""
    return as_packed_trees(t)[0]


def as_packed_trees(*trees: PyTree) -> list[PackedTree]:
    """Returns trees of one structure as `PackedTree`s of the same groups of leaves."""
    flats = [tree.flatten(t, is_leaf=is_sharded) for t in trees]
    for t, (_, treedef) in zip(trees[1:], flats[1:], strict=True):
        # Two structures can be compared fast; this says where they differ.
        if treedef != flats[0][1]:
            tree.check_same_structure(trees[0], t)
    # Leaves are one group only where all trees have them in one buffer: else the
    # tensors of the trees would not pair.
    buffers = [
        {tuple(positions): packed for positions, packed in complete_shards(leaves)}
        for leaves, _ in flats
    ]
    shared = set.intersection(*map(set, buffers))
    group_of = {i: positions for positions in shared for i in positions}
    first = flats[0][0]
    cuts = dict.fromkeys([group_of.get(i, (i,)) for i in range(len(first))])
    packed_trees = []
    for (leaves, treedef), packed, t in zip(flats, buffers, trees, strict=True):
        groups = [(list(p), packed[p] if p in shared else None) for p in cuts]
        paths = lambda t=t: tree.paths(t, is_leaf=is_sharded)  # noqa: E731
        packed_trees.append(PackedTree(treedef, leaves, groups, paths))
    return packed_trees

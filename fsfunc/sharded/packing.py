"""Packing of leaves into buffers, and of trees into lists of buffers.

A user's ``tree_map`` gives every leaf a tensor of its own. Sharded calls pack the
leaves of one buffer again in their arguments and results. :class:`PackedTree` is a tree
as a list of buffers, for optimizers and sums.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, PendingGradient, Sharded, is_sharded
from fsfunc.sharded.placements import room


def repack_leaves(leaves: list[Any], coordinates: Mapping[str, int]) -> bool:
    """Packs leaves that have lost their buffer, in place; returns if there were any.

    A leaf that is differentiated stays as it is.

    Cost: one copy of these leaves, which is what a user's elementwise update costs.
    """
    whole = complete_shards(leaves)
    if sum(map(is_sharded, leaves)) == sum([len(at) for at, _ in whole]):
        return False
    within = {i for positions, _ in whole for i in positions}
    sharded = [i for i, x in enumerate(leaves) if is_sharded(x) and i not in within]
    loose = [i for i in sharded if _can_pack(leaves[i])]
    if not loose:
        return False
    for positions in group_loose_leaves(leaves, loose):
        packed = pack([leaves[i] for i in positions], coordinates)
        for i, leaf in zip(positions, packed.leaves(), strict=True):
            leaves[i] = leaf
    return True


def _can_pack(leaf: Sharded) -> bool:
    """True if a leaf may be copied: it is neither differentiated nor vmapped."""
    if leaf.layout.flat is None or leaf.parts is not None:
        return False
    if leaf._part is None is leaf._range:  # the placeholder of a gradient
        return False
    local = leaf.local
    plain = not (local.requires_grad or _torch.is_wrapped(local))
    return plain and local.ndim == 1  # vmap adds dims that the layout does not know


def group_loose_leaves(
    leaves: Sequence[Any], positions: Sequence[int]
) -> list[list[int]]:
    """Groups ``positions`` by the buffer of their leaves, each in buffer order.

    A tree may have a buffer's leaves several times (moments beside parameters), or two
    buffers of one name: leaves that would overlap get groups of their own.
    """
    found: list[list[int]] = []
    open_: dict[Any, tuple[list[int], list[tuple[int, int]], set[Any]]] = {}
    for i in positions:
        layout = leaves[i].layout
        flat = layout.flat
        dtype, owned = leaves[i].local.dtype, layout.owners
        key = flat.buffer, flat.axes, flat.size, flat.chunk, dtype, owned
        span, which = _span(layout), (layout.name, flat.offset)
        run = open_.get(key)
        if run is None or which in run[2] or _overlaps(span, run[1]):
            run = open_[key] = ([], [], set())
            found.append(run[0])
        run[0].append(i)
        run[2].add(which)
        if span[1] > span[0]:
            insort(run[1], span)
    offset = lambda i: leaves[i].layout.flat.offset  # noqa: E731
    return [sorted(positions, key=offset) for positions in found]


def _span(layout: Layout) -> tuple[int, int]:
    """(start, stop) of the whole leaf in its buffer."""
    start = layout.flat.offset if layout.flat else 0
    return start, start + room(layout.shape, layout.parts[:-1])


def _overlaps(span: tuple[int, int], others: list[tuple[int, int]]) -> bool:
    if span[0] == span[1]:
        return False
    at = bisect(others, span)
    before, after = others[at - 1 : at], others[at : at + 1]
    return any(stop > span[0] for _, stop in before) or any(
        start < span[1] for start, _ in after
    )


def pack(leaves: Sequence[Sharded], coordinates: Mapping[str, int]) -> FlatShard:
    """Copies leaves of one buffer into a new one; missing leaves are zero."""
    members = tuple(leaf.layout for leaf in leaves)
    own = {a: coordinates[a] for a in members[0].axes}
    first = leaves[0].local
    flat = space_of(first).zeros(first, (local_chunk(members[0], own),))
    packed = FlatShard(members, flat, own)
    with torch.no_grad():
        for target, leaf in zip(packed.leaves(), leaves, strict=True):
            if leaf.local.shape != target.local.shape:  # one number would be repeated
                leaf.layout.check_part(leaf.local.shape, own)
            target.local.copy_(leaf.local)
    return packed


def group_by_buffer(leaves: Sequence[Any], mine: Sequence[int]) -> list[list[int]]:
    """Groups positions by the buffer that is gathered for them, each in buffer order.

    Leaves of one buffer that are differentiated, and that are not, have two groups.
    """
    found: dict[tuple[int, int], list[int]] = {}
    loose, offsets = [], {}
    for i in mine:
        leaf = leaves[i]
        if leaf.why_unusable:
            leaf.check()
        offsets[i] = leaf.layout.flat.offset
        if leaf.packed is None:
            loose.append(i)
        else:
            found.setdefault((id(leaf.packed), id(leaf.parts)), []).append(i)
    for positions in found.values():
        positions.sort(key=offsets.__getitem__)
    groups = list(found.values())
    return [*groups, *group_loose_leaves(leaves, loose)] if loose else groups


def packed_buffer_of(
    chosen: Sequence[Sharded], coordinates: Mapping[str, int]
) -> tuple[FlatShard, Tensor]:
    """The buffer of a group of leaves, and its flat tensor, with their history."""
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
    """A rank's range of the buffer, concatenated differentiably from its leaves."""
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
    """1-D tensors concatenated, with the history of empty ones too.

    ``torch.cat`` gives a tensor of shape [0] a gradient without history: a second
    derivative would then be taken on other ranks, but not where parts are empty.
    """
    return torch.cat([x.unsqueeze(1) for x in pieces]).squeeze(1)


def local_chunk(layout: Layout, coordinates: Mapping[str, int]) -> int:
    """The elements of a rank's range of a leaf's buffer: 0 if other ranks own it."""
    absent = layout.flat is None or layout.block(coordinates) is None
    return 0 if absent else layout.flat.chunk  # type: ignore[union-attr]


class PackedTree:
    """A tree as a short list of tensors: one a packed buffer, one for each other leaf.

    Args:
        treedef, leaves: the tree, with sharded leaves as leaves.
        groups: (positions, buffer) of leaves that are packed together; the buffer is
            None for a single leaf.
        paths: returns the leaves' paths.
    """

    def __init__(self, treedef: Any, leaves: list[Any], groups: list[Any], paths: Any):
        self.treedef, self.leaves, self.groups = treedef, leaves, groups
        self._paths = paths
        self.tensors: list[Any] = [
            _part(leaves[positions[0]]) if packed is None else packed.flat
            for positions, packed in groups
        ]

    @property
    def paths(self) -> list[list[str]]:
        names = self._paths()
        return [[names[i] for i in positions] for positions, _ in self.groups]

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """The tree with these tensors for ``self.tensors``, buffers kept."""
        leaves = list(self.leaves)
        for (positions, packed), x in zip(self.groups, tensors, strict=True):
            if packed is None:
                old = leaves[positions[0]]
                if not is_sharded(old):
                    leaves[positions[0]] = x
                elif not isinstance(old, PendingGradient):
                    leaves[positions[0]] = old.with_local(x)
            else:
                packed = packed if x is packed.flat else packed.like(x)  # or in place
                for i, leaf in zip(positions, packed.leaves(), strict=True):
                    leaves[i] = leaf
        return tree.unflatten(self.treedef, leaves)


def _part(leaf: Any) -> Any:
    """The tensor of a leaf; None for a gradient that is still to be reduced."""
    if not isinstance(leaf, Sharded):
        return leaf
    return None if isinstance(leaf, PendingGradient) else leaf.local


def complete_shards(leaves: Sequence[Any]) -> list[tuple[list[int], FlatShard]]:
    """(positions, buffer) of every buffer of which all leaves are here.

    Not if a gradient call differentiates the leaves, as ``flat`` has no history then.
    """
    found: defaultdict[FlatShard, list[int]] = defaultdict(list)
    for i, leaf in compress(enumerate(leaves), map(is_sharded, leaves)):
        if leaf.packed is not None and leaf.parts is None:
            if leaf.why_unusable:
                leaf.check()
            found[leaf.packed].append(i)
    complete = []
    for packed, positions in found.items():
        if len(positions) != len(packed.members):
            continue
        layouts = [leaves[i].layout for i in positions]
        if not all(map(is_, layouts, packed.members)):  # the tree has another order
            at = dict(zip(map(id, layouts), positions, strict=True))
            positions = list(map(at.get, map(id, packed.members)))
        if None not in positions:
            complete.append((positions, packed))
    return complete


def as_packed_tree(t: Any) -> PackedTree:
    """A tree as a `PackedTree`."""
    return as_packed_trees(t)[0]


def as_packed_trees(*trees: Any) -> list[PackedTree]:
    """Trees of one structure as `PackedTree`s with the same groups of leaves."""
    flats = [tree.flatten(t, is_leaf=is_sharded) for t in trees]
    for t, (_, treedef) in zip(trees[1:], flats[1:], strict=True):
        if treedef != flats[0][1]:
            tree.check_same_structure(trees[0], t)
    whole = [
        {tuple(at): packed for at, packed in complete_shards(leaves)}
        for leaves, _ in flats
    ]
    shared = set.intersection(*map(set, whole))
    inside = {i: p for p in shared for i in p}
    first = flats[0][0]
    cuts = dict.fromkeys([inside.get(i, (i,)) for i in range(len(first))])
    out = []
    for (leaves, treedef), packed, t in zip(flats, whole, trees, strict=True):
        groups = [(list(p), packed[p] if p in shared else None) for p in cuts]
        paths = lambda t=t: tree.paths(t, is_leaf=is_sharded)  # noqa: E731
        out.append(PackedTree(treedef, leaves, groups, paths))
    return out

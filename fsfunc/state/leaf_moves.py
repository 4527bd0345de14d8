"""Leaves on their way from one layout to another, moved by all ranks in one order.

`moving` (the ranks stay, the step or its mesh is another) and `remeshing` (ranks come
and go) say how each leaf lies on all ranks, and how it will lie: a `LeafMove`.
`run_moves` sends, leaf by leaf, and builds the new tree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.mesh import Mesh
from fsfunc.runtime.memory_spaces import Offloaded, memory_like, space_of
from fsfunc.sharded.layout import Coordinates, Layout, every_coordinate
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import as_packed_tree
from fsfunc.sharded.placements import OfRank, Own, Whole
from fsfunc.sharded.plain_leaves import WHOLE, lay_leaf
from fsfunc.sharded.spent import spend
from fsfunc.sharded.transfers import Positions, Side, transfer_between
from fsfunc.tree.types import Leaf, PyTree


@dataclass(frozen=True)
class LeafMove:
    """One leaf on its way.

    Args:
        path: its path.
        old: how it lies on all ranks; ``old_part``: what this rank has of it, if any.
        new: how it will lie.
        dtype, device: of its elements, and that which computes with them here.
        placement: that of a plain leaf.
    """

    path: str
    old: Side
    old_part: Tensor | None
    new: Side
    dtype: torch.dtype
    device: torch.device
    placement: Whole | Own | None = None

    @property
    def changes(self) -> bool:
        """Whether some rank's part has other elements after it."""
        return self.old.identity != self.new.identity

    def run(self, part: Tensor | None, ranks: RankGroup | None) -> None:
        """Fills this rank's new part: called by all ranks, in one order.

        Args:
            part: zeros; None of a rank that has no part of anything from here on.
            ranks: all ranks; None of one alone.
        """
        rank, received = 0 if ranks is None else ranks.index, None
        transfer = transfer_between(self.old, self.new)
        if ranks is not None and transfer.sends_anything:
            sent = torch.empty(0, dtype=self.dtype, device=self.device)
            if self.old_part is not None:
                sent = transfer.elements_sent(rank, self.old_part).to(self.device)
            received = ranks.start(
                "all_to_all", sent, sizes=transfer.counts, name=self.path
            )
        if part is not None and self.old_part is not None:
            transfer.write_own(rank, self.old_part, part)
        if received is not None:
            elements = received.wait()
            if part is not None:
                transfer.write_received(rank, part, elements)


def run_moves(
    moves: dict[str, LeafMove],
    target: PyTree,
    ranks: RankGroup | None,
    *,
    caller: str,
    given_up: Mapping[str, Leaf] | None = None,
    leaves_here: bool = True,
) -> PyTree:
    """Moves every leaf; returns a tree laid out like ``target``.

    Args:
        moves: by path, the moves of all tensors. They are taken out of it: an old part
            is let go as soon as its leaf has moved.
        target: the new tree, of tensors without data.
        ranks: all ranks that take part; None of one alone.
        caller: the function that moves, for the ledger and for messages.
        given_up: by path, the old leaves, if their memory is given up.
        leaves_here: False on a rank that has no part of the new tree: it sends alone,
            and returns None.
    """
    # Leaves that are packed together become one tensor, as they do in the target.
    buffers = as_packed_tree(target)
    paths = tree.paths(target, is_leaf=is_sharded)
    placements = {path: m.placement for path, m in moves.items()}
    tensors: list[Leaf] = []
    with label("", caller), torch.no_grad():
        for (positions, packed), like in zip(
            buffers.groups, buffers.tensors, strict=True
        ):
            group = [paths[i] for i in positions]
            if group[0] not in moves:  # a number
                tensors.append(like)
                continue
            first, memory = moves[group[0]], None
            if given_up is not None and packed is None and not first.changes:
                old_part = first.old_part
                memory = None if old_part is None else old_part.detach()
            else:
                memory = memory_like(like, first.device) if leaves_here else None
                spans = [(0, 0)] if packed is None else packed.ranges
                for path, (start, stop) in zip(group, spans, strict=True):
                    part = memory
                    if memory is not None and packed is not None:
                        part = memory[start:stop]
                    moves[path].run(part, ranks)
            tensors.append(memory)
            del first
            for path in group:
                del moves[path]  # it refers to the old part
                if given_up is not None:
                    _give_up(given_up[path], caller)
    if not leaves_here:
        return None
    moved = buffers.rebuild(tensors)
    for path, x in zip(paths, tree.leaves(moved, is_leaf=is_sharded), strict=True):
        if isinstance(x, Tensor):
            lay_leaf(x, placements[path] or WHOLE)
    return moved


def _give_up(leaf: Leaf, caller: str) -> None:
    """Marks an old leaf as used, and frees its memory if nobody else has a view."""
    if isinstance(leaf, Sharded):
        leaf._part = leaf._range = leaf.packed = None
    if isinstance(leaf, Sharded | Tensor):
        spend(leaf, _MOVED.format(caller))


def layout_and_part(leaf: Leaf, coordinates: Coordinates) -> tuple[Layout, Tensor]:
    """Returns how a leaf lies, and this rank's part; of a gathered buffer all of it."""
    if not is_sharded(leaf):
        return Layout(tuple(leaf.shape), leaf.dtype), leaf.detach()
    layout = leaf.layout
    if not is_gathered(leaf):
        return layout, leaf.local.detach()
    flat: Any = layout.flat
    layout = replace(layout, parts=layout.parts[:-1])
    shape = layout.local_shape(coordinates)
    whole: Any = leaf.packed.whole  # type: ignore[union-attr]
    part = whole[flat.offset : flat.offset + math.prod(shape)].view(shape)
    return layout, part.detach()


def is_gathered(leaf: Sharded) -> bool:
    """Returns whether the rank has the leaf's whole buffer, as it is now."""
    packed = leaf.packed
    return packed is not None and packed.is_cached(packed.flat.dtype)


def find_unmovable(moves: Collection[LeafMove]) -> LeafMove | None:
    """Returns a leaf that belongs to ranks' buffers, where something changes."""
    if not any(m.changes for m in moves):
        return None
    return next(
        (m for m in moves if is_of_rank(m.old.layout) or is_of_rank(m.new.layout)), None
    )


def is_of_rank(layout: Layout) -> bool:
    """Returns whether a leaf is made of what each rank's own buffer has."""
    return any(isinstance(part, OfRank) for part in layout.parts)


@lru_cache(64)
def _positions_of(axes: tuple[tuple[str, int], ...]) -> Positions:
    return tuple(every_coordinate(dict(axes)))


def positions_on(mesh: Mesh) -> Positions:
    """Returns the coordinates of each rank of a mesh, in order."""
    return _positions_of(tuple(mesh.axes.items()))


def computing_device(x: Tensor) -> torch.device:
    """Returns the device that computes with a tensor, which may lie in a store."""
    space = space_of(x)
    return space.device if isinstance(space, Offloaded) else x.device


_MOVED = (
    "this tree's memory was given to ff.{}(..., donate=True): go on with what it "
    "returned"
)

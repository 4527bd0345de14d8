"""A tree that is laid out, moved to another layout by collectives alone.

``place`` lays out stand-ins of the leaves, whole tensors without data, for the other
step: that says where everything is to lie (`MovedLeaves` is their source). Then `move`
takes leaf by leaf from the old parts to the new ones (`sharded.transfers` says who
sends what), and gives old memory back as it goes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.attribution import label
from fsfunc.comm.comparison import Lines, Section, agree
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Here, Mesh, note_axes_read
from fsfunc.runtime.memory_spaces import Offloaded, memory_like, space_of
from fsfunc.sharded.layout import Layout, Split, every_coordinate
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import as_packed_tree
from fsfunc.sharded.placements import OfRank, Own, Whole, describe_tensor
from fsfunc.sharded.plain_leaves import WHOLE, lay_leaf, placement_of
from fsfunc.sharded.spent import refuse_unusable, spend
from fsfunc.sharded.transfers import Positions, Side, transfer_between
from fsfunc.state.leaf_sources import GivenLeaves, Shapes
from fsfunc.transforms.local.averaging import LocalState
from fsfunc.tree.types import Leaf, PyTree


class MovedLeaves(Shapes):
    """The leaves of a tree that is laid out, as whole tensors without data.

    Args:
        t: the tree.
        mesh: the mesh that it lies on.
        rank: this rank.

    Attributes:
        stand_ins: ``t`` with a whole tensor without data for each sharded leaf.
        leaves: by path, the leaves of ``t``.
        placements: by path, those of its plain leaves.
        whole_paths: the leaves of optimizers that are to be whole on every rank.
    """

    def __init__(self, t: PyTree, batch: PyTree, mesh: Mesh, rank: int):
        refuse_unusable(t)
        _refuse_local_states(t)
        paths, leaves, treedef = tree.flatten_with_paths(t, is_leaf=is_sharded)
        self.mesh, self.rank = mesh, rank
        self.leaves: dict[str, Leaf] = dict(zip(paths, leaves, strict=True))
        self.whole_paths: set[str] = set()
        self.placements: dict[str, Whole | Own | None] = {
            path: placement_of(x) for path, x in self.leaves.items()
        }
        for path, x in self.leaves.items():
            if is_sharded(x):
                self._check_lies_here(path, x)
        fake = fake_modes.fake_mode_of(tree.leaves(batch, is_leaf=is_sharded))

        def stand_in(x: Leaf) -> Leaf:
            if not is_sharded(x):
                return x
            options: dict[str, Any] = {"dtype": x.local.dtype, "device": x.device}
            if _torch.fake_active():  # a plan: all that is made is fake already
                return torch.empty(x.layout.shape, **options)
            with fake:
                return torch.empty(x.layout.shape, **options)

        self.stand_ins: PyTree = tree.unflatten(treedef, map(stand_in, leaves))

    @property
    def splits(self) -> dict[str, tuple[Split, ...]]:
        """By path, how leaves are split that the caller laid out so."""
        return {
            path: x.layout.splits
            for path, x in self.leaves.items()
            if is_sharded(x) and x.layout.splits and not _is_of_rank(x.layout)
        }

    def lines(self) -> Lines:
        """Describes what lies where, which ranks compare before anything is sent."""
        sharded = ((p, x) for p, x in self.leaves.items() if is_sharded(x))
        described = [
            (f"layout of {path!r}", f"{x.layout}{', gathered' * _is_gathered(x)}")
            for path, x in sharded
        ]
        return [("mesh of the state", str(self.mesh.axes)), *described]

    def section(
        self, paths: Sequence[str], leaves: Sequence[Leaf], notes: dict[Any, Any] | None
    ) -> Section:
        # Values of plain leaves; stand-ins have none.
        return GivenLeaves.section(self, paths, leaves, notes)

    def note_whole(self, path: str) -> None:
        self.whole_paths.add(path)

    def check_born(self, path: str, leaf: Sharded | Tensor | None) -> None:
        old = self.leaves[path]
        if leaf is None:
            raise ValueError(_OTHER_STATE.format(path))
        if is_sharded(old) and tuple(old.shape) != tuple(leaf.shape):
            is_now = describe_tensor(old.shape, old.dtype)
            would_be = describe_tensor(leaf.shape, leaf.dtype)
            raise ValueError(_UNMOVABLE.format(repr(path), is_now, would_be))

    def _check_lies_here(self, path: str, x: Sharded) -> None:
        """Raises unless a leaf lies on the mesh that it is said to lie on."""
        axes, coordinates = self.mesh.axes, self.mesh.coordinates(self.rank)
        fits = all(axes.get(axis) == n for axis, n in x.layout.sizes.items())
        if x.packed is not None:
            there = x.packed.coordinates
            fits = fits and all(coordinates.get(a) == i for a, i in there.items())
        if not fits:
            raise ValueError(
                f"place: {path!r} lies as {x.layout}, and not so on {self.mesh}: name "
                "the mesh of the step that made this state, "
                "ff.place(step, state, ..., on=mesh)"
            )
        x.layout.check_part(x.part_shape, coordinates)


_OTHER_STATE = (
    "place: {!r} and the other leaves of this optimizer's state cannot move: for the "
    "parameters as they will lie, its init makes a tree of other leaves. Move the "
    "parameters, ff.place(fn, state.params, ...), and begin its state anew, "
    "optimizer.init(params); or go by a checkpoint, where they are as they were"
)
_UNMOVABLE = (
    "place: {} {} cannot move: for the parameters as they will lie, the optimizer has "
    "it as {}. Codes in 8 bits, and what reductions lost, are of the elements of one "
    "rank's buffer. Move the parameters, ff.place(fn, state.params, ...), and begin "
    "its state anew, optimizer.init(params)"
)


def is_moved(t: PyTree, named: Collection[str]) -> bool:
    """Returns whether ``place`` moves leaves of ``t``, and does not leave all in place.

    Transforms have laid out what is packed or owned by a rank, and those of another
    step lay it out anew. A leaf that is split alone stays as it is, unless it is named.

    Args:
        named: paths that rules of layouts name.
    """
    paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
    return any(
        x.layout.flat is not None or bool(x.layout.owners) or path in named
        for path, x in zip(paths, leaves, strict=True)
        if is_sharded(x)
    )


@dataclass(frozen=True)
class _Move:
    """One leaf on its way.

    Args:
        path: its path.
        old: how it lies on all ranks; ``old_part``: this rank's part of that.
        new: how it will lie.
    """

    path: str
    old: Side
    old_part: Tensor
    new: Side

    @property
    def changes(self) -> bool:
        """Whether a rank's part has other elements after it."""
        return self.old.identity != self.new.identity

    def run(self, part: Tensor, ranks: RankGroup | None) -> None:
        """Fills ``part``, this rank's new part: called by all ranks, in one order."""
        rank, handle = 0 if ranks is None else ranks.index, None
        transfer = transfer_between(self.old, self.new)
        if ranks is not None and transfer.sends_anything:
            sent = transfer.elements_sent(rank, self.old_part)
            sent = sent.to(_computing_device(part))
            counts = transfer.counts
            handle = ranks.start("all_to_all", sent, sizes=counts, name=self.path)
        transfer.write_own(rank, self.old_part, part)
        if handle is not None:
            transfer.write_received(rank, part, handle.wait())


def move(source: MovedLeaves, target: PyTree, here: Here, donate: bool) -> PyTree:
    """Returns a tree laid out like ``target``, with the values that ``source`` has.

    Args:
        target: what `lay_out` has made of the stand-ins: leaves without data.
        here: this rank, on the mesh that the target lies on.
        donate: give up the old memory, buffer by buffer.

    Raises:
        ValueError: a leaf that cannot move; before anything is sent.

    Cost: a rank receives each element that it needs and has not, once. Beside the old
    tree and the new one: twice the largest leaf's part. With ``donate`` an old buffer
    is freed when its last leaf has left.
    """
    paths, targets, treedef = tree.flatten_with_paths(target, is_leaf=is_sharded)
    pairs = list(zip(paths, targets, strict=True))
    targets = [_with_old_layout(source, path, x, here.mesh) for path, x in pairs]
    moves = {
        path: _move_of(source, path, x, here.mesh)
        for path, x in zip(paths, targets, strict=True)
        if isinstance(x, Tensor | Sharded)
    }
    _check_movable(moves.values())
    ranks = get_group(tuple(here.mesh.axes), here) if here.mesh.size > 1 else None
    if ranks is not None and any(m.changes for m in moves.values()):
        note_axes_read(here.mesh.axes)  # each rank of a plan sends what it has
        if ranks.link.moves_data:
            lines = [
                *source.lines(),
                *((p, str(m.new.layout)) for p, m in moves.items()),
            ]
            agree(ranks, Section(_UNLIKE, lines))

    # Leaves that are packed together become one tensor, as they do in the target.
    buffers = as_packed_tree(tree.unflatten(treedef, targets))
    tensors: list[Leaf] = []
    with label("", "place"), torch.no_grad():
        for (positions, packed), like in zip(
            buffers.groups, buffers.tensors, strict=True
        ):
            group = [paths[i] for i in positions]
            if group[0] not in moves:  # a number
                tensors.append(like)
                continue
            first = moves[group[0]]
            if donate and packed is None and not first.changes:
                tensors.append(first.old_part.detach())
            else:
                memory = memory_like(like, _computing_device(first.old_part))
                spans = [(0, 0)] if packed is None else packed.ranges
                for path, (start, stop) in zip(group, spans, strict=True):
                    part = memory if packed is None else memory[start:stop]
                    moves[path].run(part, ranks)
                tensors.append(memory)
            del first
            for path in group:
                del moves[path]  # it refers to the old part
                if donate:
                    _give_up(source.leaves[path])
    moved = buffers.rebuild(tensors)
    for path, x in zip(paths, tree.leaves(moved, is_leaf=is_sharded), strict=True):
        if isinstance(x, Tensor):
            lay_leaf(x, source.placements.get(path) or WHOLE)
    return moved


def _with_old_layout(source: MovedLeaves, path: str, target: Leaf, mesh: Mesh) -> Leaf:
    """Returns how a leaf is to lie: as before, where nothing of the step says how.

    Raises:
        ValueError: it cannot lie so on the new mesh.
    """
    old = source.leaves[path]
    if not is_sharded(old) or is_sharded(target) or path in source.whole_paths:
        return target
    axes = old.layout.axes
    ranks = range(mesh.size)
    if any(axis not in mesh.axes for axis in axes) or any(
        source.mesh.coordinates(r)[a] != mesh.coordinates(r)[a]
        for a in axes
        for r in ranks
    ):
        raise ValueError(
            f"place: no unit of the function takes {path!r} as a parameter, and no "
            f"optimizer that it applies has it: {old.layout} would stay as it is, "
            f"which it cannot on {mesh}. Name what it copies, by "
            'like={"extra/ema": "params"}, or leave it out of the tree'
        )
    shape = old.layout.local_shape(mesh.coordinates(source.rank))
    stand_in = torch.empty(shape, dtype=old.local.dtype, device="meta")
    return Sharded(stand_in, old.layout)


def _move_of(
    source: MovedLeaves, path: str, target: Sharded | Tensor, mesh: Mesh
) -> _Move:
    old = source.leaves[path]
    old_layout, part = _layout_and_part(old, source.mesh, source.rank)
    is_cut = is_sharded(target)
    new_layout = target.layout if is_cut else Layout(target.shape, part.dtype)
    dtype = target.local.dtype if is_cut else target.dtype
    if dtype != part.dtype:
        raise ValueError(
            f"place: {path!r} is {part.dtype}, and would be {dtype}: convert it first"
        )
    old_positions, new_positions = _positions(source.mesh), _positions(mesh)
    new = Side(new_layout, new_positions)
    return _Move(path, Side(old_layout, old_positions), part, new)


def _layout_and_part(leaf: Leaf, mesh: Mesh, rank: int) -> tuple[Layout, Tensor]:
    """Returns how a leaf lies, and this rank's part; of a gathered buffer all of it."""
    if not is_sharded(leaf):
        return Layout(tuple(leaf.shape), leaf.dtype), leaf.detach()
    layout, coordinates = leaf.layout, mesh.coordinates(rank)
    if not _is_gathered(leaf):
        return layout, leaf.local.detach()
    flat: Any = layout.flat
    layout = replace(layout, parts=layout.parts[:-1])
    shape = layout.local_shape(coordinates)
    whole: Any = leaf.packed.whole  # type: ignore[union-attr]
    part = whole[flat.offset : flat.offset + math.prod(shape)].view(shape)
    return layout, part.detach()


def _is_gathered(leaf: Sharded) -> bool:
    """Returns whether the rank has the leaf's whole buffer, as it is now."""
    packed = leaf.packed
    return packed is not None and packed.is_cached(packed.flat.dtype)


def _is_of_rank(layout: Layout) -> bool:
    return any(isinstance(part, OfRank) for part in layout.parts)


@lru_cache(64)
def _positions_of(axes: tuple[tuple[str, int], ...]) -> Positions:
    return tuple(every_coordinate(dict(axes)))


def _positions(mesh: Mesh) -> Positions:
    """Returns the coordinates of each rank, in order."""
    return _positions_of(tuple(mesh.axes.items()))


def _check_movable(moves: Collection[_Move]) -> None:
    """Raises where what belongs to ranks' buffers would stay, and these change."""
    changed = next((m for m in moves if m.changes), None)
    for m in moves if changed is not None else ():
        if _is_of_rank(m.old.layout) or _is_of_rank(m.new.layout):
            raise ValueError(
                _UNMOVABLE.format(repr(m.path), m.old.layout, m.new.layout)
            )


def _give_up(leaf: Leaf) -> None:
    """Marks an old leaf as used, and frees its memory if nobody else has a view."""
    if isinstance(leaf, Sharded):
        leaf._part = leaf._range = leaf.packed = None
    if isinstance(leaf, Sharded | Tensor):
        spend(leaf, _MOVED)


def _computing_device(x: Tensor) -> torch.device:
    """Returns the device that computes with a tensor, which may lie in a store."""
    space = space_of(x)
    return space.device if isinstance(space, Offloaded) else x.device


def _refuse_local_states(t: PyTree) -> None:
    is_local = lambda x: isinstance(x, LocalState)  # noqa: E731
    if any(map(is_local, tree.leaves(t, is_leaf=is_local))):
        raise ValueError(
            "place of a LocalState that is laid out: each rank trains a copy of its "
            "own. Move one tree, such as the ranks' mean, and begin anew"
        )


_UNLIKE = "ranks move a tree that lies otherwise, or is to lie otherwise"
_MOVED = (
    "this tree's memory was given to ff.place(..., donate=True): go on with what it "
    "returned"
)

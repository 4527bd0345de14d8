"""A tree that is laid out, moved to another layout by collectives alone.

``place`` lays out stand-ins of the leaves, whole tensors without data, for the other
step: that says where everything is to lie (`MovedLeaves` is their source). Then `move`
takes leaf by leaf from the old parts to the new ones (`sharded.transfers` says who
sends what), and gives old memory back as it goes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.comparison import Lines, Section, agree
from fsfunc.comm.groups import get_group
from fsfunc.comm.mesh import Here, Mesh, note_axes_read
from fsfunc.sharded.layout import Layout, Split
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import Own, Whole, describe_tensor
from fsfunc.sharded.plain_leaves import placement_of
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.sharded.transfers import Side
from fsfunc.state.agreeing import kind_of
from fsfunc.state.leaf_moves import (
    LeafMove,
    computing_device,
    find_unmovable,
    is_gathered,
    layout_and_part,
    positions_on,
    run_moves,
)
from fsfunc.state.leaf_sources import GivenLeaves, Shapes
from fsfunc.state.train_state import TrainState
from fsfunc.state.values import lies_on
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
        self._moments = set(map(id, _leaves_of_optimizers(t)))
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
        self._treedef = treedef

    @property
    def is_all_laid_out(self) -> bool:
        """Whether no plain tensor is there that was never laid out.

        Of such a one ranks compare the values.
        """
        return all(
            self.placements[path] is not None
            for path, x in self.leaves.items()
            if isinstance(x, Tensor)
        )

    @property
    def key(self) -> Hashable:
        """Structure, layouts, shapes and dtypes: all that decides where leaves go."""
        described = (
            (x.layout, x.local.dtype, x.device) if is_sharded(x) else kind_of(x)
            for x in self.leaves.values()
        )
        return self._treedef, tuple(self.mesh.axes.items()), *described

    @property
    def splits(self) -> dict[str, tuple[Split, ...]]:
        """By path, how leaves are split that the caller laid out so.

        Not those of optimizers' states, which lie as the parameters will.
        """
        return {
            path: x.layout.splits
            for path, x in self.leaves.items()
            if is_sharded(x) and x.layout.splits and id(x) not in self._moments
        }

    def lines(self) -> Lines:
        """Describes what lies where, which ranks compare before anything is sent."""
        sharded = ((p, x) for p, x in self.leaves.items() if is_sharded(x))
        described = [
            (f"layout of {path!r}", f"{x.layout}{', gathered' * is_gathered(x)}")
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
        coordinates = self.mesh.coordinates(self.rank)
        if not lies_on(x, self.mesh, coordinates):
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


def move(source: MovedLeaves, target: PyTree, here: Here, donate: bool) -> PyTree:
    """Returns a tree laid out like ``target``, with the values that ``source`` has.

    Args:
        target: what `lay_out` has made of the stand-ins: leaves without data.
        here: this rank, on the mesh that the target lies on.
        donate: give up the old memory, buffer by buffer.

    Raises:
        ValueError: a leaf that cannot move; before anything is sent.

    Cost: a rank receives each element that it needs and has not, once. Beside the old
    tree and the new one: what it sends and receives of one leaf. With ``donate`` an old
    buffer is freed when its last leaf has left.
    """
    paths, laid, treedef = tree.flatten_with_paths(target, is_leaf=is_sharded)
    targets: list[Leaf] = []
    for path, x in zip(paths, laid, strict=True):
        is_tensor = isinstance(x, Tensor | Sharded)
        x = x if is_tensor else source.leaves[path]  # a number, as it is now
        targets.append(_with_old_layout(source, path, x, here.mesh))
    moves = {
        path: _move_of(source, path, x, here.mesh)
        for path, x in zip(paths, targets, strict=True)
        if isinstance(x, Tensor | Sharded)
    }
    if (stays := find_unmovable(moves.values())) is not None:
        layouts = stays.old.layout, stays.new.layout
        raise ValueError(_UNMOVABLE.format(repr(stays.path), *layouts))
    ranks = get_group(tuple(here.mesh.axes), here) if here.mesh.size > 1 else None
    if ranks is not None and any(m.changes for m in moves.values()):
        note_axes_read(here.mesh.axes)  # each rank of a plan sends what it has
        if ranks.link.moves_data:
            new_lines = [(path, str(m.new.layout)) for path, m in moves.items()]
            agree(ranks, Section(_UNLIKE, [*source.lines(), *new_lines]))
    return run_moves(
        moves,
        tree.unflatten(treedef, targets),
        ranks,
        caller="place",
        given_up=source.leaves if donate else None,
    )


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
) -> LeafMove:
    old, placement = source.leaves[path], source.placements[path]
    old_layout, part = layout_and_part(old, source.mesh.coordinates(source.rank))
    is_cut = is_sharded(target)
    new_layout = target.layout if is_cut else Layout(target.shape, part.dtype)
    dtype = target.local.dtype if is_cut else target.dtype
    if dtype != part.dtype:
        raise ValueError(
            f"place: {path!r} is {part.dtype}, and would be {dtype}: convert it first"
        )
    if isinstance(placement, Own) and source.mesh.axes != mesh.axes:
        raise ValueError(
            f"place: {path!r} is each rank's own on {source.mesh}; on {mesh} nobody "
            "says whose: make it one value (ff.pmean), or leave it out of the tree"
        )
    old_side = Side(old_layout, positions_on(source.mesh))
    new_side = Side(new_layout, positions_on(mesh))
    device = computing_device(part)
    return LeafMove(path, old_side, part, new_side, dtype, device, placement)


def _leaves_of_optimizers(t: PyTree) -> list[Leaf]:
    """Returns the leaves of the optimizers' states in a tree."""
    is_state = lambda x: isinstance(x, TrainState)  # noqa: E731
    states = filter(is_state, tree.leaves(t, is_leaf=is_state))
    return [x for s in states for x in tree.leaves(s.opt_state, is_leaf=is_sharded)]


def _refuse_local_states(t: PyTree) -> None:
    is_local = lambda x: isinstance(x, LocalState)  # noqa: E731
    if any(map(is_local, tree.leaves(t, is_leaf=is_local))):
        raise ValueError(
            "place of a LocalState that is laid out: each rank trains a copy of its "
            "own. Move one tree, such as the ranks' mean, and begin anew"
        )


_UNLIKE = "ranks move a tree that lies otherwise, or is to lie otherwise"

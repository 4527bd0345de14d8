"""Layouts of plain tensors in a state: replicated, or each rank's own.

A leaf that no unit takes stays a plain tensor, with the layout `Whole` (replicated) or
`Own` (rank-local). The layout is stored in a table by storage: so it is that of
detached and donated leaves too, and ends when the memory is freed. ``place`` and
``init_state`` set it, and ``shard`` sets that of a returned state.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import Own, Whole, describe_tensor
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.tree.types import Leaf, PyTree

_Tree = TypeVar("_Tree")

WHOLE = Whole()
_Range = tuple[int, int, int]  # of a storage: offset, number of elements, extent
# Several leaves may be views of one storage, each with a layout of its own.
_LAID = StorageTable[dict[_Range, Whole | Own]]()


def lay_leaf(x: Tensor, placement: Whole | Own | None = WHOLE) -> None:
    """Sets the layout of a plain leaf; None removes it."""
    x = _torch.unwrapped(x)
    if x.layout != torch.strided:  # a sparse tensor has no range of a storage
        return
    with _torch.as_plain_tensors():  # a donated leaf too
        placements, leaf_range = _LAID.get(x), _range(x)
        if placements is None:
            placements = _LAID[x] = {}
    if placement is None:
        placements.pop(leaf_range, None)
    else:
        placements[leaf_range] = placement


def placement_of(x: Leaf) -> Whole | Own | None:
    """Returns the layout of a plain tensor, or None if it has none."""
    if not isinstance(x, Tensor):
        return None
    x = _torch.unwrapped(x)
    with _torch.as_plain_tensors():  # of a donated leaf too, which else would raise
        placements = _LAID.get(x)
        return placements.get(_range(x)) if placements else None


def _range(x: Tensor) -> _Range:
    strides = zip(x.shape, x.stride(), strict=True)
    extent = sum((n - 1) * stride for n, stride in strides)
    return int(x.storage_offset()), x.numel(), extent


def lay_leaves(t: _Tree, rank_local: Mapping[str, Own] | None = None) -> _Tree:
    """Sets the layouts of the plain leaves of ``t`` to replicated, and returns ``t``.

    Args:
        rank_local: by path, the leaves that are each rank's own.

    Raises:
        TypeError: one of these is no plain tensor.
    """
    leaves = tree.leaves(t, is_leaf=is_sharded)
    paths = tree.paths(t, is_leaf=is_sharded) if rank_local else [""] * len(leaves)
    for path, x in zip(paths, leaves, strict=True):
        placement = rank_local.get(path, WHOLE) if rank_local else WHOLE
        if isinstance(x, Tensor):
            lay_leaf(x, placement)
        elif placement is not WHOLE:
            raise TypeError(
                f"layouts: {path!r} is given {placement}, and is no plain tensor: a "
                "unit takes it as a parameter, which is sharded. Pass the rank's own "
                "value to the unit as an input"
            )
    return t


def copy_placements(new: _Tree, old: PyTree) -> _Tree:
    """Gives the plain leaves of ``new`` the layouts of ``old``, and returns ``new``.

    Of trees of two structures nothing says which leaf is which: they stay as they are.
    """
    leaves, treedef = tree.flatten(new, is_leaf=is_sharded)
    old_leaves, old_treedef = tree.flatten(old, is_leaf=is_sharded)
    if treedef == old_treedef:
        for x, y in zip(leaves, old_leaves, strict=True):
            if isinstance(x, Tensor) and (placement := placement_of(y)) is not None:
                lay_leaf(x, placement)
    return new


def locate_state(
    returned: tree.TreeDef, state_before: tree.TreeDef | None
) -> tuple[int, tree.TreeDef]:
    """Returns where the state lies in what a step returned: first leaf, structure.

    The state is all of it. Of a tuple it is the part that has the structure of the
    state given, ``state_before``, or else the first part.
    """
    parts: list[Any] = []
    if returned.type is tuple and returned != state_before:
        parts = returned.children()
    k = parts.index(state_before) if state_before in parts else 0
    return sum([x.num_leaves for x in parts[:k]]), parts[k] if parts else returned


def lay_returned(
    out: PyTree,
    leaves: list[Leaf],
    treedef: tree.TreeDef,
    state_before: tree.TreeDef | None,
    leaves_before: Sequence[Leaf],
    rank_local: Container[str] | None,
) -> PyTree:
    """Gives the plain leaves of a returned state the layouts at their paths.

    A replicated leaf that became the rank's own value gets none, and the next call
    refuses it.

    Args:
        out: what the call returned.
        leaves, treedef: its leaves and its structure.
        state_before, leaves_before: those of the state that the call was given.
        rank_local: the paths of values that are the rank's own; None: unknown.
    """
    start, state = locate_state(treedef, state_before)
    positions = range(start, start + state.num_leaves)
    plain = [i for i in positions if isinstance(leaves[i], Tensor)]
    paths = tree.paths_of(state) if plain and rank_local else ()
    placements = {}
    for i in plain:
        # A step returns new tensors, which have no layout: that of the leaf that was
        # given at this place comes first. What was the rank's own stays so; what was
        # replicated may have become the rank's own.
        placement = (
            placement_of(leaves_before[i - start]) if state == state_before else None
        )
        placement = placement or placement_of(leaves[i])
        if not isinstance(placement, Own):
            varies = (
                rank_local is None or bool(paths) and paths[i - start] in rank_local
            )
            placement = None if varies else WHOLE
        placements[i] = placement
    # All are read before any is set: two leaves may be one tensor. One memory has one
    # layout, so a leaf that is to have another is copied.
    has_copies = False
    for i, placement in placements.items():
        if placement_of(leaves[i]) not in (None, placement):
            leaves[i], has_copies = leaves[i].clone(), True
        lay_leaf(leaves[i], placement)
    return tree.unflatten(treedef, leaves) if has_copies else out


def find_rank_local(t: PyTree) -> str | None:
    """Returns the path of a leaf that is each rank's own, or None."""
    leaves = tree.leaves(t, is_leaf=is_sharded)
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and isinstance(placement_of(x), Own):
            return tree.paths(t, is_leaf=is_sharded)[i]
    return None


def check_laid_out(leaves: Sequence[Leaf], args: Sequence[PyTree]) -> None:
    """Raises if a leaf of a state is a plain tensor without a layout.

    Args:
        leaves: the leaves of the first of ``args``.
        args: the arguments of the step.

    Raises:
        ValueError: names the leaf, and the ways to lay it out.
    """
    plain = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    for i in plain:
        if placement_of(x := leaves[i]) is None:
            # First: of a donated leaf another error says why it is gone.
            refuse_unusable(args[0])
            path = tree.paths(args[0], is_leaf=is_sharded)[i]
            leaf = describe_tensor(x.shape, x.dtype, repr(path) if path else "")
            raise ValueError(_PLAIN.format(leaf))


_PLAIN = (
    "{}, in the first argument of a sharded function, is a plain tensor that was not "
    "laid out, and may be one value on all ranks or each rank's own. Lay the tree out: "
    "ff.init_state(step, params, optimizer, batch), or ff.place(step, t, batch), with "
    'layouts={{path: ff.Own("data")}} for what each rank has of its own (a hidden '
    "state that is carried on); or ff.lay_like(new, old) for values that are equal on "
    "all ranks, computed from a tree that is laid out. What is this rank's own, and no "
    "state, is another argument"
)

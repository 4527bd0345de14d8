"""Layouts of plain tensors in a state: replicated, or each rank's own.

A leaf that no unit takes stays a plain tensor, with the layout `Whole` (replicated) or
`Own` (rank-local). The layout is kept in a table by storage: so it holds for detached
and donated leaves too, and ends when the memory is freed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.runtime.memory import StorageTable
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import Own, Whole, describe
from fsfunc.sharded.spent import refuse_spent

WHOLE = Whole()
_Range = tuple[int, int, int]  # of a storage: offset, number of elements, extent
_LAID = StorageTable[dict[_Range, Whole | Own]]()


def lay_leaf(x: Tensor, how: Whole | Own | None = WHOLE) -> None:
    """Sets the layout of a plain leaf; None removes it."""
    x = _torch.unwrapped(x)
    if x.layout != torch.strided:
        return
    with _torch.as_plain_tensors():  # a donated leaf too
        found, at = _LAID.get(x), _range(x)
        if found is None:
            found = _LAID[x] = {}
    if how is None:
        found.pop(at, None)
    else:
        found[at] = how


def laid_as(x: Any) -> Whole | Own | None:
    """The layout of a plain tensor, or None if it has none."""
    if not isinstance(x, Tensor):
        return None
    x = _torch.unwrapped(x)
    with _torch.as_plain_tensors():
        found = _LAID.get(x)
        return found.get(_range(x)) if found else None


def _range(x: Tensor) -> _Range:
    steps = zip(x.shape, x.stride(), strict=True)
    return int(x.storage_offset()), x.numel(), sum((n - 1) * step for n, step in steps)


def lay_leaves(t: Any, own: Mapping[str, Own] | None = None) -> Any:
    """Sets the layouts of the plain leaves of ``t`` to replicated; returns ``t``.

    Args:
        own: by path, the leaves that are each rank's own.

    Raises:
        TypeError: one of these is no plain tensor.
    """
    leaves = tree.leaves(t, is_leaf=is_sharded)
    paths = tree.paths(t, is_leaf=is_sharded) if own else [""] * len(leaves)
    for path, x in zip(paths, leaves, strict=True):
        how = own.get(path, WHOLE) if own else WHOLE
        if isinstance(x, Tensor):
            lay_leaf(x, how)
        elif how is not WHOLE:
            raise TypeError(
                f"layouts: {path!r} is given {how}, and is no plain tensor: a unit "
                "takes it as a parameter, which is sharded. Pass the rank's own value "
                "to the unit as an input"
            )
    return t


def lay_as(new: Any, old: Any) -> Any:
    """Gives the plain leaves of ``new`` the layouts of ``old``; returns ``new``."""
    leaves, treedef = tree.flatten(new, is_leaf=is_sharded)
    given, before = tree.flatten(old, is_leaf=is_sharded)
    if treedef == before:
        for x, y in zip(leaves, given, strict=True):
            if isinstance(x, Tensor) and (how := laid_as(y)) is not None:
                lay_leaf(x, how)
    return new


def state_in(
    spec: tree.TreeDef, before: tree.TreeDef | None
) -> tuple[int, tree.TreeDef]:
    """The place of the state in what a step returned: its first leaf, its structure.

    That is all of it; or of a tuple, the part of the structure of the state given,
    ``before``, or else the first.
    """
    parts: list[Any] = []
    if spec.type is tuple and spec != before:
        parts = spec.children()
    k = parts.index(before) if before in parts else 0
    return sum([x.num_leaves for x in parts[:k]]), parts[k] if parts else spec


def laid_returned(
    out: Any,
    made: list[Any],
    spec: tree.TreeDef,
    before: tree.TreeDef | None,
    given: Sequence[Any],
    own: Container[str] | None,
) -> Any:
    """Gives the plain leaves of a returned state the layouts at their paths.

    Where a replicated leaf became a value of the rank's own, it gets none. A leaf in
    memory that has another layout, as another leaf, is copied.

    Args:
        out: what the call returned; ``made``, ``spec``: its leaves and structure.
        before, given: the structure and the leaves of the state that it was given.
        own: the paths of values that are the rank's own; None if that is unknown.
    """
    start, state = state_in(spec, before)
    every = range(start, start + state.num_leaves)
    plain = [i for i in every if isinstance(made[i], Tensor)]
    paths = tree.paths_of(state) if plain and own else ()
    wanted = {}
    for i in plain:
        how = laid_as(given[i - start]) if state == before else None
        how = how or laid_as(made[i])
        if not isinstance(how, Own):
            varies = own is None or bool(paths) and paths[i - start] in own
            how = None if varies else WHOLE
        wanted[i] = how
    copies = False
    for i, how in wanted.items():
        if laid_as(made[i]) not in (None, how):
            made[i], copies = made[i].clone(), True
        lay_leaf(made[i], how)
    return tree.unflatten(spec, made) if copies else out


def holds_own(t: Any) -> str | None:
    """The path of a leaf that is each rank's own, or None."""
    leaves = tree.leaves(t, is_leaf=is_sharded)
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and isinstance(laid_as(x), Own):
            return tree.paths(t, is_leaf=is_sharded)[i]
    return None


def check_laid_out(leaves: Sequence[Any], args: Sequence[Any]) -> None:
    """Raises if a leaf of a state is a plain tensor without a layout.

    Args:
        leaves: those of the first of ``args``.

    Raises:
        ValueError: names the leaf, and the ways to lay it out.
    """
    plain = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    for i in plain:
        if laid_as(x := leaves[i]) is None:
            refuse_spent(args[0])
            path = tree.paths(args[0], is_leaf=is_sharded)[i]
            said = describe(x.shape, x.dtype, repr(path) if path else "")
            raise ValueError(_PLAIN.format(said))


_PLAIN = (
    "{}, in the first argument of a sharded function, is a plain tensor that was not "
    "laid out, and may be one value on all ranks or each rank's own. Lay the tree out: "
    "ff.init_state(step, params, optimizer, batch), or ff.place(step, t, batch), with "
    'layouts={{path: ff.Own("data")}} for what each rank has of its own (a hidden '
    "state that is carried on); or ff.lay_like(new, old) for values that are equal on "
    "all ranks, computed from a tree that is laid out. What is this rank's own, and no "
    "state, is another argument"
)

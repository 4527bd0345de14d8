"""Which leaves an optimizer updates, and their tensors as a few flat ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.movable import strided
from fsfunc.packing import split_alike
from fsfunc.parts import describe
from fsfunc.sharded import Sharded, is_sharded

Tree = Any
Mask = Callable[[str, Any], bool]  # (path, leaf) -> whether it applies to that leaf


def trainable(leaf: Any) -> bool:
    """Whether an optimizer updates ``leaf``: a tensor or a shard of floating dtype.

    Raises:
        TypeError: a complex leaf: neither updated rightly nor safely left out.
    """
    if not isinstance(leaf, (Tensor, Sharded)):
        return False
    dtype = leaf.dtype
    if dtype.is_complex:
        raise TypeError(
            f"cannot optimize {said(leaf)}: complex parameters are not supported; "
            "keep torch.view_as_real of it as the parameter"
        )
    return dtype.is_floating_point


def local(leaf: Any) -> Tensor:
    """The tensor that this rank holds of a leaf."""
    return leaf.local if is_sharded(leaf) else leaf


def twin(leaf: Any) -> Any:
    """Another leaf over the same memory, in the same home.

    Of a leaf that is written over the old one is spent: the new one is another object.
    """
    return leaf.twin() if is_sharded(leaf) else leaf.detach()


def zeros_like(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Zeros laid out as ``params`` are, with None for leaves that are not trainable."""
    return map_flat(
        lambda tensors: [torch.zeros_like(t, dtype=dtype) for t in tensors],
        params,
        rest=None,
    )


_SAME = object()


def map_flat(
    fn: Callable[[list[Tensor]], Sequence[Tensor]], values: Tree, *, rest: Any = _SAME
) -> Tree:
    """``values`` with ``fn`` of its trainable leaves, taken as few flat tensors.

    Other leaves stay what they are, or become ``rest``.
    """
    leaves, treedef = tree.flatten(values, is_sharded)
    active = [i for i, leaf in enumerate(leaves) if trainable(leaf)]
    out = list(leaves) if rest is _SAME else [rest] * len(leaves)
    (buffers,) = split([[leaves[i] for i in active]])
    for i, leaf in zip(active, buffers.rebuild(fn(buffers.tensors)), strict=True):
        out[i] = leaf
    return tree.unflatten(treedef, out)


def along(params: Tree, treedef: tree.TreeDef, other: Tree, what: str) -> list[Any]:
    """What ``other`` holds at the place of each leaf of ``params``, None included.

    Raises:
        TreeMismatch: ``other`` lacks the structure; the message names the path.
    """
    try:
        return treedef.flatten_up_to(other)
    except ValueError:
        try:
            tree.map(lambda leaf, _: leaf, params, other, is_leaf=is_sharded)
        except tree.TreeMismatch as error:
            raise tree.TreeMismatch(f"{what} do not fit: {error}") from None
        raise


def paths_of(treedef: tree.TreeDef) -> list[str]:
    """The paths of the leaves of a tree flattened by `is_sharded`."""
    try:
        hash(treedef)
    except TypeError:  # a user's node may have static data that do not hash
        return _paths_of.__wrapped__(treedef)
    return _paths_of(treedef)


@lru_cache(maxsize=64)  # a step asks for the same one every time
def _paths_of(treedef: tree.TreeDef) -> list[str]:
    return tree.paths(tree.unflatten(treedef, range(treedef.num_leaves)))


class Loose:
    """Whole tensors in the place of `Buffers`, which would find nothing to join."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = [strided(x) for x in tensors]
        self.groups = [([i], None) for i in range(len(self.tensors))]

    def rebuild(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


def split(columns: Sequence[Sequence[Any]]) -> list[Any]:
    """Equally long lists of leaves that fit together, each as few flat tensors."""
    if not any(map(is_sharded, columns[0])):
        return [Loose(column) for column in columns]
    return split_alike(*map(list, columns))


def fits(leaf: Any, other: Any) -> bool:
    """Whether ``other`` lies as ``leaf`` does: in shape, layout and device."""
    if is_sharded(leaf):
        if not is_sharded(other):  # a leaf cut over nothing is a plain tensor's equal
            plain = isinstance(other, Tensor) and not leaf.layout.parts
            return plain and leaf.part_shape == other.shape
        mine, its = leaf.layout, other.layout
        if mine is not its and (mine.shape, mine.parts) != (its.shape, its.parts):
            return False
        return leaf.part_shape == other.part_shape and leaf.device == other.device
    elif not isinstance(other, Tensor):
        return False
    return leaf.shape == other.shape and leaf.device == other.device


def said(leaf: Any) -> str:
    """A leaf as error messages name it."""
    if is_sharded(leaf):
        return str(leaf.layout)
    if isinstance(leaf, Tensor):
        return f"{describe(leaf.shape, leaf.dtype)} on {leaf.device}"
    return "None" if leaf is None else f"a {type(leaf).__name__}"

"""The leaves that an optimizer updates, and their tensors as a few flat ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.groups import strided
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import composable
from fsfunc.optim.places import (
    copied_to,
    kept_like,
    meet,
    room_like,
    some_offloaded,
)
from fsfunc.sharded.complex_numbers import as_real
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import as_packed_trees
from fsfunc.sharded.placements import describe_tensor

Tree = Any
Mask = Callable[[str, Any], bool]  # (path, leaf) -> whether it applies to that leaf

_layout = attrgetter("layout")


def trainable(leaf: Any) -> bool:
    """True if an optimizer updates ``leaf``, of floating or complex dtype."""
    return isinstance(leaf, (Tensor, Sharded)) and differentiable(leaf)


def check_real(params: Tree, what: str, why: str) -> None:
    """Raise TypeError where a leaf to update is complex.

    Args:
        what, why: "f takes", "as torch's takes none".
    """
    leaves, treedef = tree.flatten(params, is_sharded)
    for i, leaf in enumerate(leaves):
        if trainable(leaf) and leaf.dtype.is_complex:
            raise TypeError(
                f"{paths_of(treedef)[i]!r} is {said(leaf)}, and {what} no complex "
                f"numbers, {why}: keep torch.view_as_real(w) as the parameter, and "
                "take torch.view_as_complex of it where it is read; or leave it to "
                "another optimizer, by ff.partition"
            )


def local(leaf: Any) -> Tensor:
    """The tensor that this rank holds of a leaf."""
    return leaf.local if is_sharded(leaf) else leaf


def held_dtype(leaf: Any) -> torch.dtype:
    """The dtype of `local`, which a layout may not know, and without making it."""
    if is_sharded(leaf) and leaf.packed is not None:
        return leaf.packed.flat.dtype
    return local(leaf).dtype


def zeros_like(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Zeros laid out as ``params`` are, with None for leaves that are not trainable.

    Those of a complex leaf are complex too, ``dtype`` is that of their parts.

    Raises:
        TypeError: a ``dtype`` of which no complex numbers are made.
    """
    check_width(params, dtype)
    return map_flat(
        lambda tensors: [kept_like(t, _like(t, dtype), zeros=True) for t in tensors],
        params,
        rest=None,
    )


def filled_like(params: Tree, value: float) -> Tree:
    """The same, of any one number: of a complex leaf both parts are."""

    def filled(x: Tensor) -> Tensor:
        made = kept_like(x)
        return made.fill_(complex(value, value) if made.is_complex() else value)

    return map_flat(
        lambda tensors: [filled(t) for t in tensors],
        params,
        rest=None,
    )


def copied(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """``params`` in memory of their own, and None for what is not trainable.

    Raises:
        TypeError: as `zeros_like`.
    """
    check_width(params, dtype)

    def copy(x: Tensor) -> Tensor:
        return copied_to(kept_like(x, _like(x, dtype)), x.detach())

    return map_flat(lambda tensors: list(map(copy, tensors)), params, rest=None)


def check_width(params: Tree, dtype: torch.dtype | None) -> None:
    """Raise TypeError for complex leaves that would be kept in a narrow ``dtype``."""
    if dtype is not None and dtype.itemsize < 4:
        what = f"moments and averages in {dtype} hold"
        check_real(params, what, "as torch has none of such parts (float32 does)")


def _like(x: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """``dtype``, or the complex one of such parts."""
    return dtype.to_complex() if dtype is not None and x.is_complex() else dtype


def warn_narrow_moments(
    name: str, decay: float, params: Tree, asked: torch.dtype | None
) -> None:
    """Warns of moments in 16 bits without a scale which these are too few for.

    Args:
        decay: of the moments, which gain (1 - decay) of what is new.
        asked: their dtype, if it is not that of each parameter.
    """
    leaves = tree.leaves(params, is_sharded)
    dtypes = {asked or held_dtype(x) for x in leaves if trainable(x)}
    faults = []
    if torch.float16 in dtypes:
        faults.append("in float16 one below 6e-8 is 0")
    if torch.bfloat16 in dtypes and asked is None and 1 - decay < 2**-8:
        faults.append(f"in bfloat16 one does not decay by b2 = {decay}")
    if faults:
        warn(
            f"{name}'s moments have 16 bits and no scale: {', '.join(faults)}. Give "
            "moment_dtype=torch.float32 (or torch.uint8, which has scales), or "
            "ff.master_weights(optimizer)",
        )


def floating(params: Tree) -> Tree:
    """``params`` themselves, with None for leaves that are not trainable."""
    leaves, treedef = tree.flatten(params, is_sharded)
    return tree.unflatten(treedef, [x if trainable(x) else None for x in leaves])


def origins(values: Any) -> Iterator[tuple[str, str, str]]:
    """The leaves of optimizers' states of which a step makes the parameters.

    Yields:
        (path of the state, path of the parameter, path of the leaf); a state names the
        field of such leaves as ``origins``.
    """
    ends = lambda x: is_sharded(x) or _marked(x, "origins")  # noqa: E731
    paths, leaves, _ = tree.flatten_with_paths(values, is_leaf=ends)
    for at, node in zip(paths, leaves, strict=True):
        if is_sharded(node) or not ends(node):
            continue
        within = "/".join(filter(None, (at, node.origins)))
        for name in tree.paths(getattr(node, node.origins), is_sharded):
            yield at, name, f"{within}/{name}" if name else within


_MARKS = {"origins": str, "evaluated": Callable, "rounds": bool}  # and their kinds


def _marked(x: Any, mark: str) -> bool:
    """True if the class of a state has the mark, and not a field of that name."""
    return isinstance(getattr(type(x), mark, None), _MARKS[mark])


def check_unfollowed(what: str, state: Any) -> None:
    """Raise ValueError where a state follows parameters as its own updates move them.

    What changes these updates afterwards would be undone (`master_weights`), or be of
    other parameters (`ema`).
    """
    follows = lambda x: any(_marked(x, mark) for mark in _MARKS)  # noqa: E731
    ends = lambda x: is_sharded(x) or follows(x)  # noqa: E731
    for x in filter(follows, tree.leaves(state, ends)):
        raise ValueError(
            f"{what} changes the updates of an optimizer that keeps "
            f"{type(x).__name__}, of the parameters that its own updates give: put "
            f"that optimizer last, or around, as in ff.master_weights({what}(...))"
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


def along(treedef: tree.TreeDef, other: Tree, what: str) -> list[Any]:
    """The value in ``other`` at the place of each leaf of a tree, None included.

    Raises:
        TreeMismatch: ``other`` lacks the structure; the message names the path.
    """
    try:
        return treedef.flatten_up_to(other)
    except ValueError:
        places = tree.unflatten(treedef, range(treedef.num_leaves))
        try:
            tree.map(lambda place, _: place, places, other, is_leaf=is_sharded)
        except tree.TreeMismatch as error:
            raise tree.TreeMismatch(f"{what} do not fit: {error}") from None
        raise


def chosen(
    treedef: tree.TreeDef,
    mask: Sequence[bool],
    values: Tree,
    others: Tree | None = None,
    what: str = "optimizer state",
) -> Tree:
    """``values`` at the leaves where ``mask``; elsewhere ``others``, or None."""
    rest = [None] * len(mask) if others is None else along(treedef, others, what)
    rows = zip(mask, along(treedef, values, what), rest, strict=True)
    return tree.unflatten(treedef, [x if yes else other for yes, x, other in rows])


def paths_of(treedef: tree.TreeDef) -> list[str]:
    """The paths of the leaves of a tree flattened by `is_sharded`."""
    try:
        hash(treedef)
    except TypeError:  # a user's node may have static data that do not hash
        return _paths_of.__wrapped__(treedef)
    return _paths_of(treedef)


@lru_cache(maxsize=64)  # a step asks for the same one every time
def _paths_of(treedef: tree.TreeDef) -> list[str]:
    return tree.paths_of(treedef)


@lru_cache(maxsize=64)  # a step asks for the same one every time
def _alone(count: int) -> tuple[tuple[tuple[int], None], ...]:
    return tuple(((i,), None) for i in range(count))


def are_strided(tensors: Sequence[Tensor]) -> bool:
    """True if none is sparse."""
    return {torch.strided}.issuperset(map(_layout, tensors))


class Loose:
    """Whole tensors, where a `PackedTree` would find nothing to join."""

    def __init__(self, tensors: Sequence[Tensor], known: bool = False):
        known = known or are_strided(tensors)
        self.tensors = list(tensors if known else map(strided, tensors))
        self.groups = _alone(len(self.tensors))

    def rebuild(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


def split(columns: Sequence[Sequence[Any]]) -> list[Any]:
    """Equally long lists of leaves that fit together, each as few flat tensors."""
    if not any(map(is_sharded, columns[0])):
        return [Loose(column) for column in columns]
    return as_packed_trees(*map(list, columns))


class RealViews:
    """Flat tensors of which complex ones are seen as real ones, ``[..., 2]``.

    So updates know no complex numbers. The views are made when they are asked for:
    one that stayed would be a use of memory that is donated.
    """

    def __init__(self, within: Any):
        self.within, self.groups = within, within.groups

    @property
    def tensors(self) -> list[Tensor]:
        return list(map(as_real, self.within.tensors))

    def rebuild(self, tensors: Sequence[Tensor]) -> list[Any]:
        pairs = zip(self.within.tensors, tensors, strict=True)
        return self.within.rebuild(
            [torch.view_as_complex(x) if t.is_complex() else x for t, x in pairs]
        )


def held(buffers: Any) -> list[Tensor]:
    """The tensors of leaves as few flat ones, none of them a view made for this."""
    return buffers.within.tensors if isinstance(buffers, RealViews) else buffers.tensors


def split_real(columns: Sequence[Sequence[Any]]) -> list[Any]:
    """`split`, with complex tensors as `RealViews`."""
    return [
        RealViews(b) if any(map(torch.is_complex, b.tensors)) else b
        for b in split(columns)
    ]


def first_unfit(
    leaves: Sequence[Any], others: Sequence[Any], positions: Sequence[int]
) -> int | None:
    """The first position where ``others`` does not lie as ``leaves`` does.

    In shape, layout or device, or as complex numbers and real ones. Leaves that are
    packed lie as their flat shard does, so of two of these that is asked once.
    """
    alike: set[tuple[Any, Any]] = set()
    for i in positions:
        leaf, other = leaves[i], others[i]
        packed = type(leaf) is type(other) is Sharded
        pair = (leaf.packed, other.packed) if packed else (None, None)
        if pair in alike and leaf.layout is other.layout:
            continue
        mine, its = pair
        if mine is None or its is None or mine.coordinates != its.coordinates:
            if not _fits(leaf, other):
                return i
        elif leaf.layout is not other.layout and not _same_place(leaf, other):
            return i
        elif pair not in alike:
            if not _fits(mine.flat, its.flat):
                return i
            alike.add(pair)
    return None


def _same_place(leaf: Sharded, other: Sharded) -> bool:
    mine, its = leaf.layout, other.layout
    return mine is its or (mine.shape, mine.parts) == (its.shape, its.parts)


def _fits(leaf: Any, other: Any) -> bool:
    if is_sharded(leaf):
        if not is_sharded(other):  # a leaf cut over nothing is a plain tensor's equal
            plain = isinstance(other, Tensor) and not leaf.layout.parts
            if not plain or leaf.part_shape != other.shape:
                return False
            return leaf.dtype.is_complex is other.dtype.is_complex
        if not _same_place(leaf, other):
            return False
        if leaf.part_shape != other.part_shape:
            return False
        mine, its = held_dtype(leaf), held_dtype(other)
    elif not isinstance(other, Tensor) or leaf.shape != other.shape:
        return False
    else:
        mine, its = leaf.dtype, other.dtype
    if mine is not its and mine.is_complex is not its.is_complex:
        return False
    return leaf.device == other.device or meet(leaf, other)


def said(leaf: Any) -> str:
    """A leaf as error messages name it."""
    if is_sharded(leaf):
        said = str(leaf.layout)
        held = None if leaf.why_unusable else held_dtype(leaf)
        if held is None or held.is_complex is leaf.dtype.is_complex:
            return said
        return f"{said}, held in {held}"
    if isinstance(leaf, Tensor):
        return f"{describe_tensor(leaf.shape, leaf.dtype)} on {leaf.device}"
    return "None" if leaf is None else f"a {type(leaf).__name__}"


def scaled(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Each tensor times ``factor`` (a number or 0-dim tensor), in its own dtype."""
    if composable():
        return [t * factor for t in tensors]

    def by(t: Tensor) -> float | Tensor:
        return factor.to(t.device) if isinstance(factor, Tensor) else factor

    if some_offloaded(tensors):
        return [torch.mul(t, by(t), out=room_like(t)) for t in tensors]
    if isinstance(factor, Tensor) and _apart(factor, tensors):
        return [t * by(t) for t in tensors]
    found = list(torch._foreach_mul(list(tensors), factor)) if tensors else []
    if isinstance(factor, Tensor) and not all(t.ndim for t in tensors):
        # Two numbers without dims give one of the wider dtype.
        found = [x.to(t.dtype) for x, t in zip(found, tensors, strict=True)]
    return found


def _apart(number: Tensor, tensors: Sequence[Tensor]) -> bool:
    """True if a number does not multiply all of the tensors where it lies.

    A device multiplies by what is on the host, but not the other way.
    """
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        return True
    return number.device not in devices and number.device.type != "cpu"


def differentiated(tensors: Sequence[Tensor]) -> bool:
    """True if operations on ``tensors`` may be differentiated."""
    if composable():
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

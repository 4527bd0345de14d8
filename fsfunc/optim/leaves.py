"""The leaves that an optimizer updates, and their tensors as a few flat ones.

A parameter tree has hundreds of small leaves, most of which lie side by side in the
flat buffers of their units. Optimizers make and update states buffer by buffer:
`flat_buffers` turns a list of leaves into few tensors, and its ``rebuild`` turns
tensors of the same shapes back into leaves. Only `trainable` leaves take part; a state
has None where the parameters have another leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import warn
from fsfunc.comm.groups import to_strided
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import composable
from fsfunc.optim.places import (
    can_meet,
    copy_to,
    some_offloaded,
    state_memory_like,
    state_zeros_like,
    step_memory_like,
)
from fsfunc.sharded.complex_numbers import as_real
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packing import PackedTree, as_packed_trees
from fsfunc.sharded.placements import describe_tensor
from fsfunc.tree.types import Leaf, PyTree

Tree: TypeAlias = PyTree
Mask = Callable[[str, Leaf], bool]  # (path, leaf) -> whether it applies to that leaf
# By flat tensor: the positions of its leaves, and their shard if they are packed.
LeafGroups = Sequence[tuple[Sequence[int], FlatShard | None]]
Buffers: TypeAlias = "PackedTree | UnpackedTree | RealViews"  # leaves as flat tensors

_layout = attrgetter("layout")


def trainable(leaf: Leaf) -> bool:
    """Returns whether an optimizer updates ``leaf``: its dtype has derivatives."""
    return isinstance(leaf, (Tensor, Sharded)) and differentiable(leaf)


def check_real(params: Tree, subject: str, why: str) -> None:
    """Raises TypeError where a leaf to update is complex.

    Args:
        subject: the start of a sentence, such as "f takes".
        why: its end, such as "as torch's takes none".
    """
    leaves, treedef = tree.flatten(params, is_sharded)
    for i, leaf in enumerate(leaves):
        if trainable(leaf) and leaf.dtype.is_complex:
            raise TypeError(
                f"{paths_of(treedef)[i]!r} is {describe_leaf(leaf)}, and {subject} no "
                f"complex numbers, {why}: keep torch.view_as_real(w) as the parameter, "
                "and take torch.view_as_complex of it where it is read; or leave it to "
                "another optimizer, by ff.partition"
            )


def local_tensor(leaf: Leaf) -> Tensor:
    """Returns the tensor that this rank holds of a leaf."""
    return leaf.local if is_sharded(leaf) else leaf


def stored_dtype(leaf: Leaf) -> torch.dtype:
    """Returns the dtype of `local_tensor`.

    It may differ from ``leaf.dtype``, the layout's: that of moments, say.
    """
    if is_sharded(leaf) and leaf.packed is not None:
        return leaf.packed.flat.dtype  # so the leaf need not make its own tensor
    return local_tensor(leaf).dtype


def zeros_like(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Returns zeros laid out as ``params`` are, with None for untrainable leaves.

    For a complex leaf they are complex too, and ``dtype`` is that of their parts.

    Raises:
        TypeError: a ``dtype`` of which no complex numbers are made.
    """
    check_parts_dtype(params, dtype)
    return map_flat(
        lambda tensors: state_zeros_like(
            tensors, [_dtype_like(t, dtype) for t in tensors]
        ),
        params,
        untrainable=None,
    )


def filled_like(params: Tree, value: float) -> Tree:
    """Returns a tree like that of `zeros_like`, of any one number.

    For a complex leaf both parts are that number, as torch's optimizers have it.
    """

    def filled(x: Tensor) -> Tensor:
        full = state_memory_like(x)
        return full.fill_(complex(value, value) if full.is_complex() else value)

    return map_flat(
        lambda tensors: [filled(t) for t in tensors],
        params,
        untrainable=None,
    )


def trainable_copy(params: Tree, dtype: torch.dtype | None = None) -> Tree:
    """Returns a copy of ``params``, with None for leaves that are not trainable.

    Raises:
        TypeError: as `zeros_like`.
    """
    check_parts_dtype(params, dtype)

    def copy(x: Tensor) -> Tensor:
        return copy_to(state_memory_like(x, _dtype_like(x, dtype)), x.detach())

    return map_flat(lambda tensors: list(map(copy, tensors)), params, untrainable=None)


def check_parts_dtype(params: Tree, dtype: torch.dtype | None) -> None:
    """Raises TypeError for complex leaves of which ``dtype`` is to store the parts."""
    if dtype is not None and dtype.itemsize < 4:
        subject = f"moments and averages in {dtype} hold"
        check_real(params, subject, "as torch has none of such parts (float32 does)")


def _dtype_like(x: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns ``dtype``, or for a complex ``x`` the complex dtype with such parts."""
    return dtype.to_complex() if dtype is not None and x.is_complex() else dtype


def warn_narrow_moments(
    name: str, decay: float, params: Tree, moment_dtype: torch.dtype | None
) -> None:
    """Warns of moments in 16 bits without a scale, where 16 bits are too few.

    Args:
        decay: of the moments, which gain (1 - decay) of what is new.
        moment_dtype: their dtype, if it is not that of each parameter.
    """
    leaves = tree.leaves(params, is_sharded)
    dtypes = {moment_dtype or stored_dtype(x) for x in leaves if trainable(x)}
    faults = []
    if torch.float16 in dtypes:  # its smallest number above 0 is 2^-24
        faults.append("in float16 one below 6e-8 is 0")
    # A change of less than 2^-8 of a number of 8 bits is rounded away. Who asks for
    # bfloat16 moments by name knows that.
    if torch.bfloat16 in dtypes and moment_dtype is None and 1 - decay < 2**-8:
        faults.append(f"in bfloat16 one does not decay by b2 = {decay}")
    if faults:
        warn(
            f"{name}'s moments have 16 bits and no scale: {', '.join(faults)}. Give "
            "moment_dtype=torch.float32 (or torch.uint8, which has scales), or "
            "ff.master_weights(optimizer)",
        )


def trainable_only(params: Tree) -> Tree:
    """Returns ``params`` with None in place of leaves that are not trainable."""
    leaves, treedef = tree.flatten(params, is_sharded)
    return tree.unflatten(treedef, [x if trainable(x) else None for x in leaves])


def origins(values: PyTree) -> Iterator[tuple[str, str, str]]:
    """Finds the leaves of optimizers' states that a step makes parameters from.

    Such as the float32 copies of `master_weights`: a step overwrites the parameters
    with these, whatever they were. The class of such a state names their field in its
    attribute ``origins``.

    Yields:
        (path of the state, path of the parameter, path of the leaf in the state).
    """
    ends = lambda x: is_sharded(x) or _has_mark(x, "origins")  # noqa: E731
    paths, nodes, _ = tree.flatten_with_paths(values, is_leaf=ends)
    for state_path, node in zip(paths, nodes, strict=True):
        if is_sharded(node) or not ends(node):
            continue
        field_path = "/".join(filter(None, (state_path, node.origins)))
        for param in tree.paths(getattr(node, node.origins), is_sharded):
            yield state_path, param, f"{field_path}/{param}" if param else field_path


# Class attributes of states that follow the parameters, and what they are.
_MARKS: dict[str, Any] = {"origins": str, "evaluated": Callable, "rounds": bool}


def _has_mark(x: PyTree, mark: str) -> bool:
    """Returns whether the class of ``x`` has the mark.

    A user's own state may have a field of that name, which is no mark: of a named tuple
    the class has a descriptor there, which is of another type.
    """
    return isinstance(getattr(type(x), mark, None), _MARKS[mark])


def check_follows_no_params(name: str, state: PyTree) -> None:
    """Raises ValueError where a state follows the parameters by its own updates.

    ``name`` changes these updates afterwards. `master_weights` would undo that, and the
    averages of `ema` would be of other parameters.
    """
    follows = lambda x: any(_has_mark(x, mark) for mark in _MARKS)  # noqa: E731
    ends = lambda x: is_sharded(x) or follows(x)  # noqa: E731
    for x in filter(follows, tree.leaves(state, ends)):
        raise ValueError(
            f"{name} changes the updates of an optimizer that keeps "
            f"{type(x).__name__}, of the parameters that its own updates give: put "
            f"that optimizer last, or around, as in ff.master_weights({name}(...))"
        )


_UNCHANGED = object()


def map_flat(
    fn: Callable[[list[Tensor]], Sequence[Tensor]],
    values: Tree,
    *,
    untrainable: Leaf = _UNCHANGED,
) -> Tree:
    """Applies ``fn`` to the trainable leaves, taken as few flat tensors.

    Other leaves stay what they are, or become ``untrainable``.
    """
    leaves, treedef = tree.flatten(values, is_sharded)
    active = [i for i, leaf in enumerate(leaves) if trainable(leaf)]
    new = list(leaves) if untrainable is _UNCHANGED else [untrainable] * len(leaves)
    (buffers,) = flat_buffers([[leaves[i] for i in active]])
    for i, leaf in zip(active, buffers.rebuild(fn(buffers.tensors)), strict=True):
        new[i] = leaf
    return tree.unflatten(treedef, new)


def flatten_like(treedef: tree.TreeDef, other: Tree, title: str) -> list[Leaf]:
    """Returns the value in ``other`` at the place of each leaf of a tree, also None.

    Args:
        title: what errors call ``other``, such as "gradients".

    Raises:
        TreeMismatch: ``other`` lacks the structure; the message names the path.
    """
    try:
        return treedef.flatten_up_to(other)
    except ValueError:
        # This error names no path: `tree.map` finds the place in a second walk.
        positions = tree.unflatten(treedef, range(treedef.num_leaves))
        try:
            tree.map(lambda position, _: position, positions, other, is_leaf=is_sharded)
        except tree.TreeMismatch as error:
            raise tree.TreeMismatch(f"{title} do not fit: {error}") from None
        raise


def select_leaves(
    treedef: tree.TreeDef,
    mask: Sequence[bool],
    values: Tree,
    others: Tree | None = None,
    title: str = "optimizer state",
) -> Tree:
    """Returns ``values`` at the leaves where ``mask``; elsewhere ``others``, or None.

    Args:
        mask: by leaf of ``treedef``.
        title: what errors call both trees.
    """
    nones = [None] * len(mask)
    unchosen = nones if others is None else flatten_like(treedef, others, title)
    rows = zip(mask, flatten_like(treedef, values, title), unchosen, strict=True)
    return tree.unflatten(treedef, [x if yes else other for yes, x, other in rows])


def paths_of(treedef: tree.TreeDef) -> list[str]:
    """Returns the paths of the leaves of a tree flattened by `is_sharded`."""
    try:
        hash(treedef)
    except TypeError:  # a user's node may have static data without a hash
        return _paths_of.__wrapped__(treedef)
    return _paths_of(treedef)


@lru_cache(maxsize=64)  # a step asks for the same one every time
def _paths_of(treedef: tree.TreeDef) -> list[str]:
    return tree.paths_of(treedef)


@lru_cache(maxsize=64)  # a step asks for the same one every time
def _single_leaf_groups(count: int) -> tuple[tuple[tuple[int], None], ...]:
    """Returns the ``groups`` of a `PackedTree` that has no packed leaves."""
    return tuple(((i,), None) for i in range(count))


def are_strided(tensors: Sequence[Tensor]) -> bool:
    """Returns whether no tensor is sparse."""
    return {torch.strided}.issuperset(map(_layout, tensors))


class UnpackedTree:
    """Plain tensors with the interface of a `PackedTree`, each by itself."""

    def __init__(self, tensors: Sequence[Tensor], known_strided: bool = False):
        is_dense = known_strided or are_strided(tensors)
        # A sparse gradient, of an embedding, is made dense: kernels take no other.
        self.tensors: list[Tensor] = list(
            tensors if is_dense else map(to_strided, tensors)
        )
        self.groups: LeafGroups = _single_leaf_groups(len(self.tensors))

    def rebuild(self, tensors: Sequence[Tensor]) -> list[Leaf]:
        """Returns the leaves with these tensors: here the tensors themselves."""
        return list(tensors)


def flat_buffers(columns: Sequence[Sequence[Leaf]]) -> list[Any]:
    """Turns equally long lists of leaves that fit together into `Buffers`.

    Each list becomes few flat tensors, all lists in the same groups of leaves.
    """
    # Without sharded leaves nothing is packed, and a step need not look for it.
    if not any(map(is_sharded, columns[0])):
        return [UnpackedTree(column) for column in columns]
    return as_packed_trees(*map(list, columns))


class RealViews:
    """`Buffers` whose complex tensors are seen as real ones, of shape ``[..., 2]``.

    So updates know no complex numbers. The views are made when they are asked for: a
    view that is stored would be another use of donated memory, which is then copied.
    """

    buffers: PackedTree | UnpackedTree
    groups: LeafGroups

    def __init__(self, buffers: PackedTree | UnpackedTree):
        self.buffers, self.groups = buffers, buffers.groups

    @property
    def tensors(self) -> list[Tensor]:
        return list(map(as_real, self.buffers.tensors))

    def rebuild(self, tensors: Sequence[Tensor]) -> list[Leaf]:
        """Returns the leaves with these tensors, as complex where they were."""
        pairs = zip(self.buffers.tensors, tensors, strict=True)
        return self.buffers.rebuild(
            [torch.view_as_complex(x) if t.is_complex() else x for t, x in pairs]
        )


def stored_tensors(buffers: Buffers) -> list[Tensor]:
    """Returns the flat tensors as they are stored, also complex ones: no views."""
    return (
        buffers.buffers.tensors if isinstance(buffers, RealViews) else buffers.tensors
    )


def real_flat_buffers(columns: Sequence[Sequence[Leaf]]) -> list[Any]:
    """Returns `flat_buffers` of leaves, with complex tensors as `RealViews`."""
    return [
        RealViews(b) if any(map(torch.is_complex, b.tensors)) else b
        for b in flat_buffers(columns)
    ]


def first_mismatch(
    leaves: Sequence[Leaf], others: Sequence[Leaf], positions: Sequence[int]
) -> int | None:
    """Returns the first position where ``others`` does not lie as ``leaves`` does.

    They must agree in shape, layout, device, and in being real or complex.
    """
    # Packed leaves lie as their flat shards do, so each pair of shards is compared
    # once and not leaf by leaf: this runs in every step.
    fitting: set[tuple[FlatShard | None, FlatShard | None]] = set()
    for i in positions:
        leaf, other = leaves[i], others[i]
        both_sharded = type(leaf) is type(other) is Sharded
        pair = (leaf.packed, other.packed) if both_sharded else (None, None)
        if pair in fitting and leaf.layout is other.layout:
            continue
        ours, theirs = pair
        if ours is None or theirs is None or ours.coordinates != theirs.coordinates:
            if not _leaves_fit(leaf, other):
                return i
        elif leaf.layout is not other.layout and not _same_layout(leaf, other):
            return i
        elif pair not in fitting:
            if not _leaves_fit(ours.flat, theirs.flat):
                return i
            fitting.add(pair)
    return None


def _same_layout(leaf: Sharded, other: Sharded) -> bool:
    """Returns whether both are cut alike; names and dtypes may differ."""
    a, b = leaf.layout, other.layout
    return a is b or (a.shape, a.parts) == (b.shape, b.parts)


def _leaves_fit(leaf: Leaf, other: Leaf) -> bool:
    if is_sharded(leaf):
        if not is_sharded(other):  # a leaf cut over nothing is a plain tensor's equal
            plain = isinstance(other, Tensor) and not leaf.layout.parts
            if not plain or leaf.part_shape != other.shape:
                return False
            return leaf.dtype.is_complex is other.dtype.is_complex
        if not _same_layout(leaf, other):
            return False
        if leaf.part_shape != other.part_shape:
            return False
        dtype, other_dtype = stored_dtype(leaf), stored_dtype(other)
    elif not isinstance(other, Tensor) or leaf.shape != other.shape:
        return False
    else:
        dtype, other_dtype = leaf.dtype, other.dtype
    if dtype is not other_dtype and dtype.is_complex is not other_dtype.is_complex:
        return False
    return leaf.device == other.device or can_meet(leaf, other)


def describe_leaf(leaf: Leaf) -> str:
    """Returns a leaf as error messages name it."""
    if is_sharded(leaf):
        layout = str(leaf.layout)
        dtype = (
            None if leaf.why_unusable else stored_dtype(leaf)
        )  # spent: it has no tensor
        if dtype is None or dtype.is_complex is leaf.dtype.is_complex:
            return layout
        return f"{layout}, held in {dtype}"
    if isinstance(leaf, Tensor):
        return f"{describe_tensor(leaf.shape, leaf.dtype)} on {leaf.device}"
    return "None" if leaf is None else f"a {type(leaf).__name__}"


def scale_tensors(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Returns each tensor times ``factor`` (a number or 0-dim tensor), in its dtype."""
    if composable():  # single operations, which torch.func and autograd can go through
        return [t * factor for t in tensors]

    def factor_beside(t: Tensor) -> float | Tensor:
        return factor.to(t.device) if isinstance(factor, Tensor) else factor

    if some_offloaded(tensors):
        return [
            torch.mul(t, factor_beside(t), out=step_memory_like(t)) for t in tensors
        ]
    if isinstance(factor, Tensor) and _cannot_multiply(factor, tensors):
        return [t * factor_beside(t) for t in tensors]
    products = list(torch._foreach_mul(list(tensors), factor)) if tensors else []
    if isinstance(factor, Tensor) and not all(t.ndim for t in tensors):
        # The product of two 0-dim tensors is of the wider dtype.
        products = [x.to(t.dtype) for x, t in zip(products, tensors, strict=True)]
    return products


def _cannot_multiply(number: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Returns whether the number must be moved to multiply some of the tensors.

    A device multiplies by a 0-dim tensor of the host, but not the other way.
    """
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        return True
    return number.device not in devices and number.device.type != "cpu"


def may_be_differentiated(tensors: Sequence[Tensor]) -> bool:
    """Returns whether operations on ``tensors`` may be differentiated."""
    if composable():
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

"""Trees with the layouts of another: ``reduce_like``, ``lay_like``, ``randn_like``.

The first two shard whole tensors: the mean of the ranks' own, or values that are equal
on all ranks. The third draws noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import (
    apply_map,
    claim_equal,
    declare_type,
    note_laid_out,
)
from fsfunc.comm.collectives import pbroadcast
from fsfunc.comm.groups import get_group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import averaged_axes, here
from fsfunc.comm.typed_maps import MEAN, REDUCE, TAKE_PART
from fsfunc.core.casts import differentiable
from fsfunc.core.frames import frame
from fsfunc.optim.leaves import may_be_differentiated
from fsfunc.runtime.generators import draw_number
from fsfunc.runtime.random_blocks import draw, standard_normal
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.plain_leaves import WHOLE, lay_leaf, placement_of
from fsfunc.sharded.slices import take
from fsfunc.state.unsharding import block_layout, elements_by_rank
from fsfunc.tracing.groups import recorded_tensor
from fsfunc.tree.types import Leaf, PyTree

_Tree = TypeVar("_Tree")


def reduce_like(t: _Tree, like: PyTree) -> _Tree:
    """Returns the means of ``t`` over the ranks, with the layouts of ``like``.

    For values that differ between ranks, such as the clipped and summed gradients of
    their samples: the result is sharded as the parameters are.

    Args:
        t: whole floating tensors, each rank's own, in the structure of ``like``; None
            stays None.
        like: the tree with the layouts; where a leaf of it is plain, the mean is whole.

    Raises:
        TreeMismatch: another structure.
        ValueError: another shape, or axes that no ``shard`` around takes means over.

    Transpose: the cotangents' parts, gathered.

    Cost: one reduce-scatter (for plain leaves: all-reduce) for each dtype, of a copy of
    all that is in it.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> layer = ff.unit(lambda w, x: x @ w)
    >>> def step(w, x):
    ...     return ff.reduce_like(x.sum(0), like=w)
    >>> def main():
    ...     x = torch.full((2, 3), 1.0 + mesh.rank)
    ...     w = ff.place(ff.shard(layer, mesh, "data"), torch.ones(3), x)
    ...     return ff.unshard(ff.shard(step, mesh, "data")(w, x)).tolist()
    >>> ff.spmd(main, mesh)()[0]
    [3.0, 3.0, 3.0]
    """
    return _lay_by_maps(t, like, "reduce_like", REDUCE, MEAN)


def lay_like(t: _Tree, like: PyTree) -> _Tree:
    """Returns ``t``, which is equal on all ranks, with the layouts of ``like``.

    For whole tensors that every rank computed from the same values, such as the
    orthogonalised momenta of Muon: each rank keeps its parts.

    Args:
        t: whole tensors, equal on all ranks, in the structure of ``like``; None,
            numbers, and leaves that have the layout already, stay as they are.
        like: the tree with the layouts; where a leaf is plain, so is the result.

    Raises:
        TreeMismatch: another structure.
        ValueError: another shape, or axes that no ``shard`` around takes means over.

    Transpose: n times the cotangent of the rank's part, zero elsewhere, as n ranks each
    have a part of one value.

    Cost: nothing is sent; a copy of the rank's parts.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> layer = ff.unit(lambda w, x: x @ w)
    >>> def step(w, x):
    ...     return ff.lay_like(torch.linalg.inv(ff.unshard(w)), like=w)
    >>> def main():
    ...     x, w = torch.ones(1, 2), torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    ...     placed = ff.place(ff.shard(layer, mesh, "data"), w, x)
    ...     return ff.shard(step, mesh, "data")(placed, x).local.tolist()
    >>> ff.spmd(main, mesh)()
    [[0.5, 0.0], [0.0, 0.25]]
    """
    return _lay_by_maps(t, like, "lay_like", TAKE_PART, None)


def _lay_by_maps(
    t: PyTree, like: PyTree, function: str, to_parts: LinearMap, mean: LinearMap | None
) -> PyTree:
    """Returns whole tensors in the layouts of ``like``.

    Args:
        function: the public function, for messages.
        to_parts: the collective that makes each rank's part of whole tensors.
        mean: that for leaves that stay whole, and for axes over which parts are equal;
            None: the tensors are equal on all ranks already.

    Cost: one collective for each dtype and group of axes.
    """
    leaves, treedef = tree.flatten(like, is_leaf=is_sharded)
    try:
        values: list[Any] = treedef.flatten_up_to(t)
    except ValueError:
        either = lambda x: x is None or is_sharded(x)  # noqa: E731
        tree.check_same_structure(
            like, t, what=function, against="like", is_leaf=either
        )
        raise
    values = [recorded_tensor(x) for x in values]  # of a step that is recorded
    positions_of: dict[tuple[tuple[str, ...], torch.dtype], list[int]] = {}
    blocks: dict[int, Layout] = {}
    for i, (x, old) in enumerate(zip(values, leaves, strict=True)):
        is_laid = (
            is_sharded(x) and is_sharded(old) and x.layout.parts == old.layout.parts
        )
        is_real = is_sharded(old) or isinstance(old, Tensor) and differentiable(old)
        if is_real and x is not None and not is_laid:
            _check_like(x, old, function)
            if mean is None:
                claim_equal(x, function)
            axes = ()
            if isinstance(old, Sharded):
                blocks[i] = block_layout(old, function)
                values[i], axes = _block(x, old.layout), blocks[i].axes
            positions_of.setdefault((axes, x.dtype), []).append(i)
    out = list(values)
    # In the order of the leaves, as all ranks must call the collectives in one order.
    for (axes, _), positions in sorted(positions_of.items(), key=lambda item: item[1]):
        wholes = [values[i] for i in positions]
        layouts = [blocks.get(i) for i in positions]
        laid_out = _lay_group(wholes, layouts, axes, to_parts, mean)
        for i, x in zip(positions, laid_out, strict=True):
            out[i] = (
                note_laid_out(leaves[i].with_local(x)) if is_sharded(leaves[i]) else x
            )
    for x, old in zip(out, leaves, strict=True):
        if isinstance(x, Tensor):
            lay_leaf(x, placement_of(old) or WHOLE if mean is None else WHOLE)
    return tree.unflatten(treedef, out)


def _block(x: Leaf, layout: Layout) -> Tensor:
    """Returns this rank's block of a whole tensor, by a layout's splits.

    The tensor is one value over the axes of the splits.
    """
    for split in layout.splits:
        cut = LinearMap("slice", "I", "V", dim=split.dim)
        x = apply_map(x, cut, get_group(split.axis))
    return x


def _check_like(x: Leaf, old: Leaf, function: str) -> None:
    """Raises unless ``x`` is a whole floating tensor of the shape of ``old``."""
    name = f" for {old.name!r}" if is_sharded(old) else ""
    if not isinstance(x, Tensor) or tuple(x.shape) != tuple(old.shape):
        kind = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"{function}: expected a whole tensor of shape {tuple(old.shape)}{name}, "
            f"found {kind}; unshard gives whole tensors"
        )
    if not differentiable(x):
        raise ValueError(
            f"{function}: expected a floating tensor{name}, found {x.dtype}"
        )


def _lay_group(
    values: Sequence[Tensor],
    layouts: Sequence[Layout | None],
    axes: tuple[str, ...],
    to_parts: LinearMap,
    mean: LinearMap | None,
) -> list[Tensor]:
    """Returns each rank's parts, over ``axes``, of tensors of one dtype.

    Args:
        values: the tensors.
        layouts: the layout of each; None for one that stays whole.
        axes: those of the layouts.
        to_parts, mean: see `_lay_by_maps`.
    """
    copy_axes = (
        tuple(a for a in averaged_axes() if a not in axes) if mean is not None else ()
    )
    if not axes:
        shapes = [
            x.shape if layout is None or layout.flat is None else (layout.numel,)
            for x, layout in zip(values, layouts, strict=True)
        ]
        if mean is not None and copy_axes:
            flat = torch.cat([x.reshape(-1) for x in values])
            flat = apply_map(flat, mean, get_group(copy_axes))
            values = flat.split([x.numel() for x in values])
        # A part shares no memory with the tensor that was given.
        return [
            x.reshape(shape) if layout is None else x.reshape(shape).clone()
            for x, shape, layout in zip(values, shapes, layouts, strict=True)
        ]
    where = get_group(axes)
    # By leaf, the number of elements on each rank.
    counts = [
        elements_by_rank(layout, where) for layout in layouts if layout is not None
    ]
    pieces = [x.reshape(-1).split(c) for x, c in zip(values, counts, strict=True)]
    if to_parts.collective is None and not may_be_differentiated(values):
        return [declare_type(parts[where.index].clone(), "S") for parts in pieces]
    # One row for each rank: its parts of all leaves, padded to the longest row.
    lengths = [sum(leaf[k] for leaf in counts) for k in range(where.size)]
    rows: list[Tensor] = []
    for k, length in enumerate(lengths):
        rows += [parts[k] for parts in pieces]
        rows.append(values[0].new_zeros(max(lengths) - length))
    flat = apply_map(torch.cat(rows), to_parts, where)
    if mean is not None and copy_axes:
        flat = apply_map(flat, mean, get_group(copy_axes))
    local_counts = [leaf[where.index] for leaf in counts]
    return list(flat[: sum(local_counts)].split(local_counts))


def randn_like(like: _Tree, *, generator: torch.Generator | None = None) -> _Tree:
    """Returns standard normal noise with the layouts of ``like``.

    Each rank draws its part of the noise for the whole leaf, which is the same on any
    number of ranks, with any ``zero``, and on one device. (``torch.randn_like`` of a
    part would give every rank's part the same noise.)

    Args:
        like: a tree of tensors and sharded leaves; the result is None for leaves that
            are not floating.
        generator: gives the seed, one number that must be equal on all ranks; by
            default it is drawn by the first rank, and sent.

    Cost: one broadcast of one number, with a generator nothing; blocks of 131072
    elements are drawn whole, and so are leaves that are split along a dim.

    >>> import torch, fsfunc as ff
    >>> {k: x.shape for k, x in ff.randn_like({"w": torch.ones(2, 3)}).items()}
    {'w': torch.Size([2, 3])}
    """
    leaves = tree.leaves(like, is_leaf=is_sharded)
    leaf_numbers = iter(range(len(leaves)))

    def noise(x: Leaf) -> Leaf:
        stream = number, next(leaf_numbers)  # each leaf draws from one of its own
        if not isinstance(x, Tensor | Sharded) or not differentiable(x):
            return None
        local = x.local if isinstance(x, Sharded) else x
        part = torch.empty_like(
            _torch.unwrapped(local), memory_format=torch.contiguous_format
        )
        start = 0
        if isinstance(x, Sharded) and x.layout.splits:  # a block is no range of it
            full = part.new_empty(x.shape)
            draw(standard_normal(), stream, full.view(-1), 0, full.numel())
            part.copy_(take(full, x.layout, here().mesh.coordinates()))
            return note_laid_out(x.with_local(part))
        if isinstance(x, Sharded) and x.layout.axes:
            start, _ = x.layout.span(here().mesh.coordinates())
        draw(standard_normal(), stream, part.view(-1), start, math.prod(x.shape))
        return note_laid_out(x.with_local(part)) if isinstance(x, Sharded) else part

    refuse_in_graph("randn_like draws random numbers")
    if generator is not None:
        claim_equal(generator.get_state(), "the generator of randn_like")
    with torch.no_grad(), _torch.beneath_functorch():
        number = draw_number(generator)
        # In a unit draws are each rank's own.
        if generator is None and not frame().path:
            devices = [x.device for x in leaves if isinstance(x, Tensor | Sharded)]
            number = _number_of_first(number, devices[0]) if devices else number
        return tree.map(noise, like, is_leaf=is_sharded)


def _number_of_first(number: int, device: torch.device) -> int:
    """Returns the first rank's number, on every rank of the mean."""
    if not (axes := averaged_axes()):
        return number
    with label("", "randn_like"):
        received = pbroadcast(torch.tensor(number, device=device), axes, source=0)
    return number if _torch.fake_active() else int(received)

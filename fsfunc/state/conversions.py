"""Conversions between sharded and whole tensors, each with its transpose.

Inside a step parts are for elementwise work. What needs whole matrices (Muon, Shampoo),
or each rank's own tensors (per-sample gradients, tasks), goes through here: ``unshard``
is the entry of a unit, and there are two ways back, for what the ranks have each of
their own (``reduce_like``) and for what is the same on all of them (``lay_like``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import apply_map, assumed, claim, laid
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import averaged_axes, here
from fsfunc.comm.typed_maps import (
    ENTER,
    GATHER,
    LAY,
    MEAN,
    REDUCE,
    check_samples,
)
from fsfunc.core.frames import frame
from fsfunc.optim.leaves import differentiated
from fsfunc.optim.reductions import entered
from fsfunc.sharded.donated import refuse_spent
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import in_a_row
from fsfunc.sharded.plain_leaves import WHOLE, laid_as, lay_leaf
from fsfunc.sharded.slices import assemble
from fsfunc.tracing.groups import plain

__all__ = ["lay_like", "reduce_like", "unshard"]


def unshard(
    t: Any, *, to: torch.device | str | None = None, only: int | None = None
) -> Any:
    """``t`` with every sharded leaf whole: the inverse of ``place``.

    Leaf by leaf, for any tree (states included): values carry their layout. Every rank
    calls it. Inside a gradient call it is what the entry of a unit is: the whole
    tensors are each rank's own, and the gradient that comes back is the mean.

    Args:
        to: the device of the result.
        only: the one rank that gets the result; the others get None for those leaves.

    Raises:
        ValueError: ``only`` where the result is differentiated.

    Transpose: the mean of the cotangents, of which each rank keeps its part.

    Cost: one all-gather for each leaf, (n-1) times the rank's largest part; backward
    one reduce-scatter.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda p, x: x @ p)
    >>> def main():
    ...     f = ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
    ...     params = ff.place(f, torch.arange(3.0), torch.ones(1, 3))
    ...     return ff.unshard(params).tolist()
    >>> ff.spmd(main, mesh)()
    [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
    """

    tracer = frame().tracer

    def whole(x: Any) -> Any:
        if not isinstance(x, Sharded):
            return entered(x) if isinstance(x, Tensor) else x
        if tracer is not None:
            tracer.takes("unshard", [x])
        if differentiated([x.local]):
            if only is not None:
                raise ValueError(
                    f"unshard(..., only={only}) of {x.name!r}, which is differentiated "
                    "here: the others would have no gradient for it; leave out only="
                )
            full = _entered(x)
        else:
            full = _gathered(x)
        if only is not None and here().rank != only:
            return None
        full = full if to is None else full.to(to)
        lay_leaf(full)  # one value on all ranks
        return full

    refuse_spent(t)
    with label("", "unshard"):
        return tree.map(whole, t, is_leaf=is_sharded)


@torch.no_grad()
def _gathered(x: Sharded) -> Tensor:
    layout, at = x.layout, here()
    local = _part(x, layout).detach()
    if not layout.axes:
        if copies := averaged_axes():
            local = apply_map(local, ENTER, group(copies))
        return local.reshape(layout.shape).clone()
    where = group(layout.axes, at)
    counts = _counts(layout, where)
    size = max(counts)
    sent = local.new_zeros(size)
    sent[: local.numel()] = local.reshape(-1)
    every = sent
    if where.size > 1:
        every = where.start("all_gather", sent, what=layout.name).wait()
    parts = []
    for k, rank in enumerate(where.ranks):
        coordinates = at.mesh.coordinates(rank)
        shape = layout.local_shape(coordinates)
        part = every[k * size : k * size + counts[k]]
        parts.append((coordinates, part.view(shape)))
    return assumed(assemble(parts, layout), "A")


def _entered(x: Sharded) -> Tensor:
    """The same as each rank's own, differentiable."""
    block = _block(x, "unshard")
    axes, local = block.axes, _part(x, block)
    check_samples(local, repr(x.name))
    if copies := tuple(a for a in averaged_axes() if a not in axes):
        local = apply_map(local, ENTER, group(copies))
    if axes:
        where = group(axes)
        counts = _counts(block, where)
        size = max(counts)
        sent = in_a_row([local, local.new_zeros(size - local.numel())])
        every = apply_map(sent, GATHER, where).split(size)
        parts = [part[:n] for part, n in zip(every, counts, strict=True)]
        local = torch.cat(parts)
    whole = local.reshape(block.shape)
    for split in reversed(x.layout.splits):
        how = LinearMap("all_gather", "V", "I", dim=split.dim)
        whole = apply_map(whole, how, group(split.axis))
    return whole


def reduce_like(t: Any, like: Any) -> Any:
    """The means of ``t`` over the ranks, of which each keeps the parts of ``like``.

    The way back from what each rank has of its own, such as the clipped and summed
    gradients of its samples, to a tree that lies as the parameters do.

    Args:
        t: whole floating tensors, on each rank its own, in the structure of ``like``;
            None stays None.
        like: the tree whose layout is wanted: sharded leaves, and plain ones, which
            become the mean whole.

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
    return _back(t, like, "reduce_like", REDUCE, MEAN)


def lay_like(t: Any, like: Any) -> Any:
    """``t``, the same on every rank, of which each keeps the parts of ``like``.

    The way back from whole tensors that every rank computed alike of the same values,
    such as the orthogonalised momenta of Muon.

    Args:
        t: whole tensors, the same on every rank, in the structure of ``like``; None,
            numbers, and a leaf that lies so already, stay what they are.
        like: the tree whose layout is wanted; where a leaf is plain, so is the result.

    Raises:
        TreeMismatch: another structure.
        ValueError: another shape, or axes that no ``shard`` around takes means over.

    Transpose: n times the cotangent of the rank's part, zero elsewhere: n ranks each
    give a part of what was one value.

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
    return _back(t, like, "lay_like", LAY, None)


def _counts(layout: Layout, where: RankGroup) -> list[int]:
    """The number of elements of a leaf on each rank of a group."""
    mesh = here().mesh
    shapes = [layout.local_shape(mesh.coordinates(rank)) for rank in where.ranks]
    return [math.prod(shape) for shape in shapes]


def _part(x: Sharded, layout: Layout) -> Tensor:
    """A leaf's part, which somebody may have made by hand."""
    at = here()
    layout.check_part(x.local.shape, at.mesh.coordinates(at.rank))
    return x.local


def _block(x: Sharded, what: str) -> Layout:
    """The layout of a leaf's block over the axes of the shard around.

    Raises:
        ValueError: it lies in ranges over axes without a mean, is split over axes with
            one, or unevenly, or is owned by a rank.
    """
    layout, means = x.layout, set(averaged_axes())
    flat = () if layout.flat is None else (layout.flat,)
    over = set(flat[0].axes) if flat else set()
    split, even = {p.axis for p in layout.splits}, _is_even(layout)
    if layout.owned or not over <= means or split & means or not even:
        raise ValueError(
            f"{what} in a step: {x.name!r} lies as {x.layout}, and the shard around "
            f"takes means over {sorted(means) or 'no axis'}: only what that shard laid "
            "out, of what is whole or split evenly over other axes, can go that way"
        )
    return Layout(layout.unit_shape, layout.dtype, flat, layout.name)


def _is_even(layout: Layout) -> bool:
    lengths = list(layout.shape)
    for split in layout.splits:
        if lengths[split.dim] % split.size:
            return False
        lengths[split.dim] //= split.size
    return True


def _back(
    t: Any, like: Any, what: str, parts: LinearMap, whole: LinearMap | None
) -> Any:
    """Whole tensors as ``like`` lies; those that go the same way go together."""
    leaves, treedef = tree.flatten(like, is_leaf=is_sharded)
    try:
        values: list[Any] = treedef.flatten_up_to(t)
    except ValueError:
        tree.check_same_structure(
            like,
            t,
            what=what,
            against="like",
            is_leaf=lambda x: x is None or is_sharded(x),
        )
        raise
    values = [plain(x) for x in values]  # of a step that is recorded
    chosen: dict[Any, list[int]] = {}
    blocks: dict[int, Layout] = {}
    for i, (x, old) in enumerate(zip(values, leaves, strict=True)):
        alike = is_sharded(x) and is_sharded(old) and x.layout.parts == old.layout.parts
        real = is_sharded(old) or isinstance(old, Tensor) and old.is_floating_point()
        if real and x is not None and not alike:  # what lies so already stays
            _check_like(x, old, what)
            if whole is None:
                claim(x, what)
            axes = ()
            if isinstance(old, Sharded):
                blocks[i] = _block(old, what)
                values[i], axes = _cut(x, old.layout), blocks[i].axes
            chosen.setdefault((axes, x.dtype), []).append(i)
    out = list(values)
    for (axes, _), positions in sorted(chosen.items(), key=lambda item: item[1]):
        some, old = [values[i] for i in positions], [blocks.get(i) for i in positions]
        for i, x in zip(positions, _laid(some, old, axes, parts, whole), strict=True):
            out[i] = laid(leaves[i].with_local(x)) if is_sharded(leaves[i]) else x
    for x, old in zip(out, leaves, strict=True):
        if isinstance(x, Tensor):
            lay_leaf(x, laid_as(old) or WHOLE if whole is None else WHOLE)
    return tree.unflatten(treedef, out)


def _cut(x: Tensor, layout: Layout) -> Tensor:
    """This rank's block of a whole tensor, which is one value over the other axes."""
    for split in layout.splits:
        how = LinearMap("slice", "I", "V", dim=split.dim)
        x = apply_map(x, how, group(split.axis))
    return x


def _check_like(x: Any, old: Any, what: str) -> None:
    name = f" for {old.name!r}" if is_sharded(old) else ""
    if not isinstance(x, Tensor) or tuple(x.shape) != tuple(old.shape):
        found = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"{what}: expected a whole tensor of shape {tuple(old.shape)}{name}, found "
            f"{found}; unshard gives whole tensors"
        )
    if not x.is_floating_point():
        raise ValueError(f"{what}: expected a floating tensor{name}, found {x.dtype}")


def _laid(
    values: Sequence[Tensor],
    like: Sequence[Layout | None],
    axes: tuple[str, ...],
    parts: LinearMap,
    whole: LinearMap | None,
) -> list[Tensor]:
    """Tensors of one dtype, of which each rank keeps the parts over ``axes``.

    Args:
        like: how each is to lie; None for one that stays whole.
    """
    copies = (
        tuple(a for a in averaged_axes() if a not in axes) if whole is not None else ()
    )
    if not axes:
        shapes = [
            x.shape if at is None or at.flat is None else (at.numel,)
            for x, at in zip(values, like, strict=True)
        ]
        if whole is not None and copies:
            flat = torch.cat([x.reshape(-1) for x in values])
            flat = apply_map(flat, whole, group(copies))
            values = flat.split([x.numel() for x in values])
        return [
            x.reshape(shape) if at is None else x.reshape(shape).clone()
            for x, shape, at in zip(values, shapes, like, strict=True)
        ]
    where = group(axes)
    mine = [_counts(at, where) for at in like if at is not None]  # by leaf, by rank
    pieces = [x.reshape(-1).split(c) for x, c in zip(values, mine, strict=True)]
    if parts.sends is None and not differentiated(values):
        return [assumed(part[where.index].clone(), "S") for part in pieces]
    sums = [sum(counts[k] for counts in mine) for k in range(where.size)]
    rows: list[Tensor] = []
    for k, total in enumerate(sums):
        rows += [part[k] for part in pieces]
        rows.append(values[0].new_zeros(max(sums) - total))
    flat = apply_map(torch.cat(rows), parts, where)
    if whole is not None and copies:
        flat = apply_map(flat, whole, group(copies))
    held = [counts[where.index] for counts in mine]
    return list(flat[: sum(held)].split(held))

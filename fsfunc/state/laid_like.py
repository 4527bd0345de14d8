"""Trees with the layouts of another: ``reduce_like``, ``lay_like``, ``randn_like``.

The first two shard whole tensors: the mean of the ranks' own, or values that are equal
on all ranks. The third draws noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
from fsfunc.optim.leaves import differentiated
from fsfunc.runtime.generators import draw_number
from fsfunc.runtime.random_blocks import draw, standard_normal
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.plain_leaves import WHOLE, laid_as, lay_leaf
from fsfunc.sharded.slices import take
from fsfunc.state.unsharding import block_layout, elements_by_rank
from fsfunc.tracing.groups import plain


def reduce_like(t: Any, like: Any) -> Any:
    """The means of ``t`` over the ranks, with the layouts of ``like``.

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
    return _back(t, like, "reduce_like", REDUCE, MEAN)


def lay_like(t: Any, like: Any) -> Any:
    """``t``, which is equal on all ranks, with the layouts of ``like``.

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
    return _back(t, like, "lay_like", TAKE_PART, None)


def _back(
    t: Any, like: Any, what: str, parts: LinearMap, whole: LinearMap | None
) -> Any:
    """Whole tensors in the layouts of ``like``, grouped by the same collectives."""
    leaves, treedef = tree.flatten(like, is_leaf=is_sharded)
    try:
        values: list[Any] = treedef.flatten_up_to(t)
    except ValueError:
        either = lambda x: x is None or is_sharded(x)  # noqa: E731
        tree.check_same_structure(like, t, what=what, against="like", is_leaf=either)
        raise
    values = [plain(x) for x in values]  # of a step that is recorded
    chosen: dict[Any, list[int]] = {}
    blocks: dict[int, Layout] = {}
    for i, (x, old) in enumerate(zip(values, leaves, strict=True)):
        alike = is_sharded(x) and is_sharded(old) and x.layout.parts == old.layout.parts
        real = is_sharded(old) or isinstance(old, Tensor) and differentiable(old)
        if real and x is not None and not alike:  # others have the layout already
            _check_like(x, old, what)
            if whole is None:
                claim_equal(x, what)
            axes = ()
            if isinstance(old, Sharded):
                blocks[i] = block_layout(old, what)
                values[i], axes = _cut(x, old.layout), blocks[i].axes
            chosen.setdefault((axes, x.dtype), []).append(i)
    out = list(values)
    for (axes, _), positions in sorted(chosen.items(), key=lambda item: item[1]):
        some, old = [values[i] for i in positions], [blocks.get(i) for i in positions]
        for i, x in zip(positions, _laid(some, old, axes, parts, whole), strict=True):
            out[i] = (
                note_laid_out(leaves[i].with_local(x)) if is_sharded(leaves[i]) else x
            )
    for x, old in zip(out, leaves, strict=True):
        if isinstance(x, Tensor):
            lay_leaf(x, laid_as(old) or WHOLE if whole is None else WHOLE)
    return tree.unflatten(treedef, out)


def _cut(x: Tensor, layout: Layout) -> Tensor:
    """This rank's block of a whole tensor, which is one value over the other axes."""
    for split in layout.splits:
        how = LinearMap("slice", "I", "V", dim=split.dim)
        x = apply_map(x, how, get_group(split.axis))
    return x


def _check_like(x: Any, old: Any, what: str) -> None:
    name = f" for {old.name!r}" if is_sharded(old) else ""
    if not isinstance(x, Tensor) or tuple(x.shape) != tuple(old.shape):
        found = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"{what}: expected a whole tensor of shape {tuple(old.shape)}{name}, found "
            f"{found}; unshard gives whole tensors"
        )
    if not differentiable(x):
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
        like: a leaf with the layout of each; None for one that stays whole.
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
            flat = apply_map(flat, whole, get_group(copies))
            values = flat.split([x.numel() for x in values])
        return [
            x.reshape(shape) if at is None else x.reshape(shape).clone()
            for x, shape, at in zip(values, shapes, like, strict=True)
        ]
    where = get_group(axes)
    mine = [
        elements_by_rank(at, where) for at in like if at is not None
    ]  # by leaf, by rank
    pieces = [x.reshape(-1).split(c) for x, c in zip(values, mine, strict=True)]
    if parts.collective is None and not differentiated(values):
        return [declare_type(part[where.index].clone(), "S") for part in pieces]
    sums = [sum(counts[k] for counts in mine) for k in range(where.size)]
    rows: list[Tensor] = []
    for k, total in enumerate(sums):
        rows += [part[k] for part in pieces]
        rows.append(values[0].new_zeros(max(sums) - total))
    flat = apply_map(torch.cat(rows), parts, where)
    if whole is not None and copies:
        flat = apply_map(flat, whole, get_group(copies))
    held = [counts[where.index] for counts in mine]
    return list(flat[: sum(held)].split(held))


def randn_like(like: Any, *, generator: torch.Generator | None = None) -> Any:
    """Standard normal noise with the layouts of ``like``.

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
    count = iter(range(len(leaves)))

    def noise(x: Any) -> Any:
        stream = number, next(count)
        if not isinstance(x, Tensor | Sharded) or not differentiable(x):
            return None
        local = x.local if isinstance(x, Sharded) else x
        made = torch.empty_like(
            _torch.unwrapped(local), memory_format=torch.contiguous_format
        )
        start = 0
        if isinstance(x, Sharded) and x.layout.splits:  # a block is no range of it
            full = made.new_empty(x.shape)
            draw(standard_normal(), stream, full.view(-1), 0, full.numel())
            made.copy_(take(full, x.layout, here().mesh.coordinates()))
            return note_laid_out(x.with_local(made))
        if isinstance(x, Sharded) and x.layout.axes:
            start, _ = x.layout.span(here().mesh.coordinates())
        draw(standard_normal(), stream, made.view(-1), start, math.prod(x.shape))
        return note_laid_out(x.with_local(made)) if isinstance(x, Sharded) else made

    refuse_in_graph("randn_like draws random numbers")
    if generator is not None:
        claim_equal(generator.get_state(), "the generator of randn_like")
    with torch.no_grad(), _torch.beneath_functorch():
        number = draw_number(generator)
        if generator is None and not frame().path:
            devices = [x.device for x in leaves if isinstance(x, Tensor | Sharded)]
            number = _agreed(number, devices[0]) if devices else number
        return tree.map(noise, like, is_leaf=is_sharded)


def _agreed(number: int, device: torch.device) -> int:
    """The first rank's number, on every rank of the mean."""
    if not (axes := averaged_axes()):
        return number
    with label("", "randn_like"):
        found = pbroadcast(torch.tensor(number, device=device), axes, source=0)
    return number if _torch.fake_active() else int(found)

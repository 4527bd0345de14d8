"""``unshard``: whole tensors of sharded ones, with its transpose.

Inside a step parts are for elementwise work. What needs whole matrices (Muon, Shampoo),
or each rank's own tensors (per-sample gradients, tasks), goes through here: ``unshard``
is the entry of a unit. `laid_like` has the ways back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import apply_map, declare_type
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import averaged_axes, here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.comm.typed_maps import ENTER, GATHER, check_samples
from fsfunc.core.frames import frame
from fsfunc.optim.leaves import may_be_differentiated
from fsfunc.optim.reductions import as_rank_local
from fsfunc.sharded.layout import Layout, Region, every_coordinate
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import concatenate_flat
from fsfunc.sharded.plain_leaves import lay_leaf
from fsfunc.sharded.slices import write
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.tree.types import Leaf

_Tree = TypeVar("_Tree")


@api_boundary
def unshard(
    t: _Tree, *, to: torch.device | str | None = None, only: int | None = None
) -> _Tree:
    """Returns ``t`` with every sharded leaf whole: the inverse of ``place``.

    Leaf by leaf, for any tree (states included): values carry their layout. Every rank
    calls it. Inside a gradient call it is what the entry of a unit is: the whole
    tensors are each rank's own, and the gradient that comes back is the mean.

    Args:
        to: the device of the result.
        only: the one rank that gets the result; the others get None for those leaves.

    Raises:
        ValueError: ``only`` where the result is differentiated; a leaf that carries an
            autograd graph, outside of a sharded step.

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

    def make_whole(x: Leaf) -> Leaf:
        if not isinstance(x, Sharded):
            return as_rank_local(x) if isinstance(x, Tensor) else x
        if tracer is not None:
            tracer.on_take("unshard", [x])
        if may_be_differentiated([local := x.local]):
            if only is not None:
                raise ValueError(
                    f"unshard(..., only={only}) of {x.name!r}, which is differentiated "
                    "here: the others would have no gradient for it; leave out only="
                )
            full = _entered(x)
        else:
            full = _gathered(x.layout, local)
        if only is not None and here().rank != only:
            return None
        full = full if to is None else full.to(to)
        lay_leaf(full)  # one value on all ranks
        return full

    refuse_unusable(t)
    with label("", "unshard"):
        return tree.map(make_whole, t, is_leaf=is_sharded)


def _gathered(layout: Layout, local: Tensor) -> Tensor:
    """Returns a whole leaf, which is not differentiated."""
    rank_here, local = here(), local.detach()
    if not layout.axes:
        layout.check_part(local.shape, {})
        if copies := averaged_axes():
            local = apply_map(local, ENTER, get_group(copies))
        return local.reshape(layout.shape).clone()
    where = get_group(layout.axes, rank_here)
    regions = _regions(layout)
    _, start, stop = regions[where.index]
    if local.shape != (stop - start,):  # no part of a packed leaf, as its layout says
        layout.check_part(local.shape, rank_here.mesh.coordinates(rank_here.rank))
    # An all-gather sends as much from each rank: parts are padded to the largest.
    size = max([stop - start for _, start, stop in regions])
    sent = local.new_zeros(size)
    sent[: local.numel()] = local.reshape(-1)
    gathered = sent
    if where.size > 1:
        gathered = where.start("all_gather", sent, name=layout.name).wait()
    rows = zip(regions, gathered.view(len(regions), size).unbind(), strict=True)
    if layout.parts == (layout.flat,):  # one range after another
        parts = [row[: stop - start] for (_, start, stop), row in rows]
        return declare_type(torch.cat(parts).view(layout.shape), "A")
    full = local.new_empty(layout.shape)
    for region, row in rows:
        write(full, region, row)
    return declare_type(full, "A")


@lru_cache(1024)
def _regions(layout: Layout) -> list[Region]:
    """Returns each rank's region, ranks in the order of the layout's axes."""
    return [layout.region(coordinates) for coordinates in every_coordinate(layout)]


def _entered(x: Sharded) -> Tensor:
    """Returns a whole leaf as each rank's own value, differentiably.

    Its collectives are those of a unit's entry, with these transposes.
    """
    block = block_layout(x, "unshard")
    axes, local = block.axes, _part(x, block)
    check_samples(local, repr(x.name))
    if copies := tuple(a for a in averaged_axes() if a not in axes):
        local = apply_map(local, ENTER, get_group(copies))
    if axes:
        where = get_group(axes)
        counts = elements_by_rank(block, where)
        size = max(counts)
        sent = concatenate_flat([local, local.new_zeros(size - local.numel())])
        rows = apply_map(sent, GATHER, where).split(size)
        parts = [row[:n] for row, n in zip(rows, counts, strict=True)]
        local = torch.cat(parts)
    whole = local.reshape(block.shape)
    for split in reversed(x.layout.splits):  # outermost first in a layout
        gather = LinearMap("all_gather", "V", "I", dim=split.dim)
        whole = apply_map(whole, gather, get_group(split.axis))
    return whole


def elements_by_rank(layout: Layout, where: RankGroup) -> list[int]:
    """Returns the number of elements of a leaf on each rank of a group."""
    mesh = here().mesh
    spans = [layout.span(mesh.coordinates(rank)) for rank in where.ranks]
    return [stop - start for start, stop in spans]


def _part(x: Sharded, layout: Layout) -> Tensor:
    """Returns a leaf's part, checked, as it may have been made by hand."""
    rank_here, local = here(), x.local
    layout.check_part(local.shape, rank_here.mesh.coordinates(rank_here.rank))
    return local


def block_layout(x: Sharded, function: str) -> Layout:
    """Returns the layout of a leaf's block over the axes of the enclosing ``shard``.

    Args:
        function: the public function that asks, for the message.

    Raises:
        ValueError: there is no ``shard`` around; the leaf is packed over axes without a
            mean, is split over axes with one, or unevenly, or is owned by a rank.
    """
    layout, mean_axes = x.layout, set(averaged_axes())
    flat = () if layout.flat is None else (layout.flat,)
    flat_axes = set(flat[0].axes) if flat else set()
    split_axes, is_even = {p.axis for p in layout.splits}, _is_even(layout)
    if not mean_axes and function == "unshard":
        raise ValueError(
            f"unshard outside of a sharded step: {x.name!r} carries an autograd graph, "
            "as a state does that a step made of a batch which requires grad, and "
            "outside nobody says whose its gradient is. Call it under torch.no_grad(), "
            "or inside the step; a step whose batch is detached makes no graph"
        )
    if not mean_axes:
        raise ValueError(
            f"{function} outside of a sharded step: {x.name!r} has the layout "
            f"{x.layout}, and no shard is around. Call {function} inside the step, or "
            "outside ff.place(step, t, ...), which lays a tree out"
        )
    is_ours = flat_axes <= mean_axes and not split_axes & mean_axes
    if layout.owners or not is_ours or not is_even:
        raise ValueError(
            f"{function} in a step: {x.name!r} has the layout {x.layout}, and the "
            f"shard around takes means over {sorted(mean_axes)}: that works for "
            "leaves that this shard laid out, whole or split evenly over other axes"
        )
    return Layout(layout.unit_shape, layout.dtype, flat, layout.name)


def _is_even(layout: Layout) -> bool:
    lengths = list(layout.shape)
    for split in layout.splits:
        if lengths[split.dim] % split.size:
            return False
        lengths[split.dim] //= split.size
    return True

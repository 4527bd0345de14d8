"""``unshard``: whole tensors of sharded ones, with its transpose.

Inside a step parts are for elementwise work. What needs whole matrices (Muon, Shampoo),
or each rank's own tensors (per-sample gradients, tasks), goes through here: ``unshard``
is the entry of a unit. `laid_like` has the ways back.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import averaged_axes, here, maybe_here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.comm.typed_maps import ENTER, GATHER, check_samples
from fsfunc.core.frames import frame
from fsfunc.optim.leaves import may_be_differentiated
from fsfunc.optim.reductions import as_rank_local
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import concatenate_flat
from fsfunc.sharded.plain_leaves import lay_leaf
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.state.values import check_mesh
from fsfunc.state.whole_tensors import check_only, gather_whole
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
        ValueError: ``only`` where the result is differentiated, or which is no rank; a
            leaf that carries an autograd graph, outside of a sharded step.

    Transpose: the mean of the cotangents, of which each rank keeps its part.

    Cost: one all-gather for each leaf, (n-1) times the rank's largest part (of a leaf
    of one pipeline stage among the ranks of that stage, and a broadcast to the others);
    with ``only`` each other rank sends its part alone. Backward one reduce-scatter.

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

    tracer, rank_here = frame().tracer, maybe_here()

    def make_whole(x: Leaf) -> Leaf:
        if not isinstance(x, Sharded):
            return as_rank_local(x) if isinstance(x, Tensor) else x
        if tracer is not None:
            tracer.on_take("unshard", [x])
        x.check()
        check_mesh(x, rank_here, "unshard")
        if may_be_differentiated([local := x.local]):
            if only is not None:
                raise ValueError(
                    f"unshard(..., only={only}) of {x.name!r}, which is differentiated "
                    "here: the others would have no gradient for it; leave out only="
                )
            full = _entered(x)
        else:
            full = gather_whole(x.layout, local, only)
        if full is None:
            return None
        full = full if to is None else full.to(to)
        lay_leaf(full)  # one value on all ranks
        return full

    check_only("unshard", only)
    refuse_unusable(t)
    with label("", "unshard"):
        return tree.map(make_whole, t, is_leaf=is_sharded)


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

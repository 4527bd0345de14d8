"""One leaf put together from the ranks' parts, on all of them or on one.

`unsharding.unshard` does it for all leaves of a tree, `leaf_by_leaf.whole_leaves` for
one after another. The layout says which rank has which elements, so that nothing is
asked; collectives carry the parts:

    on all ranks    all-gather of parts, padded to the largest; a leaf that one stage
                    of a pipeline owns is then broadcast to the others
    on one rank     all-to-all of unequal parts, in which only that rank receives
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.collective_ops import apply_map, declare_type
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import averaged_axes, here, maybe_here
from fsfunc.comm.typed_maps import ENTER
from fsfunc.sharded.layout import Layout, Region, every_coordinate
from fsfunc.sharded.placements import row_major
from fsfunc.sharded.slices import write


def check_only(function: str, only: int | None) -> None:
    """Raises unless ``only`` is None or a rank of the mesh in sight.

    Args:
        function: the public function that was given it, for the message.

    Raises:
        ValueError: it is none: then nobody would get the result.
    """
    rank_here = maybe_here()
    size = 1 if rank_here is None else rank_here.mesh.size
    if only is not None and (type(only) is not int or not 0 <= only < size):
        raise ValueError(
            f"{function}(..., only={only!r}): no rank of the mesh would get the "
            f"result; give one from 0 to {size - 1}, or leave out only="
        )


def gather_whole(
    layout: Layout, local: Tensor, only: int | None = None
) -> Tensor | None:
    """Returns a leaf whole, in memory of its own; None on other ranks than ``only``.

    It is not differentiated. Every rank calls it.

    Args:
        local: this rank's part, of any dtype, the same one on all ranks.
        only: the one rank that gets it; None: all of them.

    Raises:
        ValueError: the part is not of the shape that the layout gives.

    Cost: over the n ranks of the leaf's axes (copies of it along other axes send and
    receive as much; with ``only`` nothing), on all ranks one all-gather, (n-1) times
    the largest part, with memory for the leaf twice. Of a leaf owned along an axis of
    p ranks, this is among its owners; then one broadcast, (p-1)/p of the leaf. On one
    rank one all-to-all: each other rank sends its part alone, and the memory is that
    of the leaf, or twice that if it is split along a dim.
    """
    rank_here, local = here(), local.detach()
    layout.check_part(local.shape, rank_here.mesh.coordinates(rank_here.rank))
    if layout.axes:
        if only is None:
            whole = _on_all(layout, local)
        else:
            whole = _on_one(layout, local, only)
        return None if whole is None else declare_type(whole, "A")
    if copies := averaged_axes():
        local = apply_map(local, ENTER, get_group(copies))
    if only is not None and only != rank_here.rank:
        return None
    return local.reshape(layout.shape).clone()


def _on_all(layout: Layout, local: Tensor) -> Tensor:
    if layout.owners:
        return _from_owners(layout, local)
    if not layout.axes:
        return local.reshape(layout.shape)
    where, regions = get_group(layout.axes), _regions(layout)
    # An all-gather sends as much from each rank: parts are padded to the largest.
    size = max([stop - start for _, start, stop in regions])
    sent = local.new_zeros(size)
    sent[: local.numel()] = local.reshape(-1)
    gathered = _exchange("all_gather", sent, where, layout) if where.size > 1 else sent
    padded = gathered.view(where.size, size).unbind()
    rows = [
        row[: stop - start]
        for (_, start, stop), row in zip(regions, padded, strict=True)
    ]
    if not layout.splits:  # one range after another
        return torch.cat(rows).view(layout.shape)
    return _assemble(layout, regions, rows)


def _from_owners(layout: Layout, local: Tensor) -> Tensor:
    """Returns a leaf that ranks at one coordinate alone have, as in a pipeline.

    In a gather over all axes the parts of the others would be padding, as large.
    """
    at, owners = here().mesh.coordinates(here().rank), layout.owners
    parts = tuple(part for part in layout.parts if part not in owners)
    if all(at[p.axis] == p.coordinate for p in owners):
        among = Layout(layout.shape, layout.dtype, parts, layout.name)
        whole = _on_all(among, local)
    else:
        whole = local.new_empty(layout.shape)
    where = get_group(tuple(p.axis for p in owners))
    if where.size == 1 or not layout.numel:
        return whole.clone()
    source = row_major((p.coordinate, p.size) for p in owners)
    return _exchange("pbroadcast", whole, where, layout, source=source)


def _on_one(layout: Layout, local: Tensor, only: int) -> Tensor | None:
    where = get_group(layout.axes)
    if only not in where.ranks:  # these ranks have copies of the parts that it gets
        return None
    regions, root = _regions(layout), where.ranks.index(only)
    counts = [stop - start for _, start, stop in regions]
    received = local.reshape(-1)
    if any(n for i, n in enumerate(counts) if i != root):
        sizes = tuple(
            tuple(n if i == root else 0 for i in range(where.size)) for n in counts
        )
        received = _exchange("all_to_all", received, where, layout, sizes=sizes)
    elif where.index == root:
        received = received.clone()
    if where.index != root:
        return None
    if not layout.splits:  # one range after another
        return received.view(layout.shape)
    return _assemble(layout, regions, received.split(counts))


def _assemble(
    layout: Layout, regions: list[Region], rows: list[Tensor] | tuple[Tensor, ...]
) -> Tensor:
    whole = rows[0].new_empty(layout.shape)
    for region, row in zip(regions, rows, strict=True):
        write(whole, region, row)
    return whole


def _exchange(
    op: str, x: Tensor, where: RankGroup, layout: Layout, **kwargs: Any
) -> Tensor:
    """Returns the result of a collective, where ``x`` lies."""
    # An offloaded part lies on the host, from where NCCL sends nothing.
    sent = x.to(where.link.device) if x.device.type == "cpu" else x
    return where.start(op, sent, name=layout.name, **kwargs).wait().to(x.device)


@lru_cache(1024)
def _regions(layout: Layout) -> list[Region]:
    """Returns each rank's region, ranks in the order of the layout's axes."""
    return [layout.region(coordinates) for coordinates in every_coordinate(layout)]

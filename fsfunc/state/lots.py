"""What lies together in a state, and this rank's part of it: buffers, and blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.mesh import here
from fsfunc.sharded.layout import Layout, pack_flat
from fsfunc.sharded.leaf import FlatShard, Sharded
from fsfunc.sharded.packing import chunk_here
from fsfunc.sharded.slices import take
from fsfunc.state.leaf_sources import GivenLeaves
from fsfunc.state.mirroring import mirrors, told
from fsfunc.tracing.groups import LeafGroup
from fsfunc.tracing.recorder import Recorder
from fsfunc.transforms.offloading import Stores
from fsfunc.transforms.sharding import Sharding

__all__ = ["Lot", "block_of", "lots_of", "owned", "packed"]


@dataclass(frozen=True)
class Lot:
    """Leaves that lie in one buffer: those that units take, or copies of them.

    Args:
        group: the buffer, and all that lie in it.
        paths: the leaves, by the path in ``group`` of the one that each copies.
        dtype: theirs.
    """

    group: LeafGroup
    paths: dict[str, str]
    dtype: torch.dtype

    @property
    def copies(self) -> bool:
        return any(path != own for path, own in self.paths.items())


def lots_of(
    groups: list[LeafGroup],
    recorder: Recorder,
    whole: set[str],
    leaves: dict[str, Any],
    like: Mapping[str, str],
) -> list[Lot]:
    """What lies together: leaves that units take, and those that mirror them.

    Args:
        like: see ``place``.
    """
    taken = {p for t in recorder.taken for p in t.leaves}
    chosen = [g for g in groups if not (taken and taken.isdisjoint(g.paths))]
    lots = [Lot(g, {p: p for p in g.paths}, g.dtype) for g in chosen]
    if not taken:
        return lots
    parted = {p: tuple(p.split("/")) for p, x in leaves.items() if _real(x)}
    group_of = {parted[p]: g for g in chosen for p in g.paths if p in parted}
    trained = [parted[p] for p in recorder.trained if p in parted]
    shapes = {parts: leaves[p].shape for p, parts in parted.items()}
    said = told(like, shapes, group_of)
    fixed = [*said, *(parted[p] for p in whole if p in parted)]
    copies: dict[Any, dict[str, str]] = {}
    found = mirrors(shapes, group_of, fixed, trained) | said
    for parts, (source, *roots) in found.items():
        path, g = "/".join(parts), group_of[source]
        key = (*roots, g.buffer, leaves[path].dtype)
        copies.setdefault(key, {})["/".join(source)] = path
    for (*_, dtype), paths in copies.items():
        g = group_of[parted[next(iter(paths))]]
        lots.append(Lot(g, {p: paths[p] for p in g.paths if p in paths}, dtype))
    return lots


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def packed(
    handler: Sharding,
    lot: Lot,
    recorder: Recorder,
    leaves: dict[str, Any],
    coordinates: dict[str, int],
    source: GivenLeaves,
    order: list[tuple[str, ...]],
    stores: Stores,
) -> FlatShard:
    """This rank's part of whole tensors, as views of one flat buffer."""
    g = lot.group
    apart = recorder.layouts[g.paths[0]].split_axes
    axes = handler.cut.beside(apart) if handler.zero else ()
    sizes = [handler.mesh.axes[a] for a in axes]
    shapes, outer = [leaves[p].shape for p in g.paths], recorder.outer(g)
    names = [lot.paths.get(p, p) for p in g.paths]
    every = pack_flat(shapes, lot.dtype, names, axes, sizes, g.buffer, outer=outer)
    layouts = tuple(
        replace(x, order=order, compute=g.compute)
        for x, p in zip(every, g.paths, strict=True)
        if p in lot.paths
    )
    full = [leaves[p] for p in lot.paths.values()]
    own = {a: coordinates[a] for a in layouts[0].axes}
    chunk = chunk_here(layouts[0], own)
    if handler.zero in (1, 2) and g.compute is None and not lot.copies:
        whole = source.zeros(math.prod(sizes) * chunk, lot.dtype, full[0])
        index = handler.mesh.coordinate(axes, here(handler.mesh).rank) if axes else 0
        flat = whole[index * chunk : (index + 1) * chunk]
    else:
        whole, store = None, stores.moments if lot.copies else stores.params
        flat = source.empty(chunk if store is None else 0, lot.dtype, full[0])
        if store is not None:
            flat = store.empty(chunk, lot.dtype, flat.device)
    shard = FlatShard(layouts, flat, own, whole)
    if isinstance(flat, _torch.FakeTensor):
        return shard  # there is nothing to write
    end = 0
    with torch.no_grad():
        for (start, stop), layout, x in zip(shard.ranges, layouts, full, strict=True):
            if stop > start:
                flat[end:start] = 0  # room that leaves of other shapes take elsewhere
                source.write(x, layout, own, flat[start:stop])
                end = stop
        flat[end:] = 0  # padding
    return shard  # its whole buffer does not show it yet: the first use gathers


def owned(
    lot: Lot, recorder: Recorder, leaves: dict[str, Any], source: GivenLeaves
) -> list[Sharded | Tensor]:
    """Tensors that lie in no buffer, each on the coordinate that owns it."""
    laid: list[Sharded | Tensor] = []
    outer = dict(zip(lot.group.paths, recorder.outer(lot.group), strict=True))
    for original, path in lot.paths.items():
        x, parts = leaves[path], outer[original]
        layout = Layout(tuple(x.shape), lot.dtype, parts, path)
        laid.append(block_of(x, layout, source) if parts else x)
    return laid


def block_of(x: Tensor, layout: Layout, source: GivenLeaves) -> Sharded:
    """This rank's block of a whole tensor; nothing, where others own it."""
    coordinates = here().mesh.coordinates()
    own = {a: coordinates[a] for a in layout.axes}
    if layout.block(own) is None:
        return Sharded(source.empty(0, layout.dtype, x), layout)
    part = source.whole(x)
    return Sharded(take(part, layout, own).clone() if layout.splits else part, layout)

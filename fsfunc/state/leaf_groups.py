"""Groups of leaves that share a buffer, and this rank's part of each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.mesh import Here, here
from fsfunc.core.casts import differentiable
from fsfunc.sharded.inputs import refuse
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packed_layouts import pack_flat
from fsfunc.sharded.packing import chunk_here
from fsfunc.sharded.slices import take
from fsfunc.state.leaf_sources import GivenLeaves
from fsfunc.state.train_state import Applied
from fsfunc.tracing.groups import LeafGroup, Recorded
from fsfunc.tracing.recorder import Recorder
from fsfunc.transforms.offloading import Stores
from fsfunc.transforms.sharded_calls import Sharding
from fsfunc.tree.structure import matches

Like = dict[str, str]  # by path of a leaf, the path of the one whose layout it has


@dataclass(frozen=True)
class PlacedGroup:
    """The leaves of a group that units take, or leaves with their layouts.

    Args:
        group: the group, with all leaves of its buffer.
        paths: the leaves, by the path in ``group`` of the one whose layout each has.
        dtype: their dtype.
    """

    group: LeafGroup
    paths: dict[str, str]
    dtype: torch.dtype

    @property
    def copies(self) -> bool:
        return any(path != own for path, own in self.paths.items())


def lay_groups(
    found: dict[str, Any],
    recorder: Recorder,
    applied: Iterable[Applied],
    like: Mapping[str, str],
    sharding: Sharding | None,
    source: GivenLeaves,
    stores: Stores,
    at: Here,
) -> None:
    """Lays out, in ``found``, the leaves that units take, and those like them.

    Args:
        found: by path, whole leaves; each is replaced by this rank's part.
        applied: the arguments of optimizers in the step; ``like``: see `place`.
    """
    coordinates = at.mesh.coordinates(at.rank)
    # Ranks that share a record have leaves of the same shapes, and transforms of the
    # same settings, but for the mesh. Where a unit call belongs to one coordinate, a
    # rank's own tells which calls it has.
    owners = {p.axis for t in recorder.taken for p in t.owner}
    mine = tuple(n for a, n in coordinates.items() if a in owners)
    key = tuple(at.mesh.axes.items()), mine
    plan = recorder.planned.get(key)
    if plan is None:
        plan = recorder.planned[key] = _plan(recorder, sharding, coordinates)
    groups = plan.groups

    def lay(part: PlacedGroup) -> None:
        refuse("float8", "place", {path: found[path] for path in part.paths.values()})
        if sharding is None:
            laid = _owned(part, recorder, found, source)
        else:
            laid = _packed(
                sharding, part, recorder, found, coordinates, source, plan, stores
            ).leaves()
        found.update(zip(part.paths.values(), laid, strict=True))

    told_like, whole = leaves_like(like, found), dict(found)
    taken = _groups_taken(groups, recorder, told_like)
    for part in taken:
        lay(part)
    moments = moments_like(applied, found)
    for part in _groups_like(taken, {**moments, **told_like}, whole):
        lay(part)


@dataclass
class _Plan:
    """The layouts that all ranks make: groups, the order of buffers, and layouts.

    ``layouts`` are made when they are first read, by group and by the leaves that have
    its layouts.
    """

    groups: list[LeafGroup]
    order: list[tuple[str, ...]]
    layouts: dict[Any, tuple[Layout, ...]] = field(default_factory=dict)


def _plan(
    recorder: Recorder, sharding: Sharding | None, coordinates: Mapping[str, int]
) -> _Plan:
    if not recorder.handlers:  # no unit is called, and all stay whole
        return _Plan([], [])
    least = 0 if sharding is None else sharding.min_bytes
    groups = recorder.groups(least, sharding is not None)
    if sharding is None:
        return _Plan(groups, [])
    units = ["/".join(t.path) for t in recorder.taken]
    sharding.cut.check_names({*units, *(p for g in groups for p in g.paths)})
    return _Plan(groups, recorder.order(groups, coordinates))


def _groups_taken(
    groups: list[LeafGroup], recorder: Recorder, like: Mapping[str, str]
) -> list[PlacedGroup]:
    """The groups that units take, without leaves that have the layouts of others.

    Args:
        like: by path of a leaf, the path of the one whose layout it is to have.
    """
    taken = {p for t in recorder.taken for p in t.leaves}
    chosen = [g for g in groups if not (taken and taken.isdisjoint(g.paths))]
    found = []
    for g in chosen:
        own = {p: p for p in g.paths if p not in like}
        found += [PlacedGroup(g, own, g.dtype)] if own else []
    return found


def _groups_like(
    taken: list[PlacedGroup], like: Mapping[str, str], leaves: Mapping[str, Any]
) -> list[PlacedGroup]:
    """The groups of copies of leaves that units take, copy by copy.

    Args: as for :func:`_groups_taken`.
    """
    group_of = {path: t.group for t in taken for path in t.group.paths}
    counts: Counter[str] = Counter()
    copies: dict[Any, dict[str, str]] = {}
    for path, source in like.items():
        if source in group_of:
            counts[source] += 1
            key = counts[source], group_of[source].buffer, leaves[path].dtype
            copies.setdefault(key, {})[source] = path
    found = []
    for (_, _, dtype), paths in copies.items():
        g = group_of[next(iter(paths))]
        ordered = {p: paths[p] for p in g.paths if p in paths}
        found.append(PlacedGroup(g, ordered, dtype))
    return found


def leaves_like(patterns: Mapping[str, str], leaves: Mapping[str, Any]) -> Like:
    """By path of a leaf, the path of the one whose layout ``like=`` gives it.

    Args:
        patterns: by pattern of a subtree's path, the path of the one that it copies.

    Raises:
        ValueError: a pattern that matches no path; a leaf without one of its shape.

    >>> x = torch.ones(3)
    >>> leaves_like({"w0": "w"}, {"w/a": x, "w0/a": x})
    {'w0/a': 'w/a'}
    """
    shapes = {
        path: tuple(x.shape)
        for path, x in leaves.items()
        if isinstance(x, Tensor) and differentiable(x)
    }
    found: dict[str, str] = {}
    for pattern, to in patterns.items():
        below = [
            (path, path.removeprefix(root).removeprefix("/"))
            for path in shapes
            for root in _prefixes(path)
            if matches(pattern, root)
        ]
        if not below:
            raise ValueError(f"like: no floating leaf lies at, or below, {pattern!r}")
        for path, tail in below:
            source = found[path] = "/".join(filter(None, (to, tail)))
            if shapes.get(source) != shapes[path]:
                other = f"has {shapes[source]}" if source in shapes else "is not there"
                raise ValueError(
                    f"like: {path!r} of shape {shapes[path]} would lie like "
                    f"{source!r}, which {other}"
                )
    return found


def moments_like(applied: Iterable[Applied], leaves: Mapping[str, Any]) -> Like:
    """By path of a leaf in an optimizer's state: the parameter whose layout it has.

    The optimizer's ``init`` is called with the laid out parameters.
    """
    found: dict[str, str] = {}
    for optimizer, state, params in applied:
        given, treedef = tree.flatten(state, is_leaf=is_sharded)
        whole = [_is_whole(x, leaves) and x.name not in found for x in given]
        if not any(whole):
            continue
        laid = tree.map(lambda x: _shape(x, leaves), params, is_leaf=is_sharded)
        made, its = tree.flatten(optimizer.init(laid), is_leaf=is_sharded)
        for k, x, like in (
            zip(whole, given, made, strict=True) if its == treedef else ()
        ):
            if k and is_sharded(like) and x.shape == like.shape:
                found[x.name] = like.name
    return found


def _is_whole(x: Any, leaves: Mapping[str, Any]) -> bool:
    return isinstance(x, Recorded) and isinstance(leaves[x.name], Tensor)


def _shape(x: Any, leaves: Mapping[str, Any]) -> Any:
    """A leaf of a recorded tree with its layout, without memory."""
    if not isinstance(x, Recorded):
        return x
    leaf = leaves[x.name]
    if not isinstance(leaf, Sharded):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    local = torch.empty(leaf.part_shape, dtype=x.local.dtype, device="meta")
    return Sharded(local, replace(leaf.layout, name=x.name))


def _prefixes(path: str) -> list[str]:
    """The paths of the subtrees that hold a leaf, and its own."""
    parts = path.split("/") if path else []
    return ["/".join(parts[:k]) for k in range(len(parts) + 1)]


def _layouts(
    handler: Sharding,
    placed: PlacedGroup,
    recorder: Recorder,
    leaves: dict[str, Any],
    order: list[tuple[str, ...]],
) -> tuple[Layout, ...]:
    """The layouts of the leaves of a group that are laid out, side by side."""
    g = placed.group
    apart = recorder.layouts[g.paths[0]].split_axes
    axes = handler.cut.beside(apart) if handler.zero else ()
    sizes = [handler.mesh.axes[a] for a in axes]
    shapes, outer = [leaves[p].shape for p in g.paths], recorder.outer(g)
    names = [placed.paths.get(p, p) for p in g.paths]
    every = pack_flat(shapes, placed.dtype, names, axes, sizes, g.buffer, outer=outer)
    return tuple(
        replace(x, order=order, compute=g.compute)
        for x, p in zip(every, g.paths, strict=True)
        if p in placed.paths
    )


def _packed(
    handler: Sharding,
    placed: PlacedGroup,
    recorder: Recorder,
    leaves: dict[str, Any],
    coordinates: dict[str, int],
    source: GivenLeaves,
    plan: _Plan,
    stores: Stores,
) -> FlatShard:
    """This rank's part of whole tensors, as views of one flat buffer."""
    g, key = placed.group, (placed.group, tuple(placed.paths.items()), placed.dtype)
    layouts = plan.layouts.get(key)
    if layouts is None:
        layouts = _layouts(handler, placed, recorder, leaves, plan.order)
        plan.layouts[key] = layouts
    full = [leaves[p] for p in placed.paths.values()]
    own = {a: coordinates[a] for a in layouts[0].axes}
    place, chunk = layouts[0].flat, chunk_here(layouts[0], own)
    store = stores.moments if placed.copies else stores.params
    cached = handler.zero in (1, 2) and g.compute is None and not placed.copies
    if cached and store is None and place is not None:
        whole = source.zeros(place.size * chunk, placed.dtype, full[0])
        index = place.index(coordinates)
        flat = whole[index * chunk : (index + 1) * chunk]
    else:
        whole = None
        flat = source.empty(chunk if store is None else 0, placed.dtype, full[0])
        if store is not None:
            flat = store.empty(chunk, placed.dtype, flat.device)
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


def _owned(
    placed: PlacedGroup, recorder: Recorder, leaves: dict[str, Any], source: GivenLeaves
) -> list[Sharded | Tensor]:
    """Tensors of no buffer, each on the coordinate that owns it."""
    laid: list[Sharded | Tensor] = []
    outer = dict(zip(placed.group.paths, recorder.outer(placed.group), strict=True))
    for original, path in placed.paths.items():
        x, parts = leaves[path], outer[original]
        layout = Layout(tuple(x.shape), placed.dtype, parts, path)
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

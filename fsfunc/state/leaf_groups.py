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
from fsfunc.sharded.packing import local_chunk
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


@dataclass(frozen=True)
class GroupLayout:
    """What lays out the leaves of one tree, group by group.

    Args:
        leaves: by path, whole leaves; each is replaced by this rank's part.
        recorder: of the step; ``sharding``: its ``shard``, if there is one.
        source: of the leaves' values; ``stores``: where they go.
        at: this rank.
    """

    leaves: dict[str, Any]
    recorder: Recorder
    sharding: Sharding | None
    source: GivenLeaves
    stores: Stores
    at: Here

    def lay(self, applied: Iterable[Applied], patterns: Mapping[str, str]) -> None:
        """Lays out the leaves that units take, and those like them.

        Args:
            applied: the arguments of optimizers in the step; ``patterns``: the ``like``
                of `place`.
        """
        plan, leaves = self._plan(), self.leaves
        like, whole = leaves_like(patterns, leaves), dict(leaves)
        taken = _groups_taken(plan.groups, self.recorder, like)
        for placed in taken:
            self._lay(placed, plan)
        # An optimizer makes its state of laid out parameters: so these came first.
        moments = moments_like(applied, leaves)
        for placed in _groups_like(taken, {**moments, **like}, whole):
            self._lay(placed, plan)

    def _plan(self) -> _Plan:
        """The layouts that all ranks make, made by the first that has this record."""
        recorder, sharding = self.recorder, self.sharding
        coordinates = self.at.mesh.coordinates(self.at.rank)
        # Ranks that share a record have leaves of the same shapes, and transforms of
        # the same settings, but for the mesh. Where a unit call belongs to one
        # coordinate, a rank's own tells which calls it has.
        owners = {p.axis for t in recorder.unit_calls for p in t.owner}
        mine = tuple(n for a, n in coordinates.items() if a in owners)
        key = tuple(self.at.mesh.axes.items()), mine
        if key in recorder.derived:
            return recorder.derived[key]
        groups, order = [], []
        if recorder.handlers:  # else no unit is called, and all stay whole
            least = 0 if sharding is None else sharding.min_bytes
            groups = recorder.leaf_groups(least, sharding is not None)
            if sharding is not None:
                units = ["/".join(t.path) for t in recorder.unit_calls]
                paths = {p for g in groups for p in g.paths}
                sharding.options.check_names({*units, *paths})
                order = recorder.gather_order(groups, coordinates)
        plan = recorder.derived[key] = _Plan(groups, order)
        return plan

    def _lay(self, placed: PlacedGroup, plan: _Plan) -> None:
        whole = {path: self.leaves[path] for path in placed.paths.values()}
        refuse("float8", "place", whole)
        if self.sharding is None:
            laid = self._owned(placed)
        else:
            laid = self._packed(self.sharding, placed, plan).leaves()
        self.leaves.update(zip(whole, laid, strict=True))

    def _packed(
        self, sharding: Sharding, placed: PlacedGroup, plan: _Plan
    ) -> FlatShard:
        """This rank's part of whole tensors, as views of one flat buffer."""
        key = placed.group, tuple(placed.paths.items()), placed.dtype
        layouts = plan.layouts.get(key)
        if layouts is None:
            layouts = plan.layouts[key] = self._layouts(sharding, placed, plan.order)
        full = [self.leaves[p] for p in placed.paths.values()]
        coordinates = self.at.mesh.coordinates(self.at.rank)
        own = {a: coordinates[a] for a in layouts[0].axes}
        place, chunk = layouts[0].flat, local_chunk(layouts[0], own)
        store = self.stores.moments if placed.copies else self.stores.params

        # At zero 1 and 2 parameters stay whole between steps: the part is a range of
        # them, if no other memory and no other dtype is asked for.
        stays = sharding.zero in (1, 2) and not placed.copies
        stays = stays and placed.group.compute is None and store is None
        if stays and place is not None:
            whole = self.source.zeros(place.size * chunk, placed.dtype, full[0])
            index = place.index(coordinates)
            flat = whole[index * chunk : (index + 1) * chunk]
        else:
            whole, count = None, chunk if store is None else 0
            flat = self.source.empty(count, placed.dtype, full[0])
            if store is not None:
                flat = store.empty(chunk, placed.dtype, flat.device)

        shard = FlatShard(layouts, flat, own, whole)
        if isinstance(flat, _torch.FakeTensor):
            return shard  # there is nothing to write
        end = 0
        with torch.no_grad():
            for (start, stop), layout, x in zip(
                shard.ranges, layouts, full, strict=True
            ):
                if stop > start:
                    flat[end:start] = 0  # room that other leaves take elsewhere
                    self.source.write(x, layout, own, flat[start:stop])
                    end = stop
            flat[end:] = 0  # padding
        return shard  # its whole buffer does not show it yet: the first use gathers

    def _layouts(
        self, sharding: Sharding, placed: PlacedGroup, order: list[tuple[str, ...]]
    ) -> tuple[Layout, ...]:
        """The layouts of the leaves of a group that are laid out, side by side."""
        g, recorder = placed.group, self.recorder
        apart = recorder.layouts[g.paths[0]].split_axes
        axes = sharding.options.axis_without(apart) if sharding.zero else ()
        sizes = [sharding.mesh.axes[a] for a in axes]
        shapes = [self.leaves[p].shape for p in g.paths]
        outer = recorder.outer_placements(g)
        names = [placed.paths.get(p, p) for p in g.paths]
        every = pack_flat(
            shapes, placed.dtype, names, axes, sizes, g.buffer, outer=outer
        )
        return tuple(
            replace(x, order=order, compute=g.compute)
            for x, p in zip(every, g.paths, strict=True)
            if p in placed.paths
        )

    def _owned(self, placed: PlacedGroup) -> list[Sharded | Tensor]:
        """Tensors of no buffer, each on the coordinate that owns it."""
        laid: list[Sharded | Tensor] = []
        group, outer = placed.group, self.recorder.outer_placements(placed.group)
        for original, parts in zip(group.paths, outer, strict=True):
            if (path := placed.paths.get(original)) is None:
                continue
            x = self.leaves[path]
            layout = Layout(tuple(x.shape), placed.dtype, parts, path)
            laid.append(block_of(x, layout, self.source) if parts else x)
        return laid


@dataclass
class _Plan:
    """The layouts that all ranks make: groups, the order of buffers, and layouts.

    ``layouts`` are made when they are first read, by group and by the leaves that have
    its layouts.
    """

    groups: list[LeafGroup]
    order: list[tuple[str, ...]]
    layouts: dict[Any, tuple[Layout, ...]] = field(default_factory=dict)


def _groups_taken(
    groups: list[LeafGroup], recorder: Recorder, like: Mapping[str, str]
) -> list[PlacedGroup]:
    """The groups that units take, without leaves that have the layouts of others.

    Args:
        like: by path of a leaf, the path of the one whose layout it is to have.
    """
    taken = {p for t in recorder.unit_calls for p in t.leaves}
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


def block_of(x: Tensor, layout: Layout, source: GivenLeaves) -> Sharded:
    """This rank's block of a whole tensor; nothing, where others own it."""
    coordinates = here().mesh.coordinates()
    own = {a: coordinates[a] for a in layout.axes}
    if layout.block(own) is None:
        return Sharded(source.empty(0, layout.dtype, x), layout)
    part = source.whole(x)
    return Sharded(take(part, layout, own).clone() if layout.splits else part, layout)

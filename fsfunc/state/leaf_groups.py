"""Groups of leaves that share a buffer, and this rank's part of each group.

The recorder says which leaves units take (`tracing.groups.LeafGroup`): a unit's leaves
of one dtype are a group. `GroupLayout.lay` packs each group into a buffer and makes
this rank's range of it. Copies of leaves, such as moments, come after, in groups of
their own with the same layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
from fsfunc.tree.types import Leaf

Like = dict[str, str]  # by path of a leaf, the path of the one whose layout it has


@dataclass(frozen=True)
class PlacedGroup:
    """The leaves of a group that units take, or copies with the layouts of these.

    Args:
        group: the group, with all leaves of its buffer.
        paths: the paths of the leaves, by the path in ``group`` of the leaf whose
            layout each has.
        dtype: their dtype.
    """

    group: LeafGroup
    paths: dict[str, str]
    dtype: torch.dtype

    @property
    def are_copies(self) -> bool:
        """Whether the leaves are copies, and not those that units take."""
        return any(original != path for original, path in self.paths.items())


@dataclass(frozen=True)
class GroupLayout:
    """The layout of the leaves of one tree, group by group.

    Args:
        leaves: by path, whole leaves; each is replaced by this rank's part.
        recorder: the record of the step.
        sharding: its ``shard``, if there is one.
        source: the source of the leaves' values.
        stores: where the parts go.
        here: this rank.
    """

    leaves: dict[str, Leaf]
    recorder: Recorder
    sharding: Sharding | None
    source: GivenLeaves
    stores: Stores
    here: Here

    def lay(self, applied: Sequence[Applied], patterns: Mapping[str, str]) -> None:
        """Lays out the leaves that units take, and those like them.

        Args:
            applied: the optimizers that the step applies, and their arguments.
            patterns: the ``like`` of `place`.
        """
        plan, leaves = self._plan(), self.leaves
        like, whole = leaves_like(patterns, leaves), dict(leaves)
        taken_groups = _groups_taken(plan.groups, self.recorder, like)
        for placed in taken_groups:
            self._lay(placed, plan)
        # An optimizer makes its state of laid out parameters: so these came first.
        born = born_leaves(applied, leaves, self.source)
        moments = {path: x.name for path, x in born.items() if is_sharded(x)}
        for placed in _groups_like(taken_groups, {**moments, **like}, whole):
            self._lay(placed, plan)
        # What lies like no parameter (a preconditioner, which one rank has) lies as the
        # optimizer laid it.
        for path, x in born.items():
            if not is_sharded(x):
                self.source.note_whole(path)
            elif isinstance(leaves[path], Tensor):
                layout = replace(x.layout, name=path)
                leaves[path] = block_of(leaves[path], layout, self.source)
        # A parameter that no unit takes is whole, as what the optimizer made of it is.
        for _, _, params in applied:
            for x in tree.leaves(params, is_leaf=is_sharded):
                if _is_whole(x, leaves):
                    self.source.note_whole(x.name)

    def _plan(self) -> _Plan:
        """Returns the layouts that all ranks make; the first rank makes the plan."""
        recorder, sharding = self.recorder, self.sharding
        coordinates = self.here.mesh.coordinates(self.here.rank)
        # Ranks that share a record have leaves of the same shapes, and transforms of
        # the same settings, but for the mesh. Where a unit call belongs to one
        # coordinate, a rank's own tells which calls it has.
        owner_axes = {p.axis for t in recorder.unit_calls for p in t.owner}
        stage = tuple(n for a, n in coordinates.items() if a in owner_axes)
        key = tuple(self.here.mesh.axes.items()), stage
        if key in recorder.derived:
            return recorder.derived[key]
        groups, order = [], []
        if recorder.handlers:  # else no unit is called, and all stay whole
            min_bytes = 0 if sharding is None else sharding.min_bytes
            groups = recorder.leaf_groups(min_bytes, sharding is not None)
            if sharding is not None:
                units = ["/".join(t.path) for t in recorder.unit_calls]
                paths = {p for g in groups for p in g.paths}
                sharding.options.check_names({*units, *paths})
                order = recorder.gather_order(groups, coordinates)
        plan = recorder.derived[key] = _Plan(groups, order)
        return plan

    def _lay(self, placed: PlacedGroup, plan: _Plan) -> None:
        """Replaces the leaves of a group by this rank's parts."""
        whole = {path: self.leaves[path] for path in placed.paths.values()}
        refuse("float8", "place", whole)
        if self.sharding is None:
            parts = self._unpacked(placed)
        else:
            parts = self._packed(self.sharding, placed, plan).leaves()
        self.leaves.update(zip(whole, parts, strict=True))

    def _packed(
        self, sharding: Sharding, placed: PlacedGroup, plan: _Plan
    ) -> FlatShard:
        """Returns this rank's part of whole tensors, as views of one flat buffer."""
        key = placed.group, tuple(placed.paths.items()), placed.dtype
        layouts = plan.layouts.get(key)
        if layouts is None:
            layouts = plan.layouts[key] = self._layouts(sharding, placed, plan.order)
        full = [self.leaves[p] for p in placed.paths.values()]
        rank_coordinates = self.here.mesh.coordinates(self.here.rank)
        coordinates = {a: rank_coordinates[a] for a in layouts[0].axes}
        place, chunk = layouts[0].flat, local_chunk(layouts[0], coordinates)
        store = self.stores.moments if placed.are_copies else self.stores.params

        # At zero 1 and 2 parameters stay whole between steps: the part is a range of
        # them, if no other memory and no other dtype is asked for.
        stays_whole = sharding.zero in (1, 2) and not placed.are_copies
        stays_whole = stays_whole and placed.group.compute is None and store is None
        if stays_whole and place is not None:
            whole = self.source.zeros(place.size * chunk, placed.dtype, full[0])
            index = place.index(rank_coordinates)
            flat = whole[index * chunk : (index + 1) * chunk]
        else:
            # With a store, an empty tensor says on which device the part is computed.
            whole, count = None, chunk if store is None else 0
            flat = self.source.empty(count, placed.dtype, full[0])
            if store is not None:
                flat = store.empty(chunk, placed.dtype, flat.device)

        shard = FlatShard(layouts, flat, coordinates, whole)
        if isinstance(flat, _torch.FakeTensor):
            return shard  # there is nothing to write
        end = 0
        with torch.no_grad():
            for (start, stop), layout, x in zip(
                shard.ranges, layouts, full, strict=True
            ):
                if stop > start:
                    flat[end:start] = 0  # room that other leaves take elsewhere
                    self.source.write(x, layout, coordinates, flat[start:stop])
                    end = stop
            flat[end:] = 0  # padding
        # No `cache_gathered` yet: of `whole` only this rank's range is written, so the
        # first use gathers.
        return shard

    def _layouts(
        self, sharding: Sharding, placed: PlacedGroup, order: list[tuple[str, ...]]
    ) -> tuple[Layout, ...]:
        """Returns the layouts of the leaves of a group that are laid out."""
        g, recorder = placed.group, self.recorder
        # Not over axes that the leaves are split over already: experts.
        split_axes = recorder.layouts[g.paths[0]].split_axes
        axes = sharding.options.axis_without(split_axes) if sharding.zero else ()
        sizes = [sharding.mesh.axes[a] for a in axes]
        shapes = [self.leaves[p].shape for p in g.paths]
        outer = recorder.outer_placements(g)
        names = [placed.paths.get(p, p) for p in g.paths]
        # Copies of some leaves lie where these leaves lie in the buffer of all.
        layouts = pack_flat(
            shapes, placed.dtype, names, axes, sizes, g.buffer, outer=outer
        )
        return tuple(
            replace(layout, order=order, compute=g.compute)
            for layout, p in zip(layouts, g.paths, strict=True)
            if p in placed.paths
        )

    def _unpacked(self, placed: PlacedGroup) -> list[Sharded | Tensor]:
        """Returns the parts of leaves in no buffer, as there is no ``shard``."""
        leaves: list[Sharded | Tensor] = []
        group, outer = placed.group, self.recorder.outer_placements(placed.group)
        for original, parts in zip(group.paths, outer, strict=True):
            if (path := placed.paths.get(original)) is None:
                continue
            x = self.leaves[path]
            layout = Layout(tuple(x.shape), placed.dtype, parts, path)
            leaves.append(block_of(x, layout, self.source) if parts else x)
        return leaves


@dataclass
class _Plan:
    """The layouts that all ranks make.

    Args:
        groups: the groups of leaves.
        order: for each unit call, the buffers that it gathers.
        layouts: those of the leaves of a group, made when they are first read; by
            group, and by the leaves that have its layouts.
    """

    groups: list[LeafGroup]
    order: list[tuple[str, ...]]
    layouts: dict[Any, tuple[Layout, ...]] = field(default_factory=dict)


def _groups_taken(
    groups: list[LeafGroup], recorder: Recorder, like: Mapping[str, str]
) -> list[PlacedGroup]:
    """Returns the groups that units take, without leaves laid out like others.

    Args:
        like: by path of a leaf, the path of the one whose layout it is to have.
    """
    paths_taken = {p for t in recorder.unit_calls for p in t.leaves}
    chosen = [
        g for g in groups if not (paths_taken and paths_taken.isdisjoint(g.paths))
    ]
    placed = []
    for g in chosen:
        originals = {p: p for p in g.paths if p not in like}
        placed += [PlacedGroup(g, originals, g.dtype)] if originals else []
    return placed


def _groups_like(
    taken: list[PlacedGroup], like: Mapping[str, str], leaves: Mapping[str, Leaf]
) -> list[PlacedGroup]:
    """Returns the groups of copies of leaves that units take, copy by copy.

    Args:
        taken: the groups that units take.
        like: by path of a leaf, the path of the one whose layout it is to have.
        leaves: the whole leaves, by path.
    """
    group_of = {path: t.group for t in taken for path in t.group.paths}
    counts: Counter[str] = Counter()
    # By number of the copy, buffer and dtype: the first copies of all leaves of a
    # buffer make one group, the second ones another.
    copies: dict[tuple[int, str, torch.dtype], dict[str, str]] = {}
    for path, source in like.items():
        if source in group_of:
            counts[source] += 1
            key = counts[source], group_of[source].buffer, leaves[path].dtype
            copies.setdefault(key, {})[source] = path
    placed = []
    for (_, _, dtype), paths in copies.items():
        g = group_of[next(iter(paths))]
        ordered = {p: paths[p] for p in g.paths if p in paths}
        placed.append(PlacedGroup(g, ordered, dtype))
    return placed


def leaves_like(patterns: Mapping[str, str], leaves: Mapping[str, Leaf]) -> Like:
    """Returns, by path of a leaf, the path of the one whose layout ``like=`` gives it.

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
    like: dict[str, str] = {}
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
            source = like[path] = "/".join(filter(None, (to, tail)))
            if shapes.get(source) != shapes[path]:
                other = f"has {shapes[source]}" if source in shapes else "is not there"
                raise ValueError(
                    f"like: {path!r} of shape {shapes[path]} would lie like "
                    f"{source!r}, which {other}"
                )
    return like


def born_leaves(
    applied: Iterable[Applied], leaves: Mapping[str, Leaf], source: GivenLeaves
) -> dict[str, Leaf]:
    """Returns, by path in an optimizer's state, the leaf that its ``init`` would make.

    Nothing in a state says which leaves are moments. So the optimizer's ``init`` is
    called with the laid out parameters: what it makes of a leaf has that leaf's name,
    and its layout. Leaves that are laid out already are left out.
    """
    born: dict[str, Leaf] = {}
    for optimizer, state, params in applied:
        state_leaves, treedef = tree.flatten(state, is_leaf=is_sharded)
        are_whole = [_is_whole(x, leaves) and x.name not in born for x in state_leaves]
        if not any(are_whole):
            continue
        laid = tree.map(lambda x: _without_data(x, leaves), params, is_leaf=is_sharded)
        initial, initial_treedef = tree.flatten(
            optimizer.init(laid), is_leaf=is_sharded
        )
        if initial_treedef != treedef:
            names = (x.name for x in state_leaves if isinstance(x, Recorded))
            source.check_born(next(names), None)
            continue
        for is_whole, x, leaf in zip(are_whole, state_leaves, initial, strict=True):
            if not is_whole or not isinstance(leaf, Sharded | Tensor):
                continue
            source.check_born(x.name, leaf)
            if x.shape == leaf.shape:
                born[x.name] = leaf
    return born


def _is_whole(x: Leaf, leaves: Mapping[str, Leaf]) -> bool:
    """Returns whether a leaf of a recorded tree was not laid out yet."""
    return isinstance(x, Recorded) and isinstance(leaves[x.name], Tensor)


def _without_data(x: Leaf, leaves: Mapping[str, Leaf]) -> Leaf:
    """Returns a leaf of a recorded tree with its layout, without memory."""
    if not isinstance(x, Recorded):
        return x
    leaf = leaves[x.name]
    if not isinstance(leaf, Sharded):
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    local = torch.empty(leaf.part_shape, dtype=x.local.dtype, device="meta")
    return Sharded(local, replace(leaf.layout, name=x.name))


def _prefixes(path: str) -> list[str]:
    """Returns the paths of the subtrees that hold a leaf, and its own."""
    names = path.split("/") if path else []
    return ["/".join(names[:k]) for k in range(len(names) + 1)]


def block_of(x: Tensor, layout: Layout, source: GivenLeaves) -> Sharded:
    """Returns this rank's block of a whole tensor; nothing, where others own it."""
    # Named by its rank, which no plan notes as read: ranks run one program on blocks of
    # one shape, and a pipeline itself says that its stages do not.
    rank_here = here()
    rank_coordinates = rank_here.mesh.coordinates(rank_here.rank)
    coordinates = {a: rank_coordinates[a] for a in layout.axes}
    if layout.block(coordinates) is None:
        return Sharded(source.empty(0, layout.dtype, x), layout)
    whole = source.whole(x)
    # A clone, as a block is a view that would keep all of the leaf's memory.
    is_cut = layout.splits or layout.flat is not None
    block = take(whole, layout, coordinates).clone() if is_cut else whole
    return Sharded(block, layout)

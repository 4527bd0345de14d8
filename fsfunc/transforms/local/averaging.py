"""States that differ by rank, and their means.

Between two synchronisations ranks differ, so a leaf is not one value along the axis.
Its layout is that of the stack of the n copies (`sharded.packed_layouts`): so all of
them are saved, and loaded on as many ranks. :class:`StackLayouts` turns layouts into
those of stacks and back, without communication; ``average`` is what ranks exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal, label
from fsfunc.comm.comparison import agree
from fsfunc.comm.descriptions import section_of_values
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Mesh, here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.optim.coded_moments import decode_state, encode_state, is_coded
from fsfunc.optim.in_place import run_kernel
from fsfunc.optim.leaves import local_tensor, map_flat
from fsfunc.optim.matching import Matched
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.packed_layouts import rows_over, stacked, unstacked
from fsfunc.sharded.plain_leaves import lay_leaves
from fsfunc.tree.types import Leaf, PyTree

ConvertLayout = Callable[[Layout], Layout]

_State = TypeVar("_State", bound=Any)


@dataclass(frozen=True)
class LocalState(Generic[_State]):
    """The state of a step under ``local_sgd``, ``slowmo`` or ``gossip``: a pytree.

    Args:
        copies: the step's own state, each leaf the stack of the ranks' copies.
        count: how many steps were made.
        slow: what ``slowmo`` remembers.
        weights: of ``gossip`` over a graph that is not regular, each rank's push-sum
            weight.
        axis: the axes along which ranks differ.
    """

    copies: _State
    count: int = 0
    slow: Any = ()
    weights: tuple[float, ...] = ()
    axis: tuple[str, ...] = ()

    def replace(self, **changes: Any) -> Self:
        """Returns the state with some fields changed."""
        return replace(self, **changes)


tree.register_node(
    LocalState,
    lambda s: ((s.copies, s.count, s.slow, s.weights), s.axis),
    lambda axis, children: LocalState(*children, axis=axis),
    names=("copies", "count", "slow", "weights"),
)


class StackLayouts:
    """Trees of one rank's copies as trees of stacks, and back; memory is shared.

    Args:
        axis: the axes along which copies differ.
    """

    mesh: Mesh
    axis: tuple[str, ...]

    def __init__(self, mesh: Mesh, axis: tuple[str, ...]):
        self.mesh, self.axis = mesh, axis
        self.sizes: dict[str, int] = {a: mesh.axes[a] for a in axis}
        # By the id of a layout, since layouts compare without their names: that layout
        # (which keeps its id) and what it became, both ways. Of buffers by the id of
        # their members, and by rank too. So leaves keep one layout from step to step.
        self._layouts: dict[int, tuple[Layout, Layout]] = {}
        self._shards: dict[tuple[int, int], tuple[tuple[Layout, ...], FlatShard]] = {}

    def stack(self, copies: PyTree, coordinates: dict[str, int]) -> PyTree:
        """Returns one rank's copies as parts of stacks.

        Args:
            coordinates: the rank's.
        """
        return self._convert(copies, coordinates, self._stack_layout)

    def unstack(self, parts: PyTree, coordinates: dict[str, int]) -> PyTree:
        """Returns the rank's own copies, of parts of stacks.

        Raises:
            ValueError: a leaf that is no stack over this axis, or another rank's part.
        """
        return self._convert(parts, coordinates, self._unstack_layout)

    def _convert(
        self, t: PyTree, coordinates: dict[str, int], convert: ConvertLayout
    ) -> PyTree:
        """Returns a tree over the same memory, whose leaves have other layouts."""
        leaves, treedef = tree.flatten(t, is_leaf=is_sharded)
        by_buffer: dict[int, dict[int, Sharded]] = {}
        for i, x in enumerate(leaves):
            # Leaves of a buffer stay views of one buffer. But where a gradient call
            # tracks a leaf (`parts`), its `local` is an autograd leaf of its own, to
            # which no view of the buffer leads: it is converted as one of no buffer.
            if isinstance(x, Sharded) and x.packed is not None and x.parts is None:
                x.check()  # as reading `local` does: a donated leaf raises
                shard = x.packed
                if id(shard) not in by_buffer:
                    converted = self._convert_shard(shard, coordinates, convert)
                    keys = map(id, shard.members)
                    members = zip(keys, converted.leaves(), strict=True)
                    by_buffer[id(shard)] = dict(members)
                leaves[i] = by_buffer[id(shard)][id(x.layout)]
            elif isinstance(x, Sharded):
                layout = self._convert_layout(x.layout, convert)
                leaves[i] = _unpacked_leaf(x.local, layout, coordinates)
            elif isinstance(x, Tensor):  # one value before, and now a row of a stack
                plain = Layout(tuple(x.shape), x.dtype)
                layout = self._convert_layout(plain, convert)
                leaves[i] = _unpacked_leaf(x, layout, coordinates)
        return tree.unflatten(treedef, leaves)

    def _convert_shard(
        self, shard: FlatShard, coordinates: dict[str, int], convert: ConvertLayout
    ) -> FlatShard:
        """Returns a buffer over the same memory, whose leaves have other layouts."""
        for axis, i in shard.coordinates.items():
            if coordinates[axis] != i:
                raise ValueError(
                    f"{shard.members[0]} is the part of {dict(shard.coordinates)}, but "
                    f"this is {coordinates} of {self.mesh}: give each rank its own "
                    "state (a list that spmd returned, passed on whole)"
                )
        rank = self.mesh.rank_at(coordinates)
        cached = self._shards.get((id(shard.members), rank))
        if cached is None:
            members = tuple(self._convert_layout(m, convert) for m in shard.members)
            of_axes = {axis: coordinates[axis] for axis in members[0].axes}
            empty = shard.flat.new_empty(0)  # templates hold no memory
            template = FlatShard(members, empty, of_axes).like(empty)
            cached = self._shards[id(shard.members), rank] = shard.members, template
            # And the way back, to the very layouts that came in.
            self._shards[id(members), rank] = members, shard.like(empty)
        converted = cached[1].like(shard.flat)
        # What is gathered stays valid: the values are the same.
        converted.whole, converted._version = shard.whole, shard._version
        return converted

    def _convert_layout(self, layout: Layout, convert: ConvertLayout) -> Layout:
        # A plain leaf has none of its own: this one was made for it just now, and a
        # table by id would grow with each step.
        if not layout.name and not layout.flat:
            return convert(layout)
        if id(layout) not in self._layouts:
            converted = convert(layout)
            self._layouts[id(layout)] = layout, converted
            self._layouts[id(converted)] = converted, layout
        return self._layouts[id(layout)][1]

    def _stack_layout(self, layout: Layout) -> Layout:
        if taken := set(layout.axes) & set(self.axis):
            raise ValueError(
                f"{layout} is spread over {sorted(taken)}, where each rank is to have "
                "a copy of its own: split or shard it over other axes"
            )
        return stacked(layout, self.sizes)

    def _unstack_layout(self, layout: Layout) -> Layout:
        if layout.parts[: len(self.axis)] != rows_over(self.sizes):
            raise ValueError(
                f"{layout} is no stack of copies over {self.sizes}: go on "
                "with the state that the step returned, or begin from one that is the "
                "same on every rank, such as ff.consensus(state)"
            )
        return unstacked(layout, self.sizes)


def _unpacked_leaf(
    local: Tensor, layout: Layout, coordinates: dict[str, int]
) -> Sharded | Tensor:
    """Returns a leaf of no buffer, over the same memory."""
    shape = layout.local_shape(coordinates) if layout.axes else layout.shape
    local = local.view(shape) if local.shape != shape else local
    return Sharded(local, layout) if layout.parts else local


# Elements: what is smaller travels together, as each message costs time whatever its
# size. To join what is larger would save little, and copy it.
_BUCKET = 1 << 22


def average(values: PyTree, where: RankGroup, weight: float = 1.0) -> PyTree:
    """Returns means over ranks of ``weight`` times floating leaves; None for others."""

    def average_tensors(tensors: list[Tensor]) -> Sequence[Tensor]:
        weighted = [x * weight for x in tensors] if weight != 1 else tensors
        sums = sum_over_ranks(weighted, where)
        return [
            (total / where.size).to(x.dtype)
            for total, x in zip(sums, tensors, strict=True)
        ]

    return map_flat(average_tensors, values, untrainable=None)


def sum_over_ranks(tensors: Sequence[Tensor], where: RankGroup) -> list[Tensor]:
    """Returns sums over ranks, in float32 at least; small ones travel together."""
    wide = [torch.promote_types(x.dtype, torch.float32) for x in tensors]
    out: list[Tensor] = [x.to(dtype) for x, dtype in zip(tensors, wide, strict=True)]
    # All are sent before the first is waited for, so that they travel side by side.
    in_flight = []
    for positions in buckets(out):
        flat = concatenate_flat([out[i] for i in positions])
        if where.size > 1:
            in_flight.append((positions, where.start("psum", flat, name="averages")))
    for positions, handle in in_flight:
        parts = handle.wait().split([out[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            out[i] = part.view(out[i].shape)
    return out


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns positions of tensors of one dtype and device that travel together."""
    all_buckets: list[list[int]] = []
    # By dtype and device: the bucket that is being filled, and its elements so far.
    unfilled: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, x in enumerate(tensors):
        key, n = (x.dtype, x.device), x.numel()
        positions, count = unfilled.get(key, ([], _BUCKET))
        if count + n > _BUCKET:
            positions, count = [], 0
            all_buckets.append(positions)
        positions.append(i)
        unfilled[key] = positions, count + n
    return all_buckets


def concatenate_flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors as 1-D; a single one without a copy, if possible."""
    rows = [x.detach().reshape(-1) for x in tensors]
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)


def apply_kernel(
    kernel: Callable[..., None], params: PyTree, means: PyTree, *moments: PyTree
) -> list[PyTree]:
    """Returns parameters and moments that ``kernel`` has written, in place if it may.

    Args:
        kernel: ``kernel(params, means, *moments)`` over lists of tensors.
    """
    matched = Matched.of(params, means, *moments)
    return run_kernel(matched, kernel)


def assign(params: list[Tensor], means: list[Tensor]) -> None:
    """Writes means over parameters, as a kernel of :func:`apply_kernel`."""
    torch._foreach_copy_(params, means)


@api_boundary
def consensus(state: LocalState[_State]) -> _State:
    """Returns the mean of the copies of a state, as one state of the ranks.

    Floating leaves, moments too, are averaged (of 8-bit codes the decoded values), with
    the ranks' weights for ``gossip``. The state of ``slowmo`` is left out. The result
    is a model to evaluate, or a state to begin from.

    Args:
        state: a `LocalState`.

    Raises:
        TypeError: another state.
        RanksDiffer: integer leaves, or numbers, that the ranks do not share.

    Cost: one all-reduce of the rank's floating leaves, in float32 at least.
    """
    if not isinstance(state, LocalState):
        raise TypeError(
            f"consensus of a {type(state).__name__}: it takes the LocalState that a "
            "step under local_sgd, slowmo or gossip returns"
        )
    this_rank = here()
    mesh, rank = this_rank.mesh, this_rank.rank
    where, stacks = get_group(state.axis, this_rank), StackLayouts(mesh, state.axis)
    copy = stacks.unstack(state.copies, mesh.coordinates(rank))
    coded_leaves, copy_def = tree.flatten(copy, is_leaf=_is_leaf)
    # Codes are no numbers that have a mean: 8-bit moments are averaged as what they
    # stand for.
    values = [decode_state(x) if is_coded(x) else x for x in coded_leaves]
    plain = tree.unflatten(copy_def, values)
    paths, leaves, treedef = tree.flatten_with_paths(plain, is_leaf=is_sharded)
    weight = state.weights[where.index] if state.weights else 1.0
    # `internal`: the operators count as the library's, not as the user's step.
    with internal(), torch.no_grad(), label("", "consensus"):
        averaged = average(plain, where, weight)
        means: list[Leaf] = treedef.flatten_up_to(averaged)
        if this_rank.link.moves_data:  # in a plan there are no values to compare
            pairs = zip(leaves, means, strict=True)
            others = [
                None if mean is not None else local_tensor(x) for x, mean in pairs
            ]
            advice = "such values have no mean: the ranks' steps must make them equal"
            # One of the copies is returned: that they are equal has to be seen.
            title = "the ranks' copies differ in what is not averaged"
            notes = this_rank.link.notes
            agree(where, section_of_values(paths, others, notes, title, advice))
    out = [x if mean is None else mean for x, mean in zip(leaves, means, strict=True)]
    new_values = copy_def.flatten_up_to(tree.unflatten(treedef, out))
    pairs = zip(coded_leaves, new_values, strict=True)
    new_leaves = [encode_state(x, y) if is_coded(x) else y for x, y in pairs]
    return lay_leaves(tree.unflatten(copy_def, new_leaves))


def _is_leaf(x: PyTree) -> bool:
    return is_sharded(x) or is_coded(x)

"""States that differ by rank, and their means.

Between two synchronisations ranks differ, so a leaf is not one value along the axis.
Its layout is that of the stack of the n copies (`sharded.packed_layouts`): so all of
them are saved, and loaded on as many ranks. :class:`Relabeled` turns layouts into those
of stacks and back, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """The state with some fields changed."""
        return replace(self, **changes)


tree.register_node(
    LocalState,
    lambda s: ((s.copies, s.count, s.slow, s.weights), s.axis),
    lambda axis, children: LocalState(*children, axis=axis),
    names=("copies", "count", "slow", "weights"),
)


class Relabeled:
    """Trees of one rank's copies as trees of stacks, and back; memory is shared.

    Args:
        axis: the axes along which copies differ.
    """

    def __init__(self, mesh: Mesh, axis: tuple[str, ...]):
        self.mesh, self.axis = mesh, axis
        self.sizes = {a: mesh.axes[a] for a in axis}
        # By identity, since layouts compare without their names: (key, what it became),
        # both ways; buffers' members by rank too.
        self._layouts: dict[int, tuple[Layout, Layout]] = {}
        self._shards: dict[tuple[int, int], tuple[Any, FlatShard]] = {}

    def stacked(self, t: Any, at: dict[str, int]) -> Any:
        """One rank's copies as parts of stacks.

        Args:
            at: the rank's coordinates.
        """
        return self._each(t, at, self._stack)

    def copy(self, t: Any, at: dict[str, int]) -> Any:
        """The rank's own copies, of parts of stacks.

        Raises:
            ValueError: a leaf that is no stack over this axis, or another rank's part.
        """
        return self._each(t, at, self._unstack)

    def _each(self, t: Any, at: dict[str, int], turn: Any) -> Any:
        leaves, treedef = tree.flatten(t, is_leaf=is_sharded)
        made: dict[int, dict[int, Sharded]] = {}
        for i, x in enumerate(leaves):
            if isinstance(x, Sharded) and x.packed is not None and x.parts is None:
                x.check()
                shard = x.packed
                if id(shard) not in made:
                    new = self._shard(shard, at, turn)
                    keys = map(id, shard.members)
                    made[id(shard)] = dict(zip(keys, new.leaves(), strict=True))
                leaves[i] = made[id(shard)][id(x.layout)]
            elif isinstance(x, Sharded):
                layout = self._layout(x.layout, turn)
                leaves[i] = _loose(x.local, layout, at)
            elif isinstance(x, Tensor):
                layout = self._layout(Layout(tuple(x.shape), x.dtype), turn)
                leaves[i] = _loose(x, layout, at)
        return tree.unflatten(treedef, leaves)

    def _shard(self, shard: FlatShard, at: dict[str, int], turn: Any) -> FlatShard:
        """A buffer over the same memory, whose leaves have other layouts."""
        for axis, i in shard.coordinates.items():
            if at[axis] != i:
                raise ValueError(
                    f"{shard.members[0]} is the part of {dict(shard.coordinates)}, but "
                    f"this is {at} of {self.mesh}: give each rank its own state (a "
                    "list that spmd returned, passed on whole)"
                )
        rank = self.mesh.rank_at(at)
        known = self._shards.get((id(shard.members), rank))
        if known is None:
            members = tuple(self._layout(m, turn) for m in shard.members)
            own = {axis: at[axis] for axis in members[0].axes}
            nothing = shard.flat.new_empty(0)  # templates hold no memory
            new = FlatShard(members, nothing, own).like(nothing)
            known = self._shards[id(shard.members), rank] = shard.members, new
            back = shard.members, shard.like(nothing)
            self._shards[id(members), rank] = members, back[1]
        new = known[1].like(shard.flat)
        new.whole, new._version = shard.whole, shard._version
        return new

    def _layout(self, layout: Layout, turn: Any) -> Layout:
        if not layout.name and not layout.flat:  # made for one look at a plain leaf
            return turn(layout)
        if id(layout) not in self._layouts:
            new = turn(layout)
            self._layouts[id(layout)] = layout, new
            self._layouts[id(new)] = new, layout
        return self._layouts[id(layout)][1]

    def _stack(self, layout: Layout) -> Layout:
        if taken := set(layout.axes) & set(self.axis):
            raise ValueError(
                f"{layout} is spread over {sorted(taken)}, where each rank is to have "
                "a copy of its own: split or shard it over other axes"
            )
        return stacked(layout, self.sizes)

    def _unstack(self, layout: Layout) -> Layout:
        if layout.parts[: len(self.axis)] != rows_over(self.sizes):
            raise ValueError(
                f"{layout} is no stack of copies over {self.sizes}: go on "
                "with the state that the step returned, or begin from one that is the "
                "same on every rank, such as ff.consensus(state)"
            )
        return unstacked(layout, self.sizes)


def _loose(local: Tensor, layout: Layout, at: dict[str, int]) -> Any:
    """A leaf of no buffer, over the same memory."""
    shape = layout.local_shape(at) if layout.axes else layout.shape
    local = local.view(shape) if local.shape != shape else local
    return Sharded(local, layout) if layout.parts else local


_BUCKET = 1 << 22  # elements: what is smaller travels together


def averages(tree_: Any, where: RankGroup, weight: float = 1.0) -> Any:
    """The means over ranks of ``weight`` times the floating leaves; None for others."""

    def means(tensors: list[Tensor]) -> Sequence[Tensor]:
        sums = summed([x * weight for x in tensors] if weight != 1 else tensors, where)
        return [
            (total / where.size).to(x.dtype)
            for total, x in zip(sums, tensors, strict=True)
        ]

    return map_flat(means, tree_, untrainable=None)


def summed(tensors: Sequence[Tensor], where: RankGroup) -> list[Tensor]:
    """Sums over ranks, in float32 at least; small ones travel together."""
    wide = [torch.promote_types(x.dtype, torch.float32) for x in tensors]
    out: list[Any] = [x.to(dtype) for x, dtype in zip(tensors, wide, strict=True)]
    flights = []
    for positions in buckets(out):
        flat = in_one([out[i] for i in positions])
        if where.size > 1:
            flights.append((positions, where.start("psum", flat, name="averages")))
    for positions, work in flights:
        parts = work.wait().split([out[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            out[i] = part.view(out[i].shape)
    return out


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of tensors of one dtype and device that travel together."""
    found: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(tensors):
        key, n = (x.dtype, x.device), x.numel()
        positions, held = open_.get(key, ([], _BUCKET))
        if held + n > _BUCKET:
            positions, held = [], 0
            found.append(positions)
        positions.append(i)
        open_[key] = positions, held + n
    return found


def in_one(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors concatenated, 1-D; a single one without a copy, if possible."""
    rows = [x.detach().reshape(-1) for x in tensors]
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)


def written(kernel: Any, params: Any, means: Any, *moments: Any) -> list[Any]:
    """Parameters and moments into which ``kernel`` has written, in place if it may.

    Args:
        kernel: ``kernel(params, means, *moments)`` over lists of tensors.
    """
    matched = Matched.of(params, means, *moments)
    return run_kernel(matched, kernel)


def assign(params: Any, means: Any) -> None:
    """Writes means over parameters, as a kernel of :func:`written`."""
    torch._foreach_copy_(params, means)


@api_boundary
def consensus(state: LocalState[_State]) -> _State:
    """The mean of the copies of a state, as one state of the ranks along an axis.

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
    at = here()
    where, relabeled = get_group(state.axis, at), Relabeled(at.mesh, state.axis)
    copies = relabeled.copy(state.copies, at.mesh.coordinates(at.rank))
    given, spec = tree.flatten(copies, is_leaf=_is_whole)
    mine = tree.unflatten(spec, [decode_state(x) if is_coded(x) else x for x in given])
    paths, leaves, treedef = tree.flatten_with_paths(mine, is_leaf=is_sharded)
    weight = state.weights[where.index] if state.weights else 1.0
    with internal(), torch.no_grad(), label("", "consensus"):
        found = averages(mine, where, weight)
        means: list[Any] = treedef.flatten_up_to(found)
        if at.link.moves_data:
            pairs = zip(leaves, means, strict=True)
            rest = [None if mean is not None else local_tensor(x) for x, mean in pairs]
            advice = "such values have no mean: the ranks' steps must make them equal"
            title = "the ranks' copies differ in what is not averaged"
            agree(where, section_of_values(paths, rest, at.link.notes, title, advice))
    out = [x if mean is None else mean for x, mean in zip(leaves, means, strict=True)]
    made = spec.flatten_up_to(tree.unflatten(treedef, out))
    pairs = zip(given, made, strict=True)
    found = [encode_state(x, y) if is_coded(x) else y for x, y in pairs]
    return lay_leaves(tree.unflatten(spec, found))


def _is_whole(x: Any) -> bool:
    return is_sharded(x) or is_coded(x)

"""A state of which every rank along an axis has a copy of its own.

Between two synchronisations such ranks differ, so a leaf is not one value along the
axis. It lies as what it is: the stack of the n copies (`sharded.stacks`). So it is
saved whole, loaded where there are as many ranks, and refused elsewhere.
:class:`Relabeled` turns layouts into those of stacks and back, and moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.mesh import Mesh
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded, is_sharded
from fsfunc.sharded.stacks import rows_over, stacked, unstacked

__all__ = ["LocalState", "Relabeled"]


@dataclass(frozen=True)
class LocalState:
    """The state of a step under ``local_sgd``, ``slowmo`` or ``gossip``: a pytree.

    Args:
        copies: the step's own state, each leaf the stack of the ranks' copies.
        count: how many steps were made.
        slow: what ``slowmo`` remembers.
        weights: of ``gossip`` over a graph that is not regular, each rank's push-sum
            weight.
        axis: the axes along which ranks differ.
    """

    copies: Any
    count: int = 0
    slow: Any = ()
    weights: tuple[float, ...] = ()
    axis: tuple[str, ...] = ()

    def replace(self, **changes: Any) -> LocalState:
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
        """A buffer over the same memory, whose leaves lie otherwise."""
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
    """A leaf that lies in no buffer, over the same memory."""
    shape = layout.local_shape(at) if layout.axes else layout.shape
    local = local.view(shape) if local.shape != shape else local
    return Sharded(local, layout) if layout.parts else local

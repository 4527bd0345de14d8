"""The options of ``shard``, and the process groups of packed buffers.

`ShardOptions` are the arguments of ``shard``, checked and frozen, so that ranks can
compare them. `GroupTable` says over which ranks a buffer is gathered and its gradient
reduced. At mesh axes ``node=2, data=4`` with ``shard(step, mesh, "data",
replicate="node")``, rank (0, 1) has for every buffer::

    where      (0, 0) (0, 1) (0, 2) (0, 3)   each has a range of the buffer
    replicas   (0, 1) (1, 1)                 both have the same range
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Axis, Here, Mesh, check_mesh
from fsfunc.sharded.inputs import check_integer
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard
from fsfunc.transforms.messages.wire import Gather, Reduction
from fsfunc.tree.structure import matches, nearest

Rules = tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class ShardOptions:
    """The arguments of ``shard``, checked.

    Axes are tuples, and a mapping of ``reshard_after_forward`` is a tuple of items.
    """

    mesh: Mesh
    axis: tuple[str, ...]
    zero: int = 3
    replicate: tuple[str, ...] = ()
    reshard_after_forward: bool | Rules = True
    min_bytes: int | None = None
    reduce_each: bool = False
    gather: Gather = Gather()
    reduction: Reduction = Reduction()
    equal_batches: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, mesh: Mesh, axis: Axis, replicate: Axis | None, **others: Any
    ) -> ShardOptions:
        """Returns the options for the arguments of ``shard``.

        Raises:
            ValueError: as ``shard`` does.
        """
        axes = check_mesh(mesh, "shard").check(axis)
        replica_axes = () if replicate is None else mesh.check(replicate)
        if set(axes) & set(replica_axes):
            raise ValueError(f"replicate={replicate!r} repeats an axis of {axis!r}")
        reshard = others["reshard_after_forward"]
        if isinstance(reshard, Mapping):  # hashable, for `_first_match`
            others["reshard_after_forward"] = tuple(reshard.items())
        options = cls(mesh, axes, replicate=replica_axes, **others)
        options.gather.check(axes)
        options.reduction.check(axes, options.zero)
        return options

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero!r}: it is 0, 1, 2 or 3")
        reshard = self.reshard_after_forward
        # One value is checked as a rule for all names.
        rules = reshard if isinstance(reshard, tuple) else [("**", reshard)]
        if not all(isinstance(k, str) and isinstance(v, bool) for k, v in rules):
            raise TypeError(
                f"reshard_after_forward={reshard!r}: it is True, False, or {{pattern: "
                "True or False} by names of units or paths of parameters"
            )
        check_integer(0 if self.min_bytes is None else self.min_bytes, "min_bytes", 0)
        if self.reduce_each and self.zero == 1:
            raise ValueError(
                "reduce_each=True at zero=1, which reduces once, when the backward "
                "ends: zero=2 keeps parameters whole too, and reduces gradients as "
                "they appear"
            )

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        """(name, value) of all but the mesh: ranks compare them."""
        names = [f.name for f in fields(self) if f.name != "mesh"]
        return tuple((name, getattr(self, name)) for name in names)

    @property
    def shown(self) -> list[tuple[str, Any]]:
        """(name, value) to print: the axes' sizes, ``zero``, what is no default."""
        names = [f.name for f in fields(self)[3:] if getattr(self, f.name) != f.default]
        sizes = [(a, self.mesh.axes[a]) for a in self.axis]
        return [*sizes, *((name, getattr(self, name)) for name in ("zero", *names))]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes over which the loss is a mean."""
        return (*self.replicate, *self.axis)

    def retains(self, name: str, shard: FlatShard) -> bool:
        """Returns whether a unit call retains a gathered buffer for its backward."""
        reshard = self.reshard_after_forward
        if isinstance(reshard, bool):
            return not reshard
        return not _first_match(reshard, (name, *(x.name for x in shard.members)))

    def check_names(self, names: Collection[str]) -> None:
        """Raises if a pattern of ``reshard_after_forward`` matches none of the names.

        Args:
            names: those of a program's unit calls, and of the leaves that these take.
        """
        reshard = self.reshard_after_forward
        # A misspelt pattern would change nothing, and nobody would notice.
        for pattern, _ in reshard if isinstance(reshard, tuple) else ():
            if not any(matches(pattern, name) for name in names):
                raise ValueError(
                    f"reshard_after_forward: {pattern!r} fits no unit call and no leaf "
                    f"that one takes; there are {nearest(pattern, sorted(names))}. "
                    "'*' stands for one name, '**' for any number"
                )

    def gathers(self, layout: Layout) -> bool:
        """Returns whether this ``shard`` gathers the leaf.

        It does if the leaf's buffer is split over ``axis`` (without those axes that
        split the leaf itself, as for experts), or over nothing.
        """
        if (flat := layout.flat) is None:
            return False
        return flat.axes in (self.axis, ()) or (
            flat.axes == self.axis_without(layout.split_axes)
        )

    def axis_without(self, split_axes: Sequence[str]) -> tuple[str, ...]:
        """Returns ``axis`` without ``split_axes``."""
        return tuple(axis for axis in self.axis if axis not in split_axes)


# Cached, as each unit call of each step asks, by the names of all of its leaves.
@lru_cache(maxsize=4096)
def _first_match(rules: Rules, names: tuple[str, ...]) -> bool:
    for pattern, value in rules:
        if any(matches(pattern, name) for name in names):
            return value
    return True


class BufferGroups(NamedTuple):
    """The groups of ranks of a packed buffer.

    Args:
        where: the ranks that it is split over: gathers and reductions are over these.
        replicas: the ranks that have a copy of this rank's range.
        blocks: the ranks of the mean that have other blocks of its leaves.
    """

    where: RankGroup | None
    replicas: RankGroup | None
    blocks: RankGroup | None = None


class GroupTable(dict[tuple[str, ...], BufferGroups]):
    """The groups of a buffer, by the axes over which its leaves are split.

    If some of these are axes of ``shard``, as for experts, the groups have the ranks
    with the same block. They are made in the forward pass, as a backward pass does not
    know the mesh.

    Attributes:
        where, replicas: those of a buffer whose leaves are not split.
        mean_size: the number of ranks over which the loss is a mean.
    """

    where: RankGroup
    mean_size: int

    def __init__(self, options: ShardOptions, this_rank: Here):
        self.where, replica_axes = get_group(options.axis, this_rank), options.replicate
        self.replicas: RankGroup | None = (
            get_group(replica_axes, this_rank) if replica_axes else None
        )
        self.mean_size = self.where.size
        if self.replicas is not None:
            self.mean_size *= self.replicas.size
        self[()] = BufferGroups(self.where, self.replicas)

    def __missing__(self, split_axes: tuple[str, ...]) -> BufferGroups:
        replica_axes = () if self.replicas is None else self.replicas.axis
        block_axes = [a for a in (*replica_axes, *self.where.axis) if a in split_axes]
        groups = self[split_axes] = BufferGroups(
            _without(self.where, split_axes),
            _without(self.replicas, split_axes),
            get_group(tuple(block_axes)) if block_axes else None,
        )
        return groups


def _without(where: RankGroup | None, axes: Sequence[str]) -> RankGroup | None:
    """Returns the ranks of a group with this rank's coordinates along ``axes``."""
    if where is None or not set(where.axis) & set(axes):
        return where
    remaining = tuple(axis for axis in where.axis if axis not in axes)
    return get_group(remaining) if remaining else None

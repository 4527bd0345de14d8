"""Which leaves share a buffer: decided from a recording of the step (`Findings`).

While a step is recorded, each tensor of its first argument is a `Recorded` leaf, so
that a unit call shows which leaves it was given. Leaves that the same unit calls take
are gathered together, so they are packed into one buffer: a `LeafGroup`.

    recorder.record(step) -> Findings.unit_calls -> leaf_groups() -> buffers of `place`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.frames import frame
from fsfunc.sharded.layout import Layout, Owned
from fsfunc.sharded.leaf import OPERATORS, FlatShard, Sharded, is_sharded
from fsfunc.sharded.placements import Placement
from fsfunc.tracing.runs import LaysOut
from fsfunc.tree import Leaf


class Recorded(Sharded):
    """A leaf of a step that is recorded: passes for its tensor, and knows its path."""

    __slots__ = ()

    def __init__(self, local: Tensor, layout: Layout, packed: FlatShard | None = None):
        super().__init__(local, layout)
        tracer = frame().tracer
        if tracer is not None and isinstance(local, Tensor):
            tracer.on_leaf(local, layout.name)

    def __reduce__(self) -> tuple[type[Recorded], tuple[Tensor, Layout]]:
        # A ``deepcopy`` of a leaf is another tensor.
        return Recorded, (self.local.clone(), self.layout)

    def _refuse(self, message: str) -> NoReturn:
        raise RuntimeError(message)

    def tree_beside(self, other: Leaf) -> list[Leaf] | None:
        # What no unit takes stays a plain tensor; what one does, a later run refuses.
        other = recorded_tensor(other)
        if isinstance(other, Tensor) and other.shape == self.layout.shape:
            return [other]
        return super().tree_beside(other)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.local, name)

    @classmethod
    def __torch_function__(
        cls,
        func: _torch.TorchFunction,
        types: Sequence[type],
        args: _torch.Args = (),
        kwargs: _torch.Kwargs | None = None,
    ) -> Any:
        arguments: Any = args, kwargs or {}
        tensors: Any = tree.map(recorded_tensor, arguments, is_leaf=is_sharded)
        return func(*tensors[0], **tensors[1])


def recorded_tensor(x: Leaf) -> Leaf:
    """Returns the tensor that a recorded leaf passes for; anything else as it is."""
    return x.local if isinstance(x, Recorded) else x


def local_tensor(x: Leaf) -> Leaf:
    """Returns the tensor that this rank holds of a leaf; anything else as it is."""
    return x.local if isinstance(x, Sharded) else x


def whole_placeholder(x: Leaf) -> Leaf:
    """Returns what a unit is given for a leaf that has a layout already: zeros."""
    if not isinstance(x, Sharded):
        return x
    part, layout = x.local.detach(), x.layout.in_units
    if layout is None:
        return part.new_zeros(x.shape)
    part_shape = layout.local_shape(dict.fromkeys(layout.axes, 0))
    return Sharded(part.new_zeros(part_shape), layout)


def unit_placeholder(x: Leaf, layout: Layout) -> Leaf:
    """Returns what a unit is given for a recorded leaf: a tensor, or a rank's part.

    Args:
        layout: how the leaf will be split. Outside units it passes for a whole tensor.
    """
    part, split_layout = recorded_tensor(x), layout.in_units
    if split_layout is None:
        return part
    # By ``Tensor.split``, which the recorder does not count as a read (`torch_calls`):
    # it is this library that cuts.
    for cut in split_layout.splits:
        part = part.split(part.shape[cut.dim] // cut.size, cut.dim)[0]
    return Sharded(part, split_layout)


def _forward(name: str) -> Callable[..., Any]:
    # The name of the inner function is known to `comm.attribution`, which looks past it
    # for the user's line.
    def passed_on(self: Recorded, *args: Any) -> Any:
        return getattr(self.local, name)(*map(recorded_tensor, args))

    return passed_on


for _name in OPERATORS:
    setattr(Recorded, f"__{_name}__", _forward(f"__{_name}__"))

tree.register_node(
    Recorded,
    lambda leaf: ((leaf.local,), leaf.layout),
    lambda layout, children: Recorded(children[0], layout),
)


@dataclass(frozen=True)
class LeafGroup:
    """Leaves that share a buffer.

    Args:
        buffer: the buffer's name: the unit that gathers it, and its first leaf.
        paths: the leaves, in the tree's order.
        dtype: their dtype.
        owner: the coordinate at which all calls that take them run, if it is one.
        compute: the one dtype in which all these calls want them, if not ``dtype``.
    """

    buffer: str
    paths: tuple[str, ...]
    dtype: torch.dtype
    owner: tuple[Owned, ...] = ()
    compute: torch.dtype | None = None


class EqualRun(NamedTuple):
    """Unit calls in a row that do the same, each with the results of the one before.

    Such are the layers of a model: ``for p in params["layers"]: x = layer(p, x)``.

    Args:
        first: the number of the first call; ``count``: how many calls there are.
        links: by the position of a leaf among the results of a call, that among the
            inputs and keywords of the next one. All other inputs are the same objects
            in each call.
    """

    first: int
    count: int
    links: dict[int, int]


@dataclass
class RecordedUnitCall:
    """One unit call of a recorded step, and the leaves that it was given.

    Args:
        path: the names of the units around it, and its own.
        numbers: the numbers of these calls.
        leaves: the paths of the leaves.
        owner: the coordinate at which it runs, if not on every rank.
        casts: the dtypes that ``precision`` asked for, in words.
        dtypes: by leaf, the dtype to compute in.
    """

    path: tuple[str, ...]
    numbers: tuple[int, ...]
    leaves: list[str]
    owner: tuple[Owned, ...] = ()
    casts: str = ""
    dtypes: Sequence[torch.dtype | None] = ()

    def __str__(self) -> str:
        place = ", ".join(f"{p.axis}={p.coordinate}" for p in self.owner)
        return (
            f"{'/'.join(self.path)}({', '.join(self.leaves)})"
            + (f" on {place}" if place else "")
            + (f" in {self.casts}" if self.casts else "")
        )


# The default of `leaf_groups`. What a message costs whatever its size is paid about
# eight times a step at most; with fewer, less would run beside the backward. A message
# of 1 MiB takes longer than that cost.
_MESSAGES, _LARGE_MESSAGE = 8, 1 << 20

# A leaf, and the numbers of the unit call.
_Reading: TypeAlias = tuple[str, tuple[int, ...]]
# The file and line, and whether a gradient call was around.
_Where: TypeAlias = tuple[str, bool]
# The numbers of the calls that gather a group, the units around these, the dtype,
# whether it is trained, the owner, the axes, and the dtype to compute in.
_GroupKey: TypeAlias = tuple[
    tuple[tuple[int, ...], ...],
    tuple[str, ...],
    torch.dtype,
    bool,
    tuple[Owned, ...],
    tuple[str, ...],
    torch.dtype | None,
]
# The unit, the dtype, the names of the first leaves, the paths, the owner, and the
# dtype to compute in.
_MergedGroup: TypeAlias = tuple[
    tuple[str, ...], torch.dtype, str, list[str], tuple[Owned, ...], torch.dtype | None
]


@dataclass
class Findings:
    """What one recorded run of a step showed of its leaves.

    Attributes:
        layouts: by path, the layout of each leaf of the first argument: unsharded, or
            split over axes that no transform gathers.
        unit_calls: the unit calls, with the leaves that each was given.
        read_in_units: the leaves that a unit's own body read, by leaf and unit call.
        read_outside: the leaves that were read outside every unit, and where.
        trained: the leaves that are differentiated.
        handlers: the transforms that lay out leaves.
        differentiated: whether any leaf was differentiated.
        rank_local_paths: the paths of a returned state at which each rank has its own
            value.
        rank_local: the leaves that are each rank's own, and stay plain tensors.
        claims: (subject, text) of what else must be the same on every rank.
        equal_runs: the runs of equal unit calls, of a recording for a plan.
        derived: what was made of these findings, once for all simulated ranks that
            share them.
    """

    layouts: dict[str, Layout] = field(default_factory=dict)
    unit_calls: list[RecordedUnitCall] = field(default_factory=list)
    read_in_units: dict[_Reading, _Where] = field(default_factory=dict)
    read_outside: dict[str, _Where] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    handlers: list[LaysOut] = field(default_factory=list)
    differentiated: bool = False
    rank_local_paths: set[str] = field(default_factory=set)
    rank_local: frozenset[str] = frozenset()
    claims: list[tuple[str, str]] = field(default_factory=list)
    equal_runs: tuple[EqualRun, ...] = ()
    derived: dict[Any, Any] = field(default_factory=dict)

    def outer_placements(self, group: LeafGroup) -> list[tuple[Placement, ...]]:
        """Returns each leaf's placements outside the cut that fits it to the buffer."""
        return [(*group.owner, *self.layouts[path].parts) for path in group.paths]

    def comparison_lines(self) -> list[tuple[str, str]]:
        """Returns lines (subject, text), equal on all ranks that run one program.

        They leave out the lengths of batches, which may differ from rank to rank.
        """
        if lines := self.derived.get("lines"):
            return lines
        lines = [
            (f"unit call {i}", str(call)) for i, call in enumerate(self.unit_calls)
        ]
        for path, layout in self.layouts.items():
            trained = ", differentiated" if path in self.trained else ""
            layout_text = str(replace(layout, name="")).removesuffix(" whole")
            lines.append((f"leaf {path!r}", layout_text + trained))
        outside_text = ", ".join(map(repr, sorted(self.read_outside))) or "nothing"
        lines += [("read outside units", outside_text), *self.claims]
        return self.derived.setdefault("lines", lines)

    def whole_leaves(self, unit_gathers: bool = True) -> set[str]:
        """Returns the leaves that stay whole: those that a loss reads outside units.

        Args:
            unit_gathers: whether units gather what they take. A leaf that a unit takes
                does not stay whole then: outside the unit a loss reads this rank's
                part.
        """
        calls = self._calls_by_leaf()
        reads = self.read_outside | {
            path: where
            for (path, numbers), where in self.read_in_units.items()
            if not _takes(calls[path], numbers)  # it came in as an input
        }
        # In a step with a loss, reads outside the loss are the optimizer's and the
        # user's: those do with this rank's part. A function without a loss may be one.
        has_loss = any(in_loss for _, in_loss in reads.values())
        whole_reads = {
            path: where
            for path, (where, in_loss) in reads.items()
            if in_loss or not (has_loss or self.differentiated)
        }
        gathered_leaves = (
            {path for call in self.unit_calls for path in call.leaves}
            if unit_gathers
            else set()
        )
        return (set(whole_reads) | self.rank_local) - gathered_leaves

    def _calls_by_leaf(self) -> dict[str, list[RecordedUnitCall]]:
        """Returns the unit calls that were given each leaf, by path."""
        calls: dict[str, list[RecordedUnitCall]] = defaultdict(list)
        for call in self.unit_calls:
            for path in call.leaves:
                calls[path].append(call)
        return calls

    def owner(self, path: str) -> tuple[Owned, ...]:
        """Returns the one coordinate where all calls that take a leaf run, if any."""
        return _owner(self._calls_by_leaf()[path])

    def leaf_groups(
        self, min_bytes: int | None = 0, unit_gathers: bool = True
    ) -> list[LeafGroup]:
        """Returns the buffers, in the order in which unit calls first want them.

        Leaves share a buffer if the same calls gather them, and if all else is equal
        that decides how a buffer is gathered and reduced.

        Args:
            min_bytes: neighbouring buffers that are smaller become one. None: those
                of less than an eighth of the trained bytes, and of 1 MiB.
            unit_gathers: whether units gather their leaves.
        """
        whole_leaves = self.whole_leaves(unit_gathers)
        calls = self._calls_by_leaf()
        paths_by_key: dict[_GroupKey, list[str]] = {}
        for path, layout in self.layouts.items():
            if path in whole_leaves:
                continue
            gathering = [
                call for call in calls[path] if self._gathers(call, path, calls[path])
            ]
            key = (
                tuple(call.numbers for call in gathering),
                _common_prefix([call.path for call in gathering]),
                layout.dtype,
                path in self.trained,
                _owner(calls[path]),
                layout.axes,
                _compute_dtype(path, layout.dtype, gathering),
            )
            paths_by_key.setdefault(key, []).append(path)
        ordered = sorted(
            paths_by_key.items(),
            key=lambda key_and_paths: key_and_paths[0][0] or ((1 << 30,),),
        )
        if min_bytes is None:
            trained = [p for key, paths in ordered if key[3] for p in paths]
            nbytes = sum(self.layouts[p].nbytes for p in trained)
            min_bytes = min(nbytes // _MESSAGES, _LARGE_MESSAGE)
        merged = _merge_small(ordered, min_bytes, self.layouts)
        return [
            LeafGroup(f"{'/'.join(unit)}:{name}", tuple(paths), dtype, owner, compute)
            for unit, dtype, name, paths, owner, compute in merged
        ]

    def _gathers(
        self, call: RecordedUnitCall, path: str, calls: list[RecordedUnitCall]
    ) -> bool:
        """Returns whether ``call`` gathers the leaf: not if a unit around it does.

        Nor if its own body does not read the leaf, and only passes it to inner units:
        those gather it then, later and for a shorter time.
        """
        depth, is_read = len(call.numbers), (path, call.numbers) in self.read_in_units
        outer = [call.numbers[:k] for k in range(1, depth)]
        if any((path, numbers) in self.read_in_units for numbers in outer):
            return False
        inner_calls = [
            other
            for other in calls
            if len(other.numbers) > depth and other.numbers[:depth] == call.numbers
        ]
        return is_read or not inner_calls

    def gather_order(
        self, groups: list[LeafGroup], coordinates: Mapping[str, int] | None = None
    ) -> list[tuple[str, ...]]:
        """Returns the buffers that each unit call gathers, call by call.

        Prefetching follows this order.

        Args:
            groups: the buffers.
            coordinates: of a rank: calls that run elsewhere are left out.
        """
        coordinates_here = {} if coordinates is None else coordinates
        buffer_of = {path: g.buffer for g in groups for path in g.paths}
        order = []
        for call in self.unit_calls:
            if any(
                coordinates_here.get(p.axis, p.coordinate) != p.coordinate
                for p in call.owner
            ):
                continue
            name = "/".join(call.path) + "/"
            call_buffers = [buffer_of[p] for p in call.leaves if p in buffer_of]
            gathered = [
                b for b in call_buffers if not b.partition(":")[0].startswith(name)
            ]
            if gathered:
                order.append(tuple(dict.fromkeys(gathered)))
        return order


def _takes(calls: list[RecordedUnitCall], numbers: tuple[int, ...]) -> bool:
    """Returns whether unit call ``numbers``, or one around it, is among ``calls``."""
    return any(call.numbers == numbers[: len(call.numbers)] for call in calls)


def _owner(calls: list[RecordedUnitCall]) -> tuple[Owned, ...]:
    owners = {call.owner for call in calls}
    return owners.pop() if len(owners) == 1 else ()


def _compute_dtype(
    path: str, dtype: torch.dtype, calls: list[RecordedUnitCall]
) -> torch.dtype | None:
    """Returns the one dtype in which all calls want a leaf, if it is not ``dtype``."""
    if not dtype.is_floating_point:
        return None
    dtypes = {
        dict(zip(call.leaves, call.dtypes, strict=False)).get(path) for call in calls
    }
    only = dtypes.pop() if len(dtypes) == 1 else None
    return None if only == dtype else only


def _common_prefix(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the beginning that all ``paths`` share."""
    if not paths:
        return ()
    first = paths[0]
    length = 0
    while length < len(first) and all(
        p[: length + 1] == first[: length + 1] for p in paths
    ):
        length += 1
    return first[:length]


def _merge_small(
    ordered: list[tuple[_GroupKey, list[str]]],
    min_bytes: int,
    layouts: dict[str, Layout],
) -> list[_MergedGroup]:
    """Returns the groups with neighbouring small ones merged up to ``min_bytes``.

    Small messages are slow: what a message costs whatever its size is paid once then.
    Only groups that one unit call gathers are merged, of calls inside the same call of
    an outer unit, or inside none.
    """
    merged: list[_MergedGroup] = []
    # By kind, the last merged group that may grow: its index, and its bytes.
    growing: dict[Any, tuple[int, int]] = {}
    for (numbers, unit, dtype, trained, owner, axes, compute), paths in ordered:
        nbytes = sum(layouts[p].nbytes for p in paths)
        is_one_call = len(numbers) == 1
        outer_numbers = numbers[0][:-1] if is_one_call else None
        kind = (outer_numbers, unit[:-1], dtype, trained, owner, compute, axes)
        key = kind if is_one_call else None
        is_small = is_one_call and nbytes < min_bytes
        index, size = growing.get(key, (0, min_bytes))
        if is_small and size < min_bytes:
            _, _, name, joined_paths, *_ = merged[index]
            joint_name = f"{name} + {paths[0]}"
            merged[index] = (
                unit[:-1],
                dtype,
                joint_name,
                [*joined_paths, *paths],
                owner,
                compute,
            )
            growing[key] = index, size + nbytes
            continue
        # This group ends all that might have grown past it, as buffers are gathered in
        # order. Groups of the same calls that are split, or computed in another dtype,
        # do not come between: they have buffers of their own anyway.
        compute_and_axes = compute, axes
        growing = {k: v for k, v in growing.items() if k[-2:] != compute_and_axes}
        if is_small:
            growing[key] = len(merged), nbytes
        merged.append((unit, dtype, paths[0], list(paths), owner, compute))
    return merged

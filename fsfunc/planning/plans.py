"""``Plan``: the recorded events of a step, rank by rank, and their summaries.

`planner.plan` makes one. A `RankPlan` has the events of one rank in order (`events`),
and derives the rest from them: operators, FLOPs, memory at each moment. Ranks that run
one program share one `RankPlan`: a plan of 1,024 ranks often has one or two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Axis, Mesh
from fsfunc.comm.traffic import Ledger
from fsfunc.planning.events import Allocated, Event, Freed, Ran, Turn
from fsfunc.printing.tables import Report, Table, of_bytes, of_flops
from fsfunc.runtime.memory import KINDS, OFFLOADED
from fsfunc.sharded.layout import Layout


class PlannedLeaf(NamedTuple):
    """A tensor that the step was given.

    Args:
        path: in the state (``params/blocks/0/up``) or batch (``batch/tokens``).
        kind: what its memory is for, one of ``KINDS``.
        shape, dtype: those of the whole tensor.
        bytes: the size of this rank's part.
        layout: how it lies on the mesh; None for a plain tensor, which is whole here.
        unit: the unit whose buffer it lies in, or "".
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    layout: Layout | None
    unit: str


class Alive(NamedTuple):
    """A storage that is allocated at some moment, and the operator that allocated it.

    ``unit`` is the unit whose buffer it is, if that is known, else the one that ran.
    """

    bytes: int
    kind: str
    op: str
    unit: str
    phase: str


class Work(NamedTuple):
    """Work of one unit in one phase: calls, operators, FLOPs, bytes."""

    calls: int
    ops: int
    flops: int
    bytes: int


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plan of one rank.

    Args:
        rank: the rank that was planned.
        alike: how many ranks run this very program, this one included.
        coordinates: its place on the mesh.
        events: all that happens, in order.
        kinds: by storage, what its memory is for: one of ``KINDS``.
        leaves: what the step was given: state and batch.
        records: its collectives, in the order of issue.
        calls: how often the body of a unit ran, by (unit, phase).
        derived: by unit, bytes of what it computes from its parameters alone (casts,
            normalised weights) and saves for its backward: whole, on every rank.
        turns: where the work on each microbatch begins.
    """

    rank: int
    alike: int
    coordinates: Mapping[str, int]
    events: Sequence[Event]
    kinds: Mapping[int, str]
    leaves: Sequence[PlannedLeaf]
    records: Sequence[Record]
    calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    derived: Mapping[str, int] = field(default_factory=dict)
    turns: Sequence[Turn] = ()

    @cached_property
    def ledger(self) -> Ledger:
        """The collectives, as a ledger of the real run would show them."""
        return Ledger(list(self.records))

    def ops(self) -> Iterator[Ran]:
        """Every operator that runs, in order."""
        return (event for event in self.events if isinstance(event, Ran))

    @cached_property
    def ran(self) -> Mapping[Ran, int]:
        """Counts of equal operators, in the order of first appearance."""
        return Counter(event for event in self.events if isinstance(event, Ran))

    @cached_property
    def work(self) -> Mapping[tuple[str, str], Work]:
        """The work by (unit, phase), in the order of first appearance."""
        work_of: dict[tuple[str, str], Work] = {}
        # Over distinct operators: a plan of many layers has few of them.
        for (op, unit, phase), n in self.ran.items():
            calls = self.calls.get((unit, phase), 0)
            _, ops, flops, n_bytes = work_of.get((unit, phase), (0, 0, 0, 0))
            work_of[unit, phase] = Work(
                calls, ops + n, flops + n * op.flops, n_bytes + n * op.bytes
            )
        return work_of

    def flops(self, unit: str | None = None, phase: str | None = None) -> int:
        """Returns the FLOPs of one unit, or one phase, or both, or all."""
        return sum(
            work.flops
            for (u, p), work in self.work.items()
            if (unit is None or u == unit) and (phase is None or p == phase)
        )

    @cached_property
    def memory(self) -> list[tuple[int, tuple[int, ...]]]:
        """(event number, bytes held of each of ``KINDS``) after each change."""
        held_bytes: dict[str, int] = {kind: 0 for kind in KINDS}
        rows = []
        for number, kind, change in self._changes():
            if kind != OFFLOADED:  # that lies beside the device
                held_bytes[kind] += change
                rows.append((number, tuple(held_bytes.values())))
        return rows

    def _changes(self) -> Iterator[tuple[int, str, int]]:
        """Yields (event number, kind, bytes) of each change; bytes < 0 when freed."""
        allocated: dict[int, tuple[str, int]] = {}
        for number, event in enumerate(self.events):
            if isinstance(event, Allocated):
                kind = self.kinds.get(event.storage, "activations")
                allocated[event.storage] = kind, event.bytes
                yield number, kind, event.bytes
            elif isinstance(event, Freed) and event.storage in allocated:
                kind, size = allocated.pop(event.storage)
                yield number, kind, -size

    @cached_property
    def _fullest(self) -> tuple[int, tuple[int, ...]]:
        """The row of ``memory`` in which most is held."""
        empty = (0, (0,) * len(KINDS))
        return max(self.memory, key=lambda row: sum(row[1]), default=empty)

    @property
    def peak_event(self) -> int:
        """The number of the event at which most memory is held."""
        return self._fullest[0]

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of each kind when most is held."""
        return dict(zip(KINDS, self._fullest[1], strict=True))

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once."""
        return sum(self.peak.values())

    @cached_property
    def offloaded_bytes(self) -> int:
        """The most bytes held at once beside the device: on the host, or its disk."""
        changes = (change for _, kind, change in self._changes() if kind == OFFLOADED)
        return max(accumulate(changes, initial=0))

    @cached_property
    def resident_bytes(self) -> int:
        """The most bytes held at once, on the device and beside it."""
        changes = (change for _, _, change in self._changes())
        return max(accumulate(changes, initial=0))

    def alive(self, at: int | None = None) -> list[Alive]:
        """Returns the storages held after event ``at``, by default that of the peak.

        The largest first; what is offloaded is not on the device, and left out.
        """
        event_number = self.peak_event if at is None else at
        alive_by_storage: dict[int, Alive] = {}
        for event in self.events[: event_number + 1]:
            if isinstance(event, Allocated):
                kind = self.kinds.get(event.storage, "activations")
                allocated_by = event.op, event.owner or event.unit, event.phase
                alive_by_storage[event.storage] = Alive(
                    event.bytes, kind, *allocated_by
                )
            elif isinstance(event, Freed):
                alive_by_storage.pop(event.storage, None)
        on_device = [
            alive for alive in alive_by_storage.values() if alive.kind != OFFLOADED
        ]
        return sorted(on_device, key=lambda a: -a.bytes)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The plan of a step: a :class:`RankPlan` for each distinct program.

    ``count``, ``bytes`` and ``table`` are of one rank, as a ledger's are: the lowest,
    or the one that ``rank=`` names. ``peak_bytes`` and ``flops`` are those of the rank
    that has most.

    Args:
        ranks: one rank of each distinct program.
        differing_axes: the axes along which programs differ; ranks that differ along
            others alone run the same one.
        step: the step's name, with the transforms around it.
    """

    mesh: Mesh
    ranks: tuple[RankPlan, ...]
    differing_axes: tuple[str, ...] = ()
    step: str = ""

    def __repr__(self) -> str:
        """Returns three lines; ``ff.show.plan`` has the tables."""
        programs = f"{len(self.ranks)} program{'s' * (len(self.ranks) != 1)}"
        sent = f"{self.count()} collectives, {of_bytes(self.bytes())} sent"
        at_most = f"{of_flops(self.flops)}, {of_bytes(self.peak_bytes)} at the peak"
        lowest = f"rank {self.ranks[0].rank}"
        return (
            f"plan of {programs} on {self.mesh}\n{lowest}: {sent}\nat most: {at_most}"
        )

    def _repr_html_(self) -> str:
        """Returns what a notebook shows; ``ff.show.plan`` has all of it."""
        fullest = max(self.ranks, key=lambda r: r.peak_bytes)
        rows = [(kind, of_bytes(size)) for kind, size in fullest.peak.items() if size]
        peak = Table(f"at the peak of rank {fullest.rank}", ("<held", ">bytes"), rows)
        parts = (repr(self), *self.ranks[0].ledger.pieces(None))
        return Report((*parts, *[peak] * bool(rows)))._repr_html_()

    def __getitem__(self, rank: int) -> RankPlan:
        """Returns the program that ``rank`` runs.

        Raises:
            IndexError: a rank that the mesh has not.
            KeyError: one whose program was not planned, as in the plan of one rank.
        """
        if not 0 <= rank < self.mesh.size:
            raise IndexError(f"rank {rank} of {self.mesh}")
        coordinates = self.mesh.coordinates(rank)
        # Ranks with equal coordinates along these axes run the same program.
        for rank_plan in self.ranks:
            if all(
                rank_plan.coordinates[axis] == coordinates[axis]
                for axis in self.differing_axes
            ):
                return rank_plan
        raise KeyError(f"rank {rank} of {self.mesh} was not planned")

    def on(self, rank: int | None) -> RankPlan:
        """Returns the program of ``rank``, or for None that of the lowest rank."""
        return self.ranks[0] if rank is None else self[rank]

    def records(self, rank: int | None = None) -> list[Record]:
        """Returns a rank's collectives, in the order of issue."""
        return list(self.on(rank).records)

    def count(
        self, op: str | None = None, axis: Axis | None = None, rank: int | None = None
    ) -> int:
        """Returns the number of collectives that a rank issues."""
        axis = axis if axis is None else self.mesh.expand(axis)
        return self.on(rank).ledger.count(op, axis)

    def bytes(
        self, axis: Axis | None = None, op: str | None = None, rank: int | None = None
    ) -> int | float:
        """Returns the bytes that a rank sends, counted as a ledger counts them."""
        axis = axis if axis is None else self.mesh.expand(axis)
        return self.on(rank).ledger.bytes(axis, op)

    def table(self, rank: int | None = None) -> list[tuple[str, str, int, int | float]]:
        """Returns rows of (op, axis, count, bytes), in the order of first issue."""
        return self.on(rank).ledger.table()

    @property
    def flops(self) -> int:
        """FLOPs of the rank that has most."""
        return max(r.flops() for r in self.ranks)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds at once."""
        return max(r.peak_bytes for r in self.ranks)

    @property
    def offloaded_bytes(self) -> int:
        """The most bytes that a rank holds at once beside its device."""
        return max(r.offloaded_bytes for r in self.ranks)

    @property
    def derived(self) -> dict[str, int]:
        """By unit: bytes a call saves of what it computed from its parameters alone."""
        largest: dict[str, int] = {}
        for r in self.ranks:
            for unit, size in r.derived.items():
                largest[unit] = max(size, largest.get(unit, 0))
        return largest

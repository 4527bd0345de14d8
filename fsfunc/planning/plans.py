"""``Plan``: the recorded events of a step, rank by rank, and their summaries."""

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
from fsfunc.planning.events import Event, Gave, Ran, Took, Turn
from fsfunc.printing.tables import Report, Table, of_bytes, of_flops
from fsfunc.runtime.memory import KINDS, OFFLOADED
from fsfunc.sharded.layout import Layout


class PlannedLeaf(NamedTuple):
    """A tensor that the step was given.

    Args:
        path: in the state (``params/blocks/0/up``) or batch (``batch/tokens``).
        kind: one of ``KINDS``.
        shape, dtype: of the whole.
        bytes: of this rank's part.
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
    """Memory that is held at some moment, and who took it.

    ``unit``: whose it is, where that is known, else the one that ran then.
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
        rank: the one that was looked at.
        alike: how many ranks run this very program, this one included.
        coordinates: its place on the mesh.
        events: all that happens, in order.
        kinds: what each storage is for.
        leaves: what the step was given: state and batch.
        records: its collectives, in the order of issue.
        calls: how often the body of a unit ran, by (unit, phase).
        derived: bytes that a unit keeps for its backward which it computed from its
            parameters alone (casts, normalised weights): whole, on every rank.
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
        """The collectives as a ledger of the real run would show them."""
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
        found: dict[tuple[str, str], Work] = {}
        for (op, unit, phase), n in self.ran.items():
            calls = self.calls.get((unit, phase), 0)
            _, ops, flops, size = found.get((unit, phase), (0, 0, 0, 0))
            found[unit, phase] = Work(
                calls, ops + n, flops + n * op.flops, size + n * op.bytes
            )
        return found

    def flops(self, unit: str | None = None, phase: str | None = None) -> int:
        """FLOPs of one unit, or one phase, or both, or all."""
        return sum(
            work.flops
            for (u, p), work in self.work.items()
            if (unit is None or u == unit) and (phase is None or p == phase)
        )

    @cached_property
    def memory(self) -> list[tuple[int, tuple[int, ...]]]:
        """(event number, bytes held of each of ``KINDS``) after each change."""
        held: dict[str, int] = {kind: 0 for kind in KINDS}
        rows = []
        for number, kind, change in self._changes():
            if kind != OFFLOADED:
                held[kind] += change
                rows.append((number, tuple(held.values())))
        return rows

    def _changes(self) -> Iterator[tuple[int, str, int]]:
        """(event number, kind, bytes) of memory taken, or given back as below 0."""
        taken: dict[int, tuple[str, int]] = {}
        for number, event in enumerate(self.events):
            if isinstance(event, Took):
                kind = self.kinds.get(event.key, "activations")
                taken[event.key] = kind, event.bytes
                yield number, kind, event.bytes
            elif isinstance(event, Gave) and event.key in taken:
                kind, size = taken.pop(event.key)
                yield number, kind, -size

    @cached_property
    def _fullest(self) -> tuple[int, tuple[int, ...]]:
        """The row of ``memory`` in which most is held."""
        none = (0, (0,) * len(KINDS))
        return max(self.memory, key=lambda row: sum(row[1]), default=none)

    @property
    def peak_at(self) -> int:
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
        beside = (change for _, kind, change in self._changes() if kind == OFFLOADED)
        return max(accumulate(beside, initial=0))

    @cached_property
    def resident_bytes(self) -> int:
        """The most bytes held at once, on the device and beside it."""
        changes = (change for _, _, change in self._changes())
        return max(accumulate(changes, initial=0))

    def alive(self, at: int | None = None) -> list[Alive]:
        """Memory held after event number ``at`` (default: the peak), largest first."""
        at = self.peak_at if at is None else at
        held: dict[int, Alive] = {}
        for event in self.events[: at + 1]:
            if isinstance(event, Took):
                kind = self.kinds.get(event.key, "activations")
                who = event.op, event.owner or event.unit, event.phase
                held[event.key] = Alive(event.bytes, kind, *who)
            elif isinstance(event, Gave):
                held.pop(event.key, None)
        found = [alive for alive in held.values() if alive.kind != OFFLOADED]
        return sorted(found, key=lambda a: -a.bytes)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The plan of a step: a :class:`RankPlan` for each distinct program.

    ``count``, ``bytes`` and ``table`` speak of one rank, as a ledger's do: the lowest,
    or the one that ``rank=`` names. ``peak_bytes`` and ``flops`` are those of the rank
    that has most.
    """

    mesh: Mesh
    ranks: tuple[RankPlan, ...]
    asked: tuple[str, ...] = ()  # axes along which programs differ
    step: str = ""  # its name, with the transforms around it where it prints them

    def __repr__(self) -> str:
        """Returns three lines; ``ff.show.plan`` has the tables."""
        programs = f"{len(self.ranks)} program{'s' * (len(self.ranks) != 1)}"
        sent = f"{self.count()} collectives, {of_bytes(self.bytes())} sent"
        held = f"{of_flops(self.flops)}, {of_bytes(self.peak_bytes)} at the peak"
        which = f"rank {self.ranks[0].rank}"
        return f"plan of {programs} on {self.mesh}\n{which}: {sent}\nat most: {held}"

    def _repr_html_(self) -> str:
        """What a notebook shows; ``ff.show.plan`` has all of it."""
        most = max(self.ranks, key=lambda own: own.peak_bytes)
        held = [(kind, of_bytes(size)) for kind, size in most.peak.items() if size]
        peak = Table(f"at the peak of rank {most.rank}", ("<held", ">bytes"), held)
        parts = (repr(self), *self.ranks[0].ledger.pieces(None))
        return Report((*parts, *[peak] * bool(held)))._repr_html_()

    def __getitem__(self, rank: int) -> RankPlan:
        """The program that ``rank`` runs."""
        if not 0 <= rank < self.mesh.size:
            raise IndexError(f"rank {rank} of {self.mesh}")
        at = self.mesh.coordinates(rank)
        for found in self.ranks:
            if all(found.coordinates[a] == at[a] for a in self.asked):
                return found
        raise KeyError(f"rank {rank} of {self.mesh} was not planned")

    def on(self, rank: int | None) -> RankPlan:
        """The program of ``rank``; None is the lowest that was planned."""
        return self.ranks[0] if rank is None else self[rank]

    def records(self, rank: int | None = None) -> list[Record]:
        """A rank's collectives, in the order of issue."""
        return list(self.on(rank).records)

    def count(
        self, op: str | None = None, axis: Axis | None = None, rank: int | None = None
    ) -> int:
        """The number of collectives that a rank issues."""
        return self.on(rank).ledger.count(op, axis)

    def bytes(
        self, axis: Axis | None = None, op: str | None = None, rank: int | None = None
    ) -> int | float:
        """The bytes that a rank sends, counted as the ledger counts."""
        return self.on(rank).ledger.bytes(axis, op)

    def table(self, rank: int | None = None) -> list[tuple[str, str, int, int | float]]:
        """Rows of (op, axis, count, bytes), in the order of first issue."""
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
        """Units that keep copies computed from their parameters, and bytes a call."""
        found: dict[str, int] = {}
        for r in self.ranks:
            for unit, size in r.derived.items():
                found[unit] = max(size, found.get(unit, 0))
        return found

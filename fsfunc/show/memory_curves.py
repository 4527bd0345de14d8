"""Memory over a step: the model of its charts, and tables of what is there at the peak.

A `Curve` is made of a rank's plan (`curve_of`): the bytes of each kind after each
event, over operators that ran, or over seconds if an estimate's spans are given. The
tables say what the memory at the peak is for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from fsfunc.planning.events import Allocated, Ran
from fsfunc.planning.plans import PlannedLeaf, RankPlan
from fsfunc.planning.simulation import Span
from fsfunc.printing.folding import common_name, group_alike, name_group
from fsfunc.printing.tables import Table, of_bytes, of_share
from fsfunc.runtime.memory import KINDS
from fsfunc.show.charts import COMPUTE
from fsfunc.show.lanes import Lane

OUTSIDE_UNITS = "(outside units)"
_GIVEN_TO_STEP = "(given to the step)"


def unit_of(leaf: PlannedLeaf) -> str:
    """Returns the unit of a leaf: a buffer's name is ``unit:first leaf``."""
    return leaf.unit.partition(":")[0]


def kinds_table(rank_plan: RankPlan) -> Table:
    """Returns the table of the memory of each kind at the peak."""
    rows = [
        (kind, of_bytes(size), of_share(size, rank_plan.peak_bytes))
        for kind, size in rank_plan.peak.items()
        if size
    ]
    when = peak_words(rank_plan)
    rows.append(("total", of_bytes(rank_plan.peak_bytes), ""))
    title = f"memory at the peak{f', {when}' if when else ''}"
    head = ("<kind", ">bytes", ">share")
    return Table(title, head, rows if rank_plan.peak_bytes else [])


def peak_by_unit(rank_plan: RankPlan) -> list[tuple[str, str, int]]:
    """Returns (kind, unit or "", bytes) of the memory at the peak, largest first."""
    given_leaves: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for leaf in rank_plan.leaves:
        given_leaves[leaf.kind][unit_of(leaf)] += leaf.bytes
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    # What the step was given has no operator that tells its unit: leaves tell it.
    given_sizes: dict[str, int] = defaultdict(int)
    for storage in rank_plan.alive():
        if storage.op:
            sizes[storage.kind, storage.unit] += storage.bytes
        else:
            given_sizes[storage.kind] += storage.bytes
    for kind, size in given_sizes.items():
        units = given_leaves[kind]
        # Some of it is freed by then, and nothing tells of which units.
        if sum(units.values()) != size:
            units = {"": size}
        for unit, n in units.items():
            sizes[kind, unit] += n
    keyed = [(unit, kind, (kind, size)) for (kind, unit), size in sizes.items() if size]
    groups = [
        (rows[0][0], name_group(names), sum(size for _, size in rows))
        for names, rows in group_alike(keyed)
    ]
    return sorted(groups, key=lambda row: -row[2])


def peak_words(rank_plan: RankPlan) -> str:
    """Describes the moment of most memory: ``in the backward of block, by aten.mm``."""
    event = rank_plan.events[rank_plan.peak_event] if rank_plan.events else None
    if isinstance(event, Allocated) and event.op:
        return f"in {_phase_words(event.unit, event.phase)}, by {_operator(event.op)}"
    if isinstance(event, Ran):
        return f"in {_phase_words(event.unit, event.phase)}"
    return "before anything runs" if event is not None else ""


def _phase_words(unit: str, phase: str) -> str:
    """Returns ``the backward of block``."""
    return f"the {phase or 'step'}" + (f" of {unit}" if unit else "")


def _operator(op: str) -> str:
    """Returns an operator's name without the overload, which tells a reader nothing."""
    return ".".join(op.split(".")[:2])


def alive_table(rank_plan: RankPlan) -> Table:
    """Returns the table of the largest groups of storages at the peak."""
    sizes: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for storage in rank_plan.alive():
        key = storage.kind, storage.op, storage.unit, storage.phase
        sizes[key].append(storage.bytes)

    keyed = [
        (unit, (kind, op, phase), ((kind, op, phase), nbytes))
        for (kind, op, unit, phase), nbytes in sizes.items()
    ]
    rows: list[tuple[int, tuple[str, ...]]] = []
    for names, groups in group_alike(keyed):
        kind, op, phase = groups[0][0]
        total = sum(sum(nbytes) for _, nbytes in groups)
        taken_by = _operator(op) if op else _GIVEN_TO_STEP
        unit = common_name(names) or (OUTSIDE_UNITS if op else "")
        count = str(sum(len(nbytes) for _, nbytes in groups))
        share = of_share(total, rank_plan.peak_bytes)
        row = (kind, unit, taken_by, phase, count, of_bytes(total), share)
        rows.append((total, row))
    rows.sort(key=lambda row: -row[0])
    head = ("<kind", "<unit", "<taken by", "<phase", ">tensors", ">bytes", ">share")
    title = "what is held then, largest first"
    return Table(title, head, [row for _, row in rows], most=10)


BytesByKind: TypeAlias = tuple[int, ...]  # bytes of each of KINDS


@dataclass(frozen=True)
class Curve:
    """The memory that a rank holds over a step.

    Positions are counted in operators that ran, or in seconds if ``timed``.

    Args:
        points: (position, bytes of each of ``KINDS`` from there on).
        phases: what ran when: operators of one unit and phase are a span.
        length: the position of the step's end.
        peak: the point at which most is held.
        at_start: the bytes before the step begins.
        timed: whether positions are seconds.
    """

    points: tuple[tuple[float, BytesByKind], ...]
    phases: Lane
    length: float
    peak: tuple[float, BytesByKind]
    at_start: BytesByKind
    timed: bool = False

    @cached_property
    def most(self) -> BytesByKind:
        """The most bytes of each kind at any time; kinds peak at different times."""
        sizes = [size for _, size in self.points] or [self.at_start]
        return tuple(map(max, zip(*sizes, strict=True)))

    def columns(self, count: int) -> list[BytesByKind]:
        """Returns the highest moment of each of ``count`` equal parts of the step."""
        highest: list[BytesByKind] = [(0,) * len(KINDS)] * count
        ends = [*(position for position, _ in self.points[1:]), self.length]
        for (start, sizes), end in zip(self.points, ends, strict=False):
            total = sum(sizes)
            first, stop = self._column(start, count), self._stop(start, end, count)
            # Of a column the highest moment: a short peak would be lost in a mean.
            for column in range(first, stop):
                if total > sum(highest[column]):
                    highest[column] = sizes
        return highest

    def peak_column(self, count: int) -> int:
        """Returns the column of the peak."""
        return self._column(self.peak[0], count)

    def _column(self, position: float, count: int) -> int:
        return min(int(position * count / self.length), count - 1) if self.length else 0

    def _stop(self, start: float, end: float, count: int) -> int:
        """Returns one past the last column that [start, end) reaches.

        It reaches its first at least, so that a short peak is shown.
        """
        if not self.length:  # nothing runs: what is there is there all along
            return count
        stop = math.ceil(end * count / self.length)
        return min(max(stop, self._column(start, count) + 1), count)


def curve_of(rank_plan: RankPlan, spans: Sequence[Span] | None = None) -> Curve:
    """Makes the curve of a rank's plan: by operators, or over time if spans are given.

    Args:
        spans: of an estimate of the plan.

    Raises:
        ValueError: spans of another plan.
    """
    rows = iter(rank_plan.memory)
    row = next(rows, None)
    points: list[tuple[int, BytesByKind]] = []
    phases: list[Span] = []
    ran, sizes = 0, (0,) * len(KINDS)
    peak, at_start = (0, sizes), sizes

    def add_point(position: int, sizes: BytesByKind) -> None:
        nonlocal peak
        points.append((position, sizes))
        if sum(sizes) > sum(peak[1]):
            peak = (position, sizes)

    # What the step is given comes first. What it closes over is noted when it is read:
    # that is not counted as there before the step.
    is_start = True
    for number, event in enumerate(rank_plan.events):
        is_start = is_start and isinstance(event, Allocated) and not event.op
        if row is not None and row[0] == number:
            sizes = row[1]
            add_point(ran, sizes)
            at_start = sizes if is_start else at_start
            row = next(rows, None)
        if isinstance(event, Ran):
            start, ran = ran, ran + 1
            unit, phase = event.unit, event.phase
            # Consecutive operators of one unit and phase are one span.
            if phases and (phases[-1].unit, phases[-1].phase) == (unit, phase):
                start = phases.pop().start
            phases.append(Span(rank_plan.rank, COMPUTE, unit, unit, phase, start, ran))
    lane = Lane(rank_plan.rank, COMPUTE, tuple(phases))
    curve = Curve(tuple(points), lane, ran, peak, at_start)
    if spans is None:
        return curve
    computed = [s for s in spans if s.rank == rank_plan.rank and s.stream == COMPUTE]
    if phases and not computed:
        raise ValueError(
            f"the estimate is of another plan, without rank {rank_plan.rank}"
        )
    time_of = _clock_of(curve, computed)
    return replace(
        curve,
        points=tuple((time_of(ran), sizes) for ran, sizes in points),
        phases=replace(lane, spans=tuple(computed)),
        length=max((s.end for s in spans), default=0.0),
        peak=(time_of(peak[0]), peak[1]),
        timed=True,
    )


def _clock_of(curve: Curve, spans: Sequence[Span]) -> Callable[[int], float]:
    """Returns a function from operators that ran to the time at which they have.

    A phase of the curve is one span of the estimate, or several if it waited. Within
    it, operators are taken to be equally long.

    Args:
        spans: what the curve's rank computes, in order.
    """
    merged: list[tuple[tuple[str, str], float, float]] = []  # (unit, phase), start, end
    for s in spans:
        key, start = (s.unit, s.phase), s.start
        if merged and merged[-1][0] == key:
            _, start, _ = merged.pop()
        merged.append((key, start, s.end))
    ends = [phase.end for phase in curve.phases.spans]
    times: list[tuple[float, float]] = []  # of each phase of the curve
    next_span, time = 0, 0.0
    for phase in curve.phases.spans:
        # Spans without operators, such as one that takes memory, are passed over.
        for i in range(next_span, len(merged)):
            key, start, end = merged[i]
            if key == (phase.unit, phase.phase):
                next_span, time = i + 1, end
                times.append((start, end))
                break
        else:
            times.append((time, time))
    last = spans[-1].end if spans else 0.0

    def time_of(ran: int) -> float:
        i = bisect_left(ends, ran)
        if i == len(ends):
            return last
        phase, (start, end) = curve.phases.spans[i], times[i]
        share = max(ran - phase.start, 0) / (phase.end - phase.start)
        return min(start + share * (end - start), end)  # rounding may exceed it

    return time_of

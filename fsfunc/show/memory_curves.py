"""Memory over a step: the model of its charts, and tables of what its peak holds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fsfunc.planning.events import Ran, Took
from fsfunc.planning.plans import PlannedLeaf, RankPlan
from fsfunc.planning.simulation import Span
from fsfunc.printing.folding import alike, counted, together
from fsfunc.printing.tables import Table, of_bytes, of_share
from fsfunc.runtime.memory import KINDS
from fsfunc.show.charts import COMPUTE
from fsfunc.show.lanes import Lane

OUTSIDE_UNITS = "(outside units)"
_GIVEN_TO_STEP = "(given to the step)"


def unit_of(leaf: PlannedLeaf) -> str:
    """The unit of a leaf; a buffer's name goes on with its first leaf."""
    return leaf.unit.partition(":")[0]


def kinds_table(rank_plan: RankPlan) -> Table:
    """The memory of each kind when most is held."""
    rows = [
        (kind, of_bytes(size), of_share(size, rank_plan.peak_bytes))
        for kind, size in rank_plan.peak.items()
        if size
    ]
    at = peak_words(rank_plan)
    rows.append(("total", of_bytes(rank_plan.peak_bytes), ""))
    title = f"memory at the peak{f', {at}' if at else ''}"
    head = ("<kind", ">bytes", ">share")
    return Table(title, head, rows if rank_plan.peak_bytes else [])


def peak_by_unit(rank_plan: RankPlan) -> list[tuple[str, str, int]]:
    """(kind, unit or "", bytes) of what is held at the peak, largest first."""
    at_start: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for leaf in rank_plan.leaves:
        given[leaf.kind][unit_of(leaf)] += leaf.bytes
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    left: dict[str, int] = defaultdict(int)  # of what the step was given
    for held in rank_plan.alive():
        if held.op:
            sizes[held.kind, held.unit] += held.bytes
        else:
            left[held.kind] += held.bytes
    for kind, size in left.items():
        units = given[kind]
        if sum(units.values()) != size:  # some are gone by then, of whatever units
            units = {"": size}
        for unit, n in units.items():
            sizes[kind, unit] += n
    keyed = [(unit, kind, (kind, size)) for (kind, unit), size in sizes.items() if size]
    found = [
        (rows[0][0], counted(names), sum(size for _, size in rows))
        for names, rows in alike(keyed)
    ]
    return sorted(found, key=lambda row: -row[2])


def peak_words(rank_plan: RankPlan) -> str:
    """The moment of most memory: ``in the backward of block, by aten.mm``."""
    event = rank_plan.events[rank_plan.peak_at] if rank_plan.events else None
    if isinstance(event, Took) and event.op:
        return f"in {_turn(event.unit, event.phase)}, by {_operator(event.op)}"
    if isinstance(event, Ran):
        return f"in {_turn(event.unit, event.phase)}"
    return "before anything runs" if event is not None else ""


def _turn(unit: str, phase: str) -> str:
    """``the backward of block``."""
    return f"the {phase or 'step'}" + (f" of {unit}" if unit else "")


def _operator(op: str) -> str:
    """Without the overload, which says nothing to a reader."""
    return ".".join(op.split(".")[:2])


def alive_table(rank_plan: RankPlan) -> Table:
    """The largest groups of what is held at the peak."""
    sizes: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for held in rank_plan.alive():
        sizes[held.kind, held.op, held.unit, held.phase].append(held.bytes)

    keyed = [
        (unit, (kind, op, phase), ((kind, op, phase), numbers))
        for (kind, op, unit, phase), numbers in sizes.items()
    ]
    found: list[tuple[int, tuple[str, ...]]] = []
    for names, groups in alike(keyed):
        kind, op, phase = groups[0][0]
        total = sum(sum(numbers) for _, numbers in groups)
        by = _operator(op) if op else _GIVEN_TO_STEP
        unit = together(names) or (OUTSIDE_UNITS if op else "")
        count = str(sum(len(numbers) for _, numbers in groups))
        share = of_share(total, rank_plan.peak_bytes)
        row = (kind, unit, by, phase, count, of_bytes(total), share)
        found.append((total, row))
    found.sort(key=lambda row: -row[0])
    head = ("<kind", "<unit", "<taken by", "<phase", ">tensors", ">bytes", ">share")
    title = "what is held then, largest first"
    return Table(title, head, [row for _, row in found], most=10)


BytesByKind = tuple[int, ...]  # bytes of each of KINDS


@dataclass(frozen=True)
class Curve:
    """The memory that a rank holds while its operators run.

    Args:
        points: (operators that ran before, bytes of each of ``KINDS`` from then on).
        turns: what ran when, in operators: those of one unit and phase are a span.
        length: operators in all.
        peak: the point at which most is held.
        given: what is held before the step begins.
        timed: whether all this is in seconds, in place of operators.
    """

    points: tuple[tuple[float, BytesByKind], ...]
    phases: Lane
    length: float
    peak: tuple[float, BytesByKind]
    at_start: BytesByKind
    timed: bool = False

    @cached_property
    def most(self) -> BytesByKind:
        """The most bytes of each kind at any time."""
        held = [held for _, held in self.points] or [self.at_start]
        return tuple(map(max, zip(*held, strict=True)))

    def columns(self, count: int) -> list[BytesByKind]:
        """The highest moment of each of ``count`` equal parts of the step."""
        tops: list[BytesByKind] = [(0,) * len(KINDS)] * count
        ends = [*(at for at, _ in self.points[1:]), self.length]
        for (at, held), until in zip(self.points, ends, strict=False):
            size = sum(held)
            for column in range(self._column(at, count), self._last(at, until, count)):
                if size > sum(tops[column]):
                    tops[column] = held
        return tops

    def peak_column(self, count: int) -> int:
        """The column of the peak."""
        return self._column(self.peak[0], count)

    def _column(self, at: float, count: int) -> int:
        return min(int(at * count / self.length), count - 1) if self.length else 0

    def _last(self, at: float, until: float, count: int) -> int:
        """One past the last column that [at, until) reaches, its first at least."""
        if not self.length:  # nothing runs, and what is held is held all along
            return count
        reached = math.ceil(until * count / self.length)
        return min(max(reached, self._column(at, count) + 1), count)


def curve_of(rank_plan: RankPlan, spans: Sequence[Span] | None = None) -> Curve:
    """The curve of a rank's plan: by operators, or over time where spans are given.

    Args:
        spans: of an estimate of the plan.

    Raises:
        ValueError: spans of another plan.
    """
    rows = iter(rank_plan.memory)
    row = next(rows, None)
    points: list[tuple[int, BytesByKind]] = []
    phases: list[Span] = []
    ran, held = 0, (0,) * len(KINDS)
    peak, at_start = (0, held), held

    def put(at: int, what: BytesByKind) -> None:
        nonlocal peak
        points.append((at, what))
        if sum(what) > sum(peak[1]):
            peak = (at, what)

    begins = True  # what a step closes over is noted later, when it is read
    for number, event in enumerate(rank_plan.events):
        begins = begins and isinstance(event, Took) and not event.op
        if row is not None and row[0] == number:
            held = row[1]
            put(ran, held)
            given = held if begins else given
            row = next(rows, None)
        if isinstance(event, Ran):
            before, ran = ran, ran + 1
            unit, phase = event.unit, event.phase
            if turns and (turns[-1].unit, turns[-1].phase) == (unit, phase):
                before = turns.pop().start
            turns.append(Span(rank_plan.rank, COMPUTE, unit, unit, phase, before, ran))
    lane = Lane(rank_plan.rank, COMPUTE, tuple(turns))
    curve = Curve(tuple(points), lane, ran, peak, given)
    if spans is None:
        return curve
    computed = [s for s in spans if s.rank == rank_plan.rank and s.stream == COMPUTE]
    if turns and not computed:
        raise ValueError(f"the estimate is of another plan, without rank {rank_plan.rank}")
    clock = _clock_of(curve, computed)
    return replace(
        curve,
        points=tuple((clock(at), held) for at, held in points),
        turns=replace(lane, spans=tuple(computed)),
        length=max((s.end for s in spans), default=0.0),
        peak=(clock(peak[0]), peak[1]),
        timed=True,
    )


def _clock_of(curve: Curve, spans: Sequence[Span]) -> Callable[[int], float]:
    """Times at which operators of a curve have run, by the spans they are part of.

    A turn is one span, or several where it waited; within it, operators are taken to
    be equally long.

    Args:
        spans: what the curve's rank computes, in order.
    """
    merged: list[tuple[tuple[str, str], float, float]] = []
    for s in spans:
        what, start = (s.unit, s.phase), s.start
        if merged and merged[-1][0] == what:
            _, start, _ = merged.pop()
        merged.append((what, start, s.end))
    ends = [turn.end for turn in curve.phases.spans]
    times: list[tuple[float, float]] = []
    place, now = 0, 0.0
    for turn in curve.phases.spans:
        # Taking memory may be a span of its own, without operators.
        for i in range(place, len(merged)):
            what, start, end = merged[i]
            if what == (turn.unit, turn.phase):
                place, now = i + 1, end
                times.append((start, end))
                break
        else:
            times.append((now, now))
    last = spans[-1].end if spans else 0.0

    def clock(at: int) -> float:
        i = bisect_left(ends, at)
        if i == len(ends):
            return last
        turn, (start, end) = curve.phases.spans[i], times[i]
        share = max(at - turn.start, 0) / (turn.end - turn.start)
        return min(start + share * (end - start), end)  # but for rounding

    return clock

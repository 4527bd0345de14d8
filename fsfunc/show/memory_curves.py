"""Memory over a step, by operators or over time: the model of its charts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fsfunc.planning.events import Ran, Took
from fsfunc.planning.plans import RankPlan
from fsfunc.planning.simulation import Span
from fsfunc.runtime.memory import KINDS
from fsfunc.show.figures import COMPUTE
from fsfunc.show.lanes import Lane

Held = tuple[int, ...]  # bytes of each of KINDS


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

    points: tuple[tuple[float, Held], ...]
    turns: Lane
    length: float
    peak: tuple[float, Held]
    given: Held
    timed: bool = False

    @cached_property
    def most(self) -> Held:
        """The most bytes of each kind at any time."""
        held = [held for _, held in self.points] or [self.given]
        return tuple(map(max, zip(*held, strict=True)))

    def columns(self, count: int) -> list[Held]:
        """The highest moment of each of ``count`` equal parts of the step."""
        tops: list[Held] = [(0,) * len(KINDS)] * count
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


def curve_of(own: RankPlan, spans: Sequence[Span] | None = None) -> Curve:
    """The curve of a rank's plan: by operators, or over time where spans are given.

    Args:
        spans: of an estimate of the plan.

    Raises:
        ValueError: spans of another plan.
    """
    rows = iter(own.memory)
    row = next(rows, None)
    points: list[tuple[int, Held]] = []
    turns: list[Span] = []
    ran, held = 0, (0,) * len(KINDS)
    peak, given = (0, held), held

    def put(at: int, what: Held) -> None:
        nonlocal peak
        points.append((at, what))
        if sum(what) > sum(peak[1]):
            peak = (at, what)

    for number, event in enumerate(own.events):
        if row is not None and row[0] == number:
            held = row[1]
            put(ran, held)
            given = held if isinstance(event, Took) and not event.op else given
            row = next(rows, None)
        if isinstance(event, Ran):
            before, ran = ran, ran + 1
            unit, phase = event.unit, event.phase
            if turns and (turns[-1].unit, turns[-1].phase) == (unit, phase):
                before = turns.pop().start
            turns.append(Span(own.rank, COMPUTE, unit, unit, phase, before, ran))
    lane = Lane(own.rank, COMPUTE, tuple(turns))
    curve = Curve(tuple(points), lane, ran, peak, given)
    if spans is None:
        return curve
    computed = [s for s in spans if s.rank == own.rank and s.stream == COMPUTE]
    if turns and not computed:
        raise ValueError(f"the estimate is of another plan, without rank {own.rank}")
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
    ends = [turn.end for turn in curve.turns.spans]
    times: list[tuple[float, float]] = []
    place, now = 0, 0.0
    for turn in curve.turns.spans:
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
        turn, (start, end) = curve.turns.spans[i], times[i]
        share = max(at - turn.start, 0) / (turn.end - turn.start)
        return start + share * (end - start)

    return clock

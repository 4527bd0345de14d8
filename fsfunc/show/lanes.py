"""When each rank computes and when it does not: what text and picture both draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fsfunc.pipelining.actions import Action, stages_of
from fsfunc.pipelining.timing import Event
from fsfunc.pipelining.verification import held
from fsfunc.show.palette import OUTSIDE, WAITS

__all__ = ["Bar", "Chart", "Gap", "Lane", "check_events", "draft"]

_NOISE = 1e-9  # of the makespan: sums of floats that should be equal


@dataclass(frozen=True)
class Bar:
    """One compute action of one rank; times count from the start of the chart."""

    start: float
    end: float
    kind: str
    label: str
    chunk: int  # its stage's place among the rank's stages


@dataclass(frozen=True)
class Gap:
    """A time in which a rank computes nothing; kind is ``WAITS`` or ``OUTSIDE``."""

    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class Lane:
    """One rank's row: its bars in order, the gaps around them, and what it holds."""

    bars: tuple[Bar, ...]
    gaps: tuple[Gap, ...]
    held: float

    @property
    def busy(self) -> float:
        return sum(bar.end - bar.start for bar in self.bars)

    @property
    def bubble(self) -> float:
        return sum(gap.end - gap.start for gap in self.gaps)


@dataclass(frozen=True)
class Chart:
    """Every rank's lane, the time they all span, and the most stages of one rank."""

    lanes: tuple[Lane, ...]
    makespan: float
    chunks: int


def check_events(events: Sequence[Any]) -> list[Event]:
    """The events as a list, if each is ``(rank, action, start, end)``.

    Raises:
        TypeError: an event that is no such tuple; says which.
        ValueError: no events, a negative rank, a time that is not finite, or an end
            before its start; says which.
    """
    events, checked = list(events), []
    if not events:
        raise ValueError("there are no events to show: was the run recorded?")
    for place, event in enumerate(events):
        if not isinstance(event, tuple) or len(event) != 4:
            raise TypeError(
                f"event {place} is {event!r}: give (rank, action, start, end) tuples, "
                "as a recorded run or simulate(schedule) has them"
            )
        rank, action, start, end = event
        if not isinstance(action, Action):
            raise TypeError(
                f"event {place} has {action!r} where its Action belongs: "
                "parse() makes actions of text"
            )
        here = f"event {place}, {action} of rank {rank}"
        if not isinstance(rank, int) or rank < 0:
            raise ValueError(f"{here}: a rank is 0, 1, 2 ...")
        if not (math.isfinite(start) and math.isfinite(end) and start <= end):
            raise ValueError(f"{here}: it cannot last from {start} to {end}")
        checked.append(Event(rank, action, start, end))
    return checked


def draft(events: Sequence[Any], n_ranks: int | None = None) -> Chart:
    """The chart of some events; transfers are not drawn, as ranks compute meanwhile.

    Args:
        events: from a recorded run or a simulated schedule, in any order.
        n_ranks: how many ranks there are; up to the last with an event by default.

    Raises:
        TypeError, ValueError: events that ``check_events`` refuses, or two compute
            actions of one rank at a time.
    """
    computed = [event for event in check_events(events) if event.action.is_compute]
    if not computed:
        raise ValueError("there is no F, B, I or W among the events to show")
    zero = min(event.start for event in computed)
    makespan = max(event.end for event in computed) - zero
    rows: list[list[Event]] = [[] for _ in range(n_ranks or 0)]
    for event in sorted(computed, key=lambda event: (event.start, event.end)):
        rows += [[] for _ in range(len(rows), event.rank + 1)]
        rows[event.rank].append(event)
    stages = [stages_of(event.action for event in row) for row in rows]
    holds = held(tuple(tuple(event.action for event in row) for row in rows))
    chunks = max(map(len, stages))
    lanes = []
    for row, own, most in zip(rows, stages, holds, strict=True):
        bars = tuple(
            Bar(
                event.start - zero,
                event.end - zero,
                event.action.kind,
                event.action.text(stage=chunks > 1),
                own.index(event.action.stage),
            )
            for event in row
        )
        for before, bar in pairwise(bars):
            if bar.start < before.end - _NOISE * makespan:
                raise ValueError(
                    f"rank {row[0].rank}: {bar.label} starts at {bar.start:.6g}, "
                    f"before {before.label} ends at {before.end:.6g}: a rank computes "
                    "one action at a time"
                )
        lanes.append(Lane(bars, gaps(bars, makespan), most))
    return Chart(tuple(lanes), makespan, chunks)


def gaps(bars: tuple[Bar, ...], makespan: float) -> tuple[Gap, ...]:
    """What a rank's bars leave free of [0, makespan]."""
    found, free_from, kind = [], 0.0, OUTSIDE
    for bar in bars:
        found.append(Gap(free_from, bar.start, kind))
        free_from, kind = bar.end, WAITS
    found.append(Gap(free_from, makespan, OUTSIDE))
    return tuple(g for g in found if g.end - g.start > _NOISE * makespan)

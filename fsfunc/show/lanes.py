"""When each rank computes and when it does not: what text and picture both draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.verification import held
from fsfunc.show.palette import COMPUTE, OUTSIDE, TRANSFERS, WAITS

__all__ = ["Bar", "Chart", "Gap", "Lane", "check_events", "draft", "name_of"]

Event = tuple[int, Action, float, float]  # rank, action, start, end

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
        ValueError: no events, a negative rank, a time that is not finite, an end
            before its start, or an action of an unknown kind; says which.
    """
    events = list(events)
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
        if action.kind not in COMPUTE and action.kind not in TRANSFERS:
            known = ", ".join([*COMPUTE, *TRANSFERS])
            raise ValueError(f"{here}: kind {action.kind!r} is none of {known}")
        if not (math.isfinite(start) and math.isfinite(end) and start <= end):
            raise ValueError(f"{here}: it cannot last from {start} to {end}")
    return events


def name_of(action: Action, alone: bool) -> str:
    """``F3``, or ``F3@5`` where its rank has other stages too (``alone`` is False)."""
    stage = "" if alone else f"@{action.stage}"
    return f"{action.kind}{action.microbatch}{stage}"


def draft(events: Sequence[Event], n_ranks: int | None = None) -> Chart:
    """The chart of some events; transfers are not drawn, as ranks compute meanwhile.

    Args:
        events: from a recorded run or a simulated schedule, in any order.
        n_ranks: how many ranks there are; up to the last with an event by default.

    Raises:
        TypeError, ValueError: events that ``check_events`` refuses, or two compute
            actions of one rank at a time.
    """
    events = [event for event in check_events(events) if event[1].kind in COMPUTE]
    if not events:
        raise ValueError("there is no F, B, I or W among the events to show")
    start = min(event[2] for event in events)
    makespan = max(event[3] for event in events) - start
    ranks = max(max(event[0] for event in events) + 1, n_ranks or 0)
    mine = [
        sorted((e for e in events if e[0] == rank), key=lambda e: (e[2], e[3]))
        for rank in range(ranks)
    ]
    stages = [sorted({event[1].stage for event in own}) for own in mine]
    held_by = held(tuple(tuple(event[1] for event in own) for own in mine))
    chunks = max(len(own) for own in stages)
    lanes = []
    for own, of_rank, at_once in zip(mine, stages, held_by, strict=True):
        bars = tuple(
            Bar(
                first - start,
                last - start,
                action.kind,
                name_of(action, alone=chunks == 1),
                of_rank.index(action.stage),
            )
            for _, action, first, last in own
        )
        lanes.append(Lane(bars, gaps(bars, makespan), at_once))
    return Chart(tuple(lanes), makespan, chunks)


def gaps(bars: tuple[Bar, ...], makespan: float) -> tuple[Gap, ...]:
    """What a rank's bars leave free of [0, makespan]."""
    found, free_from, kind = [], 0.0, OUTSIDE
    for before, bar in zip((None, *bars), bars, strict=False):
        if bar.start < free_from - _NOISE * makespan:
            raise ValueError(
                f"{bar.label} starts at {bar.start:.6g}, before {before.label} ends "  # type: ignore[union-attr]
                f"at {free_from:.6g}: a rank computes one action at a time"
            )
        found.append(Gap(free_from, bar.start, kind))
        free_from, kind = max(free_from, bar.end), WAITS
    found.append(Gap(free_from, makespan, OUTSIDE))
    return tuple(g for g in found if g.end - g.start > _NOISE * makespan)

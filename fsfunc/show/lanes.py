"""What streams do over time, as rows of spans: what text and picture both draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.timing import TimedAction
from fsfunc.planning.simulation import Span
from fsfunc.show.palette import COMPUTE, GAPS, OUTSIDE, STALL, WAITS, Look, look_of

__all__ = ["Lane", "check_events", "check_spans"]

NOISE = 1e-9  # of the whole: sums of floats that should be equal


@dataclass(frozen=True)
class Lane:
    """One stream of one rank, and what it does from the left edge to the right."""

    rank: int
    stream: str
    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        return f"rank {self.rank} {self.stream}"

    @property
    def busy(self) -> float:
        return sum(s.end - s.start for s in self.spans if s.phase not in GAPS)

    @property
    def idle(self) -> float:
        return sum(s.end - s.start for s in self.spans if s.phase in GAPS)

    def columns(self, start: float, end: float, count: int) -> list[Look | None]:
        """What takes most of each of ``count`` equal parts of the time; None: idle.

        Transfers may be short beside what is computed: a part in which anything is
        sent shows what. A computing lane waits between what it computes.
        """
        width = (end - start) / count
        sums: list[dict[Look, float]] = [{} for _ in range(count)]
        for span in self.spans:
            look = look_of(span)
            first = min(int((span.start - start) / width), count - 1)
            last = min(max(math.ceil((span.end - start) / width), first + 1), count)
            for i in range(first, last):
                low, high = start + i * width, start + (i + 1) * width
                share = max(min(span.end, high) - max(span.start, low), 0.0)
                sums[i][look] = sums[i].get(look, 0.0) + share
        computes = self.stream == COMPUTE
        free = width / 2 if computes else -1.0
        busy = [
            i for i, parts in enumerate(sums) if parts and sum(parts.values()) > free
        ]
        found: list[Look | None] = [None] * count
        if computes and busy:
            found[busy[0] : busy[-1]] = [STALL] * (busy[-1] - busy[0])
        for i in busy:
            found[i] = max(sums[i], key=sums[i].__getitem__)
        return found

    def filled(self, end: float) -> Lane:
        """The lane with its gaps from 0 to ``end`` as spans, named by their phase."""
        phases = [WAITS.title] * (len(self.spans) + 1)
        phases[0] = phases[-1] = OUTSIDE.title
        starts = [0.0, *(span.end for span in self.spans)]
        ends = [*(span.start for span in self.spans), end]
        gaps = [
            Span(self.rank, self.stream, "", "", phase, start, stop)
            for phase, start, stop in zip(phases, starts, ends, strict=True)
            if stop - start > NOISE * end
        ]
        spans = sorted((*gaps, *self.spans), key=lambda span: span.start)
        return replace(self, spans=tuple(spans))


def check_events(events: Iterable[Any]) -> list[TimedAction]:
    """The events as a list, if each is ``(rank, action, start, end)``.

    Raises:
        TypeError: an event that is no such tuple; says which.
        ValueError: no events, a negative rank, a time that is not finite, or an end
            before its start; says which.
    """
    checked = []
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
        _check_times(here, start, end)
        checked.append(TimedAction(rank, action, start, end))
    if not checked:
        raise ValueError("there are no events to show: was the run recorded?")
    return checked


def check_spans(estimate: Any) -> list[Span]:
    """The spans of an estimate, or those given, by rank and start.

    Raises:
        TypeError: what is no span; says which.
        ValueError: no spans, or one that ends before it starts.
    """
    found: Sequence[Any] = list(getattr(estimate, "spans", estimate))
    if not found:
        raise ValueError("there are no spans to show: the plan has no events")
    for place, span in enumerate(found):
        if not isinstance(span, Span):
            raise TypeError(
                f"span {place} is {span!r}: give an estimate, as ff.estimate(plan, "
                "hardware) makes it, or its spans"
            )
        here = f"span {place}, {span.name} of rank {span.rank}"
        _check_times(here, span.start, span.end)
    return sorted(found, key=lambda span: (span.rank, span.start, span.end))


def _check_times(subject: str, start: float, end: float) -> None:
    if not (math.isfinite(start) and math.isfinite(end) and start <= end):
        raise ValueError(f"{subject}: it cannot last from {start} to {end}")

"""Rows of spans over time: the model of timelines and of stream charts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.timing import TimedAction
from fsfunc.planning.simulation import Span
from fsfunc.show.figures import Bar, Drawn, Row, lane_figure
from fsfunc.show.palette import GAPS, LOOKS, OUTSIDE, Look, look_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Lane", "LaneChart", "check_events", "check_spans"]

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
    def work(self) -> list[Span]:
        """The spans that are no gaps."""
        return [span for span in self.spans if span.phase not in GAPS]

    @property
    def busy(self) -> float:
        return sum(span.end - span.start for span in self.work)

    @property
    def idle(self) -> float:
        return sum(s.end - s.start for s in self.spans) - self.busy

    def columns(self, start: float, end: float, count: int) -> list[Look | None]:
        """The look of what takes most of each of ``count`` equal parts of the time.

        None where there is nothing. Of a stream of transfers, whose gaps are no spans,
        a part in which anything is sent shows what.
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
        return [max(s, key=s.__getitem__) if s else None for s in sums]

    def filled(self, start: float, end: float, wait: Look) -> Lane:
        """The lane with its gaps from ``start`` to ``end`` as spans.

        Args:
            wait: the look of those between two spans.
        """
        phases = [wait.title] * (len(self.spans) + 1)
        phases[0] = phases[-1] = OUTSIDE.title
        starts = [start, *(span.end for span in self.spans)]
        ends = [*(span.start for span in self.spans), end]
        gaps = [
            Span(self.rank, self.stream, "", "", phase, a, b)
            for phase, a, b in zip(phases, starts, ends, strict=True)
            if b - a > NOISE * (end - start)
        ]
        spans = sorted((*gaps, *self.spans), key=lambda span: span.start)
        return replace(self, spans=tuple(spans))


class LaneChart(Drawn):
    """Lanes from ``start`` to ``end``, in the looks of the palette."""

    lanes: tuple[Lane, ...]
    start: float
    end: float

    def looks(self) -> list[Look]:
        """The looks that are in the chart, in the palette's order."""
        seen = {look_of(span) for lane in self.lanes for span in lane.spans}
        return [look for look in LOOKS if look in seen]

    def row(self, lane: Lane) -> Row:
        """A lane as the picture has it."""
        return Row(
            lane.name, [Bar(s.start, s.end, look_of(s).color) for s in lane.spans]
        )

    def picture(self, title: str, marks: dict[str, str], **how: Any) -> Figure:
        """The picture, whose legend has the looks and ``marks``."""
        marks = {look.title: look.color for look in self.looks()} | marks
        rows = [self.row(lane) for lane in self.lanes]
        return lane_figure(title, rows, self.start, self.end, marks, **how)


def check_events(events: Iterable[Any]) -> list[TimedAction]:
    """The events as a list, if each is ``(rank, action, start, end)``.

    Raises:
        TypeError: an event that is no such tuple; says which.
        ValueError: no events, or an end before its start; says which.
    """
    found = []
    for place, event in enumerate(events):
        match event:
            case int() as rank, Action() as action, start, end if rank >= 0:
                _check_times(f"event {place}, {action} of rank {rank}", start, end)
                found.append(TimedAction(rank, action, start, end))
            case _:
                raise TypeError(
                    f"event {place} is {event!r}: give (rank, action, start, end), as "
                    "a recorded run or simulate(schedule) has them; ranks are 0, 1, "
                    "..., and parse() makes actions of text"
                )
    if not found:
        raise ValueError("there are no events to show: was the run recorded?")
    return found


def check_spans(estimate: Any) -> list[Span]:
    """The spans of an estimate, or those given, by rank and start.

    Raises:
        TypeError: what is no span; says which.
        ValueError: no spans, or one that ends before it starts.
    """
    found = list(getattr(estimate, "spans", estimate))
    for place, span in enumerate(found):
        if not isinstance(span, Span):
            raise TypeError(
                f"span {place} is {span!r}: give an estimate, as ff.estimate(plan, "
                "hardware) makes it, or its spans"
            )
        _check_times(f"span {place}, {span.name} of {span.rank}", span.start, span.end)
    if not found:
        raise ValueError("there are no spans to show: the plan has no events")
    return sorted(found, key=lambda span: (span.rank, span.start, span.end))


def _check_times(subject: str, start: float, end: float) -> None:
    if not (math.isfinite(start) and math.isfinite(end) and start <= end):
        raise ValueError(f"{subject}: it cannot last from {start} to {end}")

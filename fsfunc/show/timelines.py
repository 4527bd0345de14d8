"""``timeline`` and ``streams``: schedules and estimates as lanes over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

from fsfunc.pipelining.actions import Action, Schedule, parse, stages_of
from fsfunc.pipelining.timing import Costs, TimedAction, simulate
from fsfunc.pipelining.verification import held
from fsfunc.planning.estimation import Estimate
from fsfunc.planning.simulation import Span
from fsfunc.printing.tables import Table, of_seconds, of_share, painted
from fsfunc.show.estimates import rates
from fsfunc.show.figures import (
    COMPUTE,
    COMPUTING,
    STALL,
    WAITS,
    Bar,
    Row,
    by_sign,
    lighter,
    look_of,
)
from fsfunc.show.lanes import (
    NOISE,
    Lane,
    LaneChart,
    bands,
    check_events,
    check_spans,
    number,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text


@dataclass(frozen=True, repr=False)
class Timeline(LaneChart):
    """A timeline to print: ``print(t)``, in colours by ``rich.print(t)``, or saved.

    Each rank has a row. ``F3`` is the forward of microbatch 3 (``F3@5``: of stage 5,
    where ranks have several), as wide as it lasts. A rank that waits between two
    of its actions shows ``░``; before its first and after its last it shows ``·``.
    What is wider than the paper goes on below; ``text(None)`` makes one band.

    Args:
        lanes: what each rank computes from time 0, and its gaps; a span's unit is its
            stage.
        makespan: from the first action's start to the last one's end.
        held: the most microbatch activations that each rank holds at once.
    """

    lanes: tuple[Lane, ...]
    makespan: float
    held: tuple[float, ...]
    start = 0.0

    @property
    def end(self) -> float:
        return self.makespan

    @classmethod
    def of_events(cls, events: Sequence[tuple[int, Action, float, float]]) -> Timeline:
        """The timeline of a recorded run.

        Args:
            events: (rank, action, start, end) of one step, times in seconds.

        Raises:
            TypeError, ValueError: events of another form, or of one rank that overlap.
        """
        return _timeline_of(events)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The time in which each rank computes nothing, of the makespan."""
        return tuple(lane.idle for lane in self.lanes)

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        yield from map(painted, bands(self.lanes, self.makespan, width))
        yield from self.legends(width)
        yield ""
        yield f"makespan {number(self.makespan)}"
        rows = [
            (f"rank {lane.rank}", number(lane.busy), number(lane.idle), *notes)
            for lane, notes in zip(self.lanes, self._notes(), strict=True)
        ]
        yield Table("", ("<", ">busy", ">bubble", ">", ">held"), rows)

    def row(self, lane: Lane) -> Row:
        stages = sorted({span.unit for span in lane.work}, key=int)
        bars = []
        for span in lane.spans:
            color = look_of(span).color
            if span.unit:  # else a gap
                color = lighter(color, stages.index(span.unit), self._chunks)
            label = span.name.partition("@")[0]  # the shade tells the stage
            bars.append(Bar(span.start, span.end, color, label))
        note = "{} bubble, {} held".format(*self._notes()[lane.rank])
        return Row(f"rank {lane.rank}", bars, note)

    @property
    def _chunks(self) -> int:
        """The most stages of a rank."""
        return max(len({span.unit for span in lane.work}) for lane in self.lanes)

    def figure(self) -> Figure:
        marks, chunks = {}, self._chunks
        if chunks > 1:
            pale = lighter(COMPUTING["forward"].color, chunks - 1, chunks)
            marks["lighter: a rank's later stage"] = pale
        idle = of_share(sum(self.bubble), len(self.lanes) * self.makespan)
        return self.picture(f"makespan {number(self.makespan)}, {idle} bubble", marks)

    def _notes(self) -> list[tuple[str, str]]:
        """The bubble's share and what is held, by rank."""
        shares = (of_share(bubble, self.makespan) for bubble in self.bubble)
        return list(zip(shares, map(number, self.held), strict=True))


def timeline(
    schedule: Schedule | Sequence[str | Sequence[Action | str]],
    costs: Costs | None = None,
    *,
    edges: Iterable[tuple[int, int]] | None = None,
    path: str | PathLike[str] | None = None,
) -> Timeline:
    """The timeline of a schedule whose actions take what ``costs`` says.

    Every action starts as soon as its rank is free and what it needs has arrived.

    Args:
        schedule: actions for each rank, or rows of text that ``parse`` reads.
        costs: how long actions take; where None, those of a rank's stages together
            take one unit for F, I and W, and two for B.
        edges: the (producer, consumer) stages; the chain of all stages where None.
        path: where to draw it as a picture too (``.png``, ``.svg``, ``.pdf``).

    Returns:
        A ``Timeline``: print it, or print it in colours with ``rich.print``.

    Raises:
        ScheduleError: a schedule that cannot run, or an entry that is no action.
        ImportError: ``path`` is given and matplotlib is not there.

    Cost: nothing is run; a thousand actions take some milliseconds, a picture of them
    about a second.

    >>> from fsfunc.pipelining.schedules import one_f_one_b
    >>> timeline(one_f_one_b(2, 3))
           0              5              10
    rank 0 │F0│F1│░░░░░│B0   │F2│B1   │░░│B2   │
    rank 1 │··│F0│B0   │F1│B1   │F2│B2   │·····│
    <BLANKLINE>
     F  forward   B  backward
     ░  waits for another rank   ·  not begun, or done
    <BLANKLINE>
    makespan 12
            busy  bubble        held
    rank 0     9       3  25 %     2
    rank 1     9       3  25 %     1
    """
    rows = parse(schedule)
    return _timeline_of(simulate(rows, costs, edges=edges), len(rows)).saved(path)


def _timeline_of(events: Sequence[Any], n_ranks: int = 0) -> Timeline:
    """The timeline of events, of so many ranks at least.

    Transfers are not drawn, as ranks compute meanwhile.
    """
    computed = [event for event in check_events(events) if event.action.is_compute]
    if not computed:
        raise ValueError("there is no F, B, I or W among the events to show")
    zero = min(event.start for event in computed)
    makespan = max(event.end for event in computed) - zero
    count = max(n_ranks, *(event.rank + 1 for event in computed))
    rows: list[list[TimedAction]] = [[] for _ in range(count)]
    for event in sorted(computed, key=lambda event: (event.start, event.end)):
        rows[event.rank].append(event)
    actions = tuple(tuple(event.action for event in row) for row in rows)
    several = any(len(stages_of(row)) > 1 for row in actions)
    lanes = []
    for rank, row in enumerate(rows):
        spans = tuple(
            Span(
                rank,
                COMPUTE,
                event.action.text(stage=several),
                str(event.action.stage),
                by_sign(event.action.kind).title,
                event.start - zero,
                event.end - zero,
            )
            for event in row
        )
        for before, span in pairwise(spans):
            if span.start < before.end - NOISE * makespan:
                raise ValueError(
                    f"rank {rank}: {span.name} starts at {span.start:.6g}, "
                    f"before {before.name} ends at {before.end:.6g}: a rank computes "
                    "one action at a time"
                )
        lanes.append(Lane(rank, COMPUTE, spans).filled(0.0, makespan, WAITS))
    if not any(lane.busy for lane in lanes):
        raise ValueError("every action takes no time: give costs above 0")
    return Timeline(tuple(lanes), makespan, tuple(held(actions)))


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text


RANKS = 16  # shown by default
WIDEST = 110  # columns, where nothing says how wide the paper is


@dataclass(frozen=True, repr=False)
class StreamChart(LaneChart):
    """Streams to print: ``print(s)``, in colours by ``rich.print(s)``, or saved.

    Each stream of a kind of rank has a row, ``rank 0 ×8`` of eight that do the same:
    what it computes by phase (``F``, ``R``, ``B``, ``U``), what it sends by kind (a
    message once, where it is sent); ``░`` where a rank waits for what is sent, ``·``
    before it begins and after its end. A picture names units and microbatches too.
    """

    title: str
    lanes: tuple[Lane, ...]
    start: float
    end: float
    missing: int = 0  # ranks that are not shown

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        if self.title:
            yield self.title
            yield ""
        margin = max(len(lane.name) for lane in self.lanes) + 1
        count = WIDEST if width is None else min(max(width - margin - 2, 10), WIDEST)
        first, last = of_seconds(self.start), of_seconds(self.end)
        ruler = first + last.rjust(count + 1 - len(first))
        yield painted([(" " * (margin + 1) + ruler, "")])
        for lane in self.lanes:
            looks = lane.columns(self.start, self.end, count)
            cells = [(look.sign, look.style) if look else (" ", "") for look in looks]
            yield painted([(f"{lane.name.ljust(margin)}│", ""), *cells, ("│", "")])
        yield ""
        yield from self.legends(width)
        yield ""
        rows = [
            (
                lane.name,
                str(len(lane.work)),
                of_seconds(lane.busy),
                of_share(lane.busy, self.end - self.start),
            )
            for lane in self.lanes
        ]
        yield Table("", ("<stream", ">spans", ">busy", ">share"), rows)
        if self.missing:
            yield f"{self.missing} more ranks: ranks=[...] says which to show"

    def figure(self) -> Figure:
        title = self.title or f"streams, {of_seconds(self.end - self.start)}"
        return self.picture(title, {}, say_time=of_seconds)


def streams(
    estimate: Estimate | Iterable[Span],
    *,
    ranks: Sequence[int] | None = None,
    between: tuple[float, float] | None = None,
    path: str | PathLike[str] | None = None,
) -> StreamChart:
    """The chart of an estimate: each stream of the planned ranks over time.

    Args:
        estimate: of ``ff.estimate``, or its spans.
        ranks: which to show; by default all that were planned, at most 16.
        between: the (start, end) in seconds to look at; the whole step by default.
        path: where to draw it as a picture too (``.png``, ``.svg``, ``.pdf``).

    Returns:
        A ``StreamChart``: print it, or print it in colours with ``rich.print``.

    Raises:
        TypeError: no estimate and no spans.
        ValueError: no spans, ranks that have none, or a time in which there is none.
        ImportError: ``path`` is given and matplotlib is not there.

    >>> spans = [
    ...     Span(0, "compute", "f", "f", "forward", 0.0, 0.02),
    ...     Span(0, "data", "all_gather", "f", "forward", 0.01, 0.03),
    ...     Span(0, "compute", "f", "f", "backward", 0.03, 0.06),
    ... ]
    >>> print(streams(spans).text(36))
                    0 s          60.0 ms
    rank 0 compute │FFFFFF░░░BBBBBBBBBB│
    rank 0 data    │   ggggggg         │
    <BLANKLINE>
     F  forward   B  backward
     ░  waits for a transfer
     g  all_gather
    <BLANKLINE>
    stream          spans     busy  share
    rank 0 compute      2  50.0 ms   83 %
    rank 0 data         1  20.0 ms   33 %
    """
    spans = check_spans(estimate)
    there = list(dict.fromkeys(span.rank for span in spans))
    chosen = there[:RANKS] if ranks is None else list(ranks)
    for rank in chosen:
        if rank not in there:
            raise ValueError(
                f"rank {rank} has no spans: those of the planned ranks {there} are "
                "here, each of which stands for all that run its program"
            )
    last = max(span.end for span in spans)
    start, end = (0.0, last) if between is None else between
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        raise ValueError(f"there is no time between {start} and {end} to show")
    alike = {times.rank: times.alike for times in getattr(estimate, "ranks", ())}
    spans = _once([span for span in spans if span.rank in chosen])
    lanes = [
        lane
        for rank in chosen
        for lane in _lanes(spans, rank, alike.get(rank, 1), start, end)
    ]
    if not lanes:
        raise ValueError(
            f"nothing happens between {start} and {end}: the step ends at {last:.6g} s"
        )
    missing = len(there) - len(chosen) if ranks is None else 0
    title = rates(estimate) if isinstance(estimate, Estimate) else ""
    return StreamChart(title, tuple(lanes), start, end, missing).saved(path)


def _once(spans: Sequence[Span]) -> list[Span]:
    """The spans without the receives of messages whose sends are here."""
    ranks = {span.rank for span in spans}

    def ends(span: Span) -> tuple[Any, ...]:
        way, _, peer = span.stream.partition(" ")
        to = int(peer) if way == "to" else span.rank
        return span.start, span.end, to if to in ranks else None

    sent = {ends(span) for span in spans if span.stream.startswith("to ")}
    return [
        span
        for span in spans
        if not span.stream.startswith("from ")
        or not sent & {ends(span), (*ends(span)[:2], None)}
    ]


def _lanes(
    spans: Sequence[Span], rank: int, alike: int, start: float, end: float
) -> list[Lane]:
    """A rank's lanes, the computing one first, cut to a time."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        if span.rank == rank and span.start < end and span.end > start:
            cut = span._replace(start=max(span.start, start), end=min(span.end, end))
            found.setdefault(span.stream, []).append(cut)
    lanes = []
    for stream in sorted(found, key=lambda stream: stream != COMPUTE):
        lane = Lane(rank, stream, tuple(found[stream]), alike)
        lanes.append(lane.filled(start, end, STALL) if stream == COMPUTE else lane)
    return lanes

"""``streams``: when a step computes and when it sends, stream by stream."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import Any

from fsfunc.foresight.estimating import Estimate
from fsfunc.foresight.simulating import Span
from fsfunc.show.amounts import of_seconds, of_share
from fsfunc.show.palette import MOVES, PHASE, STALL, Look, look_of
from fsfunc.show.strips import Strip, drawn
from fsfunc.show.tables import Line, Printed, Table

__all__ = ["StreamChart", "StreamLane", "check_spans", "look_of_span", "streams"]

COMPUTE = "compute"
RANKS = 16  # shown, where nobody says which
WIDEST = 110  # columns, where nothing says how wide the paper is
_MESSAGES = {"send", "receive"}


@dataclass(frozen=True)
class StreamLane:
    """One stream of one rank, and what it does from the left edge to the right."""

    rank: int
    stream: str
    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        return f"rank {self.rank} {self.stream}"

    @property
    def busy(self) -> float:
        return sum(span.end - span.start for span in self.spans)

    def columns(self, start: float, end: float, count: int) -> list[Look | None]:
        """What takes most of each of ``count`` equal parts of the time; None: idle.

        Transfers may be short beside what is computed: a part in which anything is
        sent shows what.
        """
        width = (end - start) / count
        sums: list[dict[str, float]] = [{} for _ in range(count)]
        looks: dict[str, Look] = {}
        for span in self.spans:
            look = look_of_span(span)
            looks[look.title] = look
            first = min(int((span.start - start) / width), count - 1)
            last = min(max(math.ceil((span.end - start) / width), first + 1), count)
            for i in range(first, last):
                low, high = start + i * width, start + (i + 1) * width
                share = max(min(span.end, high) - max(span.start, low), 0.0)
                sums[i][look.title] = sums[i].get(look.title, 0.0) + share
        free = width / 2 if self.stream == COMPUTE else -1.0
        busy = [sum(s.values()) > free for s in sums]
        return [
            looks[max(s, key=lambda t: s[t])] if s and b else None
            for s, b in zip(sums, busy, strict=True)
        ]

    def strip(self) -> Strip:
        """The lane as a picture shows it."""
        bars = [(s.start, s.end, look_of_span(s).color) for s in self.spans]
        ends = (self.spans[0].start, self.spans[-1].end)
        waits = (*ends, STALL.color) if self.stream == COMPUTE else None
        return Strip(self.name, bars, waits)


@dataclass(frozen=True, repr=False)
class StreamChart(Printed):
    """Streams to print: ``print(s)``, in colours by ``rich.print(s)``, or saved.

    Each stream of a rank has a row: what it computes by phase (``F``, ``R``, ``B``,
    ``U``), what it sends by kind; ``░`` where a rank waits for what is sent.
    """

    title: str
    lanes: tuple[StreamLane, ...]
    start: float
    end: float
    missing: int = 0  # ranks that are not shown

    def pieces(self, width: int | None) -> Iterator[Table | Line | str]:
        if self.title:
            yield self.title
            yield ""
        names = [lane.name for lane in self.lanes]
        margin = max(map(len, names)) + 1
        count = WIDEST if width is None else min(max(width - margin - 2, 10), WIDEST)
        yield [(" " * (margin + 1) + self._ruler(count), "")]
        for name, lane in zip(names, self.lanes, strict=True):
            row = lane.columns(self.start, self.end, count)
            yield [(f"{name.ljust(margin)}│", ""), *_painted(row, lane), ("│", "")]
        yield []
        for looks in self.marks():
            entries = [(f" {look.sign} ", f"  {look.title} ") for look in looks]
            styles = [_style(look) for look in looks]
            yield [
                run
                for (sign, title), style in zip(entries, styles, strict=True)
                for run in ((sign, style), (title[1:], ""))
            ]
        yield []
        yield self._table()
        if self.missing:
            yield [(f"{self.missing} more ranks: ranks=[...] says which to show", "")]

    def _ruler(self, count: int) -> str:
        first, last = of_seconds(self.start), of_seconds(self.end)
        return first + last.rjust(count + 1 - len(first))

    def marks(self) -> list[list[Look]]:
        """The looks that are in the chart: of computing, of sending."""
        found: dict[bool, dict[str, Look]] = {True: {}, False: {}}
        for lane in self.lanes:
            for span in lane.spans:
                look = look_of_span(span)
                found[lane.stream == COMPUTE][look.title] = look
        orders = ([*PHASE], [*MOVES])
        computing, sending = (
            sorted(seen.values(), key=lambda k: _place(order, k.title))
            for order, seen in zip(orders, (found[True], found[False]), strict=True)
        )
        if computing:
            computing.append(STALL)
        return [looks for looks in (computing, sending) if looks]

    def _table(self) -> Table:
        whole = self.end - self.start
        rows = [
            (
                lane.name,
                str(len(lane.spans)),
                of_seconds(lane.busy),
                of_share(lane.busy, whole),
            )
            for lane in self.lanes
        ]
        return Table("", ("<stream", ">spans", ">busy", ">share"), rows)

    def save(self, path: str | PathLike[str]) -> None:
        """Draw the streams into a file: ``.png``, or ``.svg`` or ``.pdf``.

        Raises:
            ImportError: matplotlib is not there.
            ValueError: an ending that matplotlib has no format for.
        """
        marks = {look.title: look.color for looks in self.marks() for look in looks}
        strips = [lane.strip() for lane in self.lanes]
        drawn(self.title, strips, self.start, self.end, marks).savefig(path)


def streams(
    estimate: Estimate | Iterable[Span],
    *,
    ranks: Sequence[int] | None = None,
    between: tuple[float, float] | None = None,
    path: str | PathLike[str] | None = None,
) -> StreamChart:
    """What each stream of the planned ranks does when.

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
     F  forward  B  backward  ░  waits for a transfer
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
    lanes = [lane for rank in chosen for lane in _lanes(spans, rank, start, end)]
    if not lanes:
        raise ValueError(
            f"nothing happens between {start} and {end}: the step ends at {last:.6g} s"
        )
    missing = len(there) - len(chosen) if ranks is None else 0
    title = str(estimate).partition("\n")[0] if isinstance(estimate, Estimate) else ""
    shown = StreamChart(title, tuple(lanes), start, end, missing)
    if path is not None:
        shown.save(path)
    return shown


def check_spans(estimate: Any) -> list[Span]:
    """The spans of an estimate, or those given, by rank and start.

    Raises:
        TypeError: what is no span; says which.
        ValueError: no spans, or one that ends before it starts.
    """
    found = list(getattr(estimate, "spans", estimate))
    if not found:
        raise ValueError("there are no spans to show: the plan has no events")
    for place, span in enumerate(found):
        if not isinstance(span, Span):
            raise TypeError(
                f"span {place} is {span!r}: give an estimate, as ff.estimate(plan, "
                "hardware) makes it, or its spans"
            )
        if not (math.isfinite(span.start) and math.isfinite(span.end)) or (
            span.end < span.start
        ):
            raise ValueError(
                f"span {place}, {span.name} of rank {span.rank}: it cannot last from "
                f"{span.start} to {span.end}"
            )
    return sorted(found, key=lambda span: (span.rank, span.start, span.end))


def look_of_span(span: Span) -> Look:
    """The colour and letter of a span: by phase what is computed, else by kind."""
    if span.stream == COMPUTE:
        return look_of(PHASE, span.phase)
    return look_of(MOVES, "message" if span.name in _MESSAGES else span.name)


def _lanes(
    spans: Sequence[Span], rank: int, start: float, end: float
) -> list[StreamLane]:
    """A rank's lanes, the computing one first, cut to a time."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        if span.rank == rank and span.start < end and span.end > start:
            cut = span._replace(start=max(span.start, start), end=min(span.end, end))
            found.setdefault(span.stream, []).append(cut)
    names = sorted(found, key=lambda stream: stream != COMPUTE)
    return [StreamLane(rank, stream, tuple(found[stream])) for stream in names]


def _place(order: list[str], title: str) -> int:
    return order.index(title) if title in order else len(order)


def _style(look: Look) -> str:
    return "bright_black" if look is STALL else f"#000000 on {look.color}"


def _painted(row: list[Look | None], lane: StreamLane) -> Line:
    """A lane's letters; a computing one waits between what it computes."""
    busy = [i for i, look in enumerate(row) if look is not None]
    computes = lane.stream == COMPUTE
    shown = [
        STALL if look is None and computes and busy and busy[0] < i < busy[-1] else look
        for i, look in enumerate(row)
    ]
    runs = []
    for look, group in groupby(shown):
        count = len(list(group))
        runs.append((look.sign * count, _style(look)) if look else (" " * count, ""))
    return runs

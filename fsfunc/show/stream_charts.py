"""``streams``: an estimate as lanes over time.

`streams` picks the ranks and the time to show, and makes a lane of each of their
streams. Waits of the computing stream become spans of its lane, as charts have gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from fsfunc.planning.estimation import Estimate
from fsfunc.planning.simulation import BUBBLE, EXPOSED, Span
from fsfunc.printing.tables import Table, of_seconds, of_share, picture_line
from fsfunc.show.charts import COMPUTE, OUTSIDE, STALL, WAITS
from fsfunc.show.estimates import describe_rates
from fsfunc.show.lanes import Lane, LaneChart, check_spans

if TYPE_CHECKING:
    from rich.text import Text


MAX_RANKS = 16  # ranks that are shown by default
WIDEST = 110  # columns, if nothing says how wide the paper is


@dataclass(frozen=True, repr=False)
class StreamChart(LaneChart):
    """Streams to print: ``print(s)``, in colours by ``rich.print(s)``, or saved.

    Each stream of a kind of rank has a row, ``rank 0 ×8`` of eight that do the same:
    what it computes by phase (``F``, ``R``, ``B``, ``U``), what it sends by kind (a
    message once, where it is sent); ``▒`` where a rank waits for a transfer under way,
    ``░`` where for another rank, ``·`` before it begins and after its end. A picture
    names units and microbatches too, and what a rank is at.

    Args:
        missing: the number of ranks that are not shown.
        late: seconds of a step after all spans.
    """

    title: str
    lanes: tuple[Lane, ...]
    start: float
    end: float
    missing: int = 0
    late: float = 0.0

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        if self.title:
            yield self.title
            yield ""
        margin = max(len(lane.name) for lane in self.lanes) + 1
        count = WIDEST if width is None else min(max(width - margin - 2, 10), WIDEST)
        first, last = of_seconds(self.start), of_seconds(self.end)
        ruler = first + last.rjust(count + 1 - len(first))
        yield picture_line([(" " * (margin + 1) + ruler, "")])
        for lane in self.lanes:
            looks = lane.columns(self.start, self.end, count)
            cells = [(look.sign, look.style) if look else (" ", "") for look in looks]
            yield picture_line([(f"{lane.name.ljust(margin)}│", ""), *cells, ("│", "")])
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
        if self.late:
            yield self.late_note
        if self.missing:
            yield f"{self.missing} more ranks: ranks=[...] says which to show"

    @property
    def caption(self) -> str:
        title = self.title or f"streams, {of_seconds(self.end - self.start)}"
        late = f"\n{self.late_note}" if self.late else ""
        return title + late

    @property
    def late_note(self) -> str:
        """A note on the time of a step that is in no span."""
        wait = of_seconds(self.late)
        return f"{wait} of the step wait for the slowest node, and are not drawn"


def streams(
    estimate: Estimate | Iterable[Span],
    *,
    ranks: Sequence[int] | None = None,
    between: tuple[float, float] | None = None,
    path: str | PathLike[str] | None = None,
) -> StreamChart:
    """Shows an estimate as a chart: each stream of the planned ranks over time.

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
        ImportError: a ``path`` to no ``.svg``, and matplotlib is not there.

    >>> spans = [
    ...     Span(0, "compute", "f", "f", "forward", 0.0, 0.02),
    ...     Span(0, "data", "all_gather", "f", "forward", 0.01, 0.03),
    ...     Span(0, "compute", "f", "f", "backward", 0.03, 0.06),
    ... ]
    >>> print(streams(spans).text(36))
                    0 s          60.0 ms
    rank 0 compute │FFFFFF▒▒▒BBBBBBBBBB│
    rank 0 data    │   ggggggg         │
    <BLANKLINE>
     F  forward   B  backward
     ▒  waits for a transfer
     g  all_gather
    <BLANKLINE>
    stream          spans     busy  share
    rank 0 compute      2  50.0 ms   83 %
    rank 0 data         1  20.0 ms   33 %
    """
    spans = check_spans(estimate)
    planned = list(dict.fromkeys(span.rank for span in spans))
    chosen = planned[:MAX_RANKS] if ranks is None else list(ranks)
    for rank in chosen:
        if rank not in planned:
            raise ValueError(
                f"rank {rank} has no spans: those of the planned ranks {planned} are "
                "here, each of which stands for all that run its program"
            )
    last = max(span.end for span in spans)
    start, end = (0.0, last) if between is None else between
    if not (math.isfinite(start) and math.isfinite(end) and start < end):
        raise ValueError(f"there is no time between {start} and {end} to show")
    alike = {times.rank: times.alike for times in getattr(estimate, "ranks", ())}
    spans = _without_receives([span for span in spans if span.rank in chosen])
    waits = [span for span in getattr(estimate, "waits", ()) if span.rank in chosen]
    lanes = [
        lane
        for rank in chosen
        for lane in _lanes([*spans, *waits], rank, alike.get(rank, 1), start, end)
    ]
    if not lanes:
        raise ValueError(
            f"nothing happens between {start} and {end}: the step ends at {last:.6g} s"
        )
    missing = len(planned) - len(chosen) if ranks is None else 0
    title, late = "", 0.0
    # An estimate adds the wait for the slowest of many nodes, which no span has.
    if isinstance(estimate, Estimate):
        title, late = describe_rates(estimate), estimate.seconds - last
        late = late if late > last / 1000 else 0.0  # less is not worth a note
    return StreamChart(title, tuple(lanes), start, end, missing, late).saved(path)


def _without_receives(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans without the receives of messages whose sends are here.

    A message is drawn once. Its send and its receive have the same times.
    """
    ranks = {span.rank for span in spans}

    def message_key(span: Span) -> tuple[float, float, int | None]:
        direction, _, peer = span.stream.partition(" ")
        to = int(peer) if direction == "to" else span.rank
        return span.start, span.end, to if to in ranks else None

    sent = {message_key(span) for span in spans if span.stream.startswith("to ")}
    # A send may be to a rank that is not here but runs the same program as one that is:
    # its key has None for the receiver.
    return [
        span
        for span in spans
        if not span.stream.startswith("from ")
        or not sent & {message_key(span), (*message_key(span)[:2], None)}
    ]


def _lanes(
    spans: Sequence[Span], rank: int, alike: int, start: float, end: float
) -> list[Lane]:
    """Returns a rank's lanes, the computing one first, cut to a time."""
    by_stream: dict[str, list[Span]] = {}
    for span in spans:
        if span.rank == rank and span.start < end and span.end > start:
            cut = span._replace(start=max(span.start, start), end=min(span.end, end))
            by_stream.setdefault(span.stream, []).append(cut)
    lanes: list[Lane] = []
    for stream in sorted(by_stream, key=lambda stream: stream != COMPUTE):
        if stream == COMPUTE:
            computed = tuple(_with_waits(by_stream[stream]))
            lane = Lane(rank, stream, computed, alike)
            lanes.append(lane.with_gaps(start, end, STALL))
        else:
            lanes.append(Lane(rank, stream, tuple(by_stream[stream]), alike))
    return lanes


def _with_waits(spans: Sequence[Span]) -> Iterator[Span]:
    """Yields what a rank computes, and its waits as the gaps that charts have."""
    # A pipeline's rank has not begun until its first microbatch comes from another one.
    microbatches = [
        s.start for s in spans if s.turn and s.phase not in (EXPOSED, BUBBLE)
    ]
    first = min(microbatches, default=0.0)
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.phase == EXPOSED:
            span = span._replace(phase=STALL.title)
        elif span.phase == BUBBLE:
            look = OUTSIDE if span.end <= first else WAITS
            span = span._replace(phase=look.title)
        yield span

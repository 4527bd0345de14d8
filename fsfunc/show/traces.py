"""``trace``: a run, or an estimate, as JSON that https://ui.perfetto.dev opens.

    events, spans -> Slice  one bar on a track of a rank, such as "compute" or "send"
                     arrow  from the slice of a send to that of its receive
    plan          -> counter  a rank's memory, over the same time

The file is in Chrome's Trace Event Format: a list of events whose "ph" is "X" for a
slice, "s" and "f" for an arrow's ends, "C" for a counter and "M" for names.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.timing import TimedAction
from fsfunc.planning.estimation import Estimate
from fsfunc.planning.plans import Plan
from fsfunc.planning.simulation import Span
from fsfunc.runtime.memory import KINDS
from fsfunc.show.charts import COMPUTE, Look, by_sign, look_of
from fsfunc.show.lanes import check_events, check_spans
from fsfunc.show.memory_curves import BytesByKind, curve_of
from fsfunc.show.plans import check_plan

Json: TypeAlias = dict[str, Any]

# Viewers know a thread by its number alone, whatever its process: numbers differ
# between ranks, and 0 is taken (it is the idle thread).
_THREADS_OF_A_RANK = 1000
_SHORTEST = 0.002  # microseconds: an arrow needs something to begin and end in
_NOISE = 0.0005  # microseconds: sums of floats that should be equal
_MAX_MOMENTS = 4000  # at which a rank's memory is written


@dataclass
class Slice:
    """A complete event ("X") on a track of a rank, perhaps one end of a message.

    Args:
        times: its start and end, in seconds.
        details: what a viewer shows of it.
        message: a key that is equal at both ends; what is carried comes first.
        arrow_end: "s" if it sends the message, "f" if it receives it; else "".

    ``event`` is its JSON in the file; the thread ("tid") is set when all slices are
    known.
    """

    rank: int
    track: str
    name: str
    times: tuple[float, float]
    look: Look
    details: Json
    message: tuple[Any, ...] = ()
    arrow_end: str = ""

    def __post_init__(self) -> None:
        start, end = map(_microseconds, self.times)
        # Rounded as starts are, so that it touches the slice that begins when it ends.
        duration = round(end - start, 3)
        self.event: Json = {
            "ph": "X",
            "name": self.name,
            "cat": "compute" if self.track == COMPUTE else "transfer",
            "pid": self.rank,
            "ts": start,
            "dur": max(duration, _SHORTEST) if self.arrow_end else duration,
            "cname": self.look.reserved,
            "args": self.details,
        }

    @property
    def start(self) -> float:
        return self.event["ts"]

    @property
    def end(self) -> float:
        return self.event["ts"] + self.event["dur"]


def trace(
    events: Sequence[tuple[int, Action, float, float]] | Estimate | Sequence[Span],
    path: str | PathLike[str] | None = None,
    *,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Returns the run as a Chrome trace, and writes it to ``path`` if that is given.

    Each rank is a process with a track for what it computes and tracks for what it
    sends and receives; slices are named as actions are (``F3@5``), and an arrow leads
    from every send to its receive. Of an estimate, slices are named after units and
    collectives, with a track for each stream. https://ui.perfetto.dev and
    chrome://tracing open the file.

    Args:
        events: (rank, action, start, end), times in seconds on a clock that all ranks
            share; of a recorded run, or of ``simulate(schedule, costs)``, where one
            time unit reads as a second. The trace begins at the first of them. Or an
            estimate of ``ff.estimate``, or its spans.
        path: the file to write.
        plan: of which the estimate is: the memory that ranks hold is then a counter
            next to their tracks.

    Returns:
        ``{"traceEvents": [...], "displayTimeUnit": "ms"}``.

    Raises:
        TypeError, ValueError: events that are none; says which. A plan without an
            estimate, or another plan than that of the estimate.

    Source: the Trace Event Format; perfetto's importer of it.

    >>> written = trace([(0, Action("F", 0, 3), 5.0, 5.5)])
    >>> written["traceEvents"][-1]["name"], written["traceEvents"][-1]["dur"]
    ('F3@0', 500000.0)
    """
    source: Any = events if isinstance(events, Estimate) else list(events)
    counters: list[Json] = []
    if isinstance(source, Estimate) or source and isinstance(source[0], Span):
        spans = check_spans(source)
        slices = [_slice_of_span(span) for span in spans]
        if plan is not None:
            counters = list(_make_counters(spans, check_plan(plan)))
    elif plan is not None:
        raise TypeError(
            "memory goes with an estimate, and these are events of a run: give "
            "trace(estimate, path, plan=plan)"
        )
    else:
        checked = check_events(source)
        zero = min(event.start for event in checked)
        slices = [_slice_of_event(event, zero) for event in checked]
    slices.sort(key=lambda s: (s.start, s.end))
    pairs = _pair_messages(slices)
    # An arrow cannot lead back in time. Where a message takes none, rounding could make
    # its receive end before its send begins.
    for send, receive in pairs:
        late = send.start + _SHORTEST - receive.end
        if 0 < late <= 2 * _SHORTEST:
            receive.event["dur"] += late
    metadata = _assign_threads(slices)
    timed = [*(s.event for s in slices), *_make_arrows(pairs), *counters]
    timed.sort(key=lambda event: event["ts"])
    file = {"traceEvents": [*metadata, *timed], "displayTimeUnit": "ms"}
    if path is not None:
        Path(path).write_text(json.dumps(file))
    return file


def _slice_of_event(event: TimedAction, zero: float) -> Slice:
    """Returns the slice of an action, on the track of what it computes or transfers."""
    rank, action, start, end = event
    kind, stage, peer = action.traits, action.stage, action.peer
    look = by_sign(action.kind)
    details = {"kind": look.title, "stage": stage, "microbatch": action.microbatch}
    times = start - zero, end - zero
    if peer is None:
        return Slice(rank, COMPUTE, str(action), times, look, details)
    details["peer"] = peer
    track, arrow_end, stages = "send", "s", (stage, peer)
    if kind.transfer == "<":
        track, arrow_end, stages = "receive", "f", (peer, stage)
    message = (kind.carries, *stages, action.microbatch)
    return Slice(rank, track, str(action), times, look, details, message, arrow_end)


def _slice_of_span(span: Span) -> Slice:
    """Returns the slice of a span, on the track of its stream."""
    direction, _, peer = span.stream.partition(" ")
    arrow_end = {"to": "s", "from": "f"}.get(direction, "")
    ranks = (str(span.rank), peer)
    message = ("message", *(ranks if arrow_end == "s" else ranks[::-1]))
    name = span.name or span.phase or span.stream
    times = span.start, span.end
    details = {"unit": span.unit, "phase": span.phase, "stream": span.stream}
    return Slice(
        span.rank, span.stream, name, times, look_of(span), details, message, arrow_end
    )


def _pair_messages(slices: Sequence[Slice]) -> list[tuple[Slice, Slice]]:
    """Pairs each send with its receive, if both are here.

    Of equal messages, as several steps send them, the first that is sent is the first
    that is received.
    """
    receives: dict[tuple[Any, ...], deque[Slice]] = defaultdict(deque)
    for s in slices:
        if s.arrow_end == "f":
            receives[s.message].append(s)
    sends = (s for s in slices if s.arrow_end == "s")
    return [(s, receives[s.message].popleft()) for s in sends if receives[s.message]]


def _assign_threads(slices: Sequence[Slice]) -> list[Json]:
    """Sets each slice's thread; returns the metadata that names and orders them."""
    # A track has as many threads as slices overlap in it, since those of one thread
    # must not: several receives may be posted at a time. First they are counted from 0
    # in each track, by the ends of what is on them.
    thread_ends: dict[tuple[int, str], list[float]] = defaultdict(list)
    for s in slices:
        ends = thread_ends[s.event["pid"], s.track]
        free = (i for i, end in enumerate(ends) if end <= s.start + _NOISE)
        s.event["tid"] = thread = next(free, len(ends))
        ends[thread : thread + 1] = [s.end]
    first_threads: dict[tuple[int, str], int] = {}
    ranks: list[Json] = []
    tracks: list[Json] = []

    def add_names(
        metadata: list[Json], kind: str, ids: Json, name: str, order: int
    ) -> None:
        fields = {"ph": "M", "ts": 0, **ids}
        metadata += [
            {**fields, "name": f"{kind}_name", "args": {"name": name}},
            {**fields, "name": f"{kind}_sort_index", "args": {"sort_index": order}},
        ]

    for rank in sorted({rank for rank, _ in thread_ends}):
        add_names(ranks, "process", {"pid": rank}, f"rank {rank}", rank)
        thread = rank * _THREADS_OF_A_RANK + 1
        rank_tracks = [track for other, track in thread_ends if other == rank]
        for track in sorted(rank_tracks, key=lambda track: track != COMPUTE):
            first_threads[rank, track] = thread
            for i in range(len(thread_ends[rank, track])):
                title = f"{track} {i + 1}" if i else track
                ids = {"pid": rank, "tid": thread}
                add_names(tracks, "thread", ids, title, thread)
                thread += 1
    for s in slices:
        s.event["tid"] += first_threads[s.event["pid"], s.track]
    return ranks + tracks


def _make_arrows(pairs: Sequence[tuple[Slice, Slice]]) -> Iterator[Json]:
    """Yields the flow events ("s", "f") from each send to its receive."""
    for number, (send, receive) in enumerate(pairs, 1):
        # A receive is posted before its send begins: the arrow leads to its end, and
        # stays inside the slice that it is bound to.
        times = send.start, receive.end - _SHORTEST / 2
        fields = {"id": number, "cat": "transfer", "name": send.message[0]}
        for s, time in zip((send, receive), times, strict=True):
            ids = {key: s.event[key] for key in ("pid", "tid")}
            # "bp": "e" binds the end to the slice around its time, not to the next one.
            yield {**fields, "ph": s.arrow_end, **ids, "ts": time} | (
                {"bp": "e"} if s is receive else {}
            )


def _make_counters(spans: Sequence[Span], plan: Plan) -> Iterator[Json]:
    """Yields ranks' memory at moments of the step, as counter events ("C")."""
    rank_plans = {rank_plan.rank: rank_plan for rank_plan in plan.ranks}
    for rank in dict.fromkeys(span.rank for span in spans):
        if rank not in rank_plans:
            raise ValueError(
                f"the estimate has rank {rank}, and the plan only {[*rank_plans]}: "
                "give the plan that was estimated"
            )
        curve = curve_of(rank_plans[rank], spans)
        step = curve.length / _MAX_MOMENTS or 1.0
        # Of each part of the step its highest point and its last one: peaks stay,
        # whatever is left out.
        moments: dict[int, list[tuple[float, BytesByKind]]] = {}
        for point in curve.points:
            highest_and_last = moments.setdefault(int(point[0] / step), [point, point])
            if sum(point[1]) > sum(highest_and_last[0][1]):
                highest_and_last[0] = point
            highest_and_last[1] = point
        for highest, last in moments.values():
            for time, sizes in dict.fromkeys((highest, last)):
                yield {
                    "ph": "C",
                    "name": "memory",
                    "pid": rank,
                    "ts": _microseconds(time),
                    "args": dict(zip(KINDS, sizes, strict=True)),
                }


def _microseconds(seconds: float) -> float:
    """Returns a time in the unit of a trace file."""
    return round(float(seconds) * 1e6, 3)

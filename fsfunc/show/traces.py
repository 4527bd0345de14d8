"""``trace``: a run, or an estimate, as JSON that https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.timing import TimedAction
from fsfunc.planning.estimation import Estimate
from fsfunc.planning.plans import Plan
from fsfunc.planning.simulation import Span
from fsfunc.runtime.memory import KINDS
from fsfunc.show.charts import COMPUTE, Look, by_sign, look_of
from fsfunc.show.lanes import check_events, check_spans
from fsfunc.show.memory_curves import curve_of
from fsfunc.show.plans import check_plan

Json = dict[str, Any]

# Viewers know a thread by its number alone, whatever its process: numbers differ
# between ranks, and 0 is taken (it is the idle thread).
_THREADS_OF_A_RANK = 1000
_SHORTEST = 0.002  # microseconds: an arrow needs something to begin and end in
_NOISE = 0.0005  # microseconds: sums of floats that should be equal
_MOMENTS = 4000  # at which a rank's memory is written, at most


@dataclass
class Slice:
    """A complete event ("X") on a track of a rank, perhaps one end of a message.

    Args:
        times: from when to when it lasts, in seconds.
        about: what a viewer says of it.
        message: equal at both ends; what is carried comes first.
        way: "s" where the message leaves, "f" where it arrives.

    ``event`` is as a trace file has it; its thread ("tid") comes when all are known.
    """

    rank: int
    track: str
    name: str
    times: tuple[float, float]
    look: Look
    about: Json
    message: tuple[Any, ...] = ()
    way: str = ""

    def __post_init__(self) -> None:
        start, end = map(_microseconds, self.times)
        long = round(end - start, 3)  # so it touches what begins when it ends
        self.event: Json = {
            "ph": "X",
            "name": self.name,
            "cat": "compute" if self.track == COMPUTE else "transfer",
            "pid": self.rank,
            "ts": start,
            "dur": max(long, _SHORTEST) if self.way else long,
            "cname": self.look.reserved,
            "args": self.about,
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
    """The run as a Chrome trace, which is also written to ``path`` where given.

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
    given: Any = events if isinstance(events, Estimate) else list(events)
    counters: list[Json] = []
    if isinstance(given, Estimate) or given and isinstance(given[0], Span):
        spans = check_spans(given)
        slices = [_of_span(span) for span in spans]
        if plan is not None:
            counters = list(_counters(spans, check_plan(plan)))
    elif plan is not None:
        raise TypeError(
            "memory goes with an estimate, and these are events of a run: give "
            "trace(estimate, path, plan=plan)"
        )
    else:
        checked = check_events(given)
        zero = min(event.start for event in checked)
        slices = [_of_event(event, zero) for event in checked]
    slices.sort(key=lambda one: (one.start, one.end))
    pairs = _pair_messages(slices)
    for send, receive in pairs:
        late = send.start + _SHORTEST - receive.end
        if 0 < late <= 2 * _SHORTEST:  # an arrow cannot lead back
            receive.event["dur"] += late
    name_of = _assign_threads(slices)
    timed = [*(one.event for one in slices), *_arrows(pairs), *counters]
    timed.sort(key=lambda event: event["ts"])
    written = {"traceEvents": [*name_of, *timed], "displayTimeUnit": "ms"}
    if path is not None:
        Path(path).write_text(json.dumps(written))
    return written


def _of_event(event: TimedAction, zero: float) -> Slice:
    """The slice of a rank's action, on the track of what it computes or transfers."""
    rank, action, start, end = event
    kind, stage, peer = action.of_kind, action.stage, action.peer
    look = by_sign(action.kind)
    about = {"kind": look.title, "stage": stage, "microbatch": action.microbatch}
    times = start - zero, end - zero
    if peer is None:
        return Slice(rank, COMPUTE, str(action), times, look, about)
    about["peer"] = peer
    track, way, ends = "send", "s", (stage, peer)
    if kind.transfer == "<":
        track, way, ends = "receive", "f", (peer, stage)
    message = (kind.carries, *ends, action.microbatch)
    return Slice(rank, track, str(action), times, look, about, message, way)


def _of_span(span: Span) -> Slice:
    """The slice of a span, on the track of its stream."""
    direction, _, peer = span.stream.partition(" ")
    way = {"to": "s", "from": "f"}.get(direction, "")
    ends = (str(span.rank), peer)
    message = ("message", *(ends if way == "s" else ends[::-1]))
    name = span.name or span.phase or span.stream
    times = span.start, span.end
    about = {"unit": span.unit, "phase": span.phase, "stream": span.stream}
    return Slice(
        span.rank, span.stream, name, times, look_of(span), about, message, way
    )


def _pair_messages(slices: Sequence[Slice]) -> list[tuple[Slice, Slice]]:
    """Each send with its receive, where both are here.

    Of equal messages, as several steps send them, the first that is sent is the first
    that is received.
    """
    receives: dict[tuple[Any, ...], deque[Slice]] = defaultdict(deque)
    for one in slices:
        if one.way == "f":
            receives[one.message].append(one)
    sends = (one for one in slices if one.way == "s")
    return [
        (one, receives[one.message].popleft()) for one in sends if receives[one.message]
    ]


def _assign_threads(slices: Sequence[Slice]) -> list[Json]:
    """Set each slice's thread; return the metadata that names and orders them.

    It is the first of its track that is free: slices of one thread must not overlap,
    and several receives may be posted at a time.
    """
    ends: dict[tuple[int, str], list[float]] = defaultdict(list)  # of its threads
    for one in slices:
        threads = ends[one.event["pid"], one.track]
        free = (i for i, end in enumerate(threads) if end <= one.start + _NOISE)
        one.event["tid"] = place = next(free, len(threads))
        threads[place : place + 1] = [one.end]
    firsts: dict[tuple[int, str], int] = {}
    ranks: list[Json] = []
    tracks: list[Json] = []

    def name(name_of: list[Json], what: str, of: Json, name: str, order: int) -> None:
        about = {"ph": "M", "ts": 0, **of}
        name_of += [
            {**about, "name": f"{what}_name", "args": {"name": name}},
            {**about, "name": f"{what}_sort_index", "args": {"sort_index": order}},
        ]

    for rank in sorted({rank for rank, _ in ends}):
        name(ranks, "process", {"pid": rank}, f"rank {rank}", rank)
        thread = rank * _THREADS_OF_A_RANK + 1
        own = [track for of, track in ends if of == rank]
        for track in sorted(own, key=lambda track: track != COMPUTE):
            firsts[rank, track] = thread
            for place in range(len(ends[rank, track])):
                said = f"{track} {place + 1}" if place else track
                name(tracks, "thread", {"pid": rank, "tid": thread}, said, thread)
                thread += 1
    for one in slices:
        one.event["tid"] += firsts[one.event["pid"], one.track]
    return ranks + tracks


def _arrows(pairs: Sequence[tuple[Slice, Slice]]) -> Iterator[Json]:
    """Yield the flow events ("s", "f") from each send to its receive."""
    for number, (send, receive) in enumerate(pairs, 1):
        # A receive is posted before its send begins: the arrow leads to its end, and
        # stays inside the slice that it is bound to.
        times = send.start, receive.end - _SHORTEST / 2
        about = {"id": number, "cat": "transfer", "name": send.message[0]}
        for one, time in zip((send, receive), times, strict=True):
            where = {place: one.event[place] for place in ("pid", "tid")}
            yield {**about, "ph": one.way, **where, "ts": time} | (
                {"bp": "e"} if one is receive else {}  # the slice around the time
            )


def _counters(spans: Sequence[Span], plan: Plan) -> Iterator[Json]:
    """Yield ranks' memory at moments of the step, as counter events ("C")."""
    own = {own.rank: own for own in plan.ranks}
    for rank in dict.fromkeys(span.rank for span in spans):
        if rank not in own:
            raise ValueError(
                f"the estimate has rank {rank}, and the plan only {[*own]}: give the "
                "plan that was estimated"
            )
        curve = curve_of(own[rank], spans)
        step = curve.length / _MOMENTS or 1.0
        moments: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        for time, held in curve.points:
            both = moments.setdefault(int(time / step), [(time, held), (time, held)])
            if sum(held) > sum(both[0][1]):
                both[0] = (time, held)
            both[1] = (time, held)
        for highest, latest in moments.values():  # peaks stay, whatever is left out
            for time, held in dict.fromkeys((highest, latest)):
                yield {
                    "ph": "C",
                    "name": "memory",
                    "pid": rank,
                    "ts": _microseconds(time),
                    "args": dict(zip(KINDS, held, strict=True)),
                }


def _microseconds(seconds: float) -> float:
    """Seconds as a trace file gives times."""
    return round(float(seconds) * 1e6, 3)

"""``trace``: a run, or an estimate, as JSON that https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from fsfunc.foresight.estimating import Estimate
from fsfunc.foresight.plans import Plan
from fsfunc.foresight.simulating import Span
from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.timing import Event
from fsfunc.show.lanes import check_events
from fsfunc.show.palette import COMPUTE, TRANSFERS
from fsfunc.show.streaming import check_spans
from fsfunc.show.tracks import (
    THREADS_OF_A_RANK,
    microseconds,
    name_tracks,
    stream_events,
)

__all__ = ["trace"]

_TRACKS = {"compute": 1, "send": 100, "receive": 500}  # first thread of each
_SHORTEST = 0.002  # microseconds: an arrow needs something to begin and end in
_NOISE = 0.0005  # microseconds: sums of floats that should be equal


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
            beside their tracks.

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
    if isinstance(given, Estimate) or given and isinstance(given[0], Span):
        return _written(stream_events(check_spans(given), plan), path)
    if plan is not None:
        raise TypeError(
            "memory is drawn beside an estimate, and these are events of a run: give "
            "trace(estimate, path, plan=plan)"
        )
    ordered = sorted(check_events(given), key=lambda event: (event.start, event.end))
    zero = ordered[0].start
    slices = [_slice(event, zero) for event in ordered]
    pairs = _pairs(slices)
    for send, receive in pairs:
        late = send["ts"] + _SHORTEST - receive["ts"] - receive["dur"]
        if 0 < late <= 2 * _SHORTEST:  # an arrow cannot lead back
            receive["dur"] += late
    threads = _assign(slices)
    sorted_by_time = sorted([*slices, *_arrows(pairs)], key=lambda e: e["ts"])
    return _written([*name_tracks(threads), *sorted_by_time], path)


def _written(
    events: list[dict[str, Any]], path: str | PathLike[str] | None
) -> dict[str, Any]:
    """The trace of these events, also in a file where a path is given."""
    written = {"traceEvents": events, "displayTimeUnit": "ms"}
    if path is not None:
        Path(path).write_text(json.dumps(written))
    return written


def _slice(event: Event, zero: float) -> dict[str, Any]:
    """The complete event ("X") of an action, its thread not yet assigned."""
    rank, action, start, end = event
    look = (COMPUTE if action.is_compute else TRANSFERS)[action.kind]
    about = {"kind": look.title, "stage": action.stage, "microbatch": action.microbatch}
    if action.peer is not None:
        about["peer"] = action.peer
    long = microseconds(end - start)
    return {
        "ph": "X",
        "name": str(action),
        "cat": "compute" if action.is_compute else "transfer",
        "pid": rank,
        "ts": microseconds(start - zero),
        "dur": long if action.is_compute else max(long, _SHORTEST),
        "cname": look.reserved,
        "args": about,
    }


def _assign(slices: list[dict[str, Any]]) -> dict[int, tuple[int, str]]:
    """Set each slice's thread; return rank and name of the threads.

    It is the first of its track that is free: slices of one thread must not overlap,
    and several receives may be posted at a time.
    """
    ends: dict[int, float] = {}  # of the last slice of each thread
    threads = {}
    for piece in slices:
        track = {"S": "send", "R": "receive"}.get(piece["name"][0], "compute")
        thread = first = piece["pid"] * THREADS_OF_A_RANK + _TRACKS[track]
        while ends.get(thread, 0.0) > piece["ts"] + _NOISE:
            thread += 1
        ends[thread] = piece["ts"] + piece["dur"]
        name = track if thread == first else f"{track} {thread - first + 1}"
        threads[thread] = (piece["pid"], name)
        piece["tid"] = thread
    return threads


def _pairs(slices: list[dict[str, Any]]) -> list[tuple[dict, dict]]:
    """Each send with its receive, where both are here.

    A message is known by what it carries and between which stages; where a run has
    several steps, the first that is sent is the first that is received.
    """
    receives: dict[tuple, deque[dict]] = defaultdict(deque)
    for piece in slices:
        if piece["name"][0] == "R":
            stage, microbatch, peer = _message(piece)
            receives[piece["name"][1], peer, stage, microbatch].append(piece)
    pairs = []
    for piece in slices:
        if piece["name"][0] == "S":
            stage, microbatch, peer = _message(piece)
            arriving = receives[piece["name"][1], stage, peer, microbatch]
            if arriving:
                pairs.append((piece, arriving.popleft()))
    return pairs


def _message(piece: dict[str, Any]) -> tuple[int, int, int]:
    return tuple(piece["args"][name] for name in ("stage", "microbatch", "peer"))


def _arrows(pairs: list[tuple[dict, dict]]) -> list[dict[str, Any]]:
    """The flow events ("s", "f") from each send to its receive."""
    arrows = []
    for number, (send, receive) in enumerate(pairs, 1):
        carried = "activations" if send["name"][1] == "F" else "gradients"
        about = {"id": number, "cat": "transfer", "name": carried}
        # A receive is posted before its send begins: the arrow leads to its end, and
        # stays inside the slice that it is bound to.
        last = receive["ts"] + receive["dur"] - _SHORTEST / 2
        for phase, piece, time in (("s", send, send["ts"]), ("f", receive, last)):
            where = {"pid": piece["pid"], "tid": piece["tid"], "ts": time}
            arrows.append({**about, "ph": phase, **where})
        arrows[-1]["bp"] = "e"  # the slice around the time, not the next one
    return arrows

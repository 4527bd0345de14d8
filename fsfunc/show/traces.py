"""``trace``: a recorded run as JSON that https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.timing import Event
from fsfunc.show.lanes import check_events
from fsfunc.show.palette import COMPUTE, TRANSFERS

__all__ = ["trace"]

# Viewers know a thread by its number alone, whatever its process: numbers differ
# between ranks, and 0 is taken (it is the idle thread).
_THREADS_OF_A_RANK = 1000
_TRACKS = {"compute": 1, "send": 100, "receive": 500}  # first thread of each
_SHORTEST = 0.002  # microseconds: an arrow needs something to begin and end in
_NOISE = 0.0005  # microseconds: sums of floats that should be equal


def trace(
    events: Sequence[tuple[int, Action, float, float]],
    path: str | PathLike[str] | None = None,
) -> dict[str, Any]:
    """The run as a Chrome trace, which is also written to ``path`` where given.

    Each rank is a process with a track for what it computes and tracks for what it
    sends and receives; slices are named as actions are (``F3@5``), and an arrow leads
    from every send to its receive. https://ui.perfetto.dev and chrome://tracing open
    the file.

    Args:
        events: (rank, action, start, end), times in seconds on a clock that all ranks
            share; of a recorded run, or of ``simulate(schedule, costs)``, where one
            time unit reads as a second. The trace begins at the first of them.
        path: the file to write.

    Returns:
        ``{"traceEvents": [...], "displayTimeUnit": "ms"}``.

    Raises:
        TypeError, ValueError: events that are none; says which.

    Source: the Trace Event Format; perfetto's importer of it.

    >>> written = trace([(0, Action("F", 0, 3), 5.0, 5.5)])
    >>> written["traceEvents"][-1]["name"], written["traceEvents"][-1]["dur"]
    ('F3@0', 500000.0)
    """
    ordered = sorted(check_events(events), key=lambda event: (event.start, event.end))
    zero = ordered[0].start
    slices = [_slice(event, zero) for event in ordered]
    pairs = _pairs(slices)
    for send, receive in pairs:
        late = send["ts"] + _SHORTEST - receive["ts"] - receive["dur"]
        if 0 < late <= 2 * _SHORTEST:  # an arrow cannot lead back
            receive["dur"] += late
    threads = _assign(slices)
    written = {
        "traceEvents": [
            *_names(threads),
            *sorted([*slices, *_arrows(pairs)], key=lambda e: e["ts"]),
        ],
        "displayTimeUnit": "ms",
    }
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
    long = _microseconds(end - start)
    return {
        "ph": "X",
        "name": str(action),
        "cat": "compute" if action.is_compute else "transfer",
        "pid": rank,
        "ts": _microseconds(start - zero),
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
        thread = first = piece["pid"] * _THREADS_OF_A_RANK + _TRACKS[track]
        while ends.get(thread, 0.0) > piece["ts"] + _NOISE:
            thread += 1
        ends[thread] = piece["ts"] + piece["dur"]
        name = track if thread == first else f"{track} {thread - first + 1}"
        threads[thread] = (piece["pid"], name)
        piece["tid"] = thread
    return threads


def _names(threads: dict[int, tuple[int, str]]) -> list[dict[str, Any]]:
    """The metadata that names ranks and tracks, and orders them."""
    named = []
    for rank in sorted({rank for rank, _ in threads.values()}):
        about = {"ph": "M", "pid": rank, "ts": 0}
        named += [
            {**about, "name": "process_name", "args": {"name": f"rank {rank}"}},
            {**about, "name": "process_sort_index", "args": {"sort_index": rank}},
        ]
    for thread, (rank, name) in sorted(threads.items()):
        about = {"ph": "M", "pid": rank, "tid": thread, "ts": 0}
        named += [
            {**about, "name": "thread_name", "args": {"name": name}},
            {**about, "name": "thread_sort_index", "args": {"sort_index": thread}},
        ]
    return named


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


def _microseconds(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)

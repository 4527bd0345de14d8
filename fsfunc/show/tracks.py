"""An estimate as events of a Chrome trace: a track a stream, memory as a counter."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

from fsfunc.foresight.plans import Plan
from fsfunc.foresight.simulating import Span
from fsfunc.memory_kinds import KINDS
from fsfunc.show.curves import Curve, curve_of
from fsfunc.show.peaks import check_plan
from fsfunc.show.streaming import COMPUTE, look_of_span

__all__ = ["THREADS_OF_A_RANK", "microseconds", "name_tracks", "stream_events"]

# Viewers know a thread by its number alone, whatever its process: numbers differ
# between ranks, and 0 is taken (it is the idle thread).
THREADS_OF_A_RANK = 1000
_MOMENTS = 4000  # at which a rank's memory is written, at most
_SHORTEST = 0.002  # microseconds: an arrow needs something to begin and end in


def stream_events(spans: Sequence[Span], plan: Plan | None) -> list[dict[str, Any]]:
    """All events of a trace of spans, which come by rank and start.

    Raises:
        TypeError: ``plan`` is none.
        ValueError: a plan that lacks a rank of the spans.
    """
    slices, threads = _slices(spans)
    found = [*slices, *_messages(slices)]
    if plan is not None:
        for rank in dict.fromkeys(span.rank for span in spans):
            found += _counters(spans, check_plan(plan), rank)
    return [*name_tracks(threads), *sorted(found, key=lambda e: e["ts"])]


def _slices(
    spans: Sequence[Span],
) -> tuple[list[dict[str, Any]], dict[int, tuple[int, str]]]:
    """The complete events ("X"), and the rank and name of each thread."""
    numbers: dict[tuple[int, str], int] = {}
    for rank in dict.fromkeys(span.rank for span in spans):
        numbers[rank, COMPUTE] = 1  # it comes first
    counts = dict.fromkeys((rank for rank, _ in numbers), 1)
    for span in spans:
        if (span.rank, span.stream) not in numbers:
            counts[span.rank] += 1
            numbers[span.rank, span.stream] = counts[span.rank]
    slices = [
        {
            "ph": "X",
            "name": span.name or span.phase or span.stream,
            "cat": "compute" if span.stream == COMPUTE else "transfer",
            "pid": span.rank,
            "ts": microseconds(span.start),
            "dur": microseconds(span.end - span.start),
            "cname": look_of_span(span).reserved,
            "args": {"unit": span.unit, "phase": span.phase, "stream": span.stream},
            "tid": span.rank * THREADS_OF_A_RANK + numbers[span.rank, span.stream],
        }
        for span in spans
    ]
    used = {(span.rank, span.stream) for span in spans}
    threads = {
        rank * THREADS_OF_A_RANK + number: (rank, stream)
        for (rank, stream), number in numbers.items()
        if (rank, stream) in used
    }
    return slices, threads


def _messages(slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The flow events ("s", "f") from each send to its receive, where both are here."""
    receives: dict[tuple[int, str], deque[dict]] = defaultdict(deque)
    for piece in slices:
        receives[piece["pid"], piece["args"]["stream"]].append(piece)
    arrows = []
    for piece in slices:
        way, _, peer = piece["args"]["stream"].partition(" ")
        if way != "to" or not peer.isdecimal():
            continue
        arriving = receives[int(peer), f"from {piece['pid']}"]
        if not arriving:
            continue
        other = arriving.popleft()
        about = {"id": len(arrows) // 2 + 1, "cat": "transfer", "name": "message"}
        for phase, end, share in (("s", piece, 0.25), ("f", other, 0.75)):
            end["dur"] = max(end["dur"], _SHORTEST)
            time = end["ts"] + share * end["dur"]
            where = {"pid": end["pid"], "tid": end["tid"], "ts": time}
            arrows.append({**about, "ph": phase, **where})
        arrows[-1]["bp"] = "e"  # the slice around the time, not the next one
    return arrows


def _counters(spans: Sequence[Span], plan: Plan, rank: int) -> Iterator[dict[str, Any]]:
    """Yield a rank's memory at moments of the step, as counter events ("C")."""
    own = next((own for own in plan.ranks if own.rank == rank), None)
    if own is None:
        raise ValueError(
            f"the estimate has rank {rank}, and the plan only "
            f"{[own.rank for own in plan.ranks]}: give the plan that was estimated"
        )
    curve = curve_of(own)
    clock = _Clock(curve, [s for s in spans if s.rank == rank and s.stream == COMPUTE])
    moments: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
    step = (clock.last or 1.0) / _MOMENTS
    for at, held in curve.points:
        time = clock.time(at)
        both = moments.setdefault(int(time / step), [(time, held), (time, held)])
        if sum(held) > sum(both[0][1]):
            both[0] = (time, held)
        both[1] = (time, held)
    for highest, latest in moments.values():  # the peaks stay, whatever is left out
        for time, held in dict.fromkeys((highest, latest)):
            yield {
                "ph": "C",
                "name": "memory",
                "pid": rank,
                "ts": microseconds(time),
                "args": dict(zip(KINDS, held, strict=True)),
            }


class _Clock:
    """When the operators of a rank run, by the spans that they are part of.

    A turn (operators of one unit and phase without others in between) is one span, or
    several where it waited; within it, operators are taken to be equally long.
    """

    def __init__(self, curve: Curve, spans: Sequence[Span]):
        self.turns, self.last = curve.turns, spans[-1].end if spans else 0.0
        self.times: list[tuple[float, float]] = []
        self.at = 0
        merged: list[tuple[str, str, float, float]] = []
        for s in spans:
            if merged and merged[-1][:2] == (s.unit, s.phase):
                merged[-1] = (s.unit, s.phase, merged[-1][2], s.end)
            else:
                merged.append((s.unit, s.phase, s.start, s.end))
        place, now = 0, 0.0
        for turn in curve.turns:
            # Taking memory may be a span of its own, without operators.
            here = next(
                (
                    i
                    for i in range(place, len(merged))
                    if merged[i][:2] == (turn.unit, turn.phase)
                ),
                None,
            )
            start = end = now
            if here is not None:
                _, _, start, end = merged[here]
                place = here + 1
            self.times.append((start, end))
            now = end

    def time(self, at: int) -> float:
        """When so many operators have run; asked for in ascending order."""
        while self.at < len(self.turns) and self.turns[self.at].end < at:
            self.at += 1
        if self.at == len(self.turns):
            return self.last
        turn, (start, end) = self.turns[self.at], self.times[self.at]
        share = max(at - turn.start, 0) / (turn.end - turn.start)
        return start + share * (end - start)


def name_tracks(threads: dict[int, tuple[int, str]]) -> list[dict[str, Any]]:
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


def microseconds(seconds: float) -> float:
    """Seconds as a trace file gives times."""
    return round(float(seconds) * 1e6, 3)

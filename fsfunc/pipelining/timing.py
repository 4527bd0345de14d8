"""When each action of a schedule starts and ends: by costs, or by the clock.

`simulate` plays a schedule with a cost for each kind of action, and `bubble` says how
much of the time the busiest rank idles. In a real run `runtime.Worker` enters an
`ActionTimer` around each action, which records into every open `clock`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple

from fsfunc.comm.tracebacks import api_boundary
from fsfunc.pipelining.actions import Action, Schedule, ScheduleError, parse
from fsfunc.pipelining.player import Dependencies, Edge, name_results, other_end
from fsfunc.pipelining.verification import verified_run


@dataclass(frozen=True)
class Costs:
    """Costs of the actions of a pipeline, in any unit of time.

    A number is the time that all stages of a rank take together for one microbatch:
    each of its v stages takes 1/v of it. A sequence has the time of each single stage.
    Fractions stay exact.

    Args:
        f: the forward.
        i: the gradient of the inputs.
        w: the gradient of the parameters; the whole backward B takes i + w.
        send: the time from a send to its arrival at another rank, of any message;
            no rank computes less for it.
        u: an update, of an asynchronous schedule.

    Raises:
        ScheduleError: a time below 0, or not finite.

    >>> Costs(f=2.0).of(Action("F", 3, 0), chunks=2), Costs().of(Action("B", 0, 0))
    (1.0, 2.0)
    >>> Costs(f=[1.0, 3.0]).of(Action("F", 1, 0), chunks=2)
    3.0
    """

    f: float | Sequence[float] = 1.0
    i: float | Sequence[float] = 1.0
    w: float | Sequence[float] = 1.0
    send: float = 0
    u: float | Sequence[float] = 0

    def __post_init__(self) -> None:
        if isinstance(self.send, Sequence):
            raise ScheduleError(f"send is one number for all stages, got {self.send}")
        for name in ("f", "i", "w", "send", "u"):
            value = getattr(self, name)
            if isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value))
            times: Sequence[float] = value if isinstance(value, Sequence) else [value]
            for time in times:
                if not math.isfinite(time) or time < 0:
                    raise ScheduleError(
                        f"{name} has the time {time}: a cost is finite and not below 0"
                    )

    def of(self, action: Action, chunks: int = 1) -> float:
        """Returns the time of a compute action of a rank that has `chunks` stages."""
        return sum(self._time(name, action, chunks) for name in action.traits.costs)

    def _time(self, name: str, action: Action, chunks: int) -> float:
        times = getattr(self, name)
        if not isinstance(times, Sequence):
            return times / chunks
        if action.stage >= len(times):
            raise ScheduleError(
                f"the costs {name} have {len(times)} stages; {action} has none of them"
            )
        return times[action.stage]


class TimedAction(NamedTuple):
    """One action of one rank, from its start to its end.

    A send lasts from its issue to its arrival, a receive from its posting to it; both
    go on beside the rank's own compute actions.
    """

    rank: int
    action: Action
    start: float
    end: float


def simulate(
    schedule: Schedule | Sequence[str | Sequence[Action | str]],
    costs: Costs | None = None,
    *,
    edges: Iterable[Edge] | None = None,
) -> list[TimedAction]:
    """Returns when each action starts and ends, rank by rank in the schedule's order.

    A rank computes one action at a time, as soon as its needs are met. A message
    arrives `costs.send` after the later of its send and, where the schedule has
    transfers of its own, the posting of its receive.

    Raises:
        ScheduleError: what `verify` refuses; costs for fewer stages than there are.

    >>> from fsfunc.pipelining.schedules import gpipe
    >>> [(str(e.action), e.start, e.end) for e in simulate(gpipe(2, 1)) if e.rank == 0]
    [('F0@0', 0, 1.0), ('B0@0', 4.0, 6.0)]
    """
    schedule = parse(schedule)
    costs = Costs() if costs is None else costs
    dependencies = Dependencies(schedule, edges)
    chunks = Counter(dependencies.rank_of)

    def cost(action: Action) -> float:
        return costs.of(action, chunks[dependencies.rank_of[action.stage]])

    run = verified_run(schedule, dependencies, cost=cost, send=costs.send)
    events = []
    for rank, row in enumerate(schedule):
        for action, start in zip(row, run.starts[rank], strict=True):
            is_send = action.traits.transfer == ">"
            key = other_end(action) if is_send else name_results(action)[0]
            events.append(TimedAction(rank, action, start, run.times[key]))
    return events


@api_boundary
def bubble(
    schedule: Schedule | Sequence[str | Sequence[Action | str]],
    costs: Costs | None = None,
    by: Literal["makespan", "span"] = "makespan",
) -> float:
    """Returns the time lost: the time of the whole less the work of the busiest rank.

    Args:
        schedule: with or without its transfers.
        costs: what actions cost; None: f = i = w = 1 for a rank's stages together.
        by: "makespan" takes the whole from the first start to the last end of all
            ranks, as a step does whose update waits for every rank; "span" takes the
            longest time from one rank's own first start to its own last end.

    Raises:
        ScheduleError: what `verify` refuses; an unknown `by`.

    >>> from fsfunc.pipelining.schedules import one_f_one_b, zb_v
    >>> bubble(one_f_one_b(4, 8)), bubble(zb_v(8, 8)), bubble(zb_v(8, 8), by="span")
    (9.0, 1.5, 0.0)
    """
    if by not in ("makespan", "span"):
        raise ScheduleError(f'by is "makespan" or "span", got {by!r}')
    work: list[float] = [0] * len(schedule)
    spans: list[list[float]] = [[] for _ in schedule]
    for event in simulate(schedule, costs):
        if event.action.is_compute:
            work[event.rank] += event.end - event.start
            spans[event.rank] += [event.start, event.end]
    # Transfers are left out: they go on beside a rank's computing.
    if by == "makespan":
        whole_time = max(max(span) for span in spans if span)
    else:
        whole_time = max(span[-1] - span[0] for span in spans if span)
    return whole_time - max(work)


# The lists of all open clocks: of nested ones each gets every action.
_CLOCKS: ContextVar[tuple[list[TimedAction], ...]] = ContextVar(
    "fsfunc_events", default=()
)


@contextmanager
def clock() -> Iterator[list[TimedAction]]:
    """Collects the actions of the pipelines that run inside, with their times.

    Each is ``(rank, action, start, end)``: the rank along the pipeline, and seconds of
    ``time.perf_counter``. What computes starts when what it needs from other ranks has
    come. ``show.trace(events, path)`` writes them for a trace viewer, and
    ``show.timeline(schedule, measured=events)`` shows them beside the schedule.

    Cost: three readings of a clock for each action.

    >>> import fsfunc as ff
    >>> with ff.clock() as events:
    ...     pass  # a step under ff.pipeline
    >>> events
    []
    """
    events: list[TimedAction] = []
    token = _CLOCKS.set((*_CLOCKS.get(), events))
    try:
        yield events
    finally:
        _CLOCKS.reset(token)


class ActionTimer:
    """Records the time of the action that runs inside, under :func:`clock`."""

    rank: int
    action: Action
    start: float

    def __init__(self, rank: int, action: Action):
        self.rank, self.action, self.start = rank, action, 0.0

    def __enter__(self) -> ActionTimer:
        self.restart()
        return self

    def restart(self) -> None:
        """Starts the time anew once messages have come: waiting for them is no work."""
        self.start = perf_counter()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # An action that raised has no end; without a clock nothing is recorded.
        if error is None and (logs := _CLOCKS.get()):
            event = TimedAction(self.rank, self.action, self.start, perf_counter())
            for events in logs:
                events.append(event)

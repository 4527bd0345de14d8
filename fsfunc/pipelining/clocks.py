"""When a pipeline did what: the times of a real run's actions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.timing import Event

__all__ = ["clock", "clocked"]

_EVENTS: ContextVar[tuple[list[Event], ...]] = ContextVar("fsfunc_events", default=())


@contextmanager
def clock() -> Iterator[list[Event]]:
    """The actions of the pipelines that run inside, with their times.

    Each is ``(rank, action, start, end)``: the rank along the pipeline, and seconds of
    ``time.perf_counter``. ``show.trace(events, path)`` writes them for a trace viewer.

    Cost: two readings of a clock for each action.

    >>> import fsfunc as ff
    >>> with ff.clock() as events:
    ...     pass  # a step under ff.pipeline
    >>> events
    []
    """
    events: list[Event] = []
    token = _EVENTS.set((*_EVENTS.get(), events))
    try:
        yield events
    finally:
        _EVENTS.reset(token)


@contextmanager
def clocked(rank: int, action: Action) -> Iterator[None]:
    """Notes the time of what runs inside, where somebody asked for it."""
    start = time.perf_counter()
    yield
    if logs := _EVENTS.get():
        event = Event(rank, action, start, time.perf_counter())
        for events in logs:
            events.append(event)

"""Interrupts of a thread that waits for others: deferred until those have ended.

Python runs the handlers of signals in the main thread, between any two of its
bytecodes. What a handler raises, such as KeyboardInterrupt, leaves whatever runs there:
also the line that starts a thread, or the one that waits for it. No ``try`` covers all
of these places. So handlers are replaced by ones that store the exception, which is
raised once there is nothing left to clean up. ``spmd`` on simulated ranks runs so.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_Handler = Callable[[int, FrameType | None], Any]


@functools.cache
def _signal_numbers() -> list[int]:
    return [int(number) for number in signal.valid_signals()]


class Interrupts:
    """Between ``begin`` and ``end``, stores what signal handlers raise.

    In another thread than the main one, where no handler runs, it has nothing to do.

    Args:
        notify: is called with each exception, from within the handler.
    """

    def __init__(self, notify: Callable[[BaseException], None]):
        self.notify, self.process = notify, os.getpid()
        self.deferred: BaseException | None = None  # the first
        self.on = False  # while False, our handlers only call those that they replaced
        # By the signal's number: our handler, and the one that it replaces.
        self.handlers: dict[int, tuple[_Handler, _Handler]] = {}

    def begin(self) -> None:
        """Replaces the handlers. It is to be called in a ``try`` that has ``end``."""
        if threading.current_thread() is not threading.main_thread():
            return
        # A signal's default action, and a handler in C, are no functions, and raise
        # nothing.
        for number in _signal_numbers():
            if callable(before := signal.getsignal(number)):
                ours = self._deferring(before)
                self.handlers[number] = ours, before
                signal.signal(number, ours)
        # Last: it is on only where no handler is left that would raise before `end`.
        self.on = True

    def end(self) -> None:
        """Puts the handlers back, and raises the first exception that was deferred."""
        self.on = False  # first: from here on an interrupt may leave this function
        for number, (ours, before) in self.handlers.items():
            if signal.getsignal(number) is ours:  # else somebody has set another since
                signal.signal(number, before)
        # Each refers to this object: a circle would delay the freeing of tensors until
        # the collector runs. So would the local variable, by the exception's traceback.
        self.handlers.clear()
        deferred, self.deferred = self.deferred, None
        try:
            if deferred is not None:
                raise deferred
        finally:
            del deferred

    def defer(self, error: BaseException) -> None:
        if self.deferred is None:
            self.deferred = error
        self.notify(error)

    def _deferring(self, before: _Handler) -> _Handler:
        def handler(number: int, frame: FrameType | None) -> None:
            # After `end`, and in a fork, nobody would raise what is deferred.
            if not self.on or os.getpid() != self.process:
                before(number, frame)
                return
            try:
                before(number, frame)
            except BaseException as error:
                self.defer(error)

        return handler


@contextmanager
def reraising_interrupts() -> Iterator[None]:
    """Inside, what a signal handler raises is raised at once, and again at the end.

    For code that tries a function of the user's, and goes on if that raises: it cannot
    tell a handler's exception, such as a time limit's, from one of the function. Python
    also drops an exception that a handler raises within a finalizer.
    """
    interrupts = Interrupts(_raise)
    try:
        interrupts.begin()
        yield
    finally:
        interrupts.end()


def _raise(error: BaseException) -> NoReturn:
    raise error

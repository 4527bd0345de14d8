"""Interrupts of a thread that waits for others: kept until those have ended.

Python runs the handlers of signals in the main thread, between any two of its
bytecodes. What a handler raises, such as KeyboardInterrupt, leaves whatever runs there:
also the line that starts a thread, or the one that waits for it. No ``try`` covers all
of these places. So handlers are replaced by ones that keep the exception, which is
raised once there is nothing left to clean up.
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
def _numbers() -> list[int]:
    return [int(number) for number in signal.valid_signals()]


class Interrupts:
    """Between ``begin`` and ``end``, keeps what signal handlers raise.

    In another thread than the main one, where no handler runs, it has nothing to do.

    Args:
        tell: is called with each exception, from within the handler.
    """

    def __init__(self, tell: Callable[[BaseException], None]):
        self.tell, self.process = tell, os.getpid()
        self.kept: BaseException | None = None
        self.on = False  # where it is not, our handlers are as those that they replace
        self.ours: dict[int, tuple[_Handler, _Handler]] = {}  # and what they replace

    def begin(self) -> None:
        """Replaces the handlers. It is to be called in a ``try`` that has ``end``."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _numbers():
            if callable(before := signal.getsignal(number)):
                ours = self._keeping(before)
                self.ours[number] = ours, before
                signal.signal(number, ours)
        # Last: it is on only where no handler is left that would raise before `end`.
        self.on = True

    def end(self) -> None:
        """Puts the handlers back, and raises the first exception that was kept."""
        self.on = False  # first: from here on an interrupt may leave this function
        for number, (ours, before) in self.ours.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, before)
        self.ours.clear()  # each holds this object: no circle, in which tensors wait
        kept, self.kept = self.kept, None
        try:
            if kept is not None:
                raise kept
        finally:
            del kept  # its traceback holds this frame

    def keep(self, error: BaseException) -> None:
        if self.kept is None:
            self.kept = error
        self.tell(error)

    def _keeping(self, before: _Handler) -> _Handler:
        def handler(number: int, frame: FrameType | None) -> None:
            if not self.on or os.getpid() != self.process:  # nobody would raise it
                before(number, frame)
                return
            try:
                before(number, frame)
            except BaseException as error:
                self.keep(error)

        return handler


@contextmanager
def heard() -> Iterator[None]:
    """Inside, what a signal handler raises is raised where it comes, and at the end.

    For code that tries what a user gave, and goes on where that raises: it cannot tell
    a handler's exception, such as a time limit's, from one of what it tries. Nor do
    those go on that come in a finalizer, whose exceptions Python drops.
    """
    interrupts = Interrupts(_raise)
    try:
        interrupts.begin()
        yield
    finally:
        interrupts.end()


def _raise(error: BaseException) -> NoReturn:
    raise error

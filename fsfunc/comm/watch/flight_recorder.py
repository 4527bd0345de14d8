"""The last collectives of a process: what each was, and how far it came.

A ring of records, as NCCL's flight recorder has. To keep one costs a microsecond, so it
is always on; it is read when a rank waits for too long, or in vain. A record has its
source line where ranks compare the collective (see ``processes``); of one that waits,
the line is read from its thread's stack.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any

from fsfunc.comm.attribution import called_by_user, current_label
from fsfunc.comm.backends.link import CollectiveCall, Signature

_KEPT = 100


class FlightRecord:
    """One collective or transfer of this process; times are of ``time.monotonic``."""

    __slots__ = (
        "said", "number", "label", "where", "line", "thread",
        "begun", "waited", "ended", "failed",
    )  # fmt: skip

    def __init__(self, said: Signature, where: Any, number: int):
        self.said, self.number, self.where = said, number, where
        self.label = current_label()
        self.line = ""
        self.begun = time.monotonic()
        self.waited = self.ended = 0.0
        self.failed = False

    def waits(self) -> None:
        """Its thread begins to wait for it.

        Raises:
            RuntimeError: an error has closed its mesh since.
        """
        if self.failed:
            self.where.link.groups.get(self.where.ranks)
        self.thread = threading.get_ident()
        self.waited = self.waited or time.monotonic()

    @property
    def waiting(self) -> bool:
        return self.waited > 0 and not self.ended and not self.failed

    @property
    def call(self) -> CollectiveCall:
        line = self.line or (self.waiting and line_of(self.thread)) or ""
        return CollectiveCall(self.said, *self.label, line)

    def __str__(self) -> str:
        return f"#{self.number} {self.call}"


class FlightRecorder:
    """The records of this process, and the last that it has to say."""

    def __init__(self) -> None:
        self.records: deque[FlightRecord] = deque(maxlen=_KEPT)
        self.said = ""  # the error that stopped it, if any

    def begin(self, said: Signature, where: Any, number: int) -> FlightRecord:
        record = FlightRecord(said, where, number)
        self.records.append(record)
        if self.said:
            self.said = ""
        return record

    def waiting(self) -> FlightRecord | None:
        """The record that has been waited for longest, if any is."""
        found = [record for record in list(self.records) if record.waiting]
        return min(found, key=lambda r: r.waited, default=None)

    def state(self) -> str:
        """The state of this process, as a table shows it after "rank 3"."""
        if self.said:
            return self.said
        if (record := self.waiting()) is not None:
            return f"waits in {record}, for {time.monotonic() - record.waited:.1f} s"
        line = line_of(threading.main_thread().ident)
        last = f"; its last was {self.records[-1]}" if self.records else ""
        return f"runs{f', at {line}' if line else ''}{last}"


def line_of(thread: int | None) -> str:
    """``file:line`` where a thread is in the user's code; "" where it is in none."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and not called_by_user(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""

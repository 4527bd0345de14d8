"""Who is missing where: what ranks tell one another once they wait for too long.

A daemon thread of each process answers where its rank is, for ranks that wait in vain
and for those that wait long; it says so on stderr, and writes the last records of every
rank to files, after ``FSFUNC_WATCHDOG`` seconds (half the mesh's timeout, and five
minutes at most). A rank that ends by an error tells all others first: those that wait
for it are woken within two seconds, with its error as the cause of theirs.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from fsfunc.comm.attribution import source_line, traceback_line
from fsfunc.comm.backends.flight import FlightRecord, FlightRecorder
from fsfunc.comm.backends.hotline import GONE, SILENT, Hotline, Message
from fsfunc.comm.backends.link import PeerFailed, table

__all__ = ["Watchdog", "patience_of", "the_watchdog"]

_TICK = 0.5  # seconds between two looks
_GRACE = 1.0  # for a collective to be over, once one of its ranks has ended
_LIMIT = 2.0  # for an answer
_WHOLE = 32  # ranks of which a table shows all


def patience_of(timeout: timedelta | None) -> float:
    """After how many seconds of waiting a rank says so.

    Raises:
        ValueError: ``FSFUNC_WATCHDOG`` is no number of seconds.
    """
    text = os.environ.get("FSFUNC_WATCHDOG", "")
    if not text:
        return min(timeout.total_seconds() / 2, 300.0) if timeout else 300.0
    try:
        seconds = float(text)
        if not seconds >= 0:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"FSFUNC_WATCHDOG={text!r}: it is the seconds after which a rank that "
            "waits says who is missing; 0 for never"
        ) from None
    return seconds or math.inf


class Watchdog:
    """What one process knows of the others, and its thread that answers them."""

    def __init__(self) -> None:
        self.flight, self.rank, self.size = FlightRecorder(), 0, 1
        self.pid = os.getpid()  # a fork has the object, and no thread
        self.ended: dict[int, str] = {}  # by rank: what it ended by
        self.told: FlightRecord | None = None  # of what has been said that it waits
        self.over = threading.Event()
        self.hotline: Hotline | None = None

    def listen(self) -> str:
        """The address under which others reach this process from now on; "" if none."""
        if self.hotline is None:
            try:
                self.hotline = Hotline(self._answer)
            except OSError:  # no network here: ranks know what gloo tells them
                return ""
            self.thread = threading.Thread(target=self._run, daemon=True, name="fsfunc")
            self.thread.start()
            # A worker of a data loader would keep the port open, and never answer.
            os.register_at_fork(after_in_child=self.hotline.close)
            self.hook, sys.excepthook = sys.excepthook, self._uncaught
            atexit.register(self.close)
        return self.hotline.address

    def join(self, rank: int, addresses: Mapping[int, str]) -> None:
        """Knows the ranks of a run by their addresses, this one's among them."""
        self.rank, self.size = rank, len(addresses)
        self.ended.clear()
        if self.hotline is not None:
            others = {r: a for r, a in addresses.items() if a and r != rank}
            self.hotline.others = others

    # What others ask, and tell

    def _answer(self, message: Message) -> Message:
        if (why := message.get("ended")) is not None:
            self.ended[int(message.get("rank", -1))] = str(why)
        found: Message = {"state": self.flight.state()}
        found["waits"] = self.flight.waiting() is not None
        if message.get("dump"):
            found["file"] = self._dump()
        return found

    def _dump(self) -> str:
        folder = os.environ.get("FSFUNC_FLIGHT") or tempfile.gettempdir()
        path = os.path.join(folder, f"fsfunc-{self.pid}-rank{self.rank}.jsonl")
        try:
            self.flight.dump(path, self.rank)
        except OSError as error:
            return f"none: {error}"
        return path

    def rows(self, ranks: Iterable[int], **message: Any) -> dict[int, Message]:
        """What each rank answers; of those that ended, what they ended by."""
        asked = set(range(self.size)) if self.size <= _WHOLE else set(ranks)
        found: dict[int, Message] = {}
        if self.hotline is not None:
            found = self.hotline.ask(sorted(asked - {self.rank}), message, _LIMIT)
        found[self.rank] = self._answer(message)
        for rank, why in self.ended.items():
            if found.get(rank, {}).get("state") == GONE:
                found[rank]["state"] = f"{why}, and ended"
        return dict(sorted(found.items()))

    # What goes wrong here

    def raised(self, error: BaseException) -> None:
        """This rank's program was left by ``error``; it may go on yet."""
        if isinstance(error, SystemExit) and not error.code:
            return
        if not isinstance(error, PeerFailed):  # of that one it is said already
            what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.flight.said = f"raised {what} at {traceback_line(error)}"

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: Any
    ) -> None:
        if os.getpid() == self.pid:
            self.raised(error)
            self._tell()
        self.hook(kind, error, trace)

    def _tell(self) -> None:
        """Tells all others what this rank is about to end by, if by an error."""
        if self.flight.said and self.hotline is not None:
            message = {"ended": self.flight.said, "rank": self.rank}
            self.hotline.ask(self.hotline.others, message, _LIMIT)
            self.hotline.others = {}

    def failed(
        self,
        record: FlightRecord,
        other: int | None,
        error: BaseException,
        seen: Any = None,
    ) -> PeerFailed:
        """What to raise where a wait was in vain.

        Args:
            other: the rank that it was for, where that is known.
            seen: by rank, what came of their headers.
        """
        where, line = record.where, record.line or source_line()
        record.line, record.failed = line, True
        reason = _reason(error, other)
        self.flight.said = f"gave up {record}: {reason}"
        found = self.rows(where.ranks)
        states = {r: str(row["state"]) for r, row in found.items()}
        for r, text in (seen or {}).items():
            if states.get(r, SILENT) in (GONE, SILENT):
                states[r] = f"{states.get(r, SILENT)}; it came to {text}"
        text = (
            f"{record.call}: rank {self.rank} waits in vain for others of ranks "
            f"{list(where.ranks)}. {_cause(states, self.rank, other)}"
        )
        if len(states) > 1:
            text = table(f"{text}\nWhere they are", states)
        return PeerFailed(text)

    def close(self) -> None:
        """Says its last, and ends the thread while there is a Python for it to run."""
        if os.getpid() != self.pid or self.hotline is None:
            return
        self._tell()
        self.over.set()
        self.hotline.wake()
        self.thread.join(_LIMIT)
        self.hotline.close()

    # The thread

    def _run(self) -> None:
        if self.hotline is None:
            raise RuntimeError("the watchdog has no line to the other ranks")
        while not self.over.is_set():
            record = self.flight.waiting()
            soon = self.told is not record and record and record.where.link.patience
            self.hotline.serve(min(_TICK, soon / 4) if soon else _TICK)
            self._look()

    def _look(self) -> None:
        record = self.flight.waiting()
        if record is None:
            return
        waited, link = time.monotonic() - record.waited, record.where.link
        if waited > _GRACE and not self.ended.keys().isdisjoint(record.where.ranks):
            link.hang_up(record.where)
        elif waited > link.patience and self.told is not record:
            self.told = record
            # Not here: two ranks that ask each other must both be able to answer.
            threading.Thread(target=self._say, args=(record,), daemon=True).start()

    def _say(self, record: FlightRecord) -> None:
        """Of the ranks that wait the first says where everybody is; all dump."""
        found = self.rows(record.where.ranks, dump=True)
        if any(row.get("waits") for r, row in found.items() if r < self.rank):
            return
        waited = time.monotonic() - record.waited
        states = {
            r: row["state"] + (f"\n    {row['file']}" if row.get("file") else "")
            for r, row in found.items()
        }
        title = f"[fsfunc] rank {self.rank} has waited {waited:.1f} s, and still does"
        sys.stderr.write(table(title, states) + "\n")
        sys.stderr.flush()


def _reason(error: BaseException, other: int | None) -> str:
    text, whom = str(error), "another rank" if other is None else f"rank {other}"
    if "imed out" in text:
        return f"{whom} did not come in time"
    if "pair closure" in text:
        return "another rank has ended"
    return f"{whom} closed its connection"


def _cause(states: Mapping[int, str], rank: int, other: int | None) -> str:
    """The rank that it is because of, as far as they tell."""
    others = {r: text for r, text in states.items() if r != rank}
    for kind in ("raised ", GONE, SILENT, "runs", "gave up ", "waits "):
        found = [r for r, text in others.items() if text.startswith(kind)]
        if not found:
            continue
        first = other if other in found else found[0]
        tells = ""
        if kind in ("gave up ", "waits "):
            tells = "; FSFUNC_CHECK=1 would tell what it came to in its place"
        return f"Rank {first} {others[first]}{tells}"
    return (
        "One of them stopped, ended, or came to something else, which FSFUNC_CHECK=1 "
        "would tell"
    )


_WATCHDOG: list[Watchdog] = []


def the_watchdog() -> Watchdog:
    """That of this process."""
    if not _WATCHDOG or _WATCHDOG[0].pid != os.getpid():
        _WATCHDOG[:] = [Watchdog()]
    return _WATCHDOG[0]

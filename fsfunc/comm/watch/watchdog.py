"""The watchdog of a process: reports which rank is missing, on every other rank.

A rank that waits in vain asks the others where they are (see ``mailboxes``), and raises
with their answers. One that has waited for ``FSFUNC_WATCHDOG`` seconds (by default half
the mesh's timeout, and five minutes at most) prints them to stderr. A rank that ends by
an error tells all others first: those that wait for it raise within two seconds, with
its error as the cause.

Over NCCL a wait is over when the collective stands in the device's queue: the current
stream waits for it, and not this thread. So a record that has ended is one that was
enqueued. A rank that comes late, or a kernel that never ends, holds up the thread that
waits for the device next (``item()``, a copy to the host, a full queue), of which
nothing is said here. NCCL's own watchdog aborts a collective that is not over at the
group's timeout after it was enqueued; its error names the collective, and not where the
other ranks are.
"""

from __future__ import annotations

import atexit
import errno
import math
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from fsfunc.comm.attribution import (
    called_by_user,
    current_label,
    source_line,
    traceback_line,
)
from fsfunc.comm.backends.link import CollectiveCall, PeerFailed, Signature, table
from fsfunc.comm.watch.mailboxes import GONE, SILENT, Mailbox

_KEPT = 100


def _nothing() -> None:
    """The link of what comes before there is a mesh."""


class FlightRecord:
    """One collective or transfer of this process; times are of ``time.monotonic``.

    It has its source line where ranks compare the collective (see ``processes``); of
    one that waits, the line is read from its thread's stack. Of NCCL's, ``ended`` says
    that it was enqueued.

    ``link()`` is the mesh's, or None: records outlive the meshes that are dropped.
    """

    __slots__ = (
        "said", "number", "label", "ranks", "link", "line", "thread",
        "begun", "waited", "ended", "failed",
    )  # fmt: skip

    def __init__(self, said: Signature, group: Any, number: int):
        self.signature, self.number, self.ranks = said, number, group.ranks
        link = group.link
        self.link: Callable[[], Any] = _nothing if link is None else weakref.ref(link)
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
        if self.failed and (link := self.link()) is not None:
            link.groups.get(self.ranks)
        self.thread = threading.get_ident()
        self.waited = self.waited or time.monotonic()

    @property
    def waiting(self) -> bool:
        return self.waited > 0 and not self.ended and not self.failed

    @property
    def call(self) -> CollectiveCall:
        line = self.line or (self.waiting and line_of(self.thread)) or ""
        return CollectiveCall(self.signature, *self.label, line)

    def __str__(self) -> str:
        return f"#{self.number} {self.call}"


class FlightRecorder:
    """The last records of this process, and the last that it has to say.

    A ring, as NCCL's: to keep one costs a microsecond, so it is always on; it is read
    when a rank waits for too long, or in vain.
    """

    def __init__(self) -> None:
        self.records: deque[FlightRecord] = deque(maxlen=_KEPT)
        self.error_text = ""  # the error that stopped it, if any
        self.kept = ""  # where a recording of this process goes, if one is made

    def begin(self, said: Signature, group: Any, number: int) -> FlightRecord:
        record = FlightRecord(said, group, number)
        self.records.append(record)
        if self.error_text:
            self.error_text = ""
        return record

    def waiting(self) -> FlightRecord | None:
        """The record that has been waited for longest, if any is."""
        found = [record for record in list(self.records) if record.waiting]
        return min(found, key=lambda r: r.waited, default=None)

    def state(self) -> str:
        """The state of this process, as a table shows it after "rank 3"."""
        if self.error_text:
            return self.error_text
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


_TICK = 0.5  # seconds between two looks
_GRACE = 1.0  # for a collective to be over, once one of its ranks has ended
_WHOLE = 32  # ranks of which a table shows all
_GAVE, _BLAMES = "gave up ", "; it blames rank "
_BLAMED = re.compile(_BLAMES + r"(\d+)(?:, and ended)?$")
# How the state of a rank begins that it is because of, the likeliest first.
_CAUSES = ("raised ", "has ", "does not answer", "runs")
_WAITS = (_GAVE, "waits ")  # it may have been in vain for another's fault


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
    """The state of other processes, and the thread that watches this one's waits."""

    def __init__(self) -> None:
        self.flight, self.rank = FlightRecorder(), 0
        self.pid = os.getpid()  # a fork has the object, and no thread
        self.told: FlightRecord | None = None  # of what has been said that it waits
        self.over = threading.Event()
        self.mailbox: Mailbox | None = None
        self.thread: threading.Thread | None = None

    def join(self, rank: int, size: int, store: Any) -> None:
        """Starts to exchange messages with the ranks of a process group."""
        before, self.rank = self.mailbox, rank
        if before is not None and before.store is store:
            return
        if before is not None:
            before.close("")
        try:
            self.mailbox = Mailbox(store, rank, size, self._answer)
        except NotImplementedError:  # then ranks only know what gloo reports
            self.mailbox = None
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True, name="fsfunc")
            self.thread.start()
            self.hook, sys.excepthook = sys.excepthook, self._uncaught
            atexit.register(self.close)

    def _answer(self, kind: str) -> str:
        """The answer to a question, from the thread that receives it."""
        return self.flight.state()

    def states(self, ranks: Iterable[int]) -> dict[int, str]:
        """The states of ranks: where each is, or what became of it."""
        found = {self.rank: self.flight.state()}
        if self.mailbox is not None:
            size = self.mailbox.size
            every = range(size) if size <= _WHOLE else [*ranks]
            heard, rest = self.mailbox.ask(every, "where")
            found = rest | found | heard
        return dict(sorted(found.items()))

    # What goes wrong here

    def raised(self, error: BaseException) -> None:
        """This rank's program was left by ``error``; it may go on yet."""
        if isinstance(error, SystemExit) and not error.code:
            return
        # What follows from a wait in vain is said already, and blames another rank.
        if not isinstance(error, PeerFailed) and not self.flight.error_text.startswith(
            _GAVE
        ):
            what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.flight.error_text = f"raised {what} at {traceback_line(error)}"

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: Any
    ) -> None:
        if os.getpid() == self.pid:
            self.raised(error)
            if self.flight.error_text and self.mailbox is not None:
                self.mailbox.ends(self.flight.error_text)
        self.hook(kind, error, trace)

    def failed(
        self,
        record: FlightRecord,
        other: int | None,
        error: BaseException,
        seen: Any = None,
    ) -> PeerFailed:
        """The error to raise after a wait in vain.

        Args:
            other: the rank that it was for, where that is known.
            seen: by rank, what came of their headers.
        """
        ranks, link = record.ranks, record.link()
        line = record.line or source_line()
        record.line, record.failed = line, True
        reason, became = _reason(error, other)
        self.flight.error_text = f"{_GAVE}{record}: {reason}"
        if self.mailbox is not None:
            if link is not None:
                self.mailbox.seen.update(dict.fromkeys(link.gone(), GONE))
            if other is not None and became:
                self.mailbox.seen[other] = became
        states = self.states(ranks)
        for r, text in (seen or {}).items():
            if not _is_heard(states.get(r, SILENT)):
                states[r] = f"{states.get(r, SILENT)}; it came to {text}"
        text = (
            f"{record.call}: rank {self.rank} waits in vain for others of ranks "
            f"{list(ranks)}. "
        )
        known = {r: text for r, text in states.items() if r != self.rank}
        blamed, cause = _cause(known, self.rank, other)
        if blamed is None and out_of_descriptors():
            blamed, cause = self.rank, f"Rank {self.rank} itself: {NO_DESCRIPTOR}"
        if not cause:
            cause = _elsewhere(known, record, self.rank, other)
        text += cause or (
            f"To it, {reason}, or called another collective: FSFUNC_CHECK=1 would show"
        )
        if blamed is not None:  # those who come later hear of it
            self.flight.error_text += f"{_BLAMES}{blamed}"
        if len(states) > 1:
            text = table(f"{text}\nWhere they are", states)
        failed = PeerFailed(text)
        failed.rank = blamed
        return failed

    def close(self) -> None:
        """Says its last, and ends the threads while there is a Python to run them."""
        if os.getpid() != self.pid or self.thread is None:
            return
        if self.mailbox is not None:
            self.mailbox.close(self.flight.error_text)
        self.over.set()
        self.thread.join(_TICK)

    # The thread

    def _run(self) -> None:
        pause = _TICK
        while not self.over.wait(pause):
            record = self.flight.waiting()
            link = record and record.link()
            soon = self.told is not record and link and link.patience
            pause = min(_TICK, soon / 4) if soon else _TICK
            if record is not None and link is not None:
                self._look(record, link)
            del link  # it is not kept alive between two looks

    def _look(self, record: FlightRecord, link: Any) -> None:
        waited = time.monotonic() - record.waited
        if waited > _GRACE and self._ended(record.ranks):
            link.hang_up(record.ranks)
        elif waited > link.patience and self.told is not record:
            self.told = record
            threading.Thread(target=self._say, args=(record,), daemon=True).start()

    def _ended(self, ranks: Iterable[int]) -> bool:
        """True where one of these ranks ends by an error."""
        box = self.mailbox
        return box is not None and any(box.last_words([*ranks]).values())

    def _say(self, record: FlightRecord) -> None:
        """The first of the ranks that wait says where everybody is."""
        states = self.states(record.ranks)
        if any(
            text.startswith("waits ") for r, text in states.items() if r < self.rank
        ):
            return
        waited = time.monotonic() - record.waited
        title = f"[fsfunc] rank {self.rank} has waited {waited:.1f} s, and still does"
        title += self.flight.kept
        sys.stderr.write(table(title, states) + "\n")
        sys.stderr.flush()


def _reason(error: BaseException, other: int | None) -> tuple[str, str]:
    """The reason why a wait was in vain, and the state of ``other`` by that."""
    text, whom = str(error), "another rank" if other is None else f"rank {other}"
    if "imed out" in text:
        return f"{whom} did not come in time", SILENT
    if "pair closure" in text or "another rank has ended" in text:
        return "another rank has ended", ""
    return f"{whom} closed its connection", GONE


def out_of_descriptors() -> bool:
    """True if this process can have no more file descriptors, and no connections."""
    try:
        os.close(os.dup(2))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


NO_DESCRIPTOR = "this process has no file descriptor left (ulimit -n)"


def _is_heard(state: str) -> bool:
    return not state.startswith((GONE, "does not answer", "cannot be asked"))


def _cause(
    states: Mapping[int, str], rank: int, other: int | None
) -> tuple[int | None, str]:
    """The rank that caused the error, by what the others answer; and in words.

    Who gave up before has seen more: that the store has gone since, or that it closed
    its connections as it ended, is no cause.

    Args:
        rank: this one, which ``states`` does not have.
        other: the one that it waited for.
    """
    blamed = {r: int(m[1]) for r, text in states.items() if (m := _BLAMED.search(text))}
    for kind in _CAUSES:
        found = [r for r, text in states.items() if text.startswith(kind)]
        if found:
            likely = [*blamed.values(), other]
            first = next((r for r in likely if r in found), found[0])
            return first, f"Rank {first} {states[first]}"
    for first, whom in blamed.items():
        says = f"rank {first} {states[first]}"
        if whom == rank:
            return whom, f"Rank {whom} itself came too late: {says}"
        return whom, f"Rank {whom}, by what another has seen: {says}"
    return None, ""


def _elsewhere(
    states: Mapping[int, str], record: FlightRecord, rank: int, other: int | None
) -> str:
    """In words, who of those that wait is at another collective; "" if nobody waits.

    If fewer of its ranks are there than here it is them, if more it is this one. Two
    alone do not know; each names the other.
    """
    here = f"#{record.number} {CollectiveCall(record.signature, *record.label)}"
    at = [kind + here for kind in (_GAVE, "waits in ")]
    waiting = [r for r in states if states[r].startswith(_WAITS)]
    inside = [r for r in waiting if r in record.ranks]
    there = [r for r in inside if not states[r].startswith(tuple(at))]
    tells = "; FSFUNC_CHECK=1 would tell what it came to in its place"
    if record.signature[0] not in ("send", "receive") and there:
        mine = 1 + len(inside) - len(there)
        first = other if other in there else there[0]
        if mine < len(there):
            return (
                f"Rank {rank} itself is at another collective than rank {first}, which "
                f"{states[first]}"
            )
        return f"Rank {first} {states[first]}{tells}"
    kinds = [[r for r in states if states[r].startswith(kind)] for kind in _WAITS]
    for found in [*kinds, [r for r in states if states[r].startswith("cannot ")]]:
        if found:
            first = other if other in found else found[0]
            return f"Rank {first} {states[first]}{tells * (found in kinds)}"
    return ""


_WATCHDOG: list[Watchdog] = []


def the_watchdog() -> Watchdog:
    """That of this process."""
    if not _WATCHDOG or _WATCHDOG[0].pid != os.getpid():
        _WATCHDOG[:] = [Watchdog()]
    return _WATCHDOG[0]

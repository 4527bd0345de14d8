"""The watchdog of a process: reports which rank is missing, on every other rank.

A process link records each collective here before it is sent (`FlightRecorder`), and
asks for the error to raise when a wait fails (`Watchdog.failed`).

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
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsfunc.comm.attribution import (
    called_by_user,
    current_label,
    source_line,
    traceback_line,
)
from fsfunc.comm.backends.link import (
    CollectiveCall,
    GroupOfRanks,
    PeerFailed,
    Signature,
    table,
)
from fsfunc.comm.watch.mailboxes import GONE, SILENT, Mailbox

if TYPE_CHECKING:
    import torch.distributed as dist

_MOST_RECORDS = 100


def _no_link() -> None:
    """Stands for the weak reference to a link before there is a mesh."""


class FlightRecord:
    """One collective or transfer of this process; times are of ``time.monotonic``.

    It has its source line where ranks compare the collective (see ``processes``); of
    one that waits, the line is read from its thread's stack. Of NCCL's, ``ended`` says
    that it was enqueued.

    ``link()`` is the mesh's, or None: records outlive the meshes that are dropped.
    """

    __slots__ = (
        "signature", "number", "label", "ranks", "link", "line", "thread",
        "begun", "waited", "ended", "failed",
    )  # fmt: skip

    def __init__(self, signature: Signature, group: GroupOfRanks, number: int):
        self.signature, self.number, self.ranks = signature, number, group.ranks
        link = group.link
        # Returns the `ProcessLink`, or None.
        self.link: Callable[[], Any] = _no_link if link is None else weakref.ref(link)
        self.label = current_label()
        self.line = ""
        self.begun = time.monotonic()
        self.waited = self.ended = 0.0  # when its wait began, and ended; 0: not yet
        self.failed = False

    def waits(self) -> None:
        """Notes that its thread begins to wait for it.

        Raises:
            RuntimeError: an error has closed its mesh since.
        """
        if self.failed and (link := self.link()) is not None:
            link.groups.get(self.ranks)  # raises, with the error that closed it
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
    """The last records of this process, and the error that stopped it, if one did.

    A ring, as NCCL's: a record costs a microsecond, so it is always on; it is read when
    a rank waits for too long, or in vain.
    """

    def __init__(self) -> None:
        self.records: deque[FlightRecord] = deque(maxlen=_MOST_RECORDS)
        self.error_text = ""
        self.recording_note = ""  # where this process is recorded to, if it is

    def begin(
        self, signature: Signature, group: GroupOfRanks, number: int
    ) -> FlightRecord:
        """Records a collective that is about to be sent."""
        record = FlightRecord(signature, group, number)
        self.records.append(record)
        # The program has handled the error, and goes on.
        if self.error_text:
            self.error_text = ""
        return record

    def waiting(self) -> FlightRecord | None:
        """Returns the record that has been waited for longest, if any is."""
        waiting = [record for record in list(self.records) if record.waiting]
        return min(waiting, key=lambda r: r.waited, default=None)

    def state(self) -> str:
        """Describes where this process is, as a table shows it after "rank 3"."""
        if self.error_text:
            return self.error_text
        if (record := self.waiting()) is not None:
            return f"waits in {record}, for {time.monotonic() - record.waited:.1f} s"
        line = line_of(threading.main_thread().ident)
        last = f"; its last was {self.records[-1]}" if self.records else ""
        return f"runs{f', at {line}' if line else ''}{last}"


def line_of(thread: int | None) -> str:
    """Returns ``file:line`` where a thread is in the user's code; "" if nowhere."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and not called_by_user(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


_TICK = 0.5  # seconds between two looks
_GRACE = 1.0  # for a collective to be over, once one of its ranks has ended
_WHOLE = 32  # ranks of which a table shows all
# States of ranks are texts, which go from rank to rank: here is how they begin.
_GAVE, _BLAMES = "gave up ", "; it blames rank "
_BLAMED = re.compile(_BLAMES + r"(\d+)(?:, and ended)?$")
# States of a rank that has caused others to wait in vain, the likeliest first.
_CAUSES = ("raised ", "has ", "does not answer", "runs")
_WAITS = (_GAVE, "waits ")  # states of ranks that wait, for another's fault perhaps


def patience_of(timeout: timedelta | None) -> float:
    """Returns after how many seconds of waiting a rank reports it.

    Raises:
        ValueError: ``FSFUNC_WATCHDOG`` is no number of seconds.
    """
    text = os.environ.get("FSFUNC_WATCHDOG", "")
    if not text:
        return min(timeout.total_seconds() / 2, 300.0) if timeout else 300.0
    try:
        seconds = float(text)
        if not seconds >= 0:  # a nan, too
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
        self.reported: FlightRecord | None = None  # whose long wait is printed already
        self.over = threading.Event()
        self.mailbox: Mailbox | None = None
        self.thread: threading.Thread | None = None

    def join(self, rank: int, size: int, store: dist.Store) -> None:
        """Starts to exchange messages with the ranks of a process group."""
        before, self.rank = self.mailbox, rank
        # Meshes of one process group share a mailbox. Another store is that of a group
        # made since `destroy_process_group`.
        if before is not None and before.store is store:
            return
        if before is not None:
            before.close("")
        try:
            self.mailbox = Mailbox(store, rank, size, self._answer)
        except NotImplementedError:  # no queues: ranks only know what gloo reports
            self.mailbox = None
        # Once a process: set twice, the hook would be its own predecessor, and recurse.
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True, name="fsfunc")
            self.thread.start()
            self.hook, sys.excepthook = sys.excepthook, self._uncaught
            atexit.register(self.close)

    def _answer(self, kind: str) -> str:
        """Answers a question, in the thread that receives it."""
        return self.flight.state()

    def states(self, ranks: Iterable[int]) -> dict[int, str]:
        """Asks ranks for their states: where each is, or what became of it."""
        states = {self.rank: self.flight.state()}
        # This rank is asked as well: if the store is silent, its state is known all the
        # same.
        if self.mailbox is not None:
            size = self.mailbox.size
            asked = range(size) if size <= _WHOLE else [*ranks]
            answers, others = self.mailbox.ask(asked, "where")
            states = others | states | answers
        return dict(sorted(states.items()))

    # What goes wrong here

    def note_raised(self, error: BaseException) -> None:
        """Notes that ``error`` left this rank's program, which may still go on."""
        if isinstance(error, SystemExit) and not error.code:  # it ends well
            return
        # An error after a wait in vain follows from that, whose text blames another
        # rank.
        gave_up = self.flight.error_text.startswith(_GAVE)
        if not isinstance(error, PeerFailed) and not gave_up:
            first_line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.flight.error_text = f"raised {first_line} at {traceback_line(error)}"

    def _uncaught(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Tells the other ranks of an error that ends this one; an ``excepthook``."""
        # A fork inherits the hook, and is no rank: its errors are its own.
        if os.getpid() == self.pid:
            self.note_raised(error)
            if self.flight.error_text and self.mailbox is not None:
                self.mailbox.ends(self.flight.error_text)
        self.hook(kind, error, trace)

    def failed(
        self,
        record: FlightRecord,
        other: int | None,
        error: BaseException,
        header_texts: Mapping[int, str] | None = None,
    ) -> PeerFailed:
        """Returns the error to raise after a wait in vain.

        Args:
            record: what was waited for.
            other: the rank that it was for, where that is known.
            error: torch's, or that of a connection.
            header_texts: by rank, those of the headers that came.
        """
        ranks, link = record.ranks, record.link()
        line = record.line or source_line()
        record.line, record.failed = line, True
        reason, state = _explain(error, other)
        self.flight.error_text = f"{_GAVE}{record}: {reason}"
        # What connections show is known before the store answers, or fails to.
        if self.mailbox is not None:
            if link is not None:
                self.mailbox.known_states.update(dict.fromkeys(link.gone(), GONE))
            if other is not None and state:
                self.mailbox.known_states[other] = state
        states = self.states(ranks)
        # Of a rank that does not answer now, the header tells where it was before.
        for r, text in (header_texts or {}).items():
            if not _has_answered(states.get(r, SILENT)):
                states[r] = f"{states.get(r, SILENT)}; it came to {text}"
        message = (
            f"{record.call}: rank {self.rank} waits in vain for others of ranks "
            f"{list(ranks)}. "
        )
        others_states = {r: text for r, text in states.items() if r != self.rank}
        blamed, cause = _find_cause(others_states, self.rank, other)
        # Without descriptors no connection is made, whatever the other ranks do.
        if blamed is None and out_of_descriptors():
            blamed, cause = self.rank, f"Rank {self.rank} itself: {NO_DESCRIPTOR}"
        if not cause:
            cause = _find_odd_rank(others_states, record, self.rank, other)
        message += cause or (
            f"To it, {reason}, or called another collective: FSFUNC_CHECK=1 would show"
        )
        # Ranks that give up later ask this one, and blame the same.
        if blamed is not None:
            self.flight.error_text += f"{_BLAMES}{blamed}"
        if len(states) > 1:
            message = table(f"{message}\nWhere they are", states)
        failed = PeerFailed(message)
        failed.rank = blamed
        return failed

    def close(self) -> None:
        """Tells its last state, and ends the threads while Python can run them."""
        # A fork has inherited this as an exit handler, and no threads to end.
        if os.getpid() != self.pid or self.thread is None:
            return
        if self.mailbox is not None:
            self.mailbox.close(self.flight.error_text)
        self.over.set()
        self.thread.join(_TICK)

    # The thread

    def _run(self) -> None:
        pause = _TICK
        # Looks are more frequent where a wait is to be reported within two seconds.
        # Once it is reported, only the end of another rank is looked for.
        while not self.over.wait(pause):
            record = self.flight.waiting()
            link = record and record.link()
            patience = self.reported is not record and link and link.patience
            pause = min(_TICK, patience / 4) if patience else _TICK
            if record is not None and link is not None:
                self._check_wait(record, link)
            del link  # this reference must not keep a dropped mesh alive in the pause

    def _check_wait(self, record: FlightRecord, link: Any) -> None:
        waited = time.monotonic() - record.waited
        # A rank that ended by an error may have sent its part before: hence the grace.
        # After it this wait is ended, which might last until the timeout.
        if waited > _GRACE and self._has_failed(record.ranks):
            link.hang_up(record.ranks)
        elif waited > link.patience and self.reported is not record:
            self.reported = record
            # In a thread: the answers take seconds, in which a rank may fail.
            threading.Thread(
                target=self._print_states, args=(record,), daemon=True
            ).start()

    def _has_failed(self, ranks: Iterable[int]) -> bool:
        """Returns whether one of these ranks ends by an error."""
        mailbox = self.mailbox
        return mailbox is not None and any(mailbox.last_words([*ranks]).values())

    def _print_states(self, record: FlightRecord) -> None:
        """Prints where all ranks are, on the lowest of those that wait."""
        states = self.states(record.ranks)
        # Every rank that waits comes here, and one table is enough.
        if any(
            text.startswith("waits ") for r, text in states.items() if r < self.rank
        ):
            return
        waited = time.monotonic() - record.waited
        title = f"[fsfunc] rank {self.rank} has waited {waited:.1f} s, and still does"
        title += self.flight.recording_note
        sys.stderr.write(table(title, states) + "\n")
        sys.stderr.flush()


def _explain(error: BaseException, other: int | None) -> tuple[str, str]:
    """Returns why a wait was in vain, and the state of ``other`` by that, or ""."""
    text, waited_for = str(error), "another rank" if other is None else f"rank {other}"
    # torch raises one class for all of them. Gloo says "Timed out", this library
    # "timed out".
    if "imed out" in text:
        return f"{waited_for} did not come in time", SILENT
    # This process has hung up: see `hang_up`.
    if "pair closure" in text or "another rank has ended" in text:
        return "another rank has ended", ""
    return f"{waited_for} closed its connection", GONE


def out_of_descriptors() -> bool:
    """Returns whether this process can have no more descriptors, so no connections."""
    # No call of the system's tells: so one descriptor is made, and closed.
    try:
        os.close(os.dup(2))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


NO_DESCRIPTOR = "this process has no file descriptor left (ulimit -n)"


def _has_answered(state: str) -> bool:
    return not state.startswith((GONE, "does not answer", "cannot be asked"))


def _find_cause(
    states: Mapping[int, str], rank: int, other: int | None
) -> tuple[int | None, str]:
    """Returns the rank that caused the error, by the others' answers; and a sentence.

    A rank that gave up before this one has seen more, so it is believed: that the store
    has gone since, or that it closed its connections as it ended, is no cause.

    Args:
        rank: this one, which ``states`` does not have.
        other: the one that it waited for.
    """
    blamed_by = {
        r: int(m[1]) for r, text in states.items() if (m := _BLAMED.search(text))
    }
    # A rank that raised or has ended will not come; one that does not answer, or runs,
    # may only be late. So any of the first kinds is named before the others.
    for beginning in _CAUSES:
        causes = [r for r, text in states.items() if text.startswith(beginning)]
        if causes:
            likely = [*blamed_by.values(), other]
            first = next((r for r in likely if r in causes), causes[0])
            return first, f"Rank {first} {states[first]}"
    # All other ranks wait. Those that blame one gave up earlier: the lowest of these
    # witnesses is believed.
    for witness, blamed in blamed_by.items():
        testimony = f"rank {witness} {states[witness]}"
        if blamed == rank:
            return blamed, f"Rank {blamed} itself came too late: {testimony}"
        return blamed, f"Rank {blamed}, by what another has seen: {testimony}"
    return None, ""


def _find_odd_rank(
    states: Mapping[int, str], record: FlightRecord, rank: int, other: int | None
) -> str:
    """Names a waiting rank that is at another collective; "" if nobody waits.

    Most ranks are taken to be right. If more ranks of the group are at other
    collectives than at this one, this rank is the odd one; else one of those is. Of two
    ranks neither knows which is wrong, and each names the other.
    """
    this_call = f"#{record.number} {CollectiveCall(record.signature, *record.label)}"
    states_here = tuple(beginning + this_call for beginning in (_GAVE, "waits in "))
    waiting = [r for r in states if states[r].startswith(_WAITS)]
    members = [r for r in waiting if r in record.ranks]
    elsewhere = [r for r in members if not states[r].startswith(states_here)]
    hint = "; FSFUNC_CHECK=1 would tell what it came to in its place"
    # Not of transfers, where the other rank of two is at another call in any case: a
    # send waits for a receive.
    if record.signature[0] not in ("send", "receive") and elsewhere:
        count_here = 1 + len(members) - len(elsewhere)
        first = other if other in elsewhere else elsewhere[0]
        if count_here < len(elsewhere):
            return (
                f"Rank {rank} itself is at another collective than rank {first}, which "
                f"{states[first]}"
            )
        return f"Rank {first} {states[first]}{hint}"
    by_kind = [[r for r in states if states[r].startswith(kind)] for kind in _WAITS]
    unasked = [r for r in states if states[r].startswith("cannot ")]
    # A rank that gave up has seen more than one that still waits.
    for candidates in [*by_kind, unasked]:
        if candidates:
            first = other if other in candidates else candidates[0]
            return f"Rank {first} {states[first]}{hint * (candidates in by_kind)}"
    return ""


_WATCHDOG: list[Watchdog] = []  # one, or none before the first mesh


def the_watchdog() -> Watchdog:
    """Returns the watchdog of this process; a fork gets one of its own."""
    if not _WATCHDOG or _WATCHDOG[0].pid != os.getpid():
        _WATCHDOG[:] = [Watchdog()]
    return _WATCHDOG[0]

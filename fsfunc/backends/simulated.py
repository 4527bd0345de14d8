"""Simulated ranks: threads of one process that pass a baton.

One rank runs at a time and hands over only where it has to wait for a collective, so
a run is deterministic and any Python control flow works. When no rank can go on, that
is seen at once: the error tabulates where each one waits. The states of torch's default
generators go with the baton (numpy's and ``random``'s do not).
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.backends.base import Link, Work
from fsfunc.backends.calls import Call, CollectiveMismatch, signature
from fsfunc.backends.carrying import carry, own, resume
from fsfunc.backends.meetings import Meeting, Transfer
from fsfunc.mesh import Here, Mesh, place_here

__all__ = ["CollectiveMismatch", "Deadlock", "run_simulated"]


class Deadlock(RuntimeError):
    """No simulated rank can go on."""


class _Aborted(BaseException):
    """Another rank failed. Not an Exception: user code must not swallow it."""


class _Session:
    """The ranks of one ``spmd`` call and the baton among them."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        n = mesh.size
        self.wake = [threading.Semaphore(0) for _ in range(n)]
        self.done = threading.Semaphore(0)
        self.state = ["ready"] * n
        self.waits: dict[int, Meeting] = {}
        self.error: BaseException | None = None
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.counts: dict[tuple[Any, ...], int] = {}
        self.own = [own()] * n
        self.notes: dict[Any, Any] = {}

    def hand_over(self, rank: int, last: bool = False) -> None:
        """Passes the baton to the next rank that can run, and waits for it."""
        self.own[rank] = own()
        n = self.mesh.size
        order = [(rank + k) % n for k in range(1, n + 1)]
        chosen = next((r for r in order if self.state[r] == "ready"), None)
        if chosen is None:
            if all(state == "done" for state in self.state):
                self.done.release()
                return
            self.fail(Deadlock(self.table("no simulated rank can go on")))
            self.hand_over(rank, last)
            return
        if chosen != rank:
            self.wake[chosen].release()
            if not last:
                self.wake[rank].acquire()
        if not last:
            resume(self.own[rank])

    def fail(self, error: BaseException) -> None:
        """Keeps the first error and lets every rank run into it."""
        self.error = self.error or error
        self.state = ["done" if s == "done" else "ready" for s in self.state]

    def table(self, title: str) -> str:
        lines = []
        for rank, state in enumerate(self.state):
            if state == "done":
                text = "has returned"
            elif rank in self.waits:
                meeting = self.waits[rank]
                text = f"waits in {meeting.calls[rank]}, for ranks {meeting.missing}"
            else:
                text = "runs"
            lines.append(f"  rank {rank} {text}")
        return f"{title}:\n" + "\n".join(lines)

    def come(
        self, rank: int, new: Meeting, group: tuple[int, ...], call: Call, x: Tensor
    ) -> Meeting:
        """A rank comes to its next meeting with the ranks of ``new``, within a group.

        That is ``new`` if it is the first to come; the last to come completes it.
        """
        if self.error is not None:
            raise _Aborted
        among = (type(new), group, new.ranks)
        count = self.counts.get((rank, *among), 0)
        self.counts[rank, *among] = count + 1
        key = (*among, count)
        meeting = self.meetings.setdefault(key, new)
        meeting.come(rank, call, x)
        if not meeting.missing:
            del self.meetings[key]
            if wrong := meeting.mismatch():
                error = CollectiveMismatch(wrong)
                self.fail(error)
                raise error
            meeting.complete()
            for r in meeting.ranks:
                if self.waits.get(r) is meeting and self.state[r] == "waiting":
                    self.state[r] = "ready"
        return meeting

    def wait(self, rank: int, meeting: Meeting) -> None:
        if not meeting.over:
            self.waits[rank], self.state[rank] = meeting, "waiting"
            self.hand_over(rank)
            self.waits.pop(rank, None)
        if self.error is not None:
            raise _Aborted


class _Pending(Work):
    """A rank's part in a meeting; ``result`` is asked for once it is over."""

    def __init__(
        self, link: SimulatedLink, meeting: Meeting, result: Callable[[], Tensor]
    ):
        self.link, self.meeting, self.result = link, meeting, result

    def wait(self) -> Tensor:
        self.link.session.wait(self.link.rank, self.meeting)
        return self.result()

    def done(self) -> bool:
        return self.meeting.over


class SimulatedLink(Link):
    """One simulated rank's connection to the others of its session."""

    def __init__(self, session: _Session, rank: int):
        self.session, self.rank, self.notes = session, rank, session.notes

    def start(
        self,
        op: str,
        x: Tensor,
        where: Any,
        *,
        out: Tensor | None = None,
        what: str = "",
        any_order: bool = True,
        **how: Any,
    ) -> Work:
        meeting = Meeting(where.ranks, how)
        meeting = self._come(meeting, op, x.detach(), where, what)
        return _Pending(self, meeting, lambda: meeting.take(self.rank, out))

    def send(self, x: Tensor, where: Any, to: int, what: str = "") -> Work:
        meeting = Transfer((where.rank, where.ranks[to]))
        meeting = self._come(meeting, "send", x, where, what)
        return _Pending(self, meeting, lambda: torch.empty(0))

    def receive(self, like: Tensor, where: Any, source: int, what: str = "") -> Work:
        meeting = Transfer((where.ranks[source], where.rank))
        meeting = self._come(meeting, "receive", like, where, what)
        return _Pending(self, meeting, lambda: like)

    def _come(self, new: Meeting, op: str, x: Tensor, where: Any, what: str) -> Meeting:
        call = Call.now(signature(op, new.how, where.axis, x, what))
        return self.session.come(self.rank, new, where.ranks, call, x)


def run_simulated(mesh: Mesh, fn: Callable[..., Any], args: Sequence[Sequence[Any]]):
    """``[fn(*args[r]) on rank r for each r]``; the first error of any rank is raised.

    Every rank starts from the caller's default generator, and the caller goes on from
    rank 0's.
    """
    session, enter = _Session(mesh), carry()
    results: list[Any] = [None] * mesh.size

    def body(rank: int) -> None:
        session.wake[rank].acquire()
        resume(session.own[rank])
        try:
            if session.error is None:
                link = SimulatedLink(session, rank)
                with enter(), place_here(Here(mesh, rank, link)):
                    results[rank] = fn(*args[rank])
        except _Aborted:
            pass  # the error that stopped this rank is kept in the session
        except BaseException as error:
            if session.error is None:
                error.add_note(f"on simulated rank {rank} of {mesh}")
            session.fail(error)
        session.state[rank] = "done"
        session.hand_over(rank, last=True)

    threads = []
    for rank in range(mesh.size):
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(body, rank), daemon=True)
        thread.start()
        threads.append(thread)
    with _torch.shared_forward_ad():
        session.wake[0].release()
        try:
            session.done.acquire()
        except BaseException as error:  # Ctrl-C comes to the thread that waits here
            session.fail(error)
            session.done.acquire()
    for thread in threads:
        thread.join()
    resume(session.own[0])
    error, session.error = session.error, None
    try:
        if error is not None:
            raise error
        return results
    finally:
        del error  # its traceback holds this frame: no circle, in which tensors wait

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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.accounting import current_label, source_line
from fsfunc.backends.base import Link, Work
from fsfunc.backends.carrying import carry, own, resume
from fsfunc.mesh import Here, Mesh, place_here
from fsfunc.moves import combine

__all__ = ["CollectiveMismatch", "Deadlock", "run_simulated"]


class Deadlock(RuntimeError):
    """No simulated rank can go on."""


class CollectiveMismatch(RuntimeError):
    """Simulated ranks met in one group with different collectives."""


class _Aborted(BaseException):
    """Another rank failed. Not an Exception: user code must not swallow it."""


@dataclass
class _Call:
    """What one rank said when it came to a collective."""

    op: str
    how: tuple[Any, ...]
    axis: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    phase: str
    where: str

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.op, self.how, self.axis, self.shape, self.dtype

    def __str__(self) -> str:
        unit = f" of {self.unit} ({self.phase})" if self.unit else ""
        dtype = str(self.dtype).removeprefix("torch.")
        axis = ", ".join(self.axis)
        return (
            f'{self.op} over "{axis}", {dtype}{list(self.shape)}{unit} at {self.where}'
        )


@dataclass
class _Meeting:
    """One collective of one group: complete when every member has come."""

    ranks: tuple[int, ...]
    calls: dict[int, _Call] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    results: list[Tensor] | None = None

    def complete(self, how: dict[str, Any]) -> None:
        first = self.calls[self.ranks[0]]
        self.results = combine(first.op, [self.inputs[r] for r in self.ranks], **how)
        self.inputs.clear()

    def take(self, rank: int, out: Tensor | None) -> Tensor:
        """This rank's own copy: what another rank writes must not reach it."""
        if self.results is None:
            raise RuntimeError("taken before it was complete")
        result = self.results[self.ranks.index(rank)]
        return result.clone() if out is None else out.copy_(result)


class _Session:
    """The ranks of one ``spmd`` call and the baton among them."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        n = mesh.size
        self.wake = [threading.Semaphore(0) for _ in range(n)]
        self.done = threading.Semaphore(0)
        self.state = ["ready"] * n
        self.waits: dict[int, _Meeting] = {}
        self.error: BaseException | None = None
        self.meetings: dict[tuple[Any, ...], _Meeting] = {}
        self.counts: dict[tuple[int, tuple[int, ...]], int] = {}
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
                missing = [r for r in meeting.ranks if r not in meeting.calls]
                text = f"waits in {meeting.calls[rank]}, for ranks {missing}"
            else:
                text = "runs"
            lines.append(f"  rank {rank} {text}")
        return f"{title}:\n" + "\n".join(lines)

    def start(self, rank: int, call: _Call, x: Tensor, ranks: tuple[int, ...], how):
        if self.error is not None:
            raise _Aborted
        count = self.counts.get((rank, ranks), 0)
        self.counts[rank, ranks] = count + 1
        key = (ranks, count)
        meeting = self.meetings.setdefault(key, _Meeting(ranks))
        meeting.calls[rank], meeting.inputs[rank] = call, x
        if len(meeting.calls) == len(ranks):
            del self.meetings[key]
            if len({c.signature for c in meeting.calls.values()}) > 1:
                rows = "\n".join(f"  rank {r} {meeting.calls[r]}" for r in ranks)
                error = CollectiveMismatch(
                    f"simulated ranks call different collectives:\n{rows}"
                )
                self.fail(error)
                raise error
            meeting.complete(how)
            for r in ranks:
                if self.waits.get(r) is meeting and self.state[r] == "waiting":
                    self.state[r] = "ready"
        return meeting

    def wait(self, rank: int, meeting: _Meeting, out: Tensor | None) -> Tensor:
        if meeting.results is None:
            self.waits[rank], self.state[rank] = meeting, "waiting"
            self.hand_over(rank)
            self.waits.pop(rank, None)
        if self.error is not None:
            raise _Aborted
        return meeting.take(rank, out)


class _Pending(Work):
    def __init__(self, session: _Session, rank: int, meeting: _Meeting, out):
        self.parts = session, rank, meeting, out

    def wait(self) -> Tensor:
        session, rank, meeting, out = self.parts
        return session.wait(rank, meeting, out)


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
        any_order: bool = True,
        **how: Any,
    ) -> Work:
        unit, phase = current_label()
        call = _Call(
            op,
            tuple(how.values()),
            where.axis,
            tuple(x.shape),
            x.dtype,
            unit,
            phase,
            source_line(),
        )
        x = x.detach()
        meeting = self.session.start(self.rank, call, x, where.ranks, how)
        return _Pending(self.session, self.rank, meeting, out)


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
    if session.error is not None:
        raise session.error
    return results

"""The scheduler of simulated ranks: which one runs, and what the others wait for.

One rank runs at a time, and yields only where it has to wait. So a deadlock is found
when no rank can run. The ranks of a group meet in a collective, and two in a transfer.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.backends.link import CollectiveCall, CollectiveMismatch, table
from fsfunc.comm.operations import OPERATIONS
from fsfunc.comm.watch.mailboxes import Board


class Deadlock(RuntimeError):
    """No simulated rank can go on."""


class Aborted(BaseException):
    """Another rank failed. Not an Exception: user code must not swallow it."""


@dataclass
class Meeting:
    """One collective of one group: complete when every member has come."""

    ranks: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, CollectiveCall] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    results: Sequence[Tensor] = ()
    over: bool = False
    # Of CUDA tensors: the stream of each rank, and that in which the results are made.
    streams: dict[int, Any] = field(default_factory=dict)
    made_in: Any = None

    def mismatch(self) -> str | None:
        """The error text if the members called different collectives."""
        if len({c.said for c in self.calls.values()}) == 1:
            return None
        return self._table("simulated ranks call different collectives")

    def _table(self, title: str) -> str:
        return table(title, {r: self.calls[r] for r in self.ranks})

    def complete(self) -> None:
        """Makes every member's result."""
        if self.streams:
            self._join_streams()
        op = self.calls[self.ranks[0]].said[0]
        inputs = list(map(self.inputs.__getitem__, self.ranks))
        self.results = OPERATIONS[op].combine(inputs, **self.kwargs)
        self.inputs.clear()
        self.over = True

    def take(self, rank: int, out: Tensor | None) -> Tensor:
        """This rank's own copy: what another rank writes must not reach it."""
        result = self.results[self.ranks.index(rank)]
        if self.made_in is not None:
            self._leave_stream(result)
        return result.clone() if out is None else out.copy_(result)

    def _join_streams(self) -> None:
        """Lets this rank's stream wait for those that write the inputs.

        All ranks have one stream, the caller's, unless they enter their own.
        """
        here = next(self.inputs[rank] for rank in self.streams)
        self.made_in = mine = torch.cuda.current_stream(here.device)
        for rank, stream in self.streams.items():
            if stream != mine:
                mine.wait_stream(stream)
                # Its rank may free it, and write there, before `mine` has read it.
                self.inputs[rank].record_stream(mine)

    def _leave_stream(self, result: Tensor) -> None:
        """Lets a rank's stream wait for the one in which the results were made.

        The one that it is in now: it may have come in another.
        """
        if not result.is_cuda:
            return
        mine = torch.cuda.current_stream(result.device)
        if mine == self.made_in:
            return
        mine.wait_stream(self.made_in)
        result.record_stream(mine)  # the others may drop it before it is copied


class SendMeeting(Meeting):
    """A transfer from ``ranks[0]`` to ``ranks[1]``: complete when both have come.

    The receiver provides the memory, and the last to come copies into it.
    """

    def mismatch(self) -> str | None:
        sent, wanted = (self.calls[r] for r in self.ranks)
        if sent.said[2:] == wanted.said[2:]:
            return None
        return self._table("simulated ranks send one thing and receive another")

    def complete(self) -> None:
        if self.streams:
            self._join_streams()
        x, y = (self.inputs[r] for r in self.ranks)
        y.copy_(x)
        self.inputs.clear()
        self.over = True

    def take(self, rank: int, out: Tensor | None) -> Tensor:
        """The memory that the receiver brought; nothing, where this rank sent."""
        if out is None:
            return torch.empty(0, device="cpu")
        if self.made_in is not None:
            self._leave_stream(out)
        return out


TorchState = tuple[Tensor, Tensor | None, tuple[int, int], Any]


def torch_state() -> TorchState:
    """The state that torch has once for all threads, and each rank for itself.

    The default generators' states (the CPU's, and that of a CUDA device in use), the
    level of forward-mode differentiation, and how compiled functions run.
    """
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    level, stance = _torch.forward_ad_state(), _torch.compiler_stance()
    return torch.get_rng_state(), cuda, level, stance


def restore(state: TorchState) -> None:
    """Puts a rank's own state in place, as it gets the baton back."""
    cpu, cuda, level, stance = state
    before = 0 if cuda is not None else torch.initial_seed()
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    elif torch.cuda.is_initialized() or torch.initial_seed() != before:
        _begin_cuda(before)
    _torch.set_forward_ad_state(level)
    _torch.set_compiler_stance(stance)


def _begin_cuda(other: int) -> None:
    """Seeds CUDA's generator for a rank that has not used it, as it would find it.

    That is with the seed that the rank has given, or the caller, as torch.manual_seed
    seeds all devices; or with that of the rank before, if it was given the same one
    (``other``): CUDA's may have been given by the caller alone, or by nobody. CUDA is
    not begun for this, which takes seconds and memory: where it is not yet, torch notes
    the seed for then.
    """
    mine = torch.initial_seed()
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(torch.cuda.initial_seed() if mine == other else mine)
    elif mine != other and torch.cuda.is_available():
        torch.cuda.manual_seed_all(mine)


_ON_RANKS = "fsfunc.comm.backends.simulated"  # what a rank's thread begins and ends in


def _shut() -> threading.Lock:
    """A lock that is held already: a semaphore of none, without its Python."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Baton:
    """The ``n`` ranks of one ``spmd`` call and the baton among them."""

    def __init__(self, n: int):
        self.wake = [_shut() for _ in range(n)]  # each is released to one who waits
        self.done = _shut()
        self.state = ["ready"] * n
        self.results: list[Any] = [None] * n
        self.waits: dict[int, Meeting] = {}
        self.error: BaseException | None = None
        self.meetings: dict[tuple[Any, ...], Meeting] = {}
        self.counts: dict[tuple[Any, ...], int] = {}
        self.states = [torch_state()] * n
        self.notes: dict[Any, Any] = {}
        self.board = Board()
        self.process = os.getpid()
        self.threads: dict[int, int] = {}  # by rank
        self.running, self.over = 0, False

    def hand_over(self, rank: int) -> None:
        """Passes the baton to the next rank that can run, and waits for it."""
        self.states[rank] = torch_state()
        if self._pass_on(rank):
            self.wake[rank].acquire()
        self.state[rank] = "ready"
        restore(self.states[rank])

    def end(self, rank: int) -> None:
        """Passes the baton on for good: nothing here may fail, or all would wait."""
        try:
            self.states[rank] = torch_state()
        except BaseException as error:  # of a device that has failed
            self.fail(error)
        self.state[rank] = "done"
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> bool:
        """Wakes the next rank that can run; False where that is ``rank``, or none."""
        # Who waits runs into the error. States are written by the rank that runs alone:
        # an error may come from another thread, while that rank ends.
        able = ("ready",) if self.error is None else ("ready", "waiting")
        n = len(self.state)
        order = chain(range(rank + 1, n), range(rank + 1))
        chosen = next((r for r in order if self.state[r] in able), None)
        if chosen is not None:
            self.running = chosen
            if chosen != rank:
                self.wake[chosen].release()
            return chosen != rank
        if all(state == "done" for state in self.state):
            self.over = True
            self.done.release()
            return False
        self.fail(Deadlock(self.table("no simulated rank can go on")))
        return self._pass_on(rank)

    def fail(self, error: BaseException) -> None:
        """Keeps the first error; every rank runs into it. Any thread may call it."""
        if self.error is None:
            self.error = error

    def stop_running(self) -> None:
        """Raises `Aborted` in the rank that runs, if it is in its own code.

        In the scheduler it is about to run into the error by itself, and must not be
        left between two of its lines.
        """
        thread = self.threads.get(self.running)
        top = frame = sys._current_frames().get(thread or 0)
        while frame is not None and frame.f_globals is not globals():
            frame = frame.f_back
        if thread is None or top is None or frame is not None:
            return
        if top.f_globals.get("__name__") != _ON_RANKS:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread), ctypes.py_object(Aborted))

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

    def come(
        self,
        rank: int,
        new: Meeting,
        group: tuple[int, ...],
        call: CollectiveCall,
        x: Tensor,
    ) -> Meeting:
        """Adds a rank to its next meeting with the ranks of ``new``.

        That is ``new`` itself for the first rank; the last one completes it.
        """
        if self.process != os.getpid():
            raise RuntimeError(
                f"{call}, in process {os.getpid()}, a fork of process {self.process} "
                "that runs the simulated ranks: a fork, such as a worker of a data "
                "loader, is no rank and has no collectives"
            )
        if self.error is not None:
            raise Aborted
        among = (type(new), group, new.ranks)
        count = self.counts.get((rank, *among), 0)
        self.counts[rank, *among] = count + 1
        key = (*among, count)
        meeting = self.meetings.setdefault(key, new)
        meeting.calls[rank], meeting.inputs[rank] = call, x
        if x.is_cuda and torch.cuda.is_initialized():
            meeting.streams[rank] = torch.cuda.current_stream(x.device)
        if len(meeting.calls) == len(meeting.ranks):
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
            raise Aborted

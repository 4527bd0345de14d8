"""The scheduler of simulated ranks: which one runs, and what the others wait for.

Each rank is a thread; the one that has the baton runs, and hands it over only where it
has to wait. So a deadlock is found when no rank can run. The ranks of a group meet in a
collective, and two in a transfer: a :class:`Meeting` has their inputs, and the last
rank that comes computes the results of all.

    rank 0: runs .. psum, waits                        takes its result, runs ..
    rank 1:                     runs .. psum: it is last, combines, runs ..
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
    """One collective of one group: complete when every member has come.

    Args:
        ranks: the members.
        kwargs: the arguments of the collective.
        calls, inputs: by rank, of those that have come.
        results: in the order of ``ranks``, once it is over.
        streams: by rank, the stream in which its CUDA input was made.
        result_stream: the one in which the results are made.
    """

    ranks: tuple[int, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, CollectiveCall] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    results: Sequence[Tensor] = ()
    over: bool = False
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)
    result_stream: torch.cuda.Stream | None = None

    def mismatch(self) -> str | None:
        """Returns the error's text if the members called different collectives."""
        if len({c.signature for c in self.calls.values()}) == 1:
            return None
        return self._table("simulated ranks call different collectives")

    def _table(self, title: str) -> str:
        return table(title, {r: self.calls[r] for r in self.ranks})

    def complete(self) -> None:
        """Makes every member's result."""
        if self.streams:
            self._join_streams()
        op = self.calls[self.ranks[0]].signature[0]
        inputs = list(map(self.inputs.__getitem__, self.ranks))
        self.results = OPERATIONS[op].combine(inputs, **self.kwargs)
        self.inputs.clear()
        self.over = True

    def take(self, rank: int, out: Tensor | None) -> Tensor:
        """Returns this rank's copy of its result, in ``out`` if that is given."""
        result = self.results[self.ranks.index(rank)]
        if self.result_stream is not None:
            self._leave_stream(result)
        # Ranks' results may share memory: what another rank writes must not reach it.
        return result.clone() if out is None else out.copy_(result)

    def _join_streams(self) -> None:
        """Lets this rank's stream wait for those that write the inputs.

        All ranks have one stream, the caller's, unless they enter their own.
        """
        on_cuda = next(self.inputs[rank] for rank in self.streams)
        self.result_stream = current = torch.cuda.current_stream(on_cuda.device)
        for rank, stream in self.streams.items():
            if stream != current:
                current.wait_stream(stream)
                # Its rank may free it, and write there, before `current` has read it.
                self.inputs[rank].record_stream(current)

    def _leave_stream(self, result: Tensor) -> None:
        """Lets a rank's stream wait for the one in which the results were made.

        The one that it is in now: it may have come in another.
        """
        if not result.is_cuda:
            return
        current = torch.cuda.current_stream(result.device)
        if current == self.result_stream:
            return
        current.wait_stream(self.result_stream)  # type: ignore[arg-type]
        result.record_stream(current)  # the others may drop it before it is copied


class SendMeeting(Meeting):
    """A transfer from ``ranks[0]`` to ``ranks[1]``: complete when both have come.

    The receiver provides the memory, and the last to come copies into it.
    """

    def mismatch(self) -> str | None:
        sent, wanted = (self.calls[r] for r in self.ranks)
        # All but the names of the two calls, "send" and "receive", and their arguments.
        if sent.signature[2:] == wanted.signature[2:]:
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
        """Returns the receiver's memory; on the sender an empty tensor."""
        if out is None:
            return torch.empty(0, device="cpu")
        if self.result_stream is not None:
            self._leave_stream(out)
        return out


# The CPU generator's state, CUDA's, forward mode's level, the compiler's stance.
TorchState = tuple[Tensor, Tensor | None, tuple[int, int], Any]


def torch_state() -> TorchState:
    """Returns the state that torch has once for all threads, and each rank for itself.

    The default generators' states (the CPU's, and that of a CUDA device in use), the
    level of forward-mode differentiation, and how compiled functions run. Without this
    ranks would draw from each other's generators.
    """
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    level, stance = _torch.forward_ad_state(), _torch.compiler_stance()
    return torch.get_rng_state(), cuda, level, stance


def restore(state: TorchState) -> None:
    """Puts a rank's state in place, as it gets the baton back."""
    cpu, cuda, level, stance = state
    others_seed = 0 if cuda is not None else torch.initial_seed()
    torch.set_rng_state(cpu)
    # Without a state of CUDA, the rank has not run since CUDA was begun, if it was:
    # CUDA gets the seed that the rank would find there.
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    elif torch.cuda.is_initialized() or torch.initial_seed() != others_seed:
        _begin_cuda(others_seed)
    _torch.set_forward_ad_state(level)
    _torch.set_compiler_stance(stance)


def _begin_cuda(others_seed: int) -> None:
    """Seeds CUDA's generator for a rank that has not used it, as it would find it.

    ``torch.manual_seed``, called by the rank or by the caller of all ranks, seeds all
    devices: so CUDA gets the rank's CPU seed. But if the rank that ran before has the
    same one, ``others_seed``, CUDA's own seed stays: the caller may have set that
    alone.
    """
    seed = torch.initial_seed()
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(
            torch.cuda.initial_seed() if seed == others_seed else seed
        )
    # CUDA is not begun for this, which takes seconds and memory: torch stores the seed.
    elif seed != others_seed and torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


# Where a rank's thread begins and ends.
_RANK_MODULE = "fsfunc.comm.backends.simulated"


def _locked() -> threading.Lock:
    """Returns a lock that is acquired already: the next one to acquire it waits.

    A ``threading.Semaphore(0)`` does the same in Python, and takes more calls.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


class Baton:
    """The ``n`` ranks of one ``spmd`` call and the baton among them.

    ``state`` of a rank is "ready", "waiting" (for its meeting in ``waits``) or "done".
    """

    def __init__(self, n: int):
        self.wake = [_locked() for _ in range(n)]  # a rank's is released to run it
        self.done = _locked()  # released when all ranks have ended
        self.state = ["ready"] * n
        self.results: list[Any] = [None] * n
        self.waits: dict[int, Meeting] = {}  # by rank
        self.error: BaseException | None = None  # the first of any rank
        self.meetings: dict[tuple[Any, ...], Meeting] = {}  # where a rank is missing
        self.counts: dict[tuple[Any, ...], int] = {}  # of a rank's meetings, by group
        self.torch_states: list[TorchState] = [torch_state()] * n
        self.notes: dict[Any, Any] = {}  # see `Link.notes`
        self.board = Board()
        self.process = os.getpid()
        self.threads: dict[int, int] = {}  # by rank
        self.running, self.over = 0, False

    def hand_over(self, rank: int) -> None:
        """Passes the baton to the next rank that can run, and waits to get it back."""
        self.torch_states[rank] = torch_state()
        if self._pass_on(rank):
            self.wake[rank].acquire()
        self.state[rank] = "ready"
        restore(self.torch_states[rank])

    def end(self, rank: int) -> None:
        """Passes the baton on for good: nothing here may fail, or all would wait."""
        try:
            self.torch_states[rank] = torch_state()
        except BaseException as error:  # of a device that has failed
            self.fail(error)
        self.state[rank] = "done"
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> bool:
        """Wakes the next rank that can run; returns whether ``rank`` has to sleep."""
        # After an error those that wait run too: into the error. Their state stays, as
        # only the rank that runs writes states: the error may come from another thread
        # (an interrupt), while that rank ends.
        runnable = ("ready",) if self.error is None else ("ready", "waiting")
        n = len(self.state)
        order = chain(range(rank + 1, n), range(rank + 1))  # round robin
        chosen = next((r for r in order if self.state[r] in runnable), None)
        # It is `rank` itself if no other can run: then nobody is woken.
        if chosen is not None:
            self.running = chosen
            if chosen != rank:
                self.wake[chosen].release()
            return chosen != rank
        if all(state == "done" for state in self.state):
            self.over = True
            self.done.release()
            return False
        # Every rank waits. With the error they all run again, each to raise.
        self.fail(Deadlock(self.table("no simulated rank can go on")))
        return self._pass_on(rank)

    def fail(self, error: BaseException) -> None:
        """Stores the first error; every rank runs into it. Any thread may call it."""
        if self.error is None:
            self.error = error

    def stop_running(self) -> None:
        """Raises `Aborted` in the rank that runs, if it is in its own code.

        In the scheduler it is about to raise the error by itself. An exception between
        two lines of the scheduler would leave its states half changed.
        """
        thread = self.threads.get(self.running)
        innermost = frame = sys._current_frames().get(thread or 0)
        while frame is not None and frame.f_globals is not globals():
            frame = frame.f_back
        if thread is None or innermost is None or frame is not None:
            return
        # In the first and last lines of a rank's thread nothing would catch it: the
        # baton would stay with that rank, and all others would wait for ever.
        if innermost.f_globals.get("__name__") != _RANK_MODULE:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread), ctypes.py_object(Aborted))

    def table(self, title: str) -> str:
        """Formats a line for each rank: where it is, and for whom it waits."""
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
        """Adds a rank to its next meeting with the ranks of ``new``; returns that.

        It is ``new`` itself for the first rank; the last one completes it.

        Args:
            group: the ranks along the axis; of a transfer ``new`` has two of them.
            call: what the rank called; ``x``: its input, or the memory to receive into.
        """
        # A fork has copies of the locks, and none of the threads that would release
        # them.
        if self.process != os.getpid():
            raise RuntimeError(
                f"{call}, in process {os.getpid()}, a fork of process {self.process} "
                "that runs the simulated ranks: a fork, such as a worker of a data "
                "loader, is no rank and has no collectives"
            )
        if self.error is not None:
            raise Aborted
        # The n-th collective of a rank with these ranks meets the n-th of each other.
        participants = (type(new), group, new.ranks)
        count = self.counts.get((rank, *participants), 0)
        self.counts[rank, *participants] = count + 1
        key = (*participants, count)
        meeting = self.meetings.setdefault(key, new)
        meeting.calls[rank], meeting.inputs[rank] = call, x
        # A fake tensor may be on CUDA without a device, and so without streams.
        if x.is_cuda and torch.cuda.is_initialized():
            meeting.streams[rank] = torch.cuda.current_stream(x.device)
        if len(meeting.calls) == len(meeting.ranks):
            del self.meetings[key]
            # Raised here, where the last rank called; `fail` is for those that wait.
            if message := meeting.mismatch():
                error = CollectiveMismatch(message)
                self.fail(error)
                raise error
            meeting.complete()
            # Not every rank that has come waits for it: its handle may be waited for
            # later, and meanwhile the rank waits elsewhere.
            for r in meeting.ranks:
                if self.waits.get(r) is meeting and self.state[r] == "waiting":
                    self.state[r] = "ready"
        return meeting

    def wait(self, rank: int, meeting: Meeting) -> None:
        """Lets the others run until the meeting is over.

        Raises:
            Aborted: another rank failed.
        """
        if not meeting.over:
            self.waits[rank], self.state[rank] = meeting, "waiting"
            self.hand_over(rank)
            self.waits.pop(rank, None)
        if self.error is not None:
            raise Aborted

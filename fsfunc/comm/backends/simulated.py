"""Simulated ranks: threads of one process that pass a baton.

One rank runs at a time and hands over only where it has to wait for a collective, so
a run is deterministic and any Python control flow works. When no rank can go on, that
is seen at once: the error tabulates where each one waits. The states of torch's default
generators go with the baton (numpy's and ``random``'s do not). ``spmd`` calls
`run_simulated`; the scheduler is in ``baton``.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import current_label
from fsfunc.comm.backends.baton import Aborted, Baton, Meeting, SendMeeting, restore
from fsfunc.comm.backends.interrupts import Interrupts
from fsfunc.comm.backends.link import (
    CollectiveCall,
    GroupOfRanks,
    Handle,
    Link,
    call_signature,
    checks_every_call,
)
from fsfunc.comm.mesh import Here, Mesh, set_here


class _Pending(Handle):
    """A rank's part in a meeting, of which it takes the result once it is over."""

    def __init__(self, link: SimulatedLink, meeting: Meeting, out: Tensor | None):
        self.link, self.meeting, self.out = link, meeting, out

    def wait(self) -> Tensor:
        rank = self.link.rank
        self.link.baton.wait(rank, self.meeting)
        return self.meeting.take(rank, self.out)

    def done(self) -> bool:
        return self.meeting.over


class SimulatedLink(Link):
    """One simulated rank's connection to the others of its baton."""

    def __init__(self, baton: Baton, rank: int):
        self.baton, self.rank, self.notes = baton, rank, baton.notes
        self.board, self.checks = baton.board, checks_every_call()

    def start(
        self,
        op: str,
        x: Tensor,
        group: GroupOfRanks,
        *,
        out: Tensor | None = None,
        name: str = "",
        any_order: bool = True,
        read_only: bool = False,
        **kwargs: Any,
    ) -> Handle:
        if self.checks:  # as over processes
            name = name or current_label()[0]
        new = Meeting(group.ranks, kwargs)
        return self._come(new, op, x.detach(), group, name, out)

    def send(self, x: Tensor, group: GroupOfRanks, to: int, name: str = "") -> Handle:
        new = SendMeeting((group.rank, group.ranks[to]))
        return self._come(new, "send", x, group, name)

    def receive(
        self, like: Tensor, group: GroupOfRanks, source: int, name: str = ""
    ) -> Handle:
        new = SendMeeting((group.ranks[source], group.rank))
        return self._come(new, "receive", like, group, name, like)

    def after_others(self) -> None:
        """Lets the others run first, each until it has to wait, or calls this too."""
        self.baton.hand_over(self.rank)
        if self.baton.error is not None:
            raise Aborted

    def close(self, call: CollectiveCall | str, error: BaseException) -> None:
        if self.baton.error is None:
            error.add_note(f"on simulated rank {self.rank}, in {call}")
        self.baton.fail(error)

    def _come(
        self,
        new: Meeting,
        op: str,
        x: Tensor,
        group: GroupOfRanks,
        name: str,
        out: Tensor | None = None,
    ) -> Handle:
        call = CollectiveCall.now(call_signature(op, new.kwargs, group.axis, x, name))
        meeting = self.baton.come(self.rank, new, group.ranks, call, x)
        return _Pending(self, meeting, out)


def run_simulated(
    mesh: Mesh, fn: Callable[..., Any], args: Sequence[Sequence[Any]]
) -> list[Any]:
    """Returns ``[fn(*args[r]) on rank r for each r]``; raises the first error of any.

    Every rank begins with the state of the caller's default generator, which at the end
    has the state of rank 0's.
    """
    # A rank's thread may be the first to make fake tensors, where torch 2.11 ends the
    # process if it is built with CUDA and finds no device.
    _torch.ready_for_threads()
    enter_settings, baton = carry_settings(), Baton(mesh.size)
    interrupts = Interrupts(partial(_interrupt_ranks, baton))
    # `begin` is inside of the ``try``: an interrupt may come in it, too.
    try:
        interrupts.begin()
        # torch has one level of forward mode for all threads: the first rank to close
        # it would end the tangents of the others.
        with _only_run(baton), _torch.shared_forward_ad():
            return _run_threads(baton, interrupts, mesh, enter_settings, fn, args)
    finally:
        interrupts.end()


def _run_threads(
    baton: Baton,
    interrupts: Interrupts,
    mesh: Mesh,
    enter_settings: Callable[[], ExitStack],
    fn: Callable[..., Any],
    args: Sequence[Sequence[Any]],
) -> list[Any]:
    """Starts the ranks' threads, and returns or raises when all of them have ended."""
    threads = list[Thread]()
    try:
        for rank in range(mesh.size):
            context, call = contextvars.copy_context(), partial(fn, *args[rank])
            thread_args = (_run_rank, baton, rank, mesh, enter_settings, call)
            thread = Thread(target=context.run, args=thread_args, daemon=True)
            thread.start()
            threads.append(thread)
    # The system has no more threads. The ranks that have none count as ended; those
    # that have one run into the error, and end.
    except (RuntimeError, MemoryError) as error:
        baton.state[len(threads) :] = ["done"] * (mesh.size - len(threads))
        baton.fail(error)
    if threads:
        baton.wake[0].release()
        _wait_for_all(baton, interrupts)
    for thread in threads:
        thread.join()
    restore(baton.torch_states[0])
    error, baton.error = baton.error, None
    results, baton.results = baton.results, []
    try:
        if error is not None:
            raise error
        return results
    finally:
        # Its traceback refers to this frame, and so to its tensors: without this circle
        # they are freed at once.
        del error


_TICK = 0.1  # seconds; a signal that another thread receives does not end a wait
_GRACE = 2.0  # seconds for ranks to come to a collective, after an interrupt


def _wait_for_all(baton: Baton, interrupts: Interrupts) -> None:
    """Waits until all ranks have ended.

    After an interrupt they end at their next collective; one that comes to none is
    stopped where it is.
    """
    interrupted = 0.0
    while not baton.over:
        try:
            baton.done.acquire(timeout=_TICK)
            if interrupts.deferred is None:
                continue
            interrupted = interrupted or time.monotonic()
            # In the innermost run a rank's code runs; outer ones wait for it. It is
            # tried again later: the rank may be in the scheduler, or catch the
            # exception.
            if time.monotonic() - interrupted > _GRACE:
                interrupted = time.monotonic()
                _RUNS[-1].stop_running()
        except BaseException as error:  # of a handler that was set meanwhile
            interrupts.defer(error)


def _interrupt_ranks(baton: Baton, error: BaseException) -> None:
    """Ends the ranks of ``baton``, and those of runs that these have started."""
    for inner in _RUNS[_RUNS.index(baton) :] if baton in _RUNS else [baton]:
        inner.fail(error)


_RUNS: list[Baton] = []  # runs under way, each started by a rank of the one before
os.register_at_fork(after_in_child=_RUNS.clear)  # they go on in the parent


@contextmanager
def _only_run(baton: Baton) -> Iterator[Baton]:
    """Raises if another thread runs simulated ranks.

    A rank may call ``spmd``: its thread is one of an outer run's, and waits for the
    inner one.
    """
    # Before the check: of two threads that begin at once the later one sees the other.
    _RUNS.append(baton)
    others = _RUNS[: _RUNS.index(baton)]
    try:
        thread = threading.get_ident()
        if others and not any(thread in b.threads.values() for b in others):
            raise RuntimeError(
                "spmd on simulated ranks while another thread of this process is at "
                "it: torch has one default generator, whose draws they would take "
                "from one another. Run one after the other, or in several processes"
            )
        yield baton
    finally:
        _RUNS.remove(baton)


def _run_rank(
    baton: Baton,
    rank: int,
    mesh: Mesh,
    enter_settings: Callable[[], ExitStack],
    call: Callable[[], Any],
) -> None:
    """Runs one rank in its thread: waits for the baton, calls, hands it on for good."""
    baton.threads[rank] = threading.get_ident()
    baton.wake[rank].acquire()
    try:
        restore(baton.torch_states[rank])
        if baton.error is None:
            link = SimulatedLink(baton, rank)
            with enter_settings(), set_here(Here(mesh, rank, link)):
                baton.results[rank] = call()
    except Aborted:
        pass  # the error that stopped this rank is stored in the baton
    except BaseException as error:
        if baton.process != os.getpid():
            _exit_fork(error)
        # What follows from another rank's error is not reported, and has no note.
        if baton.error is None:
            baton.fail(error)
            with suppress(TypeError):  # of notes that are no list
                error.add_note(f"on simulated rank {rank} of {mesh}")
    if baton.process != os.getpid():
        _exit_fork(None)
    baton.end(rank)


def _exit_fork(error: BaseException | None) -> None:
    """Ends the process of a fork that a rank made.

    Its only thread is this one, and Python ends a process when its *main* thread ends.
    """
    code = error.code if isinstance(error, SystemExit) else error and 1
    if error is not None and not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def carry_settings() -> Callable[[], ExitStack]:
    """Returns a function by which a new thread enters the caller's torch settings.

    Raises:
        RuntimeError: a setting that acts in one thread only.
    """
    if modes := _torch.active_modes():
        raise RuntimeError(
            f"spmd cannot carry {', '.join(modes)} into simulated ranks: a mode acts "
            "in one thread; enter it inside the function given to spmd"
        )
    # Its levels are of this thread: ranks would compute outside of them.
    if _torch.functorch_active():
        raise RuntimeError(
            "spmd on simulated ranks inside a torch.func transform: differentiate or "
            "map inside the function given to spmd"
        )
    if _torch.saved_tensors_hooked():
        raise RuntimeError(
            "spmd cannot carry saved_tensors_hooks into simulated ranks: they act in "
            "one thread; enter them inside the function given to spmd"
        )
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device_types = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    autocasts = [(k, torch.get_autocast_dtype(k)) for k in device_types]
    device, threads = torch.get_default_device(), torch.get_num_threads()
    is_default = device == torch.device("cpu")
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    modes = _torch.modes_of_ranks()

    def enter() -> ExitStack:
        stack = ExitStack()
        torch.set_num_threads(threads)
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        # Backward stays in the rank's own thread, which can pass the baton. (After
        # inference_mode, which turns multithreading on.)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for device_type, dtype in autocasts:
            stack.enter_context(torch.autocast(device_type, dtype))
        # An entered device is a mode, which slows every operation: without one it is
        # the CPU already.
        if not is_default:
            stack.enter_context(device)
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))
        for mode in modes:
            stack.enter_context(mode)
        return stack

    return enter

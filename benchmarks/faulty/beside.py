"""Faults beside the step: in saves, forks, loaders, the store, and in what is caught.

Each is called by all ranks before the step in which it is due, and knows by
``rank.due()`` whether it is the one that goes wrong. See faults.py.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fsfunc as ff
from fsfunc.checkpoint import tasks

JUNK = [
    b"[" * 60_000,
    b'{"state": 1}',
    b"\xff" * 9,
    b"is 0 1\n\x1b[31m",
    b"ends 99 0\n",
]


def save(wrong: Callable[[Any], Any]) -> Callable[[Any, Any, Any], None]:
    """A save in the background, for which one rank does something ``wrong`` first."""

    def saves(rank: Any, mesh: Any, state: Any) -> None:
        write = tasks.write_parts

        def badly(folder: Any, *rest: Any) -> Any:
            wrong(folder)
            return write(folder, *rest)

        if rank.due():
            tasks.write_parts = badly
        ff.save_async(Path(rank.file.name).with_name("step"), state).wait()

    return saves


def deny(folder: Any) -> None:
    raise PermissionError(13, "Permission denied")


def remove(folder: Any) -> None:
    time.sleep(0.3)  # all others have written by then
    shutil.rmtree(folder)


def drop(rank: Any, mesh: Any, state: Any) -> None:
    rank.due()
    for _ in range(3):  # all ranks alike
        ff.start(ff.psum, torch.ones(5000), "data")


def mismatch(rank: Any, mesh: Any, state: Any) -> None:
    try:
        ff.psum(torch.ones(8 if rank.due() else 4), "data")
    except RuntimeError:
        pass  # and they go on as if nothing had been


def interrupt(rank: Any, mesh: Any, state: Any) -> None:
    """Ctrl-C, on one rank, in the middle of a collective; it is caught."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    if not rank.due():
        time.sleep(0.5)
        ff.psum(torch.ones(4), "data")
        return
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        ff.psum(torch.ones(4), "data")
    except KeyboardInterrupt:
        pass


def fork(child: Callable[[], None], expected: int) -> Callable[[Any, Any, Any], None]:
    """A fork that is to end by itself, and soon."""

    def forks(rank: Any, mesh: Any, state: Any) -> None:
        if not rank.due():
            return
        pid = os.fork()
        if not pid:
            child()
        for _ in range(200):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                break
            time.sleep(0.05)
        else:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the fork never ends")
        if os.waitstatus_to_exitcode(status) != expected:
            raise AssertionError(f"the fork ended with {status}")

    return forks


def exits() -> None:
    try:
        atexit._run_exitfuncs()
    finally:
        os._exit(5)


def reduces() -> None:
    code = 3
    try:
        ff.psum(torch.ones(4), "data")
    except RuntimeError as error:
        code = 5 if f"process {os.getpid()} is a fork of" in str(error) else 4
    finally:
        os._exit(code)


def litter(rank: Any, mesh: Any, state: Any) -> None:
    if rank.due():
        for r in range(mesh.size):
            for data in JUNK:
                mesh.link.board.outbox.queue_push(str(r), data)


def no_descriptor(rank: Any, mesh: Any, state: Any) -> None:
    """One rank is killed, and the others have no file descriptor left."""
    if rank.due():
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError:
        pass


def kill_before_others(rank: Any, mesh: Any, state: Any) -> None:
    """One rank is killed, and the others come later, one after the other.

    Who comes last finds those gone that have raised before, and with rank 0 the store.
    """
    if rank.due():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.4 * rank.fault.timeout * mesh.rank)


def worker(rank: Any, mesh: Any, state: Any) -> None:
    """A loader's worker is killed, as for want of memory, while its rank waits."""
    if not rank.due():
        time.sleep(0.6)
        return
    rank.rows = iter(DataLoader(Rows(), num_workers=1, prefetch_factor=1))
    next(rank.rows)
    pid = rank.rows._workers[0].pid
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> float:
        time.sleep(60 * (i > 0))
        return 1.0


BESIDE: dict[str, tuple[str, Callable[[Any, Any, Any], None]]] = {
    "is killed while it saves": (
        "told", save(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    ),
    "stops while it saves": (
        "told", save(lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    ),
    "may not write": ("told", save(deny)),
    "removes the folder": ("told", save(remove)),
    "drops what it started": ("right", drop),
    "catches a mismatch": ("told", mismatch),
    "catches an interrupt": ("told", interrupt),
    "has a fork that exits": ("right", fork(exits, 5)),
    "has a fork that reduces": ("right", fork(reduces, 5)),
    "leaves junk in the store": ("right", litter),
    "is killed, and no descriptor left": ("told", no_descriptor),
    "is killed before others come": ("told", kill_before_others),
    "loses its loader's worker": ("told", worker),
}  # fmt: skip

"""Faults at a random collective of a rank: before it is issued, or on its way.

``FAULTS`` has by kind what is due, and what the rank does there. Those of ``JOINING``
begin before the mesh is made. See faults.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsfunc as ff
from fsfunc.comm.backends import same_host
from fsfunc.comm.backends.processes import ProcessLink

SLOW = 0.3  # of the timeout


def kill(rank: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(rank: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(rank: Any) -> None:
    raise ArithmeticError("no such number")


def leave(rank: Any) -> None:
    sys.exit(3 * (rank.fault.at % 2))  # half of them as if all were well


def interrupt(rank: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pause = rank.fault.at % 5 / 2000
    threading.Timer(pause, os.kill, (os.getpid(), signal.SIGINT)).start()


def take_descriptors(rank: Any) -> None:
    try:
        while True:
            rank.kept.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass


def sleep(rank: Any) -> None:
    time.sleep(SLOW * rank.fault.timeout)


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "is killed at a collective": ("told", kill),
    "stops at a collective": ("told", stop),
    "raises at a collective": ("told", fail),
    "exits at a collective": ("told", leave),
    "is interrupted at a collective": ("told", interrupt),
    "takes all descriptors": ("right", take_descriptors),
    "is slow at a collective": ("right", sleep),
}


def at_a_collective(rank: Any) -> None:
    """Has this rank go wrong at its ``fault.at``-th collective."""
    _, act = FAULTS[rank.fault.kind]
    start, count = ProcessLink.start, iter(range(10**9))

    def wrongly(link: Any, *args: Any, **how: Any) -> Any:
        here = not ff.recording() and next(count) == rank.fault.at
        if here and rank.fault.at % 2:
            rank.note(fault=rank.fault.kind)
            act(rank)
        handle = start(link, *args, **how)
        if here and not rank.fault.at % 2:  # it is on its way
            rank.note(fault=rank.fault.kind)
            act(rank)
        return handle

    name = "start"
    setattr(ProcessLink, name, wrongly)


def another_user(rank: Any) -> None:
    same_host._is_same_user = lambda connection: False


def no_descriptor_to_share(rank: Any) -> None:
    """They run out between the first message of a mesh and the memory's."""
    meet = same_host.Door.meet

    def short(door: Any, *args: Any) -> Any:
        take_descriptors(rank)
        for _ in range(rank.fault.at % 6):
            os.close(rank.kept.pop())
        try:
            return meet(door, *args)
        finally:
            while rank.kept:
                os.close(rank.kept.pop())

    name = "meet"
    setattr(same_host.Door, name, short)


def knock(rank: Any) -> None:
    """A stranger of the same user, at every door of this host, all the time."""

    def run() -> None:
        while True:
            for line in Path("/proc/net/unix").read_text().splitlines():
                if "@fsfunc-" not in line:
                    continue
                with socket.socket(socket.AF_UNIX) as one:
                    try:
                        one.connect("\0" + line.rpartition("@")[2])
                        one.send(b"x" * (1 + rank.fault.at))
                    except OSError:
                        pass
            time.sleep(0.001)

    threading.Thread(target=run, daemon=True).start()


JOINING: dict[str, tuple[str, Callable[[Any], None]]] = {
    "is another user's": ("right", another_user),
    "has no descriptor to share": ("right", no_descriptor_to_share),
    "knocks at every door": ("right", knock),
    "is killed as it joins": ("told", kill),
    "stops as it joins": ("told", stop),
}


def at_joining(rank: Any) -> None:
    """Has this rank go wrong as, or at some place while, it joins the others."""
    kind = rank.fault.kind
    due, act = JOINING[kind]
    if due == "right":
        rank.note(fault=kind)
        act(rank)
        return
    from fsfunc.comm.backends import process_groups, processes
    from fsfunc.comm.watch.watchdog import Watchdog

    places: list[tuple[Any, str]] = [
        (process_groups, "fresh"),
        (Watchdog, "join"),
        (torch.distributed, "init_process_group"),
        (processes, "compare_gathered"),
        (same_host.Door, "meet"),
        (same_host._Encounter, "finish"),
    ]
    where, name = places[rank.fault.at % (len(places) - (not rank.fault.shared))]
    call = getattr(where, name)

    def wrongly(*args: Any, **how: Any) -> Any:
        rank.note(fault=kind)
        act(rank)
        return call(*args, **how)

    setattr(where, name, wrongly)

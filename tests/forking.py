"""Programs that start at once: forks of a process that has imported torch and fsfunc.

A program that imports them itself does so for three seconds, each of several ranks and
their launcher too. A fork is a process like any other: of its own arguments,
environment, streams and session, and it ends as Python ends.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Program(NamedTuple):
    args: list[
        str
    ]  # as `python` takes them: -W HOW; a path, -c TEXT or -m NAME; its own
    environment: dict[str, str]
    out: str  # files, to which several may append
    err: str


class Running:
    """Programs that run at the same time; nothing else starts before they end.

    Args:
        together: Once one fails the others are killed, as torchrun does.
    """

    def __init__(self, programs: Sequence[Program], together: bool = True):
        self.server = _server()
        assert self.server.stdin and self.server.stdout
        self.said = self.server.stdout
        asked = json.dumps([os.getcwd(), together, programs])
        self.server.stdin.write(asked.encode() + b"\n")
        self.pids: list[int] = json.loads(self.said.readline())
        self.ended: list[int] | None = None

    def wait(self, timeout: float) -> list[int] | None:
        """How each ended, by its status or -signal; None after `timeout` seconds."""
        if self.ended is None and select.select([self.said], [], [], timeout)[0]:
            self.ended = json.loads(self.said.readline())
        return self.ended

    def end(self) -> None:
        """Kills what still runs."""
        if self.wait(0) is None:
            for pid in self.pids:
                end(pid)
            self.ended = json.loads(self.said.readline())


def run(programs: Sequence[Program], timeout: float, together: bool) -> list[int]:
    """How `Running` programs ended.

    Raises `TimeoutError` where they do not end in `timeout` seconds; they are killed.
    """
    running = Running(programs, together)
    try:
        if (ended := running.wait(timeout)) is None:
            raise TimeoutError(f"{programs[0].args[0]} ran past {timeout} s")
        return ended
    finally:
        running.end()  # Ctrl-C, for one


@cache
def _server() -> subprocess.Popen:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forking"],
        bufsize=0,  # select looks at what there is to read
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    @atexit.register
    def done() -> None:
        server.communicate()

    return server


def end(pid: int) -> None:
    """Kill the process group that `pid` leads, and all that descend from it.

    torchrun starts each worker in a session of its own, so that killing the group
    alone would leave the workers running.
    """
    try:
        os.killpg(pid, signal.SIGSTOP)  # it starts no other while we count
        below = descendants(pid)
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    for member in below:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it went with the group, or ended by itself


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, parents first; [] where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we were reading
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(stat.parent.name))
    below = list(children.get(pid, []))
    for child in below:  # grows while it is walked
        below += children.get(child, [])
    return below


# The process that forks


def serve() -> Program | None:
    """Starts the programs of each line; None at the end, and in a fork what it is."""
    for line in sys.stdin.buffer:
        folder, together, programs = json.loads(line)
        pids = []
        for program in programs:
            pid = os.fork()
            if not pid:
                os.chdir(folder)
                return Program(*program)
            pids.append(pid)
        say(pids)
        say(statuses(pids, together))
    return None


def say(numbers: list[int]) -> None:
    sys.stdout.write(json.dumps(numbers) + "\n")
    sys.stdout.flush()


def statuses(pids: list[int], together: bool) -> list[int]:
    found: dict[int, int] = {}
    while len(found) < len(pids):
        pid, status = os.wait()
        found[pid] = os.waitstatus_to_exitcode(status)
        if together and found[pid]:
            for other in set(pids) - set(found):
                os.kill(other, signal.SIGKILL)
    return [found[pid] for pid in pids]


def become(program: Program) -> None:
    """Runs it here: the last thing that this process does."""
    os.setsid()
    for fd, path in enumerate((os.devnull, program.out, program.err)):
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT if fd else os.O_RDONLY
        os.dup2(os.open(path, how), fd)
    os.environ.clear()
    os.environ.update(program.environment)
    if "FSFUNC_THREADED" in os.environ:
        from tests import threaded  # imports torch

        threaded.begin()
    first, *rest = program.args
    if first == "-W":
        warnings.simplefilter(rest[0])
        first, *rest = rest[1:]
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = ModuleType("__main__")
    if first == "-c":
        text, *rest = rest
        path, sys.path[0] = "<string>", ""
    else:
        path, sys.path[0] = first, os.path.dirname(first)
        text = Path(path).read_text()
        module.__file__ = path
    sys.argv = [first, *rest]
    sys.modules["__main__"] = module
    exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  fake tensors ask for it late: four seconds

    import fsfunc  # noqa: F401

    gc.collect()
    gc.freeze()  # or each fork would end by looking through all of it: a second
    if asked := serve():
        become(asked)

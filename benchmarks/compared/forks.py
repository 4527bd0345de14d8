"""Programs that start at once: forks of a process that has imported what they need.

A program that imports torch and fsfunc itself does so for seconds, and each of its
ranks too. For rehearsals: what is measured runs in processes that begin alone.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

IMPORTED = (  # what programs and their workers import, once for all of them
    "compared.ours_pipelined",
    "compared.ours_split",
    "compared.peers_pipelined",
    "compared.peers_split",
    "fsfunc.transforms.compilation",
    "slow_link.rank",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.experimental",
)
PR_SET_PDEATHSIG = 1  # Linux prctl
_rehearsing = False


def prepare() -> None:
    """Imports what programs need. From here on, workers are forks too."""
    global _rehearsing
    # Else each compiling process starts others, which import torch themselves.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name in IMPORTED:
        importlib.import_module(name)
    _compile_once()
    gc.collect()
    gc.freeze()  # or each fork would end by looking through all of it: a second
    _rehearsing = True


def _compile_once() -> None:
    """Compiles a function, so that what torch imports and makes then is there."""
    import torch

    x = torch.ones(2, 2, requires_grad=True)
    torch.compile(lambda x: (x @ x).sum(), backend="aot_eager")(x).backward()
    torch.compiler.reset()


def rehearsing() -> bool:
    """Returns whether `prepare` was called, here or where this process comes from."""
    return _rehearsing


class Fork:
    """A program of Python, as `subprocess.Popen` would run it.

    Args:
        args: its path, and its arguments.
        environment: its variables.
        out: the file to which it writes, standard error too.

    Attributes:
        processor_seconds: what it used, with the processes that it began and awaited.
    """

    returncode: int | None = None
    processor_seconds: float = 0.0

    def __init__(self, args: Sequence[str], environment: Mapping[str, str], out: Path):
        sys.stdout.flush()  # or the fork would write it once more
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _run_and_end(args, environment, out)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.processor_seconds = used.ru_utime + used.ru_stime
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


def ranks_environment(ranks: int) -> list[dict[str, str]]:
    """Returns what torchrun tells each rank of a program on this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]


def _run_and_end(
    args: Sequence[str], environment: Mapping[str, str], out: Path
) -> None:
    """Runs a program here: the last thing that this process does."""
    code: object = 1
    try:
        if sys.platform == "linux":  # it dies with its parent, however that ends
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for which in (signal.SIGTERM, signal.SIGINT):
            signal.signal(which, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        written = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for fd, source in enumerate((nothing, written, written)):
            os.dup2(source, fd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = list(args)
        sys.path.insert(0, str(Path(args[0]).resolve().parent))
        runpy.run_path(args[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:  # as Python ends; nothing of where this comes from goes on here
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)

"""Programs under way: starting them, watching what they save, and signalling ranks."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.examples.programs import SCRIPT
from tests.forking import descendants, end
from tests.programs import environment

TIME_LIMIT = 60  # seconds


@contextmanager
def launched(
    folder: Path, *args: str | Path, nproc: int = 0, restarts: int = 3
) -> Iterator["Launch"]:
    """The example under torchrun, which restarts it; or by itself (nproc=0)."""
    logs = Path(tempfile.mkdtemp(dir=folder))
    torchrun = [
        *("-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"),
        *(f"--log-dir={logs}", "--redirects=3"),
    ]
    with (logs / "printed").open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, *(torchrun if nproc else []), SCRIPT, *args],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Launch(process, logs)
    finally:
        if process.poll() is None:
            end(process.pid)
            process.wait()


class Launch:
    def __init__(self, process: subprocess.Popen, logs: Path):
        self.process, self.logs = process, logs
        self.limit = time.monotonic() + TIME_LIMIT

    def printed(self) -> str:
        """What it and its ranks wrote, to stdout and stderr."""
        files = [path for path in sorted(self.logs.rglob("*")) if path.is_file()]
        return "".join(f"--- {path}\n{path.read_text()}" for path in files)

    def until(self, holds: Callable[[], object]) -> None:
        """Waits; AssertionError where the program ends first, or it takes too long."""
        while not holds():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < self.limit, self.printed()
            time.sleep(0.002)

    def ended(self) -> int:
        """The exit status, once there is one."""
        try:
            return self.process.wait(self.limit - time.monotonic())
        except subprocess.TimeoutExpired:
            raise AssertionError(self.printed()) from None

    def attempts(self) -> int:
        """How often torchrun has started the ranks."""
        return len(list(self.logs.glob("*/attempt_*")))

    def ranks(self) -> dict[int, int]:
        """The process of each rank that torchrun started, as they are now."""
        found = {}
        for pid in descendants(self.process.pid):
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            here = dict(entry.split(b"=", 1) for entry in environ if b"=" in entry)
            if b"RANK" in here:
                found[int(here[b"RANK"])] = pid
        return found

    def kill(self, rank: int) -> None:
        os.kill(self.ranks()[rank], signal.SIGKILL)

"""Programs under way: starting them, watching what they save, and signalling ranks."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import forking
from tests.examples.programs import SCRIPT
from tests.forking import descendants
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
    given = [*(torchrun if nproc else []), SCRIPT, *args]
    printed = str(logs / "printed")
    running = forking.Running(
        [forking.Program(list(map(str, given)), environment(), printed, printed)]
    )
    try:
        yield Launch(running, logs)
    finally:
        running.end()


class Launch:
    def __init__(self, running: forking.Running, logs: Path):
        self.running, self.logs = running, logs
        (self.pid,) = running.pids
        self.limit = time.monotonic() + TIME_LIMIT

    def printed(self) -> str:
        """What it and its ranks wrote, to stdout and stderr."""
        files = [path for path in sorted(self.logs.rglob("*")) if path.is_file()]
        return "".join(f"--- {path}\n{path.read_text()}" for path in files)

    def until(self, holds: Callable[[], object]) -> None:
        """Waits; AssertionError where the program ends first, or it takes too long."""
        while not holds():
            assert self.running.wait(0) is None, self.printed()
            assert time.monotonic() < self.limit, self.printed()
            time.sleep(0.002)

    def ended(self) -> int:
        """The exit status, once there is one."""
        ended = self.running.wait(self.limit - time.monotonic())
        assert ended, self.printed()
        return ended[0]

    def attempts(self) -> int:
        """How often torchrun has started the ranks."""
        return len(list(self.logs.glob("*/attempt_*")))

    def ranks(self) -> dict[int, int]:
        """The process of each rank that torchrun started, as they are now."""
        found = {}
        for pid in descendants(self.pid):
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            here = dict(entry.split(b"=", 1) for entry in environ if b"=" in entry)
            if b"RANK" in here:
                found[int(here[b"RANK"])] = pid
        return found

    def terminate(self) -> None:
        """SIGTERM, as a cluster sends it: to every process, the ranks first.

        torchrun would pass it on in its own time, in which a short run ends.
        """
        for pid in (*self.ranks().values(), self.pid):
            os.kill(pid, signal.SIGTERM)

    def kill(self, rank: int) -> None:
        os.kill(self.ranks()[rank], signal.SIGKILL)

"""Running the example as its user does, and reading what it prints."""

import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import forking
from tests.forking import descendants
from tests.programs import ROOT, environment, forked

SCRIPT = ROOT / "examples" / "train_gpt.py"
SIZES = "--dim 32 --layers 2 --heads 2 --seq 32 --batch 8 --lr 1e-2 --sample 2".split()


TIME_LIMIT = 120  # seconds, of a program that was launched


class Run(NamedTuple):
    out: str
    losses: dict


def program(
    *args: str | Path, check: bool = True, start: tuple[str, ...] = (str(SCRIPT),)
) -> subprocess.CompletedProcess:
    done = forked(*start, *args, COLUMNS="100")
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def train(folder: Path, *args: str | Path) -> Run:
    """The script in this process: a program of its own takes seconds to start."""
    path, out = folder / "losses.json", io.StringIO()
    given = [SCRIPT, *SIZES, "--losses", path, *args]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", list(map(str, given)))
        patch.setenv("COLUMNS", "100")
        patch.syspath_prepend(SCRIPT.parent)
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        finally:
            for module in SCRIPT.parent.glob("*.py"):
                sys.modules.pop(module.stem, None)
    return Run(out.getvalue(), json.loads(path.read_text()))


def train_as_program(folder: Path, *args: str | Path) -> Run:
    path = folder / "losses.json"
    out = program(*SIZES, "--losses", path, *args).stdout
    return Run(out, json.loads(path.read_text()))


def planned(folder: Path, mesh: str, *args: str) -> list[dict[tuple[str, str], int]]:
    """How often each program of a plan sends, by op and axis, as numbers_sent says."""
    path, start = folder / "plan.json", ("-m", "fsfunc", "plan", str(SCRIPT))
    program("--mesh", mesh, "--json", path, "--", *SIZES, *args, start=start)
    found: list[dict[tuple[str, str], int]] = []
    for one in json.loads(path.read_text())["plans"][0]["programs"]:
        counts: dict[tuple[str, str], int] = {}
        for row in one["collectives"]:
            key = row["op"], ", ".join(row["axes"])
            counts[key] = counts.get(key, 0) + row["count"]
        found.append({**counts, ("all", ""): sum(counts.values())})
    return found


def table_below(out: str, title: str) -> list[list[str]]:
    """The cells of the rows of the table with this title."""
    body = out.split(title, 1)[1].split("└", 1)[0]
    return [
        [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in body.splitlines()
        if line.startswith("│")
    ]


def numbers_held(rows: list[list[str]]) -> list[list[int]]:
    """How many numbers a rank holds of each kind, from cells like 1,024 (4.0 KiB)."""
    return [[int(c.split()[0].replace(",", "")) for c in row[1:]] for row in rows]


def numbers_sent(out: str) -> list[dict[tuple[str, str], int]]:
    """How often each rank sent, by op and axis, from cells like 4 (16.0 KiB)."""
    rows = table_below(out, "sent in one step")
    columns = zip(*(row[2:] for row in rows), strict=True)
    kinds = [(op, axis) for op, axis, *_ in rows]
    return [
        {kind: int(cell.split()[0]) for kind, cell in zip(kinds, column, strict=True)}
        for column in columns
    ]


def check_losses(found: dict, expected: dict, tolerance: float) -> None:
    assert found["train"] == pytest.approx(expected["train"], abs=tolerance)
    for (step, loss), (at, other) in zip(
        found["validation"], expected["validation"], strict=True
    ):
        assert step == at
        assert loss == pytest.approx(other, abs=tolerance)


@contextlib.contextmanager
def launched(
    folder: Path,
    *args: str | Path,
    nproc: int = 0,
    restarts: int = 3,
    script: Path = SCRIPT,
    limit: float = TIME_LIMIT,
) -> Iterator["Launch"]:
    """The example under torchrun, which restarts it; or by itself (nproc=0)."""
    logs = Path(tempfile.mkdtemp(dir=folder))
    torchrun = [
        *("-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"),
        *(f"--log-dir={logs}", "--redirects=3"),
    ]
    given = [*(torchrun if nproc else []), script, *args]
    printed = str(logs / "printed")
    running = forking.Running(
        [forking.Program(list(map(str, given)), environment(), printed, printed)]
    )
    try:
        yield Launch(running, logs, limit)
    finally:
        running.end()


class Launch:
    def __init__(self, running: forking.Running, logs: Path, limit: float):
        self.running, self.logs = running, logs
        (self.pid,) = running.pids
        self.limit = time.monotonic() + limit

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

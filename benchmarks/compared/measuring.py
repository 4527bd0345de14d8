"""How times and peaks are taken: fresh processes, alternating calls, medians.

The parent starts `worker.py` once per rank and reads one JSON object from each. (In a
rehearsal workers are forks of a process that has imported torch: `forks.py`.) A worker
dies with its parent, and the parent kills what has not answered in time, so that
no process is left behind. Peaks are the kernel's own high-water mark (Linux).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from compared import forks

BENCHMARKS = Path(__file__).resolve().parents[1]

# glibc raises its own mmap threshold as it runs; pinned, freed tensors go back to the
# system and peaks can be compared. The same for every competitor.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class WorkerFailed(RuntimeError):
    """A worker raised or did not answer in time."""


def environment() -> dict[str, str]:
    """This process's environment with what every worker is given."""
    paths = [str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    given = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    # A package whose bytecode may not be kept would be compiled at each import.
    given.pop("PYTHONDONTWRITEBYTECODE", None)
    return given


def run_workers(task: dict[str, Any], *, ranks: int, timeout: float) -> list[Any]:
    """What `worker.py` answers to `task` on each of `ranks` fresh processes.

    Raises:
        WorkerFailed: a worker raised or `timeout` seconds have passed; with the end of
            what the first failing rank wrote.
    """
    # Not a TemporaryDirectory, which a fork that fails would remove as it ends.
    folder = tempfile.mkdtemp()
    workers: list[Worker] = []
    try:
        for rank in range(ranks):
            workers.append(
                _start({**task, "rank": rank, "ranks": ranks, "folder": folder})
            )
        return _collect(workers, folder, time.monotonic() + timeout, task)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        shutil.rmtree(folder)


class Worker(Protocol):
    """What is asked of a worker: of `subprocess.Popen`, or of a fork."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


def _start(task: dict[str, Any]) -> Worker:
    log = Path(task["folder"]) / f"log{task['rank']}"
    args = [str(BENCHMARKS / "worker.py"), json.dumps(task)]
    if forks.rehearsing():
        return forks.Fork(args, environment(), log)
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment() if task.get("pinned", True) else _unpinned(),
        )


def _unpinned() -> dict[str, str]:
    """The same with malloc as glibc starts it, which raises its threshold itself."""
    given = environment()
    del given["MALLOC_MMAP_THRESHOLD_"]
    return given


def _collect(workers: list[Worker], folder: str, end: float, task: dict) -> list[Any]:
    while any(worker.poll() is None for worker in workers):
        failed = any(worker.poll() for worker in workers)
        if failed or time.monotonic() > end:
            # The rank that raised has written; the others wait for it in vain.
            break
        time.sleep(0.02)
    codes = [worker.poll() for worker in workers]
    if any(code != 0 for code in codes):
        # One that raised says more than one that still waits for it (None).
        first = next((r for r, c in enumerate(codes) if c), None)
        first = codes.index(None) if first is None else first
        tail = (Path(folder) / f"log{first}").read_text(errors="replace")[-3000:]
        how = "did not answer in time" if codes[first] is None else "failed"
        raise WorkerFailed(f"rank {first} of {task} {how}:\n{tail}")
    answers = [Path(folder) / f"answer{r}" for r in range(len(workers))]
    return [json.loads(path.read_text()) for path in answers]


class Load:
    """The share of the machine's processors that other programs used meanwhile.

    Of what ran inside it counts this process, and its children that have ended.
    """

    def __enter__(self) -> Load:
        self.before = _jiffies(), os.times()
        return self

    def __exit__(self, *raised: object) -> None:
        (busy, total), times = _jiffies(), os.times()
        (busy_then, total_then), then = self.before
        # user, system, children's user, children's system
        own = (sum(times[:4]) - sum(then[:4])) * os.sysconf("SC_CLK_TCK")
        past = max(total - total_then, 1)
        self.others = max(0.0, (busy - busy_then - own) / past)


def _jiffies() -> tuple[int, int]:
    """Those that the machine was busy, and all, since it started (Linux)."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, idle, waiting, *more = map(int, first.split()[1:9])
    busy = user + nice + system + sum(more)
    return busy, busy + idle + waiting


def alternate(
    steps: dict[str, Callable[[], Any]],
    *,
    rounds: int,
    barrier: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every call, the competitors in turn: A B A B ..."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            barrier()
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def slowest(per_rank: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The times of the slowest rank, step by step."""
    return {
        name: [max(ts) for ts in zip(*(t[name] for t in per_rank), strict=True)]
        for name in per_rank[0]
    }


def quartiles(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The three quartiles of the ratios of times that were taken in turn."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    if len(ratios) < 2:
        return ratios * 3
    return statistics.quantiles(ratios, n=4, method="inclusive")


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(ts) for name, ts in times.items()}


def resident() -> int:
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def peak_resident() -> Iterator[Callable[[], int]]:
    """Gives a function that returns the peak resident bytes since entry.

    The kernel's high-water mark is reset and read: exact, and nothing runs beside the
    step. Where a sandbox forbids the reset, a thread samples every millisecond.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        with _sampled() as peak:
            yield peak
    else:
        yield _high_water_mark


def _high_water_mark() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM; Linux is needed")
    return int(found[1]) * 1024


@contextmanager
def _sampled() -> Iterator[Callable[[], int]]:
    peak, done = [resident()], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], resident())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        done.set()
        thread.join()


def import_seconds(package: str, *, after: str, runs: int, timeout: float) -> float:
    """Median seconds of `import package` once `after` is imported, fresh each time."""
    code = (
        f"import time, {after}; start = time.perf_counter(); import {package};"
        "print(time.perf_counter() - start)"
    )

    def once() -> float:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise WorkerFailed(f"import {package}:\n{done.stderr[-3000:]}")
        return float(done.stdout)

    if runs > 1:
        once()  # writes the bytecode, so that no timed run compiles
    return statistics.median(once() for _ in range(runs))

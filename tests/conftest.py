"""What every test runs under: hypothesis' profile, one thread, and real processes."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.programs import environment

# derandomize: a failure in CI is a failure on every machine. No deadline: the first
# example pays for torch's warm-up. No database in CI: the checkout may be read-only.
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=20, database=None
)
settings.register_profile("dev", deadline=None, max_examples=10)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

PROGRAMS = {"benchmarks", "examples"}  # folders whose tests start programs
TIME_LIMIT = 120  # seconds; a run of torchrun that takes longer hangs


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone: every law, without slow tests, two at a time.

    Who names files, or marks (`-m "slow or not slow"`: everything), gets what they say.
    """
    given = config.option
    if config.args_source is config.ArgsSource.TESTPATHS and not given.markexpr:
        given.markexpr = "not slow"
        if "PYTEST_XDIST_WORKER" in os.environ:  # which starts none of its own
            given.loadgroup = True
        elif getattr(given, "numprocesses", 0) is None and not given.usepdb:
            given.numprocesses, given.dist = 2, "loadgroup"


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # For `-n 2 --dist loadgroup`: a file's tests share fixtures, and files that start
    # many processes leave the other cores to the others.
    apart = {item.path for item in items if item.get_closest_marker("processes")}
    for item in items:
        processes = item.get_closest_marker("processes")
        if processes and processes.kwargs.get("slow", True):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        group = str(item.path)
        if item.path in apart:
            folder = item.path.parent.name
            group = folder if folder in PROGRAMS else "programs"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="module")
def collected() -> Iterator[None]:
    """Full collections inside look at what this file's tests make, and at that alone.

    They would look at each object that was ever imported: a third of a second each.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[[str | Path, int], str]:
    """Return run(script, nproc, *args, timeout=TIME_LIMIT) -> what its ranks printed.

    That is rank 0's stdout, then rank 1's, and so on: each rank writes to a file of
    its own, as lines that several processes print to one pipe come out mixed.
    `script` is a path, or the text of a program. Raises AssertionError with all that
    it printed where it fails, and TimeoutError where it does not end; no process is
    left either way.
    """

    def run(
        script: str | Path, nproc: int, *args: str, timeout: float = TIME_LIMIT
    ) -> str:
        if isinstance(script, str):
            path = tmp_path / "program.py"
            path.write_text(textwrap.dedent(script))
        else:
            path = script
        logs = Path(tempfile.mkdtemp(dir=tmp_path))  # a test may run several
        # standalone: the launcher picks a free port itself.
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        options = [f"--nproc-per-node={nproc}", f"--log-dir={logs}", "--redirects=1"]
        process = subprocess.Popen(
            [sys.executable, *launcher, *options, str(path), *args],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end(process.pid)
            _, err = process.communicate(timeout=10)
            raise TimeoutError(
                f"{path.name} ran past {timeout} s\n{printed(logs)}\n{err}"
            ) from None
        finally:
            if process.poll() is None:  # Ctrl-C, for one
                end(process.pid)
                process.wait()
        out = printed(logs)
        if process.returncode:
            raise AssertionError(
                f"{path.name} ended with {process.returncode}\n{out}\n{err}"
            )
        return out

    return run


def printed(logs: Path) -> str:
    """Return what the ranks of one run wrote to stdout, in the order of ranks."""
    files = logs.glob("*/attempt_0/*/stdout.log")
    return "".join(
        file.read_text() for file in sorted(files, key=lambda file: int(file.parts[-2]))
    )


def end(pid: int) -> None:
    """Kill the process group that `pid` leads, and all that descend from it.

    torchrun starts each worker in a session of its own, so that killing the group
    alone would leave the workers running.
    """
    os.killpg(pid, signal.SIGSTOP)  # it starts no other while we count
    below = descendants(pid)
    os.killpg(pid, signal.SIGKILL)
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

"""What every test runs under: hypothesis' profile, one thread, and real processes."""

import gc
import os
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import forking
from tests.forking import end
from tests.programs import environment
from tests.rounding import round_by_shapes

# derandomize: a failure in CI is a failure on every machine. No deadline: the first
# example pays for torch's warm-up. No database in CI: the checkout may be read-only.
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=12, database=None
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
    with warnings.catch_warnings(action="ignore"):  # torch's, of an overridden kernel
        round_by_shapes()


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
def poisoned() -> Iterator[None]:
    """NaN in memory that means nothing yet, or no more."""
    from fsfunc.testing import poison

    with poison():
        yield


@pytest.fixture
def processes(tmp_path: Path) -> Callable[[str | Path, int], str]:
    """Return run(script, nproc, *args, timeout=TIME_LIMIT) -> what its ranks printed.

    As `torchrun` does, and as fails and hangs under it; but its ranks are forks, that
    start at once.
    """

    def run(
        script: str | Path, nproc: int, *args: str, timeout: float = TIME_LIMIT
    ) -> str:
        path = written(script, tmp_path)
        logs = Path(tempfile.mkdtemp(dir=tmp_path))
        # Kept by the launcher, as torchrun does it: ranks may end in any order.
        store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        launched = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(nproc),
            "FSFUNC_FLIGHT": str(logs),
        }
        ranks = [
            forking.Program(
                [str(path), *args],
                environment(**launched, RANK=str(rank), LOCAL_RANK=str(rank)),
                str(logs / f"{rank}.out"),
                str(logs / "err"),
            )
            for rank in range(nproc)
        ]

        def printed() -> tuple[str, str]:
            out = "".join(Path(rank.out).read_text() for rank in ranks)
            return out, (logs / "err").read_text()

        try:
            ended = forking.run(ranks, timeout, together=True)
        except TimeoutError as error:
            raise TimeoutError("\n".join([str(error), *printed()])) from None
        out, err = printed()
        if any(ended):
            raise AssertionError(f"{path.name} ended with {ended}\n{out}\n{err}")
        return out

    return run


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
        path = written(script, tmp_path)
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


def written(script: str | Path, folder: Path) -> Path:
    """Return where a program is, that may be given as its text."""
    if isinstance(script, Path):
        return script
    path = folder / "program.py"
    path.write_text(textwrap.dedent(script))
    return path


def printed(logs: Path) -> str:
    """Return what the ranks of one run wrote to stdout, in the order of ranks."""
    files = logs.glob("*/attempt_0/*/stdout.log")
    return "".join(
        file.read_text() for file in sorted(files, key=lambda file: int(file.parts[-2]))
    )

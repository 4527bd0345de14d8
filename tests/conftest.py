"""What every test runs under: hypothesis' profile, one thread, and real processes."""

import gc
import os
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import forking, threaded
from tests.covering import examples
from tests.programs import environment
from tests.rounding import round_by_shapes

# derandomize: a failure in CI is a failure on every machine. No deadline: the first
# example pays for torch's warm-up. No database in CI: the checkout may be read-only.
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=examples(12), database=None
)
settings.register_profile("dev", deadline=None, max_examples=10)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Who works on the library reads its frames; tests of short tracebacks ask for these.
os.environ.setdefault("FSFUNC_TRACEBACK", "full")

PROGRAMS = {"benchmarks", "examples"}  # folders whose tests start programs
TIME_LIMIT = 120  # seconds; a run that takes longer hangs


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone: every law, without slow tests, two at a time.

    Who names files, or marks (`-m "slow or not slow"`: everything), gets what they say.
    """
    given = config.option
    if config.args_source is config.ArgsSource.TESTPATHS and not given.markexpr:
        given.markexpr = "not slow"
        worker = "PYTEST_XDIST_WORKER" in os.environ  # which starts none of its own
        alone = getattr(given, "numprocesses", 0) is None
        if alone and not given.usepdb and not worker:
            given.numprocesses, given.dist = 2, "loadgroup"
            given.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        from tests import groups

        config.pluginmanager.register(groups)
    torch.set_num_threads(1)
    if threaded.ASKED:
        threaded.begin()
    with warnings.catch_warnings(action="ignore"):  # torch's, of an overridden kernel
        round_by_shapes()


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # For `-n 2 --dist loadgroup --no-loadscope-reorder`: a file's tests share fixtures,
    # and files that start many processes leave the other cores to the others.
    apart = {item.path for item in items if item.get_closest_marker("processes")}
    # FSFUNC_GPU_TESTS=cpu rehearses the tests of a GPU on the CPU.
    on_gpu = torch.cuda.is_available() or os.environ.get("FSFUNC_GPU_TESTS") == "cpu"
    for item in items:
        processes = item.get_closest_marker("processes")
        if processes and processes.kwargs.get("slow", True):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        group = str(item.path)
        if item.path in apart:
            folder = item.path.parent.name
            group = folder if folder in PROGRAMS else "programs"
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path not in apart)  # what takes longest first


def pytest_collection_finish() -> None:
    frozen()


@pytest.fixture(scope="module")
def collected() -> None:
    """Full collections inside look at what a file's tests make, and at that alone."""
    frozen()


def frozen() -> None:
    """No collection looks at what there is now, of all imports: half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def as_on_cuda() -> Iterator[None]:
    """Backward passes run in a second thread, its context empty."""
    end = threaded.begin()
    yield
    end()


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


def written(script: str | Path, folder: Path) -> Path:
    """Return where a program is, that may be given as its text."""
    if isinstance(script, Path):
        return script
    path = folder / "program.py"
    path.write_text(textwrap.dedent(script))
    return path

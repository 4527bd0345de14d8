"""What `pytest` alone runs, and in how many processes."""

import textwrap
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_cmdline_main
from tests.programs import python

SOURCES = pytest.Config.ArgsSource


def started(given, source=SOURCES.TESTPATHS):
    """The options as the hook leaves them."""
    options = {"markexpr": "", "numprocesses": None, "usepdb": False, "dist": "no"}
    option = SimpleNamespace(**options | given)
    config = SimpleNamespace(option=option, args_source=source, ArgsSource=SOURCES)
    pytest_cmdline_main(config)
    return option


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def test_alone_it_leaves_slow_tests_out_on_two_workers(monkeypatch):
    option = started({})
    assert (option.markexpr, option.numprocesses) == ("not slow", 2)
    assert option.dist == "loadgroup" and not option.loadscopereorder
    for given in {"numprocesses": 0}, {"usepdb": True}:
        assert started(given).numprocesses != 2
    assert started({}, SOURCES.ARGS).markexpr == ""
    assert started({"markexpr": "slow"}).numprocesses is None
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")  # a worker starts no workers
    option = started({})
    assert (option.markexpr, option.numprocesses) == ("not slow", None)


GROUPED = """
    import os, time
    from pathlib import Path
    import pytest

    @pytest.mark.parametrize("n", range(6))
    def test_it(n):
        name = f"{__name__} {n} {os.environ['PYTEST_XDIST_WORKER']}"
        (Path(__file__).parent / name).touch()
        time.sleep(0.02)
"""


def test_what_is_of_one_group_is_run_by_one_worker(tmp_path):
    plugin = tmp_path / "conftest.py"
    plugin.write_text(
        textwrap.dedent(
            """
            import pytest

            def pytest_collection_modifyitems(items):
                for item in items:
                    item.add_marker(pytest.mark.xdist_group(item.path.name))
            """
        )
    )
    names = ["test_a", "test_b", "test_c"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(GROUPED))
    two = ("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
    done = python(
        *("-m", "pytest", "-p", "tests.groups", "-p", "no:cacheprovider"),
        *(*two, "--rootdir", tmp_path, tmp_path),
        PYTEST_ADDOPTS="",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [path.name.split() for path in tmp_path.glob("test_* *")]
    assert len(ran) == 6 * len(names)
    workers = {name: {at for of, _, at in ran if of == name} for name in names}
    assert all(len(at) == 1 for at in workers.values()), workers
    assert len(set.union(*workers.values())) == 2

"""What `pytest` alone runs, and in how many processes."""

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_cmdline_main

SOURCES = pytest.Config.ArgsSource


def started(given, source=SOURCES.TESTPATHS):
    """The options as the hook leaves them."""
    options = {"markexpr": "", "numprocesses": None, "usepdb": False, "dist": "no"}
    option = SimpleNamespace(**options | given, loadgroup=False)
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
    assert option.loadgroup

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


def test_alone_it_leaves_slow_tests_out_on_two_workers():
    option = started({})
    assert (option.markexpr, option.numprocesses) == ("not slow", 2)
    assert option.dist == "loadgroup"


def test_a_worker_starts_no_workers(monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    option = started({})
    assert (option.markexpr, option.numprocesses) == ("not slow", None)
    assert option.loadgroup


@pytest.mark.parametrize("given", [{"numprocesses": 0}, {"usepdb": True}])
def test_who_asks_for_one_process_gets_it(given):
    assert started(given).numprocesses != 2


def test_who_names_files_or_marks_gets_what_they_say():
    assert started({}, SOURCES.ARGS).markexpr == ""
    assert started({"markexpr": "slow"}).numprocesses is None

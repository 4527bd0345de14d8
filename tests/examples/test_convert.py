"""An ordinary torch script and the same one moved over: ten lines, the same losses."""

import difflib
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

import fsfunc as ff
from tests.examples.programs import ROOT

CONVERT = ROOT / "examples" / "convert"
ORDINARY, SHARDED = CONVERT / "ordinary.py", CONVERT / "sharded.py"


def code(script: Path) -> list[str]:
    """The lines below the docstring, without blank ones."""
    _, _, below = script.read_text().split('"""', 2)
    return [line for line in below.splitlines() if line.strip()]


def main_of(script: Path, **names: object) -> Callable[[], list[float]]:
    """A script's main, where its globals are these."""
    main = runpy.run_path(str(script))["main"]
    main.__globals__.update(names)
    return main


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """What the ordinary script finds."""
    return main_of(ORDINARY)()


def sharded(ranks: int, **names: object) -> list[list[float]]:
    """What each of some simulated ranks finds."""
    mesh = ff.make_mesh({"data": ranks}, "simulated")
    return ff.spmd(main_of(SHARDED, mesh=mesh, **names), mesh)()


@pytest.fixture(scope="module")
def two() -> list[list[float]]:
    return sharded(2)


def test_ten_lines_are_new() -> None:
    lines = difflib.ndiff(code(ORDINARY), code(SHARDED))
    kinds = [line[0] for line in lines if line[0] in "+-"]
    assert kinds.count("+") <= 10
    assert kinds.count("-") <= 11  # a training loop is shorter as a step


def test_ranks_find_the_same_losses(expected: list[float], two: list) -> None:
    """One rank the same bits; and it learns."""
    assert expected[0] == pytest.approx(1.4, abs=0.1)  # of four kinds, log 4
    assert sum(expected[-5:]) / 5 < 0.5
    assert sharded(1, STEPS=12) == [main_of(ORDINARY, STEPS=12)()]
    first, other = two
    assert first == pytest.approx(expected, abs=1e-6) and other == first


@pytest.mark.processes
def test_processes_print_the_losses_of_simulated_ranks(processes, two: list) -> None:
    printed = [f"step {i:2}  loss {loss:.4f}" for i, loss in enumerate(two[0])]
    assert processes(SHARDED, 2).splitlines() == 2 * printed

"""The mixture of experts as its user runs it."""

import re
from pathlib import Path

import pytest

from tests.programs import forked

SCRIPT = Path(__file__).parents[2] / "examples" / "moe.py"


def errors(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"error (\d+\.\d{4})", out)]


def run(*options: str) -> str:
    done = forked(SCRIPT, *options, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--ranks 2 --capacity 0"])
def test_experts_learn_what_they_divide(options: str) -> None:
    out = run(*options.split(), "--steps", "60")
    first, *_, last = errors(out)
    assert last < first / 10
    counts = [int(x) for x in re.findall(r"\u2502 \d \s*\u2502 \d\s*\u2502 (\d+)", out)]
    assert sum(counts) == 2 * 512
    if "--capacity 0" in options:
        assert set(re.findall(r"dropped (\d+)", out)) == {"0"}
    if not options:  # 3 all-to-alls: the tokens themselves are not differentiated
        assert "46,080 bytes" in out


@pytest.mark.slow
def test_experts_that_ranks_cannot_share_are_refused() -> None:
    done = forked(SCRIPT, "--experts", "6", timeout=300)
    assert done.returncode == 2
    assert "--experts must be a multiple of the 4 ranks" in done.stderr


@pytest.mark.processes
def test_processes_train_like_simulated_ranks(processes) -> None:
    out = processes(SCRIPT, 2, "--steps", "10")
    assert errors(out) == errors(run("--ranks", "2", "--steps", "10"))

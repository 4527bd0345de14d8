"""The vocabulary benchmark runs, and sees the memory that whole logits take."""

import json
from pathlib import Path

import pytest

from tests.programs import forked

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "vocabulary.py"


@pytest.mark.processes
def test_a_small_run_measures_every_side():
    sizes = ["--tokens", "256", "--features", "8", "--classes", "65536"]
    done = forked(BENCHMARK, *sizes, "--rounds", "2", timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["seconds"]) == {"plain", "ours", "again"}
    assert found["peak"]["plain"] > 2 * 4 * 256 * 65536

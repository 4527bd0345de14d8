"""The library's own work grows no faster than units, leaves and ranks do."""

import json
from pathlib import Path

import pytest

from tests.programs import forked

pytestmark = pytest.mark.slow  # a program of its own

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"


def test_calls_grow_with_an_exponent_of_one(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    done = forked(SCRIPT, "--quick", "--json", path, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert len(found) == 6
    for series in found:
        assert series["exponent"] <= 1.05, series

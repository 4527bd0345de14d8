"""The checkpoint and vocabulary benchmarks run, and measure what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.programs import forked

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FORKED = Path(__file__).with_name("forked.py")


@pytest.mark.processes
def test_quick_run_measures_every_row(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    options = ["--folder", str(tmp_path / "disk"), "--json", str(tmp_path / "json")]
    script = BENCHMARKS / "checkpoints.py"
    done = forked(FORKED, script, "--quick", *options, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "json").read_text())
    names = [(row["ours"], row["theirs"]) for row in record["rows"]]
    assert names == [
        ("save", "dd write"),
        ("load", "dd read"),
        ("save", "dcp save"),
        ("load", "dcp load"),
        ("load in place", "dcp load"),
        ("load in place", "dd read"),
        ("save_async", "save"),
    ]
    for row in record["rows"]:
        assert math.isfinite(row["ratio"]) and row["ratio"] > 0
        assert row["what"] in done.stdout
    # Parameters and two moments; DCP's files have as much in them.
    assert record["bytes"] >= 12 * record["parameters"]
    assert record["dcp_bytes"] >= 12 * record["parameters"]
    assert not list((tmp_path / "disk").iterdir())


BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "vocabulary.py"


@pytest.mark.processes
def test_a_small_run_measures_every_side():
    sizes = ["--tokens", "256", "--features", "8", "--classes", "65536"]
    done = forked(BENCHMARK, *sizes, "--rounds", "2", timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["seconds"]) == {"plain", "ours", "again"}
    assert found["peak"]["plain"] > 2 * 4 * 256 * 65536

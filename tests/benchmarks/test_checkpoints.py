"""The checkpoint benchmark runs: every row of its table is there, and measured."""

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

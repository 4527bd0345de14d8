"""What the kernel counts between two hosts is what the ledger says, and headers."""

import json
from pathlib import Path

import pytest

from tests.programs import forked

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FORKED = Path(__file__).with_name("forked.py")


@pytest.mark.slow  # four processes
@pytest.mark.processes
def test_the_kernel_counts_the_ledgers_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bytes.json"
    args = ["--bytes", "--only", "hybrid", "--json", path]
    done = forked(FORKED, BENCHMARKS / "hosts.py", *args, timeout=90)
    if "no hosts can be made here" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(path.read_text())
    width, layers, vocabulary = 128, 4, 256
    parameters = layers * (12 * width**2 + 2 * width) + 2 * vocabulary * width
    # Two pairs of ranks all-reduce a half each; a loss and its weight go to two ranks.
    assert record["ledger"]["node"] == 2 * 4 * parameters
    assert record["crossed"] == record["ledger"]["node"] + 4 * 2 * 8
    # Two or three headers of gloo's a message, and what TCP sent twice.
    rest = record["stream"] - record["crossed"]
    least = 2 * 48 * record["messages"]
    assert least <= rest <= 1.5 * least + 1448 * record["repeated"]
    assert record["frames"] < 1.15 * record["crossed"]

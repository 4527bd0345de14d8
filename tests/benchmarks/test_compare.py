"""The benchmarks run: every row of the table is there, and measured."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from tests.programs import forked

pytestmark = pytest.mark.slow  # programs of their own

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


KEYS = """
    one_device remat zero0 zero1 zero2 zero3 zero3_remat zero3_memory zero3_remat_memory
    zero0_memory zero1_memory zero2_memory jit jit_zero0 jit_zero3 jit_zero3_remat
    jit_zero3_memory jit_whole jit_whole_zero0 jit_whole_zero3 jit_whole_zero3_remat
    jit_whole_zero3_memory pipeline_1f1b pipeline_zb_v pipeline_gpipe
    pipeline_interleaved pipeline_1f1b_memory pipeline_zb_v_memory tensor_parallel
    sequence_parallel tensor_parallel_memory sequence_parallel_memory sharded_adam
    unit_call import example
""".split()


ABSOLUTE = {"import", "example"}
SPLIT_STEPS = ["tensor_parallel", "sequence_parallel"]
STEPS = {
    "one_device", "remat", "zero0", "zero1", "zero2", "zero3", "zero3_remat",
    *SPLIT_STEPS,
}  # fmt: skip
PIPELINED = [key for key in KEYS if key.startswith("pipeline")]
PIPELINED_STEPS = [key for key in PIPELINED if not key.endswith("memory")]
# One row at least of each group that is measured together; other schedules are
# rehearsed by the peers below.
FORKS = [
    "one_device", "zero0", "zero3", "zero3_memory", "pipeline_1f1b", *SPLIT_STEPS,
    "unit_call", "example",
]  # fmt: skip
OWN = ["sharded_adam", "import"]  # by processes of their own


FORKED = Path(__file__).with_name("forked.py")


def run(
    script: str, *args: str, timeout: float, own: bool = False
) -> subprocess.CompletedProcess[str]:
    """A benchmark; its workers are forks, or processes of their ``own``.

    Alone, a rehearsal takes under a minute; limits leave room for a busy machine.
    """
    start = [] if own else [FORKED]
    return forked(*start, BENCHMARKS / script, *args, timeout=timeout)


def compare(
    path: Path, keys: list[str], *more: str, timeout: float, own: bool = False
) -> dict:
    """What a rehearsal of the rows `keys` writes as JSON; it must print them too."""
    only = ["--only", ",".join(keys), "--json", str(path)]
    done = run("compare.py", "--quick", *only, *more, timeout=timeout, own=own)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert [row["key"] for row in record["rows"]] == keys
    assert all(row["what"] in done.stdout for row in record["rows"])
    return record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("compare") / "forks.json"
    return compare(path, FORKS, timeout=300)


def sent_bytes(record: dict, key: str) -> dict[str, int]:
    """Of the steps that a row is of, by each competitor."""
    groups = record["measured"]
    (found,) = (m for name, m in groups.items() if key in m and name != "memory")
    return {name: m["sent_bytes"] for name, m in found.items()}


@pytest.mark.processes
def test_quick_comparison_measures_every_group(tmp_path: Path, record: dict) -> None:
    own = compare(tmp_path / "own.json", OWN, timeout=120, own=True)
    for row in record["rows"] + own["rows"]:
        wanted = ["ours"] if row["key"] in ABSOLUTE else ["ours", "theirs", "ratio"]
        if row["key"] in STEPS or row["key"] in PIPELINED_STEPS:
            wanted += ["pure_ratio", "ours_to_floor"]
        for figure in wanted:
            value = row[figure]
            assert value is not None and math.isfinite(value), (row["key"], figure)


@pytest.mark.processes
def test_bytes_sent_are_those_of_the_scheme(record: dict) -> None:
    # Both gather the blocks twice and the rest once: FSDP2's root stays gathered; here
    # an embedding's backward reads no parameter and the last unit stays gathered.
    # Besides, one psum of the loss and its weight: 2α·2·4 bytes, α = 1/2.
    more = {("zero0", "ddp"): 8, ("zero3", "fsdp2"): 8}
    size = record["settings"]["size"]
    tokens = 2 * size["sequences"] * size["length"]
    # The closed form leaves out the loss (the largest logit, two sums) and, where
    # sequences are split, each norm's gradient: sums of n numbers send 2α·4n, α = 1/2.
    loss, norms = 3 * 4 * tokens, 2 * size["layers"] * 4 * size["width"]
    for key, of_norms in zip(SPLIT_STEPS, (0, norms), strict=True):
        more[key, f"torch_{key}"] = loss + of_norms
    for (ours, theirs), extra in more.items():
        sent = sent_bytes(record, ours)
        assert sent[ours] - sent[theirs] == extra, sent


def test_an_unknown_row_is_refused_with_the_names() -> None:
    done = run("compare.py", "--only", "zero9", timeout=60)
    assert done.returncode == 2
    assert "no row zero9" in done.stderr and ", ".join(KEYS) in done.stderr


def test_gpu_benchmark_rehearses_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = run(
        "gpu.py", "--device", "cpu", "--rounds", "2", "--json", str(path), timeout=120
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(path.read_text())["measured"]
    assert set(measured) >= {"plain", "fsdp2", "zero0", "zero3", "zero3_remat"}
    assert all(m["tokens_per_second"] > 0 for m in measured.values())

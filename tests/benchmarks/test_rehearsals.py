"""Benchmarks run, quickly: every row is there, measured and printed; what is exact is.

Alone, a rehearsal takes under a minute; limits leave room for a busy machine.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.programs import environment, forked

pytestmark = pytest.mark.slow  # programs of their own

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FORKED = Path(__file__).with_name("forked.py")


@pytest.fixture
def rehearsed(tmp_path):
    """A function: what a benchmark writes as JSON; it prints each row's words too."""

    def run(script: str, *args: str, forks: bool = True, timeout: float = 120, **more):
        start, path = [FORKED] if forks else [], tmp_path / "json"
        given = [*start, BENCHMARKS / script, *args, "--json", path]
        done = forked(*given, timeout=timeout, **more)
        if "no hosts can be made here" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        record = json.loads(path.read_text())
        if isinstance(record, dict):
            assert all(row["what"] in done.stdout for row in record.get("rows", ()))
            assert all(word in done.stdout for word in record.get("words", {}).values())
        return record

    return run


# Beside peers

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
STEPS |= {key for key in KEYS if key[:8] == "pipeline" and key[-6:] != "memory"}
# One row at least of each group that is measured together.
MEASURED = [
    "one_device", "zero0", "zero3", "zero3_memory", "pipeline_1f1b", *SPLIT_STEPS,
    "sharded_adam", "unit_call", "import", "example",
]  # fmt: skip


@pytest.mark.processes
def test_a_comparison_measures_every_group_and_the_bytes_of_the_scheme(rehearsed):
    given = "--quick", "--rounds", "1", "--only", ",".join(MEASURED)
    record = rehearsed("compare.py", *given, timeout=300)
    assert [row["key"] for row in record["rows"]] == MEASURED
    for row in record["rows"]:
        wanted = ["ours"] if row["key"] in ABSOLUTE else ["ours", "theirs", "ratio"]
        wanted += ["pure_ratio", "ours_to_floor"] if row["key"] in STEPS else []
        for figure in wanted:
            value = row[figure]
            assert value is not None and math.isfinite(value), (row["key"], figure)
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
        groups = record["measured"].items()
        (found,) = (m for name, m in groups if ours in m and name != "memory")
        sent = {name: m["sent_bytes"] for name, m in found.items()}
        assert sent[ours] - sent[theirs] == extra, sent


def test_an_unknown_row_is_refused_with_the_names():
    done = forked(FORKED, BENCHMARKS / "compare.py", "--only", "zero9", timeout=60)
    assert done.returncode == 2
    assert "no row zero9" in done.stderr and ", ".join(KEYS) in done.stderr


def test_a_rehearsal_of_all_says_which_programs_failed(tmp_path):
    """Its programs are forks, of one process or of two; each has its own words."""
    broken = """
        import runpy, sys
        import benchmarks.__main__ as all

        all.BENCHMARKS["searching"].quick[:] = ["searching.py", "--no-such-word"]
        sys.argv = ["benchmarks", "--quick", "vocabulary", "muon", "searching"]
        sys.exit(all.main())
    """
    path = tmp_path / "broken.py"
    path.write_text(textwrap.dedent(broken))
    done = subprocess.run(
        [sys.executable, path],
        cwd=BENCHMARKS.parent,
        env=environment() | {"PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "failed: quick searching"
    for name, word in (("vocabulary", '"peak"'), ("muon", "bytes sent by a rank")):
        text = (BENCHMARKS / "results" / f"quick {name}.txt").read_text()
        assert word in text and text in done.stdout
    assert "unrecognized arguments: --no-such-word" in done.stdout


# On a card, as far as a machine without one can tell

ON_CPU = ("gpu.py", "--device", "cpu", "--rounds", "2")
ONLY = ("--only", "offload,zero3_remat")
NO_CARD = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.processes
def test_pairs_for_a_gpu_are_measured_planned_and_written(rehearsed):
    found = rehearsed(*ON_CPU, *ONLY, forks=False, timeout=240)["pairs"]
    assert set(found) == {"offload", "zero3_remat"}
    for pair in found.values():
        mine, theirs = pair["sides"]
        assert pair["ratio"] > 0 and "error" not in pair
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=2e-3)
        foreseen = mine["foreseen"]
        assert foreseen["seconds"]["sheet"] > 0 and foreseen["peak_bytes"] > 0
        assert foreseen["of the CPU's tensors"]["flops"] == foreseen["flops"]
    mine = found["offload"]["sides"][0]["foreseen"]
    # Parameters once at least, each way.
    assert mine["crossing_bytes"] > 2 * 4 * found["offload"]["parameters"]


@pytest.mark.processes
def test_pairs_that_fail_or_are_late_do_not_stop_the_others(tmp_path):
    script, path = BENCHMARKS / "gpu.py", tmp_path / "json"

    def failing(*args):
        given = [script, "--only", "zero0,zero3", "--json", path, *args]
        done = forked(*given, timeout=120, **NO_CARD)
        assert done.returncode == 1 and "0 of 2 pairs" in done.stdout
        errors = [
            one["error"] for one in json.loads(path.read_text())["pairs"].values()
        ]
        assert len(errors) == 2
        assert all(f"FAILED {error}" in done.stdout for error in errors)
        return errors

    assert all("sees no CUDA device" in error for error in failing())
    late = failing("--device", "cpu", "--pair-limit", "0.1")
    assert all("not over in 0 seconds" in error for error in late)
    over = failing("--device", "cpu", "--limit", "0")
    assert over == ["not begun: the time was over"] * 2


@pytest.mark.processes
def test_the_parts_for_a_gpu_end_each_in_their_own_way(tmp_path):
    """Run, failed, and cut off; the table says which."""

    def table(*args):
        given = ["bash", BENCHMARKS / "gpu.sh", *args, tmp_path]
        more = environment(PYTHON=sys.executable, **NO_CARD)
        done = subprocess.run(
            list(map(str, given)), env=more, capture_output=True, text=True, timeout=200
        )
        summary = (tmp_path / "summary.txt").read_text()
        assert done.stdout.endswith(summary), done.stderr
        lines = [line.split(maxsplit=1) for line in summary.splitlines()[1:]]
        return done.returncode, dict(lines)

    code, rows = table("--device", "cpu", "--parts", "readme,state")
    assert list(rows) == ["readme", "state"]
    assert re.fullmatch(r"ok +\d+ +(\d+) of \1 ok", rows["readme"].strip())
    assert rows["state"].startswith("ok ") and code == 0
    code, rows = table("--parts", "state")
    assert rows["state"].startswith("failed ") and code == 1
    assert "sees no CUDA device" in rows["state"]
    parts = ("--parts", "state,compiled", "--seconds", "8")
    code, rows = table("--device", "cpu", *parts)
    assert rows["compiled"].startswith(("timed out ", "not run ")) and code == 1


@pytest.mark.processes
def test_checkpoints_are_measured_and_gone_again(rehearsed, tmp_path):
    (tmp_path / "disk").mkdir()
    record = rehearsed("checkpoints.py", "--quick", "--folder", str(tmp_path / "disk"))
    names = [f"{row['ours']} by {row['theirs']}" for row in record["rows"]]
    assert names == [
        "save by dd write", "load by dd read", "save by dcp save", "load by dcp load",
        "load in place by dcp load", "load in place by dd read", "save_async by save",
    ]  # fmt: skip
    assert all(0 < row["ratio"] < math.inf for row in record["rows"])
    # Parameters and two moments; DCP's files have as much in them.
    assert record["bytes"] >= 12 * record["parameters"]
    assert record["dcp_bytes"] >= 12 * record["parameters"]
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.processes
def test_a_large_vocabulary_is_measured_on_every_side():
    sizes = ["--tokens", "256", "--features", "8", "--classes", "65536"]
    script = BENCHMARKS / "vocabulary.py"
    done = forked(script, *sizes, "--rounds", "2", timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["seconds"]) == {"plain", "ours", "again"}
    assert found["peak"]["plain"] > 2 * 4 * 256 * 65536


@pytest.mark.processes
def test_the_kernel_counts_the_ledgers_bytes_between_hosts(rehearsed):
    """And headers."""
    (record,) = rehearsed("hosts.py", "--bytes", "--only", "hybrid")
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


def test_the_librarys_own_work_grows_no_faster_than_units_leaves_and_ranks(rehearsed):
    found = rehearsed("scaling.py", "--quick", forks=False)
    assert len(found) == 6
    for series in found:
        assert series["exponent"] <= 1.05, series


# Published numbers

PUBLISHED = [
    "175B_hidden", "175B_exposed", "1T_hidden", "1T_exposed",
    *(f"zero{zero}_{of}" for zero in range(4) for of in ("formula", "plan")),
    *(f"{size}_{card}" for size in ("13B", "175B") for card in ("V100-32", "A100-40")),
]  # fmt: skip


def test_small_models_have_the_published_rows_and_the_zero_table_is_exact(rehearsed):
    record = rehearsed("published.py", "--quick", forks=False, COLUMNS="200")
    rows = {row["key"]: row for row in record["rows"]}
    assert list(rows) == PUBLISHED
    for row in rows.values():
        assert math.isfinite(row["predicted"]) and row["predicted"] > 0
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"])
    formulas = [rows[f"zero{zero}_formula"] for zero in range(4)]
    assert [row["published"] for row in formulas] == [120, 31.4, 16.6, 1.9]
    assert [row["predicted"] for row in formulas] == [120, 31.40625, 16.640625, 1.875]
    # Bytes a parameter of ours, on 64 ranks: whole, and over the ranks.
    for zero, (whole, parts) in enumerate([(16, 0), (2, 16), (2, 16), (0, 16)]):
        expected = 7.5 * (whole + parts / 64)
        # Two layers are padded to 64 parts, and hold a few scalars beside.
        found = rows[f"zero{zero}_plan"]["predicted"]
        assert found == pytest.approx(expected, rel=0.02), zero
    kinds = [(row["gpus"], row["compiled"]) for row in record["reserved"]]
    assert kinds == [(8, False), (8, True), (128, False), (128, True)]
    for row in record["reserved"]:
        assert 0 < row["held_gib"] <= row["reserved_gib"]
    assert len(record["fitting"]) == 9  # of 62
    for row in record["fitting"]:
        assert 0 < row["held"] <= row["needed"] and row["fits"]
    for planned, formula in record["flops"].values():
        assert planned == pytest.approx(formula, rel=1e-12)


def test_a_trillion_parameters_are_planned_in_seconds_and_fit_this_machine(tmp_path):
    """As `published.py` plans them, which computes all other rows alike."""
    path = tmp_path / "large.json"
    done = forked("-c", LARGE, path, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["seconds"] <= 10
    assert found["process_bytes"] <= 2 * 2**30
    planned, formula = found["flops"]
    assert planned == pytest.approx(formula, rel=1e-12)
    # 16 bytes a parameter, as in the paper
    assert found["held"] == pytest.approx([120, 1.875], rel=1e-5)
    # Nobody computes faster than the card, and hiding transfers cannot slow a step.
    assert found["exposed"] < found["hidden"] < 312
    assert found["13B"] < 32e9


LARGE = f"""
import json, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
import published as p

large = p.planned(p.GPT_1T, 128, adam=False)
flops = p.computed_flops(p.GPT_1T)
hidden = p.estimate(large.plan, p.A100_40).seconds
exposed = p.estimate(large.plan, replace(p.A100_40, overlap=0.0)).seconds
deep = [p.planned(replace(p.GPT_13B, layers=n), 8).plan.peak_bytes for n in (4, 6)]
held, few = [], replace(p.GPT_7B, layers=4)  # bytes a parameter, of any depth
for zero in (0, 3):
    found = p.planned(few, p.ZERO_RANKS, zero=zero).plan
    bytes_of = sum(p.model_states(found)[0].values())
    held.append(bytes_of * p.ZERO_PSI / p.parameters(few) / 1e9)
Path(sys.argv[1]).write_text(json.dumps({{
    "seconds": large.seconds,
    "flops": [large.plan.flops, flops],
    "hidden": flops / hidden / 1e12,
    "exposed": flops / exposed / 1e12,
    "held": held,
    "13B": deep[1] + (deep[1] - deep[0]) * (40 - 6) // 2,  # each layer adds as much
    "process_bytes": p._most_memory(),
}}))
"""

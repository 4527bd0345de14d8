"""The benchmark of published numbers runs, and its exact figures are exact."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.programs import forked

pytestmark = pytest.mark.slow  # programs of their own

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEYS = [
    "175B_hidden",
    "175B_exposed",
    "1T_hidden",
    "1T_exposed",
    *(f"zero{zero}_{of}" for zero in range(4) for of in ("formula", "plan")),
    *(f"{size}_{card}" for size in ("13B", "175B") for card in ("V100-32", "A100-40")),
]


def published(path: Path, *args: str) -> dict:
    """What a run writes as JSON; it must print every row and all words too."""
    script = BENCHMARKS / "published.py"
    done = forked(script, "--json", path, *args, timeout=120, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert [row["key"] for row in record["rows"]] == KEYS
    assert all(row["what"] in done.stdout for row in record["rows"])
    assert all(words in done.stdout for words in record["words"].values())
    for row in record["rows"]:
        assert math.isfinite(row["predicted"]) and row["predicted"] > 0
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"])
    record["by_key"] = {row["key"]: row for row in record["rows"]}
    return record


def test_small_models_have_the_same_rows_and_the_zero_table_is_exact(tmp_path):
    record = published(tmp_path / "quick.json", "--quick")
    rows = record["by_key"]
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
    assert len(record["fitting"]) == 62
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
held = []
for zero in (0, 3):
    found = p.planned(p.GPT_7B, p.ZERO_RANKS, zero=zero).plan
    bytes_of = sum(p.model_states(found)[0].values())
    held.append(bytes_of * p.ZERO_PSI / p.parameters(p.GPT_7B) / 1e9)
Path(sys.argv[1]).write_text(json.dumps({{
    "seconds": large.seconds,
    "flops": [large.plan.flops, flops],
    "hidden": flops / hidden / 1e12,
    "exposed": flops / exposed / 1e12,
    "held": held,
    "13B": p.planned(p.GPT_13B, 8).plan.peak_bytes,
    "process_bytes": p._most_memory(),
}}))
"""

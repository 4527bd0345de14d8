"""Closed forms of published runs, and how far the estimates of them are off."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def pr():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from literature import published_runs  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(BENCHMARKS))
    return published_runs


@pytest.fixture(scope="module")
def runs(pr):
    return pr.runs_of(pr.CALIBRATION)


def test_the_ten_are_nearer_than_the_rule_of_thumb_says(pr, runs):
    rows = [pr.judged(run) for run in runs]
    assert len(rows) == 10
    assert mean(abs(j.error) for j in rows) <= 0.04
    for name, _, ours, rough, _ in pr.summary(rows):  # of all, each GPU and kind
        assert ours < rough, name
    assert sum(j.inside for j in rows) >= 9
    assert max(j.found.high / j.found.low for j in rows) < 1.4
    right, pairs = pr.in_order(rows)
    assert pairs and right >= 0.8 * pairs


@pytest.mark.slow  # the ten fitted ten times
def test_a_run_that_was_left_out_is_nearly_as_near(pr, runs):
    assert mean(map(abs, pr.left_out(runs))) <= 0.06


@pytest.mark.slow
def test_what_hardware_has_is_what_the_ten_fit(pr, runs):
    for card in ("A100-80", "H100-80"):
        some = [r for r in runs if r.hardware == card]
        share = pr.machine_of(some[0]).efficiency[0][1]
        assert pr.fitted(some) == pytest.approx(share, rel=0.01)


def test_flops_are_those_of_the_model(pr, runs):
    run = next(r for r in runs if r.model == "mpt-7b")
    found = pr.plan_of(run).flops
    h, tokens = run.hidden, run.tokens / run.gpus
    products = run.layers * (4 * h * h + 2 * h * run.ffn) + run.vocab * h
    attention = run.layers * 4 * run.seq * h  # forward; backward two and a half times
    assert found == pytest.approx(tokens * (6 * products + 3.5 * attention), rel=1e-12)


def test_what_travels_is_that_of_fsdp(pr, runs):
    plain = next(r for r in runs if r.source == "torchtitan" and r.remat == "none")
    n, psi = plain.gpus, plain.params
    sent = sum(float(e.record.bytes) for e in started(pr.plan_of(plain)))
    # Two gathers of 2 bytes but for the root's, which stays; one reduction of 4.
    bytes_each = 2 * (2 * psi - plain.root_params) + 4 * psi
    assert sent == pytest.approx((n - 1) / n * bytes_each, rel=1e-6)
    hybrid = next(r for r in runs if r.strategy == "HSDP-8")
    across = [e.record for e in started(pr.plan_of(hybrid)) if e.record.op == "psum"]
    copies = hybrid.gpus // 8
    share = 2 * 2 * hybrid.params / 8 * (copies - 1) / copies
    assert sum(float(r.bytes) for r in across) == pytest.approx(share, rel=1e-6)


def started(plan):
    return [e for e in plan.ranks[0].events if getattr(e, "record", None)]


def test_remat_is_computed_again_and_costs_time(pr, runs):
    run = next(r for r in runs if r.remat == "full")
    plans = {
        kind: pr.plan_of(replace(run, remat=kind))
        for kind in ("none", "selective op", "every second layer", "full")
    }
    again = {k: p.ranks[0].flops(phase="recompute") for k, p in plans.items()}
    assert again["none"] == 0 < again["selective op"] < again["full"]
    assert 2 * again["every second layer"] == again["full"]
    forward = plans["full"].ranks[0].flops(phase="forward")
    head = 2 * run.vocab * run.hidden
    last = 2 * run.layers * run.ffn * run.hidden  # which no derivative reads
    tokens = run.batch_per_gpu * run.seq
    assert again["full"] == forward - tokens * (head + last)


def test_eight_bits_are_faster_and_not_twice(pr, runs):
    run = next(r for r in runs if r.hardware == "H100-80")
    slow, fast = (pr.judged(replace(run, compute=c)).predicted for c in ("bf16", "fp8"))
    assert slow < fast < 2 * slow


def test_a_file_of_ones_own_is_judged(pr, runs, tmp_path, capsys):
    lines = pr.CALIBRATION.read_text().splitlines()
    path = tmp_path / "own.csv"
    path.write_text("\n".join(lines[:4]) + "\n")
    (row,) = pr.show(path)
    published = float(lines[3].rsplit(",", 1)[1])
    assert row["log"] == pytest.approx(math.log(row["predicted"] / published))
    assert "1 runs: mean |log|" in capsys.readouterr().out
    path.write_text("\n".join([lines[2], lines[3].replace("none", "some")]) + "\n")
    with pytest.raises(ValueError, match="remat 'some'"):
        pr.show(path)

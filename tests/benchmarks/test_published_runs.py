"""Closed forms of published runs, and how far the estimates of them are off."""

from __future__ import annotations

import sys
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

"""Measuring this machine: what comes out describes it, on every rank alike."""

import time

import pytest
import torch

import fsfunc as ff
from fsfunc.planning.calibration import measure_hardware, middle, peaked
from fsfunc.planning.hardware import Level
from fsfunc.planning.rank_timing import line


@pytest.fixture(scope="module")
def machine():
    return measure_hardware(name="here", seconds=1.0)


@pytest.mark.slow  # other programs may run
def test_it_describes_this_machine(machine):
    assert machine.name == "here" and machine.levels == () and machine.overlap == 1
    assert set(machine.peak) == {"float32", "float64", "bfloat16", "float16"}
    assert max(share for _, share in machine.efficiency) == 1
    assert machine.peak["float32"] > machine.peak["float64"]
    assert 1e-8 < machine.overhead < 1e-3 and machine.memory > 2**28
    x, best = torch.randn(512, 512), float("inf")
    out = torch.empty_like(x)
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(x, x, out=out)
        best = min(best, time.perf_counter() - start)
    peak = machine.peak["float32"] * machine.efficiency_at(512)
    assert 0.3 < 2 * 512**3 / peak / best < 3


def test_operators_are_measured_under_the_names_that_plans_have(machine):
    names = {"aten.gelu", "aten._log_softmax", "aten.native_layer_norm", "aten.add"}
    names |= {"aten.embedding_dense_backward", "aten._fused_adamw_", "aten.copy_"}
    assert names <= set(machine.rates)
    # What computes for long is not taken for a copy.
    assert machine.rates["aten.tanh"] < machine.rates["aten.copy_"]


def test_the_largest_rate_is_the_peak():
    """Also where the passes had theirs at other sizes."""
    fields = {"peak": {"float32": 8.0}, "efficiency": [(64, 0.25), (128, 0.5)]}
    expected = {"peak": {"float32": 4.0}, "efficiency": [(64, 0.5), (128, 1.0)]}
    assert peaked(fields) == expected


def test_a_disturbed_pass_is_not_in_the_median():
    level = lambda b: (Level(0, b, 1.0),)  # noqa: E731
    passes = [
        {"overhead": 1.0, "rates": {"a": 5.0}, "levels": level(2.0), "fresh": None},
        {"overhead": 9.0, "rates": {"a": 0.1}, "levels": level(0.1), "fresh": 2.0},
        {"overhead": 1.1, "rates": {"a": 5.1}, "levels": level(2.1), "fresh": None},
    ]
    found = middle(passes)
    assert found["overhead"] == 1.1 and found["rates"] == {"a": 5.0}
    assert found["levels"] == [Level(0, 2.0, 1.0)] and found["fresh"] is None


def test_a_line_has_its_start_and_slope():
    start, slope = line([1.0, 10.0, 100.0], [2.5, 7.0, 52.0])
    assert start == pytest.approx(2.0) and slope == pytest.approx(0.5)
    # A tenth off in the largest does not drown what the smallest say.
    start, slope = line([1.0, 10.0, 1000.0], [3.0, 21.0, 2201.0])
    assert start == pytest.approx(1.0, abs=0.5) and slope == pytest.approx(2, rel=0.12)
    # Somebody else had the machine while the smallest was timed.
    assert line([1.0, 10.0, 100.0], [90.0, 70.0, 50.0]) == (0.0, 0.5)


def test_what_is_refused():
    with pytest.raises(ValueError, match="seconds is above 0, got 0"):
        measure_hardware(seconds=0)
    mesh = ff.make_mesh({"data": 2}, "simulated")
    with pytest.raises(ValueError, match="no processes, so there are no links"):
        ff.spmd(lambda: measure_hardware(seconds=0.1), mesh)()


@pytest.mark.processes
def test_ranks_measure_their_links_and_agree(processes):
    out = processes(
        """
        import torch
        import torch.distributed as dist
        import fsfunc as ff
        from fsfunc.planning import calibration
        from fsfunc.planning.hardware import to_json

        calibration.PASSES = 1
        measure_hardware = calibration.measure_hardware
        torch.set_num_threads(1)
        mesh = ff.make_mesh({"data": 2}, "processes")
        with ff.ledger() as log:
            found = ff.spmd(lambda: measure_hardware(seconds=1.0), mesh)()[0]
        (level,) = found.levels
        alike = [None, None]
        dist.all_gather_object(alike, to_json(found))
        print(
            alike[0] == alike[1],
            len(log.records),
            level.ranks,
            1e6 < level.bandwidth < 1e12,
            {"all_gather", "psum_scatter", "psum"} <= set(found.rates),
            0 <= found.overlap <= 1,
            flush=True,
        )
        dist.destroy_process_group()
        """,
        2,
    )
    assert out.splitlines() == ["True 0 0 True True True"] * 2

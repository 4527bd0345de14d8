"""Hardware: what it refuses and reads back, the given ones, and this machine."""

import copy
import math
import os
import pickle
import time
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.planning import calibration
from fsfunc.planning import hardware as hw
from fsfunc.planning.calibration import (
    fit_line,
    measure_hardware,
    medians,
    rescale_to_peak,
)
from fsfunc.planning.hardware import Hardware, Level
from fsfunc.planning.timed_calls import Stopwatch
from tests.checks import all_refused
from tests.probes import Watch

FIELDS = dict(
    name="mine",
    peak={"float32": 1e11},
    efficiency=[(64, 0.2), (1024, 0.8)],
    attention=0.4,
    bandwidth=2e10,
    overhead=1e-6,
    levels=[Level(8, 3e9, 1e-5), Level(0, 1e9, 2e-5)],
    memory=2**34,
    rates={"aten.gelu": 2e9},
    fresh=3e9,
)
MINE = Hardware(**FIELDS)


def test_is_a_value():
    peak = {"float32": 1e11}
    other = Hardware(**{**FIELDS, "peak": peak})
    peak["float32"] = 1.0
    assert other == MINE and hash(other) == hash(MINE) and {MINE: 1}[other] == 1
    assert MINE != hw.replace(MINE, rates={})
    assert copy.deepcopy(MINE) == MINE and pickle.loads(pickle.dumps(MINE)) == MINE
    with pytest.raises(TypeError):
        MINE.peak["float32"] = 1.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        MINE.memory = 1  # type: ignore[misc]


@pytest.mark.parametrize("known", hw.GIVEN, ids=lambda known: known.name)
def test_given_ones_are_read_back_and_found_by_name(known):
    assert hw.from_json(hw.to_json(known)) == known
    assert hw.named(known.name.lower().replace("-", "_")) is known
    for mine in (MINE, hw.replace(MINE, levels=())):
        assert hw.from_json(hw.to_json(mine)) == mine


PEKK = r'Hardware has no field "pekk" \(did you mean "peak"\?\)'


test_unknown_fields_and_names_are_refused_with_the_nearest = all_refused({
    "new": (lambda: Hardware(**FIELDS, pekk=1), TypeError, PEKK),
    "replaced": (lambda: hw.replace(MINE, pekk=1), TypeError, PEKK),
    "read": (lambda: hw.from_json('{"pekk": 1}'), TypeError, PEKK),
    "level": (lambda: Level(ranks=1, bandwidth=1.0, latencies=1.0), TypeError,
              'Level has no field "latencies".*"latency"'),
    "levels": (lambda: hw.from_json('{"levels": [{"rank": 8}]}'), TypeError,
               'Level has no field "rank"'),
    "a list": (lambda: hw.from_json("[]"), ValueError, "JSON object, got list"),
    "3": (lambda: hw.from_json('{"levels": 3}'), ValueError, "levels is a list"),
    "H300": (lambda: hw.named("H300"), ValueError,
             r'"H300".*"H[12]00".*A100-40, A100-80, H100'),
    "0 B/s": (lambda: Level(8, 0, 1e-6), ValueError, "bandwidth of a level.*0"),
    "-1 s": (lambda: Level(8, 1.0, -1), ValueError, "latency of a level.*-1"),
    "-8 ranks": (lambda: Level(-8, 1.0, 0), ValueError,
                 "ranks of a level is not below 0, got -8"),
    "1.5 ranks": (lambda: Level(1.5, 1.0, 0), ValueError, "whole number, got 1.5"),
})  # fmt: skip


VALUES = [
    ("peak", {"float32": 0.0}, r'peak\["float32"\] is finite and above 0, got 0.0'),
    ("peak", {"bf16": 1.0}, 'peak has no dtype "bf16".*bfloat16, float16'),
    ("peak", {}, "peak names no dtype"),
    ("efficiency", [], "efficiency has no point"),
    ("efficiency", [(64, 1.5)], "efficiency at size 64 is a share.*1.5"),
    ("efficiency", [(64, 0.0)], "efficiency at size 64 is finite and above 0"),
    ("efficiency", [(-1, 0.5)], "size of efficiency.*-1"),
    ("efficiency", [(64, 0.5), (32, 0.6)], "sorted by size.*32 after 64"),
    ("attention", 1.2, "attention is a share.*1.2"),
    ("bandwidth", -1.0, "bandwidth is finite and above 0, got -1.0"),
    ("bandwidth", math.inf, "bandwidth is finite"),
    ("bandwidth", "fast", "bandwidth is a number above 0, got 'fast'"),
    ("overhead", -1e-6, "overhead is finite and above 0"),
    ("memory", 0, "memory is finite and above 0"),
    ("overlap", 1.1, "overlap is a share, 0 to 1, got 1.1"),
    ("rates", {"aten.gelu": 0}, r'rates\["aten.gelu"\]'),
    ("fresh", 0.0, "fresh is finite"),
    ("stores", {"host": (0.0, 1.0, 1.0)}, r'stores\["host"\], of copies is finite'),
    ("stores", {"host": (1.0, -1.0, 1.0)}, r'stores\["host"\], of computing is finite'),
    ("levels", [Level(8, 1.0, 0), Level(8, 1.0, 0)], "8 after 8"),
    ("levels", [Level(0, 1.0, 0), Level(8, 1.0, 0)], "8 after 0"),
]


test_refuses_values = all_refused(
    [(partial(hw.replace, MINE, **{k: v}), ValueError, says) for k, v, says in VALUES]
)


def test_efficiency_between_the_points():
    assert MINE.efficiency_at(64) == 0.2 and MINE.efficiency_at(1024) == 0.8
    assert MINE.efficiency_at(256) == pytest.approx(0.5)  # the middle, in log
    assert MINE.efficiency_at(10**6) == 0.8
    assert MINE.efficiency_at(32) == pytest.approx(0.1)


@given(st.floats(1, 1e5), st.floats(1, 1e5))
def test_a_larger_product_is_never_less_efficient(a, b):
    low, high = sorted((a, b))
    for known in (*hw.GIVEN[:4], MINE):
        assert known.efficiency_at(low) <= known.efficiency_at(high) * (1 + 1e-12)
        # And a larger one never takes less time.
        assert low**3 / known.efficiency_at(low) <= (
            high**3 / known.efficiency_at(high) * (1 + 1e-12)
        )


# Measuring this machine


@pytest.mark.slow  # other programs may run
def test_it_describes_this_machine():
    machine = measure_hardware(name="here", seconds=2.0)
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


class Told(Stopwatch):
    """One by which a tanh takes 5 ms, and any other call 1 ms."""

    def __call__(self, call, share, batch=1):
        with Watch() as ran:
            call()
        return 0.005 if torch.ops.aten.tanh in ran.seen else 0.001


def test_what_the_process_holds_is_taken_off_the_memory(monkeypatch):
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setattr(calibration, "PASSES", 1)
    monkeypatch.setattr(calibration, "Stopwatch", Told)
    ballast = torch.ones(2**24)  # 64 MiB that this process holds already
    machine = measure_hardware()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert ballast.nbytes < machine.process < pages // 2
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    assert machine.memory + machine.process == pages // sharing
    assert machine.margin == hw.HOST_MARGIN == hw.CPU.margin


@pytest.mark.parametrize(
    ("threshold", "margin"),
    [("65536", hw.PINNED_MARGIN), ("33554432", hw.HOST_MARGIN), ("", hw.HOST_MARGIN)],
)
def test_a_host_whose_malloc_gives_memory_back_keeps_less_free(
    monkeypatch, threshold, margin
):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
    assert calibration._host_margin() == margin


def test_operators_are_measured_under_the_names_that_plans_have(monkeypatch):
    monkeypatch.setattr(calibration, "PASSES", 1)
    monkeypatch.setattr(calibration, "Stopwatch", Told)
    machine = measure_hardware()
    names = {"aten.gelu", "aten._log_softmax", "aten.native_layer_norm", "aten.add"}
    names |= {"aten.embedding_dense_backward", "aten._fused_adamw_", "aten.copy_"}
    assert names <= set(machine.rates)
    # What computes for long is not taken for a copy.
    assert 4 * machine.rates["aten.tanh"] < machine.rates["aten.copy_"]


def test_the_largest_rate_is_the_peak():
    """Also where the passes had theirs at other sizes."""
    fields = {"peak": {"float32": 8.0}, "efficiency": [(64, 0.25), (128, 0.5)]}
    expected = {"peak": {"float32": 4.0}, "efficiency": [(64, 0.5), (128, 1.0)]}
    assert rescale_to_peak(fields) == expected


def test_a_disturbed_pass_is_not_in_the_median():
    level = lambda b: (Level(0, b, 1.0),)  # noqa: E731
    passes = [
        {"overhead": 1.0, "rates": {"a": 5.0}, "levels": level(2.0), "fresh": None},
        {"overhead": 9.0, "rates": {"a": 0.1}, "levels": level(0.1), "fresh": 2.0},
        {"overhead": 1.1, "rates": {"a": 5.1}, "levels": level(2.1), "fresh": None},
    ]
    found = medians(passes)
    assert found["overhead"] == 1.1 and found["rates"] == {"a": 5.0}
    assert found["levels"] == [Level(0, 2.0, 1.0)] and found["fresh"] is None


def test_a_line_has_its_start_and_slope():
    start, slope = fit_line([1.0, 10.0, 100.0], [2.5, 7.0, 52.0])
    assert start == pytest.approx(2.0) and slope == pytest.approx(0.5)
    # A tenth off in the largest does not drown what the smallest say.
    start, slope = fit_line([1.0, 10.0, 1000.0], [3.0, 21.0, 2201.0])
    assert start == pytest.approx(1.0, abs=0.5) and slope == pytest.approx(2, rel=0.12)
    # Somebody else had the machine while the smallest was timed.
    assert fit_line([1.0, 10.0, 100.0], [90.0, 70.0, 50.0]) == (0.0, 0.5)


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

"""Hardware: what it refuses, what it reads back, and the given ones."""

import copy
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.planning import hardware as hw
from fsfunc.planning.hardware import Hardware, Level

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
    other = Hardware(**{**FIELDS, "peak": {"float32": 1e11}})
    assert other == MINE and hash(other) == hash(MINE) and {MINE: 1}[other] == 1
    assert MINE != hw.replace(MINE, rates={})
    assert copy.deepcopy(MINE) == MINE and pickle.loads(pickle.dumps(MINE)) == MINE


def test_cannot_be_changed():
    given_peak = {"float32": 1e11}
    mine = Hardware(**{**FIELDS, "peak": given_peak})
    given_peak["float32"] = 1.0
    assert mine.peak["float32"] == 1e11
    with pytest.raises(TypeError):
        mine.peak["float32"] = 1.0  # type: ignore[index]
    with pytest.raises(AttributeError):
        mine.memory = 1  # type: ignore[misc]


@pytest.mark.parametrize("known", hw.GIVEN, ids=lambda known: known.name)
def test_given_ones_are_read_back_and_found_by_name(known):
    assert hw.from_json(hw.to_json(known)) == known
    assert hw.named(known.name.lower().replace("-", "_")) is known


def test_json_keeps_everything():
    assert hw.from_json(hw.to_json(MINE)) == MINE
    assert hw.from_json(hw.to_json(hw.replace(MINE, levels=()))).levels == ()


def test_unknown_fields_are_named_with_the_nearest():
    nearest = r'"pekk" \(did you mean "peak"\?\)'
    with pytest.raises(TypeError, match="Hardware has no field " + nearest):
        Hardware(**FIELDS, pekk=1)
    with pytest.raises(TypeError, match="Hardware has no field " + nearest):
        hw.replace(MINE, pekk=1)
    with pytest.raises(TypeError, match="Hardware has no field " + nearest):
        hw.from_json('{"pekk": 1}')
    with pytest.raises(TypeError, match='Level has no field "latencies".*"latency"'):
        Level(ranks=1, bandwidth=1.0, latencies=1.0)
    with pytest.raises(TypeError, match='Level has no field "rank"'):
        hw.from_json('{"levels": [{"rank": 8}]}')
    with pytest.raises(ValueError, match="JSON object, got list"):
        hw.from_json("[]")
    with pytest.raises(ValueError, match="levels is a list"):
        hw.from_json('{"levels": 3}')


def test_unknown_names_list_what_there_is():
    with pytest.raises(ValueError, match=r'"H300".*"H[12]00".*A100-40, A100-80, H100'):
        hw.named("H300")


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("peak", {"float32": 0.0}, r'peak\["float32"\] is finite and above 0, got 0.0'),
        ("peak", {"bf16": 1.0}, 'peak has no dtype "bf16".*bfloat16, float16'),
        ("peak", {}, "peak names no dtype"),
        ("efficiency", [], "efficiency has no point"),
        ("efficiency", [(64, 1.5)], "efficiency at size 64 is a share.*1.5"),
        ("efficiency", [(64, 0.0)], "efficiency at size 64 is finite and above 0"),
        ("efficiency", [(-1, 0.5)], "size of efficiency.*-1"),
        ("efficiency", [(64, 0.5), (32, 0.6)], "sorted by size.*32 after 64"),
        ("efficiency", [(64, 0.5), (64, 0.6)], "sorted by size.*64 after 64"),
        ("attention", 1.2, "attention is a share.*1.2"),
        ("bandwidth", -1.0, "bandwidth is finite and above 0, got -1.0"),
        ("bandwidth", math.inf, "bandwidth is finite"),
        ("bandwidth", "fast", "bandwidth is a number above 0, got 'fast'"),
        ("overhead", -1e-6, "overhead is finite and above 0"),
        ("memory", 0, "memory is finite and above 0"),
        ("overlap", 1.1, "overlap is a share, 0 to 1, got 1.1"),
        ("rates", {"aten.gelu": 0}, r'rates\["aten.gelu"\]'),
        ("fresh", 0.0, "fresh is finite"),
        ("levels", [Level(8, 1.0, 0), Level(8, 1.0, 0)], "8 after 8"),
        ("levels", [Level(0, 1.0, 0), Level(8, 1.0, 0)], "8 after 0"),
    ],
)
def test_refuses_values(field, value, message):
    with pytest.raises(ValueError, match=message):
        hw.replace(MINE, **{field: value})


def test_levels_refuse_values():
    with pytest.raises(ValueError, match="bandwidth of a level.*0"):
        Level(8, 0, 1e-6)
    with pytest.raises(ValueError, match="latency of a level.*-1"):
        Level(8, 1.0, -1)
    with pytest.raises(ValueError, match="ranks of a level is not below 0, got -8"):
        Level(-8, 1.0, 0)
    with pytest.raises(ValueError, match="whole number, got 1.5"):
        Level(1.5, 1.0, 0)  # type: ignore[arg-type]


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

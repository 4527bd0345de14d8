"""What things cost, against closed forms worked out by hand."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.comm.ledgers import Record
from fsfunc.planning.cost_model import (
    collective_seconds,
    message_seconds,
    op_seconds,
    taken_seconds,
)
from fsfunc.planning.events import Op
from fsfunc.planning.hardware import A100_40, H100, Hardware, Level, replace

NODES = Hardware(
    "nodes",
    peak={"float32": 1e12},
    efficiency=[(100, 0.25), (1000, 0.5)],
    attention=0.1,
    bandwidth=1e10,
    overhead=1e-5,
    levels=[Level(8, 1e9, 1e-6), Level(0, 2e9, 1e-3)],
    memory=2**34,
    rates={"aten.gelu": 1e9},
)


def product(m, k, n, b=1, dtype=torch.float32):
    size = 4 * b * (m * k + k * n + m * n)
    return Op("aten.bmm", 2 * b * m * k * n, size, dtype, (b, m, k, n))


def record(op="all_gather", size=8 * 10**6):
    return Record(op, ("data",), Fraction(size), torch.float32)


def test_products():
    seconds = 2e9 / (1e12 * 0.5) + 1e-5
    assert op_seconds(product(1000, 1000, 1000), NODES) == pytest.approx(seconds)
    # Of equal work, and so of equal size.
    assert op_seconds(product(1000, 500, 2000), NODES) == pytest.approx(seconds)
    assert op_seconds(product(500, 500, 500, b=8), NODES) == pytest.approx(seconds)
    small = 2e6 / (1e12 * 0.25) + 1e-5
    fast = replace(NODES, bandwidth=1e12)
    assert op_seconds(product(100, 100, 100), fast) == pytest.approx(small)


def test_a_dtype_without_a_peak():
    with pytest.raises(ValueError, match=r"aten.bmm computes in bfloat16.*float32"):
        op_seconds(product(8, 8, 8, dtype=torch.bfloat16), NODES)


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal):
    op = Op("aten._flash_attention", 10**9, 64, torch.float32, (8, 8, 8, 8), causal)
    flops = 0.5e9 if causal else 1e9
    assert op_seconds(op, NODES) == pytest.approx(flops / (1e12 * 0.1) + 1e-5)


def test_other_operators_are_bound_by_memory_or_their_own_rate():
    add = Op("aten.add", 0, 10**6, torch.int64)
    assert op_seconds(add, NODES) == pytest.approx(1e-4 + 1e-5)
    gelu = Op("aten.gelu", 0, 10**6, torch.float32)
    assert op_seconds(gelu, NODES) == pytest.approx(1e-3 + 1e-5)


def test_memory_that_is_taken():
    slow = replace(NODES, fresh=1e9)
    assert taken_seconds(10**6, slow, "aten.mm.default") == 1e-3
    assert taken_seconds(10**6, slow, "aten.empty_strided.default") == 0
    assert taken_seconds(10**6, slow, "") == 0
    assert taken_seconds(10**6, NODES, "aten.mm.default") == 0


def test_collectives_within_a_node():
    assert collective_seconds(record(), [0], NODES) == 0
    assert collective_seconds(record(), range(4), NODES) == pytest.approx(8e-3 + 3e-6)
    twice = collective_seconds(record("psum"), range(4), NODES)
    assert twice == pytest.approx(8e-3 + 4e-6)  # up a tree of four, and down
    hop = collective_seconds(record("ppermute"), range(4), NODES)
    assert hop == pytest.approx(8e-3 + 1e-6)
    exchange = collective_seconds(record("all_to_all"), range(4), NODES)
    assert exchange == pytest.approx(8e-3 + 3e-6)


def test_collectives_between_nodes():
    # One edge of the ring leaves each node; its 8 ranks have all that leaves it.
    whole = collective_seconds(record(), range(16), NODES)
    assert whole == pytest.approx(8e-3 + 14e-6 + 1e-3)  # bound by a rank's own link
    # One rank of each node: the others have seven eighths of what leaves it.
    across = collective_seconds(record(), range(0, 32, 8), NODES)
    assert across == pytest.approx(8e6 / (2e9 / 8) + 3e-3)
    pairs = collective_seconds(record(), [0, 1, 8, 9], NODES)
    assert pairs == pytest.approx(8e6 / (2e9 / 4) + 2e-6 + 1e-3)
    # Each of two sends two thirds of its bytes out of the node.
    exchange = collective_seconds(record("all_to_all"), [0, 1, 8, 9], NODES)
    assert exchange == pytest.approx(2 * 8e6 * 2 / 3 / (2e9 / 4) + 2e-6 + 1e-3)


def test_messages():
    assert message_seconds(10**6, 0, 7, NODES) == pytest.approx(1e-3 + 1e-6)
    assert message_seconds(10**6, 7, 8, NODES) == pytest.approx(4e-3 + 1e-3)


def test_hardware_that_ends():
    one = replace(NODES, levels=NODES.levels[:1])
    with pytest.raises(ValueError, match="rank 8 lies outside of nodes.*8 ranks"):
        collective_seconds(record(), [0, 8], one)
    with pytest.raises(ValueError, match="rank 9 lies outside"):
        message_seconds(1, 9, 0, one)
    with pytest.raises(ValueError, match="nodes has no links.*Level"):
        collective_seconds(record(), [0, 1], replace(NODES, levels=()))


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from(["all_gather", "psum", "all_to_all", "ppermute", "pbroadcast"]),
    st.integers(1, 10**9),
)
def test_further_ranks_and_more_bytes_never_take_less(count, stride, op, size):
    for hardware in (A100_40, H100):
        ranks = [2**stride * i for i in range(count)]
        now = collective_seconds(record(op, size), ranks, hardware)
        assert now <= collective_seconds(record(op, 2 * size), ranks, hardware)
        apart = [2 * r for r in ranks]
        assert now <= collective_seconds(record(op, size), apart, hardware) + 1e-12

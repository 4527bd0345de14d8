"""What things cost, against closed forms by hand; a GPU's kernels, and the band."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.cost_model import (
    attention_share,
    collective_seconds,
    fill,
    message_seconds,
    op_seconds,
    taken_seconds,
)
from fsfunc.planning.estimation import estimate
from fsfunc.planning.events import Op, Ran, Started, Waited
from fsfunc.planning.hardware import (
    A100_40,
    A100_80,
    CPU,
    H100,
    Hardware,
    Level,
    replace,
)
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from tests.checks import all_refused
from tests.models import chain

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


def flash(causal):
    return Op("aten._flash_attention", 10**9, 64, torch.float32, (8, 8, 8, 8), causal)


CUBE = 2e9 / (1e12 * 0.5) + 1e-5
OPERATORS = {  # the operator, its seconds, and what of the hardware is another
    "a product": (product(1000, 1000, 1000), CUBE, {}),
    # Of equal work, and so of equal size.
    "a wide one": (product(1000, 500, 2000), CUBE, {}),
    "a batch of products": (product(500, 500, 500, b=8), CUBE, {}),
    "a small one": (
        product(100, 100, 100), 2e6 / (1e12 * 0.25) + 1e-5, {"bandwidth": 1e12}),
    "attention": (flash(False), 1e9 / (1e12 * 0.1) + 1e-5, {}),
    "causal attention": (flash(True), 0.5e9 / (1e12 * 0.1) + 1e-5, {}),
    "bound by memory": (Op("aten.add", 0, 10**6, torch.int64), 1e-4 + 1e-5, {}),
    "by its own rate": (Op("aten.gelu", 0, 10**6, torch.float32), 1e-3 + 1e-5, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    op, seconds, other = OPERATORS[name]
    assert op_seconds(op, replace(NODES, **other)) == pytest.approx(seconds)


def test_memory_that_is_taken():
    slow = replace(NODES, fresh=1e9)
    assert taken_seconds(10**6, slow, "aten.mm.default") == 1e-3
    assert taken_seconds(10**6, slow, "aten.empty_strided.default") == 0
    assert taken_seconds(10**6, slow, "") == 0
    assert taken_seconds(10**6, NODES, "aten.mm.default") == 0


NEAR, PAIRS = range(4), [0, 1, 8, 9]  # within a node, and two of each of two
# Over gloo each rank sends to every other at once.
GLOO = replace(NODES, pairwise=("all_gather", "psum"))
# Of 8 MB: what the links take, and their latencies.
COLLECTIVES = [
    (NODES, "all_gather", [0], 0),
    (NODES, "all_gather", NEAR, 8e-3 + 3e-6),
    (NODES, "psum", NEAR, 8e-3 + 4e-6),  # up a tree of four, and down
    (NODES, "ppermute", NEAR, 8e-3 + 1e-6),
    (NODES, "all_to_all", NEAR, 8e-3 + 3e-6),
    # One edge of the ring leaves each node; its 8 ranks have all that leaves it: the
    # bound is a rank's own link.
    (NODES, "all_gather", range(16), 8e-3 + 14e-6 + 1e-3),
    # One rank of each node: the others have seven eighths of what leaves it.
    (NODES, "all_gather", range(0, 32, 8), 8e6 / (2e9 / 8) + 3e-3),
    (NODES, "all_gather", PAIRS, 8e6 / (2e9 / 4) + 2e-6 + 1e-3),
    # Each of two sends two thirds of its bytes out of the node.
    (NODES, "all_to_all", PAIRS, 2 * 8e6 * 2 / 3 / (2e9 / 4) + 2e-6 + 1e-3),
    (GLOO, "all_gather", NEAR, 8e-3 + 1e-6),
    (GLOO, "psum", NEAR, 8e-3 + 2e-6),  # to the sums, and back
    (GLOO, "all_gather", PAIRS, 2 * 8e6 * 2 / 3 / (2e9 / 4) + 1e-3),
    (GLOO, "psum_scatter", PAIRS, 8e6 / (2e9 / 4) + 2e-6 + 1e-3),  # a ring
]


@pytest.mark.parametrize(("hardware", "op", "ranks", "seconds"), COLLECTIVES)
def test_collectives(hardware, op, ranks, seconds):
    assert collective_seconds(record(op), ranks, hardware) == pytest.approx(seconds)


def test_messages():
    assert message_seconds(10**6, 0, 7, NODES) == pytest.approx(1e-3 + 1e-6)
    assert message_seconds(10**6, 7, 8, NODES) == pytest.approx(4e-3 + 1e-3)


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


# Of a GPU's kernels, by the model of `planning.hardware`


DENSE = replace(
    H100, straggling=0.0, overhead=0.0, uncertain=0.0, efficiency=((1, 1.0),)
)

SHARES: Any = H100.attention


def half_product(m, k, n, dtype=torch.bfloat16):
    size = 2 * (m * k + k * n + m * n)
    return Op("aten.mm", 2 * m * k * n, size, dtype, (1, m, k, n))


def attention(length, head=128, name="", causal=True):
    flops = 4 * 8 * length**2 * head
    dims = (8, length, length, head)
    full = "aten._scaled_dot_product_flash_attention" + name
    return Op(full, flops, 64, torch.bfloat16, dims, causal)


def of(events, ranks=8, leaves=()):
    mesh = Mesh({"data": ranks}, "abstract")
    own = RankPlan(0, ranks, {"data": 0}, list(events), {}, leaves, ())
    return Plan(mesh, (own,))


def test_a_wave_that_is_not_full_costs_as_much_as_one_that_is():
    one = fill(1, 128, 2**16, 256 * 132, 132)
    assert one == pytest.approx(2**16 / (2**16 + 96))
    # One tile more: a second wave of them, or three of tiles of half their size.
    assert fill(1, 128, 2**16, 256 * 133, 132) / one == pytest.approx(133 / 132 * 2 / 3)


def test_a_deep_product_of_few_tiles_is_cut_along_its_depth():
    # Four tiles of 128 x 128: in 8 parts they fill 32 of 132 processors.
    share = 2**13 / (2**13 + 96)
    assert fill(1, 256, 2**16, 256, 132) == pytest.approx(32 / 132 * share)


@given(*[st.integers(1, 10**4) for _ in range(4)], st.sampled_from([1, 108, 132]))
def test_no_more_than_the_chip_is_kept_busy(batch, m, k, n, processors):
    assert 0 < fill(batch, m, k, n, processors) <= 1


def test_eight_bits_are_twice_as_fast_as_sixteen():
    half, eight = (
        op_seconds(half_product(8192, 8192, 8192, dtype), H100)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    assert half / eight == pytest.approx(1979 / 989)


def test_attention_by_generation_direction_length_and_head():
    share = attention_share(attention(512), H100, "fa3")
    assert share == pytest.approx(SHARES["fa3"][0] / 2)
    small = attention_share(attention(512, head=64), H100, "fa3")
    assert small == pytest.approx(0.8 * share)
    back = attention_share(attention(512, name="_backward"), H100, "fa2")
    assert back == pytest.approx(SHARES["fa2"][1] / 2)
    assert attention_share(attention(512), H100, None) == pytest.approx(0.37 / 2)


def test_small_kernels_take_their_launch_and_large_ones_hide_it():
    small = Ran(Op("aten.add", 0, 8, torch.bfloat16), "", "forward")
    slow = replace(DENSE, overhead=1e-3)
    assert estimate(of([small] * 10), slow).seconds == pytest.approx(1e-2)
    size = int(0.05 * slow.bandwidth)
    large = Ran(Op("aten.add", 0, size, torch.bfloat16), "", "forward")
    found = estimate(of([large] + [small] * 9), slow)
    assert found.seconds == pytest.approx(5e-2, rel=1e-3)


def test_what_lies_beside_the_device_is_copied_and_computed_at_its_rates(
    tmp_path,
):
    """Over the link what crosses it counts once; the host reads and writes all."""
    mesh = ff.make_mesh({"data": 2}, "abstract")
    optimizer, n = ff.sharded_adam(1e-3), 512 * 512

    def planned(**where):
        step = ff.shard(optimizer(ff.value_and_grad(chain())), mesh, "data")
        step = ff.donate(ff.offload(step, **where) if where else step)

        def init():
            return [{"w": torch.zeros(512, 512)} for _ in range(3)]

        return ff.plan(step, init, optimizer, lambda: torch.zeros(64, 512), mesh=mesh)

    def beside(found):
        """Bytes of a rank that cross, and that are computed with beside the device."""
        ran = [e.op for e in found.ranks[0].events if isinstance(e, Ran) and e.op.store]
        assert {x.store for x in ran} <= {"host"}
        sizes = [sum(x.bytes for x in ran if x.crosses is c) for c in (True, False)]
        for copied, computed, room in (H100.stores["host"], (2e6, 3e6, 1e9)):
            machine = replace(H100, stores={"host": (copied, computed, room)})
            seconds = sum(op_seconds(x, machine) for x in ran)
            assert seconds == pytest.approx(sizes[0] / copied + sizes[1] / computed)
        times = [estimate(p, machine).seconds for p in (planned(), found)]
        assert times[1] - times[0] == pytest.approx(seconds, rel=0.01)
        return sizes

    part = 4 * n // 2  # of each of three units, on each rank
    # Without moments' arithmetic on the device: they are brought, and go back.
    assert beside(planned()) == [0, 0]
    assert beside(planned(moments="host"))[0] == 2 * 2 * 3 * part
    # Five residuals go, and come.
    assert beside(planned(activations="host"))[0] == 2 * 5 * 4 * 64 * 512
    both = beside(planned(params="host", moments="host"))
    # Each part comes, once more for the backward that neither keeps it (the last) nor
    # reads it (the first), and its gradient goes.
    assert both[0] == (3 + 1 + 3) * part
    assert both[1] - 3 * (1 + 4) * part in range(64)  # the mean, Adam's four; numbers

    # The device and the host are one, or nobody said how fast a disk is.
    alone = estimate(planned(params="host"), CPU).seconds
    slow = replace(CPU, stores={"host": (1e6, 1e6, 1e9)})
    assert estimate(planned(params="host"), slow).seconds > alone
    for machine in (CPU, H100):
        with pytest.raises(ValueError, match='store "disk".*stores={"disk": '):
            estimate(planned(params=tmp_path), machine)
    assert estimate(
        planned(params=tmp_path), replace(H100, stores={"disk": (1e6, 1e6, 1e9)})
    )


def test_more_nodes_are_later():
    ran = Ran(half_product(8192, 8192, 8192), "", "forward")
    slow = replace(DENSE, straggling=0.01)
    one, four = (estimate(of([ran], ranks), slow) for ranks in (8, 32))
    assert four.seconds == pytest.approx(1.02 * one.seconds)
    assert four.seconds == pytest.approx(four.compute + four.exposed + four.bubble)


def test_what_is_computed_again_is_in_hfu_alone():
    one, back = half_product(8192, 8192, 8192), attention(4096, name="_backward")
    events = [Ran(one, "", "forward"), Ran(one, "", "recompute")]
    found = estimate(of([*events, Ran(back, "", "backward")]), DENSE)
    peak, seconds = DENSE.peak["bfloat16"], found.seconds
    assert found.share_of_peak == pytest.approx(
        (2 * one.flops + back.flops) / peak / seconds
    )
    assert found.mfu == pytest.approx((one.flops + 4 / 5 * back.flops) / peak / seconds)


def test_the_rule_of_thumb_is_6nd_and_stands_beside():
    leaves = tuple(
        PlannedLeaf(f"params/{i}", "parameters", (10**9, 7), torch.float32, 1, None, "")
        for i in range(2)
    )
    ran = Ran(half_product(8192, 8192, 8192), "", "forward")
    found = estimate(of([ran], leaves=leaves), H100, tokens=2**20)
    rate = 8 * 989e12 * (H100.utilisation or 0)
    assert found.rule_of_thumb == pytest.approx(6 * 14e9 * 2**20 / rate)
    some = estimate(of([ran], leaves=leaves), H100, tokens=2**20, active=2e9)
    assert some.rule_of_thumb == pytest.approx(found.rule_of_thumb / 7)
    assert "by the rule of thumb (6ND)" in str(found)
    assert estimate(of([ran], leaves=leaves), H100).rule_of_thumb is None
    assert found.tokens_per_second == pytest.approx(2**20 / found.seconds)


def test_the_band_is_what_is_uncertain_by_its_share_of_the_time():
    machine = replace(DENSE, uncertain=0.1)
    move = Op("aten.add", 0, int(machine.bandwidth), torch.bfloat16)
    found = estimate(of([Ran(move, "", "forward")]), machine)
    assert dict(found.band) == pytest.approx(
        {"the model": 0.1, "operators bound by memory": 0.25}
    )
    assert math.log(found.high / found.seconds) == pytest.approx(math.hypot(0.1, 0.25))
    assert found.low * found.high == pytest.approx(found.seconds**2)
    assert found.band[0][0] == "operators bound by memory" and "25%" in str(found)
    record = Record("all_gather", ("data",), Fraction(10**11), torch.bfloat16)
    waits = [Started(0, "issued", tuple(range(8)), record), Waited(0)]
    alone, beside = (
        estimate(of(events), machine) for events in (waits, [*waits, Ran(move, "", "")])
    )
    assert dict(alone.band)["transfers"] == pytest.approx(0.25)
    for name, unsure, spent in (
        ("operators bound by memory", 0.25, beside.compute),
        ("transfers", 0.25, beside.exposed),
    ):
        share = spent / beside.seconds
        assert dict(beside.band).get(name, 0) == pytest.approx(unsure * share, abs=5e-3)


def test_attention_of_no_known_generation_widens_the_band():
    ran = Ran(attention(8192), "", "forward")
    unknown, known = (
        estimate(of([ran]), H100, attention=name) for name in (None, "fa2")
    )
    assert unknown.seconds == known.seconds and unknown.width > known.width
    assert "attention's generation" in dict(unknown.band)


def test_a_node_of_72_is_one_level():
    record = Record("all_gather", ("data",), Fraction(10**9), torch.bfloat16)
    waits = [Started(0, "issued", tuple(range(72)), record), Waited(0)]
    found = estimate(of(waits, 72), ff.hardware.GB200)
    level, launched = ff.hardware.GB200.levels[0], ff.hardware.GB200.overhead
    sent = 1e9 / level.bandwidth + 71 * level.latency
    assert found.seconds == pytest.approx(launched + sent)


ONE = replace(NODES, levels=NODES.levels[:1])
ATTENDS = of([Ran(attention(512), "", "forward")])
test_what_a_machine_lacks_is_told = all_refused({
    "a dtype": (lambda: op_seconds(product(8, 8, 8, dtype=torch.bfloat16), NODES),
                ValueError, r"aten.bmm computes in bfloat16.*float32"),
    "eight bits": (
        lambda: op_seconds(half_product(8, 8, 8, torch.float8_e4m3fn), A100_80),
        ValueError, "computes in float8_e4m3fn.*A100-80"),
    "no generation": (lambda: attention_share(attention(512), H100, "fa9"),
                      ValueError, r'no attention "fa9".*fa2, fa3, fa1'),
    "another's": (lambda: estimate(ATTENDS, A100_80, attention="fa3"),
                  ValueError, r'no attention "fa3".*it knows: fa2, fa1'),
    "a pairwise op": (lambda: replace(NODES, pairwise=("all_gathers",)),
                      ValueError, '"all_gathers" .did you mean "all_gather"'),
    "a rank": (lambda: collective_seconds(record(), [0, 8], ONE),
               ValueError, "rank 8 lies outside of nodes.*8 ranks"),
    "a rank of a message": (lambda: message_seconds(1, 9, 0, ONE),
                            ValueError, "rank 9 lies outside"),
    "links": (lambda: collective_seconds(record(), [0, 1], replace(NODES, levels=())),
              ValueError, "nodes has no links.*Level"),
})  # fmt: skip

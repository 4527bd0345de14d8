"""The observer: which operators ran, and whose; what an allocator reserves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.allocation import Allocator, needed_bytes, reserved_bytes
from fsfunc.planning.events import PHASES, Allocated, Freed
from fsfunc.planning.hardware import CPU, H100, replace
from fsfunc.planning.plans import Plan, RankPlan
from fsfunc.runtime.memory import OFFLOADED
from tests.models import chain, train_step

MESH = ff.make_mesh({"data": 2}, "simulated")


def watched(f, *args):
    with ff.testing.live_bytes(*args) as seen:
        out = f(*args)
    return seen, out


# Memory of real runs


def test_live_bytes_counts_from_making_to_the_last_tensor():
    x = torch.ones(100)

    def f(x):
        y = x + 1  # 800
        z = y[:50]
        del y  # z holds it
        w = z.clone()  # 1000
        del z  # 600
        return w * 2  # 800, then 600

    seen, out = watched(f, x)
    assert seen.peak_bytes == 1000
    assert seen.bytes == [400, 800, 1000, 600, 800, 600]
    del out
    assert seen.bytes[-1] == 600  # nobody watches any more


@pytest.mark.parametrize("op", ["all_gather", "psum", "psum_scatter", "ppermute"])
def test_live_bytes_of_a_collective_is_its_result(op):
    """What other ranks, or the link, do besides is not counted."""
    x = torch.ones(8, 100)
    size = {"all_gather": 2, "psum": 1, "psum_scatter": 0.5, "ppermute": 1}[op]

    def call(x):
        if op == "ppermute":
            return ff.ppermute(x, "data", [(0, 1), (1, 0)])
        return getattr(ff, op)(x, "data")

    def main():
        mine = x.clone()
        seen, out = watched(call, mine)
        plan = ff.plan(call, mine).peak_bytes
        return seen.peak_bytes, seen.bytes[-1], plan

    for peak, last, plan in ff.spmd(main, MESH)():
        assert peak == last == plan == 3200 * (1 + size)


def test_live_bytes_counts_on_another_mesh_of_the_same_ranks():
    """A step names a mesh of its own: the link on it is watched too."""
    mesh = ff.make_mesh({"rows": 2}, "simulated")
    step = ff.shard(lambda w, x: w.sum() + ff.all_gather(x, "rows"), mesh, "rows")

    def main():
        x = torch.ones(8, 100)
        w = ff.place(step, torch.ones(2), x)
        return [watched(step, w, x)[0].peak_bytes for _ in range(2)][1]

    same = ff.spmd(main, mesh)()
    assert ff.spmd(main, MESH)() == same


# On whose behalf


def test_the_phases_of_a_step():
    layer = ff.unit(lambda p, x: torch.tanh(x @ p))
    layer.__name__ = "layer"
    optimizer = ff.sharded_adam(0.1)
    train = train_step(lambda p, x: layer(p, x).sum() * 2, optimizer)
    w, x = torch.ones(3, 3), torch.ones(2, 3)
    state = ff.TrainState(w, optimizer.init(w))
    found = ff.plan(ff.remat(train), state, x).ranks[0]
    by_place = {}
    for ran in found.ops():
        by_place.setdefault((ran.unit, ran.phase), []).append(ran.op.name)
    assert {phase for _, phase in by_place} == set(PHASES)
    assert by_place["layer", "forward"] == ["aten.mm", "aten.tanh"]
    assert by_place["layer", "recompute"] == ["aten.mm", "aten.tanh"]
    assert "aten.mm" in by_place["layer", "backward"]
    assert {"aten.sum", "aten.mul"} <= set(by_place["", "forward"])
    assert any("adam" in name for name in by_place["", "update"])
    assert not any("adam" in name for (_, phase), names in by_place.items()
                   if phase != "update" for name in names)  # fmt: skip


def test_a_backward_belongs_to_the_unit_whose_forward_made_it():
    one, two = ff.unit(lambda p, x: x @ p), ff.unit(lambda p, x: torch.tanh(x) * p)
    one.__name__, two.__name__ = "one", "two"

    @ff.unit
    def around(p, x):
        return one(p, two(p, x)).exp()

    def loss(p, x):
        return around(p, one(p, x)).sin().sum()

    p, x = torch.ones(3, 3), torch.ones(3, 3)
    found = ff.plan(ff.value_and_grad(loss), p, x).ranks[0]
    backward = {}
    for ran in found.ops():
        if ran.phase == "backward":
            backward.setdefault(ran.unit, set()).add(ran.op.name)
    assert "aten.mm" in backward["one"] and "aten.mm" in backward["around/one"]
    assert "aten.tanh_backward" in backward["around/two"]
    assert "aten.cos" in backward[""] and "aten.mul" in backward["around"]


# What a caching allocator reserves


MIB = 2**20


def took(key, size):
    return Allocated(key, size, "aten.mm", "", "")


def test_segments_are_of_three_sizes():
    assert reserved_bytes([took(0, 1)]) == 2 * MIB
    assert reserved_bytes([took(0, MIB + 1)]) == 20 * MIB
    assert reserved_bytes([took(0, 11 * MIB + 1)]) == 12 * MIB
    assert reserved_bytes([took(i, MIB) for i in range(3)]) == 4 * MIB
    assert reserved_bytes([took(i, 9 * MIB) for i in range(3)]) == 40 * MIB


def test_what_is_given_back_is_taken_again_where_it_fits():
    again = [took(0, 64 * MIB), Freed(0), took(1, 64 * MIB)]
    assert reserved_bytes(again) == 64 * MIB
    # Both halves of a block are held by what came later: nothing merges.
    cut = [took(0, 64 * MIB), Freed(0), took(1, 32 * MIB), took(2, 32 * MIB)]
    assert reserved_bytes([*cut, Freed(1), took(3, 33 * MIB)]) == 98 * MIB
    assert reserved_bytes([*cut, Freed(1), Freed(2), took(3, 64 * MIB)]) == 64 * MIB


def test_the_smallest_block_that_holds_it_is_taken():
    sizes = [took(0, 64 * MIB), took(1, 32 * MIB), Freed(0), Freed(1)]
    both = [took(2, 32 * MIB), took(3, 64 * MIB)]
    assert reserved_bytes([*sizes, *both]) == 96 * MIB


def test_free_segments_go_back_before_memory_runs_out():
    events = [took(0, 40 * MIB), Freed(0), took(1, 60 * MIB)]
    assert reserved_bytes(events) == 100 * MIB
    assert reserved_bytes(events, capacity=80 * MIB) == 60 * MIB


def test_each_stream_has_memory_of_its_own():
    events = [took(0, 40 * MIB), Freed(0), took(1, 40 * MIB)]
    by_stream = lambda took: str(took.storage)  # noqa: E731
    assert reserved_bytes(events, stream=by_stream) == 80 * MIB
    assert reserved_bytes(events, capacity=60 * MIB, stream=by_stream) == 40 * MIB


def test_offloaded_memory_is_elsewhere():
    assert reserved_bytes([took(0, 64 * MIB)], {0: OFFLOADED}) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MIB)), max_size=60))
def test_no_less_is_reserved_than_is_held_and_all_of_it_is_found_again(steps):
    allocator, held, size = Allocator(), [], 0
    for takes, n in steps:
        if takes or not held:
            held.append((allocator.allocate(n), n))
            size += n
        else:
            block, given_back = held.pop(n % len(held))
            allocator.release(block)
            size -= given_back
        blocks = [block for block, _ in held]
        free = [item[2] for row in allocator._free_blocks.values() for item in row]
        assert allocator.reserved == sum(b.size for b in [*blocks, *free]) >= size
    for block, _ in held:
        allocator.release(block)
    allocator._release_segments()
    assert allocator.reserved == 0


def test_the_bytes_of_offload_are_counted_beside_the_device():
    layer = ff.unit(lambda w, x: torch.tanh(x @ w))
    optimizer = ff.sharded_adam(1e-3)
    step = train_step(chain(layer), optimizer)

    def planned(step):
        given = lambda: [torch.zeros(64, 64) for _ in range(4)]  # noqa: E731
        return ff.plan(ff.donate(step), given, optimizer, torch.zeros(2, 64))

    assert planned(step).offloaded_bytes == 0
    found = planned(ff.offload(step, moments="host"))
    moments = 2 * 4 * 64 * 64 * 4
    assert moments <= found.offloaded_bytes <= 1.3 * moments


def test_a_plan_needs_what_is_reserved_where_the_allocator_caches():
    events = [took(0, 11 * MIB + 1), Freed(0), took(1, 13 * MIB)]
    mesh = Mesh({"data": 1}, "abstract")
    plan = Plan(mesh, (RankPlan(0, 1, {"data": 0}, events, {}, (), ()),))
    assert needed_bytes(plan, H100) == 26 * MIB
    assert needed_bytes(plan, replace(H100, memory=20 * MIB)) == 14 * MIB
    assert needed_bytes(plan, CPU) == plan.peak_bytes == 13 * MIB


def test_what_is_offloaded_to_the_host_of_a_cpu_is_in_its_own_memory():
    optimizer = ff.sharded_adam(1e-3)
    layer = ff.unit(lambda w, x: x @ w)
    step = optimizer(ff.value_and_grad(lambda w, x: layer(w, x).sum()))
    step = ff.shard(step, ff.make_mesh({"data": 1}, "abstract"), "data")
    step = ff.donate(ff.offload(step, params="host", moments="host"))
    plan = ff.plan(step, lambda: torch.zeros(64, 64), optimizer, torch.zeros(2, 64))
    beside, held = plan.offloaded_bytes, plan.peak_bytes
    assert beside >= 3 * 64 * 64 * 4
    assert max(beside, held) < needed_bytes(plan, CPU) <= beside + held
    apart = replace(CPU, stores={"host": (1e9, 1e9, 1e9)})
    assert needed_bytes(plan, apart) == held

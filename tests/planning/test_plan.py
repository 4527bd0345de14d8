"""What ``plan`` says: its two forms, users' own functions, FLOPs, derived copies."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fsfunc as ff
from tests.models import chain, floats, layer, layers
from tests.planning.comparing import facts, planned_and_run, totals
from tests.programs import forked

pytestmark = pytest.mark.usefixtures("uncollected")

MESH = ff.make_mesh({"data": 2}, "simulated")
GRID = ff.make_mesh({"node": 2, "data": 2}, "simulated")

# The two forms, and whose a plan is


mean = chain(layer)


@pytest.mark.parametrize("zero", [0, 3])
def test_the_form_that_makes_the_state_plans_the_first_step(zero):
    """And on whatever mesh: the same as the other form says on real ranks."""
    optimizer, batch = ff.sharded_adam(1e-3), torch.ones(4, 8)
    step = ff.shard(optimizer(ff.value_and_grad(mean)), MESH, "data", zero=zero)

    def main():
        state = ff.init_state(step, layers(3, 8), optimizer, batch)
        return plan_of(step, state, batch)

    expected = ff.spmd(main, MESH)()
    found = plan_of(step, lambda: layers(3, 8), optimizer, batch)
    assert found.mesh.backend == "abstract" and found.mesh.axes == MESH.axes
    assert facts(found.records()) == facts(expected[0].records())
    assert found.peak_bytes == expected[0].peak_bytes
    assert found.flops == expected[0].flops
    assert [r.alike for r in found.ranks] == [2]
    assert found[1] is found[0]
    with pytest.raises(IndexError, match="rank 2"):
        found[2]
    late = plan_of(step, lambda: layers(3, 8), optimizer, lambda: batch)
    assert facts(late.records()) == facts(found.records())
    with pytest.raises(ValueError, match="has 2 ranks, but 8 are running"):
        plan_of(step, lambda: layers(3, 8), optimizer, batch, mesh=like(MESH, data=8))


def plan_of(*args, **how):
    return ff.plan(*args, **how)


def like(mesh, **axes):
    return ff.make_mesh(mesh.axes | axes, "abstract")


# Everybody's functions


@ff.unit
def mixing(p, x):
    """Collectives inside a unit."""
    x = ff.psum(x @ p["w"], "node")
    return x + ff.ppermute(x, "node", [(0, 1), (1, 0)])


def one_s_own(p, x):
    """And outside of any, some of them by rank."""
    x = mixing(p[0], x)
    x = ff.all_gather(x, "data", dim=0).mean(0, keepdim=True)
    if ff.axis_index("node") == 1:
        x = layer(p[1], x)
    x = ff.psum_scatter(x.expand(2, -1).contiguous(), "data")
    return ff.pmean(x.square().sum(), ("node", "data"))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        lambda f: lambda p, x: torch.func.vjp(f, p, x)[1](torch.ones(())),
        lambda f: ff.remat(ff.value_and_grad(f)),
    ],
    ids=["plain", "vjp", "remat"],
)
def test_one_s_own_spmd_function(transform):
    f = transform(one_s_own)
    params, x = layers(2, 8), torch.ones(4, 8)

    def main():
        both = planned_and_run(f, params, x)
        both.check(memory=0.02)
        return both.plan

    real = ff.spmd(main, GRID)()
    mesh = ff.make_mesh(GRID.axes, "abstract")
    found = plan_of(f, params, x, mesh=mesh)
    assert [r.rank for r in found.ranks] == [0, 2] and found.differing_axes == ("node",)
    assert [r.alike for r in found.ranks] == [2, 2]
    for rank in range(4):
        mine = [fact[:6] for fact in facts(found.records(rank))]
        assert mine == [fact[:6] for fact in facts(real[rank].records())]
        assert found[rank].flops() == real[rank].flops
    assert found[0].flops() < found[3].flops()


# FLOPs


@ff.unit
def convolved(p, x):
    x = F.conv2d(x, p["kernel"], padding=1)
    x = torch.einsum("bchw,cd->bdhw", x, p["mix"])
    x = torch.baddbmm(x.flatten(0, 1), x.flatten(0, 1), x.flatten(0, 1))
    return torch.addmm(p["bias"], x.mean(0), p["out"])


def test_flops_are_those_that_torch_counts():
    p = {
        "kernel": torch.ones(4, 3, 3, 3),
        "mix": torch.ones(4, 5),
        "bias": torch.ones(7),
        "out": torch.ones(6, 7),
    }
    step = ff.value_and_grad(lambda p, x: convolved(p, x).mean())
    x = torch.ones(2, 3, 6, 6)
    found = ff.plan(step, p, x)
    with FlopCounterMode(display=False) as counter:
        step(p, x)
    assert found.flops == counter.get_total_flops()
    phases = {phase for _, phase in totals(found.ranks[0])}
    assert phases == {"forward", "backward"}


def test_products_that_are_added_to_a_gradient_count():
    """A pipeline adds those of later microbatches where the first lie."""
    mesh, optimizer = ff.make_mesh({"pipe": 2}, "abstract"), ff.sharded_adam(1e-3)

    def flops(parts):
        step = optimizer(ff.value_and_grad(chain(layer)))
        step = ff.pipeline(step, mesh, "pipe", n_microbatches=parts)
        init = lambda: layers(4, 8, make=floats)  # noqa: E731
        found = ff.plan(step, init, optimizer, torch.zeros(8, 8), mesh=mesh)
        names = {e.op.name for e in found[0].ops() if e.op.flops and e.op.dims}
        return ("aten.addmm_" in names), [r.flops() for r in found.ranks]

    (_, once), (added, parts) = flops(1), flops(4)
    assert added and parts == once


def attended(p, x):
    q, k, v = (x @ p).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("remat", [False, True])
def test_attention_on_the_cpu_counts_as_it_does_on_a_gpu(remat):
    """2 matmuls forward, 5 backward; torch counts nothing of it on the CPU."""
    unit = ff.unit(attended)
    step = ff.value_and_grad(lambda p, x: unit(p, x).mean())
    step = ff.remat(step) if remat else step
    p, x = torch.ones(8, 24), torch.ones(2, 5, 8)
    found = ff.plan(step, p, x).ranks[0]
    with FlopCounterMode(display=False) as counter:
        step(p, x)
    product = 2 * (2 * 2) * 5 * 5 * 4  # batch * heads, queries, keys, head dim
    times = 2 + 5 + 2 * remat
    assert found.flops() == counter.get_total_flops() + times * product
    ops = [ran.op for ran in found.ops() if "attention" in ran.op.name]
    assert [op.causal for op in ops] == [True] * (2 + remat)
    assert {op.dims for op in ops} == {(4, 5, 5, 4)}


def test_flops_by_unit_and_phase():
    params, x = layers(3, 8), torch.ones(4, 8)
    found = ff.plan(ff.remat(ff.value_and_grad(mean)), params, x).ranks[0]
    product = 2 * 4 * 8 * 8
    assert totals(found) == {
        ("layer", "forward"): 3 * product,
        ("layer", "recompute"): 3 * product,
        ("layer", "backward"): 5 * product,  # none for the input's gradient
    }
    assert found.flops("layer") == found.flops() == 11 * product
    assert found.flops(phase="recompute") == 3 * product
    assert found.work["layer", "forward"].calls == 3


# Copies that units compute of their parameters

cast = ff.unit(lambda p, x: (x @ p.to(torch.bfloat16).float()).relu())
normed = ff.unit(lambda p, x: x @ F.normalize(p, dim=-1))
outside = ff.unit(lambda p, x: (x @ (p * 2), p.to(torch.bfloat16))[0])
moved = ff.unit(lambda p, x: x @ p.t())


@pytest.mark.parametrize("zero", [None, 0, 3])
def test_units_that_keep_copies_of_their_weights_are_told(zero):
    units = {"moved": moved, "cast": cast, "normed": normed, "outside": outside}
    for name, unit in units.items():
        unit.__name__ = name

    def loss(params, x):
        for name, p in params.items():
            x = units[name](p, x)
        return x.sum()

    step = ff.value_and_grad(loss)
    if zero is not None:
        step = ff.shard(step, MESH, "data", zero=zero)
    params = {name: torch.ones(8, 8) for name in units}

    def main():
        x = torch.ones(2, 8)
        placed = ff.place(step, params, x)
        return ff.plan(step, placed, x).derived

    found = ff.spmd(main, MESH)()[0]
    assert set(found) == {"cast", "normed", "outside"}
    assert found["outside"] == 256  # p * 2; the copy that is dropped is not kept
    assert found["cast"] == 256  # the float product's factor, made from bfloat16


# A plan leaves everything as it was


@pytest.mark.parametrize("made", [False, True], ids=["given", "made"])
def test_a_donated_step_does_not_spend_the_state(made):
    optimizer, x = ff.sharded_adam(1e-3), torch.ones(2, 8)
    step = ff.donate(ff.shard(optimizer(ff.value_and_grad(mean)), MESH, "data"))
    if made:
        found = [plan_of(step, lambda: layers(2, 8), optimizer, x) for _ in range(2)]
        assert facts(found[0].records()) == facts(found[1].records())
        return

    def main():
        state = ff.init_state(step, layers(2, 8), optimizer, x)
        ff.plan(step, state, x)
        ff.plan(step, state, x)
        after, _ = step(state, x)
        with pytest.raises(RuntimeError, match="was donated to a step"):
            ff.plan(step, state, x)
        return ff.plan(step, after, x).count()

    mesh = ff.make_mesh(MESH.axes, "abstract")
    assert ff.spmd(main, MESH)() == [5, 5]
    step = ff.donate(ff.shard(optimizer(ff.value_and_grad(mean)), mesh, "data"))
    assert ff.spmd(main, mesh)() == [5]


# Scale

PROGRAM = """
import resource, time, torch, fsfunc as ff
layer = ff.unit(lambda p, x: x + torch.relu(x @ p["up"]) @ p["down"])
def loss(params, x):
    for p in params:
        x = layer(p, x)
    return x.square().mean()
optimizer = ff.sharded_adam(1e-3)
mesh = ff.make_mesh({"data": 1024}, "abstract")
step = ff.shard(ff.remat(optimizer(ff.value_and_grad(loss))), mesh, "data")
empty = torch.empty
make = lambda: [
    {"up": empty(4096, 16384), "down": empty(16384, 4096)} for _ in range(1000)
]
start = time.process_time()
found = ff.plan(step, make, optimizer, lambda: empty(8192, 4096))
seconds = time.process_time() - start
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(seconds, memory, found.count("all_gather"), found.count("psum_scatter"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in KiB")
def test_a_thousand_layers_on_a_thousand_ranks():
    """10 s of one core, of which a busy machine is given twice, and 2 GiB."""
    run = forked("-c", PROGRAM)
    assert run.returncode == 0, run.stderr
    seconds, memory, gathers, reductions = map(float, run.stdout.split())
    assert (gathers, reductions) == (1999, 1000)
    assert seconds < 20 and memory < 2048, (seconds, memory)


def test_experts_count_for_the_rows_that_are_theirs():
    """Each row is multiplied once, forward; and twice for its gradients."""
    rows, groups, width, out = 6, 3, 8, 16
    ends = torch.tensor([2, 5, 6], dtype=torch.int32)
    experts = ff.unit(lambda w, x: torch.nn.functional.grouped_mm(x, w, offs=ends))
    mesh = ff.make_mesh({"data": 2}, "abstract")
    optimizer = ff.sgd(0.1)
    layer = ff.unit(lambda w, x: x @ w)
    params = [torch.zeros(width, width), torch.zeros(groups, width, out)]

    def loss(params, x):
        return experts(params[1], layer(params[0], x)).sum()

    step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
    x = torch.zeros(rows, width)
    plan = ff.plan(step, lambda: params, optimizer, x, mesh=mesh)
    first = 2 * 2 * rows * width * width  # of the data no gradient is asked
    assert plan.flops == first + 3 * 2 * rows * width * out

"""Muon over ranks is torch's on one, each matrix done once, and nothing sent twice."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

import fsfunc as ff
from fsfunc import _torch, tree
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.groups import group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.optim.matrix import matrix_functions, orthogonal_momentum
from fsfunc.optim.matrix.matrix_exchange import MatrixExchange
from fsfunc.optim.matrix.matrix_functions import newton_schulz_flops
from fsfunc.optim.matrix.matrix_owners import balanced
from fsfunc.sharded.leaf import Sharded, is_sharded
from tests.optim.matrices import UNITS, by_hand, drawn, loss, mixed, together, trained
from tests.optim.trees import assert_near
from tests.optim.trees import trained as stepped

HOW = st.fixed_dictionaries(
    {"learning_rate": st.sampled_from([0.05, lambda count: 0.1 / (count + 1)])},
    optional={
        "nesterov": st.just(False),
        "adjust_lr_fn": st.sampled_from(["original", "match_rms_adamw"]),
        "weight_decay": st.just(0.0),
        "momentum": st.just(0.5),
        "ns_steps": st.sampled_from([0, 3]),
    },
)
# axes and replicate
MESHES = {
    "1": ({"data": 1}, None),
    "2": ({"data": 2}, None),
    "3": ({"data": 3}, None),
    "4": ({"data": 4}, None),
    "2 copies": ({"copy": 2, "data": 2}, "copy"),
}


def by_torch(shapes, steps=2, learning_rate=0.05, **how):
    """The parameters after steps of torch's own, which takes no empty matrix."""
    params = [
        {k: torch.nn.Parameter(x) for k, x in unit.items()} for unit in drawn(shapes, 0)
    ]
    leaves = [p for p in tree.leaves(params) if p.numel()]
    more = torch.nn.Parameter(torch.ones(1, 1))  # it wants one
    rate = learning_rate if callable(learning_rate) else lambda count: learning_rate
    optimizer = torch.optim.Muon([*leaves, more], lr=rate(0), **how)
    for i in range(steps):
        grads = [g for g in tree.leaves(drawn(shapes, i + 1)) if g.numel()]
        for p, g in zip(leaves, grads, strict=True):
            p.grad = g
        optimizer.param_groups[0]["lr"] = rate(i)
        optimizer.step()
    return tree.map(lambda p: p.detach(), params)


def moved(leaves, copies, itemsize):
    """The bytes of a step that all ranks send: to owners, and back to all."""
    exchange = MatrixExchange(leaves, newton_schulz_flops, "muon", share=True)
    total = 0
    for i, leaf in enumerate(leaves):
        layout, owner = leaf.layout, exchange.owner(i)
        at = dict.fromkeys(layout.axes, 0) | {p.axis: p.coordinate for p in owner}
        start, stop = layout.span(at)
        there = stop - start
        total += (layout.numel - there) + (layout.numel * copies - there)
    return total * itemsize


@settings(max_examples=5)
@given(
    shapes=UNITS,
    how=HOW,
    on=st.sampled_from(list(MESHES)),
    zero=st.integers(0, 3),
    donated=st.booleans(),
)
def test_it_is_torchs_on_any_mesh(shapes, how, on, zero, donated):
    done = []
    real = matrix_functions.newton_schulz

    def counted(x, *args, **named):
        if not isinstance(x, _torch.FakeTensor):
            done.append(x.shape)
        return real(x, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orthogonal_momentum, "newton_schulz", counted)
        optimizer = ff.muon(**how)
    axes, copy = MESHES[on]
    mesh = ff.make_mesh(axes, "simulated")

    def transform(step):
        step = ff.shard(step, mesh, "data", zero=zero, replicate=copy)
        return ff.donate(step) if donated else step

    def main():
        params, state = trained(optimizer, shapes, transform=transform)
        leaves = tree.leaves(state.params, is_sharded)
        for packed in {
            id(x.packed): x.packed for x in leaves if is_sharded(x)
        }.values():
            rest = packed.flat.clone()
            for start, stop in packed.ranges:
                rest[start:stop] = 0
            assert not rest.any()  # padding stays zero
        handed = ff.shard(lambda x: moved(x, copies, 2), mesh, "data", replicate=copy)
        return params, handed(leaves), state

    copies = mesh.size if zero == 0 else axes.get("copy", 1)
    with ff.ledger() as log:
        found = ff.spmd(main, mesh)()
    expected = by_torch(shapes, **how)
    for params, _, state in found:
        assert_near(expected, params)
        assert state.opt_state.count == 2
    matrices = [s for unit in shapes for s in unit if math.prod(s)]
    assert sorted(done) == sorted(map(torch.Size, matrices * 2))  # none done twice
    sent = sum(log.bytes(op="all_to_all", rank=r) for r in range(mesh.size))
    assert sent == 2 * found[0][1]
    assert log.count("all_to_all") <= 2 * 2
    assert sent == sum(r.bytes for r in log.records if r.phase == "muon")


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"data": 3, "model": 1}])
@pytest.mark.parametrize("make", [ff.muon, ff.shampoo])
def test_any_layout_is_one_device(make, axes):
    values, plan = mixed(axes)
    steps = [tree.map(lambda x, k=k: x.sin() * k, values) for k in (1.0, 2.0)]
    optimizer = make(0.1, momentum=0.9, weight_decay=0.1)
    mesh = ff.make_mesh(axes, "simulated")

    def main():
        grads = [by_hand(g, plan) for g in steps]
        return stepped(optimizer, by_hand(values, plan), grads)[0]

    expected, _ = stepped(optimizer, values, steps)
    assert_near(expected, together(ff.spmd(main, mesh)(), mesh))


def test_whatever_is_no_matrix_has_another_optimizer():
    params = {"w": torch.ones(6, 4), "b": torch.arange(4.0), "none": None, "n": 3}
    unit = ff.unit(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))
    optimizer = ff.partition(
        {"matrix": ff.muon(0.1), "other": ff.sharded_adam(0.1)},
        lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
    )
    x = torch.linspace(-1, 1, 24).view(4, 6)
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main(transform):
        step = ff.value_and_grad(lambda p, x: unit(p, x).square().sum())
        step = transform(optimizer(step))
        state = ff.init_state(step, params, optimizer, x)
        for _ in range(2):
            state, _ = step(state, x)
        return ff.unshard(state.params)

    w, b = (torch.nn.Parameter(params[k].clone()) for k in "wb")
    theirs = torch.optim.Muon([w], lr=0.1), torch.optim.AdamW([b], lr=0.1)
    for _ in range(2):
        torch.tanh(x @ w + b).square().sum().backward()
        for one in theirs:
            one.step()
            one.zero_grad()
    expected = {**params, "w": w.detach(), "b": b.detach()}
    assert_near(expected, main(lambda step: step))
    for found in ff.spmd(main, mesh)(lambda s: ff.donate(ff.shard(s, mesh, "data"))):
        assert_near(expected, found, 1e-3)  # gradients differ in the last bit


@pytest.mark.parametrize(
    "optimizer", [ff.muon(0.05), ff.shampoo(0.05, block=4, interval=3, momentum=0.9)]
)
def test_its_state_is_saved_and_loaded_on_another_mesh(tmp_path, optimizer):
    shapes = [[(4, 6), (5, 3)], [(2, 7)]]

    def run(n, first, last):
        mesh = ff.make_mesh({"data": n}, "simulated")

        def main():
            step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
            state = ff.init_state(step, drawn(shapes, 0), optimizer, drawn(shapes, 1))
            if first:
                state = ff.load(tmp_path / "a", state)
            for i in range(first, last):
                state, _ = step(state, drawn(shapes, i + 1))
            if last == 2:
                ff.save(tmp_path / "a", state)
            return ff.unshard(state.params)

        return ff.spmd(main, mesh)()[0]

    run(3, 0, 2)
    resumed = run(2, 2, 4)
    assert_near(run(1, 0, 4), resumed)


@pytest.mark.parametrize("optimizer", [ff.muon(0.1), ff.shampoo(0.1)])
def test_a_plan_knows_what_each_rank_sends(optimizer):
    shapes = [[(4, 6), (5, 3)], [(2, 7)]]

    def step_on(mesh):
        return ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")

    real, abstract = (ff.make_mesh({"data": 3}, k) for k in ("simulated", "abstract"))
    found = ff.plan(
        step_on(abstract),
        lambda: drawn(shapes, 0),
        optimizer,
        drawn(shapes, 1),
        mesh=abstract,
    )

    def main():
        step = step_on(real)
        state = ff.init_state(step, drawn(shapes, 0), optimizer, drawn(shapes, 1))
        with ff.ledger() as log:
            step(state, drawn(shapes, 1))
        return [(r.op, r.bytes) for r in log.of(real.rank)]

    for rank, records in enumerate(ff.spmd(main, real)()):
        assert [(r.op, r.bytes) for r in found.ranks[rank].ledger.records] == records


@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    n=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_owners_are_balanced(costs, n, seed):
    generator = torch.Generator().manual_seed(seed)
    held = torch.randint(0, 9, (len(costs), n), generator=generator).tolist()
    owners = balanced(costs, held, n)
    loads = [0] * n
    for cost, rank in zip(costs, owners, strict=True):
        loads[rank] += cost
    ideal = max(sum(costs) / n, max(costs))
    assert sum(loads) == sum(costs) and max(loads) <= ideal + max(costs) * (1 - 1 / n)
    assert balanced(costs, held, n) == owners


@pytest.mark.parametrize("n", [2, 3])
def test_unequal_parts_go_where_the_sizes_say(n):
    sizes = tuple(tuple((s + 2 * d) % 4 for d in range(n)) for s in range(n))
    mesh = ff.make_mesh({"data": n}, "simulated")

    def main():
        s, where = ff.axis_index("data"), group("data")
        how = LinearMap("all_to_all", sizes=sizes)
        x = torch.cat([torch.full((sizes[s][d],), 10.0 * s + d) for d in range(n)])
        y = apply_map(x, how, where)
        weight = torch.arange(len(y)) + s + 1.0
        back = grad(lambda x: (apply_map(x, how, where) * weight).sum())(x)
        assert torch.equal(back, apply_map(weight, how.transpose(), where))
        return y.tolist()

    with ff.ledger() as log:
        found = ff.spmd(main, mesh)()
    for d in range(n):
        assert found[d] == [10.0 * s + d for s in range(n) for _ in range(sizes[s][d])]
    for s in range(n):
        sent = [4 * sizes[s][d] for d in range(n) if d != s]
        assert log.of(s)[0].bytes == sum(sent)


@pytest.mark.parametrize("shape", [(520, 512), (64, 520)])
@pytest.mark.parametrize("steps", [0, 4, 5])
def test_memory_that_is_taken_once_gives_the_same_bits(shape, steps):
    room, how = {}, ((3.4445, -4.7750, 2.0315), steps, 1e-7)
    for seed in (0, 1):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        x = x.bfloat16()
        expected = matrix_functions.newton_schulz(x, *how)
        found = matrix_functions.newton_schulz(x, *how, room)
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_its_update_differentiates():
    generator = torch.Generator().manual_seed(0)
    w, g = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    optimizer = ff.muon(0.1, ns_dtype=torch.float64, weight_decay=0.0)

    def after(g):
        updates, _ = optimizer.update(g, optimizer.init(w), w)
        return (w + updates).square().sum()

    step = torch.zeros_like(g)
    step[1, 2] = 1e-6
    numeric = (after(g + step) - after(g - step)) / 2e-6
    torch.testing.assert_close(grad(after)(g)[1, 2], numeric, rtol=1e-5, atol=1e-7)


W, B = torch.ones(2, 2), {"w": torch.ones(2, 2), "b": torch.ones(2)}


def applied(optimizer, grads, params):
    return lambda: optimizer.apply(grads, optimizer.init(params), params)


def over_vmap():
    mesh = ff.make_mesh({"data": 2}, "vmap")
    plan = mixed({"data": 2, "model": 1})
    values, layout = plan[0]["ab"]["0"], plan[1]["ab/0"]

    def run(x):
        leaf = Sharded(x, layout)
        return ff.muon().apply(leaf, ff.muon().init(leaf), leaf)[0].local

    ff.spmd(run, mesh)(torch.ones(values.numel() // 2))


@pytest.mark.parametrize(
    ("call", "way_out"),
    [
        (lambda: ff.muon(-1.0), "learning_rate is -1.0: it must be 0 or more"),
        (lambda: ff.muon(momentum=1.5), "momentum is 1.5: it must be from 0 to 1"),
        (lambda: ff.muon(ns_steps=100), "ns_steps is 100"),
        (lambda: ff.muon(ns_coefficients=(1.0, 2.0)), "it has three numbers"),
        (lambda: ff.muon(adjust_lr_fn="best"), "one of .'original', 'match_rms_adamw'"),
        (lambda: ff.muon(ns_dtype=torch.int8), "take bfloat16"),
        (lambda: ff.muon().init(B), r"'b' is f32\[2\].*ff.partition\(.*ff.muon"),
        (lambda: ff.shampoo().init(B), r"'b' is f32\[2\].*ff.partition\(.*ff.shampoo"),
        (lambda: ff.muon().update(W, ff.muon().init(W)), r"update\(grads, state, par"),
        (lambda: ff.shampoo(eps=0.0), "eps above 0"),
        (lambda: ff.shampoo(interval=0), "at least 1"),
        (lambda: grad(lambda w: applied(ff.shampoo(), w, W)()[0].sum())(W), "ff.muon"),
        (over_vmap, "use a simulated mesh"),
    ],
)
def test_bad_input_is_refused(call, way_out):
    with pytest.raises(ValueError, match=way_out):
        call()

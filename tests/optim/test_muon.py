"""Muon over ranks is torch's, and Shampoo the formula; each matrix is done once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

import fsfunc as ff
from fsfunc import _torch, tree
from fsfunc.optim.matrix import orthogonal_momentum
from fsfunc.optim.matrix.matrix_exchange import MatrixExchange
from fsfunc.optim.matrix.orthogonal_momentum import newton_schulz_flops
from fsfunc.sharded.leaf import Sharded, is_sharded
from tests.checks import all_refused, simulated
from tests.optim.shards import mixed, placed, together
from tests.optim.steps import trained as stacked
from tests.optim.trees import assert_near
from tests.optim.trees import trained as stepped

DIMS = st.one_of(st.integers(1, 9), st.just(0))
UNITS = st.lists(
    st.lists(st.tuples(DIMS, DIMS), min_size=1, max_size=3), min_size=1, max_size=2
)


def drawn(shapes, seed):
    """Trees of these shapes by unit, of numbers whose means over ranks are exact."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randint(-64, 65, tuple(shape), generator=generator) / 64

    return [{f"w{i}": draw(s) for i, s in enumerate(unit)} for unit in shapes]


@ff.unit
def linear(params, factors):
    return sum((p * factors[name]).sum() for name, p in params.items())


def loss(params, batch):
    """Of which ``batch`` is the gradient."""
    return sum(linear(p, x) for p, x in zip(params, batch, strict=True))


def trained(optimizer, shapes, mesh, steps=2, transform=lambda step: step):
    """The whole parameters after some steps, and the state.

    Gradients differ from rank to rank, and their means are those drawn.
    """
    apart = (mesh.rank - (mesh.size - 1) / 2) / 32
    own = lambda seed: tree.map(lambda x: x + apart, drawn(shapes, seed))  # noqa: E731
    step = transform(optimizer(ff.value_and_grad(loss)))
    state = ff.init_state(step, drawn(shapes, 0), optimizer, own(1))
    for i in range(steps):
        state, _ = step(state, own(i + 1))
    return ff.unshard(state.params), state


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
    exchange = MatrixExchange(leaves, newton_schulz_flops, "muon", share_copies=True)
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
    real = orthogonal_momentum.newton_schulz

    def counted(x, *args, **named):
        if not isinstance(x, _torch.FakeTensor):
            done.append(x.shape)
        return real(x, *args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orthogonal_momentum, "newton_schulz", counted)
        optimizer = ff.muon(**how)
    axes, copy = MESHES[on]
    mesh = simulated(**axes)

    def transform(step):
        step = ff.shard(step, mesh, "data", zero=zero, replicate=copy)
        return ff.donate(step) if donated else step

    def main():
        params, state = trained(optimizer, shapes, mesh, transform=transform)
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


@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}])
@pytest.mark.parametrize("make", [ff.muon, ff.shampoo])
def test_any_layout_is_one_device(make, axes):
    values, plan = mixed(axes)
    steps = [tree.map(lambda x, k=k: x.sin() * k, values) for k in (1.0, 2.0)]
    optimizer = make(0.1, momentum=0.9, weight_decay=0.1)
    mesh = simulated(**axes)

    def main():
        grads = [placed(g, plan) for g in steps]
        return stepped(optimizer, placed(values, plan), grads)[0]

    expected, _ = stepped(optimizer, values, steps)
    assert_near(expected, together(ff.spmd(main, mesh)(), mesh))


def test_whatever_is_no_matrix_has_another_optimizer():
    params = {"w": torch.ones(6, 4), "b": torch.arange(4.0), "none": None, "n": 3}
    unit = ff.unit(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))
    optimizer = ff.partition(
        {"matrix": ff.muon(0.1), "other": ff.sharded_adam(0.1)},
        lambda path, leaf: "matrix" if leaf.ndim == 2 else "other",
    )
    x = torch.linspace(-1, 2, 24).view(4, 6)
    loss = lambda p, x: unit(p, x).square().mean()  # noqa: E731
    w, b = (torch.nn.Parameter(params[k].clone()) for k in "wb")
    theirs = torch.optim.Muon([w], lr=0.1), torch.optim.AdamW([b], lr=0.1)
    for _ in range(2):
        torch.tanh(x @ w + b).square().mean().backward()
        for one in theirs:
            one.step()
            one.zero_grad()
    expected = {**params, "w": w.detach(), "b": b.detach()}
    for stack, near in (("alone", 1e-6), ("donate(remat(shard))", 1e-3)):
        # Over ranks gradients differ in the last bit.
        for found in stacked(stack, optimizer, loss, [x] * 2, params):
            assert_near(expected, found.params, near)


W, B = torch.ones(2, 2), {"w": torch.ones(2, 2), "b": torch.ones(2)}


def applied(optimizer, grads, params):
    return lambda: optimizer.apply(grads, optimizer.init(params), params)


def over_vmap():
    mesh = ff.make_mesh({"data": 2}, "vmap")
    plan = mixed({"data": 2, "model": 1})
    values, layout = plan[0]["ab"][0], plan[1]["ab/0"]

    def run(x):
        leaf = Sharded(x, layout)
        return ff.muon().apply(leaf, ff.muon().init(leaf), leaf)[0].local

    ff.spmd(run, mesh)(torch.ones(values.numel() // 2))


MUON = ff.muon()
BAD = {
    "learning_rate is -1.0: it must be at least 0": lambda: ff.muon(-1.0),
    "momentum is 1.5: it must be at least 0 and at most 1": lambda: ff.muon(
        momentum=1.5
    ),
    "ns_steps is 100": lambda: ff.muon(ns_steps=100),
    "it has three numbers": lambda: ff.muon(ns_coefficients=(1.0, 2.0)),
    "one of .'original', 'match_rms_adamw'": lambda: ff.muon(adjust_lr_fn="best"),
    "take bfloat16": lambda: ff.muon(ns_dtype=torch.int8),
    r"'b' is f32\[2\].*ff.partition\(.*ff.muon": lambda: MUON.init(B),
    r"'b' is f32\[2\].*ff.partition\(.*ff.shampoo": lambda: ff.shampoo().init(B),
    r"update\(grads, state, par": lambda: MUON.update(W, MUON.init(W)),
    "eps is 0.0: it must be above 0": lambda: ff.shampoo(eps=0.0),
    "interval is 0: it must be at least 1": lambda: ff.shampoo(interval=0),
    "ff.muon": lambda: grad(lambda w: applied(ff.shampoo(), w, W)()[0].sum())(W),
    "use a simulated mesh": over_vmap,
}


test_bad_input_is_refused = all_refused(
    {says: (call, ValueError, says) for says, call in BAD.items()}
)


# Shampoo is the paper's formula on any mesh, its state on the owners alone


BLOCKS = st.fixed_dictionaries(
    {"block": st.sampled_from([3, 1024])},
    optional={
        "momentum": st.just(0.9),
        "b2": st.just(0.5),
        "interval": st.just(2),
        "weight_decay": st.just(0.1),
    },
)


def root(matrix):
    """To the power -1/4, by singular values, of eps at least."""
    u, s, v = torch.linalg.svd(matrix)
    return u @ torch.diag(s.clamp(min=1e-4) ** -0.25) @ v


def formula(w, grads, block, momentum=0.0, b2=1.0, interval=1, weight_decay=0.0):
    """One matrix after the gradients, as the paper's algorithm says, in float64."""
    w = w.double()
    for rows in w.split(block, 0):
        for x in rows.split(block, 1):
            left, right = (1e-4 * torch.eye(n, dtype=torch.float64) for n in x.shape)
            start = [x.storage_offset() // w.shape[1], x.storage_offset() % w.shape[1]]
            v = torch.zeros_like(x)
            for i, g in enumerate(grads):
                g = g.double()
                for dim in (0, 1):
                    g = g.narrow(dim, start[dim], x.shape[dim])
                weight = 1 if b2 == 1 else 1 - b2
                left = b2 * left + weight * g @ g.T
                right = b2 * right + weight * g.T @ g
                if i % interval == 0:
                    roots = root(left), root(right)
                v = momentum * v + roots[0] @ g @ roots[1]
                x -= 0.1 * weight_decay * x + 0.1 * v
    return w


@settings(max_examples=4)
@given(
    shapes=UNITS,
    how=BLOCKS,
    n=st.integers(1, 4),
    zero=st.integers(0, 3),
    donated=st.booleans(),
)
def test_it_is_the_formula_on_any_mesh(shapes, how, n, zero, donated):
    optimizer, mesh = ff.shampoo(0.1, **how), ff.make_mesh({"data": n}, "simulated")

    def transform(step):
        step = ff.shard(step, mesh, "data", zero=zero)
        return ff.donate(step) if donated else step

    def main():
        return trained(optimizer, shapes, mesh, steps=3, transform=transform)

    with ff.ledger() as log:
        found = ff.spmd(main, mesh)()
    grads = [drawn(shapes, i + 1) for i in range(3)]
    expected = tree.map(
        lambda w, *grads: formula(w, grads, **how).float() if w.numel() else w,
        drawn(shapes, 0),
        *grads,
    )
    held = 0
    for params, state in found:
        assert_near(expected, params, 1e-4)
        kept = tree.leaves(state.opt_state.preconditioners, is_sharded)
        held += sum((x.local if is_sharded(x) else x).numel() for x in kept)
    whole = sum(
        2 * (r**2 + c**2)
        for unit in shapes
        for rows, columns in unit
        for block in [how["block"]]
        for r in [min(block, rows - i) for i in range(0, rows, block)]
        for c in [min(block, columns - i) for i in range(0, columns, block)]
    )
    assert held == whole * (n if zero == 0 else 1)
    assert log.count("all_to_all") <= (6 if zero and n > 1 else 0)


def test_a_matrix_that_is_not_finite_spoils_itself_alone():
    w = {"a": torch.ones(2, 3), "b": torch.ones(3, 2)}
    grads = {"a": torch.full((2, 3), torch.inf), "b": torch.ones(3, 2)}
    optimizer = ff.shampoo(0.1)
    after, _ = optimizer.apply(grads, optimizer.init(w), w)
    assert after["a"].isnan().all() and after["b"].isfinite().all()


def test_a_state_of_another_mesh_is_refused():
    shapes, optimizer = [[(4, 6), (5, 3)]], ff.shampoo(0.1)
    mesh = ff.make_mesh({"data": 2}, "simulated")
    alone = optimizer.init(drawn(shapes, 0))

    def main():
        step = ff.shard(
            lambda s, g: optimizer.apply(g, s.opt_state, s.params), mesh, "data"
        )
        _, state = trained(
            optimizer, shapes, mesh, 0, lambda step: ff.shard(step, mesh, "data")
        )
        laid = ff.place(ff.shard(lambda s: 0.0, mesh, "data"), alone)
        return step(ff.TrainState(state.params, laid), state.params)

    with pytest.raises(ValueError, match="is laid out as .*the matrix along .*ff.load"):
        ff.spmd(main, mesh)()

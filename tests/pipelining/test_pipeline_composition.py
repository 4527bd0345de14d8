"""``pipeline`` with the other transforms, inside and outside, over meshes of more axes:
the parameters are those of one device, and gradients are reduced when the order says.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import assert_equals_one_device
from tests.checks import close, same
from tests.pipelining import models
from tests.pipelining.models import (
    NAMED,
    WIDTH,
    batch_of,
    chain,
    drop,
    layer,
    tied_layer,
)

S = ff.schedules
M, CALLS = 2, 4
MESHES = ({"data": 2, "pipe": 2}, {"pipe": 2, "data": 2})


def parameters(dtype=torch.float64):
    return models.parameters(CALLS, ("layers", "gain", "tied"), 5, dtype)


def batches(rows=16):
    made = [batch_of(rows, seed) for seed in (3, 4, 5)]
    return [{key: b[key] for key in "xy"} for b in made]


def loss_fn(params, batch):
    """Dropout, a leaf that two stages share, and a skip over the cut."""
    first = drop({"b": params["layers"][0]["b"]}, batch["x"])
    h = tied_layer({"layer": params["layers"][0], "tied": params["tied"]}, first)
    h = layer(params["layers"][1], h)
    h = layer(params["layers"][2], h) + first
    h = tied_layer({"layer": params["layers"][3], "tied": params["tied"]}, h)
    return (h * params["gain"] * batch["y"]).mean()


def optimizer():
    return ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.25))


def one_device(parts, loss=loss_fn, opt=optimizer, dtype=torch.float64, change=None):
    """(parameters, losses) after three steps on one device."""
    opt = opt()
    step = ff.accumulate(opt(ff.value_and_grad(loss)), parts)
    step = step if change is None else change(step)
    params = parameters(dtype)
    state, losses = ff.TrainState(params, opt.init(params)), []
    torch.manual_seed(0)
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state.params, losses


def on_ranks(mesh, build, loss=loss_fn, opt=optimizer, dtype=torch.float64):
    """(parameters, losses) after three steps, and the ledger of the last."""

    def main():
        made = opt()
        step = build(made(ff.value_and_grad(loss)), mesh)
        mine = [_local(b, mesh) for b in batches()]
        state, losses = ff.init_state(step, parameters(dtype), made, mine[0]), []
        for batch in mine:
            with ff.ledger() as log:
                state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        return ff.unshard(state.params), losses, log.of(mesh.rank)

    torch.manual_seed(0)
    return ff.spmd(main, mesh)()


def _local(batch, mesh):
    for axis in ("node", "data"):
        if axis in mesh.axes:
            batch = ff.local_batch(batch, mesh, axis)
    return batch


def pipe(f, mesh, schedule="1f1b", m=M):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=m, schedule=NAMED[schedule][0])


def data(f, mesh, **options):
    return ff.shard(f, mesh, "data", **options)


def bf16(f):
    return ff.precision(f, torch.float32, torch.float64)


ORDERS = {
    "shard(pipeline)": lambda f, mesh, **o: data(pipe(f, mesh), mesh, **o),
    "pipeline(shard)": lambda f, mesh, **o: pipe(data(f, mesh, **o), mesh),
}
MORE = {
    "pipeline": lambda f, mesh: pipe(f, mesh),
    "remat inside": lambda f, mesh: data(pipe(ff.remat(f), mesh), mesh),
    "remat between": lambda f, mesh: data(ff.remat(pipe(f, mesh)), mesh),
    "remat outside": lambda f, mesh: ff.remat(data(pipe(f, mesh), mesh)),
    "remat in shard in pipeline": lambda f, mesh: pipe(data(ff.remat(f), mesh), mesh),
    "donate": lambda f, mesh: ff.donate(data(pipe(f, mesh), mesh)),
    "donate inside": lambda f, mesh: data(pipe(ff.donate(f), mesh), mesh),
    "kept": lambda f, mesh: data(pipe(f, mesh), mesh, reshard_after_forward=False),
    "merged": lambda f, mesh: data(pipe(f, mesh), mesh, min_bytes=10**6),
    "zb_h1": lambda f, mesh: data(pipe(f, mesh, "zb_h1"), mesh),
    "zb_h1 in": lambda f, mesh: pipe(data(f, mesh), mesh, "zb_h1"),
    "zb_h1, remat": lambda f, mesh: data(pipe(ff.remat(f), mesh, "zb_h1"), mesh),
    "zb_v": lambda f, mesh: data(pipe(ff.remat(f), mesh, "zb_v"), mesh, zero=2),
    "zb_v in": lambda f, mesh: pipe(data(ff.remat(f), mesh, zero=2), mesh, "zb_v"),
    "interleaved": lambda f, mesh: data(pipe(f, mesh, "interleaved"), mesh),
    "gpipe in": lambda f, mesh: pipe(data(f, mesh), mesh, "gpipe"),
}


def check(found, expected, tolerance=1e-12):
    for params, losses, _ in found:
        close((params, losses), expected, tolerance)


@pytest.fixture(scope="module")
def reference():
    return one_device(2 * M)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("order", ORDERS)
def test_either_order_trains_as_one_device(order, zero, reference):
    mesh = ff.make_mesh(MESHES[zero % 2], "simulated")
    build = lambda f, mesh: ORDERS[order](f, mesh, zero=zero)  # noqa: E731
    check(on_ranks(mesh, build), reference)


@pytest.mark.parametrize("name", MORE)
def test_with_other_transforms_it_trains_as_one_device(name, reference):
    mesh = ff.make_mesh(MESHES[0], "simulated")
    if name == "pipeline":  # alone: every rank along "data" does the same
        mesh = ff.make_mesh({"pipe": 2}, "simulated")
        return check(on_ranks(mesh, MORE[name]), one_device(M))
    check(on_ranks(mesh, MORE[name]), reference)


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_over_three_axes_with_replicas(order, zero):
    mesh = ff.make_mesh({"node": 2, "pipe": 2, "data": 2}, "simulated")
    build = lambda f, mesh: ORDERS[order](  # noqa: E731
        f, mesh, zero=zero, replicate="node"
    )
    check(on_ranks(mesh, build), one_device(4 * M))


ACCUMULATED = {
    "shard(accumulate(pipeline))": lambda f, mesh: data(
        ff.accumulate(pipe(f, mesh), 2), mesh
    ),
    "accumulate(shard(pipeline))": lambda f, mesh: ff.accumulate(
        data(pipe(f, mesh), mesh), 2
    ),
    "accumulate(pipeline(shard))": lambda f, mesh: ff.accumulate(
        pipe(data(f, mesh), mesh), 2
    ),
    "shard(pipeline(accumulate))": lambda f, mesh: data(
        pipe(ff.accumulate(f, 2), mesh), mesh
    ),
    "pipeline(shard(accumulate))": lambda f, mesh: pipe(
        data(ff.accumulate(f, 2), mesh), mesh
    ),
    "pipeline(accumulate(shard))": lambda f, mesh: pipe(
        ff.accumulate(data(f, mesh), 2), mesh
    ),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_accumulation_inside_and_outside(name):
    mesh = ff.make_mesh(MESHES[0], "simulated")
    found = on_ranks(mesh, ACCUMULATED[name], chain)
    check(found, one_device(8, chain))


PRECISE = {
    "outside": lambda f, mesh: bf16(data(pipe(f, mesh), mesh)),
    "between": lambda f, mesh: data(bf16(pipe(f, mesh)), mesh),
    "inside": lambda f, mesh: data(pipe(bf16(f), mesh), mesh),
    "in shard in pipeline": lambda f, mesh: pipe(data(bf16(f), mesh), mesh),
}


@pytest.mark.parametrize("name", PRECISE)
def test_precision_inside_and_outside(name):
    mesh = ff.make_mesh(MESHES[0], "simulated")
    # float32 in the units: what travels has the dtype that the units return.
    check(on_ranks(mesh, PRECISE[name]), one_device(2 * M, change=bf16), 2e-6)


class Squared(ff.Interpretation):
    """Computes on the parts of leaves, beside the units that read these."""

    def unit(self, run, call):
        return lambda params, *x: run(tree.map(lambda w: w * w, params), *x)


def squared(f):
    return ff.transformed(f, Squared())


PARTS = {
    "between": lambda f, mesh, s: pipe(ff.remat(squared(data(f, mesh))), mesh, s),
    "outside": lambda f, mesh, s: ff.remat(pipe(squared(data(f, mesh)), mesh, s)),
    "around": lambda f, mesh, s: ff.remat(squared(pipe(data(f, mesh), mesh, s))),
    "around shard": lambda f, mesh, s: ff.remat(squared(data(pipe(f, mesh, s), mesh))),
    "no remat": lambda f, mesh, s: pipe(squared(data(f, mesh)), mesh, s),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("name", PARTS)
def test_a_transform_that_computes_on_parts(name, schedule):
    mesh = ff.make_mesh(MESHES[0], "simulated")
    plain = ff.value_and_grad(chain)
    one = ff.accumulate(squared(plain), 2 * M)
    mine = PARTS[name](plain, mesh, schedule)
    assert_equals_one_device(
        one, mine, mesh, parameters(), batches()[0], axis="data", tolerance=1e-12
    )


def test_leaves_that_an_optimizer_leaves_alone_stay():
    def opt():
        kinds = lambda path, x: "still" if "/b" in path else "moving"  # noqa: E731
        return ff.partition({"still": ff.scale(0.0), "moving": ff.sgd(0.5)}, kinds)

    expected = one_device(2 * M, opt=opt)
    mesh = ff.make_mesh(MESHES[0], "simulated")
    found = on_ranks(mesh, ORDERS["shard(pipeline)"], opt=opt)
    check(found, expected)
    for p, q in zip(found[0][0]["layers"], parameters()["layers"], strict=True):
        same(p["b"], q["b"])


def test_a_loss_may_reduce_over_the_data_axis_itself():
    """A collective between units sends nothing where its input is a stand-in."""

    def loss(params, batch):
        h = layer(params["layers"][0], batch["x"])
        h = layer(params["layers"][1], h - ff.pmean(h.detach().mean(), "data"))
        h = layer(params["layers"][2], h)
        return ff.pmean((layer(params["layers"][3], h) * batch["y"]).mean(), "data")

    def plainly(f, mesh):
        return data(ff.accumulate(f, M), mesh)

    mesh = ff.make_mesh(MESHES[0], "simulated")
    alone = on_ranks(ff.make_mesh({"data": 2}, "simulated"), plainly, loss)
    for order in ORDERS.values():
        check(on_ranks(mesh, order, loss), alone[0][:2])


# What is sent


def of(records, op, axis="data", phase=None):
    """A rank's records of an op over an axis."""
    chosen = [r for r in records if r.op == op and r.axis == (axis,)]
    return [r for r in chosen if phase in (None, r.phase)]


UNITS = CALLS // 2  # of a rank


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "interleaved"])
def test_gradients_are_reduced_when_the_order_says(order, zero, schedule):
    """Once a step in shard(pipeline), once a microbatch in pipeline(shard)."""
    mesh = ff.make_mesh(MESHES[0], "simulated")
    m = 4

    def build(f, mesh):
        if order == "shard(pipeline)":
            return data(pipe(f, mesh, schedule, m), mesh, zero=zero)
        return pipe(data(f, mesh, zero=zero), mesh, schedule, m)

    opt = lambda: ff.sgd(0.5)  # noqa: E731
    each = m if order == "pipeline(shard)" and zero != 1 else 1
    for rank, (*_, records) in enumerate(on_ranks(mesh, build, chain, opt)):
        op = "psum" if zero == 0 else "psum_scatter"
        reduced = of(records, op, phase="backward")
        assert len(reduced) == each * UNITS, rank
        bytes_ = (WIDTH * WIDTH + WIDTH) * 8 * (1 if zero == 0 else 0.5)
        assert {float(r.bytes) for r in reduced} == {bytes_}
        gathers = len(of(records, "all_gather"))
        if zero < 3:
            assert gathers == (UNITS if zero else 0)
            continue
        # Of the first rank's first unit the backward reads no parameter; of what a
        # forward ends with, it depends on the schedule whether it is still there.
        most = m * (2 * UNITS - (mesh.coordinates(rank)["pipe"] == 0))
        assert most - m * UNITS < gathers <= most


def test_a_clipped_norm_costs_one_number_more():
    mesh = ff.make_mesh(MESHES[0], "simulated")
    build = ORDERS["shard(pipeline)"]
    rule = ff.sgd(0.5)
    clipped = ff.chain(ff.clip_by_global_norm(0.5), rule)
    for (*_, more), (*_, less) in zip(
        on_ranks(mesh, build, chain, lambda: clipped),
        on_ranks(mesh, build, chain, lambda: rule),
        strict=True,
    ):
        *rest, norm = more
        assert rest == less
        assert norm.op == "psum" and norm.axis == ("data", "pipe")
        assert norm.bytes == 2 * 8 * 3 / 4


def test_a_step_leaves_the_state_that_it_was_given_as_it_was():
    mesh = ff.make_mesh(MESHES[0], "simulated")

    def main():
        made = optimizer()
        step = ORDERS["shard(pipeline)"](made(ff.value_and_grad(loss_fn)), mesh)
        mine = _local(batches()[0], mesh)
        state = ff.init_state(step, parameters(), made, mine)
        before = ff.unshard(state)
        torch.manual_seed(0)
        first = ff.unshard(step(state, mine)[0])
        torch.manual_seed(0)
        return before, ff.unshard(state), first, ff.unshard(step(state, mine)[0])

    for before, after, first, again in ff.spmd(main, mesh)():
        same(tree.leaves(after), tree.leaves(before))
        same(tree.leaves(again), tree.leaves(first))

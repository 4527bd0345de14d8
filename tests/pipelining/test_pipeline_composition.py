"""``pipeline`` with the other transforms, inside and outside, over meshes of more axes:
the parameters are those of one device, and gradients are reduced when the order says.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import assert_equals_one_device
from tests.checks import close
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

M, CALLS = 2, 4
NODES = ff.make_mesh({"node": 2, "pipe": 2, "data": 2}, "simulated")
MESH = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")


def parameters():
    return models.parameters(CALLS, ("layers", "gain", "tied"), 5)


def batches(rows=16):
    made = [batch_of(rows, seed) for seed in (3, 4)]
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


def one_device(parts, loss=loss_fn, opt=optimizer, change=lambda f: f):
    """(parameters, losses) after two steps on one device."""
    opt = opt()
    step = change(ff.accumulate(opt(ff.value_and_grad(loss)), parts))
    params = parameters()
    state, losses = ff.TrainState(params, opt.init(params)), []
    torch.manual_seed(0)
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state.params, losses


def on_ranks(mesh, build, loss=loss_fn, opt=optimizer):
    """(parameters, losses) after two steps, and the ledger of the last."""

    def main():
        made = opt()
        step = build(made(ff.value_and_grad(loss)), mesh)
        mine = [_local(b, mesh) for b in batches()]
        state, losses = ff.init_state(step, parameters(), made, mine[0]), []
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


def check(found, expected, tolerance=1e-12):
    for params, losses, _ in found:
        close((params, losses), expected, tolerance)


@pytest.mark.parametrize(
    ("order", "zero"), [("shard(pipeline)", 2), ("pipeline(shard)", 3)]
)
def test_over_three_axes_with_replicas(order, zero):
    build = lambda f, mesh: ORDERS[order](  # noqa: E731
        f, mesh, zero=zero, replicate="node"
    )
    check(on_ranks(NODES, build), one_device(4 * M))


PRECISE = {
    "outside": lambda f, mesh: bf16(data(pipe(f, mesh), mesh)),
    "in shard in pipeline": lambda f, mesh: pipe(data(bf16(f), mesh), mesh),
}


@pytest.mark.parametrize("name", PRECISE)
def test_precision_inside_and_outside(name):
    # float32 in the units: what travels has the dtype that the units return.
    check(on_ranks(MESH, PRECISE[name]), one_device(2 * M, change=bf16), 2e-6)


class Squared(ff.Interpretation):
    """Computes on the parts of leaves, beside the units that read these."""

    def unit(self, run, call):
        return lambda params, *x: run(tree.map(lambda w: w * w, params), *x)


def squared(f):
    return ff.transformed(f, Squared())


PARTS = {
    "between": ("zb_h1", lambda f, p: p(ff.remat(squared(data(f, MESH))))),
    "outside": ("zb_v", lambda f, p: ff.remat(p(squared(data(f, MESH))))),
    "around": ("1f1b", lambda f, p: ff.remat(squared(p(data(f, MESH))))),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_transform_that_computes_on_parts(name):
    schedule, build = PARTS[name]
    plain = ff.value_and_grad(chain)
    mine = build(plain, lambda f: pipe(f, MESH, schedule))
    assert_equals_one_device(
        ff.accumulate(squared(plain), 2 * M), mine, MESH, parameters(), batches()[0],
        axis="data", tolerance=1e-12,
    )  # fmt: skip


def test_a_loss_may_reduce_over_the_data_axis_itself():
    """A collective between units sends nothing where its input is a stand-in."""

    def loss(params, batch):
        h = layer(params["layers"][0], batch["x"])
        h = layer(params["layers"][1], h - ff.pmean(h.detach().mean(), "data"))
        h = layer(params["layers"][2], h)
        return ff.pmean((layer(params["layers"][3], h) * batch["y"]).mean(), "data")

    def plainly(f, mesh):
        return data(ff.accumulate(f, M), mesh)

    alone = on_ranks(ff.make_mesh({"data": 2}, "simulated"), plainly, loss)
    for order in ORDERS.values():
        check(on_ranks(MESH, order, loss), alone[0][:2])


# What is sent


def of(records, op, axis="data", phase=None):
    """A rank's records of an op over an axis."""
    chosen = [r for r in records if r.op == op and r.axis == (axis,)]
    return [r for r in chosen if phase in (None, r.phase)]


UNITS = CALLS // 2  # of a rank


@pytest.mark.parametrize(
    "order, zero, schedule",
    [
        ("shard(pipeline)", 0, "1f1b"),
        ("pipeline(shard)", 1, "gpipe"),
        ("pipeline(shard)", 2, "zb_h1"),
        ("shard(pipeline)", 3, "interleaved"),
        ("pipeline(shard)", 3, "interleaved"),
    ],
)
def test_gradients_are_reduced_when_the_order_says(order, zero, schedule):
    """Once a step in shard(pipeline), once a microbatch in pipeline(shard).

    And whatever the schedule, the parameters are those of one device.
    """
    m = 2

    def build(f, mesh):
        if order == "shard(pipeline)":
            return data(pipe(f, mesh, schedule, m), mesh, zero=zero)
        return pipe(data(f, mesh, zero=zero), mesh, schedule, m)

    opt = lambda: ff.sgd(0.5)  # noqa: E731
    each = m if order == "pipeline(shard)" and zero != 1 else 1
    found = on_ranks(MESH, build, chain, opt)
    check(found, one_device(2 * m, chain, opt))
    for rank, (*_, records) in enumerate(found):
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
        most = m * (2 * UNITS - (MESH.coordinates(rank)["pipe"] == 0))
        assert most - m * UNITS < gathers <= most

"""``pipeline`` with the other transforms, inside and outside, over meshes of more axes:
the parameters are those of one device, and gradients are reduced when the order says.
"""

import pytest

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import assert_equals_one_device
from tests.checks import close, with_ledger
from tests.optim.steps import data
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


def batch():
    made = batch_of(16, 3)
    return {key: made[key] for key in "xy"}


def loss_fn(params, batch):
    """Dropout, a leaf that two stages share, and a skip over the cut."""
    first = drop({"b": params["layers"][0]["b"]}, batch["x"])
    h = tied_layer({"layer": params["layers"][0], "tied": params["tied"]}, first)
    h = layer(params["layers"][1], h)
    h = layer(params["layers"][2], h) + first
    h = tied_layer({"layer": params["layers"][3], "tied": params["tied"]}, h)
    return (h * params["gain"] * batch["y"]).mean()


def state_of(optimizer):
    return ff.TrainState(parameters(), optimizer.init(parameters()))


def trains_as_one_device(mesh, build, parts, change=lambda f: f):
    """Two steps: every leaf of the state, and the losses."""
    optimizer = ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.25))
    step = optimizer(ff.value_and_grad(loss_fn))
    assert_equals_one_device(
        change(ff.accumulate(step, parts)), build(step, mesh), mesh,
        state_of(optimizer), batch(), goes_on=lambda out: out[0], tolerance=1e-12,
        axis=tuple(axis for axis in ("node", "data") if axis in mesh.axes),
    )  # fmt: skip


def pipe(f, mesh, schedule="1f1b", m=M):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=m, schedule=NAMED[schedule][0])


ORDERS = {
    "shard(pipeline)": lambda f, mesh, **o: data(pipe(f, mesh), mesh, **o),
    "pipeline(shard)": lambda f, mesh, **o: pipe(data(f, mesh, **o), mesh),
}


@pytest.mark.parametrize(
    ("order", "zero"), [("shard(pipeline)", 2), ("pipeline(shard)", 3)]
)
def test_over_three_axes_with_replicas(order, zero):
    build = lambda f, mesh: ORDERS[order](  # noqa: E731
        f, mesh, zero=zero, replicate="node"
    )
    trains_as_one_device(NODES, build, 4 * M)


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
        ff.accumulate(squared(plain), 2 * M), mine, MESH, parameters(), batch(),
        axis="data", exact=True,
    )  # fmt: skip


def test_a_loss_may_reduce_over_the_data_axis_itself():
    """A collective between units sends nothing where its input is a stand-in."""

    def loss(params, batch):
        h = layer(params["layers"][0], batch["x"])
        h = layer(params["layers"][1], h - ff.pmean(h.detach().mean(), "data"))
        h = layer(params["layers"][2], h)
        return ff.pmean((layer(params["layers"][3], h) * batch["y"]).mean(), "data")

    given, grad = (parameters(), batch()), ff.value_and_grad(loss)
    plainly = lambda mesh: data(ff.accumulate(grad, M), mesh)  # noqa: E731
    (expected, _), _ = with_ledger(plainly, *given)
    for order in ORDERS.values():
        wrap = lambda mesh, order=order: order(grad, mesh)  # noqa: E731
        for found, _ in with_ledger(wrap, *given, mesh=MESH):
            close(found, expected, 1e-12)


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

    step = ff.sgd(0.5)(ff.value_and_grad(chain))
    given = state_of(ff.sgd(0.5)), batch()
    expected = ff.accumulate(step, 2 * m)(*given)
    each = m if order == "pipeline(shard)" and zero != 1 else 1
    every = with_ledger(lambda mesh: build(step, mesh), *given, mesh=MESH)
    for rank, (found, log) in enumerate(every):
        close(found, expected, 1e-12)
        records = log.records
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

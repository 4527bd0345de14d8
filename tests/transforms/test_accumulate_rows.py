"""Which arguments `accumulate` and `pipeline` cut: the batch, as they are told."""

import time

import pytest
import torch

import fsfunc as ff
from tests import models
from tests.checks import on_ranks, refused, same, simulated

ROWS, MESH, OPTIMIZER = 8, simulated(), ff.sgd(0.5)
vag = ff.value_and_grad


def integers(*shape):
    return models.integers(*shape, seed=sum(shape), high=3)


@ff.unit
def layer(params, x):
    return x @ params["w"]


W, SCALE, X, Y = integers(3, 1), integers(ROWS), integers(ROWS, 3), integers(ROWS, 1)
# Frozen parameters and buffers with as many rows as the batch.
STATE = {"train": {"w": W}, "frozen": integers(ROWS, 3), "buffers": (SCALE,)}


def step(state, batch):
    def loss(train, frozen, buffers, batch):
        x, y = batch
        h = layer(train, x + frozen.sum(0)) + buffers[0].max()
        return (h - y).square().mean()

    grad = vag(loss, batch_argnums=3)
    return grad(state["train"], state["frozen"], state["buffers"], batch)


ORDERS = {
    "one device": lambda f, n: ff.accumulate(f, n),
    "shard(accumulate)": lambda f, n: ff.shard(ff.accumulate(f, n), MESH, "data"),
    "accumulate(shard)": lambda f, n: ff.accumulate(ff.shard(f, MESH, "data"), n),
}


def run(order, f, n, state, batch):
    """What each rank gets, whole."""
    g = ORDERS[order](f, n)
    if order == "one device":
        return [g(state, batch)]
    laid = ff.shard(lambda state, batch: 0.0, MESH, "data")
    return on_ranks(g, state, batch, laid=laid)


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_of_the_state_is_cut(order):
    for found in run(order, step, 4, STATE, (X, Y)):
        same(found, step(STATE, (X, Y)))


def empty_pipeline(f, n, **told):
    mesh = simulated(pipe=1)
    g = ff.pipeline(f, mesh, "pipe", n_microbatches=n, **told)
    return lambda *args, **named: ff.spmd(lambda: g(*args, **named), mesh)()[0]


def scaled(w, scale, x):
    """A frozen vector, as long as the batch."""
    return layer({"w": w}, x * scale.sum()).square().mean()


BOTH = pytest.mark.parametrize("cut", [ff.accumulate, empty_pipeline])
ARGS = (W, SCALE, X)


@BOTH
@pytest.mark.parametrize("told", [2, -1, (2,), "x"])
def test_the_batch_is_what_is_told(cut, told):
    args, named = ((W, SCALE), {"x": X}) if told == "x" else (ARGS, {})
    own, call = {"batch_argnums": told}, vag(scaled)
    for g in (cut(call, 4, **own), cut(vag(scaled, **own), 4)):
        same(g(*args, **named), call(*args, **named))


def mean_of_rows(w, x, y):
    return (w * x * y).sum(1).mean()


@BOTH
def test_nothing_is_guessed(cut):
    call = vag(scaled)
    no = lambda f, words: refused(f, ValueError, words)  # noqa: E731
    no(lambda: cut(call, 2)(*ARGS), "arguments 1, 2 hold .*batch_argnums=")
    no(lambda: cut(call, 2)(W, SCALE, x=X), "arguments 1, 'x' hold .*batch_argnums=")
    same(cut(call, 1)(*ARGS), call(*ARGS))  # nothing is to be cut
    for odd in (3, -4, "y", (1, "x")):
        g = cut(call, 2, batch_argnums=odd)
        no(lambda g=g: g(*ARGS), "3 positional arguments and no keywords")
    both = vag(mean_of_rows, argnums=(0, 1))  # parameters, or rows?
    no(lambda: cut(both, 2)(integers(3), X), "arguments 1 hold tensors: say which")
    pair = cut(vag(scaled, batch_argnums=(1, 2)), 2)
    no(lambda: pair(W, SCALE, X[:4]), "batch leaves differ in dim 0, .*'2': 4")
    alone = vag(lambda w, x: layer({"w": w}, x).mean())
    empty = lambda: cut(alone, 2)(W, X[:0])  # noqa: E731
    no(empty, r"0 rows .*\(0, 3\).*the batch is empty")
    start = time.perf_counter()
    no(lambda: cut(alone, 100_000)(W, X[:4]), "100000")
    assert time.perf_counter() - start < 2


def own_gradients(w, batch):
    def f(params, x, y):
        return (layer(params, x) - y).square().mean()

    return vag(f, argnums=(0, 1), batch_argnums=(1, 2))(w, *batch)


@pytest.mark.parametrize("order", ["shard(accumulate)", "accumulate(shard)"])
def test_they_are_the_ranks_own_on_any_mesh(order):
    each = run(order, own_gradients, 2, {"w": W}, (X, Y))
    alone = ff.accumulate(own_gradients, 2)
    expected, (by_w, _) = own_gradients({"w": W}, (X, Y))
    for rank, (value, (grads, by_x)) in enumerate(each):
        same((value, grads), (expected, by_w))
        same(by_x, alone({"w": W}, (X.chunk(2)[rank], Y.chunk(2)[rank]))[1][1])


def test_weighted_losses_and_integers_among_what_is_differentiated():
    def f(w, batch, keep):
        errors = (batch["x"] @ w - batch["ids"]).square()
        return ff.Weighted((errors * keep).sum(), keep.sum())

    batch = {"x": X, "ids": torch.arange(ROWS)}
    keep = (torch.arange(ROWS) % 3 > 0).float()
    g = vag(f, argnums=(0, 1), batch_argnums=(1, 2))
    value, (by_w, by_batch) = g(integers(3), batch, keep)
    found = ff.accumulate(g, 4)(integers(3), batch, keep)
    assert by_batch["ids"] is found[1][1]["ids"] is None
    torch.testing.assert_close(
        (found[0], found[1][0], found[1][1]["x"]), (value, by_w, by_batch["x"])
    )

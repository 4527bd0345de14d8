"""What `accumulate` cuts: the batch, and nothing of the state; on any mesh alike."""

import time

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.core.frames import frame
from tests import models
from tests.checks import on_ranks, same, simulated

ROWS, MESH = 8, simulated()


def integers(*shape):
    return models.integers(*shape, seed=sum(shape), high=3)


@ff.unit
def layer(params, x):
    return x @ params["w"]


# Frozen parameters and buffers with as many rows as the batch.
STATE = {
    "train": {"w": integers(3, 1)},
    "frozen": integers(ROWS, 3),
    "buffers": (integers(ROWS),),
}
X, Y = integers(ROWS, 3), integers(ROWS, 1)


def loss(train, frozen, buffers, batch):
    x, y = batch
    h = layer(train, x + frozen.sum(0)) + buffers[0].max()
    return (h - y).square().mean()


def step(state, batch):
    frozen = state["frozen"].detach()  # another object, the same memory
    return ff.value_and_grad(loss)(state["train"], frozen, state["buffers"], batch)


ORDERS = {
    "one device": lambda f, n, mesh: ff.accumulate(f, n),
    "shard(accumulate)": lambda f, n, mesh: ff.shard(ff.accumulate(f, n), mesh, "data"),
    "accumulate(shard)": lambda f, n, mesh: ff.accumulate(ff.shard(f, mesh, "data"), n),
}


def run(order, f, n, state, batch):
    """What each rank gets, whole."""
    g = ORDERS[order](f, n, MESH)
    if order == "one device":
        return [g(state, batch)]
    return on_ranks(g, state, batch, laid=lambda state, batch: 0.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [2, 4])
def test_nothing_of_the_state_is_cut(order, n) -> None:
    expected = step(STATE, (X, Y))
    for found in run(order, step, n, STATE, (X, Y)):
        same(found, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_leaves_that_disagree_are_refused_as_a_pipeline_refuses_them(order) -> None:
    def scaled(w, scale, x):
        return ((x @ w) * scale).square().mean()

    def f(w, batch):  # ``scale`` is an argument as the batch is, of half its rows
        return ff.value_and_grad(scaled)(w, batch[1][: len(batch[0]) // 2], batch[0])

    mesh = ff.make_mesh({"pipe": 1}, "simulated")
    pipe = ff.pipeline(f, mesh, "pipe", n_microbatches=2)
    state, batch = integers(3, 4), (X, integers(ROWS))
    with pytest.raises(ValueError) as theirs:
        ff.spmd(lambda: pipe(state, batch), mesh)()
    with pytest.raises(ValueError) as ours:
        run(order, f, 2, state, batch)
    said = "batch leaves differ in dim 0, along which microbatches are cut"
    for error in (ours, theirs):
        assert said in str(error.value)
        assert "frozen parameters go into the first argument" in str(error.value)
    if order == "one device":
        assert str(ours.value) == str(theirs.value).split("\n")[0]


def own_gradients(w, batch):
    def f(params, x, y):
        return (layer(params, x) - y).square().mean()

    return ff.value_and_grad(f, argnums=(0, 1))(w, *batch)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradients_by_the_batch_are_joined_in_order(n) -> None:
    params = STATE["train"]
    value, (grads, by_x) = own_gradients(params, (X, Y))
    found = ff.accumulate(own_gradients, n)(params, (X, Y))
    same(found, (value, (grads, by_x)))
    assert found[1][1].shape == X.shape


@pytest.mark.parametrize("order", ["shard(accumulate)", "accumulate(shard)"])
def test_they_are_the_ranks_own_on_any_mesh(order) -> None:
    params = STATE["train"]
    each = run(order, own_gradients, 2, params, (X, Y))
    alone = ff.accumulate(own_gradients, 2)
    expected, (by_w, _) = own_gradients(params, (X, Y))
    for rank, (value, (grads, by_x)) in enumerate(each):
        same((value, grads), (expected, by_w))
        mine = X.chunk(2)[rank], Y.chunk(2)[rank]
        same(by_x, alone(params, mine)[1][1])


def test_weighted_losses_and_integers_among_what_is_differentiated() -> None:
    def f(w, batch, keep):
        errors = (batch["x"] @ w - batch["ids"]).square()
        return ff.Weighted((errors * keep).sum(), keep.sum())

    batch = {"x": X, "ids": torch.arange(ROWS)}
    keep = (torch.arange(ROWS) % 3 > 0).float()
    g = ff.value_and_grad(f, argnums=(0, 1))
    expected = g(integers(3), batch, keep)
    value, (by_w, by_batch) = ff.accumulate(g, 4)(integers(3), batch, keep)
    assert expected[1][1]["ids"] is by_batch["ids"] is None
    torch.testing.assert_close(
        (value, by_w, by_batch["x"]), (expected[0], expected[1][0], expected[1][1]["x"])
    )


def inner(w, x, y):
    return (x @ w - y).square().mean()


def tuned(w, batch):
    """A gradient at parameters that were made in the step."""
    return ff.value_and_grad(inner)(w - 0.5 * w.square(), *batch)


def test_parameters_made_in_the_step_are_not_cut() -> None:
    w = integers(3, 1)
    same(ff.accumulate(tuned, 4)(w, (X, Y)), tuned(w, (X, Y)))


def test_what_may_be_rows_or_parameters_is_asked_for() -> None:
    def f(w, batch):
        x, y = batch
        g = ff.value_and_grad(lambda d, x, y: inner(w, x + d, y))
        return g(torch.zeros_like(x), x, y)

    w = integers(3, 1)
    with pytest.raises(ValueError, match=r"argument 0 .* 8 rows.*batch_argnums=") as e:
        ff.accumulate(f, 4)(w, (X, Y))
    assert "\n" not in str(e.value)
    expected = f(w, (X, Y))
    same(ff.accumulate(f, 4, batch_argnums=(0, 1, 2))(w, (X, Y)), expected)
    same(ff.accumulate(f, 4, batch_argnums=(0, -2, -1))(w, (X, Y)), expected)
    square = integers(ROWS, ROWS)  # parameters, with as many rows as the batch
    batch = integers(ROWS, ROWS), integers(ROWS, ROWS)
    with pytest.raises(ValueError, match="parameters, which are not cut, or rows"):
        ff.accumulate(tuned, 4)(square, batch)
    expected = tuned(square, batch)
    same(ff.accumulate(tuned, 4, batch_argnums=(1, 2))(square, batch), expected)
    with pytest.raises(ValueError, match="has 3 positional arguments"):
        ff.accumulate(tuned, 4, batch_argnums=3)(square, batch)


def empty_pipeline(f, n):
    mesh = ff.make_mesh({"pipe": 1}, "simulated")
    g = ff.pipeline(f, mesh, "pipe", n_microbatches=n)
    return lambda *args: ff.spmd(lambda: g(*args), mesh)()


@pytest.mark.parametrize("cut", [ff.accumulate, empty_pipeline])
def test_an_empty_batch_is_refused(cut) -> None:
    def f(w, x):
        return layer({"w": w}, x).mean()

    with pytest.raises(ValueError, match=r"0 rows .*\(0, 3\).*the batch is empty"):
        cut(ff.value_and_grad(f), 2)(integers(3, 1), torch.ones(0, 3))


@pytest.mark.parametrize("cut", [ff.accumulate, empty_pipeline])
def test_too_many_microbatches_are_refused_at_once(cut) -> None:
    def f(w, x):
        return layer({"w": w}, x).mean()

    start = time.perf_counter()
    with pytest.raises(ValueError, match="100000"):
        cut(ff.value_and_grad(f), 100_000)(integers(3, 1), torch.ones(4, 3))
    assert time.perf_counter() - start < 2


def mean_of_rows(w, x, y):
    return (w * x * y).sum(1).mean()


def test_a_batch_in_the_keywords_of_the_step_is_cut() -> None:
    def f(w, *, x):
        return ff.value_and_grad(mean_of_rows, argnums=(0, 1))(w, x, x.abs())

    same(ff.accumulate(f, 2)(integers(3), x=X), f(integers(3), x=X))


def test_the_state_is_not_held_by_what_outlives_the_call() -> None:
    def f(w, x):
        value, grad = ff.value_and_grad(lambda w, x: (w * x).sum())(w, x)
        frames.append(frame())
        return value, grad

    frames = []
    ff.accumulate(f, 2)(integers(3), X)
    assert [h.given for h in frames[0].handlers] == [None]


def test_it_is_planned_and_recorded() -> None:
    def train(state, batch):
        _, (grads, by_x) = own_gradients(state.params, batch)
        return state.apply_gradients(grads, OPTIMIZER), {"by_x": by_x}

    def main():
        s = ff.shard(ff.accumulate(train, 2), MESH, "data")
        mine = ff.local_batch((X, Y), MESH, "data")
        state = ff.init_state(s, STATE["train"], OPTIMIZER, mine)
        return ff.unshard(s(state, mine)[0].params), s(state, mine)[1]["by_x"]

    one = ff.TrainState(STATE["train"], OPTIMIZER.init(STATE["train"]))
    expected, _ = train(one, (X, Y))
    for params, by_x in ff.spmd(main, MESH)():
        same(params, expected.params)
        assert by_x.shape == (4, 3)
    assert tree.leaves(expected.params)


OPTIMIZER = ff.sgd(0.5)

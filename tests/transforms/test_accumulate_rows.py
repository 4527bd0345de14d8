"""Which arguments `accumulate` and `pipeline` cut: the batch, as they are told."""

import time

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
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
    grad = ff.value_and_grad(loss, batch_argnums=3)
    return grad(state["train"], state["frozen"], state["buffers"], batch)


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


def empty_pipeline(f, n, **told):
    mesh = ff.make_mesh({"pipe": 1}, "simulated")
    g = ff.pipeline(f, mesh, "pipe", n_microbatches=n, **told)
    return lambda *args, **named: ff.spmd(lambda: g(*args, **named), mesh)()[0]


def scaled(w, scale, x):
    """A frozen vector, as long as the batch."""
    return layer({"w": w}, x * scale.sum()).square().mean()


BOTH = pytest.mark.parametrize("cut", [ff.accumulate, empty_pipeline])
NAMED = [2, -1, (2,), "x"]


@BOTH
@pytest.mark.parametrize("told", NAMED)
@pytest.mark.parametrize("place", ["the gradient call", "the transform"])
def test_the_batch_is_what_is_told(cut, told, place) -> None:
    w, scale, x = integers(3, 1), integers(ROWS), X
    args = (w, scale) if told == "x" else (w, scale, x)
    named = {"x": x} if told == "x" else {}
    own = {"batch_argnums": told}
    call = ff.value_and_grad(scaled)
    if place == "the transform":
        found = cut(call, 4, **own)(*args, **named)
    else:
        found = cut(ff.value_and_grad(scaled, **own), 4)(*args, **named)
    same(found, call(*args, **named))


@BOTH
def test_nothing_is_guessed(cut) -> None:
    w, scale, x = integers(3, 1), integers(ROWS), X
    call = ff.value_and_grad(scaled)
    for args, named in [((w, scale, x), {}), ((w, scale), {"x": x})]:
        said = "1, 2" if not named else "1, 'x'"
        with pytest.raises(ValueError, match=f"arguments {said} hold .*batch_argnums="):
            cut(call, 2)(*args, **named)
    same(cut(call, 1)(w, scale, x), call(w, scale, x))  # nothing is to be cut
    for odd in (3, -4, "y", (1, "x")):
        with pytest.raises(ValueError, match="3 positional arguments and no keywords"):
            cut(call, 2, batch_argnums=odd)(w, scale, x)
    both = ff.value_and_grad(mean_of_rows, argnums=(0, 1))  # parameters, or rows?
    with pytest.raises(ValueError, match="arguments 1 hold tensors: say which"):
        cut(both, 2)(integers(3), X)


@BOTH
def test_leaves_that_disagree_are_refused(cut) -> None:
    with pytest.raises(ValueError, match="batch leaves differ in dim 0, .*'2': 4"):
        call = ff.value_and_grad(scaled, batch_argnums=(1, 2))
        cut(call, 2)(integers(3, 1), integers(ROWS), X[:4])


def own_gradients(w, batch):
    def f(params, x, y):
        return (layer(params, x) - y).square().mean()

    return ff.value_and_grad(f, argnums=(0, 1), batch_argnums=(1, 2))(w, *batch)


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
    g = ff.value_and_grad(f, argnums=(0, 1), batch_argnums=(1, 2))
    expected = g(integers(3), batch, keep)
    value, (by_w, by_batch) = ff.accumulate(g, 4)(integers(3), batch, keep)
    assert expected[1][1]["ids"] is by_batch["ids"] is None
    torch.testing.assert_close(
        (value, by_w, by_batch["x"]), (expected[0], expected[1][0], expected[1][1]["x"])
    )


def inner(w, x, y):
    return (x @ w - y).square().mean()


def test_parameters_made_in_the_step_are_not_cut() -> None:
    def tuned(w, batch):
        two = lambda w, batch: inner(w, *batch)  # noqa: E731
        return ff.value_and_grad(two)(w - 0.5 * w.square(), batch)

    for w, batch in [
        (integers(3, 1), (X, Y)),
        (integers(ROWS, ROWS), (integers(ROWS, ROWS), integers(ROWS, ROWS))),
    ]:
        same(ff.accumulate(tuned, 4)(w, batch), tuned(w, batch))


def test_rows_made_in_the_step_may_be_differentiated() -> None:
    def f(w, batch):
        x, y = batch
        shifted = lambda d, x, y: inner(w, x + d, y)  # noqa: E731
        g = ff.value_and_grad(shifted, batch_argnums=(0, 1, 2))
        return g(torch.zeros_like(x), x, y)

    w = integers(3, 1)
    same(ff.accumulate(f, 4)(w, (X, Y)), f(w, (X, Y)))


@BOTH
def test_an_empty_batch_is_refused(cut) -> None:
    def f(w, x):
        return layer({"w": w}, x).mean()

    with pytest.raises(ValueError, match=r"0 rows .*\(0, 3\).*the batch is empty"):
        cut(ff.value_and_grad(f), 2)(integers(3, 1), torch.ones(0, 3))


@BOTH
def test_too_many_microbatches_are_refused_at_once(cut) -> None:
    def f(w, x):
        return layer({"w": w}, x).mean()

    start = time.perf_counter()
    with pytest.raises(ValueError, match="100000"):
        cut(ff.value_and_grad(f), 100_000)(integers(3, 1), torch.ones(4, 3))
    assert time.perf_counter() - start < 2


def mean_of_rows(w, x, y):
    return (w * x * y).sum(1).mean()


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

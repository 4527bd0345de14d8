"""What a pipelined call differentiates is not cut: parameters, never rows of a batch.

A row that stands beside rows of another microbatch would broadcast, or be gathered
from, and make a number that looks like any other.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import close, nothing_sent, refused, simulated, with_ledger
from tests.models import chain, floats, layer, layers

MESH = simulated(pipe=2)
PARAMS = [{"w": floats(4, 4, seed=k)} for k in range(2)]
X, Y, GAIN = floats(4, 4, seed=2), floats(4, 4, seed=3), floats(4, seed=4)
IDS = torch.tensor([0, 2, 1, 3])
lookup = ff.unit(lambda table, ids: table[ids])


def through(params, x):
    for p in params:
        x = layer(p, x)
    return x


def squares(params, x, y):
    return (through(params, x) - y).square().mean()


def indexed(params, x, ids):
    """Of scores that are not cut these are the first rows, whatever the microbatch."""
    return torch.log_softmax(through(params, x), -1)[torch.arange(len(ids)), ids].mean()


def gained(params, gain, x, ids):
    return indexed([*params, {"w": torch.diag(gain)}], x, ids) * gain.sum()


def looked_up(params, table, ids, y):
    return squares(params, lookup(table, ids), y)


def on(f, m):
    return ff.pipeline(f, MESH, "pipe", n_microbatches=m)


ROWS = {
    "an argument": (squares, (0, 1), (PARAMS, X, Y), 1),
    "rows by index": (indexed, (0, 1), (PARAMS, X, IDS), 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_batch_are_refused_and_the_way_out_is_right(name):
    """The message names accumulation around; and one microbatch is not cut."""
    loss, argnums, args, told = ROWS[name]
    cut = tuple(k for k, x in enumerate(args) if x is not PARAMS)
    grad = on(ff.value_and_grad(loss, argnums, batch_argnums=cut), 2)
    said = f"argument {told} is differentiated, and is part of the batch.*ff.accumulate"
    for call in (grad, lambda *args: ff.place(grad, *args)):
        with pytest.raises(ValueError, match=said), nothing_sent():
            ff.spmd(lambda call=call: call(*args), MESH)()
    call = ff.value_and_grad(loss, argnums)
    again = ff.accumulate(on(call, 1), 2, batch_argnums=cut)
    for grad in (on(call, 1), again):
        for found in ff.spmd(lambda grad=grad: grad(*args), MESH)():
            close(found, call(*args))


LONG = {
    "a gain": (gained, (0, 1), (PARAMS, GAIN, X, IDS)),
    "read outside units": (
        lambda p, x, y: squares(p["layers"], x, y) + p["gain"].sum(), 0,
        ({"layers": PARAMS, "gain": GAIN}, X, Y),
    ),
    "rows that ids choose": (
        lambda p, ids, y: squares(p["layers"], p["table"][ids], y), 0,
        ({"layers": PARAMS, "table": X}, IDS, Y),
    ),
    "rows that a unit's parameters are made of": (
        lambda p, ids, y: looked_up(p["layers"], p["table"].tanh(), ids, y), 0,
        ({"layers": PARAMS, "table": X}, IDS, Y),
    ),
    "a table": (looked_up, (0, 1), (PARAMS, X, IDS, Y)),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_parameters_as_long_as_the_batch_are_parameters(name):
    loss, argnums, args = LONG[name]
    call = ff.value_and_grad(loss, argnums, batch_argnums=(-2, -1))
    for found in ff.spmd(lambda: on(call, 4)(*args), MESH)():
        close(found, call(*args))


# Terms of parameters beside a pipelined loss; within it they go into units alone


GRID = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")
DOUBLE = {"dtype": torch.float64}
W = layers(4, 3, bias=False, make=floats, **DOUBLE)
BATCH = floats(8, 3, seed=9, **DOUBLE)
loss = chain()


def penalty(w):
    return ff.tree_sum(tree.map(lambda a: a * a, w)) + ff.global_norm(w)


def pipelined(f):
    return ff.pipeline(f, GRID, "pipe", n_microbatches=2)


ORDERS = {
    "shard outside": lambda f, zero: ff.shard(pipelined(f), GRID, "data", zero=zero),
    "pipeline outside": lambda f, zero: pipelined(ff.shard(f, GRID, "data", zero=zero)),
}


def found(f, order, zero):
    step = ORDERS[order](f, zero)
    return [x for x, _ in with_ledger(lambda mesh: step, W, BATCH, mesh=GRID)]


@pytest.mark.parametrize(("order", "zero"), [*zip(ORDERS, (0, 3), strict=True)])
def test_a_penalty_has_a_gradient_call_of_its_own(order, zero):
    def step(w, x):
        value, g = ff.value_and_grad(loss)(w, x)
        more, h = ff.value_and_grad(penalty)(w)
        n = ff.global_norm(g)
        return value + more + n**2, tree.map(torch.add, g, h)

    value, right = step(W, BATCH)
    for one, grads in found(step, order, zero):
        close((one, grads), (value, right))


OUTSIDE = "is read outside units in a loss that a pipeline runs.*own gradient call"
SLOPE = "differentiates or maps unit .*one unit"
MADE = "parameter that was made in the loss"


def slope(w, x):
    return ff.value_and_grad(lambda x: loss(w, x))(x)[1]


INSIDE = {  # leaves read by themselves are whole; whose a product is, is not known
    "a norm": (OUTSIDE, lambda w, x: loss(w, x) + ff.global_norm(w) ** 2),
    "a factor": (OUTSIDE, lambda w, x: loss(tree.map(lambda a: a * x.mean(), w), x)),
    "whole ones": (OUTSIDE, lambda w, x: loss(w, x) + ff.unshard(w)[0]["w"].sum()),
    "a scale": (OUTSIDE, lambda w, x: loss(ff.tree_scale(w, ff.global_norm(w)), x)),
    "made": (MADE, lambda w, x: loss([{"w": a * x.mean()} for a in tree.leaves(w)], x)),
    "a gradient call": (SLOPE, lambda w, x: slope(w, x).square().sum()),
}


@pytest.mark.parametrize(("i", "name"), [*enumerate(INSIDE)])
def test_within_it_parameters_go_into_units(i, name):
    (text, bad), order = INSIDE[name], list(ORDERS)[i % 2]
    with pytest.raises((ValueError, RuntimeError), match=text), ff.ledger() as log:
        found(ff.value_and_grad(bad), order, 3)
    assert not log.records


def test_nor_is_it_a_gradient_that_somebody_differentiates():
    def around(x):
        inner = lambda x: pipelined(ff.value_and_grad(loss))(W, x)[0]  # noqa: E731
        return ff.value_and_grad(inner)(x)[1].sum()

    call = ff.spmd(lambda: ff.value_and_grad(around)(BATCH), GRID)
    refused(call, RuntimeError, "must own the gradient call.*inside the")

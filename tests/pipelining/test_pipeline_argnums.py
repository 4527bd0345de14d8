"""What a pipelined call differentiates is not cut: parameters, never rows of a batch.

A row that stands beside rows of another microbatch would broadcast, or be gathered
from, and make a number that looks like any other.
"""

import pytest
import torch

import fsfunc as ff
from tests.checks import close, nothing_sent, simulated
from tests.models import floats, layer

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

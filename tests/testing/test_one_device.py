"""Law 1 as a check: what it compares, and what its message says.

What passes it: all that `tests/transforms/test_shard_laws.py` draws.
"""

import math

import pytest
import torch

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device, integers
from tests.models import chain, layers, linear

MESH = ff.make_mesh({"data": 2}, "simulated")
LOSS = chain(linear)  # exact on integers
STEP = ff.value_and_grad(LOSS)
PARAMS = layers(2)
ROWS = integers(4, 4, seed=9)


def forgets(params, x):
    return STEP(params, x)


def sums(params, x):
    loss, grads = STEP(params, x)
    return ff.pmean(loss, "data"), ff.psum(grads, "data")


def short(params, x):
    loss, grads = ff.pmean(STEP(params, x), "data")
    return loss, [{"w": g["w"][:2], "b": g["b"]} for g in grads]


def halved(params, x):
    return ff.tree.map(lambda g: g.half(), ff.pmean(STEP(params, x), "data"))


def listed(params, x):
    return [*ff.pmean(STEP(params, x), "data")]


MESSAGES = {
    forgets: r"""forgets on Mesh\({'data': 2}, 'simulated'\) is not """
    r"""value_and_grad\(loss\) on one device
'0' f32\[\] differs
  one device  [\d.]+
  rank 0      [\d.]+
  rank 1      [\d.]+
each rank has what its own rows alone give: nothing was reduced over "data"
nothing was sent""",
    sums: r"""'1/0/b' f32\[4\] differs at \(0,\), in 4 of 4 elements
(.*\n){3}it is 2 times too large, the size of "data": a sum in the place of a mean.*
the last collectives:
  psum over data at .*test_one_device.py:\d+""",
    short: r"""'1/0/w' is f32\[2, 4\], not f32\[4, 4\]
(.*\n)*dim 0 is 2 times too short, as if it were a part""",
    halved: r"'0' is f16\[\], not f32\[\]",
    listed: r"on rank 0 .*tuple",
}


@pytest.mark.parametrize("wrong", MESSAGES, ids=lambda fn: fn.__name__)
def test_the_message_says_what_and_why(wrong):
    with pytest.raises(AssertionError, match=MESSAGES[wrong]):
        assert_equals_one_device(STEP, wrong, MESH, PARAMS, ROWS)


def test_split_leaves_are_laid_out():
    mesh = ff.make_mesh({"data": 2, "model": 2}, "simulated")

    @ff.unit
    def mlp(p, x):
        return ff.nn.row_linear(ff.nn.column_linear(x, p["up"]), p["down"])

    def loss(p, x):
        return mlp(p, x).sum() / len(x)

    p = {"up": integers(4, 4, seed=1), "down": integers(4, 4, seed=2)}
    layouts = {"up": ff.Split(0, "model"), "down": ff.Split(1, "model")}
    step = ff.value_and_grad(loss)
    plain = ff.value_and_grad(lambda p, x: (x @ p["up"].T @ p["down"].T).sum() / len(x))
    transformed = ff.shard(step, mesh, "data")
    assert_equals_one_device(plain, transformed, mesh, p, ROWS, layouts=layouts)


def test_ranks_without_values_are_refused():
    mesh = ff.make_mesh({"data": 2}, "abstract")
    with pytest.raises(ValueError, match="whose ranks have no values of their own"):
        assert_equals_one_device(STEP, STEP, mesh, PARAMS, ROWS)


@pytest.mark.processes
def test_processes_say_their_own_rank(processes):
    said = processes(PROGRAM, 2)
    assert "right\n" in said and "rank 1      " in said


PROGRAM = """
import torch, fsfunc as ff
from fsfunc.testing import assert_equals_one_device, integers

mesh = ff.make_mesh({"data": 2})
step = ff.value_and_grad(lambda w, x: (x @ w).sum() / len(x))
given = integers(4), integers(4, 4)
assert_equals_one_device(step, lambda w, x: ff.pmean(step(w, x), "data"), mesh, *given)
print("right")
try:
    assert_equals_one_device(step, step, mesh, *given)
except AssertionError as error:
    print(error)
"""


@pytest.mark.parametrize("argument", ["state", "batch"])
def test_what_is_written_is_seen_beside_nan_and_beside_a_donated_state(argument):
    step = lambda state, x: {"n": torch.ones(())}  # noqa: E731

    def writes(state, x):
        (state if argument == "state" else x)[1] += 1
        return step(state, x)

    mine = writes if argument == "state" else ff.donate(writes)
    given = torch.tensor([math.nan, 1.0]), torch.ones(4)
    with pytest.raises(AssertionError, match=f"wrote into the {argument}'s"):
        assert_equals_one_device(step, mine, MESH, *given)
    with pytest.raises(
        AssertionError, match=f"one device: it wrote into the {argument}'s"
    ):
        assert_equals_one_device(writes, step, MESH, *given)

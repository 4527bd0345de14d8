"""Gradient calls of every form: under ``shard`` each is that of one device.

What a gradient call does not differentiate is a constant to it, in units too; a loss
may be reduced by its user; units called without gradients leave the others alone.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from fsfunc.testing import exact, residues
from tests.checks import same, simulated
from tests.models import integers, layer, linear

MESH, GRID = simulated(), simulated(node=2, data=2)
SMOOTH = {"w": torch.zeros(3, 3), "b": torch.zeros(3)}
ROWS = torch.zeros(4, 3)
grad = ff.value_and_grad


def captured(params, x):
    """A target that is held fixed, as in self-distillation."""
    return grad(lambda p: (layer(p, x) - 2 * layer(params, x)).square().mean())(params)


def in_part(params, x):
    """One leaf is captured, and its neighbour in the buffer is not."""

    def loss(p):
        return layer({"w": params["w"], "b": p["b"]}, x).square().mean()

    return grad(loss)(params)


def adversarial(params, x):
    """A gradient call by the data within one by the parameters."""

    def loss(p):
        at = lambda d: layer(p, x + d).square().sum()  # noqa: E731
        return layer(p, x + 0.1 * grad(at)(torch.zeros_like(x))[1].sign()).mean()

    return grad(loss)(params)


def beside(params, x):
    """A leaf that a unit reads, and that is read beside it as well."""

    def loss(p):
        doubled = tree.map(lambda w: 2 * w, p)
        return (layer(p, x) + layer(doubled, x)).square().mean()

    return grad(loss)(params)


def between(params, x):
    """A loss that differentiates by what a unit returned, once and once more."""

    def loss(p):
        h = layer(p, x)
        middle = layer(p, h)
        y = layer(p, middle)
        by = [z.square().sum() for z in (y, middle)]
        slopes = [torch.autograd.grad(z, h, retain_graph=True)[0] for z in by]
        return (y * (1 + slopes[0] - slopes[1])).mean()

    return grad(loss)(params)


MATRICES = {k: {"w": torch.zeros(4, 4)} for k in "abc"}
X = torch.zeros(8, 4)


def mean(y):
    return y.square().sum(1).mean()


def unseen_first(p, x):
    with torch.no_grad():
        x = linear(p["a"], x)
    return mean(linear(p["c"], linear(p["b"], x)))


def unseen_between(p, x):
    y = linear(p["b"], x)
    with torch.no_grad():
        z = linear(p["a"], x)
    return mean(linear(p["c"], y * z))


def unseen_last(p, x):
    y = linear(p["c"], linear(p["b"], x))
    with torch.no_grad():
        z = linear(p["a"], y)
    return (y * z).sum(1).mean()


def same_weight(p, x):
    """Its own gradient comes from the other call alone."""
    with torch.no_grad():
        y = linear(p["b"], x)
    return mean(linear(p["b"], y))


GAIN = {**SMOOTH, "gain": torch.zeros(3)}
WIDE = torch.zeros(8, 3)


def own(p, x):
    q = {"w": p["w"], "b": p["b"]}
    return (linear(q, x).square() * p["gain"]).mean()


def reduced(p, x, axis="data"):
    return ff.pmean(own(p, x), axis)


TABLE = {"table": integers(6, 4, seed=1), "w": integers(4, 2, seed=2)}
TOKENS = torch.tensor([0, 1, 2, 1])


def looking_up(sparse, glue=False):
    def look_up(p, tokens):
        return F.embedding(tokens, p["table"], sparse=sparse)

    table = look_up if glue else ff.unit(look_up)

    def loss(p, tokens):
        h = table({"table": p["table"]}, tokens)
        return mean(linear({"w": p["w"]}, h))

    return loss


@dataclass
class Program:
    """A gradient call, its parameters and rows, and the same for one device."""

    step: Callable
    params: Any
    x: torch.Tensor
    one: Callable | None = None
    cut: bool = True  # by `accumulate` too: rows are an argument of the gradient call
    whole: bool = False  # with parameters that are whole as well
    sparse: bool = False  # of which the field knows nothing
    reductions: int | None = None


def of_losses(share, mine=0):
    """The user's mean, and the rank's own: the mean over the ranks is the same."""
    loss = lambda p, x: share * reduced(p, x) + mine * own(p, x)  # noqa: E731
    return Program(
        grad(loss), GAIN, WIDE, grad(lambda p, x: (share + mine) * own(p, x))
    )


PROGRAMS = {
    **{
        f.__name__: Program(f, SMOOTH, ROWS, cut=False)
        for f in (captured, in_part, adversarial, beside, between)
    },
    **{
        # A reduction for each unit that is differentiated, and one of the loss.
        f.__name__: Program(grad(f), MATRICES, X, reductions=n)
        for f, n in (
            (unseen_first, 3), (unseen_between, 3), (unseen_last, 3), (same_weight, 3)
        )
    },
    "reduced": of_losses(1),
    "own less three of reduced": of_losses(-3, 1),
    "own and a constant": Program(
        grad(lambda p, x: own(p, x) + reduced(p, x).detach()), GAIN, WIDE,
        grad(lambda p, x: own(p, x) + own(p, x).detach()), cut=False,
    ),
    **{
        f"sparse, glue={glue}": Program(
            grad(looking_up(True, glue)), TABLE, TOKENS, grad(looking_up(False)),
            whole=True, sparse=True,
        )
        for glue in (False, True)
    },
}  # fmt: skip
STACKS = {
    "shard": lambda f, shard: shard(f),
    "shard(remat)": lambda f, shard: shard(ff.remat(f)),
    "remat(shard)": lambda f, shard: ff.remat(shard(f)),
    "shard(accumulate)": lambda f, shard: shard(ff.accumulate(f, 2)),
    "accumulate(shard)": lambda f, shard: ff.accumulate(shard(f), 2),
}
HOW = [{"zero": zero} for zero in range(4)] + [{"min_bytes": 99}]
FITS = [k for k in STACKS if "acc" not in k]


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=3)
@given(st.data())
def test_a_gradient_call_is_that_of_one_device(name, data):
    program = PROGRAMS[name]
    how = data.draw(st.sampled_from(HOW))
    stack = data.draw(st.sampled_from(list(STACKS) if program.cut else FITS))
    step = STACKS[stack](program.step, lambda f: ff.shard(f, MESH, "data", **how))
    sent = []

    def main(params, x):
        mine = ff.local_batch(x, MESH, "data")
        placed, found = ff.place(step, params, mine), []
        laid = ff.shard(lambda p, x: x.float().mean(), MESH, "data", **how)
        whole = ff.place(laid, params, mine)
        for params in (placed, placed, *[whole] * program.whole):
            with ff.ledger() as log:
                found.append(ff.unshard(step(params, mine)))
            sent.append(log.count("psum_scatter") + log.count("psum"))
        leaves = tree.leaves(placed, is_leaf=is_sharded)
        assert all(x.parts is None for x in leaves if is_sharded(x))
        return found

    given = program.params, program.x
    with nullcontext() if program.sparse else exact():
        given = given if program.sparse else residues(given)
        expected = (program.one or program.step)(*given)
        for found in ff.spmd(main, MESH)(*given):
            for each in found:
                same(each, expected)
    if program.reductions and "min_bytes" not in how and stack != "accumulate(shard)":
        assert set(sent) == {program.reductions}

"""Terms of parameters beside a pipelined loss; within it they go into units alone."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree

MESH = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")
DRAW = torch.Generator().manual_seed(0)
W = [torch.randn(3, 3, generator=DRAW, dtype=torch.float64) for _ in range(4)]
X = torch.randn(8, 3, generator=DRAW, dtype=torch.float64)
layer = ff.unit(lambda w, x: torch.tanh(x @ w))


def loss(w, x):
    for a in w:
        x = layer(a, x)
    return x.square().mean()


def penalty(w):
    return ff.tree_sum(tree.map(lambda a: a * a, w)) + ff.global_norm(w)


def pipelined(f):
    return ff.pipeline(f, MESH, "pipe", n_microbatches=2)


ORDERS = {
    "shard outside": lambda f, zero: ff.shard(pipelined(f), MESH, "data", zero=zero),
    "pipeline outside": lambda f, zero: pipelined(ff.shard(f, MESH, "data", zero=zero)),
}


def found(f, order, zero):
    step = ORDERS[order](f, zero)

    def main():
        x = ff.local_batch(X, MESH, "data")
        return ff.unshard(step(ff.place(step, W, x), x))

    return ff.spmd(main, MESH)()


@pytest.mark.parametrize(("order", "zero"), [*zip(ORDERS, (0, 3), strict=True)])
def test_a_penalty_has_a_gradient_call_of_its_own(order, zero):
    def step(w, x):
        value, g = ff.value_and_grad(loss)(w, x)
        more, h = ff.value_and_grad(penalty)(w)
        n = ff.global_norm(g)
        return value + more + n**2, tree.map(torch.add, g, h)

    value, right = step(W, X)
    for one, grads in found(step, order, zero):
        assert all(map(torch.allclose, grads, right))
        torch.testing.assert_close(one, value)


OUTSIDE = "is read outside units in a loss that a pipeline runs.*own gradient call"
SLOPE = "differentiates or maps unit .*one unit"
MADE = "parameter that was made in the loss"


def slope(w, x):
    return ff.value_and_grad(lambda x: loss(w, x))(x)[1]


INSIDE = {  # leaves read by themselves are whole; whose a product is, is not known
    "a norm": (OUTSIDE, lambda w, x: loss(w, x) + ff.global_norm(w) ** 2),
    "a factor": (OUTSIDE, lambda w, x: loss(tree.map(lambda a: a * x.mean(), w), x)),
    "whole ones": (OUTSIDE, lambda w, x: loss(w, x) + ff.unshard(w)[0].sum()),
    "a scale": (OUTSIDE, lambda w, x: loss(ff.tree_scale(w, ff.global_norm(w)), x)),
    "made": (MADE, lambda w, x: loss([a * x.mean() for a in tree.leaves(w)], x)),
    "a gradient call": (SLOPE, lambda w, x: slope(w, x).square().sum()),
}


@pytest.mark.parametrize(("i", "name"), [*enumerate(INSIDE)])
def test_within_it_parameters_go_into_units(i, name):
    (text, bad), order = INSIDE[name], list(ORDERS)[i % 2]
    with pytest.raises((ValueError, RuntimeError), match=text), ff.ledger() as log:
        found(ff.value_and_grad(bad), order, 3)
    assert not log.records


def test_nor_is_it_a_gradient_that_somebody_differentiates():
    def around(w, x):
        inner = lambda x: pipelined(ff.value_and_grad(loss))(w, x)[0]  # noqa: E731
        return ff.value_and_grad(inner)(x)[1].sum()

    with pytest.raises(RuntimeError, match="must own the gradient call.*inside the"):
        ff.spmd(lambda: ff.value_and_grad(lambda x: around(W, x))(X), MESH)()

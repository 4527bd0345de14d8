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


def wrapped(f, order, zero):
    if order == "shard outside":
        return ff.shard(pipelined(f), MESH, "data", zero=zero)
    return pipelined(ff.shard(f, MESH, "data", zero=zero))


def pipelined(f):
    return ff.pipeline(f, MESH, "pipe", n_microbatches=2)


def found(f, order, zero):
    step = wrapped(f, order, zero)

    def main():
        x = ff.local_batch(X, MESH, "data")
        return ff.unshard(step(ff.place(step, W, x), x))

    return ff.spmd(main, MESH)()


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("order", ["shard outside", "pipeline outside"])
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


INSIDE = {
    "a norm": lambda w, x: loss(w, x) + ff.global_norm(w) ** 2,
    "an own factor": lambda w, x: loss(tree.map(lambda a: a * x.mean(), w), x),
    "whole matrices": lambda w, x: loss(w, x) + ff.unshard(w)[0].sum(),
    "a scale": lambda w, x: loss(ff.tree_scale(w, ff.global_norm(w)), x),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("order", ["shard outside", "pipeline outside"])
@pytest.mark.parametrize("name", INSIDE)
def test_within_it_parameters_go_into_units(name, order, zero):
    text = "is read outside units in a loss that a pipeline runs.*own gradient call"
    with pytest.raises(ValueError, match=text), ff.ledger() as log:
        found(ff.value_and_grad(INSIDE[name]), order, zero)
    assert not log.records


@pytest.mark.parametrize("order", ["shard outside", "pipeline outside"])
def test_nor_are_whole_parameters_made_in_it(order):
    """Leaves that the loss reads by themselves are whole; whose the product is, is not
    known where stages run."""
    made = lambda w, x: loss([a * x.mean() for a in tree.leaves(w)], x)  # noqa: E731
    with pytest.raises(ValueError, match="parameter that was made in the loss"):
        found(ff.value_and_grad(made), order, 3)


@pytest.mark.parametrize("order", ["shard outside", "pipeline outside"])
def test_a_gradient_call_within_the_loss_is_refused(order):
    """Units of several stages would be in one graph; within one unit it may stand."""
    slope = lambda w, x: ff.value_and_grad(lambda x: loss(w, x))(x)[1]  # noqa: E731
    energy = ff.value_and_grad(lambda w, x: slope(w, x).square().sum())
    with pytest.raises(RuntimeError, match="differentiates or maps unit .*one unit"):
        found(energy, order, 3)


def test_nor_is_it_a_gradient_that_somebody_differentiates():
    def around(w, x):
        inner = lambda x: pipelined(ff.value_and_grad(loss))(w, x)[0]  # noqa: E731
        return ff.value_and_grad(inner)(x)[1].sum()

    with pytest.raises(RuntimeError, match="must own the gradient call.*inside the"):
        ff.spmd(lambda: ff.value_and_grad(lambda x: around(W, x))(X), MESH)()

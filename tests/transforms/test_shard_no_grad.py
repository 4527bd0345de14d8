"""Units called without gradients leave those of the units around them alone."""

import pytest
import torch

import fsfunc as ff
from tests.checks import same

G = torch.Generator().manual_seed(0)
PARAMS = {k: torch.randint(-2, 3, (4, 4), generator=G).double() for k in "abc"}
X = torch.randint(-2, 3, (8, 4), generator=G).double()


@ff.unit
def product(w, x):
    return x @ w


def first(p, x):
    with torch.no_grad():
        x = product(p["a"], x)
    return product(p["c"], product(p["b"], x)).square().sum()


def between(p, x):
    y = product(p["b"], x)
    with torch.no_grad():
        z = product(p["a"], x)
    return product(p["c"], y * z).square().sum()


def last(p, x):
    y = product(p["c"], product(p["b"], x))
    with torch.no_grad():
        z = product(p["a"], y)
    return (y * z).sum()


def same_weight(p, x):
    """Its own gradient comes from the other call alone."""
    with torch.no_grad():
        y = product(p["b"], x)
    return product(p["b"], y).square().sum()


TRANSFORMS = {
    "plain": lambda f: f,
    "remat": ff.remat,
    "accumulate": lambda f: ff.accumulate(f, 2),
}


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("loss", [first, between, last, same_weight])
def test_gradients_are_those_of_one_device(loss, zero, inner):
    mesh = ff.make_mesh({"data": 2}, "simulated")
    parts = X.chunk(2)
    gradients = TRANSFORMS[inner](ff.value_and_grad(loss))
    expected = [gradients(PARAMS, part)[1] for part in parts]
    mean = {k: sum(e[k] for e in expected) / 2 for k in PARAMS}

    def main():
        sharded = ff.shard(gradients, mesh, "data", zero=zero)
        part = ff.local_batch(X, mesh, "data")
        placed = ff.place(sharded, PARAMS, part)
        with ff.ledger() as log:
            _, grads = sharded(placed, part)
        return ff.unshard(grads), log.count("psum_scatter") + log.count("psum")

    for grads, reductions in ff.spmd(main, mesh)():
        same(grads, mean)
        # One for each unit that is differentiated, and one of the loss.
        assert reductions == (2 if loss is same_weight else 3)

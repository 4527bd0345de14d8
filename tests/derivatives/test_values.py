"""Values that leave the tensors of a step: what it makes of them is checked too.

A reduction of this rank's part is refused on every route, and so is what would make of
a rank's own value another update on each rank. Steps that tensors without data cannot
go through are tried on copies: "real" is how they are recorded.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc import tree
from fsfunc.tracing.rules import LawError
from tests import checks
from tests.derivatives.judging import MESHES, W, X, on
from tests.derivatives.worlds import by_units

each = tree.map
ROUTES = ["fake", "real", "odd"]


def of_parts(change):
    """Another gradient, by what ``change`` makes of each of its parts."""
    return lambda w, x: each(change, ff.value_and_grad(by_units)(w, x)[1])


def times(number):
    """The gradient times a number that is made of the rank's rows."""

    def step(w, x):
        rate = number(x)
        return each(lambda g: g * rate, ff.value_and_grad(by_units)(w, x)[1])

    return step


def by_turns(names):
    """(name, a route without fake tensors), by turns; on all of them a few."""
    found = [(name, ROUTES[1 + i % 2]) for i, name in enumerate(names)]
    return sorted({*found, *((name, r) for name in ("item", "numpy") for r in ROUTES)})


# What mixes the elements of a part, or gives them to Python.
PARTS = {
    "mse_loss": lambda g: g * F.mse_loss(g, g * 0),
    "huber_loss": lambda g: g * F.huber_loss(g, g * 0),
    "smooth_l1_loss": lambda g: g * F.smooth_l1_loss(g, g * 0),
    "mean": lambda g: g - g.mean(),
    "nonzero": lambda g: g * len(g.nonzero()),
    "argwhere": lambda g: g * len(torch.argwhere(g)),
    "where": lambda g: g * len(torch.where(g > 0)[0]),
    "unique": lambda g: g * len(torch.unique(g)),
    "masked_select": lambda g: g * torch.masked_select(g, g > 0).shape[0],
    "a mask": lambda g: g * g[g > 0].shape[0],
    "equal": lambda g: g * torch.equal(g, g * 0),
    "allclose": lambda g: g * torch.allclose(g, g * 0),
    "all": lambda g: g * bool((g > 0).all()),
    "item": lambda g: g * g[:1].sum().item(),
    "numpy": lambda g: g * float(g.numpy().sum()),
    "asarray": lambda g: g * float(np.asarray(g).sum()),
    "tolist": lambda g: g * float(np.sum(g.tolist())),
    "dlpack": lambda g: g * torch.from_dlpack(g).sum(),
}
# What makes another number of each rank's rows.
OWN = {
    "numpy": lambda x: float(x.numpy().mean()),
    "asarray": lambda x: float(np.asarray(x).mean()),
    "tolist": lambda x: sum(sum(row) for row in x.tolist()),
    "dlpack": lambda x: torch.from_dlpack(x).mean(),
    "numpy and back": lambda x: torch.from_numpy(x.numpy()).mean(),
    "item": lambda x: x.mean().item(),
    "a count": lambda x: (x > 0).sum().item(),
    "a truth": lambda x: 2.0 if (x > 0).any() else 1.0,
    "a branch": lambda x: 2.0 if x.mean() > 0 else 1.0,
    "equal": lambda x: 1 + torch.equal(x, x * 2),
    "allclose": lambda x: 1 + torch.allclose(x, x * 2),
    "nonzero": lambda x: x.nonzero().double().mean(),
    "unique": lambda x: torch.unique(x).sum(),
}


@pytest.mark.parametrize(("name", "record"), by_turns(PARTS))
def test_a_reduction_of_parts_is_refused_on_every_route(name, record):
    error = LawError if record != "fake" else (LawError, RuntimeError)
    with pytest.raises(error, match="part of the gradient|asks for a tensor's value"):
        on(2, 3, of_parts(PARTS[name]), route=record)


@pytest.mark.parametrize(
    ("name", "record", "zero"),
    [(*each, 3 * (i // 2 % 2)) for i, each in enumerate(by_turns(OWN))],
)
def test_an_own_value_scales_no_gradient_on_any_route(name, record, zero):
    error = LawError if record != "fake" else (LawError, RuntimeError)
    text = "differs from rank to rank|ranks|rank \\d|asks for a tensor's value"
    with pytest.raises(error, match=text):
        on(2, zero, times(OWN[name]), route=record)


def scaled_by_the_loss(w, x):
    value, g = ff.value_and_grad(by_units)(w, x)
    return each(lambda g: g * value.item(), g)


def guarded(w, x):
    value, g = ff.value_and_grad(by_units)(w, x)
    if not torch.isfinite(value):
        return w
    return each(lambda a, g: a - 0.1 * g, w, g)


def until_it_is_small(w, x):
    """A loop whose end depends on a value that nobody has."""
    step = 1.0
    value, g = ff.value_and_grad(by_units)(w, x)
    while value.item() * step > 0.1:
        step /= 2
    return each(lambda a, g: a - step * g, w, g)


def of_some_rows(w, x):
    sums = x.sum(1).view(-1, 3)  # of each three rows
    keep = sums > sums.median(1, keepdim=True).values
    return ff.value_and_grad(by_units)(w, x[keep.flatten()])[1]


RIGHT = [scaled_by_the_loss, guarded, until_it_is_small, of_some_rows]


@pytest.mark.parametrize(("record", "zero"), [("real", 3), ("odd", 0)])
@pytest.mark.parametrize("step", RIGHT)
def test_what_asks_for_values_and_is_right_runs(step, record, zero):
    """What they make of the rows of all ranks, one device says."""
    right = step(W, X[:6])
    for found in on(2, zero, step, x=X[:6], route=record):
        checks.close(found, right)


def seldom(w, x):
    value, g = ff.value_and_grad(by_units)(w, x)
    if value > 100:
        g = each(lambda g: g - g.mean(), g)
    return g


def later(w, x, clips=False):
    g = ff.value_and_grad(by_units)(w, x)[1]
    return each(lambda g: g - g.mean(), g) if clips else g


def test_a_way_that_a_value_opens_is_looked_at_before_it_is_gone():
    with pytest.raises(LawError, match="mean at .*part of the gradient"):
        on(2, 3, seldom, route="odd")


def test_a_way_that_an_argument_opens_is_looked_at_when_it_is_given():
    mesh = MESHES[2]

    def main():
        f = ff.shard(later, mesh, "data")
        mine = ff.local_batch(X, mesh, "data")
        w = ff.place(f, W, mine, False)
        f(w, mine, False)
        with pytest.raises(LawError, match="mean at .*part of the gradient"):
            f(w, mine, True)

    ff.spmd(main, mesh)()

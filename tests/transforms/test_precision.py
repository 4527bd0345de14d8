"""`precision`: bfloat16 arithmetic over float32 parts, in any order of transforms."""

import itertools

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import on_ranks, same, simulated
from tests.models import integers

D, MESH = 8, simulated()
BF = torch.bfloat16


def small(*shape, seed=0):
    """Small enough that bfloat16 holds every value and sum exactly."""
    return integers(*shape, seed=seed, high=1)


P = [
    {"w": small(D, D, seed=k), "b": small(D, seed=k + 3), "n": torch.tensor(2)}
    for k in range(3)
]
X = small(8, D, seed=9)
SEEN = []


@ff.unit
def block(p, x):
    SEEN.append((p["w"].dtype, x.dtype, p["n"].dtype))
    return (x[:, :1] * p["w"][0] + p["b"] * p["n"]).clamp(-1, 1)


def loss(ps, x):
    start = x
    for p in ps:
        x = block(p, x) + x
    return (x.float() * start).mean() + smooth(ps, start)


@ff.unit
def product(w, x):
    return x @ w


def smooth(ps, x):
    h = product(ps[0]["w"], x)
    return (h.float() * x).sum() / 8


def precise(g):
    return ff.precision(g, BF)


def test_units_compute_in_one_dtype_and_gradients_come_in_the_other() -> None:
    SEEN.clear()
    value, grads = precise(ff.value_and_grad(smooth))(P, X)
    assert value.dtype == torch.float32
    assert {x.dtype for x in tree.leaves(grads)} == {torch.float32}
    precise(lambda p: block(p, X))(P[0])
    assert SEEN == [(BF, BF, torch.int64)]  # integers stay what they are


def test_it_is_the_cast_done_by_hand() -> None:
    torch.manual_seed(0)
    ps = [{"w": torch.randn(D, D)}]
    x = torch.randn(8, D)

    def by_hand(ps, x):
        return (product.fn(ps[0]["w"].to(BF), x.to(BF)).float() * x).sum() / 8

    expected = ff.value_and_grad(by_hand)(ps, x)
    same(precise(ff.value_and_grad(smooth))(ps, x), expected)
    same(ff.value_and_grad(precise(smooth))(ps, x), expected)
    wide = ff.value_and_grad(smooth)(ps, x)
    assert not torch.equal(wide[1][0]["w"], expected[1][0]["w"])
    again = ff.precision(ff.precision(ff.value_and_grad(smooth), torch.float32), BF)
    same(again(ps, x), wide)  # the inner one is nearer


ORDERS = list(itertools.permutations(["shard", "remat", "accumulate", "precision"]))
REFERENCE = ff.accumulate(precise(ff.value_and_grad(loss)), 4)(P, X)


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: "(".join(o))
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_it_composes_in_any_order(order, zero) -> None:
    apply = {
        "shard": lambda g: ff.shard(g, MESH, "data", zero=zero),
        "remat": ff.remat,
        "accumulate": lambda g: ff.accumulate(g, 2),
        "precision": precise,
    }
    g = ff.value_and_grad(loss)
    for name in reversed(order):
        g = apply[name](g)
    for found in on_ranks(g, P, X, mesh=MESH):
        same(found, REFERENCE)


def test_a_wider_reduction_sums_what_the_narrow_one_loses() -> None:
    mesh = simulated(4)
    unit = ff.unit(lambda w, x: (w * x).sum())
    loss = ff.value_and_grad(lambda w, x: unit(w, x).float())
    x = torch.tensor([256.0, 1.0, 1.0, 1.0])

    def gradient(reduce):
        g = ff.shard(ff.precision(loss, BF, reduce=reduce), mesh, "data")
        return on_ranks(g, torch.ones(1), x, mesh=mesh)[0][1].item()

    assert gradient(torch.float32) == 259 / 4
    assert gradient(None) != 259 / 4  # bfloat16 has no 257


@pytest.mark.parametrize(
    "keywords", [{"compute": torch.int8}, {"compute": BF, "reduce": torch.long}]
)
def test_a_dtype_that_is_not_floating_is_refused(keywords) -> None:
    with pytest.raises(ValueError, match="floating"):
        ff.precision(loss, **keywords)

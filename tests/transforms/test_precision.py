"""`precision`: bfloat16 arithmetic over float32 parts, in any order of transforms."""

import itertools

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import same

D = 8
GENERATOR = torch.Generator().manual_seed(0)
BF = torch.bfloat16


def integers(*shape):
    """Small enough that bfloat16 holds every value and sum exactly."""
    return torch.randint(-1, 2, shape, generator=GENERATOR).float()


P = [{"w": integers(D, D), "b": integers(D), "n": torch.tensor(2)} for _ in range(3)]
X = integers(8, D)
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
    mesh = ff.make_mesh({"data": 2}, "simulated")
    apply = {
        "shard": lambda g: ff.shard(g, mesh, "data", zero=zero),
        "remat": ff.remat,
        "accumulate": lambda g: ff.accumulate(g, 2),
        "precision": precise,
    }

    def main():
        g = ff.value_and_grad(loss)
        for name in reversed(order):
            g = apply[name](g)
        mine = ff.local_batch(X, mesh, "data")
        value, grads = g(ff.place(g, P, mine), mine)
        return value, ff.unshard(grads)

    for found in ff.spmd(main, mesh)():
        same(found, REFERENCE)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("reduce", [None, torch.float32])
def test_what_travels_is_the_narrow_dtype(zero, reduce) -> None:
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def bytes_of(around):
        def main():
            g = ff.shard(around(ff.value_and_grad(loss)), mesh, "data", zero=zero)
            mine = ff.local_batch(X, mesh, "data")
            params = ff.place(g, P, mine)
            with ff.ledger() as log:
                _, grads = g(params, mine)
            locals_ = tree.leaves(grads)
            assert all(x.dtype == torch.float32 for x in locals_)
            return log

        log = ff.spmd(main, mesh)()[0]
        floating = [r for r in log.of(0) if r.dtype.is_floating_point]
        gathers = [r for r in floating if r.op == "all_gather"]
        reductions = [r for r in floating if r not in gathers and r.phase != "loss"]
        return sum(r.bytes for r in gathers), sum(r.bytes for r in reductions)

    gathers, reductions = bytes_of(lambda g: g)
    narrow = bytes_of(lambda g: ff.precision(g, BF, reduce=reduce))
    assert (gathers > 0) == (zero > 0)
    assert narrow[0] * 2 == gathers
    assert narrow[1] * (2 if reduce is None else 1) == reductions


def test_a_wider_reduction_sums_what_the_narrow_one_loses() -> None:
    mesh = ff.make_mesh({"data": 4}, "simulated")
    unit = ff.unit(lambda w, x: (w * x).sum())

    def gradient(reduce):
        def main():
            g = ff.precision(
                ff.value_and_grad(lambda w, x: unit(w, x).float()), BF, reduce=reduce
            )
            g = ff.shard(g, mesh, "data")
            mine = ff.local_batch(torch.tensor([256.0, 1.0, 1.0, 1.0]), mesh, "data")
            _, grads = g(ff.place(g, torch.ones(1), mine), mine)
            return ff.unshard(grads)

        return ff.spmd(main, mesh)()[0].item()

    assert gradient(torch.float32) == 259 / 4
    assert gradient(None) != 259 / 4  # bfloat16 has no 257


@pytest.mark.parametrize(
    "keywords", [{"compute": torch.int8}, {"compute": BF, "reduce": torch.long}]
)
def test_a_dtype_that_is_not_floating_is_refused(keywords) -> None:
    with pytest.raises(ValueError, match="floating"):
        ff.precision(loss, **keywords)

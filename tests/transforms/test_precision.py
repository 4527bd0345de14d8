"""`precision`: bfloat16 arithmetic over float32 parts, in any order of transforms."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from tests.checks import all_refused, close, on_ranks, same, simulated
from tests.covering import examples
from tests.models import floats, integers

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


ORDERS = st.permutations(["shard", "remat", "accumulate", "precision"])


@settings(max_examples=examples(12))
@given(ORDERS, st.integers(0, 3))
def test_it_composes_in_any_order(order, zero):
    apply = {
        "shard": lambda g: ff.shard(g, MESH, "data", zero=zero),
        "remat": ff.remat,
        "accumulate": lambda g: ff.accumulate(g, 2),
        "precision": precise,
    }
    g = ff.value_and_grad(loss)
    for name in reversed(order):
        g = apply[name](g)
    expected = ff.accumulate(precise(ff.value_and_grad(loss)), 4)(P, X)
    for found in on_ranks(g, P, X, mesh=MESH):
        same(found, expected)


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


@ff.unit
def norm(p, x):
    SEEN.append(("norm", p["scale"].dtype, x.dtype))
    return x * p["scale"]


@ff.unit
def normed(p, x):
    SEEN.append(("normed", p["w"].dtype, p["norm"]["scale"].dtype, x.dtype))
    return x @ p["w"] + norm(p["norm"], x).to(x.dtype)


def normed_loss(ps, x):
    for p in ps:
        x = normed(p, x)
    return x.float().square().mean()


F32 = torch.float32
NS = [
    {"w": floats(D, D, seed=k) / 4, "norm": {"scale": floats(D, seed=k)}}
    for k in range(3)
]
NX = floats(8, D, seed=9)
MIXED = {"normed/norm/**": F32}


@pytest.mark.parametrize("zero", [0, 3])
def test_what_is_excepted_computes_in_its_own_dtype_wherever_it_lies(zero) -> None:
    grad = ff.precision(ff.value_and_grad(normed_loss), BF, F32, overrides=MIXED)
    SEEN.clear()
    expected = grad(NS, NX)
    # The norm's weight was never rounded, on its way through the unit around it too.
    assert set(SEEN) == {("norm", F32, F32), ("normed", BF, F32, BF)}
    plain = ff.precision(ff.value_and_grad(normed_loss), BF, F32)
    assert not torch.equal(plain(NS, NX)[0], expected[0])
    alone = ff.remat(ff.shard(grad, simulated(1), "data", zero=zero))
    same(on_ranks(alone, NS, NX, mesh=simulated(1))[0], expected)
    one = ff.accumulate(grad, 2)(NS, NX)
    for found in on_ranks(ff.shard(grad, MESH, "data", zero=zero), NS, NX, mesh=MESH):
        close(found, one)


def test_each_dtype_is_sent_in_its_own() -> None:
    def sent(overrides):
        grad = ff.precision(ff.value_and_grad(normed_loss), BF, overrides=overrides)
        grad = ff.shard(grad, MESH, "data", zero=3)

        def main():
            x = ff.local_batch(NX, MESH, "data")
            params = ff.place(grad, NS, x)
            grad(params, x)
            with ff.ledger() as log:
                grad(params, x)
            return log.bytes("data", "all_gather")

        return ff.spmd(main, MESH)()[0]

    # Again in the backward: not those of the first unit, which reads none there, nor
    # those that the forward took last.
    assert sent(None) == (3 + 1) * (D * D + D) * 2 // 2
    assert sent(MIXED) == ((3 + 2) * D * D * 2 + (3 + 1) * D * 4) // 2


def test_an_autocast_around_units_is_honoured_also_when_they_run_again() -> None:
    seen = []

    @ff.unit
    def layer(w, x):
        y = x @ w
        seen.append(y.dtype)
        return torch.tanh(y).float()

    def loss(ws, x):
        with torch.autocast("cpu", BF):
            for w in ws:
                x = layer(w, x)
        return x.square().mean()

    ws = [p["w"] for p in NS]
    expected = ff.value_and_grad(loss)(ws, NX)
    assert set(seen) == {BF}
    again = ff.remat(ff.value_and_grad(loss))(ws, NX)
    assert set(seen) == {BF}
    same(again, expected)
    one = ff.accumulate(ff.value_and_grad(loss), 2)(ws, NX)
    sharded = ff.shard(ff.remat(ff.value_and_grad(loss)), MESH, "data")
    for found in on_ranks(sharded, ws, NX, mesh=MESH):
        close(found, one)
    assert set(seen) == {BF}


ODD = [{"compute": torch.int8}, {"reduce": torch.long}, {"output": torch.long},
       {"overrides": {"norm": torch.long}}]  # fmt: skip
test_a_dtype_that_is_not_floating_is_refused = all_refused(
    [
        (partial(ff.precision, loss, **{"compute": BF, **how}), ValueError, "floating")
        for how in ODD
    ]
)


def test_what_units_return() -> None:
    f = lambda **how: ff.precision(lambda p, x: normed(p, x), BF, **how)(NS[0], NX)  # noqa: E731
    assert f().dtype == BF
    same(f(output=F32), f().float())


def test_a_unit_may_be_named_as_an_argument_is():
    unit = ff.unit(lambda w, x: w * x)
    unit.__name__ = "compute"
    loss = ff.precision(unit, torch.bfloat16, overrides={"compute": None})
    assert loss(torch.ones(2), torch.ones(2)).dtype == torch.float32
    assert repr(loss) == "precision(compute, compute=torch.bfloat16)"

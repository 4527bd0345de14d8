"""How a buffer travels can be replaced: here by bfloat16 on the wire."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.typed_maps import LawError
from fsfunc.transforms.messages.encodings import dequantized, quantized
from fsfunc.tree import map as tree_map
from tests.checks import all_refused, on_ranks, same, simulated
from tests.models import chain, floats, layers

MESH = simulated(2)
loss, PARAMS = chain(), layers(3, make=floats)


class Narrow(ff.Gather):
    exact = False

    def encode(self, part, dtype):
        return part.to(torch.bfloat16)

    def decode(self, arrived, dtype, count):
        return arrived.to(dtype)


class NarrowSum(ff.Reduction):
    exact = False

    def encode(self, buffer, ranks):
        return buffer.to(torch.bfloat16)

    def decode(self, arrived, dtype, count):
        return arrived.to(dtype)


def sharded(f, zero=3, **how):
    return ff.shard(f, MESH, "data", zero=zero, **how)


def trained(step, given, x):
    """Value, whole gradient and bytes of each kind of collective, by rank."""

    def main():
        placed = ff.place(step, given, x)
        step(placed, x)
        with ff.ledger() as log:
            value, grads = step(placed, x)
        kept = ff.unshard(placed)
        kinds = ("all_gather", "psum_scatter")
        return value, ff.unshard(grads), kept, [log.bytes(op=k) for k in kinds]

    return ff.spmd(main, MESH)()


narrow = lambda w: w.to(torch.bfloat16).to(w.dtype)  # noqa: E731
ROUNDED = tree_map(narrow, PARAMS)
# How a gather or a reduction is replaced: (options, what it changes of the parameters,
# tolerance, the share of bytes gathered, and reduced).
CODECS = {
    "narrow gather": ({"gather": Narrow()}, ROUNDED, 0, 0.5, 1),
    "narrow reduction": ({"reduction": NarrowSum()}, PARAMS, 2**-7, 1, 0.5),
    "8 bits": ({"gather": ff.QuantizedGather(4)}, PARAMS, 0.02, 0.6, 1),
}


@pytest.mark.parametrize(
    ("codec", "zero", "stack"),
    [
        ("narrow gather", 1, ff.remat),
        ("narrow gather", 3, ff.remat),
        ("narrow reduction", 3, lambda f: f),
        ("8 bits", 2, lambda f: f),
        ("8 bits", 3, ff.remat),
    ],
)
def test_what_travels_is_a_cast_before_or_after_it_of_fewer_bytes(codec, zero, stack):
    how, params, tolerance, gathers, reductions = CODECS[codec]
    gradient, x = ff.value_and_grad(loss), torch.ones(2, 4)
    (*exact, _, sent), *_ = trained(sharded(stack(gradient), zero), params, x)
    for v, g, kept, (gathered, reduced) in trained(
        sharded(stack(gradient), zero, **how), PARAMS, x
    ):
        torch.testing.assert_close([v, g], exact, rtol=tolerance, atol=tolerance)
        assert not tolerance or not torch.equal(g[0]["w"], exact[1][0]["w"])
        torch.testing.assert_close(kept, PARAMS, rtol=0, atol=0)  # in full
        assert gathered == pytest.approx(sent[0] * gathers, rel=0.2 * (gathers == 0.6))
        assert reduced == sent[1] * reductions


# Eight bits


@given(
    n=st.integers(1, 70),
    block=st.sampled_from([4, 8, 64]),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_eight_bits_are_off_by_half_a_step(n, block, ranks, seed):
    x = torch.randn(ranks, n, generator=torch.Generator().manual_seed(seed))
    sent = quantized(x, block)
    assert sent.shape == (ranks, -(-n // block) * (block + 4))
    found = dequantized(sent, n, block)
    for a, b in zip(x.split(block, -1), found.split(block, -1), strict=True):
        step = a.abs().amax(-1, keepdim=True) / 127
        assert ((a - b).abs() <= step * 0.5001).all()
    torch.testing.assert_close(dequantized(quantized(found, block), n, block), found)


def test_numbers_that_are_no_floats_travel_as_they_are():
    unit = ff.unit(lambda p, x: (p["w"][p["at"]] * x).sum() + p["none"].sum())
    at, w = torch.tensor([4999, 1234, 7, 3001]), torch.arange(5000.0).remainder(2)
    params = {"w": w, "at": at, "none": torch.zeros(0)}

    def main(zero):
        step = ff.value_and_grad(lambda p, x: unit(p, x))
        codecs = ff.QuantizedGather(8), ff.QuantizedReduction(8)
        step = ff.shard(step, MESH, "data", zero=zero, gather=codecs[0],
                        reduction=codecs[1])  # fmt: skip
        x = torch.ones(4)
        return step(ff.place(step, params, x), x)[0]

    for zero in (1, 3):
        for value in ff.spmd(main, MESH)(zero):
            assert value == w[at].sum()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(bad):
    x = torch.tensor([1.0, bad, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    found = dequantized(quantized(x, 4), 8, 4)
    assert not found[:4].isfinite().any() and (found[4:] == 0).all()


@pytest.mark.parametrize("zero", [1, 3])
def test_a_quantised_sum_and_what_it_owes(zero, tmp_path):
    """The sum over steps of what arrived is that of all gradients, but for one step.

    What is owed is saved, and loaded.
    """
    unit = ff.unit(lambda w, x: (w * x).sum())
    steps, size = 8, 2
    mesh = simulated(size)
    torch.manual_seed(zero)
    xs = torch.randn(steps, size, 10) * torch.logspace(-4, 0, 10)
    exact = -xs.mean(1).sum(0)

    def main(optimizer, around):
        step = optimizer(ff.value_and_grad(lambda w, x: unit(w, x[0])))
        codec = ff.QuantizedReduction(8)
        step = around(ff.shard(step, mesh, "data", zero=zero, reduction=codec))
        rows = [ff.local_batch(x, mesh, "data") for x in xs]
        state = ff.init_state(step, torch.zeros(10), optimizer, rows[0])
        for t, x in enumerate(rows):
            state, _ = step(state, x)
            if optimizer is owing and t == 3:
                ff.save(tmp_path / around.__name__, state)
                again = ff.load(tmp_path / around.__name__, state)
                assert all(r.local.any() for r in state.opt_state.residuals.values())
                same(ff.unshard(again), ff.unshard(state))
                state = again
        return ff.unshard(state.params), state.opt_state

    owing = ff.error_feedback(ff.sgd(1.0))
    for optimizer, around in (
        (owing, ff.donate),
        (ff.loss_scale(owing), lambda f: f),
        (ff.error_feedback(ff.loss_scale(ff.sgd(1.0))), ff.donate),
    ):
        for w, state in ff.spmd(main, mesh)(optimizer, around):
            state = getattr(state, "inner", state) if "scale" in dir(state) else state
            assert (w - exact).abs().max() <= xs.abs().amax() * 3 / 254
            (leaf,) = state.residuals.values()
            assert leaf.shape[0] == size and leaf.local.shape == (1, leaf.shape[1])
    (w, _), *_ = ff.spmd(main, mesh)(ff.sgd(1.0), lambda f: f)
    without = (w - exact).abs()
    (w, _), *_ = ff.spmd(main, mesh)(owing, lambda f: f)
    assert without.sum() > 2 * (w - exact).abs().sum()


class Whole(ff.Reduction):
    """Whole numbers, each way of writing it."""

    exact = False

    def __init__(self, in_place):
        self.in_place = in_place

    def encode(self, buffer, ranks):
        return buffer.round_() if self.in_place else buffer.round()


def test_an_encoding_in_place_owes_what_it_loses():
    mesh, unit = simulated(2), ff.unit(lambda w, x: (w * x).sum())

    def main(in_place):
        step = ff.error_feedback(ff.sgd(1.0))(
            ff.value_and_grad(lambda w, x: unit(w, x))
        )
        step = ff.shard(step, mesh, "data", reduction=Whole(in_place))
        x = torch.tensor([[0.4, 1.0, 2.2, -0.1], [0.8, 3.0, 1.4, -0.1]])
        x = ff.local_batch(x, mesh, "data")
        state = ff.init_state(step, torch.zeros(4), ff.error_feedback(ff.sgd(1.0)), x)
        for _ in range(5):
            state, _ = step(state, x)
        return ff.unshard(state.params)

    same(*(ff.spmd(main, mesh)(way)[0] for way in (False, True)))
    assert ff.spmd(main, mesh)(True)[0].tolist() == [-3.0, -10.0, -9.0, 0.0]


def owed(optimizer, reduction=None):
    """A step from a state that was made of whole parameters."""
    step = sharded(optimizer(ff.value_and_grad(loss)), reduction=reduction)
    state = ff.TrainState(PARAMS, optimizer.init(PARAMS))
    return lambda: on_ranks(step, state, torch.ones(2, 4))


OWING = ff.error_feedback(ff.sgd(1.0))
BY_FUNC = sharded(torch.func.grad(loss), gather=Narrow())


test_bad_input_is_refused = all_refused(
    {
        "a derivative by torch.func": (
            lambda: trained(BY_FUNC, PARAMS, torch.ones(2, 4)), LawError,
            "Narrow changes what it sends",
        ),
        "a block": (lambda: ff.QuantizedGather(6), ValueError, "multiple of 4"),
        "zero=0": (
            lambda: sharded(loss, 0, reduction=ff.QuantizedReduction()),
            ValueError,
            "zero=1, 2 or 3",
        ),
        "nothing narrow": (owed(OWING), ValueError, "as they are"),
        "a plain state": (
            owed(OWING, ff.QuantizedReduction(4)), RuntimeError, "ff.init_state"
        ),
    }, sent=True)  # fmt: skip

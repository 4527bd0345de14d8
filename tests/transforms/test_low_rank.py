"""PowerSGD: what torch's hook computes, at any zero; the sum itself at full rank."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from tests.checks import all_refused, simulated, trained
from tests.models import chain, floats, layers

WIDTH, RANK, RATE = 8, 2, 0.5
loss = chain()
PARAMS = [{k: v * 0.3 for k, v in p.items()} for p in layers(2, WIDTH, make=floats)]
BATCHES = floats(4, 12, WIDTH, seed=1)


def as_torch_does(ranks, lr=0.5):
    """The parameters after each rank's hook took part in every step, on one device."""
    params = [dict(p) for p in PARAMS]
    owed = [[torch.zeros(WIDTH, WIDTH) for _ in params] for _ in range(ranks)]
    factors = []
    for i in range(len(params)):
        draw = torch.Generator().manual_seed(zlib.crc32(f"{i}/w".encode()))
        factors.append(torch.linalg.qr(torch.randn(WIDTH, RANK, generator=draw)).Q)
    for batch in BATCHES:
        grads = [ff.value_and_grad(loss)(params, x)[1] for x in batch.chunk(ranks)]
        for i, p in enumerate(params):
            given = [g[i]["w"] + r[i] for g, r in zip(grads, owed, strict=True)]
            left = torch.linalg.qr(sum(m @ factors[i] for m in given)).Q
            right = sum(m.T @ left for m in given) / ranks
            for r, m in zip(owed, given, strict=True):
                r[i] = m - left @ right.T
            factors[i] = torch.linalg.qr(right).Q
            bias = sum(g[i]["b"] for g in grads) / ranks
            params[i] = {"w": p["w"] - lr * left @ right.T, "b": p["b"] - lr * bias}
    return params


AROUND = {
    "plain": lambda f: f,
    "remat": ff.remat,
    "donated": ff.donate,
    "accumulate in": lambda f: ff.accumulate(f, 2),
}


@settings(max_examples=4)
@given(
    zero=st.integers(0, 3),
    ranks=st.integers(2, 3),
    around=st.sampled_from(sorted(AROUND)),
    min_bytes=st.sampled_from([0, 10_000]),
)
def test_it_is_what_torch_does_by_the_bytes_it_says(zero, ranks, around, min_bytes):
    mesh, optimizer = simulated(ranks), ff.powersgd(ff.sgd(0.5), RANK, RATE)
    step = AROUND[around](optimizer(ff.value_and_grad(loss)))
    step = ff.shard(step, mesh, "data", zero=zero, min_bytes=min_bytes)
    init, rows = lambda: PARAMS, BATCHES[0].chunk(ranks)[0]
    promised = ff.plan(step, init, optimizer, rows, mesh=mesh).bytes("data")
    beside = WIDTH if zero == 0 else -(-WIDTH * (WIDTH + 1) // ranks) * ranks - WIDTH**2
    share = 2 * (ranks - 1) / ranks
    directions = 2 * 4 * (2 * WIDTH * RANK + beside)
    wanted = as_torch_does(ranks)
    batches = [(x,) for x in BATCHES]
    for run in trained(step, PARAMS, optimizer, mesh=mesh, batches=batches):
        torch.testing.assert_close(run.params, wanted, rtol=1e-5, atol=1e-6)
        log = run.logs[-1]
        lost = log.bytes("data", op="psum") - share * directions  # of it, the loss
        assert promised == log.bytes("data") and not log.count("psum_scatter")
        assert min_bytes or abs(lost) <= share * 16


def test_tied_weights_copies_of_parts_and_accumulation_outside_owe_it_all():
    """All gradients arrive but for what is owed, which the state says."""
    unit = ff.unit(lambda w, x: x[0] @ w @ x[1])
    other = ff.unit(lambda v, x: (v * x).sum())  # between: they are no neighbours
    mesh, optimizer = simulated(node=2, data=2), ff.powersgd(ff.sgd(1.0), 1)
    xs = floats(4, 16, 2, WIDTH)
    exact = -sum(torch.einsum("bi,bj->ij", x[:, 0], x[:, 1]) * 3 / 16 for x in xs)

    def lossy(w, x):
        w, v = w
        each = (unit(w, row) + other(v, row) + 2 * unit(w, row) for row in x)
        return sum(each) / len(x)

    def owed(state):
        mine, _ = state.opt_state.residuals.values()
        return ff.psum(mine.local, ("node", "data"), to="I").view(WIDTH, WIDTH)

    step = optimizer(ff.value_and_grad(lossy))
    step = ff.accumulate(ff.shard(step, mesh, "data", replicate="node"), 2)
    params = torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH)
    how = {"mesh": mesh, "batches": [(x,) for x in xs], "look": owed}
    for (w, _), *_, seen in trained(step, params, optimizer, **how):
        assert (w - exact).abs().max() > 0.1
        # Owed in units of a microbatch's gradient, of which a step takes the mean.
        torch.testing.assert_close(w - seen[-1] / 8, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("narrow", [torch.float32, torch.float16])
def test_a_step_that_overflows_on_one_rank_is_as_if_it_were_not(narrow, tmp_path):
    mesh = simulated()
    optimizer = ff.loss_scale(ff.powersgd(ff.sgd(0.1), RANK, RATE), initial=16.0)

    def main():
        step = ff.precision(optimizer(ff.value_and_grad(loss)), compute=narrow)
        step = ff.shard(step, mesh, "data")
        x = ff.local_batch(BATCHES[0], mesh, "data")
        state, _ = step(ff.init_state(step, PARAMS, optimizer, x), x)
        bad = x * (torch.inf if ff.axis_index("data") == 1 else 1.0)
        after, _ = step(state, bad)
        assert after.opt_state.skipped == 1
        kept = [s.opt_state.inner for s in (state, after)]
        for old, new in zip(*(k.residuals.values() for k in kept), strict=True):
            assert torch.equal(old.local, new.local) and old.local.abs().sum() > 0
        for old, new in zip(*(k.factors.values() for k in kept), strict=True):
            assert torch.equal(old.local, new.local)
        ff.save(tmp_path / "s", after)
        again = ff.load(tmp_path / "s", ff.abstract_state(step, PARAMS, optimizer, x))
        found, wanted = (ff.unshard(step(s, x)[0].params) for s in (again, after))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)

    ff.spmd(main, mesh)()


def stepped(optimizer, **how):
    step = ff.shard(optimizer(ff.value_and_grad(loss)), simulated(), "data", **how)
    trained(step, PARAMS, optimizer, BATCHES[0], steps=1)


QUANTIZED, OWING = ff.QuantizedReduction(), ff.error_feedback(ff.sgd(1.0))
POWER = ff.powersgd(ff.sgd(1.0), 1)


test_bad_input_is_refused = all_refused(
    {
        "no rank": (lambda: ff.powersgd(ff.sgd(1.0), 0), ValueError, "1 or more"),
        "two ways": (
            lambda: stepped(POWER, reduction=QUANTIZED), ValueError, "leave reduction="
        ),
        "owed twice": (lambda: stepped(ff.powersgd(OWING, 1)), ValueError, "use one"),
        "gradients of others": (
            lambda: POWER.update(PARAMS, POWER.init(PARAMS), PARAMS),
            RuntimeError,
            "make the train step",
        ),
    }
)  # fmt: skip

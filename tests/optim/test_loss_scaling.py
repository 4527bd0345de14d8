"""`loss_scale`: gradients are the loss's, and a step is made by all or by none."""

import itertools
import math

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.optim import all_finite
from tests.checks import close, on_ranks, same, simulated

D = 4


@ff.unit
def layer(w, x):
    return torch.tanh(x @ w)


WS = [torch.randn(D, D, generator=torch.Generator().manual_seed(k)) for k in range(4)]
X = torch.randn(8, D, generator=torch.Generator().manual_seed(9))


def loss(ws, x):
    for w in ws:
        x = layer(w, x)
    return x.square().mean()


def weighted(ws, x):
    for w in ws:
        x = layer(w, x)
    return ff.Weighted(x.square().sum(), x.numel())


STACKS = {
    "alone": lambda s, mesh: s,
    "accumulate": lambda s, mesh: ff.accumulate(s, 2),
    "shard": lambda s, mesh: ff.shard(s, mesh, "data"),
    "shard zero=1": lambda s, mesh: ff.shard(s, mesh, "data", zero=1),
    "accumulate(shard)": lambda s, mesh: ff.accumulate(ff.shard(s, mesh, "data"), 2),
    "donate(remat(shard))": lambda s, mesh: ff.donate(
        ff.remat(ff.shard(s, mesh, "data"))
    ),
    "pipeline(shard)": lambda s, mesh: ff.pipeline(
        ff.shard(s, mesh, "data"), mesh, "pipe", n_microbatches=2
    ),
}


def trained(stack, optimizer, fn=loss, steps=2, xs=None):
    mesh = simulated(data=2, pipe=2 if "pipe" in stack else 1)

    def main():
        step = optimizer(ff.value_and_grad(fn))
        step = STACKS[stack](step, mesh)
        x = ff.local_batch(X, mesh, "data") if "shard" in stack else X
        state = ff.init_state(step, [w.clone() for w in WS], optimizer, x)
        metrics = []
        for k in range(steps):
            bad = xs is not None and xs(k, mesh.coordinate("data"))
            state, m = step(state, x * torch.nan if bad else x)
            metrics.append(m["loss"])
        return ff.unshard(state.params), metrics, state.opt_state

    return ff.spmd(main, mesh)()


@pytest.mark.parametrize("fn", [loss, weighted])
@pytest.mark.parametrize("stack", STACKS)
def test_a_power_of_two_changes_no_bit(stack, fn):
    plain = trained(stack, ff.sgd(0.5), fn)
    for initial in (1.0, 2.0**10, 2.0**-10):
        scaled = trained(stack, ff.loss_scale(ff.sgd(0.5), initial), fn)
        for (a, losses, state), (b, expected, _) in zip(scaled, plain, strict=True):
            same((a, losses), (b, expected))
            assert state[:3] == (initial, 2, 0)
    other = trained(stack, ff.loss_scale(ff.sgd(0.5), 1000.0), fn)
    close([p for p, *_ in other], [p for p, *_ in plain])


@pytest.mark.parametrize("stack", STACKS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stack):
    optimizer = ff.loss_scale(ff.sgd(0.5), 16.0, interval=2)
    plain, alone = trained(stack, ff.sgd(0.5))[0][0], "shard" not in stack
    found = trained(
        stack, optimizer, steps=3, xs=lambda k, i: k == 0 and (i == 0 or alone)
    )
    for params, _, state in found:
        same(params, plain)  # of two steps: the first one was not made
        assert state[:3] == (16.0, 0, 1)  # halved, and doubled after two good ones


def test_what_float16_loses_is_there():
    unit = ff.unit(lambda w, x: w * x)
    x = torch.full((2,), 2.0**-14)

    def gradient(optimizer):
        grad = ff.precision(
            ff.value_and_grad(lambda w, x: (unit(w, x).float() * 2.0**-12).sum()),
            torch.float16,
        )
        seen = []

        def look(params, x):
            out = grad(params, x)
            seen.append(out[1])
            return out

        w = torch.ones(2)
        optimizer(look)(ff.TrainState(w, optimizer.init(w)), x)
        return seen[0]

    with pytest.warns(UserWarning, match="ff.loss_scale"):
        assert gradient(ff.sgd(1.0)).tolist() == [0.0, 0.0]
    assert gradient(ff.loss_scale(ff.sgd(1.0))).tolist() == [2.0**-26] * 2


@pytest.mark.parametrize("zero", [None, 0, 1, 3])
def test_masters_of_float16_parameters_get_what_float16_would_lose(zero):
    unit, tiny, mesh = ff.unit(lambda w, x: w * x), 2.0**-26, simulated(2)

    def loss(w, x):
        return (unit(w, x[0]).float() * 2.0**-12).sum()

    def main():
        optimizer = ff.loss_scale(ff.master_weights(ff.sgd(0.25 / tiny)), 2.0**10)
        step = optimizer(ff.value_and_grad(loss))
        x = torch.full((1, 5), 2.0**-14, dtype=torch.float16)
        step = step if zero is None else ff.shard(step, mesh, "data", zero=zero)
        w = torch.ones(5, dtype=torch.float16)
        state, _ = step(ff.init_state(step, w, optimizer, x), x)
        same(ff.unshard(state.params), torch.full((5,), 0.75, dtype=torch.float16))

    ff.spmd(main, mesh)()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_that_half_precision_cannot_tell(dtype):
    """257 is 256 in bfloat16, and 70,000 is infinite in float16."""
    for weight in (257.0, 70_000.0):

        def loss(w, weight=weight):
            return ff.Weighted((w.float() * weight / 8).sum(), torch.tensor(weight))

        _, grad = ff.value_and_grad(loss)(torch.ones(2, dtype=dtype))
        exact = torch.tensor(weight / 8).to(dtype).float() / weight
        same(grad, exact.expand(2).to(dtype))


def test_the_scale_goes_as_torchs():
    steps = [True, True, False, True, True, True, False, False, True, True, True, True]
    how = {"growth": 2.0, "backoff": 0.5, "interval": 3}
    scaler = torch.amp.GradScaler("cpu", 64.0, 2.0, 0.5, 3)
    w = torch.nn.Parameter(torch.ones(2))
    judge = torch.optim.SGD([w], lr=0.25)
    optimizer = ff.loss_scale(ff.sgd(0.25), 64.0, **how)
    step = optimizer(ff.value_and_grad(lambda w, x: (w * x).sum()))
    state = ff.TrainState(torch.ones(2), optimizer.init(torch.ones(2)))
    for good in steps:
        x = torch.tensor([1.0, 1.0 if good else math.inf])
        state, _ = step(state, x)
        judge.zero_grad()
        scaler.scale((w * x).sum()).backward()
        scaler.step(judge)
        scaler.update()
        assert state.opt_state.scale == scaler.get_scale()
        same(state.params, w.data)


@pytest.mark.parametrize("donated", [False, True])
def test_at_the_minimum_it_raises_and_the_state_is_as_it_was(donated):
    mesh = simulated(2)

    def main():
        optimizer = ff.loss_scale(ff.sharded_adam(0.5), 2.0, minimum=1.0)
        step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
        step = ff.donate(step) if donated else step
        x = ff.local_batch(X, mesh, "data")
        state = ff.init_state(step, WS, optimizer, x)
        state, _ = step(state, x * torch.inf)
        with pytest.raises(FloatingPointError, match="below the minimum of 1"):
            step(state, x * torch.inf)
        assert state.opt_state[:3] == (1.0, 0, 1)
        same(ff.unshard(state.params), WS)
        return step(state, x)[1]["loss"].item()

    first, second = ff.spmd(main, mesh)()
    assert first == second and math.isfinite(first)


def test_it_sends_one_number():
    mesh = simulated(4)

    def main(optimizer):
        step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
        x = ff.local_batch(X, mesh, "data")
        state = ff.init_state(step, WS, optimizer, x)
        with ff.ledger() as log:
            step(state, x)
        return log.bytes("data")

    (plain, *_), (scaled, *_) = (
        ff.spmd(main, mesh)(o) for o in (ff.sgd(0.5), ff.loss_scale(ff.sgd(0.5)))
    )
    assert scaled - plain == 2 * 3 * 4 / 4  # an all-reduce of 4 bytes


@pytest.mark.filterwarnings("ignore:gradients are computed in float16")
def test_a_sum_in_float16_does_not_overflow_and_the_way_there_loses_little():
    unit = ff.unit(lambda w, x: (w * x).sum())

    def loss(w, x):
        return unit(w, x).float()

    for size, wide, zero in itertools.product(
        (2, 3, 4, 6), (torch.float32, torch.float16), range(4)
    ):
        mesh = simulated(size)
        grad = ff.precision(ff.value_and_grad(loss), torch.float16)
        grad = ff.shard(grad, mesh, "data", zero=zero)
        x = torch.full((size,), 30_000.0)
        for _, g in on_ranks(grad, torch.ones(1, dtype=wide), x, mesh=mesh):
            close(g, torch.full((1,), 30_000.0, dtype=wide), 1e-3)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda: ff.loss_scale(ff.sgd(1.0), growth=1.0), "above 1"),
        (lambda: ff.loss_scale(ff.sgd(1.0), backoff=2.0), "between 0 and 1"),
        (lambda: ff.loss_scale(ff.sgd(1.0), initial="8"), "must be a number"),
        (lambda: ff.masked(ff.loss_scale(ff.sgd(1.0)), lambda *_: True), "around the"),
        (
            lambda: ff.pipeline(
                loss, simulated(pipe=2), "pipe", n_microbatches=2,
                schedule=ff.schedules.asynchronous, update=ff.loss_scale(ff.sgd(1.0)),
            ),
            "another schedule",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(optimizer, says):
    with pytest.raises((TypeError, ValueError), match=says):
        optimizer()


def test_in_a_chain_it_scales_too():
    clip = ff.clip_by_global_norm(0.1)
    expected = trained("shard", ff.chain(clip, ff.sgd(0.5)))[0][0]
    for make in (
        lambda: ff.chain(clip, ff.loss_scale(ff.sgd(0.5))),
        lambda: ff.loss_scale(ff.chain(clip, ff.sgd(0.5))),
        lambda: ff.loss_scale(ff.loss_scale(ff.chain(clip, ff.sgd(0.5)))),
    ):
        same(trained("shard", make())[0][0], expected)


def test_finite_over_mixed_layouts():
    good = {"a": torch.tensor([1e38, 3e38]), "n": 3, "e": torch.ones(0)}
    assert all_finite(good) and all_finite({}) and all_finite([None])
    assert all_finite({"d": torch.tensor(1e300, dtype=torch.float64)})
    for bad in (math.inf, -math.inf, math.nan):
        assert not all_finite(tree.map(lambda x: x, {**good, "b": torch.tensor(bad)}))

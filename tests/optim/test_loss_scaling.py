"""`loss_scale`: gradients are the loss's, and a step is made by all or by none."""

import itertools
import math

import pytest
import torch

import fsfunc as ff
from tests.checks import all_refused, close, on_ranks, same, simulated
from tests.optim.steps import DATA, STACKS, WS, X, bytes_of, layer, loss, trained

SGD = ff.sgd(0.5)


def weighted(ws, x):
    for w in ws:
        x = layer(w, x)
    return ff.Weighted(x.square().sum(), x.numel())


@pytest.mark.parametrize(("i", "stack"), [*enumerate(STACKS)])
def test_a_power_of_two_changes_no_bit(i, stack):
    fn, scale = [(loss, 2.0**10), (weighted, 2.0**-10)][i % 2]
    plain = trained(stack, SGD, fn)
    scaled = trained(stack, ff.loss_scale(SGD, scale), fn)
    for a, b in zip(scaled, plain, strict=True):
        same(a[:2], b[:2])
        assert a.state[:3] == (scale, 2, 0)
    odd = trained(stack, ff.loss_scale(SGD, 1000.0), fn)
    close([a.params for a in odd], [b.params for b in plain])


@pytest.mark.parametrize("stack", STACKS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(stack):
    optimizer = ff.loss_scale(SGD, 16.0, interval=2)
    plain, bad = trained(stack, SGD)[0].params, X.clone()
    bad[0] = torch.nan  # a row of the first rank
    for found in trained(stack, optimizer, batches=(bad, X, X)):
        same(found.params, plain)  # of two steps: the first one was not made
        assert found.state[:3] == (16.0, 0, 1)  # halved, doubled after two good ones


def test_what_float16_loses_is_there():
    unit, seen = ff.unit(lambda w, x: w * x), []
    grad = ff.precision(
        ff.value_and_grad(lambda w, x: (unit(w, x).float() * 2.0**-12).sum()),
        torch.float16,
    )

    def look(params, x):
        seen.append(grad(params, x))
        return seen[-1]

    def gradient(optimizer):
        w, x = torch.ones(2), torch.full((2,), 2.0**-14)
        optimizer(look)(ff.TrainState(w, optimizer.init(w)), x)
        return seen[-1][1].tolist()

    with pytest.warns(UserWarning, match="ff.loss_scale"):
        assert gradient(ff.sgd(1.0)) == [0.0, 0.0]
    assert gradient(ff.loss_scale(ff.sgd(1.0))) == [2.0**-26] * 2


def test_the_scale_goes_as_torchs():
    scaler = torch.amp.GradScaler("cpu", 64.0, 2.0, 0.5, 3)
    w = torch.nn.Parameter(torch.ones(2))
    judge = torch.optim.SGD([w], lr=0.25)
    optimizer = ff.loss_scale(ff.sgd(0.25), 64.0, growth=2.0, backoff=0.5, interval=3)
    step = optimizer(ff.value_and_grad(lambda w, x: (w * x).sum()))
    state = ff.TrainState(torch.ones(2), optimizer.init(torch.ones(2)))
    for good in (1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1):
        x = torch.tensor([1.0, 1.0 if good else math.inf])
        state, _ = step(state, x)
        judge.zero_grad()
        scaler.scale((w * x).sum()).backward()
        scaler.step(judge)
        scaler.update()
        assert state.opt_state.scale == scaler.get_scale()
        same(state.params, w.data)


ADAM, UNIT = ff.sharded_adam(0.5), {"layer": 2.0}
LEAST = {
    "loss_scale": (ff.loss_scale(ADAM, 2.0, minimum=1.0), (1.0, 0, 1),
                   "below the minimum of 1"),
    "layerwise": (ff.layerwise_loss_scale(ADAM, UNIT, minimum=1.0),
                  ({"layer": 1.0}, {"layer": 0}, 1), "'layer' are not finite .* of 1"),
}  # fmt: skip


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", LEAST)
def test_at_the_minimum_it_raises_and_the_state_is_as_it_was(name, donated):
    optimizer, scales, says = LEAST[name]

    def main():
        step = ff.shard(optimizer(ff.value_and_grad(loss)), DATA, "data")
        step = ff.donate(step) if donated else step
        x = ff.local_batch(X, DATA, "data")
        state = ff.init_state(step, WS, optimizer, x)
        state, _ = step(state, x * torch.inf)
        with pytest.raises(FloatingPointError, match=says):
            step(state, x * torch.inf)
        assert state.opt_state[:3] == scales
        same(ff.unshard(state.params), WS)
        return step(state, x)[1]["loss"].item()

    first, second = ff.spmd(main, DATA)()
    assert first == second and math.isfinite(first)


def test_it_sends_one_number():
    plain, scaled = (trained("shard", o, batches=[X])[0] for o in (SGD, SCALED))
    # an all-reduce of 4 bytes
    assert bytes_of(scaled) - bytes_of(plain) == 2 * 4 / 2


@pytest.mark.filterwarnings("ignore:gradients are computed in float16")
def test_a_sum_in_float16_does_not_overflow_and_the_way_there_loses_little():
    unit = ff.unit(lambda w, x: (w * x).sum())

    def loss(w, x):
        return unit(w, x).float()

    for (size, wide), zero in itertools.product(
        [(2, torch.float32), (3, torch.float16), (6, torch.float16)], range(4)
    ):
        mesh = simulated(size)
        grad = ff.precision(ff.value_and_grad(loss), torch.float16)
        grad = ff.shard(grad, mesh, "data", zero=zero)
        x = torch.full((size,), 30_000.0)
        for _, g in on_ranks(grad, torch.ones(1, dtype=wide), x, mesh=mesh):
            close(g, torch.full((1,), 30_000.0, dtype=wide), 1e-3)


SCALED = ff.loss_scale(SGD)


test_what_cannot_be_is_refused = all_refused({
    "growth": (lambda: ff.loss_scale(SGD, growth=1.0), ValueError, "above 1"),
    "backoff": (lambda: ff.loss_scale(SGD, backoff=2.0), ValueError, "0 and below 1"),
    "text": (lambda: ff.loss_scale(SGD, initial="8"), TypeError, "must be a number"),
    "masked": (lambda: ff.masked(SCALED, lambda *_: True), ValueError, "around the"),
    "asynchronous": (lambda: ff.pipeline(
        loss, simulated(pipe=2), "pipe", n_microbatches=2,
        schedule=ff.schedules.asynchronous, update=SCALED,
    ), ValueError, "another schedule"),
})  # fmt: skip

"""`layerwise_loss_scale`: the loss's gradients, and who overflowed backs off."""

import pytest
import torch

import fsfunc as ff
from tests.checks import all_refused, close, same, simulated
from tests.models import floats, split, splits
from tests.optim import steps
from tests.optim.steps import WIDTH, layer, other, trained

SGD = ff.sgd(0.5)
SCALES = {"layer": 2.0**10, "other": 2.0**-4}
SCALED = ff.layerwise_loss_scale(SGD, SCALES)
CHOSEN = ("alone", "accumulate", "donate(remat(shard))", "pipeline(shard)")


@ff.unit
def narrow(w, x):  # cotangents above 65504 are infinite in here
    return torch.tanh((x @ w).half().float())


def loss(ws, batch, layers=(layer, other, layer)):
    x, size = batch
    for w, unit in zip(ws, layers, strict=True):
        x = unit(w, x)
    return (x.square() * size).mean()


def in_half(ws, batch):
    return loss(ws, batch, (layer, narrow, layer))


def batch(*sizes):
    """Rows, and by how much each rank's losses are larger."""
    return steps.X, torch.tensor(sizes).repeat_interleave(8 // len(sizes))[:, None]


ONE = batch(1.0)


def ran(stack, optimizer, fn=loss, batches=(ONE, ONE), **how):
    return trained(stack, optimizer, fn, batches, **how)


@pytest.mark.parametrize("stack", CHOSEN)
def test_a_power_of_two_changes_no_bit(stack):
    plain = ran(stack, SGD)
    for a, b in zip(ran(stack, SCALED), plain, strict=True):
        same(a[:2], b[:2])
        assert a.state[:3] == (SCALES, {"layer": 2, "other": 2}, 0)
    odd = ran(stack, ff.layerwise_loss_scale(SGD, {"layer": 1000.0}))
    close([a.params for a in odd], [b.params for b in plain])


@pytest.mark.parametrize("stack", CHOSEN)
def test_who_overflows_backs_off_and_the_step_is_skipped_on_all(stack):
    """In the first step, on one rank: 1e9 is too much for float16, and no other."""

    def half(narrow, batches):
        scales = {"layer": 1.0, "narrow": narrow}
        optimizer = ff.layerwise_loss_scale(SGD, scales, interval=3)
        return ran(stack, optimizer, in_half, batches)

    expected = half(2.0**-5, [ONE, ONE])[0].params
    for found in half(2.0**-4, [batch(1e9, 1.0), ONE, ONE]):
        same(found.params, expected)  # of two steps: the first one was not made
        # Infinite cotangents went through another unit, too, which is not to blame.
        scales = {"layer": 2.0, "narrow": 2.0**-5}
        assert found.state[:3] == (scales, {"layer": 0, "narrow": 2}, 1)


def test_a_loss_that_is_not_finite_is_everybodys():
    for found in ran("shard", SCALED, batches=[batch(torch.inf)]):
        assert found.state.scales == {name: s / 2 for name, s in SCALES.items()}


def test_what_float16_loses_is_there():
    far = ff.unit(lambda w, x: (w * x).half().float())
    near = ff.unit(lambda w, x: w * x.half().float() * 2.0**-30)
    far.__name__, near.__name__ = "far", "near"
    w, x, seen = [torch.ones(2), torch.ones(2)], torch.full((2,), 2.0**-8), []

    def grad(w, x):
        seen.append(
            ff.value_and_grad(lambda w, x: near(w[1], far(w[0], x)).sum())(w, x)
        )
        return seen[-1]

    def gradients(optimizer):
        optimizer(grad)(ff.TrainState(w, optimizer.init(w)), x)
        return [g.tolist() for g in seen[-1][1]]

    there, lost = [2.0**-38] * 2, [0.0] * 2
    assert gradients(SGD) == [lost, there]
    scales = {"far": 2.0**20, "near": 2.0**20}
    assert gradients(ff.layerwise_loss_scale(SGD, scales)) == [there, there]


def test_a_derivative_within_the_loss_is_that_of_the_loss():
    def penalty(ws, batch):
        of_x = lambda x: loss(ws, (x, batch[1]))  # noqa: E731
        inner = torch.func.grad(of_x)(batch[0])
        _, slope = ff.value_and_grad(of_x)(batch[0])
        return loss(ws, batch) + inner.square().sum() + slope.square().sum()

    found, plain = (ran("shard", o, penalty, [ONE])[0] for o in (SCALED, SGD))
    close(found[:2], plain[:2])


@pytest.mark.parametrize("stack", ["alone", "shard"])
def test_split_leaves(stack):
    mesh = simulated(model=2, data=2 if stack == "shard" else 1)
    shapes = {"up": (8, WIDTH), "down": (WIDTH, 8)}
    params = {k: floats(*s, seed=1) for k, s in shapes.items()}
    fn = lambda p, x: split(p, split(p, x[0])).square().mean()  # noqa: E731
    scaled = ff.layerwise_loss_scale(SGD, {"split": 2.0**8})
    found, plain = (
        [r[:2] for r in ran(stack, o, fn, [ONE], init=params, mesh=mesh,
                            layouts=splits())] for o in (scaled, SGD)
    )  # fmt: skip
    same(found, plain)


@ff.unit
def whole(ws, x):
    return layer(ws[0], x)


def outer(ws, batch):
    return whole(ws, batch[0]).square().mean()


def by(scales, stack="alone", growth=2.0, **how):
    make = lambda: ff.layerwise_loss_scale(SGD, scales, growth=growth)  # noqa: E731
    return lambda: ran(stack, make(), **how)


HALF = {"wrap": lambda step: ff.precision(step, torch.float16)}
V, TWO = ValueError, {"layer": 2.0}
test_what_cannot_be_is_refused = all_refused([
    (by({}), V, "there must be scales"),
    (by({"layer": 0.0}), V, "above 0"),
    (by({"minimum": -1.0}), V, "minimum.* above 0"),
    (by(TWO, growth=1.0), V, "growth is 1.0: it must be above 1"),
    (by({"layer": 2.0, "wdie": 2.0}), V, "'wdie', and the units .* layer, other"),
    (by({"whole": 2.0}, "shard", fn=outer), V, "units within it gather"),
    (by(TWO, **HALF), V, "must be float32 or wider"),
    (by(TWO, "shard", **HALF), V, "torch.autocast"),
], sent=True)  # fmt: skip


def test_an_evaluation_may_call_fewer_units():
    ws, x = [torch.eye(WIDTH) for _ in range(3)], steps.X

    def few(ws, x):
        return layer(ws[0], x).mean()

    def grad_fn(ws, x):
        ff.value(few)(ws, x)
        return ff.value_and_grad(loss)(ws, (x, torch.ones(8, 1)))

    state = ff.TrainState(ws, SCALED.init(ws))
    value = SCALED(grad_fn)(state, x)[1]["loss"]
    assert torch.equal(value, loss(ws, (x, torch.ones(8, 1))))

"""`layerwise_loss_scale`: the loss's gradients, and who overflowed backs off."""

import pytest
import torch

import fsfunc as ff
from tests.checks import close, same, simulated

D = 4


@ff.unit
def wide(w, x):
    return torch.tanh(x @ w)


@ff.unit
def narrow(w, x):  # cotangents above 65504 are infinite in here
    return torch.tanh((x @ w).half().float())


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@ff.unit
def other(w, x):
    return torch.sin(x @ w)


WS, X = [drawn(k, D, D) for k in range(4)], drawn(9, 8, D)
SCALES = {"wide": 2.0**10, "other": 2.0**-4}


def loss(ws, batch, layers=(wide, other, wide, wide)):
    x, size = batch
    for w, layer in zip(ws, layers, strict=True):
        x = layer(w, x)
    return (x.square() * size).mean()


def in_half(ws, batch):
    return loss(ws, batch, (wide, narrow, wide, wide))


STACKS = {
    "alone": lambda s, mesh: s,
    "remat": lambda s, mesh: ff.remat(s),
    "accumulate": lambda s, mesh: ff.accumulate(s, 2),
    "shard": lambda s, mesh: ff.shard(s, mesh, "data"),
    "shard zero=1": lambda s, mesh: ff.shard(s, mesh, "data", zero=1, min_bytes=1000),
    "accumulate(shard)": lambda s, mesh: ff.accumulate(ff.shard(s, mesh, "data"), 2),
    "donate(shard(remat))": lambda s, mesh: ff.donate(
        ff.shard(ff.remat(s), mesh, "data")
    ),
    "pipeline(shard)": lambda s, mesh: ff.pipeline(
        ff.shard(s, mesh, "data"), mesh, "pipe", n_microbatches=2
    ),
}


def trained(stack, optimizer, steps=2, size=lambda k, rank: 1.0, fn=loss, wrap=None):
    mesh = simulated(data=2, pipe=2 if "pipe" in stack else 1)

    def main():
        step = optimizer(ff.value_and_grad(fn))
        step = STACKS[stack](step if wrap is None else wrap(step), mesh)
        batches = []
        for k in range(steps):
            rank = mesh.coordinate("data") if "shard" in stack else 0
            batch = X, torch.full((8, 1), size(k, rank))
            if "shard" in stack:
                batch = ff.local_batch((X, batch[1]), mesh, "data")
            batches.append(batch)
        state = ff.init_state(step, [w.clone() for w in WS], optimizer, batches[0])
        metrics = []
        for batch in batches:
            state, m = step(state, batch)
            metrics.append(m["loss"])
        return ff.unshard(state.params), metrics, state.opt_state

    return ff.spmd(main, mesh)()


@pytest.mark.parametrize("stack", STACKS)
def test_a_power_of_two_changes_no_bit(stack):
    plain = trained(stack, ff.sgd(0.5))
    scaled = trained(stack, ff.layerwise_loss_scale(ff.sgd(0.5), SCALES))
    for (a, losses, state), (b, expected, _) in zip(scaled, plain, strict=True):
        same((a, losses), (b, expected))
        assert state[:3] == (SCALES, {"wide": 2, "other": 2}, 0)
    odd = trained(stack, ff.layerwise_loss_scale(ff.sgd(0.5), {"wide": 1000.0}))
    close([p for p, *_ in odd], [p for p, *_ in plain])


@pytest.mark.parametrize(
    "stack", ["alone", "accumulate", "donate(shard(remat))", "pipeline(shard)"]
)
def test_who_overflows_backs_off_and_the_step_is_skipped_on_all(stack):
    """In the first step, on one rank: 1e9 is too much for float16, and no other."""

    def ran(narrow, steps, size):
        scales = {"wide": 1.0, "narrow": narrow}
        optimizer = ff.layerwise_loss_scale(ff.sgd(0.5), scales, interval=3)
        return trained(stack, optimizer, steps, size, in_half)

    def size(k, rank):
        return 1e9 if k == 0 and rank == 0 else 1.0

    expected = ran(2.0**-5, 2, lambda k, rank: 1.0)[0][0]
    for params, _, state in ran(2.0**-4, 3, size):
        same(params, expected)  # of two steps: the first one was not made
        # Infinite cotangents went through a wide unit, too, which is not to blame.
        scales = {"wide": 2.0, "narrow": 2.0**-5}
        assert state[:3] == (scales, {"wide": 0, "narrow": 2}, 1)


def test_a_loss_that_is_not_finite_is_everybodys():
    optimizer = ff.layerwise_loss_scale(ff.sgd(0.5), SCALES)
    for *_, state in trained("shard", optimizer, 1, lambda k, rank: torch.inf):
        assert state.scales == {name: s / 2 for name, s in SCALES.items()}


def test_what_float16_loses_is_there():
    far = ff.unit(lambda w, x: (w * x).half().float())
    near = ff.unit(lambda w, x: w * x.half().float() * 2.0**-30)
    far.__name__, near.__name__ = "far", "near"
    w, x = [torch.ones(2), torch.ones(2)], torch.full((2,), 2.0**-8)

    def gradients(optimizer):
        seen = []

        def grad(w, x):
            out = ff.value_and_grad(lambda w, x: near(w[1], far(w[0], x)).sum())(w, x)
            seen.append(out[1])
            return out

        optimizer(grad)(ff.TrainState(w, optimizer.init(w)), x)
        return [g.tolist() for g in seen[0]]

    there, lost = [2.0**-38] * 2, [0.0] * 2
    assert gradients(ff.sgd(1.0)) == [lost, there]
    scales = {"far": 2.0**20, "near": 2.0**20}
    assert gradients(ff.layerwise_loss_scale(ff.sgd(1.0), scales)) == [there, there]


def test_a_derivative_within_the_loss_is_that_of_the_loss():
    def penalty(ws, batch):
        of_x = lambda x: loss(ws, (x, batch[1]))  # noqa: E731
        inner = torch.func.grad(of_x)(batch[0])
        _, slope = ff.value_and_grad(of_x)(batch[0])
        return loss(ws, batch) + inner.square().sum() + slope.square().sum()

    scaled = ff.layerwise_loss_scale(ff.sgd(0.5), SCALES)
    found, plain = (trained("shard", o, 1, fn=penalty) for o in (scaled, ff.sgd(0.5)))
    close(found[0][:2], plain[0][:2])


@ff.unit
def split(p, x):
    h = torch.tanh(ff.nn.column_linear(x, p["up"]))
    return x + ff.nn.row_linear(h, p["down"])


@pytest.mark.parametrize("sharded", [False, True])
def test_split_leaves(sharded):
    mesh = simulated(model=2, data=2 if sharded else 1)
    params = [{"up": drawn(k, 8, D), "down": drawn(k, D, 8)} for k in range(2)]
    layouts = {"*/up": ff.Split(0, "model"), "*/down": ff.Split(1, "model")}

    def fn(params, x):
        for p in params:
            x = split(p, x)
        return x.square().mean()

    def main(optimizer):
        step = optimizer(ff.value_and_grad(fn))
        step = ff.shard(step, mesh, "data") if sharded else step
        x = ff.local_batch(X, mesh, "data")
        state = ff.init_state(step, params, optimizer, x, layouts=layouts)
        state, metrics = step(state, x)
        return ff.unshard(state.params), metrics

    scaled = ff.layerwise_loss_scale(ff.sgd(0.5), {"split": 2.0**8})
    found, plain = (list(ff.spmd(main, mesh)(o)) for o in (scaled, ff.sgd(0.5)))
    same(found, plain)


def test_autocast_under_shard_is_near():
    def fn(ws, batch):
        with torch.autocast("cpu", torch.float16):
            return loss(ws, batch)

    wrap = lambda s: ff.precision(s, torch.float32, output=torch.float32)  # noqa: E731
    optimizer = ff.layerwise_loss_scale(ff.sgd(0.5), SCALES)
    found = trained("shard", optimizer, fn=fn, wrap=wrap)[0]
    close(found[0], trained("shard", ff.sgd(0.5))[0][0], 1e-2)
    assert found[2].skipped == 0


@pytest.mark.parametrize("donated", [False, True])
def test_at_the_minimum_it_raises_and_the_state_is_as_it_was(donated):
    optimizer = ff.layerwise_loss_scale(
        ff.sharded_adam(0.5), {"narrow": 2.0}, minimum=2.0
    )
    mesh = simulated(2)

    def main():
        step = ff.shard(optimizer(ff.value_and_grad(in_half)), mesh, "data")
        step = ff.donate(step) if donated else step
        batch = ff.local_batch((X, torch.full((8, 1), 1e9)), mesh, "data")
        state = ff.init_state(step, WS, optimizer, batch)
        with pytest.raises(FloatingPointError, match="'narrow' are not finite .* of 2"):
            step(state, batch)
        same(ff.unshard(state.params), WS)

    ff.spmd(main, mesh)()


def outer(ws, batch):
    return whole(ws, batch[0]).square().mean()


@ff.unit
def whole(ws, x):
    return wide(ws[0], x)


@pytest.mark.parametrize(
    ("scales", "stack", "more", "says"),
    [
        ({}, "alone", {}, "there must be scales"),
        ({"wide": 0.0}, "alone", {}, "above 0"),
        ({"minimum": -1.0}, "alone", {}, "above 0"),
        ({"wide": 2.0}, "alone", {"growth": 1.0}, "growth must be above 1"),
        (
            {"wide": 2.0, "wdie": 2.0},
            "alone",
            {},
            "'wdie', and the units .* other, wide",
        ),
        ({"whole": 2.0}, "shard", {"fn": outer}, "units within it gather"),
        ({"wide": 2.0}, "alone", {"half": True}, "must be float32 or wider"),
        ({"wide": 2.0}, "shard", {"half": True}, "torch.autocast"),
    ],
)
def test_what_cannot_be_is_refused(scales, stack, more, says):
    more = {**more, "wrap": _half} if more.pop("half", False) else dict(more)
    options = {k: more.pop(k) for k in list(more) if k == "growth"}
    with pytest.raises(ValueError, match=says):
        optimizer = ff.layerwise_loss_scale(ff.sgd(1.0), scales, **options)
        trained(stack, optimizer, **more)


def _half(step):
    return ff.precision(step, torch.float16)

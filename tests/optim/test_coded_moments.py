"""Moments in 8 bits, however the parameters lie and whatever takes the gradients."""

from functools import cache

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.nn import column_linear, row_linear
from fsfunc.sharded.leaf import is_sharded
from tests.checks import simulated
from tests.optim.trees import assert_bits

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
DIM, ROWS, STEPS = 24, 8, 5
LAYOUTS = {
    "**/up": ff.Split(0, "model"),
    "**/bias": ff.Split(0, "model"),
    "**/down": ff.Split(1, "model"),
}


@ff.unit
def block(p, x):
    h = torch.tanh(column_linear(x * p["gain"], p["up"], p["bias"]))
    return x + row_linear(h, p["down"])


def loss(params, x):
    for p in params["blocks"]:
        x = block(p, x)
    return x.square().mean()


def model():
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=draw) / 5  # noqa: E731

    def one():
        return {
            "gain": torch.ones(DIM),
            "up": make(2 * DIM, DIM),
            "bias": make(2 * DIM),
            "down": make(DIM, 2 * DIM),
        }

    return {"blocks": [one() for _ in range(2)]}


BATCH = torch.randn(3 * ROWS, DIM, generator=torch.Generator().manual_seed(1))


def trained(arranged, dtype, mesh=None, layouts=None):
    """The whole parameters after some steps, and the state."""
    optimizer = ff.sharded_adam(1e-2, moment_dtype=dtype)
    step = arranged(optimizer(ff.value_and_grad(loss)))
    batch = BATCH
    if mesh is not None and "data" in mesh.axes:
        batch = ff.local_batch(BATCH, mesh, "data")
    state = ff.init_state(step, model(), optimizer, batch, layouts=layouts)
    step = ff.donate(step)
    for _ in range(STEPS):
        state, _ = step(state, batch)
    return ff.unshard(state.params), state


def moved(params):
    pairs = zip(tree.leaves(params), tree.leaves(model()), strict=True)
    return torch.cat([(x - y).flatten() for x, y in pairs])


ARRANGED = {
    "whole": (None, lambda step, mesh: step, False),
    "accumulate": (None, lambda step, mesh: ff.accumulate(step, 2), False),
    "zero 0": ({"data": 2}, lambda s, m: ff.shard(s, m, "data", zero=0), False),
    "zero 3, uneven": ({"data": 3}, lambda s, m: ff.shard(s, m, "data"), False),
    "split leaves of a pipeline": (
        {"pipe": 2, "data": 2, "model": 2},
        lambda s, m: ff.shard(
            ff.pipeline(s, m, "pipe", n_microbatches=2), m, "data", zero=2
        ),
        True,
    ),
}


@cache
def with_float32_moments():
    return trained(lambda step: step, None)[0]


@pytest.mark.parametrize("name", ARRANGED)
def test_the_steps_are_near_those_of_float32_moments(name):
    axes, arranged, split = ARRANGED[name]
    layouts = LAYOUTS if split else None
    wide = with_float32_moments()
    if axes is None:
        found = [trained(lambda step: arranged(step, None), torch.uint8)[0]]
    else:
        mesh = simulated(**axes)

        def main():
            how = lambda step: arranged(step, mesh)  # noqa: E731
            return trained(how, torch.uint8, mesh, layouts)[0]

        found = ff.spmd(main, mesh)()
        for other in found[1:]:
            assert_bits(found[0], other)
    far = moved(found[0]) - moved(wide)
    assert far.norm() < 0.1 * moved(wide).norm()


@pytest.mark.parametrize("ranks", [0, 2])
def test_what_has_no_gradient_keeps_its_codes(ranks):
    """Beside leaves of its buffer that have one, too."""
    optimizer = ff.sharded_adam(1e-2, moment_dtype=torch.uint8)

    def main():
        params, grads = model(), tree.map(torch.cos, model())
        if ranks:
            call = ff.shard(ff.value_and_grad(loss), mesh, "data")
            params, grads = (ff.place(call, t, BATCH) for t in (params, grads))
        params, before = optimizer.apply(grads, optimizer.init(params), params)
        last = {"blocks": [dict(p) for p in grads["blocks"]]}
        for p in last["blocks"]:
            p["bias"] = p["up"] = None  # behind the others in their buffer, and before
        _, after = optimizer.apply(last, before, params)
        none = tree.map(lambda _: None, grads, is_leaf=is_sharded)
        _, same = optimizer.apply(none, before, params)
        return before, after, same

    def parts(codes):
        return [x.local if is_sharded(x) else x for x in codes]

    if ranks:
        mesh = simulated(data=ranks)
        found = ff.spmd(main, mesh)()
    else:
        found = [main()]
    rows, alive = [], []
    for before, after, same in found:
        for old, new, kept in zip(
            (before.mu, before.nu), (after.mu, after.nu), (same.mu, same.nu),
            strict=True,
        ):  # fmt: skip
            assert_bits(parts(old.codes), parts(kept.codes))
            assert_bits(parts(old.scales), parts(kept.scales))
            for a, b in zip(parts(old.codes), parts(new.codes), strict=True):
                rows.append((a.view(-1, 256) == b.view(-1, 256)).all(1))
            alive += [x.flatten() > 0 for x in parts(new.scales)]
    # Most of `up` lies in blocks in which nothing has a gradient.
    assert 0.3 < torch.cat(rows).float().mean() < 0.8
    assert torch.cat(alive).float().mean() > 0.9  # none was forgotten


def test_they_fit_no_other_mesh_and_say_so(tmp_path):
    mesh, other = simulated(data=2), simulated(data=3)
    optimizer = ff.sharded_adam(1e-2, moment_dtype=torch.uint8)

    def state(mesh):
        step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
        batch = ff.local_batch(BATCH, mesh, "data")
        return ff.init_state(step, model(), optimizer, batch)

    ff.spmd(lambda: ff.save(tmp_path / "a", state(mesh)), mesh)()

    def main():
        like = state(other)
        with pytest.raises(ValueError, match="mu/codes/0.*shapes.*that were saved"):
            ff.load(tmp_path / "a", like)

    ff.spmd(main, other)()

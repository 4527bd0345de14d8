"""Moments in 8 bits, however the parameters lie and whatever takes the gradients."""

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.nn import column_linear, row_linear
from fsfunc.sharded.leaf import is_sharded
from tests.checks import simulated
from tests.optim.trees import assert_bits

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
DIM, ROWS, STEPS = 24, 8, 3
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


STAGES = simulated(pipe=2, data=2, model=2)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split, in a pipeline"])
def test_the_steps_are_near_those_of_float32_moments(split):
    """Of parts that are uneven, too: of stacks `test_low_precision` has more."""

    def staged(step):
        step = ff.pipeline(step, STAGES, "pipe", n_microbatches=2)
        return ff.shard(step, STAGES, "data", zero=2)

    plain = lambda step: step  # noqa: E731
    wide = trained(plain, None)[0]
    if split:
        main = lambda: trained(staged, torch.uint8, STAGES, LAYOUTS)[0]  # noqa: E731
        found = ff.spmd(main, STAGES)()
    else:
        found = [trained(plain, torch.uint8)[0]]
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

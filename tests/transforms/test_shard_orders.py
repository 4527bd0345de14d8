"""Whole train steps, in any order of transforms, on meshes of any size."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.testing import assert_equals_one_device
from fsfunc.testing import strategies as draw
from fsfunc.testing.drawn_models import rows
from fsfunc.testing.drawn_stacks import DrawnStack
from tests.models import chain, floats, layers, train_step

LINES = st.integers(1, 8).map(lambda n: (ff.make_mesh({"data": n}), "data", None))
GRIDS = st.sampled_from([(3, 2), (2, 3), (1, 3)]).flatmap(
    lambda n: st.sampled_from(
        [(("a", "b"), None), (("b", "a"), None), ("a", "b"), ("b", "a")]
    ).map(lambda how: (ff.make_mesh({"a": n[0], "b": n[1]}), *how))
)
OPTIMIZERS = {
    "adam": ff.sharded_adam(0.01, weight_decay=0.1),
    "clipped": ff.chain(ff.clip_by_global_norm(0.5), ff.sgd(0.1, momentum=0.9)),
}


def noisy(params, seed):
    """Integer parameters made generic, so that sums round."""
    normal = torch.Generator().manual_seed(seed + 7)
    return tree.map(
        lambda x: (
            x + 0.3 * torch.randn(x.shape, generator=normal, dtype=x.dtype)
            if x.is_floating_point()
            else x
        ),
        params,
    )


@pytest.mark.slow  # test_shard_laws draws orders for gradient calls
@given(
    draw.models(),
    st.one_of(LINES, GRIDS),
    st.integers(0, 3),
    draw.orders(),
    st.sampled_from([0, 60, 10**6]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    draw.seeds,
)
@settings(max_examples=30)
def test_steps_equal_those_of_one_device(
    spec, place, zero, order, min_bytes, dtype, donated, seed
):
    mesh, axis, copies = place
    options = {"zero": zero, "replicate": copies, "min_bytes": min_bytes}
    # Where a gradient is nearly zero, Adam makes a step of its rounding: fp64 only.
    optimizer = OPTIMIZERS["adam" if dtype == torch.float64 else "clipped"]
    params = noisy(spec.params(seed, dtype), seed)
    frozen = spec.frozen_params(seed, dtype)
    batch = rows(2 * mesh.size, seed, dtype)

    def step(state, batch):
        grad = ff.value_and_grad(spec.loss)
        value, grads = grad(state.params, state.extra, batch)
        return state.apply_gradients(grads, optimizer), value

    state = ff.TrainState(params, optimizer.init(params), extra=frozen)
    stack = DrawnStack(mesh, order, axis, options)
    run = ff.donate(stack(step)) if donated else stack(step)
    assert_equals_one_device(
        step,
        run,
        mesh,
        state,
        batch,
        axis=stack.axes,
        calls=3,
        goes_on=lambda out: out[0],
        tolerance=1e-5 if dtype == torch.float32 else 1e-9,
    )


def test_64_ranks_train_in_seconds():
    mesh = ff.make_mesh({"data": 64}, "simulated")
    optimizer, params = ff.sharded_adam(0.01), layers(4, 16, make=floats)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))

    def main():
        step = ff.shard(optimizer(ff.value_and_grad(chain())), mesh, "data")
        mine = ff.local_batch(x, mesh, "data")
        state = ff.init_state(step, params, optimizer, mine)
        values = []
        for _ in range(5):
            state, metrics = step(state, mine)
            values.append(metrics["loss"].item())
        return values

    start = time.perf_counter()
    every = ff.spmd(main, mesh)()
    assert time.perf_counter() - start < 20  # 2 to 3 s on a quiet core
    assert all(values == every[0] for values in every)
    assert every[0][-1] < every[0][0]


def test_a_notebook_goes_on_with_what_spmd_returned():
    mesh, optimizer = ff.make_mesh({"data": 2}, "simulated"), ff.sgd(0.1)
    params, x = layers(1, make=floats), floats(8, 4, seed=2)
    step = ff.shard(train_step(chain(), optimizer), mesh, "data")
    states = ff.spmd(lambda: ff.init_state(step, params, optimizer, x), mesh)()
    losses = []
    for _ in range(3):
        states, values = ff.spmd(step, mesh)(states, x).unzip()
        losses.append(values[0].item())
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]

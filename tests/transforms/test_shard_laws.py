"""Laws of ``shard`` over drawn meshes, trees and orders: it equals one device."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device
from fsfunc.testing import strategies as draw
from fsfunc.testing.drawn_models import rows
from tests.checks import simulated
from tests.covering import examples
from tests.models import chain, floats, layers, train_step

STACKS = draw.meshes(("a", "b")).flatmap(draw.transform_stacks)


@given(draw.models(), STACKS, draw.seeds)
@settings(max_examples=examples(10))
def test_a_sharded_gradient_call_has_the_bits_of_one_device(model, stack, seed):
    def gradient(params, batch):
        trained, frozen = params
        return ff.value_and_grad(model.loss)(trained, frozen, batch)

    params = model.params(seed), model.frozen_params(seed)
    batch = rows(2 * stack.rows, seed)
    assert_equals_one_device(
        gradient, stack(gradient), stack.mesh, params, batch, axis=stack.axes
    )


EVERY = ("remat", "accumulate", "pipeline", "donate")
PIPED = draw.meshes(("a", "b"), max_axes=2).flatmap(
    lambda mesh: draw.transform_stacks(mesh, EVERY)
)


@given(draw.train_steps(frozen=True), PIPED)
@settings(max_examples=examples(8))
def test_a_train_step_under_any_stack_has_the_bits_of_one_device(drawn, stack):
    stages = stack.mesh.axes[stack.pipe] if stack.pipe else 0
    assume(stages <= (1 if drawn.model.whole else 2))
    assert_equals_one_device(
        drawn.step,
        stack(drawn.step),
        stack.mesh,
        drawn.state,
        drawn.batch(2 * stack.rows),
        axis=stack.axes,
    )


@settings(max_examples=3)
@given(draw.models(), st.integers(0, 3), draw.seeds)
def test_clipped_steps_of_adam_are_the_same_function(model, zero, seed):
    mesh = simulated(3)
    optimizer = ff.chain(ff.clip_by_global_norm(0.5), ff.sharded_adam(0.01))
    params, frozen = model.params(seed), model.frozen_params(seed)

    def step(state, batch):
        value, grads = ff.value_and_grad(model.loss)(state.params, state.extra, batch)
        return state.apply_gradients(grads, optimizer), value

    assert_equals_one_device(
        step,
        ff.donate(ff.shard(step, mesh, "data", zero=zero)),
        mesh,
        ff.TrainState(params, optimizer.init(params), extra=frozen),
        rows(6, seed),
        goes_on=lambda out: out[0],
        exact=True,
    )


def test_a_notebook_goes_on_with_what_spmd_returned():
    mesh, optimizer = simulated(2), ff.sgd(0.1)
    params, x = layers(1, make=floats), floats(8, 4, seed=2)
    step = ff.shard(train_step(chain(), optimizer), mesh, "data")
    rows = ff.spmd(lambda: ff.local_batch(x, mesh, "data"), mesh)()
    states = ff.spmd(lambda x: ff.init_state(step, params, optimizer, x), mesh)(rows)
    losses = []
    for _ in range(3):
        states, values = ff.spmd(step, mesh)(states, rows).unzip()
        losses.append(values[0].item())
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]

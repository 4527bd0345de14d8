"""Laws of ``shard`` over drawn meshes, trees and orders: it equals one device."""

from hypothesis import assume, given, settings

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device
from fsfunc.testing import strategies as draw
from fsfunc.testing.drawn_models import rows

STACKS = draw.meshes(("a", "b")).flatmap(draw.transform_stacks)


@given(draw.models(), STACKS, draw.seeds)
@settings(max_examples=60)
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
@settings(max_examples=30)
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

"""Laws of ``shard`` over drawn meshes, trees and orders: it equals one device."""

from hypothesis import given, settings

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

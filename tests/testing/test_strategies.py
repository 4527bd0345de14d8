"""What the strategies draw is as they say, and shrinks to the smallest."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import find as find_by
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.slices import assemble, take
from fsfunc.testing import assert_equals_one_device
from fsfunc.testing import strategies as draw

QUICK = settings(max_examples=60, derandomize=True, database=None)


def smallest(strategy, condition=lambda x: True):
    return find_by(strategy, condition, settings=QUICK)


def test_what_they_shrink_to():
    mesh = smallest(draw.meshes())
    assert mesh.axes == {"data": 2}
    two = smallest(draw.meshes(), lambda m: len(m.axes) > 1)
    assert two.axes == {"data": 2, "node": 2}
    assert smallest(draw.axes(mesh)) == "data"
    assert smallest(draw.shapes(), lambda s: 0 not in s and s) == (1,)
    assert smallest(draw.layouts(mesh, (4, 4))).parts == ()
    found = smallest(draw.trees(), lambda t: len(tree.leaves(t)) == 1)
    assert torch.equal(found, torch.zeros(())) and found.ndim == 0
    model = smallest(draw.models())
    assert model == type(model)()
    assert len(smallest(draw.batches(mesh))["tokens"]) == 2
    assert [len(row) for row in smallest(draw.schedules())] == [2]
    stack = smallest(draw.transform_stacks(mesh))
    assert repr(stack).startswith("shard(step, mesh, 'data', zero=0, reshard")


@given(st.data())
def test_a_layout_cuts_and_joins_and_sizes_divide(data):
    mesh = data.draw(draw.meshes(powers=False))
    shape = data.draw(draw.shapes())
    layout = data.draw(draw.layouts(mesh, shape))
    assert isinstance(layout, Layout) and set(layout.axes) <= set(mesh.axes)
    whole = torch.arange(layout.numel, dtype=torch.float32).view(shape)
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    parts = [(at, take(whole, layout, at)) for at in places]
    assert torch.equal(assemble(parts, layout), whole)
    axis = data.draw(draw.axes(mesh))
    shape = data.draw(draw.shapes(multiple=mesh.size))
    assert all(n % mesh.axis_size(axis) == 0 for n in shape)
    batch = data.draw(draw.batches(mesh, axis, rows_each=2))
    assert len(batch["tokens"]) % (2 * mesh.axis_size(axis)) == 0


@given(draw.schedules(ranks=2, n_stages=4, n_microbatches=2))
@settings(max_examples=10)
def test_schedules_run(schedule):
    ff.verify(schedule, n_stages=4, n_microbatches=2)  # which raises where it cannot
    assert len(schedule) == 2 and all(schedule)


# The test of a transform of one's own, in ten lines


def by_hand(step, mesh, axis):
    """Data parallel, for gradient calls: loss and gradients are means."""
    return lambda params, batch: ff.pmean(step(params, batch), axis)


def forgetful(step, mesh, axis):
    """The same; it forgets leaves that no layer but the first has."""

    def run(params, batch):
        loss, grads = step(params, batch)
        mean = ff.pmean((loss, grads), axis)
        kept = grads["layers"][1:]
        return mean[0], mean[1] | {"layers": [*mean[1]["layers"][:1], *kept]}

    return run


def law_of(transform):
    @given(draw.meshes(max_axes=1, ones=False), draw.train_steps(frozen=False))
    @settings(
        max_examples=10,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    def test_mine(mesh, drawn):
        step = drawn.gradient
        assert_equals_one_device(
            step,
            transform(step, mesh, "data"),
            mesh,
            drawn.params,
            drawn.batch(2 * mesh.size),
            calls=1,
        )

    return test_mine


@pytest.mark.slow  # some hundred steps, to shrink to the smallest
def test_a_right_transform_passes_and_a_wrong_one_shrinks():
    law_of(by_hand)()
    with pytest.raises(AssertionError) as caught:
        law_of(forgetful)()
    message = str(caught.value)
    assert "on Mesh({'data': 2}, 'simulated')" in message
    assert "'1/layers/1/w' f32[3, 3] differs" in message
    assert "nothing was reduced" in message

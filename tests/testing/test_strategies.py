"""What the strategies draw is as they say, and shrinks to the smallest."""

import torch
from hypothesis import find as find_by
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.slices import assemble, take
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

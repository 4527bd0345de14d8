"""Optimizers over shards: their norms, what they send, and buffers that stay whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.optim.adam import sharded_adam
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import FlatShard, Sharded
from fsfunc.sharded.packed_layouts import pack_flat
from tests.checks import simulated
from tests.covering import examples
from tests.optim.shards import MESHES, layouts, place, together, whole
from tests.optim.trees import (
    SEEDS,
    assert_bits,
    assert_near,
    copies,
    donated,
    floating,
    trained,
)


@settings(max_examples=examples(10))
@given(axes=MESHES, seed=SEEDS, p=st.sampled_from([1.0, 2.0, 3.0, math.inf]))
def test_norms_and_sums_count_each_element_once(axes, seed, p):
    """Of all and of each leaf; and clipped parts are parts of the clipped."""
    values, mesh = whole(seed), simulated(**axes)
    clip = ff.clip_by_global_norm(0.5, p=p)

    def measured(values):
        norms = ff.global_norm(values, p), ff.tree_sum(values)
        return norms, ff.leaf_norms(values, p), ff.all_finite(values)

    found = measured(values)
    each = [x for x in tree.leaves(values) if x.is_floating_point()]
    norm = lambda x: torch.linalg.vector_norm(x, p) if x.numel() else torch.zeros(())  # noqa: E731
    assert_near(list(map(norm, each)), found[1], 1e-5)
    assert found[1]["steps"] is None and found[2]
    for mine in ff.spmd(lambda: measured(place(values, axes)), mesh)():
        assert_near(found, mine, 1e-5)
    parts = ff.spmd(lambda: clip.update(place(values, axes), ())[0], mesh)()
    clipped = together(parts, mesh)
    assert_near(floating(clip.update(values, ())[0]), floating(clipped))


GRID = {"data": 2, "model": 3}
OVER = {"data": 2, "model": 3, ("data", "model"): 6}


def stepped(optimizer):
    return lambda values: trained(optimizer, values, [values])


def factors(shapes):
    """Rows and columns of matrices, and two numbers of each leaf."""
    return sum(sum(s) if len(s) == 2 else 0 for s in shapes) + 2 * len(shapes)


SENT = {  # over each set of axes: the collective, how often, and how many numbers
    "norm": (ff.global_norm, "psum", 1, lambda shapes: 1),
    "sum": (ff.tree_sum, "psum", 1, lambda shapes: 1),
    "largest": (lambda v: ff.global_norm(v, math.inf), "pmax", 1, lambda shapes: 1),
    "clip": (lambda v: ff.clip_by_global_norm(1.0).update(v, ()), "psum", 1,
             lambda shapes: 1),
    "lamb": (stepped(ff.lamb()), "psum", 1, lambda shapes: 2 * len(shapes)),
    "lars": (stepped(ff.lars(0.1)), "psum", 1, lambda shapes: 2 * len(shapes)),
    "adafactor": (stepped(ff.adafactor()), "psum", 2, factors),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_so_many_numbers_are_sent_for_each_set_of_axes(name):
    measure, op, count, numbers = SENT[name]
    values, mesh, shapes = whole(0), simulated(**GRID), {over: [] for over in OVER}
    for layout in layouts(values, GRID).values():
        axes = tuple(sorted(layout.axes))
        shapes[axes if len(axes) > 1 else axes[0]].append(layout.shape)
    with ff.ledger() as log:
        ff.spmd(lambda: measure(place(values, GRID)), mesh)()
    for rank in range(mesh.size):
        assert len(log.of(rank)) == count * len(OVER)
        for over, n in OVER.items():
            assert log.count(op, over, rank) == count
            expected = 2 * (n - 1) / n * 4 * numbers(shapes[over])
            assert log.bytes(over, rank=rank) == pytest.approx(expected)


def test_finiteness_is_one_number_over_the_mesh():
    mesh = simulated(**GRID)
    with ff.ledger() as log:
        assert all(ff.spmd(lambda: ff.all_finite(place(whole(0), GRID)), mesh)())
    for rank in range(mesh.size):
        assert len(log.of(rank)) == log.count("pmax", ("data", "model"), rank) == 1
        assert log.bytes(("data", "model"), rank=rank) == 2 * 5 / 6 * 4
    big = torch.full((4,), 3e38)  # no sum of these is finite
    assert ff.all_finite({"w": big, "n": 3}) and ff.all_finite({})


def unit_of_two():
    shapes, names = [(3, 5), (5,)], ["w", "b"]
    members = pack_flat(shapes, torch.float32, names, ["data"], 2, "unit")
    shard = FlatShard(members, torch.ones(10), {"data": 0})
    return dict(zip(names, shard.leaves(), strict=True))


def test_a_gradient_that_lies_otherwise_is_refused():
    params = unit_of_two()
    optimizer = sharded_adam()
    state = optimizer.init(params)
    before = copies(floating(params))
    for stranger in (
        torch.ones(3, 5),
        Sharded(torch.ones(10), Layout((3, 5), torch.float32)),
    ):
        with donated(), pytest.raises(tree.TreeMismatch, match="'w'.*flat over data=2"):
            optimizer.apply({**unit_of_two(), "w": stranger}, state, params)
    assert_bits(before, floating(params))

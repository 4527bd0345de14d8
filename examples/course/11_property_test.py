"""Lesson 11. A property test: say what is true of all meshes, and have them searched.

Whatever a transform T does, there is one law that it must obey:

    T(step) on any mesh, given the parts of a batch  =  step on one device, given all

Hypothesis draws meshes, models, parameters and data, and shrinks what breaks the law to
the smallest that does; the kit says which leaf differs, where, and what would explain
it. The plain program here clips its gradient. T is data parallelism, by hand.

    python examples/course/11_property_test.py
"""

import torch
from hypothesis import given, settings

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device, check_collective
from fsfunc.testing import strategies as draw


def clip(g, limit=3.0):
    return ff.tree_scale(g, (limit / ff.global_norm(g)).clamp(max=1.0))


def of_tensors(fn, g):
    return ff.tree.map(lambda x: fn(x) if isinstance(x, torch.Tensor) else x, g)


def mean(g):
    return of_tensors(lambda x: ff.pmean(x, "data"), g)


# 1. T, right and in four ways that would train, and be wrong.
def right(g):
    return clip(mean(g))


def a_sum_for_a_mean(g):
    return clip(of_tensors(lambda x: ff.psum(x, "data"), g))


def clipped_before_the_mean(g):
    return mean(clip(g))


def one_leaf_forgotten(g):
    return clip(mean(g) | {"embed": g["embed"]})


def the_first_rank_s(g):
    return clip(of_tensors(lambda x: ff.pbroadcast(x, "data", source=0), g))


def law(transform):
    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(draw.meshes(max_axes=1, max_size=4), draw.train_steps(outside=False))
    def on_any_mesh(mesh, drawn):
        plain, batch = drawn.gradient, drawn.batch(2 * mesh.size)

        def step(params, batch):
            return clip(plain(params, batch)[1])

        def by_hand(params, batch):
            return transform(plain(params, batch)[1])

        assert_equals_one_device(
            step, by_hand, mesh, drawn.params, batch, tolerance=1e-5
        )

    return on_any_mesh


law(right)()
print("right: holds")
for transform in (
    a_sum_for_a_mean,
    clipped_before_the_mean,
    one_leaf_forgotten,
    the_first_rank_s,
):
    try:
        law(transform)()
        print("NOT FOUND", transform.__name__)
    except AssertionError as error:
        print(
            f"\n{transform.__name__}: found", *str(error).splitlines()[1:6], sep="\n  "
        )


# 2. A collective of one's own has a law as well: <f(x), g> = <x, f'(g)>, lesson 2.
def halo(x):
    arrows = [(r, r + 1) for r in range(ff.axis_size("data") - 1)]
    return torch.cat([ff.ppermute(x[-1:], "data", arrows), x])


check_collective(halo)  # it is made of collectives: its transpose comes with it
try:
    check_collective(ff.collective(halo, lambda g: g[1:]))
except AssertionError as error:
    print("\na transpose that sends nothing back: found\n ", str(error)[:160])

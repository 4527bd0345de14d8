"""Lesson 11. A property test: say what is true on all meshes, and have them searched.

Whatever a transform T makes of a step, there is one law that it must obey:

    T(step) on any mesh, each rank with its rows  =  step on one device, with all rows

hypothesis draws meshes and numbers, and shrinks what breaks the law to the smallest
that does; the kit says which leaf differs, where, and what would explain it. The plain
program here is a gradient, clipped as a whole. T is data parallelism, by hand.

    python examples/course/11_property_test.py
"""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device, check_collective
from fsfunc.testing import strategies as draw

PHASES = Phase.generate, Phase.shrink
SEARCH = settings(max_examples=10, derandomize=True, deadline=None, phases=PHASES)


def loss(params, x):
    return (torch.tanh(x @ params["w"]) + params["b"]).square().mean()


def clip(g):
    return ff.tree_scale(g, (1.0 / ff.global_norm(g)).clamp(max=1.0))


# 1. T, right and in four ways that would train, and be wrong.
planted = {
    "reduced twice": lambda g: ff.psum(clip(ff.pmean(g, "data")), "data"),
    "clipped before the mean": lambda g: ff.pmean(clip(g), "data"),
    "one leaf forgotten": lambda g: clip(ff.pmean(g, "data") | {"b": g["b"]}),
    "rank 0 alone": lambda g: clip(ff.pbroadcast(g, "data", source=0)),
}


def law(transform):
    @settings(SEARCH)
    @given(draw.meshes(max_axes=1, max_size=4), st.integers(0, 999))
    def on_any_mesh(mesh, seed):
        torch.manual_seed(seed)
        params, x = {"w": torch.randn(3, 2), "b": torch.randn(2)}, torch.randn(8, 3)
        grad_fn = ff.value_and_grad(loss)
        step = lambda params, x: clip(grad_fn(params, x)[1])  # noqa: E731
        mine = lambda params, x: transform(grad_fn(params, x)[1])  # noqa: E731
        assert_equals_one_device(step, mine, mesh, params, x, calls=1, tolerance=1e-5)

    return on_any_mesh


law(lambda g: clip(ff.pmean(g, "data")))()
print("clipped after the mean: no example breaks the law")
for name, wrong in planted.items():
    try:
        law(wrong)()
    except AssertionError as error:
        print(f"{name}:", *str(error).splitlines()[:6], sep="\n    ")


# 2. A collective has a law too: <f(x), g> = <x, f'(g)>, for what goes back (lesson 2).
def halo(x):
    arrows = [(r, r + 1) for r in range(ff.axis_size("data") - 1)]
    return torch.cat([ff.ppermute(x[-1:], "data", arrows), x])


check_collective(halo, under=["vjp"])  # made of collectives, it brings its transpose
try:
    check_collective(ff.collective(halo, lambda g: g[1:]), under=["vjp"])
except AssertionError as error:
    print("a transpose that sends nothing back:", error, sep="\n    ")

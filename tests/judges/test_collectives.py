"""Drawn programs of collectives are those of `jax.shard_map`: values and gradients.

A program is a list of operations on a pool of values, each of a shape, and varying
along some axes of a mesh of two. Both libraries run it, and type it: what varies is V
here, and what does not is I. JAX needs `XLA_FLAGS` of as many devices, before it
starts.
"""

import math
import random
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fsfunc as ff

# torch's own, where torch.func takes its first tangent.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
jax.config.update("jax_enable_x64", True)
AXES = {"a": 2, "b": 3}
SIZE = math.prod(AXES.values())
OURS = ff.make_mesh(AXES, "simulated")
THEIRS = jax.make_mesh(tuple(AXES.values()), tuple(AXES), (AxisType.Auto,) * 2)
PROGRAMS = 100
SHAPE = (6, 6)
LARGEST = 6**4  # elements


@dataclass(frozen=True)
class Value:
    shape: tuple[int, ...]
    varying: frozenset[str]


@dataclass(frozen=True)
class Step:
    """An operation of a program, and the places of its operands in the pool."""

    name: str
    at: tuple[int, ...]
    axis: str = ""
    dims: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


def drawn(seed):
    """A program: steps, and the values that they make of the two that are given."""
    draw = random.Random(seed)
    pool = [Value(SHAPE, frozenset()), Value(SHAPE, frozenset(AXES))]
    steps = []
    while len(steps) < 12:
        if (made := one(draw, pool)) is not None:
            step, value = made
            steps.append(step)
            pool.append(value)
    return steps, pool


def one(draw, pool):
    """A step that is possible, with the value that it makes; or None."""
    name = draw.choice(
        "pcast psum pmean all_gather psum_scatter all_to_all ppermute index "
        "product product sine".split()
    )
    i = draw.randrange(len(pool))
    x, axis = pool[i], draw.choice(list(AXES))
    n, dim = AXES[axis], draw.randrange(2)
    if name == "sine":
        return Step(name, (i,)), x
    if name == "product":
        both = [j for j, y in enumerate(pool) if y.shape == x.shape]
        j = draw.choice(both)
        return Step(name, (i, j)), Value(x.shape, x.varying | pool[j].varying)
    if name in ("pcast", "index"):
        if name == "pcast" and axis in x.varying:
            return None
        return Step(name, (i,), axis), Value(x.shape, x.varying | {axis})
    if axis not in x.varying:
        return None
    step = Step(name, (i,), axis, (dim,))
    if name in ("psum", "pmean"):
        return step, Value(x.shape, x.varying - {axis})
    shape = list(x.shape)
    if name == "ppermute":
        sources, targets = list(range(n)), list(range(n))
        draw.shuffle(sources)
        draw.shuffle(targets)
        some = draw.randint(1, n)
        pairs = tuple(zip(sources[:some], targets[:some], strict=True))
        return Step(name, (i,), axis, (), pairs), x
    if name != "all_gather" and shape[dim] % n:
        return None
    if name == "all_gather":
        if math.prod(shape) * n > LARGEST:
            return None
        shape[dim] *= n
    else:
        shape[dim] //= n
    if name == "all_to_all":
        joined = draw.randrange(2)
        shape[joined] *= n
        step = Step(name, (i,), axis, (dim, joined))
    return step, Value(tuple(shape), x.varying)


def our_cast(x, axes):
    return ff.pcast(x, axes, to="V") if axes else x


def their_cast(x, axes):
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def widened(cast, xs, varying, axes=frozenset()):
    """Values that vary along the axes along which one of them does."""
    every = axes.union(*varying)
    each = zip(xs, varying, strict=True)
    return [cast(x, tuple(sorted(every - had))) for x, had in each]


def ours(step, xs, varying):
    axis, dims, x = step.axis, step.dims, xs[0]
    if step.name == "sine":
        return torch.sin(x)
    if step.name == "product":
        x, y = widened(our_cast, xs, varying)
        return torch.tanh(x) * y
    if step.name == "pcast":
        return our_cast(x, (axis,))
    if step.name == "index":
        (x,) = widened(our_cast, xs, varying, frozenset({axis}))
        return x * (1 + ff.axis_index(axis))
    if step.name in ("psum", "pmean"):
        return getattr(ff, step.name)(x, axis)
    if step.name == "ppermute":
        return ff.ppermute(x, axis, step.pairs)
    if step.name == "all_to_all":
        return ff.all_to_all(x, axis, split_dim=dims[0], concat_dim=dims[1])
    return getattr(ff, step.name)(x, axis, dim=dims[0])


def theirs(step, xs, varying):
    lax, axis, dims, x = jax.lax, step.axis, step.dims, xs[0]
    if step.name == "sine":
        return jnp.sin(x)
    if step.name == "product":
        x, y = widened(their_cast, xs, varying)
        return jnp.tanh(x) * y
    if step.name == "pcast":
        return their_cast(x, (axis,))
    if step.name == "index":
        (x,) = widened(their_cast, xs, varying, frozenset({axis}))
        return x * (1 + lax.axis_index(axis))
    if step.name in ("psum", "pmean"):
        return getattr(lax, step.name)(x, axis)
    if step.name == "ppermute":
        return lax.ppermute(x, axis, step.pairs)
    if step.name == "all_to_all":
        return lax.all_to_all(x, axis, dims[0], dims[1], tiled=True)
    if step.name == "all_gather":
        return lax.all_gather(x, axis, axis=dims[0], tiled=True)
    return lax.psum_scatter(x, axis, scatter_dimension=dims[0], tiled=True)


def loss(run, psum, sine, program, w, x):
    """The sum, one value on all ranks, of a function of all values; and the values."""
    (steps, pool), values = program, [w, x]
    for step in steps:
        had = [pool[i].varying for i in step.at]
        values.append(run(step, [values[i] for i in step.at], had))
    total = 0
    for value, of in zip(values, pool, strict=True):
        one = sine(value).sum() / math.prod(of.shape)
        for axis in sorted(of.varying):
            one = psum(one, axis)
        total = total + one
    return total, values


OUR_LOSS = partial(loss, ours, ff.psum, torch.sin)
THEIR_LOSS = partial(loss, theirs, jax.lax.psum, jnp.sin)


def inputs(seed):
    """Of a program: what is one value, and each rank's own; and a direction."""
    draw = np.random.default_rng(seed)
    new = lambda *shape: draw.normal(size=shape)  # noqa: E731
    return (new(*SHAPE), new(SIZE, *SHAPE)), (new(*SHAPE), new(SIZE, *SHAPE))


def judged(program, seed):
    """(loss, values, gradients, derivative of the gradients) by JAX."""
    (w, x), (dw, dx) = jax.tree.map(jnp.asarray, inputs(seed))
    every = P(tuple(AXES))

    def body(w, x):
        total, values = THEIR_LOSS(program, w, x[0])
        varying = [value.varying for value in program[1]]
        values = widened(their_cast, values, varying, frozenset(AXES))
        return total, [value[None] for value in values]

    mapped = jax.shard_map(
        body, mesh=THEIRS, in_specs=(P(), every), out_specs=(P(), every)
    )
    grad = jax.grad(lambda w, x: mapped(w, x)[0], (0, 1))
    both = jax.jit(lambda *at: (mapped(w, x), jax.jvp(grad, (w, x), at)))
    (total, values), (grads, curved) = both(dw, dx)
    return jax.tree.map(np.asarray, (total, values, grads, curved))


def held(program, seed, way):
    """The same here, by one of the ways to take a gradient."""
    (w, x), (dw, dx) = (tuple(map(torch.from_numpy, pair)) for pair in inputs(seed))

    def main():
        rank = OURS.rank
        at, along = (w, x[rank]), (dw, dx[rank])
        f = lambda w, x: OUR_LOSS(program, w, x)[0]  # noqa: E731
        total, values = OUR_LOSS(program, *at)
        curved = None
        if way == "torch.func":
            grads, curved = torch.func.jvp(torch.func.grad(f, (0, 1)), at, along)
        elif way == "value_and_grad":
            grads = ff.value_and_grad(f, (0, 1))(*at)[1]
        elif way == "vmap":
            rows = tuple(torch.stack([x, x.flip(0)]) for x in at)
            grads = torch.func.vmap(torch.func.grad(f, (0, 1)))(*rows)
            grads = tuple(g[0] for g in grads)
        else:
            leaves = [x.clone().requires_grad_() for x in at]
            grads = torch.autograd.grad(f(*leaves), leaves)
        return total, values, grads, curved

    return ff.spmd(main, OURS)()


WAYS = ["torch.func", "value_and_grad", "torch.autograd", "vmap"]


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_drawn_program_is_that_of_shard_map(seed):
    program = drawn(seed)
    total, values, grads, curved = judged(program, seed)
    near = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    for way in WAYS:
        for rank, (one, mine, (by_w, by_x), more) in enumerate(
            held(program, seed, way)
        ):
            near(one, total)
            for ours, theirs in zip(mine, values, strict=True):
                near(ours, theirs[rank])
            near(by_w, grads[0])
            near(by_x, grads[1][rank])
            if more is not None:
                near(more[0], curved[0])
                near(more[1], curved[1][rank])


def test_the_programs_have_each_collective_along_each_axis():
    steps = [step for seed in range(PROGRAMS) for step in drawn(seed)[0]]
    found = {(step.name, step.axis) for step in steps if step.axis}
    names = "pcast psum pmean all_gather psum_scatter all_to_all ppermute index".split()
    assert found == {(name, axis) for name in names for axis in AXES}

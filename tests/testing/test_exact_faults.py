"""Faults of any size are told apart by one exact run; floats see the large ones alone.

``FSFUNC_LONG_TESTS=1`` plants a hundred of them.
"""

import os
import random

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.checks import simulated

EVERY = os.environ.get("FSFUNC_LONG_TESTS") == "1"
MESH = simulated(data=2)
OPTIMIZER = ff.chain(
    ff.clip_by_global_norm(1.0), ff.sharded_adam(1e-2, weight_decay=0.1)
)


@ff.unit
def layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def loss_fn(params, x):
    for p in params:
        x = layer(p, x)
    return x.square().mean()


def with_gradient(change):
    """A train step whose gradients something was done to."""

    def train_step(state, x):
        loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
        grads = change(grads, state, x)
        return state.apply_gradients(grads, OPTIMIZER), {"loss": loss}

    return train_step


def with_loss(change):
    """A train step of another loss."""

    def train_step(state, x):
        def changed(params, x):
            return change(loss_fn(params, x), params, x)

        loss, grads = ff.value_and_grad(changed)(state.params, x)
        return state.apply_gradients(grads, OPTIMIZER), {"loss": loss}

    return train_step


def at(index, fn):
    """Does ``fn`` to one leaf of several trees."""

    def change(grads, state, x):
        leaves, structure = tree.flatten(grads, is_leaf=ff.is_sharded)
        params = tree.leaves(state.params, is_leaf=ff.is_sharded)
        i = index % len(leaves)
        new = tree.map(fn, leaves[i], params[i])
        return tree.unflatten(structure, [*leaves[:i], new, *leaves[i + 1 :]])

    return change


# By name: a faulty train step for (how large it is, a number that draws where it is).
FAULTS = {
    "a scale of the loss": lambda e, i: with_loss(lambda y, p, x: y * (1 + e)),
    "a leaf summed a little more": lambda e, i: with_gradient(
        at(i, lambda g, p: g * (1 + e))
    ),
    "a decay on a leaf": lambda e, i: with_gradient(at(i, lambda g, p: g + e * p)),
    "a row twice": lambda e, i: with_loss(
        lambda y, p, x: y + e * loss_fn(p, x[i % len(x) :][:1])
    ),
    "a row lost": lambda e, i: with_loss(
        lambda y, p, x: y + e * (loss_fn(p, x[1:]) - y)
    ),
    "own rows in a mean": lambda e, i: with_loss(
        lambda y, p, x: y + e * loss_fn(p, x - x.mean(0))
    ),
    "another order of layers": lambda e, i: with_loss(
        lambda y, p, x: y + e * loss_fn([*p[1:], p[0]], x)
    ),
    "another learning rate": lambda e, i: with_optimizer(1e-2 * (1 + e), 0.9, 0.999),
    "another mean of squares": lambda e, i: with_optimizer(1e-2, 0.9, 0.999 - e),
    "a sum for a mean": lambda e, i: with_metric(lambda y: y + e * ff.psum(y, "data")),
}


def with_optimizer(rate, b1, b2):
    optimizer = ff.chain(
        ff.clip_by_global_norm(1.0),
        ff.sharded_adam(rate, b1=b1, b2=b2, weight_decay=0.1),
    )

    def train_step(state, x):
        loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads, optimizer), {"loss": loss}

    return train_step


def with_metric(change):
    def train_step(state, x):
        loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads, OPTIMIZER), {"loss": change(loss)}

    return train_step


train_step = with_metric(lambda loss: loss)
STACKS = {
    **{f"zero {z}": lambda f, z=z: ff.shard(f, MESH, "data", zero=z) for z in range(4)},
    "rematerialized": lambda f: ff.remat(ff.shard(f, MESH, "data")),
    "accumulated": lambda f: ff.shard(ff.accumulate(f, 2), MESH, "data"),
    "donated": lambda f: ff.donate(ff.shard(f, MESH, "data", zero=1)),
}
SIZES = 1e-3, 1e-6, 1e-9, 1e-12


def planted(seed):
    """A fault, drawn: its name, size, stack and place."""
    draw = random.Random(seed)
    kind, stack = draw.choice([*FAULTS]), draw.choice([*STACKS])
    return kind, draw.choice(SIZES), stack, draw.randrange(100)


PLANTED = [planted(seed) for seed in range(100 if EVERY else 12)]


def proof(step, stack):
    width = 4
    params = [{"w": torch.zeros(width, width), "b": torch.zeros(width)} for _ in "123"]
    x = torch.zeros(8, width)
    state = ff.init_state(train_step, params, OPTIMIZER, x)
    return ff.prove(
        train_step, STACKS[stack](step), MESH, state, x, goes_on=lambda out: out[0]
    )


@pytest.mark.parametrize("stack", STACKS)
def test_none_is_told_apart_without_a_fault(stack):
    assert proof(train_step, stack).chance < 1e-8


@pytest.mark.parametrize(("kind", "size", "stack", "place"), PLANTED)
def test_a_fault_is_told_apart(kind, size, stack, place):
    with pytest.raises(AssertionError, match="differs"):
        proof(FAULTS[kind](size, place), stack)

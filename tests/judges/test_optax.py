"""Optimizers and schedules are those of optax: same gradients, several steps.

On one device, and over ranks that each hold a part. Of the others: `adafactor` and
`from_torch` are torch's, whose tests judge them; `shampoo`, `adascale`, `swa` and
`stochastic_rounding` have no twin in optax; its `ema` averages updates, ours
parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fsfunc as ff
from tests.checks import close, simulated

jax.config.update("jax_enable_x64", True)
STEPS, TOLERANCE = 8, 1e-6
MESH = simulated(3)
DRAW = np.random.default_rng(0)
SHAPES = {"w": (4, 3), "b": (3,), "s": (), "v": (3, 5)}
PARAMS = {k: DRAW.normal(size=shape) for k, shape in SHAPES.items()}
GRADS = [{k: DRAW.normal(size=s) for k, s in SHAPES.items()} for _ in range(STEPS)]
ENDLESS = {k: abs(g) * np.nan for k, g in GRADS[2].items()}
MATRICES = ("w", "v")


def decays(path, leaf):
    return leaf.ndim > 1


def matrices(params):
    return {k: x.ndim > 1 for k, x in params.items()}


def labels(params):
    return {k: "many" if x.ndim > 1 else "few" for k, x in params.items()}


RATE = ff.warmup_cosine(0.3, 2, 7, end=0.01)
THEIRS = optax.warmup_cosine_decay_schedule(0.0, 0.3, 2, 7, 0.01)
OUT_BY_IN = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

PAIRS = {
    "sgd": (ff.sgd(0.1), optax.sgd(0.1)),
    "sgd, momentum": (ff.sgd(0.1, momentum=0.9), optax.sgd(0.1, 0.9)),
    "sgd, Nesterov": (
        ff.sgd(RATE, momentum=0.8, nesterov=True),
        optax.sgd(THEIRS, 0.8, nesterov=True),
    ),
    "sgd, decay": (
        ff.sgd(0.1, momentum=0.9, weight_decay=0.2, mask=decays),
        optax.chain(optax.add_decayed_weights(0.2, matrices), optax.sgd(0.1, 0.9)),
    ),
    "adam": (ff.sharded_adam(0.1, weight_decay=0.0), optax.adam(0.1)),
    "adamw": (
        ff.sharded_adam(RATE, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3, mask=decays),
        optax.adamw(THEIRS, 0.8, 0.95, 1e-6, weight_decay=0.3, mask=matrices),
    ),
    "lion": (
        ff.lion(RATE, b1=0.8, b2=0.95, weight_decay=0.3),
        optax.lion(THEIRS, 0.8, 0.95, weight_decay=0.3),
    ),
    "lamb": (
        ff.lamb(RATE, b1=0.8, weight_decay=0.3),
        optax.lamb(THEIRS, 0.8, weight_decay=0.3),
    ),
    "lars": (
        ff.lars(RATE, weight_decay=0.1, trust_coefficient=0.5, eps=1e-3),
        optax.lars(THEIRS, 0.1, trust_coefficient=0.5, eps=1e-3),
    ),
    "lars, masks": (
        ff.lars(0.2, momentum=0.5, weight_decay=0.1, mask=decays, trust_mask=decays),
        optax.lars(0.2, 0.1, matrices, trust_ratio_mask=matrices, momentum=0.5),
    ),
    "muon": (
        ff.muon(0.1, nesterov=False, ns_dtype=torch.float64, weight_decay=0.2),
        optax.contrib.muon(
            0.1,
            nesterov=False,
            weight_decay=0.2,
            muon_weight_dimension_numbers=lambda p: jax.tree.map(
                lambda _: OUT_BY_IN, p
            ),
        ),
    ),
    "schedule-free sgd": (
        ff.schedule_free(ff.sgd(0.1), 0.1, b1=0.9),
        optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9),
    ),
    "schedule-free adam": (
        ff.schedule_free(ff.sharded_adam(0.1, b1=0.0, weight_decay=0.0), 0.1, b1=0.8),
        optax.contrib.schedule_free(optax.adam(0.1, b1=0.0), 0.1, b1=0.8),
    ),
    "clipped by norm": (
        ff.chain(ff.clip_by_global_norm(0.7, eps=0.0), ff.sgd(0.1)),
        optax.chain(optax.clip_by_global_norm(0.7), optax.sgd(0.1)),
    ),
    "clipped by value": (
        ff.chain(ff.clip_by_value(0.2), ff.sharded_adam(0.1, weight_decay=0.0)),
        optax.chain(optax.clip(0.2), optax.adam(0.1)),
    ),
    "trust ratios": (
        ff.chain(ff.scale_by_trust_ratio(0.1, 0.5, 1e-3), ff.scale(-0.3)),
        optax.chain(optax.scale_by_trust_ratio(0.1, 0.5, 1e-3), optax.scale(-0.3)),
    ),
    "only finite": (
        ff.apply_if_finite(ff.sharded_adam(0.1, weight_decay=0.0), 3),
        optax.apply_if_finite(optax.adam(0.1), 3),
    ),
    "masked": (
        ff.masked(ff.sgd(0.1, momentum=0.9), decays),
        optax.partition(
            {"many": optax.sgd(0.1, 0.9), "few": optax.set_to_zero()}, labels
        ),
    ),
    "partition": (
        ff.partition(
            {"many": ff.lion(0.01), "few": ff.sgd(0.1)},
            lambda path, leaf: "many" if leaf.ndim > 1 else "few",
        ),
        optax.partition({"many": optax.lion(0.01), "few": optax.sgd(0.1)}, labels),
    ),
}


def given(name):
    """The parameters and the gradients of each step."""
    kept = MATRICES if name == "muon" else SHAPES
    grads = [*GRADS[:2], ENDLESS, *GRADS[2:]] if name == "only finite" else GRADS
    return {k: PARAMS[k] for k in kept}, [{k: g[k] for k in kept} for g in grads]


def judged(name):
    """The parameters after each step, by optax."""
    optimizer = PAIRS[name][1]
    params, grads = jax.tree.map(jnp.asarray, given(name))
    state, found = optimizer.init(params), []
    for g in grads:
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
        found.append({k: torch.tensor(np.asarray(x)) for k, x in params.items()})
    return found


@ff.unit
def product(params, grads):
    """Of which the gradient by the parameters is what is given."""
    return sum((params[k] * g).sum() for k, g in grads.items())


@pytest.mark.parametrize("name", PAIRS)
def test_an_optimizer_is_that_of_optax(name):
    optimizer, (params, grads) = PAIRS[name][0], given(name)
    params = {k: torch.tensor(x) for k, x in params.items()}
    state = optimizer.init(params)
    for g, expected in zip(grads, judged(name), strict=True):
        g = {k: torch.tensor(x) for k, x in g.items()}
        params, state = optimizer.apply(g, state, params)
        close(params, expected, TOLERANCE)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_an_optimizer_over_ranks_is_that_of_optax(name, zero):
    optimizer, (params, grads) = PAIRS[name][0], given(name)
    params, grads = [
        [{k: torch.tensor(x) for k, x in each.items()} for each in trees]
        for trees in ([params], grads)
    ]

    def main():
        step = optimizer(ff.value_and_grad(product))
        step, found = ff.shard(step, MESH, "data", zero=zero), []
        mine = [{k: MESH.rank * x for k, x in g.items()} for g in grads]  # 1 in mean
        state = ff.init_state(step, params[0], optimizer, mine[0])
        for g in mine:
            state, _ = step(state, g)
            found.append(ff.unshard(state.params))
        return found

    expected = judged(name)
    for found in ff.spmd(main, MESH)():
        close(found, expected, TOLERANCE)


START, END = 0.8, 0.1
SCHEDULES = {
    "constant": (ff.constant(0.3), optax.constant_schedule(0.3)),
    "linear": (ff.linear(START, END, 7), optax.linear_schedule(START, END, 7)),
    "cosine": (
        ff.cosine_decay(START, 9, END),
        optax.cosine_decay_schedule(START, 9, END / START),
    ),
    "warm-up": (
        ff.warmup_cosine(START, 4, 15, start=0.05, end=END),
        optax.warmup_cosine_decay_schedule(0.05, START, 4, 15, END),
    ),
    "joined": (
        ff.join([ff.linear(0.0, START, 5), ff.constant(END)], [6]),
        optax.join_schedules(
            [optax.linear_schedule(0.0, START, 5), optax.constant_schedule(END)], [6]
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_optax(name):
    ours, theirs = SCHEDULES[name]
    for count in range(20):
        assert abs(float(ours(count)) - float(theirs(count))) < TOLERANCE
        assert abs(float(ours(torch.tensor(count))) - float(theirs(count))) < TOLERANCE

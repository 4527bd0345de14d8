"""Rules that reduce across elements: by the papers' formulas, and what they send."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from tests import models
from tests.checks import on_ranks, simulated
from tests.models import floats, layer, layers
from tests.optim.optimizers import matrices
from tests.optim.shards import MESHES, place, unshard, whole
from tests.optim.trees import (
    SEEDS,
    SHAPES,
    assert_near,
    floating,
    like,
    params_of,
    trained,
)


def by_hand(rule, params, grads):
    """The floating leaves after steps of ``rule(p, g, t, state)``, each by itself."""
    leaves = [p.clone() for p in floating(params)]
    states = [{} for _ in leaves]
    for t, g in enumerate(grads, 1):
        rows = zip(leaves, floating(g), states, strict=True)
        leaves = [rule(p, g, t, state) for p, g, state in rows]
    return leaves


def ratio(p, u, coefficient=1.0):
    norms = p.norm().item(), u.norm().item()
    return coefficient * norms[0] / norms[1] if all(norms) else 1.0


def lamb_by_hand(p, g, t, state):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.99 * state.get("v", 0) + 0.01 * g * g
    u = m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
    u = u + (0.1 * p if p.ndim > 1 else 0)
    return p - 0.1 * ratio(p, u) * u


def lars_by_hand(p, g, t, state):
    d = g + (0.1 * p if p.ndim > 1 else 0)
    scale = ratio(p, d, 0.02) if p.ndim > 1 else 1.0
    v = state["v"] = 0.9 * state.get("v", 0) + 0.5 / t * scale * d
    return p - v


def lion_by_hand(p, g, t, state):
    m = state.get("m", torch.zeros_like(p))
    state["m"] = 0.99 * m + 0.01 * g
    return p - 0.1 * ((0.9 * m + 0.1 * g).sign() + (0.2 * p if p.ndim > 1 else 0))


RULES = {
    "lamb": (lamb_by_hand, ff.lamb(0.1, b2=0.99, weight_decay=0.1, mask=matrices)),
    "lars": (
        lars_by_hand,
        ff.lars(
            lambda count: 0.5 / (count + 1),
            weight_decay=0.1,
            trust_coefficient=0.02,
            mask=matrices,
            trust_mask=matrices,
        ),
    ),
    "lion": (lion_by_hand, ff.lion(0.1, weight_decay=0.2, mask=matrices)),
}


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=4)
@given(shapes=SHAPES, seed=SEEDS)
def test_a_step_is_the_papers(name, shapes, seed):
    rule, optimizer = RULES[name]
    params = params_of(shapes, seed, torch.float64)
    params["zero"] = torch.zeros(3, 2, dtype=torch.float64)  # its ratio is 1
    grads = [like(params, seed + k) for k in range(4)]
    after, _ = trained(optimizer, params, grads)
    assert_near(by_hand(rule, params, grads), floating(after), 1e-6)


@pytest.mark.parametrize("moments", [None, torch.uint8])
def test_lamb_is_a_chain_of_its_parts(moments):
    params = whole(0)
    grads = [like(params, k) for k in range(3)]
    parts = ff.chain(
        ff.sharded_adam(1.0, eps=1e-6, weight_decay=0.1, moment_dtype=moments),
        ff.scale_by_trust_ratio(),
        ff.scale(0.1),
    )
    expected, _ = trained(parts, params, grads)
    lamb = ff.lamb(0.1, weight_decay=0.1, moment_dtype=moments)
    after, state = trained(lamb, params, grads)
    assert type(state) is type(lamb.init(params))
    assert_near(floating(expected), floating(after))


def test_clipping_by_value_is_torchs():
    values = [torch.randn(3, 2), torch.tensor([math.nan, -math.inf, 0.2])]
    leaves = [torch.nn.Parameter(torch.zeros_like(x)) for x in values]
    for leaf, x in zip(leaves, values, strict=True):
        leaf.grad = x.clone()
    torch.nn.utils.clip_grad_value_(leaves, 0.5)
    clipped, _ = ff.clip_by_value(0.5).update(values, ())
    assert_equal = torch.testing.assert_close
    assert_equal(clipped, [x.grad for x in leaves], rtol=0, atol=0, equal_nan=True)
    batch = torch.func.vmap(lambda g: ff.clip_by_value(0.5).update(g, ())[0])
    assert_near(values[0].clamp(-0.5, 0.5), batch(values[0]))


ADAFACTORS = st.fixed_dictionaries(
    {"weight_decay": st.sampled_from([0.0, 0.1])},
    optional={
        "d": st.sampled_from([1.0, 1.5]),
        "beta2_decay": st.sampled_from([-0.5]),
        "eps": st.sampled_from([(1e-3, 1e-2), (None, 0.5)]),
    },
)
NOT_EMPTY = SHAPES.map(lambda shapes: [tuple(n + 1 for n in s) for s in shapes])


@settings(max_examples=6)
@given(shapes=NOT_EMPTY, seed=SEEDS, how=ADAFACTORS)
def test_adafactor_is_torchs(shapes, seed, how):
    params = params_of(shapes, seed)
    grads = [like(params, seed + k) for k in range(4)]
    leaves = [torch.nn.Parameter(x.clone()) for x in floating(params)]
    theirs = torch.optim.Adafactor(leaves, lr=0.1, **how)
    for g in grads:
        for leaf, x in zip(leaves, floating(g), strict=True):
            leaf.grad = x.clone()
        theirs.step()
    after, state = trained(ff.adafactor(0.1, **how), params, grads)
    assert_near([x.detach() for x in leaves], floating(after), 2e-6)
    kept = [theirs.state[x].get("row_var") for x in leaves]
    assert_near([x for x in kept if x is not None], tree.leaves(state.row))


@settings(max_examples=4)
@given(axes=MESHES, seed=SEEDS)
def test_adafactor_of_cubes_cut_anywhere(axes, seed):
    """More dims than two; parts that are cut in the middle of a row; a split, cut."""
    draw = torch.Generator().manual_seed(seed)
    values = {
        "first": {"w": torch.randn(2, 3, 4, 5, generator=draw)},
        "second": [torch.randn(3, 4, 2, generator=draw)],
        "split": torch.randn(7, 2, 3, generator=draw),
        "owned": torch.randn(2, 2, generator=draw),
    }
    optimizer = ff.adafactor(0.1)
    expected, state = trained(optimizer, values, [values] * 3)
    mesh = simulated(**axes)
    run = lambda: trained(optimizer, place(values, axes), [place(values, axes)] * 3)  # noqa: E731
    by_rank = ff.spmd(run, mesh)()
    assert_near(floating(expected), floating(unshard(by_rank, mesh)), 2e-6)
    for _, its in by_rank:
        assert_near((state.row, state.col), (its.row, its.col), 2e-6)


def test_adafactor_keeps_a_row_and_a_column():
    params = {"w": torch.zeros(64, 32), "b": torch.zeros(8), "e": torch.zeros(3, 4, 5)}
    state = ff.adafactor().init(params)
    kept = sum(x.numel() for x in tree.leaves(state[1:]))
    assert kept == (64 + 32) + 8 + 3 * (4 + 5)


def test_half_precision_has_moments_in_float32():
    params = {"w": torch.randn(4, 3).bfloat16(), "b": torch.randn(3).bfloat16()}
    after, state = trained(ff.adafactor(0.1), params, [params] * 2)
    assert {x.dtype for x in tree.leaves(after)} == {torch.bfloat16}
    assert {x.dtype for x in tree.leaves(state[1:])} == {torch.float32}
    assert not any(map(is_sharded, tree.leaves(state)))


def each_norm(w, x, loss):
    return loss(w, x) + 0.1 * sum(tree.leaves(ff.leaf_norms(w)))


def a_step_ahead(w, x, loss):
    """The loss after a step that is differentiated too, its ratios included."""
    optimizer = ff.lamb(0.1, weight_decay=0.1)
    zeros = optimizer.init(tree.map(torch.zeros_like, w))
    updates, _ = optimizer.update(torch.func.grad(loss)(w, x), zeros, w)
    return loss(tree.map(torch.add, w, updates), x.flip(1))


@pytest.mark.parametrize("of", [each_norm, a_step_ahead])
def test_norms_of_leaves_differentiate_in_a_sharded_step(of):
    params, x, loss = layers(2, make=floats), floats(8, 4, seed=5), models.chain(layer)
    gradient = ff.value_and_grad(lambda w, x: of(w, x, loss))
    sharded = ff.shard(lambda w, x: gradient(w, x), simulated(), "data")
    for found in on_ranks(sharded, params, x):
        assert_near(gradient(params, x), found, 1e-5)

"""Norms, sums and clipping of trees that are whole; of shards: `test_sharded`."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsfunc import tree
from fsfunc.optim import clip_by_global_norm, global_norm, tree_sum
from tests.optim.trees import (
    SEEDS,
    SHAPES,
    assert_bits,
    copies,
    floating,
    like,
    params_of,
)

ORDERS = st.sampled_from([1.0, 2.0, 3.0, math.inf])


def non_empty(values):
    return [x for x in floating(values) if x.numel()]


@given(shapes=SHAPES, seed=SEEDS, p=ORDERS)
def test_the_norm_has_the_bits_of_torchs(shapes, seed, p):
    values = params_of(shapes, seed)
    # torch refuses the infinite norm of an empty tensor.
    assert_bits(get_total_norm(non_empty(values), p), global_norm(values, p))


@given(shapes=SHAPES, seed=SEEDS, p=ORDERS)
def test_the_norm_of_half_precision_is_summed_in_float32(shapes, seed, p):
    values = params_of(shapes, seed, torch.bfloat16)
    wide = tree.map(lambda x: x.float() if x.is_floating_point() else x, values)
    assert global_norm(values, p).dtype == torch.float32
    torch.testing.assert_close(global_norm(values, p), global_norm(wide, p))


def test_one_double_makes_the_norm_double():
    values = {"a": torch.ones(3), "b": torch.ones(1, dtype=torch.float64)}
    expected = torch.tensor(2.0, dtype=torch.float64)
    torch.testing.assert_close(global_norm(values), expected)
    assert_bits(torch.tensor(4.0, dtype=torch.float64), tree_sum(values))


@given(shapes=SHAPES, seed=SEEDS)
def test_the_sum(shapes, seed):
    values = params_of(shapes, seed)
    expected = torch.cat([x.flatten() for x in floating(values)]).double().sum()
    torch.testing.assert_close(tree_sum(values), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("values", [{}, {"n": 3, "none": None}, torch.ones(0, 3)])
def test_nothing_sums_to_zero(values):
    for found in (tree_sum(values), global_norm(values), global_norm(values, math.inf)):
        assert_bits(torch.tensor(0.0), found)


@given(shapes=SHAPES, seed=SEEDS, p=ORDERS, max_norm=st.sampled_from([0.1, 1.0, 50.0]))
def test_clipping_is_torchs(shapes, seed, p, max_norm):
    params = params_of(shapes, seed)
    grads = like(params, seed)
    before = copies(grads)
    clip = clip_by_global_norm(max_norm, p=p)
    clipped, state = clip.update(grads, clip.init(params))
    assert_bits(before, grads)
    assert state == ()
    leaves = [torch.nn.Parameter(x) for x in non_empty(params)]
    for leaf, grad in zip(leaves, non_empty(grads), strict=True):
        leaf.grad = grad.clone()
    clip_grads_with_norm_(leaves, max_norm, get_total_norm(non_empty(grads), p))
    assert_bits([leaf.grad for leaf in leaves], non_empty(clipped))


def test_clipping_keeps_the_dtype():
    clipped, _ = clip_by_global_norm(1.0).update(torch.ones(4).bfloat16(), ())
    assert_bits(torch.full((4,), 0.5).bfloat16(), clipped)


def test_the_norm_runs_under_vmap_and_differentiates():
    x = torch.tensor([[3.0, 4.0], [6.0, 8.0]])
    assert_bits(torch.tensor([5.0, 10.0]), torch.func.vmap(global_norm)(x))
    torch.testing.assert_close(torch.func.grad(global_norm)(x[0]), x[0] / 5)

    def clipped(g):
        return clip_by_global_norm(1.0).update(g, ())[0]

    torch.testing.assert_close(
        torch.func.vmap(clipped)(x), torch.tensor([[0.6, 0.8]] * 2)
    )

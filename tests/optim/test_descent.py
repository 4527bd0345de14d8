"""SGD in all its variants, against torch's."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.optim import sgd
from tests.optim.trees import (
    SEEDS,
    SHAPES,
    assert_bits,
    assert_near,
    by_torch,
    copies,
    donated,
    floating,
    like,
    params_of,
    trained,
    trained_by_update,
)

VARIANTS = st.sampled_from(
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 1.0, "weight_decay": 0.1},
        {"dampening": 0.5},
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(shapes=SHAPES, seed=SEEDS, variant=VARIANTS)
def test_apply_has_the_bits_of_fused_sgd(dtype, shapes, seed, variant):
    params = params_of(shapes, seed, dtype)
    grads = [like(params, seed + k) for k in range(3)]
    make = functools.partial(torch.optim.SGD, lr=0.1, fused=True, **variant)
    expected = by_torch(make, params, grads)
    after, state = trained(sgd(0.1, **variant), params, grads)
    assert_bits(expected, floating(after))
    assert state.count == 3
    assert after["steps"] is params["steps"]


@given(shapes=SHAPES, seed=SEEDS, variant=VARIANTS)
def test_update_and_apply_agree_with_plain_sgd(shapes, seed, variant):
    params = params_of(shapes, seed)
    grads = [like(params, seed + k) for k in range(3)]
    make = functools.partial(torch.optim.SGD, lr=0.1, foreach=False, **variant)
    expected = by_torch(make, params, grads)
    applied, state = trained(sgd(0.1, **variant), params, grads)
    updated, its_state = trained_by_update(sgd(0.1, **variant), params, grads)
    assert_near(expected, floating(applied))
    assert_near(expected, floating(updated))
    assert_near(state, its_state)


@given(shapes=SHAPES, seed=SEEDS, variant=VARIANTS)
def test_donated_is_pure_and_pure_changes_nothing(shapes, seed, variant):
    optimizer = sgd(0.1, **variant)
    params = params_of(shapes, seed)
    state = optimizer.init(params)
    for k in range(2):
        grads = like(params, seed + k)
        before = copies((params, state, grads))
        pure = optimizer.apply(grads, state, params)
        optimizer.update(grads, state, params)
        assert_bits(before, (params, state, grads))
        with donated():
            given_away = optimizer.apply(grads, state, params)
        assert_bits(pure, given_away)
        assert_bits(before[2], grads)
        assert given_away[0]["head"] is params["head"]
        params, state = pure


def test_the_mask_says_which_leaves_decay():
    params = {"b": torch.ones(2), "w": torch.ones(1, 2)}
    still = {"b": torch.zeros(2), "w": torch.zeros(1, 2)}
    optimizer = sgd(0.5, weight_decay=0.5, mask=lambda path, leaf: leaf.ndim > 1)
    after, _ = trained(optimizer, params, [still])
    assert_bits({"b": torch.ones(2), "w": torch.full((1, 2), 0.75)}, after)
    after, _ = trained_by_update(optimizer, params, [still])
    assert_bits({"b": torch.ones(2), "w": torch.full((1, 2), 0.75)}, after)


def test_there_is_no_momentum_without_momentum():
    assert sgd(0.1).init(torch.ones(2)).momentum is None


@given(variant=VARIANTS)
def test_a_first_step_counted_by_a_tensor(variant):
    p, g = torch.ones(2), torch.tensor([1.0, 2.0])
    optimizer = sgd(0.1, **variant)
    state = optimizer.init(p)
    counted = state._replace(count=torch.tensor(0))
    for _ in range(2):
        (after, state), (its, counted) = (
            optimizer.apply(g, state, p),
            optimizer.apply(g, counted, p),
        )
        assert_bits(after, its)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"momentum": -1.0}, "momentum is -1.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"nesterov": True}, "nesterov needs momentum"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening is 0.1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sgd(**{"learning_rate": 0.1, **settings})


def test_decay_needs_the_parameters():
    p = torch.ones(2)
    optimizer = sgd(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="update\\(grads, state, params\\)"):
        optimizer.update(p, optimizer.init(p))
    free = sgd(0.1, momentum=0.9)
    assert_bits(free.update(p, free.init(p), p), free.update(p, free.init(p)))


def test_update_differentiates():
    # One step on w^2 / 2 from w: (1 - lr) w, so the square's derivative is known.
    def after(w):
        optimizer = sgd(0.25)
        updates, _ = optimizer.update(w, optimizer.init(w), w)
        return (w + updates).square().sum()

    w = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(torch.func.grad(after)(w), 2 * 0.75**2 * w)

"""torch's optimizers over whole and sharded leaves: the bits of the class itself."""

import pytest
import torch

from fsfunc import tree
from tests.optim.optimizers import CLASSES, ours, theirs
from tests.optim.trees import (
    assert_bits,
    by_torch,
    copies,
    donated,
    floating,
    like,
    params_of,
    trained,
)

ALL = pytest.mark.parametrize("name", CLASSES)
STEPS = 7  # RAdam's sixth step is of another kind than its first


def grads_of(params, seed, steps=STEPS):
    return [like(params, seed + k) for k in range(steps)]


def test_a_rank_without_elements_counts_too():
    empty = {"w": torch.ones(0)}
    _, state = trained(ours("NAdam"), empty, [empty] * 3)
    _, other = trained(ours("NAdam"), {"w": torch.ones(2)}, [{"w": torch.ones(2)}] * 3)
    assert state.numbers == other.numbers and state.numbers["step"] == 3.0


def test_a_gradient_that_comes_late_finds_a_fresh_moment():
    params = {"early": torch.ones(2), "late": torch.ones(2)}
    optimizer = ours("Adagrad")
    state = optimizer.init(params)
    g = torch.tensor([1.0, 2.0])
    params, state = optimizer.apply({"early": g, "late": None}, state, params)
    assert_bits(torch.full((2,), 0.5), state.moments["sum"]["late"])
    params, state = optimizer.apply({"early": g, "late": g}, state, params)
    assert_bits(torch.full((2,), 0.5) + g * g, state.moments["sum"]["late"])


@pytest.mark.gpu
@ALL
def test_on_a_gpu_it_has_the_bits_of_the_class(name):
    params = tree.map(
        lambda x: x.cuda() if isinstance(x, torch.Tensor) else x,
        params_of([(300, 7), (5,)], 0),
    )
    grads = [
        tree.map(lambda g: g.cuda(), g)
        for g in grads_of(params_of([(300, 7), (5,)], 0), 0)
    ]
    expected = by_torch(theirs(name), params, grads)
    for variant in (torch.no_grad, donated):
        kept = copies(grads)
        with variant():
            after, state = trained(ours(name), copies(params), grads)
        assert_bits(expected, floating(after))
        assert_bits(kept, grads)
        assert all(type(n) is float for n in state.numbers.values())

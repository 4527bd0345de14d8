"""torch's optimizers over whole and sharded leaves: the bits of the class itself."""

import functools

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.optim.torch_optimizers import from_torch
from tests.models import chain, layers
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


@ALL
def test_it_keeps_what_the_class_keeps(name):
    params = params_of([(3, 2), ()], 0)
    grads = grads_of(params, 0)
    leaves = [torch.nn.Parameter(x.clone()) for x in floating(params)]
    optimizer = theirs(name)(leaves)
    for g in grads:
        for leaf, grad in zip(leaves, floating(g), strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
    _, state = trained(ours(name), params, grads)
    for k, leaf in enumerate(leaves):
        kept = {n: x for n, x in optimizer.state[leaf].items() if x is not None}
        found = {n: floating(m)[k] for n, m in state.moments.items()}
        assert kept.keys() == {*state.numbers, *found}
        for n, x in kept.items():
            if n in found:
                assert_bits(x.detach(), found[n])
            else:
                assert x.item() == state.numbers[n] and type(state.numbers[n]) is float


FOREACH = [name for name in CLASSES if "fused" not in name]


@pytest.mark.parametrize("name", FOREACH)
def test_gradients_stay_where_the_class_writes_lists(name):
    kind, options = CLASSES[name]
    maximize = len(name) % 2 == 0
    how = {**options, "foreach": True, "maximize": maximize}
    if kind != "Rprop":
        how["weight_decay"] = 0.1
    params = params_of([(3, 2), ()], 0)
    grads = grads_of(params, 0)
    kept = copies(grads)
    after, _ = trained(from_torch(getattr(torch.optim, kind), **how), params, grads)
    assert_bits(kept, grads)
    theirs = functools.partial(getattr(torch.optim, kind), **how)
    assert_bits(by_torch(theirs, params, copies(grads)), floating(after))


loss_fn = chain()
PARAMS = layers(2, 3, dtype=torch.float64)


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


def test_a_plan_needs_no_data(name="NAdam"):
    mesh = ff.make_mesh({"data": 8}, "abstract")
    optimizer = ours(name)

    def main():
        step = ff.shard(optimizer(ff.value_and_grad(loss_fn)), mesh, "data")
        mine = torch.zeros(2, 3, dtype=torch.float64)
        state = ff.init_state(step, PARAMS, optimizer, mine)
        for _ in range(2):
            state, _ = step(state, mine)
        return state.opt_state.count, state.opt_state.numbers

    ((count, numbers),) = ff.spmd(main, mesh)()
    assert count == 2
    if "step" in numbers:
        assert numbers["step"] == 2.0


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

"""The contract of an optimizer, chains and partitions of them, and the small pieces."""

from typing import Any, NamedTuple

import torch
from hypothesis import given

import fsfunc as ff
from fsfunc import tree
from tests.optim.trees import (
    SEEDS,
    SHAPES,
    assert_bits,
    donated,
    like,
    params_of,
    trained,
)


class State(NamedTuple):
    params: Any
    opt_state: Any

    def apply_gradients(self, grads, optimizer):
        return State(*optimizer.apply(grads, self.opt_state, self.params))


def double(grads, state, params=None):
    return tree.map(lambda g: 2 * g, grads), state + 1


def test_update_alone_makes_an_optimizer():
    optimizer = ff.Optimizer(lambda params: 0, double)
    p, g = torch.ones(2), torch.tensor([1.0, 2.0])
    after, state = optimizer.apply(g, 0, p)
    assert_bits([torch.tensor([3.0, 5.0]), 1], [after, state])
    assert_bits(torch.ones(2), p)
    with donated():
        assert optimizer.apply(g, 0, p)[0] is p
    assert_bits(after, p)


def test_an_apply_of_ones_own_is_used_and_waits_for_its_commit():
    called = []

    def apply(grads, state, params):
        called.append(state)
        return params, state

    optimizer = ff.Optimizer(lambda params: 0, double, apply)
    assert optimizer.apply(1, 2, 3) == (3, 2) and called == [2]
    commit = optimizer.prepare(1, 5, 3)
    assert called == [2]
    assert commit() == (3, 5) and called == [2, 5]


def test_called_on_a_gradient_function_it_is_a_train_step():
    optimizer = ff.sgd(0.5)

    def grad_fn(params, x, *, shift=0.0):
        return (params * x).sum() + shift, x

    p, x = torch.ones(2), torch.tensor([1.0, 2.0])
    step = optimizer(grad_fn)
    state, metrics = step(State(p, optimizer.init(p)), x, shift=1.0)
    assert_bits(torch.tensor([0.5, 0.0]), state.params)
    assert metrics.keys() == {"loss"} and metrics["loss"] == 4.0
    with_aux = optimizer(lambda params, x: ((params.sum(), {"n": 1}), x))
    _, metrics = with_aux(State(p, optimizer.init(p)), x)
    assert metrics == {"loss": p.sum(), "aux": {"n": 1}}


def test_a_chain_composes_in_order():
    p, g = torch.tensor([10.0]), torch.tensor([4.0])
    decay, half = ff.add_decayed_weights(0.1), ff.scale(-0.5)
    for transforms, expected in [
        ((decay, half), -(4 + 1) / 2),
        ((half, decay), -4 / 2 + 1),
        ((decay, half, ff.sgd(2.0)), (4 + 1) / 2 * 2),
    ]:
        optimizer = ff.chain(*transforms)
        state = optimizer.init(p)
        assert_bits(torch.tensor([expected]), optimizer.update(g, state, p)[0])
        assert_bits(p + expected, optimizer.apply(g, state, p)[0])


# Partitions


@given(shapes=SHAPES, seed=SEEDS)
def test_a_partition_is_each_optimizer_on_its_own_leaves(shapes, seed):
    def label(path, leaf):
        return "adam" if leaf.ndim > 1 else "sgd" if path != "head" else None

    optimizers = {
        "adam": ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(0.1)),
        "sgd": ff.sgd(0.1, momentum=0.9),
    }
    params = params_of(shapes, seed)
    grads = [like(params, seed + k) for k in range(3)]
    both = ff.partition(optimizers, label)
    if all(label(p, x) is None for p, x in _named(params)):
        return
    after, state = trained(both, params, grads)
    for name, optimizer in optimizers.items():
        mine = {p: x for p, x in _named(params) if label(p, x) == name}
        its_grads = [{p: x for p, x in _named(g) if p in mine} for g in grads]
        alone, its_state = trained(optimizer, mine, its_grads)
        found = {p: x for p, x in _named(after) if p in mine}
        assert_bits(alone, found)
        assert len(tree.leaves(state[name])) == len(tree.leaves(its_state))
    for path, x in _named(after):
        if label(path, x) is None:
            assert x is dict(_named(params))[path]


def _named(values):
    paths, leaves, _ = tree.flatten_with_paths(values)
    return [(p, x) for p, x in zip(paths, leaves, strict=True) if p != "steps"]


class Tagged:
    def __init__(self, w, tags):
        self.w, self.tags = w, tags


tree.register_node(
    Tagged, lambda x: ([x.w], x.tags), lambda tags, children: Tagged(*children, tags)
)

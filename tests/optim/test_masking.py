"""Masks and partitions: each leaf to one optimizer, or to none."""

import torch
from hypothesis import given

from fsfunc import tree
from fsfunc.optim import (
    chain,
    clip_by_global_norm,
    partition,
    sgd,
    sharded_adam,
)
from tests.optim.trees import (
    SEEDS,
    SHAPES,
    assert_bits,
    like,
    params_of,
    trained,
)


def two():
    return {"a": torch.ones(2), "b": torch.ones(2)}


@given(shapes=SHAPES, seed=SEEDS)
def test_a_partition_is_each_optimizer_on_its_own_leaves(shapes, seed):
    def label(path, leaf):
        return "adam" if leaf.ndim > 1 else "sgd" if path != "head" else None

    optimizers = {
        "adam": chain(clip_by_global_norm(1.0), sharded_adam(0.1)),
        "sgd": sgd(0.1, momentum=0.9),
    }
    params = params_of(shapes, seed)
    grads = [like(params, seed + k) for k in range(3)]
    both = partition(optimizers, label)
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


def test_a_part_may_go_without_gradients():
    optimizer = partition({"a": sgd(0.1), "b": sgd(0.1)}, lambda path, leaf: path)
    params = two()
    after, _ = trained(optimizer, params, [{"a": torch.ones(2), "b": None}])
    assert after["b"] is params["b"] and not torch.equal(after["a"], params["a"])


class Tagged:
    def __init__(self, w, tags):
        self.w, self.tags = w, tags


tree.register_node(
    Tagged, lambda x: ([x.w], x.tags), lambda tags, children: Tagged(*children, tags)
)


def test_nodes_whose_static_data_do_not_hash():
    params = {"a": Tagged(torch.ones(2), ["list"]), "b": torch.ones(2)}
    seen = []
    optimizer = sharded_adam(mask=lambda path, leaf: not seen.append(path))
    optimizer.apply(params, optimizer.init(params), params)
    assert seen == ["a", "b"]

"""The law of every optimizer in a sharded step: planned, donated, saved, one device."""

import functools
import math

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.models import chain, floats, layer, layers
from tests.optim.optimizers import EVERY, TORCHS, matrices
from tests.optim.steps import DATA, WIDTH, loss, trained
from tests.optim.trees import assert_bits, assert_near


def by_largest(measure):
    """Gradients times what an infinite norm measures of them."""

    def update(grads, state, params=None):
        return ff.tree_scale(grads, -measure(grads)), state

    return ff.Optimizer(lambda params: (), update)


LARGEST = {
    "clipped by the largest, muon": lambda: ff.chain(
        ff.clip_by_global_norm(1.0, p=math.inf), ff.muon(0.1)
    ),
    "the largest of all": lambda: by_largest(lambda g: ff.global_norm(g, math.inf)),
    "the largest of each": lambda: by_largest(
        lambda g: ff.tree_sum(ff.leaf_norms(g, math.inf))
    ),
}
FOREIGN = {"NAdam", "SGD dampened"}
# Of these, alike but for a detail, `test_laws` says as much.
LAWFUL = {*TORCHS, "clipped adam", "lion, 8 bits", "muon, and others"} - FOREIGN
LAWFUL |= {k for k in EVERY if "decay cuts" in k or "scaled" in k} - {"scaled masters"}
CASES = {k: v for k, v in EVERY.items() if k not in LAWFUL} | LARGEST
DTYPES = {"adascale": torch.float64, "master_weights": torch.bfloat16}
DTYPES |= {"scaled masters": torch.float16, "stochastic_rounding": torch.bfloat16}
# By chance, by codes whose blocks lie elsewhere, or by what ranks send.
ELSEWHERE = {"stochastic_rounding", "powersgd", "adascale", "scaled masters"}
ELSEWHERE |= {k for k in CASES if "bits" in k or "muon" in k}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_step_is_planned_donated_saved_and_that_of_one_device(name, tmp_path):
    optimizer, dtype = CASES[name](), DTYPES.get(name, torch.float32)
    init = lambda: list(floats(2, WIDTH, WIDTH, seed=1).to(dtype))  # noqa: E731
    x, zero = floats(4, WIDTH, seed=2).to(dtype), 2 + len(name) % 2

    def made():  # the next run's knows nothing yet
        return ff.shard(optimizer(ff.value_and_grad(loss)), DATA, "data", zero=zero)

    def main():
        step, mine = made(), ff.local_batch(x, DATA, "data")
        first = ff.init_state(step, init, optimizer, mine)
        planned = ff.plan(step, first, mine)
        with ff.ledger() as log:
            state, _ = step(first, mine)
        rank = ff.axis_index("data")
        assert planned[rank].ledger.table() == log.table(rank)
        ff.save(tmp_path / "a", state)
        after, _ = step(state, mine)
        again = ff.donate(made())
        empty = ff.abstract_state(again, init, optimizer, mine)
        resumed = ff.unshard(again(ff.load(tmp_path / "a", empty), mine)[0])
        after = ff.unshard(after)
        both = zip(*map(tree.leaves, (resumed.opt_state, after.opt_state)), strict=True)
        assert all(getattr(a, "dtype", 0) == getattr(b, "dtype", 0) for a, b in both)
        return after, resumed

    found = ff.spmd(main, DATA)()
    for after, resumed in found:
        assert_bits(after, resumed)
    if name not in ELSEWHERE:
        alone = trained("alone", optimizer, batches=[x, x], init=init)[0]
        assert_near(alone.params, found[0][0].params, 2e-5)


# Those that reduce or average, a part of a model for each, in every stack


def everything():
    """One average over all, and no step that is odd."""
    parts = {
        "0": ff.chain(ff.clip_by_value(0.1), ff.lion(0.05, mask=matrices)),
        "1": ff.adafactor(0.05, weight_decay=0.1),
        "2": ff.lamb(0.05, weight_decay=0.1, mask=matrices),
        "3": ff.lars(0.5, trust_coefficient=0.1, trust_mask=matrices),
    }
    by_layer = ff.partition(parts, lambda path, leaf: path.split("/")[0])
    return ff.apply_if_finite(ff.ema(by_layer, 0.6))


PARAMS = layers(4, make=floats)
PARAMS[1]["steps"] = torch.tensor(3)
BATCH = floats(8, WIDTH, seed=5)


def average(state):
    return [x.clone() for x in tree.leaves(ff.unshard(state.inner_state.average))]


@functools.cache
def ran(stack):
    how = {"fn": chain(layer), "init": PARAMS, "look": average}
    return trained(stack, everything(), batches=[BATCH] * 2, **how)


@pytest.mark.parametrize(
    "stack",
    ["shard zero=1", "accumulate(shard)", "donate(remat(shard))", "pipeline(shard)"],
)
def test_in_any_stack_a_step_is_that_of_one_device(stack):
    expected = ran("alone")[0]
    for found in ran(stack):
        assert_near(expected.params, found.params, 2e-5)
        assert_near(expected.seen, found.seen, 2e-5)

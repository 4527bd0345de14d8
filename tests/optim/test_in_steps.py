"""Optimizers that reduce or average, in steps: sharded, donated, planned and saved."""

import functools

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests.models import chain, floats, layer, layers, train_step
from tests.optim.optimizers import matrices
from tests.optim.trees import assert_bits, assert_near

PARAMS = layers(4, make=floats)
PARAMS[1]["steps"] = torch.tensor(3)
BATCH = floats(8, 4, seed=5)


def everything():
    """A part of the model for each, one average over all, and no step that is odd."""
    parts = {
        "0": ff.chain(ff.clip_by_value(0.1), ff.lion(0.05, mask=matrices)),
        "1": ff.adafactor(0.05, weight_decay=0.1),
        "2": ff.lamb(0.05, weight_decay=0.1, mask=matrices),
        "3": ff.lars(0.5, trust_coefficient=0.1, trust_mask=matrices),
    }
    by_layer = ff.partition(parts, lambda path, leaf: path.split("/")[0])
    return ff.apply_if_finite(ff.ema(by_layer, 0.6))


def schedule_free():
    adam = ff.sharded_adam(0.05, b1=0.0, weight_decay=0.0)
    return ff.schedule_free(adam, 0.05, weight_decay=0.1)


STEPS = {make: train_step(chain(layer), make()) for make in (everything, schedule_free)}


def laid_out(make, wrap, batch):
    step = wrap(STEPS[make])
    return step, ff.init_state(step, PARAMS, make(), batch)


@functools.cache
def alone(make):
    step, state = laid_out(make, lambda step: step, BATCH)
    for _ in range(3):
        state, _ = step(state, BATCH)
    return state.params, ff.eval_params(state.opt_state, state.params)


DATA = ff.make_mesh({"data": 2}, "simulated")
NODES = ff.make_mesh({"data": 2, "node": 2}, "simulated")
PIPE = ff.make_mesh({"data": 2, "pipe": 2}, "simulated")
WAYS = {
    "zero=0": (DATA, lambda s: ff.shard(s, DATA, "data", zero=0)),
    "zero=1, donated": (DATA, lambda s: ff.donate(ff.shard(s, DATA, "data", zero=1))),
    "zero=2": (DATA, lambda s: ff.shard(s, DATA, "data", zero=2)),
    "accumulated, donated": (
        DATA,
        lambda s: ff.donate(ff.shard(ff.accumulate(s, 2), DATA, "data")),
    ),
    "replicated": (NODES, lambda s: ff.shard(s, NODES, "data", replicate="node")),
    "in stages, donated": (
        PIPE,
        lambda s: ff.donate(
            ff.shard(ff.pipeline(s, PIPE, "pipe", n_microbatches=2), PIPE, "data")
        ),
    ),
}


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_one_device(make, way):
    mesh, wrap = WAYS[way]

    def main():
        mine = ff.local_batch(BATCH, mesh, "data")
        step, state = laid_out(make, wrap, mine)
        for _ in range(3):
            state, _ = step(state, mine)
        average = ff.eval_params(state.opt_state, state.params)
        return ff.unshard(state.params), ff.unshard(average)

    for found in ff.spmd(main, mesh)():
        assert_near(alone(make), found, 2e-5)


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_a_plan_is_the_ledger_and_a_saved_state_goes_on(make, tmp_path):
    def main():
        mine = ff.local_batch(BATCH, DATA, "data")
        step, state = laid_out(make, lambda s: ff.shard(s, DATA, "data"), mine)
        planned = ff.plan(step, state, mine)
        with ff.ledger() as log:
            state, _ = step(state, mine)
        rank = ff.axis_index("data")
        assert planned[rank].ledger.table() == log.table(rank)
        ff.save(tmp_path / "state", state)
        loaded = ff.load(tmp_path / "state", laid_out(make, step_of, mine)[1])
        return step(state, mine)[0], step(loaded, mine)[0]

    step_of = lambda s: ff.shard(s, DATA, "data")  # noqa: E731
    for one, other in ff.spmd(main, DATA)():
        assert_bits(tree.leaves(one), tree.leaves(other))

"""Sparse gradients, as `embedding(sparse=True)` makes them: dense where ranks meet.

That a sharded step has the dense one's is tested with the other gradient calls.
"""

import pytest
import torch

import fsfunc as ff
from fsfunc.tracing.rules import LawError
from tests.checks import same, simulated
from tests.transforms.test_shard_programs import TABLE, TOKENS, looking_up

MESH = simulated(2)
DENSE = ff.value_and_grad(looking_up(False))(TABLE, TOKENS)


def test_a_sparse_gradient_that_nobody_averages_is_refused_as_a_dense_one():

    def main(sparse):
        g = ff.shard(torch.func.grad(looking_up(sparse, glue=True)), MESH, "data")
        ff.place(g, TABLE, ff.local_batch(TOKENS, MESH, "data"))

    for sparse in (False, True):
        with pytest.raises(LawError, match="by 'table'.*no mean over the ranks"):
            ff.spmd(main, MESH)(sparse)


def test_a_pipeline_gives_the_dense_gradient():
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    g = ff.pipeline(ff.value_and_grad(looking_up(True)), mesh, "pipe", n_microbatches=2)
    for found in ff.spmd(g, mesh)(TABLE, TOKENS):
        same(found, DENSE)


OPTIMIZERS = {
    "adam": ff.sharded_adam(0.1),
    "sgd": ff.sgd(0.1, momentum=0.9),
    "clipped": ff.chain(ff.clip_by_global_norm(0.1), ff.sharded_adam(0.1)),
    "torch": ff.from_torch(torch.optim.RMSprop, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_it_as_the_dense_one(name):
    optimizer = OPTIMIZERS[name]
    found = []
    for sparse in (False, True):
        step = optimizer(ff.value_and_grad(looking_up(sparse)))
        state = ff.TrainState(TABLE, optimizer.init(TABLE))
        for _ in range(2):
            state, _ = step(state, TOKENS)
        found.append(state.params)
    same(*found)


def test_on_one_device_it_is_as_torch_gives_it():
    value, grads = ff.value_and_grad(looking_up(True))(TABLE, TOKENS)
    assert grads["table"].layout == torch.sparse_coo
    same((value, grads["table"].to_dense()), (DENSE[0], DENSE[1]["table"]))


def test_a_plan_says_that_it_counts_dense_memory():
    mesh = ff.make_mesh({"data": 2}, "abstract")
    optimizer = OPTIMIZERS["adam"]
    step = ff.shard(optimizer(ff.value_and_grad(looking_up(True))), mesh, "data")
    with pytest.raises(RuntimeError, match="unit 'look_up'.*sparse_coo.*sparse=False"):
        ff.plan(step, lambda: TABLE, optimizer, TOKENS[:2])

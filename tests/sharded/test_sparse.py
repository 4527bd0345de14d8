"""Sparse gradients, as `embedding(sparse=True)` makes them: dense where ranks meet."""

import pytest
import torch
import torch.nn.functional as F

import fsfunc as ff
from fsfunc.tracing.refusals import LawError
from tests.checks import same, simulated
from tests.models import integers

MESH = simulated(2)
PARAMS = {"table": integers(6, 4, seed=1), "w": integers(4, 2, seed=2)}
TOKENS = torch.tensor([0, 1, 2, 1])


def loss_of(sparse, glue=False):
    def look_up(p, tokens):
        return F.embedding(tokens, p["table"], sparse=sparse)

    table = look_up if glue else ff.unit(look_up)
    head = ff.unit(lambda p, h: h @ p["w"])

    def loss(p, tokens):
        h = table({"table": p["table"]}, tokens)
        return head({"w": p["w"]}, h).square().sum(1).mean()

    return loss


DENSE = ff.value_and_grad(loss_of(False))(PARAMS, TOKENS)
STACKS = {
    "shard": lambda f, shard: shard(f),
    "remat": lambda f, shard: shard(ff.remat(f)),
    "shard(accumulate)": lambda f, shard: shard(ff.accumulate(f, 2)),
    "accumulate(shard)": lambda f, shard: ff.accumulate(shard(f), 2),
}


@pytest.mark.parametrize("glue", [False, True], ids=["unit", "glue"])
@pytest.mark.parametrize("laid", [True, False], ids=["placed", "whole"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_gradient_is_the_dense_one(zero, stack, laid, glue):
    gradient = ff.value_and_grad(loss_of(True, glue))

    def main():
        g = STACKS[stack](gradient, lambda f: ff.shard(f, MESH, "data", zero=zero))
        mine = ff.local_batch(TOKENS, MESH, "data")
        params = ff.place(g, PARAMS, mine) if laid else PARAMS
        return ff.unshard(g(params, mine))

    for found in ff.spmd(main, MESH)():
        same(found, DENSE)


def test_with_stock_derivatives():

    def main():
        f = torch.func.grad(loss_of(True))
        g = ff.shard(f, MESH, "data")
        mine = ff.local_batch(TOKENS, MESH, "data")
        return [ff.unshard(g(p, mine)) for p in (ff.place(g, PARAMS, mine), PARAMS)]

    for placed, whole in ff.spmd(main, MESH)():
        same(placed, DENSE[1])
        same(whole, DENSE[1])


def test_a_sparse_gradient_that_nobody_averages_is_refused_as_a_dense_one():

    def main(sparse):
        g = ff.shard(torch.func.grad(loss_of(sparse, glue=True)), MESH, "data")
        g(PARAMS, ff.local_batch(TOKENS, MESH, "data"))

    for sparse in (False, True):
        with pytest.raises(LawError, match="by 'table'.*nobody takes the mean"):
            ff.spmd(main, MESH)(sparse)


def test_a_pipeline_gives_the_dense_gradient():
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    g = ff.pipeline(ff.value_and_grad(loss_of(True)), mesh, "pipe", n_microbatches=2)
    for found in ff.spmd(g, mesh)(PARAMS, TOKENS):
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
        step = optimizer(ff.value_and_grad(loss_of(sparse)))
        state = ff.TrainState(PARAMS, optimizer.init(PARAMS))
        for _ in range(2):
            state, _ = step(state, TOKENS)
        found.append(state.params)
    same(*found)


def test_on_one_device_it_is_as_torch_gives_it():
    value, grads = ff.value_and_grad(loss_of(True))(PARAMS, TOKENS)
    assert grads["table"].layout == torch.sparse_coo
    same((value, grads["table"].to_dense()), (DENSE[0], DENSE[1]["table"]))


def test_a_plan_says_that_it_counts_dense_memory():
    mesh = ff.make_mesh({"data": 2}, "abstract")
    optimizer = OPTIMIZERS["adam"]
    step = ff.shard(optimizer(ff.value_and_grad(loss_of(True))), mesh, "data")
    with pytest.raises(RuntimeError, match="unit 'look_up'.*sparse_coo.*sparse=False"):
        ff.plan(step, lambda: PARAMS, optimizer, TOKENS[:2])


def test_a_backward_that_may_be_differentiated_again():

    def main(sparse):
        f = ff.shard(loss_of(sparse), MESH, "data")
        mine = ff.local_batch(TOKENS, MESH, "data")
        placed = ff.place(f, PARAMS, mine)
        leaves = ff.tree.map(lambda x: x.detach().requires_grad_(), placed)
        wanted = ff.tree.leaves(leaves)
        return torch.autograd.grad(f(leaves, mine), wanted, create_graph=True)

    dense, sparse = (ff.spmd(main, MESH)(kind) for kind in (False, True))
    for mine, other in zip(dense, sparse, strict=True):
        assert any(g.count_nonzero() for g in mine)
        same(mine, other)

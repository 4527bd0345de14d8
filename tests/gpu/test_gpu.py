"""The same step on a GPU: over NCCL at one rank, and on simulated ranks."""

import json

import pytest
import torch

import fsfunc as ff
from fsfunc import tree

pytestmark = pytest.mark.gpu
WIDTH = 16


@ff.unit
def layer(params, x):
    h = torch.nn.functional.dropout(torch.tanh(x @ params["w"]), 0.25)
    return x + h @ params["v"]


def loss_fn(params, x):
    for p in params:
        x = layer(p, x)
    return x.square().mean()


OPTIMIZER = ff.sharded_adam(1e-2)


def train_step(state, x):
    loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
    return state.apply_gradients(grads, OPTIMIZER), loss


def example():
    draw = torch.Generator().manual_seed(0)

    def weight():
        return torch.randn(WIDTH, WIDTH, generator=draw).cuda() / 4

    params = [{"w": weight(), "v": weight()} for _ in range(3)]
    return params, torch.randn(8, WIDTH, generator=draw).cuda()


def trained(step, params, batch, steps=3):
    torch.manual_seed(0)
    state = ff.init_state(step, params, OPTIMIZER, batch)
    step, losses = ff.donate(step), []
    for _ in range(steps):
        state, loss = step(state, batch)
        losses.append(loss.item())
    return losses, ff.unshard(state.params)


def close(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    for a, b in zip(tree.leaves(found[1]), tree.leaves(expected[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("around", [lambda f: f, ff.remat], ids=["kept", "remat"])
def test_simulated_ranks_on_one_gpu(zero, around):
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        params, batch = example()
        step = ff.shard(around(train_step), mesh, "data", zero=zero)
        return trained(step, params, ff.local_batch(batch, mesh, "data"))

    params, batch = example()
    expected = trained(ff.accumulate(train_step, 2), params, batch)
    with ff.ledger() as log:
        found = ff.spmd(main, mesh)()
    for mine in found:
        close(mine, expected)
    assert log.bytes("data") > 0


precise = ff.precision(train_step, compute=torch.bfloat16, reduce=torch.float32)


@pytest.mark.parametrize("zero", range(4))
def test_one_rank_over_nccl(zero, torchrun):
    """The numbers of the step that nobody sharded; parameters stay in float32."""
    (line,) = torchrun(ONE_RANK.format(zero=zero), 1).splitlines()
    losses, weights, *said = json.loads(line)
    assert said == ["nccl", "torch.float32"]
    expected, params = trained(precise, *example())
    assert losses == pytest.approx(expected, rel=1e-5)
    found = torch.tensor(weights)
    torch.testing.assert_close(found, of(params), rtol=1e-5, atol=1e-6)
    assert (found - of(example()[0])).abs().mean() > 0.01  # and they were trained


def of(params):
    """All weights, as one tensor."""
    return torch.stack([x.cpu() for x in tree.leaves(params)])


ONE_RANK = """
import json, torch.distributed as dist, fsfunc as ff
from tests.gpu.test_gpu import example, of, precise, trained

mesh = ff.make_mesh({{"data": 1}})
losses, params = trained(ff.shard(precise, mesh, "data", zero={zero}), *example())
weights = of(params)
said = [dist.get_backend(), str(weights.dtype)]
print(json.dumps([losses, weights.tolist(), *said]))
dist.destroy_process_group()
"""

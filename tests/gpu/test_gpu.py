"""The same step on a GPU: over NCCL at one rank, and on simulated ranks."""

import json

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests import models
from tests.programs import python

pytestmark = pytest.mark.gpu
WIDTH = 16


@ff.unit
def layer(params, x):
    h = torch.nn.functional.dropout(torch.tanh(x @ params["w"]), 0.25)
    return x + h @ params["v"]


loss_fn, OPTIMIZER = models.chain(layer), ff.sharded_adam(1e-2)
train_step = models.train_step(loss_fn, OPTIMIZER)


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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("around", ["plain", "remat", "microbatches"])
@pytest.mark.parametrize("kinds", ["params moments activations", "params", "moments"])
def test_what_lies_with_the_host_trains_alike(tmp_path, kinds, around, ranks):
    """Pinned memory, or a mapped file: brought, used on the device, and put back."""
    mesh = ff.make_mesh({"data": ranks}, "simulated")
    inner = {
        "plain": lambda f: f,
        "remat": ff.remat,
        "microbatches": lambda f: ff.accumulate(f, 2),
    }[around]

    def main(where):
        params, batch = example()
        step = ff.shard(inner(train_step), mesh, "data")
        if around == "microbatches":  # of shards, too
            step = ff.accumulate(step, 2)
        step = (
            ff.offload(step, **dict.fromkeys(kinds.split(), where)) if where else step
        )
        return trained(step, params, ff.local_batch(batch, mesh, "data"))

    expected = ff.spmd(lambda: main(None), mesh)()
    for where in "host", tmp_path:
        found = ff.spmd(lambda where=where: main(where), mesh)()
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs)


@pytest.mark.parametrize("kind", [torch.uint8, torch.bfloat16, None])
def test_an_update_of_moments_with_the_host(kind):
    """Clipped by a norm that is a number on the device."""
    adam = ff.sharded_adam(1e-2, moment_dtype=kind)
    optimizer = ff.chain(ff.clip_by_global_norm(0.1), adam)
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main(*kinds):
        params, batch = example()
        torch.manual_seed(0)
        step = ff.shard(optimizer(ff.value_and_grad(loss_fn)), mesh, "data")
        step = ff.offload(step, **dict.fromkeys(kinds, "host")) if kinds else step
        state = ff.init_state(step, params, optimizer, batch)
        for _ in range(2):
            state, loss = step(state, batch)
        return [loss["loss"].item()], ff.unshard(state.params)

    expected = ff.spmd(main, mesh)()
    for kinds in ["moments"], ["params"], ["params", "moments"]:
        for mine, theirs in zip(ff.spmd(main, mesh)(*kinds), expected, strict=True):
            close(mine, theirs)


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
def test_one_rank_over_nccl(zero, tmp_path):
    """The numbers of the step that nobody sharded; parameters stay in float32."""
    path = tmp_path / "program.py"
    path.write_text(ONE_RANK.format(zero=zero))
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"
    done = python(*torchrun, path, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
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

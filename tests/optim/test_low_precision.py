"""Parameters and moments of fewer bits: near float32, and as many bytes as said."""

import functools

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from fsfunc.sharded.leaf import is_sharded
from tests.optim.trees import assert_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH, UNITS = 24, 2


@ff.unit
def layer(params, x):
    return torch.tanh(x @ params["w"].to(x.dtype) + params["b"].to(x.dtype))


def loss_fn(params, batch):
    x, y = batch
    for p in params:
        x = layer(p, x)
    return (x.float() - y).square().mean()


def model(dtype):
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: (torch.randn(shape, generator=draw) / 5).to(dtype)  # noqa: E731
    return [{"w": make(WIDTH, WIDTH), "b": make(WIDTH)} for _ in range(UNITS)]


def data():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, WIDTH, generator=draw)
    return x, torch.tanh(x.roll(1, 1) * 0.5)


def losses(optimizer, dtype=FP32, steps=60, ranks=0, zero=3, donated=True):
    """(the losses, the last state) of a run; of the first rank, where there are some."""

    def run(step, batch):
        state = ff.init_state(step, model(dtype), optimizer, batch)
        step = ff.donate(step) if donated else step
        found = []
        for _ in range(steps):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        return found, state

    step = optimizer(ff.value_and_grad(loss_fn))
    if not ranks:
        return run(step, data())
    mesh = ff.make_mesh({"data": ranks}, "simulated")

    def main():
        batch = ff.local_batch(data(), mesh, "data")
        return run(ff.shard(step, mesh, "data", zero=zero), batch)

    return ff.spmd(main, mesh)()[0]


adam = functools.partial(ff.sharded_adam, 3e-3)
KINDS = {
    "masters of bf16": (lambda: ff.master_weights(adam()), BF16),
    "masters of fp16": (lambda: ff.loss_scale(ff.master_weights(adam())), FP16),
    "by chance": (lambda: ff.stochastic_rounding(adam()), BF16),
}


@functools.cache
def wide():
    return losses(adam())[0][-1]


@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_float32_does(name):
    make, dtype = KINDS[name]
    alone, _ = losses(make(), dtype)
    assert abs(alone[-1] / wide() - 1) < 0.05
    for zero in (0, 3):
        assert abs(losses(make(), dtype, ranks=2, zero=zero)[0][-1] / wide() - 1) < 0.05

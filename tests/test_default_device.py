"""A default device moves the user's tensors, and none of the library's own.

Here it is "meta", where there are no values: what is made there by mistake raises, as
it would between a card and the host.
"""

import contextlib

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests import models

WIDTH = 8


@ff.unit
def layer(params, x):
    return x + torch.tanh(x @ params["up"]) @ params["down"]


loss_fn = models.chain(layer)


def arguments():
    draw = torch.Generator().manual_seed(0)
    like = {"generator": draw, "device": "cpu"}
    params = [
        {"up": torch.randn(WIDTH, 8, **like), "down": torch.randn(8, WIDTH, **like)}
        for _ in range(2)
    ]
    return params, torch.randn(4, WIDTH, **like)


def adam(**how):
    return ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(1e-2, **how))


def stack(*around, optimizer=None, **how):
    """The two ways a step is made of: a function of the mesh, and its optimizer."""
    optimizer = optimizer or adam()

    def made(mesh):
        step = optimizer(ff.value_and_grad(loss_fn))
        for transform in around:
            step = transform(step)
        return ff.shard(step, mesh, "data", **how)

    return made, optimizer


STACKS = {
    "zero 3, recomputed": lambda: stack(ff.remat),
    "zero 0, microbatches": lambda: stack(lambda f: ff.accumulate(f, 2), zero=0),
    "parameters with the host": lambda: stack(
        lambda f: ff.offload(f, params="host", moments="host", activations="host")
    ),
    "moments in 8 bits": lambda: stack(optimizer=adam(moment_dtype=torch.uint8)),
    "messages in 8 bits": lambda: stack(
        gather=ff.QuantizedGather(), reduction=ff.QuantizedReduction()
    ),
    "messages of low rank": lambda: stack(
        zero=0, optimizer=ff.powersgd(ff.sharded_adam(1e-2), rank=1, min_rate=1)
    ),
}


def trained(made, optimizer, device):
    mesh = ff.make_mesh({"data": 2}, "simulated")

    def main():
        params, batch = arguments()
        step = made(mesh)
        mine = ff.local_batch(batch, mesh, "data")
        state = ff.init_state(step, params, optimizer, mine)
        for _ in range(2):
            state, metrics = step(state, mine)
        noise = ff.randn_like(state.params)
        ff.testing.check_batch(mine, "data")
        return metrics["loss"].item(), ff.unshard(state.params), ff.unshard(noise)

    torch.manual_seed(0)
    default = torch.device(device) if device else contextlib.nullcontext()
    with default:
        return ff.spmd(main, mesh)()[0]


@pytest.mark.parametrize("name", STACKS)
def test_a_step_does_not_follow_the_default_device(name):
    expected = trained(*STACKS[name](), None)
    found = trained(*STACKS[name](), "meta")
    assert found[0] == expected[0]
    for x, y in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)

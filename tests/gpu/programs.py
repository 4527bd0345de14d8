"""What the tests of a card train, and where.

``FSFUNC_GPU_TESTS=cpu pytest tests/gpu`` rehearses them on the CPU: what counts a
card's memory counts nothing there, streams are none, and no kernel is slow.
"""

import os
import time
from contextlib import contextmanager

import pytest
import torch

import fsfunc as ff
from fsfunc import tree
from tests import checks, models
from tests.probes import LiveBytes

REHEARSED = os.environ.get("FSFUNC_GPU_TESTS") == "cpu"
DEVICE = torch.device("cpu" if REHEARSED else "cuda")
WIDTH, ROWS, DEPTH = 16, 8, 3
# A millisecond of an H100: longer than Python takes from one copy to the next.
CYCLES = 2_000_000

only_on_a_card = pytest.mark.skipif(REHEARSED, reason="counts the memory of a card")

# Units


@ff.unit
def layer(params, x):
    return x + torch.tanh(x @ params["w"]) @ params["v"]


@ff.unit
def dropped(params, x):
    """`layer`, which draws random numbers."""
    h = torch.nn.functional.dropout(torch.tanh(x @ params["w"]), 0.25)
    return x + h @ params["v"]


def sleep(cycles=CYCLES):
    """Lets the device wait, and Python go on."""
    if not REHEARSED:
        torch.cuda._sleep(cycles)


class Slow(torch.autograd.Function):
    """The identity, for which the device takes long, forward and backward."""

    @staticmethod
    def forward(x):
        sleep()
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        sleep()
        return grad.clone()


@ff.unit
def slow(params, x):
    """`dropped`, behind a kernel that takes long: who does not wait reads too early."""
    h = torch.nn.functional.dropout(torch.tanh(Slow.apply(x) @ params["w"]), 0.25)
    return x + Slow.apply(h) @ params["v"]


# Their parameters and batch, made on the CPU: the same numbers wherever they go


def example(width=WIDTH, rows=ROWS, device=DEVICE):
    params = models.layers(DEPTH, width, bias=False, make=models.floats)
    params = [
        {"w": p["w"] / 4, "v": models.floats(width, width, seed=50 + i) / 4}
        for i, p in enumerate(params)
    ]
    batch = models.floats(rows, width, seed=99)
    return tree.map(lambda x: x.to(device), params), batch.to(device)


# Optimizers

# With so large an eps a gradient's last bits change an update by no more.
ADAM = ff.sharded_adam(1e-2, eps=1e-3)
# Products with powers of two are exact, so whoever fuses them with a sum, host or
# device, gives the same bits.
EXACT = ff.sgd(0.125, momentum=0.5)

# Steps


def step_of(unit, optimizer=ADAM):
    return models.train_step(models.chain(unit), optimizer)


def trained(step, optimizer=ADAM, steps=3, given=None, batch=None):
    """(losses, whole parameters) after some steps of this rank; nothing is waited for.

    ``batch``: this rank's; by default that of `example`.
    """
    torch.manual_seed(0)
    params, rows = given or example()
    batch = rows if batch is None else batch
    state = ff.init_state(step, params, optimizer, batch)
    losses = []
    for _ in range(steps):
        state, loss = step(state, batch)
        losses.append(loss)
    return torch.stack(losses), ff.unshard(state.params)


def on_ranks(step, mesh, axis="data", **how):
    """What `trained` gives on each rank, of its rows."""

    def main():
        given = how.get("given") or example()
        mine = ff.local_batch(given[1], mesh, axis)
        return trained(step, **{**how, "given": given, "batch": mine})

    return ff.spmd(main, mesh)()


# What they are held to


def on_host(t):
    t = list(t) if isinstance(t, list) else t  # what `spmd` returns is no tree
    return tree.map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, t)


def close(found, expected, tolerance=1e-5):
    found, expected = on_host(found), on_host(expected)
    tree.check_same_structure(expected, found)
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10)


def same(found, expected):
    checks.same(on_host(found), on_host(expected))


# Memory of the device


def requested():
    """Bytes that tensors on the device asked for, without the allocator's rounding."""
    if REHEARSED:
        return 0
    # A thread of autograd's may still let go of the graph that it has run.
    torch.cuda.synchronize()
    time.sleep(0.01)
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@contextmanager
def measured(*known):
    """``peak[0]``: the most bytes that were asked for at once, beyond those before.

    ``known``: the tensors of before, for who counts on the CPU.
    """
    peak = [0]
    if REHEARSED:
        with LiveBytes(*known) as memory:
            yield peak
        peak[0] = memory.peak
        return
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    yield peak
    peak[0] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

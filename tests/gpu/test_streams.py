"""Steps in streams of the caller's, behind kernels that take long.

The host runs ahead of the device by whole steps. Whoever uses memory again in another
stream, or reads it without an event, then reads what is not there yet, or no more.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch

import fsfunc as ff
from fsfunc.testing import poison
from tests.checks import simulated
from tests.gpu.programs import (
    ADAM,
    CYCLES,
    DEVICE,
    REHEARSED,
    close,
    example,
    on_ranks,
    same,
    sleep,
    slow,
    step_of,
    trained,
)

pytestmark = pytest.mark.gpu


def stream():
    return None if REHEARSED else torch.cuda.Stream()


@contextmanager
def within(side):
    """Inside, kernels go to a stream that begins after the caller's, which waits."""
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def default_stream():
    return (
        nullcontext() if REHEARSED else torch.cuda.stream(torch.cuda.default_stream())
    )


def overwrite(count=64):
    """Takes memory of the current stream, of all sizes, and fills it with NaN.

    Without waiting for other streams: their memory must not be among it.
    """
    sizes = [2**k for k in range(6, 16)]
    held = [
        torch.full((n,), torch.nan, device=DEVICE)
        for n in sizes
        for _ in range(count // 8)
    ]
    del held


RANKS = simulated(2)
STACKS = {
    "one device": lambda f: f,
    "one device, remat": ff.remat,
    "one device, donated": ff.donate,
    "one device, offloaded": lambda f: ff.offload(f, activations="host"),
    **{
        f"zero={zero}": lambda f, zero=zero: ff.shard(f, RANKS, "data", zero=zero)
        for zero in range(4)
    },
    "zero=3, remat, donated": lambda f: ff.donate(ff.shard(ff.remat(f), RANKS, "data")),
    "zero=3, microbatches": lambda f: ff.accumulate(ff.shard(f, RANKS, "data"), 2),
    "zero=3, small units": lambda f: ff.shard(f, RANKS, "data", min_bytes=4096),
    "zero=3, offloaded": lambda f: ff.offload(
        ff.shard(f, RANKS, "data"), params="host", activations="host"
    ),
    "zero=2, bf16": lambda f: ff.shard(
        ff.precision(f, torch.bfloat16, torch.float32), RANKS, "data", zero=2
    ),
}


def run(name):
    """Some steps of a stack, as the current stream takes them."""
    step = STACKS[name](step_of(slow))
    return [trained(step)] if name.startswith("one") else on_ranks(step, RANKS)


@pytest.mark.parametrize("name", STACKS)
def test_a_step_in_a_side_stream(name):
    """Bit by bit that of the default stream; the caller's stream is used meanwhile."""
    expected = run(name)
    with within(stream()):
        sleep()
        found = run(name)
        # The stream is behind by now; the default one does not wait for it.
        with default_stream():
            overwrite()
    same(found, expected)


@pytest.mark.parametrize(
    "name",
    ["one device, remat", "zero=1", "zero=2", "zero=3", "zero=3, remat, donated"],
)
def test_nothing_unwritten_is_read(name):
    """With NaN in all memory that is new, in a side stream too."""
    expected = run(name)
    with poison():
        close(run(name), expected)
        with within(stream()):
            found = run(name)
    close(found, expected)


ALTERNATING = {
    "plain": lambda f: f,
    "remat": ff.remat,
    "donated": ff.donate,
    "activations offloaded": lambda f: ff.offload(f, activations="host"),
    "all offloaded": lambda f: ff.offload(
        f, params="host", moments="host", activations="host"
    ),
    "zero=2": lambda f: f,
}


@pytest.mark.parametrize("name", ALTERNATING)
def test_each_step_in_another_stream(name):
    """What a step leaves behind, the next one uses again in a stream of its own."""
    mesh = simulated(1)
    zero = 2 if name == "zero=2" else 3
    step = ALTERNATING[name](ff.shard(step_of(slow), mesh, "data", zero=zero))

    def main(streams):
        torch.manual_seed(0)
        params, batch = example()
        state = ff.init_state(step, params, ADAM, batch)
        losses = []
        for k in range(6):
            with within(streams[k % len(streams)]):
                state, loss = step(state, batch)
                losses.append(loss)
        return torch.stack(losses), ff.unshard(state.params)

    expected = ff.spmd(lambda: main([None]), mesh)()
    same(ff.spmd(lambda: main([stream(), stream()]), mesh)(), expected)


@pytest.mark.parametrize("around", [lambda f: f, ff.remat], ids=["kept", "remat"])
def test_units_in_streams_of_their_own(around):
    """A backward runs in the streams of its forward, and joins the caller's."""
    params, batch = example()

    def gradient(streams):
        def loss(params, x):
            for p, side in zip(params, streams, strict=True):
                with within(side):
                    x = slow(p, x)
            return x.square().mean()

        torch.manual_seed(0)
        return around(ff.value_and_grad(loss))(params, batch)

    expected = gradient([None] * 3)
    same(gradient([stream(), stream(), None]), expected)


@pytest.mark.parametrize("save", [ff.save, lambda *a: ff.save_async(*a).wait()])
def test_checkpoints_of_a_state_that_is_still_computed(tmp_path, save):
    """What a stream has not finished is saved whole, and loaded behind its zeros."""
    with within(stream()):
        sleep(20 * CYCLES)
        state = {"w": torch.arange(1 << 20, dtype=torch.float32, device=DEVICE)}
        save(tmp_path / "a", state)
        sleep(20 * CYCLES)
        loaded = ff.load(tmp_path / "a", ff.tree.map(torch.zeros_like, state))
        same(loaded, state)

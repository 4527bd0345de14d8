"""A card's memory: steps leave nothing behind, and donated states take less."""

import gc

import pytest
import torch

import fsfunc as ff
from tests.checks import simulated
from tests.gpu.programs import (
    ADAM,
    DEVICE,
    dropped,
    example,
    layer,
    measured,
    on_ranks,
    only_on_a_card,
    requested,
    same,
    step_of,
    trained,
)

pytestmark = pytest.mark.gpu

RANKS = simulated(2)


def sharded(f, zero=3):
    return ff.shard(f, RANKS, "data", zero=zero)


STACKS = {
    "plain": lambda f: f,
    "remat": ff.remat,
    "microbatches": lambda f: ff.accumulate(f, 2),
    "zero=0": lambda f: sharded(f, 0),
    "zero=1": lambda f: sharded(f, 1),
    "zero=2, remat": lambda f: sharded(ff.remat(f), 2),
    "zero=3": sharded,
    "zero=3, remat": lambda f: sharded(ff.remat(f)),
    "zero=3, microbatches": lambda f: ff.accumulate(sharded(f), 2),
    "zero=3, bf16": lambda f: sharded(ff.precision(f, torch.bfloat16)),
    "activations offloaded": lambda f: ff.offload(f, activations="host"),
    "zero=3, all offloaded": lambda f: ff.offload(
        sharded(f), params="host", moments="host", activations="host"
    ),
}
WARM, STEPS = 3, 20


@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("name", STACKS)
def test_steps_leave_nothing_behind(name, donated):
    """As many bytes after 20 steps as after 3, without Python's garbage collector."""
    step = STACKS[name](step_of(dropped))
    step = ff.donate(step) if donated else step
    alone = "zero" not in name

    def main():
        params, batch = example()
        state = ff.init_state(step, params, ADAM, batch)
        del params
        counts = []
        for k in range(STEPS):
            state, _ = step(state, batch)
            if k + 1 in (WARM, STEPS):
                if not alone:  # all have ended their step, and none goes on
                    ff.psum(torch.ones(1), "data")
                counts.append(requested())
                if not alone:
                    ff.psum(torch.ones(1), "data")
        return counts

    gc.collect()
    gc.disable()
    try:
        found = [main()] if alone else list(ff.spmd(main, RANKS)())
    finally:
        gc.enable()
    assert [last - first for first, last in found] == [0] * len(found)


@only_on_a_card
def test_a_run_gives_its_memory_back():
    """All of it, once its state is dropped: nothing hangs on a mesh, or on a step."""
    step = ff.donate(sharded(ff.remat(step_of(dropped))))
    on_ranks(step, RANKS)  # workspaces of kernels, and what meshes keep
    gc.collect()
    before = requested()
    on_ranks(step, RANKS)
    gc.collect()
    assert requested() == before


@pytest.mark.parametrize("name", [n for n in STACKS if "offloaded" not in n])
def test_a_donated_step_is_the_plain_one(name):
    """Bit by bit, though the allocator hands out the old state's memory at once."""
    step = STACKS[name](step_of(dropped))
    if "zero" in name:
        run = lambda step: on_ranks(step, RANKS, steps=4)  # noqa: E731
    else:
        run = lambda step: trained(step, steps=4)  # noqa: E731
    same(run(ff.donate(step)), run(step))


@pytest.mark.parametrize("zero", [None, 0, 3])
def test_a_donated_state_takes_less_memory(zero):
    """Parameters and moments are not there twice."""
    width = 256
    mesh = simulated(1)
    plain = step_of(layer)
    plain = plain if zero is None else ff.shard(plain, mesh, "data", zero=zero)

    def main(step):
        params, batch = example(width=width)
        size = sum(x.nbytes for p in params for x in p.values())
        state = ff.init_state(step, params, ADAM, batch)
        del params
        state, _ = step(state, batch)  # workspaces of kernels
        with measured(state, batch) as peak:
            state, _ = step(state, batch)
        return peak[0] / size

    def peak(step):
        return main(step) if zero is None else ff.spmd(main, mesh)(step)[0]

    kept, donated = peak(plain), peak(ff.donate(plain))
    assert donated <= kept
    assert kept - donated > 1.9, (kept, donated)


@pytest.mark.parametrize("zero", [None, 0, 2, 3])
def test_a_donated_state_is_refused(zero):
    mesh = simulated(2)

    def main():
        plain = step_of(layer)
        plain = plain if zero is None else ff.shard(plain, mesh, "data", zero=zero)
        step = ff.donate(plain)
        params, batch = example()
        state = ff.init_state(step, params, ADAM, batch)
        new, _ = step(state, batch)
        for use in step, plain:
            with pytest.raises(RuntimeError, match="donated"):
                use(state, batch)
        newer, _ = step(new, batch)
        return [p["w"].device.type if zero is None else p["w"].local.device.type
                for p in newer.params]  # fmt: skip

    found = [main()] if zero is None else ff.spmd(main, mesh)()
    assert {kind for kinds in found for kind in kinds} == {DEVICE.type}


def test_a_view_that_somebody_keeps_is_not_written_over():
    """The caching allocator gives no memory away that a view still has."""
    step = ff.donate(step_of(layer))
    params, batch = example()
    state = ff.init_state(step, params, ADAM, batch)
    kept = state.params[0]["w"][2:4]
    before = kept.clone()
    for _ in range(3):
        state, _ = step(state, batch)
    assert torch.equal(kept, before)

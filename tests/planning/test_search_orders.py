"""Both orders of `accumulate` and `shard`, and what is skipped before it is planned."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import fsfunc as ff
from fsfunc.planning.candidates import least_state_bytes, whole_gradient_bytes
from fsfunc.planning.hardware import CPU, H100, replace
from fsfunc.planning.stack_search import search
from fsfunc.planning.stacks import Stack
from fsfunc.printing.tables import of_seconds
from tests.models import chain, floats, layer, layers

WIDTH, LAYERS, ROWS = 64, 8, 256
WHOLE = LAYERS * WIDTH * WIDTH * 4  # bytes of all parameters, and of gradients
AXES = (("data", 4),)


def init():
    return layers(LAYERS, WIDTH, bias=False, make=floats)


@cache
def _found(memory, batch, hardware, **space):
    batch = floats(ROWS, WIDTH) if batch is None else batch
    given = {"zero": (3,), "remat": (None,), "accumulate": (1, 8), **space}
    args = (
        chain(layer),
        ff.sharded_adam(1e-3),
        init,
        batch,
        dict(AXES),
        hardware,
        memory,
    )
    return search(*args, **given)


def found(memory=None, batch=None, hardware=CPU, **space):
    return _found(memory, batch, hardware, **space)


def test_each_part_is_reduced_where_accumulate_is_outermost():
    stack = Stack(AXES, zero=3, accumulate=8, reduces_each=True, compute=torch.bfloat16)
    names = [line.name for line in stack.layers()]
    assert names == ["precision", "shard", "accumulate", "donate"]
    assert "step = ff.accumulate(step, 8)\nstep = ff.donate(step)" in stack.code
    assert str(stack).startswith("data=4: donate(accumulate(shard(precision(")


def test_parts_reduced_at_once_hold_whole_gradients_and_each_does_not():
    both = {(c.stack.accumulate, c.stack.reduces_each): c for c in found().tried}
    once, each = both[8, False], both[8, True]
    assert once.peak_bytes - each.peak_bytes > 0.3 * WHOLE
    assert whole_gradient_bytes(once.stack, WHOLE) == WHOLE
    assert whole_gradient_bytes(each.stack, WHOLE) == 0


def test_a_batch_is_made_by_a_function():
    made = found(batch=lambda: torch.zeros(ROWS, WIDTH), accumulate=(1,))
    given = found(accumulate=(1,))
    assert [str(c) for c in made.tried] == [str(c) for c in given.tried]


def test_moments_and_parameters_with_the_host_are_tried_where_asked():
    kinds = (), ("moments",), ("params", "moments")
    # What is held decides, not what is reserved; what is sent, not what is launched.
    hardware = replace(H100, fresh=1e9, overhead=0.0)
    every = found(offload=kinds, accumulate=(1,), hardware=hardware)
    plain, moments, both = sorted(every.tried, key=lambda c: len(c.stack.offload))
    assert [c.stack.offload for c in (plain, moments, both)] == [*kinds]
    assert plain.peak_bytes > moments.peak_bytes > both.peak_bytes
    assert plain.seconds < moments.seconds < both.seconds
    assert [c.stack.offload for c in every.front] == [*kinds]
    sizes = [least_state_bytes(Stack(AXES, zero=3, offload=k), 400, 800) for k in kinds]
    assert sizes == [300, 100, 0]
    # Where nothing else fits it is what an expert does; the host has room, or has not.
    tight = found(both.peak_bytes, offload=kinds, accumulate=(1,), hardware=hardware)
    assert tight.best.stack == both.stack
    assert 'ff.offload(step, params="host", moments="host")' in tight.best.code
    small = (*H100.stores["host"][:2], 1000.0)
    full = replace(hardware, stores={"host": small})
    with pytest.raises(ValueError, match="none of .* stacks fits"):
        found(both.peak_bytes, offload=kinds, accumulate=(1,), hardware=full)


def test_each_precision_is_tried():
    every = found(compute=(None, torch.bfloat16), accumulate=(1,))
    assert {c.stack.compute for c in every.tried} == {None, torch.bfloat16}


def test_the_best_are_run_here():
    """The best is then the fastest that was measured; the others stay estimates."""
    args = chain(layer), ff.sharded_adam(1e-3), init, floats(ROWS, WIDTH), 1, CPU
    every = search(*args, run=2)
    ran = [c for c in every.tried if c.measured is not None]
    assert {c.stack for c in ran} == {c.stack for c in every.ranked[:2]}
    assert every.best == min(ran, key=lambda c: c.measured)
    assert f"measured, {of_seconds(every.best.seconds)} estimated" in every.table()


RUN = """
    import torch, fsfunc as ff
    from fsfunc.planning.hardware import CPU
    from tests.models import chain, floats, layer, layers
    init = lambda: layers(4, 16, bias=False, make=floats)
    batch = lambda: floats(8, 16)
    every = ff.search(
        chain(layer), ff.sharded_adam(1e-3), init, batch, 2, CPU, run=3, zero=(0, 3),
        remat=(None,), offload=((), ("moments",)), accumulate=(1,), microbatches=(2,),
        schedules=("one_f_one_b",),
    )
    ran = sorted((c.measured, str(c.stack)) for c in every.tried if c.measured)
    import hashlib
    print(len(ran), hashlib.md5(str(ran).encode()).hexdigest())
"""


@pytest.mark.processes
def test_ranks_that_run_the_best_agree_on_the_times(processes):
    one, other = processes(RUN, 2).splitlines()
    assert one == other and one.startswith("3 ")

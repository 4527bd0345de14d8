"""Both orders of `accumulate` and `shard`, and what is skipped before it is planned."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import fsfunc as ff
from fsfunc.planning.candidates import whole_gradients
from fsfunc.planning.hardware import CPU
from fsfunc.planning.stack_search import search
from fsfunc.planning.stacks import Stack
from tests.models import chain, floats, layer, layers

WIDTH, LAYERS, ROWS = 64, 8, 256
WHOLE = LAYERS * WIDTH * WIDTH * 4  # bytes of all parameters, and of gradients
AXES = (("data", 4),)


def init():
    return layers(LAYERS, WIDTH, bias=False, make=floats)


@cache
def found(memory=None, batch=None, **space):
    batch = floats(ROWS, WIDTH) if batch is None else batch
    given = {"zero": (3,), "remat": (None,), "accumulate": (1, 8), **space}
    args = chain(layer), ff.sharded_adam(1e-3), init, batch, dict(AXES), CPU, memory
    return search(*args, **given)


def test_each_part_is_reduced_where_accumulate_is_outermost():
    stack = Stack(AXES, zero=3, accumulate=8, each=True, compute=torch.bfloat16)
    names = [line.name for line in stack.layers()]
    assert names == ["precision", "shard", "accumulate", "donate"]
    assert "step = ff.accumulate(step, 8)\nstep = ff.donate(step)" in stack.code
    assert str(stack).startswith("data=4: donate(accumulate(shard(precision(")


def test_parts_reduced_at_once_hold_whole_gradients_and_each_does_not():
    both = {(c.stack.accumulate, c.stack.each): c for c in found().tried}
    once, each = both[8, False], both[8, True]
    assert once.peak_bytes - each.peak_bytes > 0.3 * WHOLE
    assert whole_gradients(once.stack, WHOLE) == WHOLE
    assert whole_gradients(each.stack, WHOLE) == 0


def test_activations_of_one_plan_spare_others():
    least = min(c.peak_bytes for c in found().tried)
    fits = found(memory=least, zero=(2, 3))
    spared = {s.stack for s in fits.skipped if "activations as in another" in s.why}
    assert Stack(AXES, zero=3) in spared
    assert Stack(AXES, zero=2) in {c.stack for c in fits.tried}
    # Where nothing fits, the closest is found among those that were spared.
    least = min(c.peak_bytes for c in found(accumulate=(1,)).tried)
    with pytest.raises(ValueError, match="none of 2 stacks fits") as told:
        found(memory=0.9 * least, zero=(2, 3), accumulate=(1,))
    assert f"closest needs {least / 1000:.3g} kB" in str(told.value)


def test_a_batch_is_made_by_a_function():
    made = found(batch=lambda: torch.zeros(ROWS, WIDTH), accumulate=(1,))
    given = found(accumulate=(1,))
    assert [str(c) for c in made.tried] == [str(c) for c in given.tried]

"""What sharded units hold: one unit after the forward, four buffers in the backward."""

import gc
import weakref

import pytest
import torch

import fsfunc as ff
from fsfunc import _torch
from fsfunc.runtime.memory import pool_of
from fsfunc.transforms.gathers import Gathers
from fsfunc.transforms.gradient_sums import GradientSums
from tests.checks import on_ranks, simulated

pytestmark = pytest.mark.usefixtures("collected")
MESH, SIZE = simulated(), 8 * 8 * 4
flat = ff.unit(lambda p, x: torch.tanh(x @ p))


@ff.unit
def nested(p, x):
    """Its own leaf is read again after the inner unit's call."""
    return flat(p["inner"], x @ p["own"]) @ p["own"]


def deep(depth, unit=flat):
    def loss(params, x):
        for p in params:
            x = unit(p, x)
        gc.collect()
        return x.sum()

    w = torch.eye(8) / 2
    return loss, [w + 0 if unit is flat else {"inner": w + 0, "own": w + 0}] * depth


@pytest.mark.parametrize(("unit", "depth"), [(flat, 9), (nested, 3)])
def test_after_the_forward_only_the_last_unit_is_whole(monkeypatch, depth, unit):
    start, fulls, found = Gathers.start_gather, [], []

    def watched(runtime, *given):
        full, work = start(runtime, *given)
        if not ff.recording():  # then without data
            fulls.append(weakref.ref(full))
        return full, work

    def alive():
        return sum(full().nbytes for full in fulls if full() is not None)

    def at_the_end(params, x):
        value = loss(params, x)
        if ff.axis_index("data") == 0 and not ff.recording():
            found.append(alive())
        return value

    monkeypatch.setattr(Gathers, "start_gather", watched)
    loss, params = deep(depth, unit)
    params = ff.tree.map(torch.clone, params)
    step = ff.shard(ff.value_and_grad(at_the_end), MESH, "data")
    on_ranks(step, params, torch.ones(4, 8), mesh=MESH, calls=2)
    gc.collect()
    # Two ranks share this process: one keeps its last unit's buffer, the other may be
    # in its last call still, with an inner unit's and its own.
    most = 2 if unit is flat else 3
    assert len(found) == 2 and all(0 < n <= most * SIZE for n in found), found
    assert alive() == 0


def test_buffers_in_the_backward_are_bounded(monkeypatch):
    """At most this unit, the next gather, its gradient and the one being reduced."""
    loss, params = deep(10)
    peak, collect = [], GradientSums.pack

    def watched(sums, *args):
        buffer = collect(sums, *args)
        if sums.groups.where.rank == 0:
            peak.append(sum(size for size, *_ in sums.pool.storages))
        return buffer

    monkeypatch.setattr(GradientSums, "pack", watched)
    step = ff.shard(ff.value_and_grad(loss), MESH, "data")
    params = ff.tree.map(torch.clone, params)
    on_ranks(step, params, torch.ones(4, 8), mesh=MESH, calls=3)
    assert max(peak) <= 4 * SIZE, max(peak) / SIZE


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_forward_keeps_two_free_buffers(zero):
    """What reductions took is no part of the peak, where activations are most."""
    loss, params = deep(10)
    kept = []

    def noted(p, x):
        if not ff.recording() and ff.axis_index("data") == 0:
            pool = pool_of(MESH, 0)
            kept.append(
                sum(_torch.storage_uses_by_key(key) == 1 for _, key, _ in pool.storages)
            )
        return loss(p, x)

    step = ff.shard(ff.value_and_grad(noted), MESH, "data", zero=zero)
    params = ff.tree.map(torch.clone, params)
    on_ranks(step, params, torch.ones(4, 8), mesh=MESH, calls=3)
    assert len(kept) == 3
    assert max(kept) <= 2

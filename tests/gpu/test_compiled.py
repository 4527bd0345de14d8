"""Compiled units and a compiled step on a card: near the plain ones.

Each is compiled once, in a worker of its own: that takes tens of seconds.
"""

import pytest
import torch

import fsfunc as ff
from tests.checks import simulated
from tests.gpu.programs import DEVICE, close, layer, on_ranks, step_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiler():
    """Begins with nothing compiled; without Triton a card has no compiler."""
    if DEVICE.type == "cuda":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.xdist_group("units")
def test_compiled_units_are_near_the_plain_ones():
    """Over ranks and in a recompute, with what is sent as without."""
    mesh = simulated(2)
    step = ff.shard(ff.remat(step_of(layer)), mesh, "data")
    with ff.ledger() as plain:
        expected = on_ranks(step, mesh)
    with ff.ledger() as log:
        found = on_ranks(ff.jit(step), mesh)
    close(found, expected, 1e-4)
    assert log.table() == plain.table()


@pytest.mark.slow
@pytest.mark.xdist_group("steps")
def test_a_compiled_step_is_near_the_plain_one():
    """Donated, with gathers and reductions in its graph."""
    mesh = simulated(2)
    step = ff.shard(step_of(layer), mesh, "data")
    expected = on_ranks(step, mesh)
    found = on_ranks(ff.donate(ff.jit(step, whole_step=True)), mesh)
    close(found, expected, 1e-4)

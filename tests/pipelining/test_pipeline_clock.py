"""A clock around a pipeline's run sees every action of its schedule."""

import pytest
import torch

import fsfunc as ff
from fsfunc.pipelining.transfers import with_transfers
from tests.checks import simulated
from tests.models import chain, layers, linear

MESH = simulated(pipe=2)
S = ff.schedules


def run(schedule, m):
    step = ff.value_and_grad(chain(linear))
    step = ff.pipeline(step, MESH, "pipe", n_microbatches=m, schedule=schedule)
    with ff.clock() as events:
        step(layers(4), torch.ones(4, 4))
    return events


@pytest.mark.parametrize("schedule", [S.gpipe, S.zb_v])
def test_it_sees_every_action_of_the_schedule(schedule):
    """The gradients that leave before their backward's end, too."""
    n = 4 if schedule is S.zb_v else 2
    rows = with_transfers(schedule(n, 4), {(s, s + 1) for s in range(n - 1)})
    with ff.clock() as outer:
        every = ff.spmd(lambda: run(schedule, 4), MESH)()
    for row, events in zip(rows, every, strict=True):
        assert sorted(e.action for e in events) == sorted(row)
    # One around all ranks sees what theirs see.
    assert sorted(outer) == sorted(e for events in every for e in events)

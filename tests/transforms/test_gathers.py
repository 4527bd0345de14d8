"""Gathers are sent for while the unit before computes, forward and backward."""

import pytest

import fsfunc as ff
from fsfunc.planning.events import Ran, Started, Waited
from tests.checks import simulated
from tests.models import WIDTH, chain, integers, layers, linear, train_step

MESH = simulated(data=2)
LAYERS = 4
OPTIMIZER = ff.sgd(0.5)
STEP = train_step(chain(linear), OPTIMIZER)
BATCH = integers(4, WIDTH, seed=9, high=1)


def computed_beside(step):
    """Of each gather of a step, in order, what computes while it is under way."""
    events = ff.plan(step, lambda: layers(LAYERS), OPTIMIZER, BATCH).ranks[0].events
    ends = {e.number: i for i, e in enumerate(events) if isinstance(e, Waited)}
    found = []
    for start, e in enumerate(events):
        if isinstance(e, Started) and e.record and e.record.op == "all_gather":
            end = ends[e.number]
            found.append({x.phase for x in events[start:end] if isinstance(x, Ran)})
    return found


@pytest.mark.parametrize("remat", [False, True])
def test_all_but_the_first_of_each_pass_run_beside_a_unit(remat):
    step = ff.shard(ff.remat(STEP) if remat else STEP, MESH, "data")
    first, *rest = computed_beside(step)
    # The last unit's is still there; of the first one a backward reads no parameter.
    assert not first and len(rest) == 2 * LAYERS - (2 if remat else 3)
    forward, backward = rest[: LAYERS - 1], rest[LAYERS - 1 :]
    assert all("forward" in phases for phases in forward)
    assert all(phases & {"backward", "recompute"} for phases in backward)

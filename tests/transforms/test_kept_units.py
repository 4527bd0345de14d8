"""Units that stay gathered from forward to backward, each by its name or its paths."""

from collections import Counter

import pytest
import torch

import fsfunc as ff
from tests.checks import all_refused, same, simulated, trained
from tests.models import WIDTH, chain, integers, layers, linear, train_step
from tests.planning.comparing import facts, planned_and_run

OPTIMIZER = ff.sgd(0.5)
PARAMS = layers(5, make=lambda *shape, **more: integers(*shape, **more, high=1))
BATCH = integers(8, WIDTH, seed=9, high=1)
STEP = train_step(chain(linear), OPTIMIZER)
KEPT = {"[12]/*": False}


def data(f, mesh, again=KEPT, **options):
    return ff.shard(f, mesh, "data", reshard_after_forward=again, **options)


def pipe(f, mesh):
    return ff.pipeline(f, mesh, "pipe", n_microbatches=2, stages=[4, 1])


def wide(f):
    return ff.precision(f, torch.float64)


# The step, and how often a rank gathers: units 1 to 3 again in the backward, less those
# that are kept, each microbatch anew. A recompute reads the first unit's too.
STACKS = {
    "shard": (data, {5 + 1}),
    "shard, all but one": (
        lambda f, mesh: data(f, mesh, {"2/w": True, "linear": False}),
        {5 + 1},
    ),
    "shard, none fits first": (
        lambda f, mesh: data(f, mesh, {"**": True, "linear": False}),
        {5 + 3},
    ),
    "shard(remat)": (lambda f, mesh: data(ff.remat(f), mesh), {5 + 2}),
    "remat(shard)": (lambda f, mesh: ff.remat(data(f, mesh)), {5 + 2}),
    "shard(accumulate)": (lambda f, m: data(ff.accumulate(f, 2), m), {2 * (5 + 1)}),
    "accumulate(shard)": (lambda f, m: ff.accumulate(data(f, m), 2), {2 * (5 + 1)}),
    "precision": (lambda f, mesh: data(wide(f), mesh), {5 + 1}),
    "offload": (lambda f, mesh: ff.offload(data(f, mesh), params="host"), {5 + 1}),
    # Units 0 and 1 lie in one buffer, 2 and 3 in another.
    "small units together": (
        lambda f, mesh: data(f, mesh, {"1/w": False}, min_bytes=120),
        {3 + 1},
    ),
    "all zero=2": (lambda f, mesh: data(f, mesh, zero=2), {5}),
    # The rank of the first four units, which has the last one still, and that of the
    # last.
    "shard(pipeline)": (lambda f, mesh: data(pipe(f, mesh), mesh), {2 * 4 + 1, 2}),
    "pipeline(shard)": (lambda f, mesh: pipe(data(f, mesh), mesh), {2 * 4 + 1, 2}),
}


@pytest.mark.parametrize("name", STACKS)
def test_equals_one_device_and_sends_what_was_promised(name):
    stack, counts = STACKS[name]
    mesh = simulated(data=2, pipe=2) if "pipeline" in name else simulated(data=2)
    one, _ = STEP(ff.TrainState(PARAMS, OPTIMIZER.init(PARAMS)), BATCH)
    gathers, first = set(), lambda state: ff.unshard(state.params)
    how = {"mesh": mesh, "call": planned_and_run, "look": first}
    for run in trained(stack(STEP, mesh), lambda: PARAMS, OPTIMIZER, BATCH, **how):
        same(run.seen[0], one.params)
        for both in run.logs:  # the second one gathers ahead
            assert facts(both.plan.ranks[0].records) == facts(both.sent)
            if "pipeline" not in name:
                both.check()
        gathers.add(sum(r.op == "all_gather" for r in run.logs[-1].sent))
    assert gathers == counts


def test_what_is_kept_is_held_to_its_backward():
    peaks = []
    for again in (True, KEPT, {"[1-4]/w": False}):
        step = data(STEP, simulated(data=2), again)
        plan = ff.plan(step, lambda: layers(12), OPTIMIZER, BATCH[:4])
        peaks.append(plan.peak_bytes)
    unit = (WIDTH * WIDTH + WIDTH) * 4
    assert [peak - peaks[0] for peak in peaks] == [0, 2 * unit, 4 * unit]


def test_a_kept_gather_of_two_levels():
    """Across nodes once, within them again for what is not kept whole."""
    mesh, gather = simulated(node=2, data=2), ff.HierarchicalGather("node", keep=True)

    how = {"gather": gather, "reshard_after_forward": KEPT}
    step = ff.shard(STEP, mesh, ("data", "node"), **how)
    how = {"mesh": mesh, "steps": 1, "call": planned_and_run}
    for run in trained(step, lambda: PARAMS, OPTIMIZER, BATCH, **how):
        run.logs[0].check()
        found = Counter(r.axis for r in run.logs[0].sent if r.op == "all_gather")
        assert found == {("node",): 5, ("data",): 5 + 1}


def laid_out(again):
    mesh = ff.make_mesh({"data": 2}, "abstract")
    return ff.plan(data(STEP, mesh, again), lambda: PARAMS, OPTIMIZER, BATCH)


test_bad_input_is_refused = all_refused(
    {
        "no unit": (lambda: laid_out({"head": False}), ValueError, "'linear'"),
        "no path": (lambda: laid_out({"9/w": False}), ValueError, "'4/w'"),
        "no bool": (lambda: laid_out({"linear": 2}), TypeError, "True or False"),
        "a size": (lambda: laid_out(8), TypeError, "True, False, or"),
    }
)

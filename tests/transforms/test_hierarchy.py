"""Gathers and sums of two levels: the flat ones' numbers, by fewer bytes across nodes.

And a narrower dtype on the wire, alone and within levels.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from tests import checks
from tests.checks import all_refused, simulated
from tests.models import chain, floats, layers

WIDTH = 4
loss, PARAMS = chain(), layers(2, WIDTH, make=floats)  # of 20 elements each
BATCH = floats(24, WIDTH, seed=3)
NODES, NEAR = 2, 3
AXES = {"node": NODES, "data": NEAR}
STACKS = {
    "plain": lambda f: f,
    "remat": ff.remat,
    "accumulate": lambda f: ff.accumulate(f, 2),
}


def trained(zero, over=("data", "node"), stack=lambda f: f, axes=AXES, params=PARAMS,
            steps=2, **how):  # fmt: skip
    """Parameters after some steps; the last one's bytes by axis and kind."""
    mesh, optimizer = simulated(**axes), ff.sgd(0.1)
    if how.pop("owing", False):
        optimizer = ff.error_feedback(optimizer)
    step = stack(optimizer(ff.value_and_grad(loss)))
    step = ff.shard(step, mesh, over, zero=zero, **how)
    ops = "all_gather", "psum_scatter", "psum", "all_to_all"

    def spent(log):
        return {(a, op): log.bytes(a, op=op) for a in (*axes, over) for op in ops}

    runs = checks.trained(step, params, optimizer, BATCH, mesh=mesh, steps=steps)
    rows = BATCH[: len(BATCH) // mesh.size]
    planned = ff.plan(step, lambda: params, optimizer, rows, mesh=mesh)
    assert spent(planned) == spent(runs[0].logs[-1])
    return [(run.params, spent(run.logs[-1])) for run in runs]


@settings(max_examples=5)
@given(
    zero=st.integers(0, 3),
    over=st.permutations(["node", "data"]),
    stack=st.sampled_from(sorted(STACKS)),
    keep=st.booleans(),
)
@example(zero=3, over=["node", "data"], stack="remat", keep=True)
def test_levels_give_what_one_gather_and_one_sum_give(zero, over, stack, keep):
    over, around = tuple(over), STACKS[stack]
    (wanted, flat), *_ = trained(zero, over, around)
    how = {
        "gather": ff.HierarchicalGather("node", keep=keep),
        "reduction": ff.HierarchicalReduction("node"),
    }
    ranks, padded = NODES * NEAR, 4 * -(-20 // 6) * 6 if zero else 4 * 20
    gathers = flat[over, "all_gather"] / ((ranks - 1) / ranks * padded)
    across = 2 if keep and zero == 3 else gathers  # one a unit
    assert gathers >= across and gathers == round(gathers)
    for found, spent in trained(zero, over, around, **how):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        share = padded / ranks
        assert spent[over, "all_gather"] == 0 == spent[over, "psum_scatter"]
        if zero:
            assert spent["node", "all_gather"] == across * (NODES - 1) * share
            near = gathers * (NEAR - 1) * NODES * share
            assert spent["data", "all_gather"] == pytest.approx(near)
            assert spent["node", "psum_scatter"] == 2 * (NODES - 1) * share
            near = 2 * (NEAR - 1) * NODES * share
            assert spent["data", "psum_scatter"] == pytest.approx(near)
        else:
            within = 4 * -(-20 // NEAR)  # of each of both
            assert spent["node", "psum"] == 2 * within * 2 * (NODES - 1) / NODES
            assert spent["data", "psum_scatter"] == 2 * within * (NEAR - 1)
            assert spent["data", "all_gather"] == 2 * within * (NEAR - 1)


def test_eight_bits_in_two_levels_are_near_the_sum():
    over = ("data", "node")
    (wanted, flat), *_ = trained(3, over)
    how = {
        "gather": ff.HierarchicalGather("node", ff.QuantizedGather(4), keep=True),
        "reduction": ff.HierarchicalReduction("node", ff.QuantizedReduction(4)),
    }
    for owing in (False, True):
        for found, spent in trained(3, over, **how, owing=owing):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0.004)
            assert not torch.equal(found[0]["w"], wanted[0]["w"])
            share = 8  # bytes for the 4 elements of a range
            assert spent["node", "all_gather"] == 2 * (NODES - 1) * share
            assert spent["node", "all_to_all"] == 2 * (NODES - 1) * share
            near = 2 * (NEAR - 1) * NODES * share
            assert spent["data", "all_to_all"] == pytest.approx(near)


def test_three_levels():
    axes = {"node": 2, "rack": 2, "data": 2}
    how = {
        "gather": ff.HierarchicalGather("node", keep=True),
        "reduction": ff.HierarchicalReduction("node"),
    }
    over = ("rack", "node", "data")
    (wanted, _), *_ = trained(3, over, axes=axes)
    for found, _ in trained(3, over, axes=axes, **how):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


MESH = ff.make_mesh(AXES, "simulated")
LEVELS = {
    "gather": ff.HierarchicalGather("node"),
    "reduction": ff.HierarchicalReduction("node"),
}
NARROW = ff.HierarchicalReduction("node", ff.QuantizedReduction())


test_bad_input_is_refused = all_refused({
    **{
        kind: (
            lambda k=kind: ff.shard(loss, MESH, "data", **{k: LEVELS[k]}),
            ValueError, "give it both axes",
        )
        for kind in LEVELS
    },
    "narrow at zero=0": (
        lambda: ff.shard(loss, MESH, ("data", "node"), zero=0, reduction=NARROW),
        ValueError, "zero=1, 2 or 3",
    ),
})  # fmt: skip

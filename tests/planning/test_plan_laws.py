"""Laws of plans over drawn models, meshes and transforms: a plan is what runs."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from tests.checks import held, same, unchanged
from tests.pipelining import test_pipeline_laws as piped
from tests.pipelining.models import batch_of as rows_of
from tests.planning.comparing import facts, own, planned_and_run
from tests.transforms.models import SPECS, Spec, batch_of
from tests.transforms.test_shard_laws import (
    ORDERS,
    SEEDS,
    data_axes,
    places,
    transformed,
)

pytestmark = pytest.mark.usefixtures("uncollected")

HALF, FULL = "bfloat16", "float32"
DTYPES = st.sampled_from([None, None, (HALF, None), (HALF, FULL)])


def stepped(spec, params, frozen, batch, drawn):
    """(a step of drawn transforms, its first state, all that it is called with)."""
    (mesh, axis, options), order, dtypes, donated = drawn
    optimizer = ff.sharded_adam(0.01)

    def train(state, frozen, batch):
        loss, grads = ff.value_and_grad(spec.loss)(state.params, frozen, batch)
        return state.apply_gradients(grads, optimizer), loss

    step = transformed(train, order, mesh, axis, options)
    if dtypes is not None:
        step = ff.precision(step, *(d and getattr(torch, d) for d in dtypes))
    if donated:
        step = ff.donate(step)
    mine = own(ff.local_batch(batch, mesh, data_axes(axis, options)))

    def called(params, frozen):
        return step(ff.TrainState(params, optimizer.init(params)), frozen, mine)

    base = ff.place(lambda f: called(params, f), frozen)
    placed = ff.place(called, params, base)
    return step, ff.TrainState(placed, optimizer.init(placed)), (base, mine)


def over_two(**options):
    """Two ranks; ``options`` of ``shard``."""
    return ff.make_mesh({"data": 2}, "simulated"), "data", {"replicate": None} | options


# Each microbatch gathers in the order of the one before.
LEARNING = over_two(zero=3, reshard_after_forward=False, min_bytes=40)
NESTED = Spec(layers=(("e", "i"),), nested=True, whole=True)
# A part in one dtype lies in the whole of another.
CASTING = over_two(zero=2, reshard_after_forward=False, min_bytes=0)
# What a reduction brought is cast when nothing else holds it any more.
FOUR = ff.make_mesh({"a": 2, "b": 2}, "simulated")
COPIED = FOUR, "b", {"replicate": "a", "zero": 0}
WIDE = Spec(layers=(("b", "e", "wide"),))


@example(WIDE, COPIED, ("shard",), (HALF, None), True, 0)
@example(NESTED, LEARNING, ("shard", "remat", "accumulate"), None, True, 48259)
@example(Spec(tied=True, outside=True), CASTING, ("shard",), (HALF, FULL), True, 490261)
@given(SPECS, places(), ORDERS, DTYPES, st.booleans(), SEEDS)
@settings(max_examples=12)
def test_a_plan_is_what_a_step_does(spec, place, order, dtypes, donated, seed):
    """Record by record, byte by byte; the first step gathers otherwise than others."""
    mesh = place[0]
    params, frozen = spec.params(seed), spec.frozen_params(seed)
    batch = batch_of(4 * mesh.size, seed)

    def main():
        drawn = place, order, dtypes, donated
        step, state, rest = stepped(spec, params, frozen, batch, drawn)
        found = []
        for _ in range(2):
            found.append(planned_and_run(step, state, *rest))
            state, _ = found[-1].out
        return found

    for found in ff.spmd(main, mesh)():
        for both in found:
            both.check()
            assert both.plan.ranks[0].peak_bytes == both.plain.ranks[0].peak_bytes


@pytest.mark.slow  # test_plan.py has what it claims, one by one
@given(SPECS, places(), ORDERS, st.booleans(), SEEDS)
@settings(max_examples=8)
def test_a_plan_leaves_no_trace(spec, place, order, donated, seed):
    """Two steps have the same bits, and send the same, with plans in between."""
    mesh = place[0]
    params, frozen = spec.params(seed), spec.frozen_params(seed)
    batch = batch_of(4 * mesh.size, seed)

    def main(plans):
        drawn = place, order, None, donated
        step, state, rest = stepped(spec, params, frozen, batch, drawn)
        found, sent = [], []
        for repeat in True, False:
            if plans:
                with unchanged(state, rest):
                    ff.plan(step, state, *rest, repeat=repeat)
            with ff.ledger() as log:
                state, loss = step(state, *rest)
            found += held((state, loss))
            sent += facts(log.records)
        return found, sent

    without, planned = (ff.spmd(main, mesh)(plans) for plans in (False, True))
    for (expected, sent), (found, told) in zip(without, planned, strict=True):
        same(found, expected)
        assert told == sent


@given(piped.pipelines(), st.integers(0, 1), SEEDS)
@settings(max_examples=10)
def test_a_plan_of_a_pipeline_is_what_each_rank_does(drawn, k, seed):
    ranks, m, schedule, stages, spec = drawn
    params, batch = spec.params(seed), rows_of(m * 2**k, seed)
    mesh, transform = piped.on(ranks, m, schedule, stages)

    def main():
        grad = transform(spec.gradient())
        arguments = spec.arguments(params, batch)
        at = (spec.argnums if isinstance(spec.argnums, int) else 0) and 1

        def of(params):
            return grad(*arguments[:at], params, *arguments[at + 1 :])

        placed = ff.place(of, params)
        given = (*arguments[:at], placed, *arguments[at + 1 :])
        return [planned_and_run(grad, *given) for _ in range(2)]

    for found in ff.spmd(main, mesh)():
        for both in found:
            plan, plain = both.plan.ranks[0], both.plain.ranks[0]
            assert facts(plan.records) == facts(both.sent)
            assert facts(plain.records) == facts(both.sent)
            assert plan.flops() == plain.flops()

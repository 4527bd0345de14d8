"""Laws of plans over drawn models, meshes and transforms: a plan is what runs."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.testing import strategies as draw
from fsfunc.testing.drawn_models import DrawnModel, DrawnStack, rows
from tests.models import train_step
from tests.pipelining import test_pipeline_laws as piped
from tests.pipelining.models import batch_of as rows_of
from tests.planning.comparing import facts, own, planned_and_run

pytestmark = pytest.mark.usefixtures("uncollected")

HALF, FULL = "bfloat16", "float32"
DTYPES = st.sampled_from([None, None, (HALF, None), (HALF, FULL)])


def stepped(spec, params, frozen, batch, drawn):
    """(a step of drawn transforms, its first state, all that it is called with)."""
    stack, dtypes, donated = drawn
    optimizer = ff.sharded_adam(0.01)
    step = stack(train_step(spec.loss, optimizer))
    if dtypes is not None:
        step = ff.precision(step, *(d and getattr(torch, d) for d in dtypes))
    if donated:
        step = ff.donate(step)
    mine = own(ff.local_batch(batch, stack.mesh, stack.axes))

    def called(params, frozen):
        return step(ff.TrainState(params, optimizer.init(params)), frozen, mine)

    base = frozen and ff.place(lambda f: called(params, f), frozen)
    placed = ff.place(called, params, base)
    return step, ff.TrainState(placed, optimizer.init(placed)), (base, mine)


STACKS = draw.meshes(("a", "b"), max_size=4).flatmap(draw.transform_stacks)
ONE = ff.make_mesh({"data": 2}, "simulated")


def over_two(*order, **options):
    """Two ranks; ``options`` of ``shard``."""
    return DrawnStack(ONE, order or ("shard",), "data", options)


# Each microbatch gathers in the order of the one before.
LEARNING = over_two(
    "shard", "remat", "accumulate", zero=3, reshard_after_forward=False, min_bytes=40
)
NESTED = DrawnModel(layers=(("e", "i"),), nested=True, whole=True)
# A part in one dtype lies in the whole of another.
CASTING = over_two(zero=2, reshard_after_forward=False, min_bytes=0)
# What a reduction brought is cast when nothing else holds it any more.
FOUR = ff.make_mesh({"a": 2, "b": 2}, "simulated")
COPIED = DrawnStack(FOUR, ("shard",), "b", {"replicate": "a", "zero": 0})
WIDE = DrawnModel(layers=(("b", "e", "wide"),))


@example(WIDE, COPIED, (HALF, None), True, 0)
@example(NESTED, LEARNING, None, True, 48259)
@example(DrawnModel(tied=True, outside=True), CASTING, (HALF, FULL), True, 490261)
@given(draw.models(), STACKS, DTYPES, st.booleans(), draw.seeds)
@settings(max_examples=4)
def test_a_plan_is_what_a_step_does(spec, stack, dtypes, donated, seed):
    """Record by record, byte by byte; the first step gathers otherwise than others."""
    params, frozen = spec.params(seed), spec.frozen_params(seed)
    batch = rows(4 * stack.mesh.size, seed)

    def main():
        drawn = stack, dtypes, donated
        step, state, rest = stepped(spec, params, frozen, batch, drawn)
        found = []
        for _ in range(2):
            found.append(planned_and_run(step, state, *rest))
            state, _ = found[-1].out
        return found

    for found in ff.spmd(main, stack.mesh)():
        for both in found:
            both.check()


@given(piped.pipelines(), st.integers(0, 1), draw.seeds)
@settings(max_examples=4)
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
            assert facts(both.plan.ranks[0].records) == facts(both.sent)


def test_a_tensor_of_a_closure_that_a_step_writes_stays_as_it_was():
    mesh = ff.make_mesh({"data": 2}, "simulated")
    unit = ff.unit(lambda w, x: (x @ w).square().mean())

    def main():
        kept = torch.full((2,), 8.0)
        first = kept[0]

        def step(w, x):
            kept.mul_(0.5)
            first.add_(1)  # in the same memory
            return ff.value_and_grad(lambda w, x: unit(w, x - kept))(w, x)[1]

        f = ff.shard(step, mesh, "data")
        x = torch.ones(2, 2)
        w = ff.place(f, torch.ones(2, 1), x)
        seen = [kept.tolist()]
        ff.plan(f, w, x)
        seen.append(kept.tolist())
        f(w, x)
        return [*seen, kept.tolist()]

    for before, planned, stepped in ff.spmd(main, mesh)():
        assert before == planned == [8.0, 8.0]
        assert stepped == [5.0, 4.0]

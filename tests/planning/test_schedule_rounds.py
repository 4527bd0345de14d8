"""Rounds of a pipeline that a plan notes without running them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from tests.models import chain, floats, layer, layers
from tests.planning.test_rounds import (
    FACTS,
    MESH,
    SHARDED,
    WIDTH,
    planned,
    trained,
    weighted,
)

pytestmark = pytest.mark.usefixtures("uncollected")

M = 6
PIPE = ff.make_mesh({"pipe": 2}, "abstract")
BOTH = ff.make_mesh({"pipe": 2, "data": 2}, "abstract")


def piped(step, n=M, mesh=PIPE, **how):
    return ff.pipeline(step, mesh, "pipe", n_microbatches=n, **how)


def sharded(step, zero):
    return ff.shard(step, BOTH, "data", zero=zero)


def around(zero):
    return lambda step: sharded(piped(step, mesh=BOTH), zero)


def within(zero):
    return lambda step: piped(sharded(step, zero), mesh=BOTH)


def scheduled(name, stages=2):
    how = {"schedule": getattr(ff.schedules, name)(stages, 12)}
    return lambda step: piped(step, 12, **how)


STACKS = {
    "alone": piped,
    "remat": lambda step: piped(ff.remat(step)),
    "except last": lambda step: piped(ff.remat(step, policy="except_last")),
    "offload": lambda step: piped(ff.offload(step, activations="host")),
    "precision": lambda step: piped(ff.precision(step, torch.bfloat16)),
    "jit": lambda step: ff.jit(piped(step)),
    "accumulated": lambda step: ff.accumulate(piped(step, 3), 4),
    "zb_h1": scheduled("zb_h1"),
    "zb_v": scheduled("zb_v", 4),
    "interleaved": scheduled("interleaved_1f1b", 4),
    **{f"around {zero}": around(zero) for zero in (0, 2, 3)},
    **{f"within {zero}": within(zero) for zero in (0, 1, 3)},
}


def both(build, loss, monkeypatch, **how):
    """What plans say that run every microbatch and not, and how many bodies ran."""
    found = []
    for every in (True, False):
        step = build(trained(loss()))
        found.append(planned(step, monkeypatch, every=every, **how))
    (plain, every), (quick, run) = found
    assert all(a == b for a, b in zip(quick, plain, strict=True))
    return every, run


@pytest.mark.parametrize("name", STACKS)
def test_a_round_that_is_not_run_is_noted_as_it_would_be(name, monkeypatch):
    mesh = BOTH if name.split()[0] in ("around", "within") else PIPE
    how = {"mesh": mesh, "rows": 4 * 36, "depth": 4}
    every, run = both(STACKS[name], lambda: chain(layer), monkeypatch, **how)
    assert run < every


def test_results_of_microbatches_that_are_not_run(monkeypatch):
    every, run = both(piped, lambda: weighted, monkeypatch, mesh=PIPE)
    assert run < every


def test_microbatches_of_unlike_sizes_are_all_run(monkeypatch):
    how = {"mesh": PIPE, "rows": 4 * M - 3}
    every, run = both(piped, lambda: chain(layer), monkeypatch, **how)
    assert run == every


class Last(ff.Interpretation):
    """Does more in the last microbatch, of which the library knows nothing."""

    called = "last"

    def unit(self, run, call):
        last = all(i == n - 1 for i, n in call.frame.micro)
        return lambda p, x: run(p, x * 2 if last else x)


def test_a_transform_of_ones_own_may_look_for_the_last_microbatch(monkeypatch):
    build = lambda step: ff.accumulate(ff.transformed(step, Last()), M)  # noqa: E731
    every, run = both(build, lambda: chain(layer), monkeypatch)
    assert run < every


@pytest.mark.parametrize("zero", [0, 3])
def test_two_gradient_calls_gather_in_their_order(zero, monkeypatch):
    """The second begins where the last microbatch of the first has ended."""

    def twice(loss):
        def step(state, x):
            first = ff.value_and_grad(loss)(state.params, x)[1]
            second = ff.value_and_grad(loss)(state.params, x + 1)[1]
            grads = ff.tree.map(torch.add, first, second)
            return state.apply_gradients(grads, ff.sharded_adam(1e-3))

        return step

    found = []
    for every in (True, False):
        step = ff.shard(twice(chain(layer)), MESH, "data", zero=zero)
        found.append(planned(ff.accumulate(step, M), monkeypatch, every=every))
    assert found[0][0] == found[1][0] and found[1][1] < found[0][1]


WITHIN = {
    "remat": ff.remat,
    "except_last": lambda step: ff.remat(step, policy="except_last"),
    "precision": lambda step: ff.precision(step, torch.bfloat16),
    "offload": lambda step: ff.offload(step, activations="host"),
    "jit": ff.jit,
}
SCHEDULES = "gpipe", "one_f_one_b", "zb_h1", "looped_bfs", "interleaved_1f1b", "zb_v"


@st.composite
def looped(draw):
    """(what makes a step of a loss a stack with a loop, its mesh, rows, layers)."""
    names = draw(st.lists(st.sampled_from(sorted(WITHIN)), max_size=2, unique=True))
    zero, n = draw(st.sampled_from([None, 0, 1, 2, 3])), draw(st.integers(3, 9))
    schedule, inner = draw(st.sampled_from([None, *SCHEDULES])), draw(st.booleans())
    again = draw(st.booleans())
    mesh = MESH if schedule is None else BOTH

    def loop(step):
        if schedule is None:
            return ff.accumulate(step, n)
        stages = 2 if SCHEDULES.index(schedule) < 3 else 4
        how = {"schedule": getattr(ff.schedules, schedule)(stages, n)}
        step = ff.pipeline(step, mesh, "pipe", n_microbatches=n, **how)
        return ff.accumulate(step, 3) if again else step

    def shard(step):
        return step if zero is None else ff.shard(step, mesh, "data", zero=zero)

    def stack(step):
        for name in names:
            step = WITHIN[name](step)
        return loop(shard(step)) if inner else shard(loop(step))

    return stack, mesh, 6 * n, draw(st.integers(4, 5))


@given(looped(), st.booleans())
@settings(max_examples=4)
def test_plans_of_any_stack_are_those_of_all_its_microbatches(drawn, weighs):
    """Event for event, and byte for byte."""
    stack, mesh, rows, depth = drawn
    step = stack(trained(weighted if weighs else chain(layer)))
    found = []
    for every in (True, False):
        args = step, lambda: layers(depth, WIDTH, make=floats), SHARDED
        plan = ff.plan(
            *args, torch.zeros(rows, WIDTH), mesh=mesh, every_microbatch=every
        )
        found.append([getattr(r, fact) for r in plan.ranks for fact in FACTS])
    assert all(a == b for a, b in zip(*found, strict=True))

"""Laws of ``pipeline`` over drawn losses, cuts and schedules: it equals one device."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device, exact, residues
from fsfunc.testing.strategies import valid_schedules
from tests.checks import close, same
from tests.covering import examples
from tests.pipelining import drawn as glue
from tests.pipelining.models import NAMED, batch_of, specs

one_f_one_b = ff.schedules.one_f_one_b
SEEDS = st.integers(0, 2**20)


@st.composite
def pipelines(draw, most=3):
    """(ranks, microbatches, schedule, stages, loss)."""
    ranks, m = draw(st.integers(1, most)), draw(st.integers(1, 4))
    name = draw(st.sampled_from([*NAMED, "by hand"]))
    if name == "by hand":
        n_stages = draw(st.integers(ranks, 2 * ranks))
        schedule = draw(valid_schedules(ranks, n_stages, m))
    else:
        schedule, chunks = NAMED[name]
        n_stages = ranks * chunks
    spec = draw(specs(n_stages))
    stages = None
    if n_stages > 1 and draw(st.booleans()):
        count = n_stages - 1
        inner = st.integers(1, spec.n_calls - 1)
        cuts = draw(st.sets(inner, min_size=count, max_size=count))
        ends = [0, *sorted(cuts), spec.n_calls]
        stages = [b - a for a, b in itertools.pairwise(ends)]
    return ranks, m, schedule, stages, spec


def on(ranks, m, schedule, stages):
    """(mesh, transform) of a drawn pipeline."""
    mesh = ff.make_mesh({"pipe": ranks}, "simulated")

    def transform(f):
        return ff.pipeline(
            f, mesh, "pipe", n_microbatches=m, schedule=schedule, stages=stages
        )

    return mesh, transform


def without_draws(spec):
    """The loss without dropout, whose masks differ between one batch and several."""
    steps = (replace(s, kind="layer") if s.kind == "drop" else s for s in spec.steps)
    return replace(spec, steps=tuple(steps))


@given(pipelines(), st.integers(0, 1), st.integers(0, 2), SEEDS)
@settings(max_examples=examples(12))
def test_a_pipelined_gradient_call_has_the_bits_of_one_device(drawn, k, again, seed):
    """Also of units that are recomputed, once, or twice."""
    ranks, m, schedule, stages, spec = drawn
    params, batch = spec.params(seed), batch_of(m * 2**k, seed)
    torch.manual_seed(seed)
    whole_step = ff.accumulate(spec.gradient(), m)
    mesh, transform = on(ranks, m, schedule, stages)
    staged_step = spec.gradient()
    for _ in range(again):
        staged_step = ff.remat(staged_step)
    staged_step = transform(staged_step)
    one, staged = (
        lambda params, batch, f=f: f(*spec.arguments(params, batch))
        for f in (whole_step, staged_step)
    )
    assert_equals_one_device(one, staged, mesh, params, batch, axis=(), calls=1)


@given(pipelines(), st.integers(1, 9), SEEDS)
@settings(max_examples=examples(8))
def test_uneven_microbatches_make_the_mean_over_the_batch(drawn, more, seed):
    ranks, m, schedule, stages, spec = drawn
    spec = without_draws(spec)
    mesh, transform = on(ranks, m, schedule, stages)
    grad = transform(spec.gradient())
    with exact():
        given = residues((spec.params(seed), batch_of(m + more, seed)), seed)
        expected = spec.gradient()(*spec.arguments(*given))
        for found in ff.spmd(lambda: grad(*spec.arguments(*given)), mesh)():
            same(found, expected)


@given(pipelines(), st.integers(0, 9), st.sampled_from([0, 1, 2]), SEEDS)
@settings(max_examples=examples(8))
def test_a_pipelined_loss_is_the_forward_pass(drawn, more, laid, seed):
    """Of whole parameters, or laid out for training in ``laid`` times the parts."""
    ranks, m, schedule, stages, spec = drawn
    spec = replace(without_draws(spec), argnums=0)
    mesh, transform = on(ranks, m, schedule, stages)
    parts = laid * m if callable(schedule) else m  # one by hand is for m of them

    def main(params, batch):
        if laid:
            grad = on(ranks, parts, schedule, stages)[1](spec.gradient())
            rows = batch_of(parts, seed)
            params = ff.place(lambda p: grad(*spec.arguments(p, rows)), params)
        return transform(spec.loss)(*spec.arguments(params, batch))

    with ff.ledger() as log, exact():
        given = residues((spec.params(seed), batch_of(m + more, seed)), seed)
        with torch.no_grad():
            expected = spec.loss(*spec.arguments(*given))
        for found in ff.spmd(main, mesh)(*given):
            same(found, expected)
    assert not any(r.phase == "backward" for r in log.records)


def one_by_one(cuts, count):
    """Counts of unit calls of as many stages, or of fewer where there are fewer."""
    ends = [0, *sorted({c % count for c in cuts} - {0}), count]
    return [b - a for a, b in itertools.pairwise(ends)]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, of a stand-in
@pytest.mark.parametrize("backward", [False, True])
@given(st.data())
@settings(max_examples=examples(15))
def test_a_stage_takes_and_sends_what_it_has_to_whatever_is_between_units(
    backward, data
):
    """Views, writes, buffers, branches: forward, and where autograd can, backward."""
    kinds = (*glue.EXACT, *glue.PARTIAL) + (() if backward else (*glue.WRITES,))
    drawn = data.draw(glue.losses(kinds))
    params, batch = glue.params_of(), glue.batch_of()
    call = ff.value_and_grad(drawn.loss) if backward else torch.no_grad()(drawn.loss)
    expected = call(params, batch)
    cuts = data.draw(st.lists(st.integers(1, 9), max_size=3))
    count = len(ff.program(drawn.loss, params, batch).calls)
    stages = one_by_one(cuts, count)
    mesh, transform = on(len(stages), 1, one_f_one_b, stages)
    step = transform(ff.value_and_grad(drawn.loss) if backward else drawn.loss)

    def main():
        laid = ff.place(step, params, batch)
        return step(params, batch), ff.unshard(step(laid, batch))

    for whole, parts in ff.spmd(main, mesh)():
        same((whole, parts), (expected, expected))


@given(pipelines(), st.integers(0, 5), SEEDS)
@settings(max_examples=examples(8))
def test_masks_depend_on_no_schedule(drawn, more, seed):
    """Dropout in every unit, and microbatches that may be uneven."""
    ranks, m, schedule, stages, spec = drawn
    steps = [replace(s, kind="drop") if k % 2 else s for k, s in enumerate(spec.steps)]
    n_calls = spec.n_calls
    spec = replace(spec, steps=tuple(steps))
    stages = stages if spec.n_calls == n_calls else None
    if spec.n_calls < n_calls:
        schedule, stages = one_f_one_b, None
    params, batch = spec.params(seed), batch_of(m + more, seed)
    found = []
    for size, how, cuts in ((1, one_f_one_b, None), (ranks, schedule, stages)):
        mesh, transform = on(size, m, how, cuts)
        grad = transform(spec.gradient())
        torch.manual_seed(seed)
        found += ff.spmd(lambda g=grad: g(*spec.arguments(params, batch)), mesh)()
    for other in found[1:]:
        close(other, found[0], 0.0 if spec.ends == "sum" else 1e-12)


@pytest.mark.parametrize(
    ("parts", "stack"),
    [
        (4, lambda f, pipe: ff.accumulate(pipe(f), 2)),
        (4, lambda f, pipe: pipe(ff.accumulate(f, 2))),
        (8, lambda f, pipe: ff.accumulate(pipe(ff.accumulate(f, 2)), 2)),
    ],
)
def test_masks_depend_on_no_order_of_loops(parts, stack):
    """Of pipelines and accumulation: each part of the batch has masks of its own."""
    mesh = ff.make_mesh({"pipe": 2}, "simulated")
    params = [torch.full((4,), 2.0), torch.full((4,), 3.0)]
    x = torch.arange(64.0).view(16, 4)
    masked = ff.unit(lambda p, x: torch.nn.functional.dropout(x, 0.5) * p)
    gradient = ff.value_and_grad(lambda p, x: masked(p[1], masked(p[0], x)).sum())
    step = stack(gradient, lambda f: ff.pipeline(f, mesh, "pipe", n_microbatches=2))
    torch.manual_seed(0)
    expected = ff.accumulate(gradient, parts)(params, x)
    torch.manual_seed(0)
    for found in ff.spmd(lambda: step(params, x), mesh)():
        same(found, expected)

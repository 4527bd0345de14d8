"""Stacks are chosen as their plans and estimates say, and say why others were not."""

from __future__ import annotations

import re
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.planning.candidates import least_state_bytes, meshes
from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import CPU, H100
from fsfunc.planning.search_results import front_of
from fsfunc.planning.stack_search import search
from fsfunc.planning.stacks import Choice, Stack
from tests.checks import all_refused, close, simulated, trained
from tests.models import chain, floats, layer, layers, split, splits

WIDTH, ROWS, LAYERS = 32, 8, 4
PARAMETERS = LAYERS * WIDTH * WIDTH * 4  # bytes; the moments are twice that


def init():
    return layers(LAYERS, WIDTH, bias=False, make=floats)


OPTIMIZER = ff.sharded_adam(1e-2)
BATCH = floats(ROWS, WIDTH, seed=1)
loss_fn = chain(layer)
train_step = OPTIMIZER(ff.value_and_grad(loss_fn))


def found(sizes=None, memory=None, hardware=CPU, batch=BATCH, params=init, **space):
    sizes = sizes or {"data": 2}
    return search(loss_fn, OPTIMIZER, params, batch, sizes, hardware, memory, **space)


@cache
def every():
    return found()


def test_figures_are_those_of_plan_and_estimate():
    part = lambda: torch.zeros(ROWS // 2, WIDTH)  # noqa: E731
    for choice in every().tried[::15]:
        mesh = ff.make_mesh(choice.axes, "abstract")
        step = choice.build(train_step, mesh)
        planned = ff.plan(step, init, OPTIMIZER, part, mesh=mesh)
        assert choice.peak_bytes == planned.peak_bytes
        assert choice.seconds == estimate(planned, CPU).seconds
        total = choice.compute + choice.exposed + choice.bubble
        assert choice.seconds == pytest.approx(total)


def test_the_whole_space_is_tried():
    made = every()
    options = lambda s: (s.zero, s.remat, s.accumulate, s.reduces_each)  # noqa: E731
    stacks = {options(c.stack) for c in made.tried}
    skipped = {options(s.stack) for s in made.skipped}
    space = {
        (zero, policy, n, each)
        for zero in range(4)
        for policy in (None, "always")
        for n in (1, 2, 4)
        for each in ((False, True) if zero > 1 and n > 1 else (False,))
    }
    assert stacks | skipped == space and not stacks & skipped
    assert all("saves no memory" in s.reason for s in made.skipped)
    assert list(made) == front_of(made.tried) and made.best is made[0] is made.ranked[0]
    assert len(made.ranked) == len(made.tried) and len(made.rows()) == len(made)
    assert f"{len(made.tried)} stacks planned" in made.table()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1))
def test_front_against_its_definition(points):
    stack = Stack((("data", 1),))
    choices = [Choice(stack, seconds, peak, True) for seconds, peak in points]
    better = {
        (s, p)
        for s, p in points
        if not any((t, q) != (s, p) and t <= s and q <= p for t, q in points)
    }
    front = [(c.seconds, c.peak_bytes) for c in front_of(choices)]
    assert front == sorted(better)


def test_what_does_not_fit_one_rank_fits_another_stack():
    few = {"accumulate": (1, 2)}
    whole = found({"data": 1}, **few).ranked
    least = min(c.peak_bytes for c in whole)
    bound = 0.7 * least
    with pytest.raises(ValueError, match="none of .* fits"):
        found({"data": 1}, memory=bound, **few)
    fits = found({"data": 4}, memory=bound, **few)
    assert fits.best.peak_bytes <= bound and fits.best.stack.zero in (1, 2, 3)
    assert all(c.fits == (c.peak_bytes <= bound) for c in fits.tried)
    assert not any(s.stack.zero == 3 for s in fits.skipped if s.least_bytes)

    trains_as_one_device(fits.best, train_step, init, BATCH)


def trains_as_one_device(choice, train, init, batch, dim=0):
    """``dim``: the batch's that is cut."""
    mesh = simulated(**choice.axes)
    step = choice.build(by_first(train, dim), mesh)
    how = {"mesh": mesh, "layouts": choice.stack.layouts}
    given = init, OPTIMIZER, batch.transpose(0, dim)
    wanted = trained(by_first(train, dim), *given, mesh=simulated(1))[0].outs
    for run in trained(step, *given, **how):
        close(run.outs, wanted, 1e-5)


def by_first(train, dim):
    """A step of a batch whose first dim is this one."""
    return lambda state, batch: train(state, batch.transpose(0, dim))


def split_search(sizes, memory=None, **given):
    """Of an MLP whose features can be split, in parts of its rows of three axes."""
    init = lambda: [  # noqa: E731
        {"up": floats(64, 32, seed=k), "down": floats(32, 64, seed=k + 9)}
        for k in range(2)
    ]
    given = {"layouts": SPLITS, "dims": {"context": 1}, **given}
    given |= {"accumulate": (1,), "remat": (None,), "microbatches": (2,)}
    batch = floats(8, 4, WIDTH, seed=1)
    loss = chain(split)
    space = {"schedules": ("one_f_one_b",), "zero": (0, 3), **given}
    return search(loss, OPTIMIZER, init, batch, sizes, CPU, memory, **space), (
        OPTIMIZER(ff.value_and_grad(loss)), init, batch,
    )  # fmt: skip


SPLITS = splits("*/")


def test_layers_and_sequences_are_split_too():
    found, (train, init, batch) = split_search(4)
    axes = {c.stack.axes for c in found.tried}
    assert axes == set(meshes(4, CPU, ("context", "model"))) - {
        (("pipe", 4), ("context", 1), ("model", 1))  # of two units
    }
    whole = [c for c in found.tried if c.axes.get("pipe", 1) == 1 and c.stack.zero != 3]
    for choice in whole:
        rows, length = 8 // choice.axes["data"], 4 // choice.axes["context"]
        part = torch.zeros(rows, length, WIDTH)
        mesh, layouts = ff.make_mesh(choice.axes, "abstract"), choice.stack.layouts
        assert set(layouts) == (set(SPLITS) if choice.axes["model"] > 1 else set())
        step = choice.build(train, mesh)
        planned = ff.plan(step, init, OPTIMIZER, part, mesh=mesh, layouts=layouts)
        assert choice.peak_bytes == planned.peak_bytes
        assert (
            least_state_bytes(choice.stack, 32768, 65536) * choice.axes["model"]
            == 3 * 32768
        )
    assert sorted({c.axes["model"] for c in whole}) == [1, 2, 4]

    bound = min(c.peak_bytes for c in whole if c.axes["model"] == 2)
    fits, _ = split_search([{"context": 4}, {"context": 2, "model": 2}], bound)
    best = next(c for c in fits.ranked if c.stack.zero == 0)
    assert str(best.stack).startswith('context=2, model=2: donate(shard("context"')
    assert "layouts=layouts)\n# a rank's batch: batch, its dim 1 cut" in best.code
    trains_as_one_device(best, train, init, batch, dim=1)


def rows(call, table):
    """Of keywords, each refused in these words."""
    return [(partial(call, **k), (ValueError, TypeError), says) for k, says in table]


test_what_cannot_be_split_is_told = all_refused(rows(partial(split_search, sizes=2), [
    ({"layouts": {"*/upp": ff.Split(0, "model")}}, r"no leaf's path matches '\*/u"),
    ({"layouts": {"*/up": ff.Split(0, "pipe")}}, "the axis of a pipeline"),
    ({"layouts": {"*/up": "model"}}, "is given 'model': give ff.Split"),
    ({"dims": {"data": 1}}, "names further axes"),
    ({"dims": {"context": 4}}, '"context" cuts dim 4, which no batch has'),
    ({"sizes": {"heads": 2}}, 'an axis "heads".*layouts= or dims= says'),
    ({"sizes": {"context": 3}}, "the batch of 4 in dim 1 cannot be cut into 3 p"),
    ({"sizes": {"model": 3}}, "cannot split .*: 64 is not a multiple"),
]))  # fmt: skip


@settings(max_examples=6)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 3))
def test_the_least_is_below_every_peak(data, pipe, zero):
    axes = {"data": data} if data > 1 or pipe == 1 else {}
    axes |= {"pipe": pipe} if pipe > 1 else {}
    stack = Stack(
        tuple(axes.items()),
        zero=zero if data > 1 else None,
        schedule="gpipe" if pipe > 1 else None,
    )
    mesh = ff.make_mesh(axes, "abstract")
    part = BATCH[: 8 // data]
    planned = ff.plan(stack.apply(train_step, mesh), init, OPTIMIZER, part, mesh=mesh)
    least = least_state_bytes(stack, PARAMETERS, 2 * PARAMETERS)
    state = [
        sum(x.bytes for x in r.leaves if x.kind in ("parameters", "moments"))
        for r in planned.ranks
    ]
    if zero in (0, 3) or data == 1:  # else a step begins with less than it holds
        assert 0 <= max(state) - least < 100  # Adam's count
    assert least <= planned.peak_bytes


def test_heavy_stacks_are_not_planned():
    one = found({"data": 4}, memory=2.9 * PARAMETERS, zero=(0, 3), accumulate=(2,))
    assert {c.stack.zero for c in one.tried} == {3}
    heavy = [s for s in one.skipped if s.least_bytes]
    assert {s.stack.zero for s in heavy} == {0}
    assert {s.least_bytes for s in heavy} == {3 * PARAMETERS}
    assert "2: parameters and moments alone are too large" in one.table()


def test_cuts_that_cannot_be_are_told():
    one = {"zero": (3,), "accumulate": (1,), "remat": (None,)}
    some = found([{"pipe": 8}, {"data": 3}, {"data": 2}], **one)
    whys = {
        s.stack.axes: s.reason for s in some.skipped if s.stack.axes[0] != ("data", 2)
    }
    assert whys == {
        (("pipe", 8),): "16 stages are more than 4 unit calls",
        (("data", 3),): "the batch of 8 rows cannot be cut into 3 parts",
    }
    with pytest.raises(ValueError, match=r"no stack could be tried: .*8 stages are m"):
        found({"pipe": 8}, schedules=("gpipe",), **one)


def test_nothing_fits():
    few = {"zero": (2, 3), "accumulate": (1,), "remat": (None,)}
    with pytest.raises(ValueError) as told:
        found(memory=2 * PARAMETERS, **few)
    closest = min(c.peak_bytes for c in found(**few).tried) / 1000
    needs = re.search(r"closest needs ([\d.]+) kB, ([\d.]+) kB too", str(told.value))
    needed, miss = map(float, needs.groups() if needs else ())
    assert 0.98 * closest < needed <= closest + 0.05
    assert miss == pytest.approx(needed - 2 * PARAMETERS / 1000, abs=0.1)
    with pytest.raises(
        ValueError, match=r"alone are 24.6 kB, 23.6 kB too much: data=2"
    ):
        found(memory=1000, **few)


@given(st.integers(1, 64))
def test_meshes_have_all_ranks(n):
    split = meshes(n, H100, ("context", "model"))
    assert all(Stack(axes).ranks == n for axes in split)
    assert len(split) == len(set(split)) and {axes[-1][0] for axes in split} == {
        "model"
    }
    made = meshes(n, H100)
    assert all(Stack(axes).ranks == n for axes in made)
    assert len(made) == len(set(made))
    cuts = {(Stack(axes).parts, n // Stack(axes).parts) for axes in made}
    assert cuts == {(d, n // d) for d in range(1, n + 1) if n % d == 0}


def reads(params, x):
    return layer(params[0], x).mean() * (1 if x.sum() > 0 else 2)


test_bad_input_is_refused = all_refused([
    *rows(found, [
        ({"sizes": "2"}, "give a number of ranks"),
        ({"sizes": -1}, "at least one rank"),
        ({"sizes": {"model": 2}}, 'an axis "model": search cuts'),
        ({"sizes": {"data": 0}}, 'axis "data" has a size >= 1, got 0'),
        ({"sizes": {"node": 2}}, '"node" repeats the parts'),
        ({"sizes": [2, 4]}, "or a list of such"),
        ({"memory": 0}, "a rank may hold some bytes"),
        ({"zero": (4,)}, "each is 0, 1, 2 or 3"),
        ({"zero": ()}, "nothing to try"),
        ({"remat": ("all",)}, "remat has 'all'"),
        ({"schedules": ("1f1b",)}, "schedules has '1f1b'"),
        ({"accumulate": (0,)}, "accumulate has 0"),
        ({"compute": ()}, "nothing to try"),
        ({"offload": ("moments",)}, "offload has 'moments': each is a tuple"),
        ({"offload": (("gradients",),)}, "offload has.*of 'params', 'moments'"),
        ({"run": 1}, "there are 1 processes, and mesh_sizes has"),
        ({"run": 1, "sizes": 1, "batch": BATCH.to("meta")},
         "batch has a tensor without values"),
        ({"batch": (BATCH, BATCH[:2])}, r"agree; it has the shapes {'0': \(8, 32\)"),
        ({"batch": torch.tensor(1.0)}, r"has the shapes {'': \(\)}"),
    ]),
    (lambda: search(reads, OPTIMIZER, init, BATCH, 1, CPU), RuntimeError,
     "test_stack_search.py"),
])  # fmt: skip

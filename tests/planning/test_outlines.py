"""Outlines order stacks as plans do, and spare a search most of its plans."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import fsfunc as ff
from examples import gpt
from fsfunc.planning import stack_search
from fsfunc.planning.candidates import Space, whole_gradient_bytes
from fsfunc.planning.hardware import H100
from fsfunc.planning.stack_search import search
from fsfunc.planning.stacks import Stack
from fsfunc.planning.trials import Training, Trials
from tests.covering import by_turns
from tests.models import chain, layer, layers, split, splits

WIDTH, ROWS, LAYERS = 2048, 4096, 2
MESHES = [{"data": 4}, {"data": 2, "pipe": 2}]


@cache
def found(plans=None, sizes=None, **more):
    empty = lambda *shape, seed, dtype: torch.empty(shape, dtype=dtype)  # noqa: E731
    init = lambda: layers(LAYERS, WIDTH, bias=False, make=empty)  # noqa: E731
    space = {
        "accumulate": (1, 4),
        "schedules": ("one_f_one_b",),
        "zero": (1, 3),
        "microbatches": (2,),
    }
    given = chain(layer), ff.sharded_adam(1e-3), init, torch.empty(ROWS, WIDTH)
    where = MESHES if sizes is None else sizes
    return search(*given, where, H100, plans=plans, **{**space, **more})


def test_the_few_stacks_that_are_planned_are_the_fastest_of_all():
    every, few = found(), found(4)
    assert 0 < len(few.tried) <= 4 < len(every.tried) / 2
    assert few.best.seconds <= 1.02 * every.best.seconds
    same = {str(c.stack): c for c in every.tried}
    for choice in few.tried:  # a plan's figures, whatever led to it
        assert choice == same.get(str(choice.stack), choice)
    if len(few.tried) < 4:  # what it left is slower
        left = [c for c in every.ranked if c not in few.tried]
        assert all(c.seconds > 1.1 * few.best.seconds for c in left)
    assert len(few.tried) + len(few.skipped) == 14
    assert "by an outline others are faster" in few.table()


def test_of_many_stacks_few_are_planned_unless_more_are_asked_for(monkeypatch):
    best = found().best  # kept for the other tests, so not found under the patches
    monkeypatch.setattr(stack_search, "MANY", 13)
    monkeypatch.setattr(stack_search, "FEW", 2)
    few, every = found.__wrapped__(), found.__wrapped__(100)
    assert len(few.tried) <= 2 and few.best == best
    assert every.best == few.best


WIDE: Any = {"compute": torch.bfloat16, "reduce": torch.float32}
DATA, BOTH = (("data", 8),), (("pipe", 4), ("data", 2))
PIPED: Any = {"axes": BOTH, "microbatches": 4, **WIDE}


HOW: Any = [
    {"axes": DATA, "remat": "always"},
    {"axes": DATA, "remat": "always", **WIDE},
    {"axes": DATA, **WIDE},
    {"axes": DATA, "accumulate": 4, **WIDE},
    {"axes": DATA, "accumulate": 4, "reduces_each": True, **WIDE},
    {"schedule": "one_f_one_b", "remat": "always", **PIPED},
    {"schedule": "zb_h1", **PIPED},
]


@pytest.mark.parametrize(("how", "zero"), by_turns(HOW, range(4), 2))
def test_an_outline_holds_what_a_plan_holds(how, zero):
    """Within a fifth; and what no stack can go below is below it, of any dtype."""
    trials, stack = tried(), Stack(zero=zero, **how)
    outline = trials.outlines.outline(stack).bytes
    choice = trials.try_stack(stack)
    assert choice is not None
    assert outline == pytest.approx(choice.peak_bytes, rel=0.2)
    least = trials.least_bytes(stack) + whole_gradient_bytes(stack, trials.params)
    assert least <= choice.peak_bytes


@cache
def tried():
    sizes = {"vocab": 64, "seq": 32, "dim": 256, "layers": 8, "heads": 4}
    init = lambda: gpt.init_params(torch.Generator(), **sizes)  # noqa: E731
    tokens = torch.zeros(32, sizes["seq"], dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens.clone()}
    optimizer, memory = ff.sharded_adam(1e-3), H100.memory
    training = Training(gpt.loss_fn, optimizer, init, batch)
    return Trials(training, H100, memory, Space())


def test_what_an_outline_says_is_too_large_is_planned_last():
    tight = found().tried
    memory = sorted(c.needed_bytes for c in tight)[len(tight) // 2]
    few = found(3, memory=memory)
    assert few.best.fits and few.best.needed_bytes <= memory


def test_where_none_of_the_few_fits_more_are_planned():
    sizes = sorted(c.needed_bytes for c in found().tried)
    few = found(1, memory=(sizes[0] + sizes[1]) / 2)
    assert few.best.needed_bytes == sizes[0] and len(few.tried) <= 4


def test_stacks_within_the_band_tie_and_others_do_not():
    every = found()
    bound = every.best.seconds * (1 + 1e-9) * torch.e**every.best.width
    assert every.best.width > 0.05
    others = [c for c in every.ranked if c is not every.best]
    assert every.ties == [c for c in others if c.seconds <= bound]
    assert 0 < len(every.ties) < len(others)
    assert f"{len(every.ties)} more tie with the fastest" in every.table()


def test_no_plan_at_all_is_refused():
    with pytest.raises(ValueError, match="plans=0: at least one"):
        found(0)


def split_search(sizes, **given):
    width = 512
    init = lambda: [  # noqa: E731
        {"up": torch.empty(4 * width, width), "down": torch.empty(width, 4 * width)}
        for _ in range(6)
    ]
    given = {"zero": (3,), "remat": (None,), "accumulate": (1,), **given}
    loss, batch = chain(split), torch.empty(128, 64, width)
    given |= {"layouts": splits("*/")}
    return search(loss, ff.sharded_adam(1e-3), init, batch, sizes, H100, **given)


def test_an_outline_has_what_split_layers_send(monkeypatch):
    """It is as near to a plan of split layers as to one of data alone."""
    seen = {}
    of = Trials.try_stack

    def try_stack(self, stack, anyway=False):
        choice = of(self, stack, anyway)
        seen[stack.axes] = choice.seconds / self.outlines.outline(stack).seconds
        return choice

    monkeypatch.setattr(Trials, "try_stack", try_stack)
    split_search([{"data": 32}, {"data": 8, "model": 4}, {"data": 2, "model": 16}])
    alone, *split = seen.values()
    assert split and all(0.7 < x / alone < 1.3 for x in split)


def test_an_axis_that_the_model_cannot_be_split_over_is_left_out():
    made = split_search([{"data": 2, "model": n} for n in (3, 4)])
    assert [c.axes["model"] for c in made.tried] == [4]
    assert ["2048 is not a multiple" in s.reason for s in made.skipped] == [True]

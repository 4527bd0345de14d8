"""Outlines order stacks as plans do, and spare a search most of its plans."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import fsfunc as ff
from fsfunc.planning.hardware import H100
from fsfunc.planning.stack_search import search
from tests.models import chain, layer, layers

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
    assert len(few.tried) == 4 < len(every.tried) / 2
    assert few.best.seconds <= 1.02 * every.best.seconds
    same = {str(c.stack): c for c in every.tried}
    for choice in few.tried:  # a plan's figures, whatever led to it
        assert choice == same.get(str(choice.stack), choice)
    assert len(few.tried) + len(few.skipped) == 14
    assert "by an outline others are faster" in few.table()


def test_what_an_outline_says_is_too_large_is_planned_last():
    tight = found().tried
    memory = sorted(c.needed_bytes for c in tight)[len(tight) // 2]
    few = found(3, memory=memory)
    assert few.best.fits and few.best.needed_bytes <= memory


def test_where_none_of_the_few_fits_more_are_planned():
    sizes = sorted(c.needed_bytes for c in found().tried)
    few = found(1, memory=(sizes[0] + sizes[1]) / 2)
    assert few.best.needed_bytes == sizes[0] and len(few.tried) <= 2


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

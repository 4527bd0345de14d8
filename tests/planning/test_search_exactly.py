"""A search finds what planning all stacks finds, and skips by true bounds alone."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from contextlib import nullcontext
from functools import cache
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fsfunc as ff
from examples import gpt
from fsfunc.pipelining import actions, schedules
from fsfunc.pipelining.schedules import ScheduleName
from fsfunc.planning.candidates import (
    SCHEDULES,
    Space,
    meshes,
    schedule_facts,
    stages_of,
)
from fsfunc.planning.hardware import CPU, H100, replace
from fsfunc.planning.stack_search import search
from fsfunc.planning.trials import BYTES_OFF, Training, Trials
from fsfunc.state.shared_records import sharing_records

SIZES = {"vocab": 64, "seq": 16, "dim": 64, "layers": 2, "heads": 2}
ROWS = 8
OPTIMIZER = ff.sharded_adam(1e-3)
CARD = replace(H100, fresh=1e9)  # what is held decides, not what is reserved
WIDE = {"compute": torch.bfloat16, "reduce": torch.float32}


def init():
    return gpt.init_params(torch.Generator(), **SIZES)


def batch(rows=ROWS):
    tokens = torch.zeros(rows, SIZES["seq"], dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens.clone()}


@cache
def trials():
    """Of all stacks: none is too large."""
    given = Training(gpt.loss_fn, OPTIMIZER, init, batch())
    return Trials(given, CARD, 1e12, Space())


@cache
def planned(stack):
    return trials().try_stack(stack, anyway=True)


@st.composite
def stacks(draw):
    """Of all small meshes, as the space of a search lists them."""
    compute = draw(st.sampled_from([None, torch.bfloat16]))
    reduce = None if compute is None else torch.float32
    remat = draw(st.sampled_from([None, "always"]))
    names = (*SCHEDULES, "gpipe", "looped_bfs")
    space = Space(remat=(remat,), compute=(compute,), reduce=reduce, schedules=names)
    axes = draw(st.sampled_from(meshes(draw(st.sampled_from([2, 4])), H100)))
    if dict(axes).get("pipe", 1) > 1:
        first = draw(st.sampled_from(space.pipelined(axes, ROWS)))
        stack = draw(st.sampled_from([first, *space.other_zeros(first)]))
    else:
        ladders = [*space.without_pipeline(axes, ROWS)]
        stack = draw(st.sampled_from(draw(st.sampled_from(ladders))))
    assume(stages_of(stack) <= len(trials().outlines.calls))
    return stack


@settings(max_examples=8)
@given(stacks())
def test_what_a_search_skips_by_is_below_the_plan(stack):
    """Bytes that a stack has at least, of three kinds."""
    tried, choice = trials(), planned(stack)
    assert tried.foreseen_bytes(stack) <= choice.peak_bytes
    assert tried.outlines.outline(stack).bytes / BYTES_OFF <= choice.peak_bytes


@settings(max_examples=4)
@given(stacks(), stacks())
def test_a_planned_stack_bounds_the_time_and_memory_of_another(one, other):
    first, second = planned(one), planned(other)
    fresh = Trials(Training(gpt.loss_fn, OPTIMIZER, init, batch()), CARD, 1e12, Space())
    assert fresh.least_seconds(other) == 0
    fresh.tried.append(first)
    assert fresh.least_seconds(other) <= second.seconds
    assert fresh.least_needed(other) <= second.needed_bytes


@settings(max_examples=3)
@given(stacks())
def test_plans_with_a_shared_record_are_those_without(stack):
    # Another one is recorded first: of another `zero`, and of what is computed again.
    zero = None if stack.zero is None else (stack.zero + 1) % 4
    remat = "always" if stack.remat is None else None
    first, records = dataclasses.replace(stack, zero=zero, remat=remat), {}
    with sharing_records(records):
        plan_of(first)
    assert records
    shared, alone = [plan_under(given, stack) for given in (records, None)]
    assert [r.events for r in shared.ranks] == [r.events for r in alone.ranks]
    assert [r.leaves for r in shared.ranks] == [r.leaves for r in alone.ranks]


def plan_under(records, stack):
    """Called from one line of source, which events name."""
    with nullcontext() if records is None else sharing_records(records):
        return plan_of(stack)


def plan_of(stack):
    mesh = ff.make_mesh(dict(stack.axes), "abstract")
    step = stack.apply(OPTIMIZER(ff.value_and_grad(gpt.loss_fn)), mesh)
    return ff.plan(step, init, OPTIMIZER, batch(ROWS // stack.parts), mesh=mesh)


SPACES = [
    {"mesh_sizes": {"data": 2}, "zero": (0, 3)},
    {
        "mesh_sizes": {"pipe": 2},
        "schedules": ("one_f_one_b", "zb_h1"),
        "microbatches": (2,),
    },
    {
        "mesh_sizes": {"data": 2, "pipe": 2},
        "schedules": ("one_f_one_b",),
        "microbatches": (2,),
        "zero": (0, 1, 3),
    },
]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_the_best_is_that_of_all_plans(space, share):
    """In as much memory as the least stack needs, the largest, or between."""
    space = {"accumulate": (1, 2), **WIDE, **space}
    every = all_choices(tuple(space.items()), space)
    sizes = sorted(c.needed_bytes for c in every)
    memory = sizes[0] + share * (sizes[-1] - sizes[0])
    fitting = [c for c in every if c.needed_bytes <= memory]
    found = search(gpt.loss_fn, OPTIMIZER, init, batch(), **space, hardware=CARD,
                   memory=memory)  # fmt: skip
    best = min(c.seconds for c in fitting)
    assert found.best.seconds == best
    assert {c.stack: c.seconds for c in found.tried}.items() <= {
        c.stack: c.seconds for c in every
    }.items()


_EVERY = {}


def all_choices(key, space):
    """Plans of all stacks of a space."""
    if (key := str(key)) not in _EVERY:
        options = {**space}
        sizes = meshes(options.pop("mesh_sizes"), H100)
        options["compute"] = (options["compute"],)
        given = Space(**options)
        tried = Trials(
            Training(gpt.loss_fn, OPTIMIZER, init, batch()), CARD, 1e12, given
        )
        stacks = []
        for axes in sizes:
            if dict(axes).get("pipe", 1) > 1:
                for first in given.pipelined(axes, ROWS):
                    stacks += [first, *given.other_zeros(first)]
            else:
                stacks += itertools.chain(*given.without_pipeline(axes, ROWS))
        for stack in stacks:
            tried.try_stack(stack, anyway=True)
        _EVERY[key] = tried.tried
    return _EVERY[key]


def test_schedules_are_named_in_one_place():
    """Those of a step that is updated once; the other one says so by its actions."""
    made = {
        name
        for name, function in vars(schedules).items()
        if inspect.isfunction(function) and not name.startswith("_")
        and [*inspect.signature(function).parameters][:2]
        == ["n_stages", "n_microbatches"]
    }  # fmt: skip
    once = {
        name for name in made
        if not actions.is_asynchronous(getattr(schedules, name)(2, 2))
    }  # fmt: skip
    assert once == set(get_args(ScheduleName)) and made - once == {"asynchronous"}
    assert set(SCHEDULES) <= once
    named = [name for name in once if schedule_facts(name, 4, 4).splits_backward]
    assert sorted(named) == ["greedy", "zb_h1", "zb_v"]


def test_stacks_of_one_kind_differ_in_settings_alone():
    tried = search(
        gpt.loss_fn, OPTIMIZER, init, batch(), [{"data": 2}, {"pipe": 2}], CPU,
        zero=(0, 3), schedules=("gpipe",), microbatches=(2,), accumulate=(1, 2),
    )  # fmt: skip
    kinds = [c.stack.kind for c in tried.by_kind]
    assert len(kinds) == len(set(kinds)) == 3
    assert {str(kind) for kind in kinds} == {
        "data, zero=0", "data, zero=3", "pipe, gpipe"
    }  # fmt: skip
    for choice in tried.by_kind:
        alike = [c for c in tried.ranked if c.stack.kind == choice.stack.kind]
        assert choice == alike[0]
        settings_of = {(c.stack.zero, c.stack.schedule) for c in alike}
        assert len(settings_of) == 1
    assert tried.by_kind[0] == tried.best
    assert tried.table().startswith("The fastest of each kind")

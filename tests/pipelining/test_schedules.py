"""The named schedules, as torch has them; as text, and with their transfers."""

import inspect
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from fsfunc.pipelining import schedules
from fsfunc.pipelining.actions import (
    KINDS,
    Action,
    forward_only,
    listing,
    owners,
    parse,
    split_into_rounds,
    texts,
)
from fsfunc.pipelining.player import Dependencies
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import verify
from fsfunc.testing.strategies import valid_schedules
from tests.pipelining.models import NAMED, any_edges

SIZES = [(P, M) for P in (1, 2, 3, 4) for M in (1, 3, 4, 7, 8)]
NAMES = ["gpipe", "one_f_one_b", "zb_h1", "interleaved_1f1b", "looped_bfs", "zb_v"]


def their_order(schedule, ranks, count, chunks=1):
    """Torch's own list of actions, made without processes or stages."""
    alike = dict(num_stages=ranks * chunks, group_size=ranks, group_rank=0)
    stages = [
        SimpleNamespace(stage_index=k * ranks, is_last=False, submod=None, **alike)
        for k in range(chunks)
    ]
    single = issubclass(schedule, theirs.PipelineScheduleSingle)
    made = schedule(stages[0] if single else stages, count)
    types = theirs._ComputationType
    kinds = {types.FORWARD: "F", types.FULL_BACKWARD: "B"}
    kinds |= {types.BACKWARD_INPUT: "I", types.BACKWARD_WEIGHT: "W"}
    rows = []
    for rank in range(ranks):  # holes and the last reduction of gradients left out
        rows.append(
            tuple(
                Action(kinds[a.computation_type], a.stage_index, a.microbatch_index)
                for a in made.pipeline_order[rank]
                if a is not None and a.computation_type in kinds
            )
        )
    return tuple(rows)


@pytest.mark.parametrize("ranks, count", SIZES)
def test_equal_to_torch(ranks, count):
    def equal(ours, name, chunks=1):
        other = their_order(getattr(theirs, f"Schedule{name}"), ranks, count, chunks)
        assert ours == other

    equal(schedules.gpipe(ranks, count), "GPipe")
    equal(schedules.zb_v(2 * ranks, count), "ZBVZeroBubble", 2)
    for k in (1, 2, 3):
        equal(schedules.looped_bfs(ranks * k, count, chunks=k), "LoopedBFS", k)
    if count % max(1, count // ranks):
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            their_order(theirs.ScheduleInterleaved1F1B, ranks, count)
        return
    equal(schedules.zb_h1(ranks, count), "InterleavedZeroBubble")
    for k in (1, 2, 3):
        ours = schedules.interleaved_1f1b(ranks * k, count, chunks=k)
        equal(ours, "Interleaved1F1B", k)
    if count < ranks:
        return
    # Their list of the last rank (which nothing runs) counts its forwards from 1, and
    # for fewer microbatches than ranks it has forwards of microbatches there are none.
    *ours, last = schedules.one_f_one_b(ranks, count)
    *other, their_last = their_order(theirs.Schedule1F1B, ranks, count)
    assert ours == other
    assert [(a.kind, a.microbatch + (a.kind == "F")) for a in last] == [
        (a.kind, a.microbatch) for a in their_last
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks, count", [(1, 1), (1, 5), (3, 11), (5, 2), (6, 17)])
def test_every_count_is_right(name, ranks, count):
    make = getattr(schedules, name)
    parameter = inspect.signature(make).parameters.get("chunks")
    chunks = 1 if parameter is None else parameter.default
    made = make(ranks * chunks, count)
    verify(made, n_stages=ranks * chunks, n_microbatches=count)
    assert len(made) == ranks
    turn = [*range(ranks), *reversed(range(ranks))]
    around = [*range(ranks)] * chunks
    assert owners(made) == tuple(turn if name == "zb_v" else around)
    forward = forward_only(made)  # an evaluation keeps the placement
    verify(forward, n_stages=ranks * chunks, n_microbatches=count)
    assert owners(forward) == owners(made)
    assert {a.kind for row in forward for a in row} == {"F"}


@given(st.integers(1, 40), st.integers(1, 5))
def test_rounds_are_as_even_as_can_be(count, ranks):
    rounds = split_into_rounds(count, ranks)
    assert [m for group in rounds for m in group] == list(range(count))
    sizes = [len(group) for group in rounds]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= min(ranks, count)


# As text


NUMBERS = st.integers(0, 40)


@st.composite
def actions(draw):
    kind = draw(st.sampled_from(list(KINDS)))
    peer = draw(NUMBERS) if len(kind) == 2 else None
    return Action(kind, draw(NUMBERS), draw(NUMBERS), peer)


@given(st.lists(st.lists(actions(), max_size=5), max_size=4))
def test_text_comes_back(rows):
    schedule = tuple(tuple(row) for row in rows)
    assert parse(texts(schedule)) == schedule
    assert parse([" ".join(map(str, row)) for row in schedule]) == schedule
    assert parse(schedule) == schedule


def test_a_listing_leaves_a_stage_out_only_where_it_is_the_ranks_own():
    row = "F3 B3 I3 W3 SF3>1 RF3<1 SB3>1 RB3<1"
    assert listing(parse([row])) == f"0: {row}"
    assert listing(parse(["F0@1", "F0@0"])) == "0: F0@1\n1: F0@0"
    assert listing(parse(["F0@0 F0@3", "F0@1"])) == "0: F0@0 F0@3\n1: F0"
    assert parse([["F0", Action("B", 0, 0)]]) == parse(["F0 B0"])
    wide = listing(parse(["F0"] * 11)).splitlines()
    assert wide[0] == " 0: F0" and wide[10] == "10: F0"


def test_forward_only_keeps_places_and_order():
    schedule = parse(["F1 F0 I1 W1 B0", "F0 F1 B0 B1"])
    assert forward_only(schedule) == parse(["F1 F0", "F0 F1"])


# With their transfers


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("ranks, count", [(1, 3), (2, 1), (3, 5)])
def test_named_schedules_run_with_edges_of_any_kind(name, ranks, count):
    make, chunks = NAMED[name]
    schedule = make(ranks * chunks, count)
    stages = range(ranks * chunks)
    every = {(p, c) for p in stages for c in stages if p < c}
    for edges in (None, every, {e for e in every if e[0] == 0}, set()):
        made = with_transfers(schedule, edges)
        check(schedule, made, edges)


@given(valid_schedules(), st.data())
def test_any_schedule_runs_with_any_edges(schedule, data):
    edges = data.draw(any_edges(schedule))
    check(schedule, with_transfers(schedule, edges), edges)


def check(schedule, made, edges):
    verify(made, edges=edges)
    assert [[a for a in row if a.is_compute] for row in made] == [
        list(row) for row in schedule
    ]
    dependencies = Dependencies(made, edges)
    for row in made:
        compute = [n for n, a in enumerate(row) if a.is_compute]
        for n, action in enumerate(row):
            if action.is_compute:
                # Its sends follow it, before anything is computed.
                end = next((k for k in compute if k > n), len(row))
                sends = [a for a in row[n + 1 : end] if a.kind in ("SF", "SB")]
                assert sends == list(dependencies.sends(action))
                # What it receives has been posted one compute action ahead.
                before = [k for k in compute if k < n]
                posted = row[: before[-1] if before else n]
                for need in dependencies.needs(action):
                    if need.peer is not None:
                        assert need in posted

"""Sends and receives: where they stand, and that they never wait for each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.pipelining.actions import Action, listing, parse
from fsfunc.pipelining.player import Dependencies, other_end
from fsfunc.pipelining.schedules import forward_only, gpipe, one_f_one_b, zb_v
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import verify
from fsfunc.testing.strategies import valid_schedules
from tests.pipelining.models import NAMED, any_edges


def test_as_written_down():
    assert listing(with_transfers(one_f_one_b(3, 2))) == (
        "0: F0 SF0>1 RB0<1 F1 SF1>1 RB1<1 B0 B1\n"
        "1: RF0<0 RF1<0 F0 SF0>2 RB0<2 F1 SF1>2 RB1<2 B0 SB0>0 B1 SB1>0\n"
        "2: RF0<1 F0 RF1<1 B0 SB0>1 F1 B1 SB1>1"
    )


def test_an_edge_within_a_rank_sends_nothing():
    assert listing(with_transfers(zb_v(4, 1))) == (
        "0: RF0@3<2 F0@0 SF0@0>1 F0@3 I0@3 SB0@3>2 RB0@0<1 W0@3 I0@0 W0@0\n"
        "1: RF0@1<0 F0@1 RB0@2<3 F0@2 SF0@2>3 I0@2 W0@2 I0@1 SB0@1>0 W0@1"
    )


def test_a_skip_is_one_message_from_producer_to_consumer():
    edges = [(0, 1), (0, 2)]
    made = with_transfers(gpipe(3, 1), edges)
    assert with_transfers(gpipe(3, 1), iter(edges)) == made
    assert listing(made) == (
        "0: RB0<1 RB0<2 F0 SF0>1 SF0>2 B0\n1: RF0<0 F0 B0 SB0>0\n2: RF0<0 F0 B0 SB0>0"
    )


def test_a_forward_alone_sends_no_gradients():
    made = with_transfers(forward_only(gpipe(2, 2)))
    assert listing(made) == "0: F0 SF0>1 F1 SF1>1\n1: RF0<0 RF1<0 F0 F1"


def test_a_receive_moves_ahead_where_sends_would_wait_in_a_ring():
    # Rank 0 sends microbatch 2 long before it comes to the first gradient, which rank 1
    # sends before it would post that receive.
    schedule = parse(["F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"])
    made = with_transfers(schedule)
    verify(made)
    assert listing(made).splitlines()[1] == (
        "1: RF0<0 F0 RF1<0 B0 RF2<0 SB0>0 F1 B1 RF3<0 SB1>0 F2 B2 SB2>0 F3 B3 SB3>0"
    )


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


def test_the_other_end():
    assert str(other_end(Action("SB", 3, 1, 0))) == "RB1@0<3"
    assert other_end(other_end(Action("RF", 3, 1, 0))) == Action("RF", 3, 1, 0)

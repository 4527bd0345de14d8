"""Sends and receives: where they stand, and that they never wait for each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.pipelining.player import Dependencies
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import verify
from fsfunc.testing.strategies import valid_schedules
from tests.pipelining.models import NAMED, any_edges


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

"""What verify accepts and what it refuses, and with which words."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsfunc.pipelining.actions import ScheduleError, parse
from fsfunc.pipelining.player import Dependencies, name_results
from fsfunc.pipelining.schedules import forward_only, one_f_one_b, zb_v
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import verify
from fsfunc.testing.strategies import valid_schedules
from tests.pipelining.models import any_edges


def refused(schedule, words, **options):
    with pytest.raises(ScheduleError, match=words):
        verify(schedule, **options)


@st.composite
def picked(draw):
    """A schedule, with transfers or without, and a rank and an entry of it."""
    schedule = draw(valid_schedules())
    schedule = with_transfers(schedule) if draw(st.booleans()) else schedule
    rank = draw(st.sampled_from([r for r, row in enumerate(schedule) if row]))
    return schedule, rank, draw(st.integers(0, len(schedule[rank]) - 1))


@given(valid_schedules(), st.data())
def test_what_a_chain_allows_is_right(schedule, data):
    verify(schedule)
    verify(schedule, edges=data.draw(any_edges(schedule)))
    verify(forward_only(schedule))


@given(picked())
def test_a_dropped_action_is_missed(drawn):
    schedule, rank, at = drawn
    action = schedule[rank][at]
    assume(not only_one(schedule, action))
    row = schedule[rank][:at] + schedule[rank][at + 1 :]
    words = (
        f"rank {rank}: microbatch {action.microbatch} of stage {action.stage} needs"
        if action.is_compute
        else f"rank {rank} has no {action}"
    )
    refused(with_row(schedule, rank, row), words)


@given(picked())
def test_what_stands_before_its_need_is_refused(drawn):
    schedule, rank, at = drawn
    row = schedule[rank]
    action = row[at]
    needs = set(Dependencies(schedule).needs(action))
    mine = [n for n in range(at) if needs & {*name_results(row[n])}]
    assume(mine)
    moved = (*row[: mine[-1]], action, *row[mine[-1] : at], *row[at + 1 :])
    words = f"rank {rank}: .* comes before .*, which it needs|in the order in which"
    refused(with_row(schedule, rank, moved), words)


@given(valid_schedules(), st.randoms(use_true_random=False))
def test_a_shuffled_schedule_is_right_or_refused_and_never_hangs(schedule, random):
    rows = []
    for row in schedule:
        actions = list(row)
        random.shuffle(actions)
        rows.append(tuple(actions))
    try:
        verify(tuple(rows))
    except ScheduleError as error:
        assert "comes before" in str(error) or "deadlock" in str(error)
    else:
        verify(with_transfers(tuple(rows)))


def only_one(schedule, action):
    """Return whether the action is all that its stage or microbatch has, or the only
    one of a backward."""
    every = [a for row in schedule for a in row if a.is_compute]
    stage = [a for a in every if a.stage == action.stage]
    count = [a for a in every if a.microbatch == action.microbatch]
    back = [a for a in every if a.kind != "F"]
    return action.is_compute and (
        stage == [action] or count == [action] or back == [action]
    )


def with_row(schedule, rank, row):
    return (*schedule[:rank], tuple(row), *schedule[rank + 1 :])


def test_counts_that_were_asked_for():
    schedule = one_f_one_b(3, 4)
    verify(schedule, n_stages=3, n_microbatches=4)
    refused(schedule, "stage 3 of 4 is on no rank", n_stages=4)
    refused(schedule, r"rank 2: F0@2 is impossible: .* 2 stages", n_stages=2)
    refused(schedule, "microbatch 4 of stage 0 needs", n_microbatches=5)
    refused(schedule, "rank 0: F3@0 is impossible: .* 3 microb", n_microbatches=3)


def test_edges_decide_what_is_needed():
    rows = parse(["F0 B0", "F0 B0", "F0 B0"])
    verify(rows)
    backward_first = parse(["F0@0 F0@1 F0@2 B0@0 B0@2 B0@1"])
    refused(backward_first, "B0@0 comes before B0@1")
    verify(backward_first, edges={(1, 2)})
    refused(backward_first, "B0@0 comes before B0@2", edges={(0, 2), (1, 2)})
    refused(
        rows, r"the edge \(1, 3\) has to lead from a stage to a later", edges={(1, 3)}
    )
    chain = with_transfers(rows)
    verify(chain)
    refused(chain, "rank 0 has no RB0@0<2", edges={(0, 1), (1, 2), (0, 2)})
    refused(chain, "rank 1: RB0@1<2 has no place", edges={(0, 1)})


def deadlock(rows, table, **options):
    with pytest.raises(ScheduleError) as error:
        verify(parse(rows), **options)
    head, *lines = str(error.value).splitlines()
    assert head == "deadlock: no rank can go on"
    assert [line.strip() for line in lines] == [
        f"rank {rank}: {words}" for rank, words in enumerate(table)
    ]


def test_a_cycle_between_ranks_is_a_deadlock_with_a_table():
    deadlock(
        ["F1 F0 B0 B1", "F0 B0 F1 B1", "F0 F1 B1 B0"],
        [
            "B0@0 (entry 2) waits for I0@1 of rank 1",
            "B0@1 (entry 1) waits for I0@2 of rank 2",
            "F1@2 (entry 1) waits for F1@1 of rank 1",
        ],
    )
    deadlock(  # sends that wait for each other
        ["F0 SF0>1 F1 SF1>1 RB0<1 B0 RB1<1 B1", "RF0<0 F0 B0 SB0>0 RF1<0 F1 B1 SB1>0"],
        [
            "SF1@0>1 (entry 3) waits for RF1@1<0 of rank 1",
            "SB0@1>0 (entry 3) waits for RB0@0<1 of rank 0",
        ],
    )
    verify(
        parse(
            [
                "F0 SF0>1 RB0<1 F1 SF1>1 B0 RB1<1 B1",
                "RF0<0 F0 B0 SB0>0 RF1<0 F1 B1 SB1>0",
            ]
        )
    )
    deadlock(
        ["F0@0", "F0@4 F0@1", "F0@3 F0@2"],
        [
            "has ended",
            "F0@4 (entry 0) waits for F0@2 of rank 2",
            "F0@3 (entry 0) waits for F0@1 of rank 1",
        ],
        edges={(0, 1), (2, 4), (1, 3)},
    )
    rows = ["F0 SF0>1 RB0<1 B0 F1 SF1>1 RB1<1 B1"]  # a computation names the sender
    rows = parse([*rows, "RF0<0 F0 RF1<0 F1 B0 SB0>0 B1 SB1>0"])
    refused(rows, r"rank 1: F1@1 \(entry 3\) waits for RF1@1<0 of rank 0")


def test_messages_are_received_in_the_order_in_which_they_are_sent():
    rows = parse(["F0 SF0>1 F1 SF1>1", "RF1<0 RF0<0 F0 F1"])
    refused(rows, "rank 1 posts RF1@1<0 where rank 0 sends SF0@0>1: the messages from")
    # Forward and backward messages from one rank to another share the one order.
    v = with_transfers(zb_v(4, 2))
    verify(v)
    sends = [a for a in v[1] if a.kind[0] == "S"]
    assert {a.kind for a in sends} == {"SF", "SB"}
    receives = [n for n, a in enumerate(v[0]) if a.kind[0] == "R"]
    first = next(
        (a, b)
        for a, b in zip(receives, receives[1:], strict=False)
        if v[0][a].kind != v[0][b].kind
    )
    row = list(v[0])
    row[first[0]], row[first[1]] = row[first[1]], row[first[0]]
    refused(with_row(v, 0, row), "rank 0 posts .* where rank 1 sends")

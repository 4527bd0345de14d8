"""The search for a short schedule: never beaten by a name, never over its bound."""

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsfunc.pipelining.actions import Action, ScheduleError, owners
from fsfunc.pipelining.schedules import (
    gpipe,
    greedy,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from fsfunc.pipelining.timing import Costs, bubble, simulate
from fsfunc.pipelining.verification import held, verify


def makespan(schedule, costs):
    return max(event.end for event in simulate(schedule, costs))


def named(stages, count, chunks):
    if chunks == 1:
        return [make(stages, count) for make in (gpipe, one_f_one_b, zb_h1)]
    made = [
        make(stages, count, chunks=chunks) for make in (looped_bfs, interleaved_1f1b)
    ]
    return [*made, zb_v(stages, count)] if chunks == 2 else made


@st.composite
def all_costs(draw, stages):
    time = st.integers(1, 6)
    if draw(st.booleans()):
        times = [draw(time) for _ in range(3)]
    else:
        times = [draw(st.lists(time, min_size=stages, max_size=stages)) for _ in "fiw"]
    return Costs(*times, send=draw(st.integers(0, 2)))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.data())
@settings(max_examples=12)
def test_never_longer_than_a_named_one_and_never_over_the_bound(P, M, v, data):
    costs = data.draw(all_costs(P * v))
    bound = data.draw(st.none() | st.integers(v, 2 * P * v).map(lambda n: n / v))
    found = greedy(P * v, M, costs=costs, memory_bound=bound, chunks=v)
    verify(found, in_flight=bound, n_stages=P * v, n_microbatches=M)
    assert len(found) == P and sorted(owners(found)) == sorted([*range(P)] * v)
    for other in named(P * v, M, v):
        if bound is None or max(held(other)) <= bound:
            assert makespan(found, costs) <= makespan(other, costs)


def test_shorter_than_any_by_name():
    """For few microbatches in the memory of ZB-V; with more memory than ZB-H1's."""
    for P in (2, 4, 8):
        assert bubble(greedy(2 * P, P, memory_bound=P, chunks=2)) == (P - 1) / 2
        assert bubble(zb_v(2 * P, P)) == P - 1
    costs = Costs(1, 1.25, 0.75)
    assert bubble(zb_h1(4, 16), costs) == 4.5
    assert bubble(greedy(4, 16, costs=costs, memory_bound=4), costs) == 4.5
    assert bubble(greedy(4, 16, costs=costs), costs) == 3


def test_of_equals_the_one_that_holds_less():
    # Without any gain from a split backward, 1F1B rather than GPipe.
    assert greedy(3, 5, costs=Costs(1, 3, 0)) == one_f_one_b(3, 5)
    assert greedy(1, 4) == one_f_one_b(1, 4)
    costs = Costs([5, 1, 5, 6], [4, 6, 1, 3], [1, 6, 4, 1])
    assert max(held(greedy(4, 5, costs=costs, chunks=2))) == 4.5  # the first found: 5
    # It may pay to leave a W: found without patience, 78.
    costs = Costs([3, 4, 4, 1], [3, 4, 6, 2], [6, 3, 2, 1])
    found = greedy(4, 3, costs=costs, memory_bound=1.5, chunks=2)
    assert makespan(found, costs) == 76


def every_row(rank, count):
    """The orders of a rank's F, I and W, each kind by microbatch."""

    def grow(row, at):
        if len(row) == 3 * count:
            yield row
        for kind, before in zip("FIW", (count, at[0], at[1]), strict=True):
            n = at["FIW".index(kind)]
            if n < before:
                after = [m + (k == kind) for m, k in zip(at, "FIW", strict=True)]
                yield from grow((*row, Action(kind, rank, n)), after)

    return [*grow((), [0, 0, 0])]


@pytest.mark.parametrize("times", [(3, 1, 2), (1, 2, 3)])
def test_as_short_as_any_for_two_ranks(times):
    costs = Costs(*times)
    for count in (1, 2):
        ends = []
        for rows in product(every_row(0, count), every_row(1, count)):
            with suppress(ScheduleError):
                ends.append(makespan(rows, costs))
        assert makespan(greedy(2, count, costs=costs), costs) == min(ends)

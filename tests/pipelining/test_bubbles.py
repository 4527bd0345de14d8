"""Time lost and activations held: the formulas, and the search for a short schedule."""

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsfunc.pipelining.actions import Action, ScheduleError, owners, parse
from fsfunc.pipelining.schedules import (
    forward_only,
    gpipe,
    greedy,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from fsfunc.pipelining.timing import Costs, bubble, simulate
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import peak_microbatches, verify
from tests.covering import examples

EVEN = Costs(12, 12, 12)  # halves, thirds and quarters are whole numbers
UNEVEN = Costs(f=24, i=36, w=12)
f, i, w = UNEVEN.f, UNEVEN.i, UNEVEN.w
MICROBATCHES = range(1, 14)


@pytest.mark.parametrize("P", [2, 3, 4, 7])
def test_one_stage_a_rank(P):
    for M in MICROBATCHES:
        whole = (P - 1) * (f + i + w)
        assert bubble(gpipe(P, M), UNEVEN) == whole
        assert peak_microbatches(gpipe(P, M)) == (M,) * P
        assert bubble(one_f_one_b(P, M), UNEVEN) == whole
        assert peak_microbatches(one_f_one_b(P, M)) == tuple(
            min(M, P - r) for r in range(P)
        )
        if M >= P:
            assert bubble(zb_h1(P, M), UNEVEN) == (P - 1) * (f + i - w)
            assert bubble(zb_h1(P, M), EVEN) == (P - 1) * 12
        assert peak_microbatches(zb_h1(P, M)) == (min(M, P),) * P


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("P", [2, 3, 4, 7])
def test_several_stages_a_rank(P, v):
    for M in range(P, 4 * P, P):
        made = looped_bfs(P * v, M, chunks=v)
        assert bubble(made, UNEVEN) == (P - 1) * (f + i + w) / v
        assert peak_microbatches(made) == (M,) * P
        made = interleaved_1f1b(P * v, M, chunks=v)
        assert bubble(made, UNEVEN) == (P - 1) * (f + i + w) / v
        assert peak_microbatches(made) == tuple(
            min(M, ((v - 1) * P + 2 * (P - 1 - r) + 1) / v) for r in range(P)
        )


@pytest.mark.parametrize("P", [2, 3, 4, 7])
def test_zero_bubble_v(P):
    for M in range(2 * P - 1, 2 * P + 5):
        made = zb_v(2 * P, M)
        assert bubble(made, EVEN) == (P - 1) * 12 / 2
        assert bubble(made, EVEN, by="span") == 0
        assert peak_microbatches(made) == (P,) * P
    # Measured on torch's own lists, of 4 ranks: 1.5 by span, 1.875 by makespan.
    if P == 4:
        unequal = Costs(1, 1.25, 0.75)
        assert bubble(zb_v(8, 8), unequal, by="span") == 1.5
        assert bubble(zb_v(8, 8), unequal) == 1.875


def test_a_forward_alone_has_the_bubble_of_its_forwards_and_holds_nothing():
    made = forward_only(one_f_one_b(4, 6))
    assert bubble(made) == 3 and peak_microbatches(made) == (0, 0, 0, 0)


def times(schedule, costs, **options):
    events = simulate(schedule, costs, **options)
    return [(str(event.action), event.start, event.end) for event in events]


def test_transfers_take_their_time_beside_the_computation():
    schedule = parse(["F0 F1", "F0 F1"])
    costs = Costs(f=2, send=3)
    spans = [(0, 2), (2, 4), (5, 7), (7, 9)]
    assert [e[2:] for e in simulate(schedule, costs)] == spans
    explicit = with_transfers(schedule)
    assert times(explicit, costs) == [
        ("F0@0", 0, 2),
        ("SF0@0>1", 2, 5),
        ("F1@0", 2, 4),
        ("SF1@0>1", 4, 7),
        ("RF0@1<0", 0, 5),
        ("RF1@1<0", 0, 7),
        ("F0@1", 5, 7),
        ("F1@1", 7, 9),
    ]
    late = parse(["F0 SF0>1", "RF0<0 F0"])
    early = parse(["F0 SF0>1 F1 SF1>1", "RF0<0 F0 RF1<0 F1"])
    assert bubble(late, costs) == 5
    assert times(early, costs)[-2:] == [("RF1@1<0", 7, 10), ("F1@1", 10, 12)]


def test_the_bubble_is_that_of_the_busiest_rank():
    uneven = Costs([1, 3], [1, 3], [1, 3])
    for by in ("makespan", "span"):
        assert bubble(one_f_one_b(2, 4), uneven, by=by) == 1 + 2


# The search for a short one


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
@settings(max_examples=examples(12))
def test_never_longer_than_a_named_one_and_never_over_the_bound(P, M, v, data):
    costs = data.draw(all_costs(P * v))
    bound = data.draw(st.none() | st.integers(v, 2 * P * v).map(lambda n: n / v))
    found = greedy(P * v, M, costs=costs, memory_bound=bound, chunks=v)
    verify(found, n_stages=P * v, n_microbatches=M)
    assert bound is None or max(peak_microbatches(found)) <= bound
    assert len(found) == P and sorted(owners(found)) == sorted([*range(P)] * v)
    for other in named(P * v, M, v):
        if bound is None or max(peak_microbatches(other)) <= bound:
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


def test_stages_to_and_fro_save_transfers():
    found = greedy(8, 4, costs=Costs(send=0.5), chunks=2)
    assert owners(found) == owners(zb_v(8, 4))


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

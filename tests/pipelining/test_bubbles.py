"""Time lost and activations held: the formulas, wherever they hold."""

from fractions import Fraction

import pytest

from fsfunc.pipelining.actions import parse
from fsfunc.pipelining.schedules import (
    forward_only,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from fsfunc.pipelining.timing import Costs, bubble, simulate
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import held

EVEN = Costs(12, 12, 12)  # halves, thirds and quarters are whole numbers
UNEVEN = Costs(f=24, i=36, w=12)
f, i, w = UNEVEN.f, UNEVEN.i, UNEVEN.w
MICROBATCHES = range(1, 33)


@pytest.mark.parametrize("P", range(2, 9))
def test_one_stage_a_rank(P):
    for M in MICROBATCHES:
        whole = (P - 1) * (f + i + w)
        assert bubble(gpipe(P, M), UNEVEN) == whole
        assert held(gpipe(P, M)) == (M,) * P
        assert bubble(one_f_one_b(P, M), UNEVEN) == whole
        assert held(one_f_one_b(P, M)) == tuple(min(M, P - r) for r in range(P))
        if M >= P:
            assert bubble(zb_h1(P, M), UNEVEN) == (P - 1) * (f + i - w)
            assert bubble(zb_h1(P, M), EVEN) == (P - 1) * 12
        assert held(zb_h1(P, M)) == (min(M, P),) * P


@pytest.mark.parametrize("v", range(1, 5))
@pytest.mark.parametrize("P", range(2, 9))
def test_several_stages_a_rank(P, v):
    for M in range(P, 33, P):
        made = looped_bfs(P * v, M, chunks=v)
        assert bubble(made, UNEVEN) == (P - 1) * (f + i + w) / v
        assert held(made) == (M,) * P
        made = interleaved_1f1b(P * v, M, chunks=v)
        assert bubble(made, UNEVEN) == (P - 1) * (f + i + w) / v
        assert held(made) == tuple(
            min(M, ((v - 1) * P + 2 * (P - 1 - r) + 1) / v) for r in range(P)
        )


@pytest.mark.parametrize("P", range(2, 9))
def test_zero_bubble_v(P):
    for M in range(2 * P - 1, 33):
        made = zb_v(2 * P, M)
        assert bubble(made, EVEN) == (P - 1) * 12 / 2
        assert bubble(made, EVEN, by="span") == 0
        assert held(made) == (P,) * P
    # Measured on torch's own lists, of 4 ranks: 1.5 by span, 1.875 by makespan.
    if P == 4:
        unequal = Costs(1, 1.25, 0.75)
        assert bubble(zb_v(8, 8), unequal, by="span") == 1.5
        assert bubble(zb_v(8, 8), unequal) == 1.875


def test_zb_h1_needs_w_within_f_too():
    # With w <= i but w > f a rank's W stands in the way of its next I.
    assert bubble(zb_h1(2, 2), Costs(f=1, i=3, w=2)) == 3 > 1 + 3 - 2


def test_a_forward_alone_has_the_bubble_of_its_forwards_and_holds_nothing():
    made = forward_only(one_f_one_b(4, 6))
    assert bubble(made) == 3
    assert held(made) == (0, 0, 0, 0)


def test_what_is_held_is_given_back_by_w_not_by_i():
    assert held(parse(["F0 I0 F1 I1 W0 W1"])) == (2,)
    assert held(parse(["F0 I0 W0 F1 I1 W1"])) == (1,)
    assert held(parse(["F0@0 F0@1 B0@1 B0@0"])) == (1,)


def times(schedule, costs, **options):
    events = simulate(schedule, costs, **options)
    return [(str(event.action), event.start, event.end) for event in events]


def test_when_each_action_runs():
    assert times(one_f_one_b(2, 2), Costs(1, 2, 3)) == [
        ("F0@0", 0, 1),
        ("F1@0", 1, 2),
        ("B0@0", 7, 12),
        ("B1@0", 13, 18),
        ("F0@1", 1, 2),
        ("B0@1", 2, 7),
        ("F1@1", 7, 8),
        ("B1@1", 8, 13),
    ]


def test_sequences_are_the_times_of_stages_and_numbers_those_of_ranks():
    made = parse(["F0@0 F0@1 B0@1 B0@0"])
    assert times(made, Costs([1, 2], 4, [5, 6])) == [
        ("F0@0", 0, 1),
        ("F0@1", 1, 3),
        ("B0@1", 3, 11),
        ("B0@0", 11, 18),
    ]
    thirds = Costs(Fraction(1), Fraction(1), Fraction(1))
    assert bubble(looped_bfs(9, 3, chunks=3), thirds) == 2


def test_transfers_take_their_time_beside_the_computation():
    schedule = parse(["F0 F1", "F0 F1"])
    costs = Costs(f=2, send=3)
    assert [e[2:] for e in simulate(schedule, costs)] == [
        (0, 2),
        (2, 4),
        (5, 7),
        (7, 9),
    ]
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


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1])
def test_explicit_transfers_without_cost_change_no_time(make):
    for P, M in [(2, 5), (4, 3), (5, 9)]:
        plain, explicit = make(P, M), with_transfers(make(P, M))
        compute = [e for e in simulate(explicit, UNEVEN) if e.action.is_compute]
        assert compute == simulate(plain, UNEVEN)
        for by in ("makespan", "span"):
            assert bubble(explicit, UNEVEN, by) == bubble(plain, UNEVEN, by)


def test_the_bubble_is_that_of_the_busiest_rank():
    uneven = Costs([1, 3], [1, 3], [1, 3])
    assert bubble(one_f_one_b(2, 4), uneven) == 1 + 2
    assert bubble(one_f_one_b(2, 4), uneven, by="span") == 1 + 2
    assert bubble(one_f_one_b(2, 4), uneven, by="makespan") == 3

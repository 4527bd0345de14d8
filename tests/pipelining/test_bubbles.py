"""Time lost and activations held: the formulas, wherever they hold."""

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
MICROBATCHES = range(1, 14)


@pytest.mark.parametrize("P", [2, 3, 4, 7])
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


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("P", [2, 3, 4, 7])
def test_several_stages_a_rank(P, v):
    for M in range(P, 4 * P, P):
        made = looped_bfs(P * v, M, chunks=v)
        assert bubble(made, UNEVEN) == (P - 1) * (f + i + w) / v
        assert held(made) == (M,) * P
        made = interleaved_1f1b(P * v, M, chunks=v)
        assert bubble(made, UNEVEN) == (P - 1) * (f + i + w) / v
        assert held(made) == tuple(
            min(M, ((v - 1) * P + 2 * (P - 1 - r) + 1) / v) for r in range(P)
        )


@pytest.mark.parametrize("P", [2, 3, 4, 7])
def test_zero_bubble_v(P):
    for M in range(2 * P - 1, 2 * P + 5):
        made = zb_v(2 * P, M)
        assert bubble(made, EVEN) == (P - 1) * 12 / 2
        assert bubble(made, EVEN, by="span") == 0
        assert held(made) == (P,) * P
    # Measured on torch's own lists, of 4 ranks: 1.5 by span, 1.875 by makespan.
    if P == 4:
        unequal = Costs(1, 1.25, 0.75)
        assert bubble(zb_v(8, 8), unequal, by="span") == 1.5
        assert bubble(zb_v(8, 8), unequal) == 1.875


def test_a_forward_alone_has_the_bubble_of_its_forwards_and_holds_nothing():
    made = forward_only(one_f_one_b(4, 6))
    assert bubble(made) == 3 and held(made) == (0, 0, 0, 0)


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

"""Streams over time: the lanes' data, and exact text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import A100_40
from fsfunc.show import streams
from fsfunc.show.figures import COMPUTING
from tests.show.planned import STEP, golden, small, span

PHASES = [look.title for look in COMPUTING.values()]


def test_a_step_in_full():
    assert streams(STEP).text(37) == golden("""
                0 s            10.0 s
rank 0 compute │··FFFFFFRRBBBBBB░░UU│
rank 0 data    │gg              ss  │
rank 0 to 1    │        >           │
rank 1 compute │·········FFFFFF·····│
rank 1 from 0  │        >           │

 F  forward   R  recompute
 B  backward   U  update
 ░  waits for a transfer
 ·  not begun, or done
 g  all_gather   s  psum_scatter
 >  message

stream          spans    busy  share
rank 0 compute      4  8.00 s   80 %
rank 0 data         2  2.00 s   20 %
rank 0 to 1         1  500 ms    5 %
rank 1 compute      1  3.00 s   30 %
rank 1 from 0       1  500 ms    5 %""")


def test_a_part_of_the_time_and_of_the_ranks():
    shown = streams(STEP, ranks=[0], between=(4.0, 5.0))
    assert [lane.name for lane in shown.lanes] == ["rank 0 compute", "rank 0 to 1"]
    text = shown.text(37)
    assert "4.00 s" in text and "│RRRRRRRRRRRRRRRRRRRR│" in text
    assert "rank 0 to 1         1  500 ms   50 %" in text
    (compute,) = streams(STEP, ranks=[1], between=(5.0, 7.0)).lanes
    assert compute.busy == 2.0  # cut at both ends


def test_of_many_ranks_some_are_shown():
    spans = [span("compute", "f", "forward", 0, 1, rank=r) for r in range(20)]
    assert "\n4 more ranks: ranks=[...]" in streams(spans).text()
    assert "more ranks" not in streams(spans, ranks=[17, 3]).text()
    assert [lane.rank for lane in streams(spans, ranks=[17, 3]).lanes] == [17, 3]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from(PHASES)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 60),
)
def test_a_column_shows_what_takes_most_of_it(pieces, count):
    spans, now = [], 0.0
    for wait, long, phase in pieces:
        spans.append(span("compute", "f", phase, now + wait, now + wait + long))
        now += wait + long
    (lane,) = streams(spans).lanes
    assert lane.busy == sum(long for _, long, _ in pieces)
    width = now / count
    for i, look in enumerate(lane.columns(0.0, now, count)):
        shares = {}
        for s in lane.spans:
            part = min(s.end, (i + 1) * width) - max(s.start, i * width)
            shares[s.phase] = shares.get(s.phase, 0.0) + max(part, 0.0)
        assert math.isclose(shares[look.title], max(shares.values()), abs_tol=1e-9)
    assert math.isclose(lane.busy + lane.idle, now)


def test_an_estimate_says_its_times():
    found = estimate(small(), A100_40)
    shown = streams(found)
    assert shown.title == repr(found)
    assert str(shown).startswith(repr(found))
    assert {lane.stream for lane in shown.lanes} == {"compute"}
    assert sum(lane.busy for lane in shown.lanes) == pytest.approx(found.compute)

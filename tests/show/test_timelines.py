"""A schedule in letters, and streams over time: golden text, bands, and real runs."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.schedules import gpipe, looped_bfs, one_f_one_b, zb_h1, zb_v
from fsfunc.pipelining.timing import Costs, TimedAction, simulate
from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import A100_40
from fsfunc.show import Timeline, streams, timeline
from fsfunc.show.charts import computing
from fsfunc.show.estimates import describe_rates
from tests.show.planned import STEP, golden, small, span

F0, B0 = Action("F", 0, 0), Action("B", 0, 0)


def rows(shown, width=120):
    """The lines of the ranks' rows alone."""
    return [line for line in shown.text(width).splitlines() if "│" in line]


GAPS = ["│F0│F1│░░░░░│B0   │░░│B1   │", "│··│F0│B0   │F1│B1   │·····│"]


TIMES = pairwise([0, 1, 1.6, 3, 4.002, 5, 6, 7.1, 8, 9, 10])


CELLS = {
    "input and weight gradients": (
        timeline(zb_h1(2, 2)),
        ["│F0│F1│░░│I0│W0│I1│W1│", "│··│F0│I0│F1│I1│W0│W1│"],
    ),
    "the longest label": (
        timeline(gpipe(1, 11), Costs(f=1, i=0, w=1)),
        ["".join(f"│{k}{m}".ljust(4) for k in "FB" for m in range(11)) + "│"],
    ),
    "times without a unit are rounded": (
        timeline(one_f_one_b(2, 3), Costs(f=1.0, i=1.1317, w=1.2391)),
        ["│F0│F1│░░░░░░│B0    │F2│B1    │░░│B2    │",
         "│··│F0│B0    │F1│B1    │F2│B2    │······│"],
    ),
    "what takes no time": (
        timeline(["F0 I0 W0 F1 I1 W1"], Costs(w=0)), ["│F0│I0│F1│I1│"],
    ),
    "too short for its name": (
        Timeline.of_events((0, Action("F", 0, m), *t) for m, t in enumerate(TIMES)),
        ["│F0│F│F2  │F3│F4 │F5│F6 │F7│F8│F9│"],
    ),
    "nothing to do": (timeline(["F0 B0", ""]), ["│F0│B0   │", "│········│"]),
} | {
    f"the unit is {unit}": (timeline(one_f_one_b(2, 2), Costs(unit, unit, unit)), GAPS)
    for unit in (8, 0.1, 1 / 3, 1e-6, Fraction(1, 7))
}  # fmt: skip


@pytest.mark.parametrize("case", CELLS)
def test_a_cell_is_as_wide_as_it_lasts(case):
    shown, cells = CELLS[case]
    assert rows(shown, None) == [f"rank {r} {row}" for r, row in enumerate(cells)]


def test_stages_are_named_where_a_rank_has_several():
    assert str(timeline(looped_bfs(4, 2), Costs(f=2, i=1, w=1))) == golden("""
       0         2         4         6         8
rank 0 │F0@0│F1@0│F0@2│F1@2│░░░░░░░░░│B1@2│B0@2│B1@0│B0@0│
rank 1 │····│F0@1│F1@1│F0@3│F1@3│B1@3│B0@3│B1@1│B0@1│····│

 F  forward   B  backward
 ░  waits for another rank   ·  not begun, or done

makespan 10
        busy  bubble        held
rank 0     8       2  20 %     2
rank 1     8       2  20 %     2""")


def test_skip_connections_are_waited_for():
    schedule = ["F0@0 B0@0", "F0@1 B0@1", "F0@2 B0@2"]
    costs = Costs(f=[1, 3, 1], i=1, w=1)
    assert timeline(schedule, costs).makespan == 11
    assert timeline(schedule, costs, edges={(0, 1), (0, 2)}).makespan == 8


@given(
    st.sampled_from([gpipe, one_f_one_b, looped_bfs, zb_h1, zb_v]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(40, 90),
)
def test_every_action_is_shown_once_and_no_line_is_too_long(make, ranks, count, width):
    chunked = make in (looped_bfs, zb_v)
    schedule = make(ranks * (1 + chunked), count)
    shown = timeline(schedule)
    for row, line in zip(schedule, rows(shown, None), strict=True):
        cells = line.split("│")[1:-1]
        said = [cell.strip() for cell in cells if cell.strip("░·")]
        assert said == [action.text(stage=chunked) for action in row]
    assert all(len(line) <= width for line in shown.text(width).splitlines())
    assert len({len(line) for line in rows(shown, None)}) == 1


def test_a_recorded_run():
    events = [
        (1, Action("F", 1, 0), 7.3, 7.5),
        (0, Action("SF", 0, 0, 1), 7.2, 7.3),
        (0, F0, 7.1, 7.2),
        (1, Action("B", 1, 0), 7.5, 7.8),
        (0, B0, 7.9, 8.1),
    ]
    shown = Timeline.of_events(events)
    assert rows(shown) == [
        "rank 0 │F0│░░░░░░░░░░░░░░░░░░░░│B0   │",
        "rank 1 │·····│F0   │B0      │········│",
    ]
    assert shown.makespan == pytest.approx(1.0)
    assert shown.bubble == pytest.approx((0.7, 0.5))
    assert Timeline.of_events([TimedAction(*event) for event in events]) == shown


# A run beside its schedule

RAN = [(0, F0, 5.0, 5.1), (0, B0, 5.5, 5.7)]
RAN += [(1, Action("F", 1, 0), 5.1, 5.2), (1, Action("B", 1, 0), 5.2, 5.4)]


def test_a_run_is_shown_beside_its_schedule_over_one_time():
    shown = timeline(["F0 B0", "F0 B0"], measured=RAN)
    assert str(shown) == golden("""
                0              0.5
rank 0 planned  │F0│░░░░░░░░│B0   │··│
rank 0 measured │F0│░░░░░░░░░░░│B0   │
rank 1 planned  │··│F0│B0   │········│
rank 1 measured │··│F0│B0   │········│

 F  forward   B  backward
 ░  waits for another rank   ·  not begun, or done

makespan 600 ms planned, 700 ms measured
                   busy  bubble        held
rank 0 planned   300 ms  300 ms  50 %     1
rank 0 measured  300 ms  400 ms  57 %     1
rank 1 planned   300 ms  300 ms  50 %     1
rank 1 measured  300 ms  400 ms  57 %     1""")
    assert shown.bubble == pytest.approx([0.3, 0.4, 0.3, 0.4])
    assert [row.name for row in shown.rows] == shown.names
    quick = timeline(["F0 B0", "F0 B0"], Costs(0.01, 0.01, 0.01), measured=RAN)
    assert quick.makespan == pytest.approx(0.06) and quick.end == quick.measured


def test_the_schedule_beside_a_run_takes_its_stages_medians():
    schedule = zb_h1(2, 3)
    slow = Costs(f=[1.0, 3.0], i=[2.0, 1.0], w=[0.5, 2.5])
    ran = simulate(schedule, slow)
    late = [e._replace(end=e.end + 9) if e.action.text() == "W2@1" else e for e in ran]
    shown = timeline(schedule, measured=late)
    assert shown.makespan == timeline(schedule, slow).makespan
    assert shown.measured == shown.makespan + 9


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        (RAN[1:], "rank 0 ran F0@0 0 times, and the schedule has it 1 times"),
        ([*RAN, (0, F0, 6.0, 6.1)], "rank 0 ran F0@0 2 times"),
        ([*RAN, (1, Action("F", 1, 1), 6.0, 6.1)], "rank 1 ran F1@1 1 times, and .* 0"),
        ([*RAN, (2, Action("F", 2, 0), 6.0, 6.1)], "rank 2 ran F0@2 1 times, and .* 0"),
    ],
)
def test_a_run_of_another_schedule_is_refused(ran, said):
    with pytest.raises(ValueError, match=said):
        timeline(["F0 B0", "F0 B0"], measured=ran)


# Streams over time


PHASES = [look.title for look in computing().values()]


def test_a_step_in_full():
    assert streams(STEP).text(37) == golden("""
                0 s            10.0 s
rank 0 compute │··FFFFFFRRBBBBBB▒▒UU│
rank 0 data    │gg              ss  │
rank 0 to 1    │        >           │
rank 1 compute │·········FFFFFF·····│

 F  forward   R  recompute
 B  backward   U  update
 ▒  waits for a transfer
 ·  not begun, or done
 g  all_gather   s  psum_scatter
 >  message

stream          spans    busy  share
rank 0 compute      4  8.00 s   80 %
rank 0 data         2  2.00 s   20 %
rank 0 to 1         1  500 ms    5 %
rank 1 compute      1  3.00 s   30 %""")


def test_a_message_is_shown_once_and_a_kind_of_rank_with_its_count():
    def names(shown):
        return [lane.name for lane in shown.lanes]

    assert "rank 1 from 0" in names(streams(STEP, ranks=[1]))  # its send is not here
    ring = [span("to 1", "send", "", 0, 1), span("from 3", "receive", "", 0, 1)]
    assert names(streams(ring)) == ["rank 0 to 1"]  # of ranks that do the same
    late = [ring[0], span("from 3", "receive", "", 1, 2)]
    assert names(streams(late)) == ["rank 0 to 1", "rank 0 from 3"]
    assert names(streams(estimate(small(), A100_40))) == ["rank 0 ×4 compute"]


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
    assert shown.title == describe_rates(found) and "MFU <1 %" in shown.title
    assert str(shown).startswith(shown.title)
    assert {lane.stream for lane in shown.lanes} == {"compute"}
    assert sum(lane.busy for lane in shown.lanes) == pytest.approx(found.compute)

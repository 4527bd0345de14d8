"""A schedule in letters: golden text, bands, colours, real runs, and bad input."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.pipelining.actions import Action, ScheduleError, parse
from fsfunc.pipelining.schedules import gpipe, looped_bfs, one_f_one_b, zb_h1, zb_v
from fsfunc.pipelining.timing import Costs, Event, bubble, simulate
from fsfunc.pipelining.verification import held
from fsfunc.show import Timeline, timeline
from tests.programs import python
from tests.show.planned import golden

F0, B0 = Action("F", 0, 0), Action("B", 0, 0)


def rows(shown, width=120):
    """The lines of the ranks' rows alone."""
    return [line for line in shown.text(width).splitlines() if "│" in line]


def test_gpipe():
    assert str(timeline(gpipe(3, 2))) == golden("""
       0              5              10
rank 0 │F0│F1│░░░░░░░░░░░░░░░░░│B0   │B1   │
rank 1 │··│F0│F1│░░░░░░░░│B0   │B1   │·····│
rank 2 │·····│F0│F1│B0   │B1   │···········│

 F  forward   B  backward
 ░  waits for another rank   ·  not begun, or done

makespan 12
        busy  bubble        held
rank 0     6       6  50 %     2
rank 1     6       6  50 %     2
rank 2     6       6  50 %     2""")


def test_input_and_weight_gradients():
    assert rows(timeline(zb_h1(2, 2))) == [
        "rank 0 │F0│F1│░░│I0│W0│I1│W1│",
        "rank 1 │··│F0│I0│F1│I1│W0│W1│",
    ]


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


def test_a_long_timeline_goes_on_below():
    text = timeline(looped_bfs(4, 2)).text(width=40)
    assert (
        text[: text.index(" F  forward")]
        == golden("""
       0         1         2         3
rank 0 │F0@0│F1@0│F0@2│F1@2│░░░░░░░░░┆
rank 1 │····│F0@1│F1@1│F0@3│F1@3│B1@3┆

       3         4         5         6
rank 0 ░░░░░│B1@2     │B0@2     │B1@0┆
rank 1      │B0@3     │B1@1     │B0@1┆

       6         7
rank 0      │B0@0     │
rank 1      │·········│
""")
        + "\n\n"
    )


def test_a_cell_is_as_wide_as_the_longest_label():
    assert rows(timeline(gpipe(1, 11), Costs(f=1, i=0, w=1)), None) == [
        "rank 0 "
        + "".join(f"│F{m}".ljust(4) for m in range(11))
        + "".join(f"│B{m}".ljust(4) for m in range(11))
        + "│"
    ]


@pytest.mark.parametrize("unit", [8, 0.1, 1 / 3, 1e-6, Fraction(1, 7)])
def test_the_unit_of_time_does_not_matter(unit):
    assert rows(timeline(one_f_one_b(2, 2), Costs(unit, unit, unit))) == [
        "rank 0 │F0│F1│░░░░░│B0   │░░│B1   │",
        "rank 1 │··│F0│B0   │F1│B1   │·····│",
    ]


def test_times_without_a_unit_are_rounded_to_columns():
    shown = timeline(one_f_one_b(2, 3), Costs(f=1.0, i=1.1317, w=1.2391))
    assert rows(shown) == [
        "rank 0 │F0│F1│░░░░░░│B0    │F2│B1    │░░│B2    │",
        "rank 1 │··│F0│B0    │F1│B1    │F2│B2    │······│",
    ]
    assert "makespan 13.48\n" in shown.text()


def test_what_takes_no_time_has_no_cell():
    shown = timeline(["F0 I0 W0 F1 I1 W1"], Costs(w=0))
    assert rows(shown) == ["rank 0 │F0│I0│F1│I1│"]


def test_what_is_too_short_for_its_name_shows_its_kind():
    ends = [0, 1, 1.6, 3, 4.002, 5, 6, 7.1, 8, 9, 10]
    actions = [Action("F", 0, m) for m in range(10)]
    events = [(0, a, *t) for a, t in zip(actions, pairwise(ends), strict=True)]
    assert rows(Timeline.of_events(events)) == [
        "rank 0 │F0│F│F2  │F3│F4 │F5│F6 │F7│F8│F9│"
    ]


def test_a_rank_may_have_nothing_to_do():
    assert rows(timeline(["F0 B0", ""])) == [
        "rank 0 │F0│B0   │",
        "rank 1 │········│",
    ]


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


def test_the_figures_are_those_of_the_schedule():
    schedule, costs = zb_v(8, 8), Costs(f=1.0, i=1.5, w=0.5)
    shown = timeline(schedule, costs)
    assert shown.held == held(schedule)
    assert shown.makespan == max(event.end for event in simulate(schedule, costs))
    assert min(shown.bubble) == bubble(schedule, costs)


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
    assert Timeline.of_events([Event(*event) for event in events]) == shown


@pytest.mark.parametrize(
    ("events", "error", "match"),
    [
        ([], ValueError, "no events to show"),
        ([(0, Action("SF", 0, 0, 1), 0, 1)], ValueError, "no F, B, I or W among"),
        ([(0, F0, 0, 1), "F1"], TypeError, "event 1 is 'F1': give .rank, action, st"),
        ([(0, "F0", 0, 1)], TypeError, "event 0 has 'F0' where its Action belongs"),
        ([(-1, F0, 0, 1)], ValueError, "event 0, F0@0 of rank -1: a rank is 0, 1"),
        ([(0, F0, 2, 1)], ValueError, "F0@0 of rank 0: it cannot last from 2 to 1"),
        ([(0, F0, 0, float("nan"))], ValueError, "cannot last from 0 to nan"),
        ([(0, F0, 0, 2), (0, B0, 1, 3)], ValueError, "rank 0: B0 starts at 1, befo"),
        ([(0, F0, 1, 1)], ValueError, "every action takes no time"),
    ],
)
def test_events_that_are_none_are_refused(events, error, match):
    with pytest.raises(error, match=match):
        Timeline.of_events(events).text()


def test_a_schedule_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="F0"):
        timeline(["B0 F0"])
    with pytest.raises(ScheduleError, match="rank 0, entry 1: 'X0' is no action"):
        timeline(["F0 X0"])
    with pytest.raises(ValueError, match="every action takes no time"):
        timeline(parse(["F0 B0"]), Costs(0, 0, 0)).text()


def test_nothing_that_draws_is_imported_before_it_draws(tmp_path):
    program = """if True:
        import sys
        import torch  # what it imports is not our doing
        before = set(sys.modules)
        import fsfunc.show
        shown = fsfunc.show.timeline(["F0 B0"])
        late = [m for m in ("matplotlib", "rich") if m in set(sys.modules) - before]
        assert not late, late
        str(shown)
        assert "matplotlib" not in sys.modules
        shown.save(sys.argv[1])
        assert "matplotlib" in sys.modules
        assert "matplotlib.pyplot" not in sys.modules  # it has state of its own
    """
    done = python("-c", program, tmp_path / "t.png", timeout=60)
    assert done.returncode == 0, done.stderr

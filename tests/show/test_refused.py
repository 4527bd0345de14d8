"""What cannot be shown is refused in words: (call, error, way out)."""

import math
import re

import pytest

from fsfunc.comm.mesh import Mesh
from fsfunc.pipelining.actions import Action, ScheduleError
from fsfunc.pipelining.timing import Costs
from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import A100_40
from fsfunc.sharded.layout import Layout, Split
from fsfunc.show import Timeline, memory, plan, sharding, streams, timeline, trace
from fsfunc.show.estimates import estimate as show_estimate
from tests.checks import all_refused
from tests.show.planned import F32, STEP, lone, ran, small, span, stages

F0, B0, SF0 = Action("F", 0, 0), Action("B", 0, 0), Action("SF", 0, 0, 1)
LEAF = Layout((4,), F32, (Split(0, "data", 2),), "w")
MESH = Mesh({"data": 2}, "abstract")


def drawn(*events):
    return lambda: Timeline.of_events(events).text()


def rows(*schedule):
    return lambda: timeline(schedule).text()


def shown(*spans, **options):
    return lambda: streams(spans, **options)


def lying(value, mesh=None, **options):
    return lambda: sharding(value, mesh and Mesh(mesh, "abstract"), **options)


def others(**options):
    """A trace of another rank than the estimate's."""
    spans = estimate(small(), A100_40).spans
    return trace([s._replace(rank=1) for s in spans], **options)


TYPES = {
    "an event": (drawn((0, F0, 0, 1), "F1"), "event 1 is 'F1': give (rank, action, st"),
    "an action": (drawn((0, "F0", 0, 1)), f"event 0 is {(0, 'F0', 0, 1)}: give"),
    "a rank": (drawn((-1, F0, 0, 1)), "ranks are 0, 1, ..."),
    "a span": (shown(STEP[0], (0, "F0", 0, 1)), "span 1 is (0, 'F0', 0, 1): give"),
    "a short event": (lambda: trace([(0, F0, 0)]), f"event 0 is {(0, F0, 0)}: give ("),
    "spans first": (lambda: trace([STEP[0], (0, F0, 0, 1)]), "span 1 is"),
    "a plan of a run": (
        lambda: trace([(0, F0, 0, 1)], plan=small()),
        "give trace(estimate, path, plan=plan)",
    ),
    "no plan": (lambda: others(plan=3), "shows a plan, and got int"),
    "a rank's plan": (
        lambda: plan(small().ranks[0]),
        "shows a plan, and got RankPlan: make one by ff.plan",
    ),
    "a list": (lambda: memory([]), "shows a plan, and got list"),
    "no estimate": (
        lambda: show_estimate(3),
        "make one by ff.estimate(plan, hardware)",
    ),
    "no mesh": (lambda: sharding(LEAF, {"data": 2}), "over a mesh, and got dict"),
}
RANKS = {
    "a plan": (lambda: plan(small(), rank=4), "rank 4 of Mesh"),
    "memory": (lambda: memory(small(), 9), "rank 9"),
    "a leaf": (lying(LEAF, rank=2), f"no rank 2 in {MESH}: 0 to 1"),
}
VALUES = {
    "no events": (drawn(), "no events to show: was the run recorded"),
    "nothing computed": (drawn((0, SF0, 0, 1)), "no F, B, I or W among"),
    "an end": (drawn((0, F0, 2, 1)), "F0@0 of rank 0: it cannot last from 2 to 1"),
    "a time": (drawn((0, F0, 0, math.nan)), "cannot last from 0 to nan"),
    "two at a time": (
        drawn((0, F0, 0, 2), (0, B0, 1, 3)),
        "rank 0: B0 starts at 1, before F0 ends at 2",
    ),
    "no time": (drawn((0, F0, 1, 1)), "every action takes no time"),
    "no costs": (
        lambda: timeline(["F0 B0"], Costs(0, 0, 0)).text(),
        "every action takes no time: give costs above 0",
    ),
    "no spans": (shown(), "no spans to show"),
    "a span's end": (shown(span("compute", "f", "x", 2, 1)), "from 2 to 1"),
    "a span's time": (shown(span("compute", "f", "x", 0, math.nan)), "from 0 to nan"),
    "a span's rank": (shown(*STEP, ranks=[7]), "rank 7 has no spans: those of the"),
    "an empty window": (shown(*STEP, between=(5, 5)), "no time between 5 and 5"),
    "a late window": (
        shown(*STEP, between=(11, 12)),
        "nothing happens between 11 and 12: the step ends at 10 s",
    ),
    "an empty step": (shown(span("compute", "f", "x", 0, 0)), "no time between 0.0"),
    "no memory": (lambda: memory(lone([ran("f", "forward")])), "no memory to show"),
    "another plan": (
        lambda: others(plan=stages()),
        "rank 1, and the plan only [0, 2]: give the plan that was estimated",
    ),
    "another axis": (
        lying(LEAF, {"model": 2}),
        "'w' f32[4] is over axis \"data\" of size 2, which is not there",
    ),
    "another size": (
        lying([LEAF], {"data": 4}),
        f"of size 4 in {Mesh({'data': 4}, 'abstract')}: pass the mesh that it was",
    ),
    "no leaves": (lying({}), "no leaves"),
}
SCHEDULES = {
    "out of order": (rows("B0 F0"), "F0"),
    "an entry": (rows("F0 X0"), "rank 0, entry 1: 'X0' is no action"),
}


test_what_cannot_be_shown_is_refused = all_refused(
    {
        f"{error.__name__}: {name}": (call, error, re.escape(way_out))
        for table, error in (
            (TYPES, TypeError),
            (RANKS, IndexError),
            (VALUES, ValueError),
            (SCHEDULES, ScheduleError),
        )
        for name, (call, way_out) in table.items()
    }
)


def test_what_is_refused_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="cannot last from 1 to 0"):
        trace([(0, F0, 1, 0)], tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []

"""One more kind of action, listed where all others are: there alone."""

import pytest

import fsfunc as ff
from fsfunc.pipelining.actions import (
    KINDS,
    Action,
    ActionKind,
    ScheduleError,
    listing,
    parse,
)
from fsfunc.pipelining.timing import simulate
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import verify
from fsfunc.show import timeline, trace
from tests.models import chain, floats, layer, layers

ROWS = ["F0 F1 X0 B0 X1 B1", "F0 X0 B0 F1 X1 B1"]


@pytest.fixture
def ran(monkeypatch):
    """A kind that comes after the forward, takes as long, and notes its turn."""
    ran = []
    note = lambda worker, action: ran.append((worker.rank_group.index, str(action)))  # noqa: E731
    kind = ActionKind(
        "X", "extra", "#123456", "grey", costs=("f",), needs=("F",), run=note
    )  # fmt: skip
    monkeypatch.setitem(KINDS, "X", kind)
    return ran


def test_a_kind_that_is_listed_is_written_verified_timed_and_shown(ran):
    schedule = parse(ROWS)
    assert listing(schedule) == f"0: {ROWS[0]}\n1: {ROWS[1]}"
    verify(schedule)
    lowered = with_transfers(schedule)
    verify(lowered)
    assert [a for a in lowered[0] if a.is_compute] == list(schedule[0])
    with pytest.raises(ScheduleError, match="X0@0 comes before F0@0, which it needs"):
        verify(["X0 F0 B0"])
    ends = {str(event.action): event.end for event in simulate(["F0 X0 B0"])}
    assert ends == {"F0@0": 1, "X0@0": 2, "B0@0": 4}
    shown = timeline(schedule).text(120)
    assert "│X0│" in shown and "X  extra" in shown
    slices = trace([(0, Action("X", 0, 0), 0.0, 1.0)])["traceEvents"]
    (found,) = [e for e in slices if e.get("ph") == "X"]
    assert (found["name"], found["cname"]) == ("X0@0", "grey")


def test_a_kind_that_is_listed_runs_in_a_pipeline_and_in_its_plan(ran):
    mesh = ff.make_mesh({"pipe": 2})
    params, x = layers(2, 4, make=floats), floats(4, 4)

    def run(schedule):
        grad = ff.value_and_grad(chain(layer))
        step = ff.pipeline(grad, mesh, "pipe", n_microbatches=2, schedule=schedule)
        return ff.spmd(lambda: step(params, x)[0], mesh)()

    assert run(ROWS) == run(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    assert sorted(ran) == [(0, "X0@0"), (0, "X1@0"), (1, "X0@1"), (1, "X1@1")]
    ran.clear()
    grad = ff.value_and_grad(chain(layer))
    step = ff.pipeline(grad, mesh, "pipe", n_microbatches=2, schedule=ROWS)
    abstract = ff.make_mesh({"pipe": 2}, "abstract")
    plan = ff.plan(step, params, x, mesh=abstract)
    assert [turn.label for turn in plan[1].turns if turn.name == "X"] == ["X0", "X1"]

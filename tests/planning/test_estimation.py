"""Estimates of plans made by hand, on a machine where a byte takes a second."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.comm.backends.baton import Deadlock
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.pipelining.schedules import gpipe, one_f_one_b, zb_h1
from fsfunc.pipelining.timing import Costs, bubble
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.planning.estimation import estimate
from fsfunc.planning.events import (
    Allocated,
    Op,
    Ran,
    Started,
    Waited,
)
from fsfunc.planning.hardware import Hardware, Level, replace
from fsfunc.planning.plans import Plan, RankPlan
from tests.checks import all_refused

CLOCK = Hardware(
    "clock",
    peak={"float32": 1.0, "bfloat16": 4.0},
    efficiency=((1, 1.0),),
    attention=1.0,
    bandwidth=1.0,
    overhead=0.0,
    levels=(Level(ranks=0, bandwidth=1.0, latency=0.0),),
    memory=1,
)
DATA = Mesh({"data": 4}, "abstract")
PIPE = Mesh({"pipe": 2}, "abstract")


def op(seconds, flops=0, dtype=torch.float32):
    return Op("aten.add", flops, seconds, dtype)


def ran(seconds, unit="u", phase="forward", **more):
    return Ran(op(seconds, **more), unit, phase)


def record(seconds, axis=("data",), name="all_gather"):
    return Record(name, axis, Fraction(seconds), torch.float32, "u", "forward")


def started(number, seconds, axis=("data",), ranks=(0, 1, 2, 3), name="all_gather"):
    return Started(number, "issued", ranks, record(seconds, axis, name))


def sent(number, seconds, rank, to):
    written = record(seconds, ("pipe",), "ppermute")
    return Started(number, "sent", (rank, to), written)


def asked(number, source, rank):
    return Started(number, "asked for", (source, rank))


def planned(mesh, *programs, asked=()):
    """A plan of these programs, of the first ranks that run them."""
    alike = mesh.size // max(1, len(programs))
    ranks = []
    for number, events in enumerate(programs):
        where = mesh.coordinates(number)
        ranks.append(RankPlan(number, alike, where, events, {}, (), ()))
    return Plan(mesh, tuple(ranks), asked)


def run(*events, hardware=CLOCK, **more):
    return estimate(planned(DATA, list(events)), hardware, **more)


def parts(found):
    return found.seconds, found.compute, found.exposed, found.bubble


# ------------------------------------------------------------------ one program


TWO_GROUPS = [
    started(0, 3, ranks=(0, 1)), started(1, 3, axis=("model",), ranks=(0, 2)),
    Waited(0), Waited(1),
]  # fmt: skip
COMPUTED = [ran(1), Ran(op(5), "v", "backward"), ran(4, unit="v")]


def gathered(transfer, computing, after=0):
    return [started(0, transfer), ran(computing), Waited(0), Waited(0), ran(after)]


TIMES = {  # events, overlap, and what comes of them: (seconds, computing, exposed)
    "computing alone": (COMPUTED, 1.0, (10, 10, 0)),
    "a hidden gather": (gathered(3, 5, 1), 1.0, (6, 6, 0)),
    "one that is not covered": (gathered(7, 5, 1), 1.0, (8, 6, 2)),
    "two of one group": (
        [started(0, 3), started(1, 3), ran(4), Waited(1), Waited(0)], 1.0, (6, 4, 2),
    ),
    "two groups": (TWO_GROUPS, 1.0, (3, 0, 3)),
    "what is still under way": ([ran(1), started(0, 5)], 1.0, (6, 1, 5)),
    # Beside a transfer computing goes at half speed, or not at all.
    "half": (gathered(4, 10), 0.5, (12, 10, 2)),
    "half, and longer": (gathered(4, 1), 0.5, (4, 1, 3)),
    "half, and as long": (gathered(4, 3), 0.5, (5, 3, 2)),
    "none": (gathered(4, 10), 0.0, (14, 10, 4)),
    "none, and longer": (gathered(4, 1), 0.0, (5, 1, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", TIMES)
def test_what_a_step_takes(name):
    events, overlap, expected = TIMES[name]
    found = run(*events, hardware=replace(CLOCK, overlap=overlap))
    assert parts(found) == (*expected, 0)


def test_memory_that_is_taken_anew_costs_its_first_touch():
    given = Allocated(0, 8, "", "", "")
    took = Allocated(1, 8, "aten.add", "u", "forward")
    assert run(given, took, ran(1)).seconds == 1
    assert run(given, took, ran(1), hardware=replace(CLOCK, fresh=2.0)).seconds == 5


def test_rates_are_a_devices_own():
    events = ran(4, flops=6), ran(4, flops=8, dtype=torch.bfloat16)
    found = run(*events, tokens=50)
    assert found.seconds == 6 + 4
    assert found.flops_per_second == 14 / 10
    assert found.share_of_peak == (6 / 1 + 8 / 4) / 10
    assert found.tokens_per_second == 5
    assert run().flops_per_second == 0


# ----------------------------------------------------------- ranks that differ


def both(*programs, mesh=PIPE, hardware=CLOCK):
    return estimate(planned(mesh, *programs, asked=("pipe",)), hardware)


def test_a_message_starts_when_it_was_sent_and_asked_for():
    found = both(
        [ran(5), sent(0, 2, 0, 1), ran(9)], [asked(0, 0, 1), ran(1), Waited(0)]
    )
    first, second = found.ranks
    assert (first.compute, first.bubble, first.idle) == (14, 0, 0)
    assert (second.compute, second.bubble, second.idle) == (1, 6, 7)
    # A rank that asks late keeps the sender where it waits.
    found = both([sent(0, 2, 0, 1), Waited(0)], [ran(5), asked(0, 0, 1), Waited(0)])
    assert [r.bubble for r in found.ranks] == [7, 2]
    assert parts(found) == (7, 5, 0, 2)


def test_waiting_for_a_rank_to_come_is_a_bubble_and_for_the_transfer_is_not():
    def meet(*before):
        return [*before, started(0, 4, ("pipe",), (0, 1), "psum"), Waited(0)]

    found = both(meet(ran(1)), meet(ran(6)))
    assert [(r.compute, r.bubble, r.exposed) for r in found.ranks] == [
        (1, 5, 4),
        (6, 0, 4),
    ]
    assert parts(found) == (10, 6, 4, 0)  # those of the rank that computes most


# -------------------------------------------------------------------- schedules


def events_of(rank, row, costs):
    """The events of a rank of a schedule with its transfers written out."""
    events, due, size = [], defaultdict(list), int(costs.send)
    for number, action in enumerate(row):
        kind, key = action.kind, (action.stage, action.microbatch)
        other = action.peer
        if kind in ("SF", "SB"):
            events.append(sent(number, size, rank, other))
        elif kind in ("RF", "RB"):
            events.append(asked(number, other, rank))
            due[kind[1], key].append(number)
        else:
            events += [Waited(n) for n in due["F" if kind == "F" else "B", key]]
            events.append(ran(costs.of(action), phase=kind))
    return events


@given(
    made=st.sampled_from([gpipe, one_f_one_b, zb_h1]),
    stages=st.integers(2, 5),
    microbatches=st.integers(1, 8),
    costs=st.builds(
        Costs,
        f=st.integers(1, 5),
        i=st.integers(1, 5),
        w=st.integers(1, 5),
        send=st.integers(0, 1),
    ),
)
def test_a_pipelines_bubble_is_that_of_its_schedule(made, stages, microbatches, costs):
    schedule = made(stages, microbatches)
    mesh = Mesh({"pipe": stages}, "abstract")
    rows = enumerate(with_transfers(schedule))
    events = [events_of(rank, row, costs) for rank, row in rows]
    found = estimate(planned(mesh, *events, asked=("pipe",)), CLOCK)
    assert found.bubble == bubble(with_transfers(schedule), costs)
    assert found.exposed == 0 and found.bubble == found.seconds - found.compute


# ------------------------------------------------------------------- properties


@st.composite
def plans(draw):
    """Plans that cannot lock: all ranks do what one list says, and wait later."""
    mesh = Mesh({"data": 2, "pipe": draw(st.integers(1, 3))}, "abstract")
    stages = mesh.axes["pipe"]
    programs = [[] for _ in range(stages)]
    waits = [[] for _ in range(stages)]
    seconds = st.integers(0, 9)
    for number in range(draw(st.integers(1, 20))):
        kind = draw(st.sampled_from(["run", "data", "pipe", "all", "message"]))
        size, rank = draw(seconds), draw(st.integers(0, stages - 1))
        if kind == "run":
            programs[rank].append(ran(size, flops=size))
        elif kind == "message" and stages > 1:
            to = (rank + draw(st.integers(1, stages - 1))) % stages
            programs[rank].append(sent(number, size, rank, to))
            programs[to].append(asked(number, rank, to))
            waits[rank].append(number)
            waits[to].append(number)
        elif kind != "message":
            axis = {"data": ("data",), "pipe": ("pipe",), "all": ("data", "pipe")}[kind]
            for r in [rank] if kind == "data" else range(stages):
                ranks = mesh.members(axis, r)
                programs[r].append(started(number, size, axis, ranks))
                waits[r].append(number)
        for r in range(stages):
            while waits[r] and draw(st.booleans()):
                at = draw(st.integers(0, len(waits[r]) - 1))
                programs[r].append(Waited(waits[r].pop(at)))
    return planned(mesh, *programs, asked=("pipe",))


machines = st.sampled_from([0.0, 0.25, 1.0]).map(lambda o: replace(CLOCK, overlap=o))


@given(plan=plans(), machine=machines)
def test_a_step_is_no_shorter_than_any_of_its_streams(plan, machine):
    """And spans of a stream follow each other, in whatever order ranks are planned."""
    found = estimate(plan, machine)
    busy, ends = Counter(), defaultdict(float)
    for span in found.spans:
        stream = span.rank, span.stream
        busy[stream] += span.end - span.start
        assert ends[stream] <= span.start <= span.end <= found.seconds
        ends[stream] = span.end
    assert found.seconds >= max(busy.values(), default=0) - 1e-9
    for rank in found.ranks:
        kinds = rank.compute, rank.exposed, rank.bubble, rank.idle
        assert sum(kinds) == pytest.approx(found.seconds) and min(kinds) >= 0
        assert busy[rank.rank, "compute"] == pytest.approx(rank.compute)
        waits = Counter()
        for span in found.waits:
            waits[span.phase] += (span.end - span.start) * (span.rank == rank.rank)
        assert waits["exposed"] == pytest.approx(rank.exposed, abs=1e-9)
        assert waits["bubble"] == pytest.approx(rank.bubble, abs=1e-9)
    total = found.compute + found.exposed + found.bubble
    assert found.seconds == pytest.approx(total)
    turned = Plan(plan.mesh, plan.ranks[::-1], plan.differing_axes)
    there = sorted(estimate(turned, machine).ranks, key=lambda r: r.rank)
    assert there == list(found.ranks)


@given(plan=plans(), machine=machines, factor=st.sampled_from([1.5, 2.0, 100.0]))
def test_a_faster_network_or_more_overlap_never_slows_a_step(plan, machine, factor):
    before = estimate(plan, machine).seconds
    links = (Level(ranks=0, bandwidth=factor, latency=0.0),)
    assert estimate(plan, replace(machine, levels=links)).seconds <= before + 1e-9
    assert estimate(plan, replace(machine, overlap=1.0)).seconds <= before + 1e-9


# -------------------------------------------------------------------- bad input


def test_ranks_that_wait_for_each_other_are_named():
    def program(other):
        return [asked(0, other, 1 - other), Waited(0), sent(1, 1, 1 - other, other)]

    with pytest.raises(Deadlock) as error:
        both(program(1), program(0))
    text = str(error.value)
    assert "rank 0 waits, at event 1, for message 0 from rank 1 to rank 0" in text
    assert "rank 1 has not sent it" in text and "rank 0 has not sent it" in text


MEETING = [started(0, 1, ("pipe",), (0, 1), "psum"), Waited(0)]
OTHER = [started(0, 1, ("pipe",), (0, 1), "pmax")]
ALONE = RankPlan(0, 1, {"pipe": 0}, [asked(0, 1, 0)], {}, (), ())
test_plans_that_cannot_be_are_refused = all_refused([
    (lambda: both([sent(0, 1, 0, 1)], [ran(1)]), Deadlock,
     "from rank 0 to rank 1: rank 1 has not asked"),
    (lambda: both(MEETING, [ran(1)]), Deadlock,
     'psum 0 over "pipe": rank 1 has not issued it'),
    (lambda: both(OTHER, MEETING), CollectiveMismatch,
     "a psum of rank 1 but a pmax of rank"),
    (lambda: estimate(Plan(PIPE, (ALONE,), ("pipe",)), CLOCK), ValueError,
     "rank 1 of .* was not planned: plan the step"),
    (lambda: run(Waited(3)), ValueError, "rank 0 waits for number 3, which it has not"),
    (lambda: run(ran(1), tokens=0), ValueError, "tokens of one step"),
    (lambda: run(ran(1), tokens=float("nan")), ValueError, "tokens of one .*"),
])  # fmt: skip


def test_a_host_launches_transfers_as_it_does_operators():
    """The second of 3 s is launched after 4, and waits for the first: 2 + 3 + 3."""
    two = [started(0, 3), started(1, 3), Waited(0), Waited(1)]
    machine = replace(CLOCK, processors=1, overhead=2.0)
    found = run(*two, hardware=machine)
    assert found.seconds == found.exposed == 8 and not found.bubble
    assert run(*two, hardware=replace(machine, overhead=0.0)).seconds == 6
    empty = [event for n in range(5) for event in (started(n, 0), Waited(n))]
    assert run(*empty, hardware=machine).seconds == 10  # what the host takes

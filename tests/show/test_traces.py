"""A trace: what perfetto asks of slices, tracks and arrows; and bad input."""

import json
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_v
from fsfunc.pipelining.timing import Costs, simulate
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import A100_40
from fsfunc.show import trace
from fsfunc.show.memory_plot import curve_of
from tests.show.planned import small

F0, SF0, RF0 = Action("F", 0, 0), Action("SF", 0, 0, 1), Action("RF", 1, 0, 0)


def of_kind(written, phase):
    return [event for event in written["traceEvents"] if event["ph"] == phase]


def test_a_run_in_full(tmp_path):
    path = tmp_path / "run.json"
    written = trace([(0, F0, 10.0, 10.5), (0, SF0, 10.5, 10.75)], path)
    assert json.loads(path.read_text()) == written
    assert written["displayTimeUnit"] == "ms"
    named = [event["args"] for event in of_kind(written, "M")]
    assert named == [
        {"name": "rank 0"}, {"sort_index": 0}, {"name": "compute"}, {"sort_index": 1},
        {"name": "send"}, {"sort_index": 2},
    ]  # fmt: skip
    assert of_kind(written, "X") == [
        {"ph": "X", "name": "F0@0", "cat": "compute", "pid": 0, "tid": 1,
         "ts": 0.0, "dur": 500000.0, "cname": "rail_response",
         "args": {"kind": "forward", "stage": 0, "microbatch": 0}},
        {"ph": "X", "name": "SF0@0>1", "cat": "transfer", "pid": 0, "tid": 2,
         "ts": 500000.0, "dur": 250000.0, "cname": "rail_idle",
         "args": {"kind": "send activations", "stage": 0, "microbatch": 0, "peer": 1}},
    ]  # fmt: skip


@given(
    st.sampled_from([gpipe, one_f_one_b, interleaved_1f1b, zb_v]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.1, 2.5]),
)
def test_what_viewers_ask_of_any_schedule(make, ranks, count, send):
    chunked = make in (interleaved_1f1b, zb_v)
    schedule = with_transfers(make(ranks * (1 + chunked), count))
    written = trace(simulate(schedule, Costs(send=send)))
    slices = of_kind(written, "X")
    assert len(slices) == sum(map(len, schedule))
    times = [event["ts"] for event in written["traceEvents"]]
    assert times == sorted(times) and times[0] == 0

    tracks = defaultdict(list)
    for piece in slices:
        tracks[piece["pid"], piece["tid"]].append(piece)
    for track in tracks.values():  # slices of a thread do not overlap
        for before, after in zip(track, track[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    threads = [thread for _, thread in tracks]
    assert len(set(threads)) == len(threads) and 0 not in threads
    named = {e["tid"] for e in of_kind(written, "M") if e["name"] == "thread_name"}
    assert named == set(threads)
    assert {pid for pid, _ in tracks} == set(range(ranks))

    sends = [piece for piece in slices if piece["name"].startswith("S")]
    assert len(of_kind(written, "s")) == len(of_kind(written, "f")) == len(sends)
    starts = {event["id"]: event for event in of_kind(written, "s")}
    for end in of_kind(written, "f"):  # both ends lie in a slice of their thread
        assert starts[end["id"]]["ts"] <= end["ts"]
        for flow in (starts[end["id"]], end):
            assert any(
                piece["ts"] <= flow["ts"] < piece["ts"] + piece["dur"]
                for piece in tracks[flow["pid"], flow["tid"]]
            )


def test_the_memory_of_a_plan_is_a_counter():
    plan = small()
    found = estimate(plan, A100_40)
    written = trace(found, plan=plan)
    counters, own = of_kind(written, "C"), plan.ranks[0]
    assert {(e["name"], e["pid"]) for e in counters} == {("memory", 0)}
    top = max(counters, key=lambda e: sum(e["args"].values()))
    assert top["args"] == own.peak
    backward = [s for s in found.spans if (s.unit, s.phase) == ("block", "backward")]
    at = top["ts"] / 1e6
    assert backward[0].start <= at <= backward[0].end
    times = [e["ts"] for e in counters]
    assert times == sorted(times) and times[-1] <= found.seconds * 1e6 + 1e-3
    assert counters[-1]["args"] == own.peak | {
        kind: size
        for kind, size in zip(own.peak, curve_of(own).points[-1][1], strict=True)
    }
    assert of_kind(trace(found), "C") == []
    everywhere = [e["ts"] for e in written["traceEvents"]]
    assert everywhere == sorted(everywhere)

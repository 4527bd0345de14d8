"""A trace: what perfetto asks of slices, tracks and arrows; and bad input."""

import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.pipelining.actions import Action
from fsfunc.pipelining.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_v
from fsfunc.pipelining.timing import Costs, simulate
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.show import trace

F0, SF0, RF0 = Action("F", 0, 0), Action("SF", 0, 0, 1), Action("RF", 1, 0, 0)


def of_kind(written, phase):
    return [event for event in written["traceEvents"] if event["ph"] == phase]


def test_a_run_in_full(tmp_path):
    path = tmp_path / "run.json"
    written = trace([(0, F0, 10.0, 10.5), (0, SF0, 10.5, 10.75)], path)
    assert json.loads(path.read_text()) == written
    assert written == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"ph": "M", "pid": 0, "ts": 0, "name": "process_name",
             "args": {"name": "rank 0"}},
            {"ph": "M", "pid": 0, "ts": 0, "name": "process_sort_index",
             "args": {"sort_index": 0}},
            {"ph": "M", "pid": 0, "tid": 1, "ts": 0, "name": "thread_name",
             "args": {"name": "compute"}},
            {"ph": "M", "pid": 0, "tid": 1, "ts": 0, "name": "thread_sort_index",
             "args": {"sort_index": 1}},
            {"ph": "M", "pid": 0, "tid": 100, "ts": 0, "name": "thread_name",
             "args": {"name": "send"}},
            {"ph": "M", "pid": 0, "tid": 100, "ts": 0, "name": "thread_sort_index",
             "args": {"sort_index": 100}},
            {"ph": "X", "name": "F0@0", "cat": "compute", "pid": 0, "tid": 1,
             "ts": 0.0, "dur": 500000.0, "cname": "rail_response",
             "args": {"kind": "forward", "stage": 0, "microbatch": 0}},
            {"ph": "X", "name": "SF0@0>1", "cat": "transfer", "pid": 0, "tid": 100,
             "ts": 500000.0, "dur": 250000.0, "cname": "rail_idle",
             "args": {"kind": "send activations", "stage": 0, "microbatch": 0,
                      "peer": 1}},
        ],
    }  # fmt: skip


def test_an_arrow_leads_from_a_send_to_the_end_of_its_receive():
    events = [(0, SF0, 2.0, 3.0), (1, RF0, 0.0, 3.0), (0, F0, 0.0, 2.0)]
    begin, end = (of_kind(trace(events), phase)[0] for phase in "sf")
    assert begin["id"] == end["id"] and end["bp"] == "e"
    assert (begin["pid"], begin["ts"]) == (0, 2e6)
    assert end["pid"] == 1 and 2e6 < end["ts"] < 3e6


def test_steps_are_paired_in_order():
    steps = [(rank, a, t, t + 1) for t in (0, 5) for rank, a in ((0, SF0), (1, RF0))]
    written = trace(steps[::-1])
    pairs = zip(of_kind(written, "s"), of_kind(written, "f"), strict=True)
    assert [(s["id"] == f["id"], s["ts"] // 1e6, f["ts"] // 1e6) for s, f in pairs] == [
        (True, 0, 0),
        (True, 5, 5),
    ]


def test_a_send_whose_receive_is_not_here_has_no_arrow():
    written = trace([(0, SF0, 0, 1), (1, Action("RF", 1, 1, 0), 0, 1)])
    assert of_kind(written, "s") == of_kind(written, "f") == []


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


@pytest.mark.parametrize(
    ("events", "error", "match"),
    [
        ([], ValueError, "no events to show: was the run recorded"),
        ([(0, F0, 0)], TypeError, "event 0 is .*give .rank, action, start, end. tup"),
        ([(0, F0, 1, 0)], ValueError, "F0@0 of rank 0: it cannot last from 1 to 0"),
    ],
)
def test_events_that_are_none_are_refused(tmp_path, events, error, match):
    with pytest.raises(error, match=match):
        trace(events, tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []

"""What ranks tell each other beside their collectives."""

import json
import os
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch

from fsfunc.comm.backends.flight import FlightRecorder
from fsfunc.comm.backends.hotline import GONE, SILENT, Hotline
from fsfunc.comm.backends.link import PeerFailed, signature
from fsfunc.comm.backends.watchdog import Watchdog, patience_of


class Group:
    ranks, axis = (0, 1), ("data",)
    link = None


def recorded(flight, number=0):
    said = signature("psum", {}, ("data",), torch.ones(3), "")
    return flight.begin(said, Group, number)


# The hotline


@pytest.fixture
def pair():
    here, there = Hotline(lambda m: m), Hotline(lambda m: {"state": m["ask"]})
    here.others = {7: there.address}
    yield here, there
    here.close()
    there.close()


def served(line, times=1):
    thread = threading.Thread(target=lambda: [line.serve(5) for _ in range(times)])
    thread.start()
    return thread


def test_a_rank_that_is_asked_answers(pair):
    here, there = pair
    thread = served(there)
    assert here.ask([7, 8], {"ask": "x" * 9999}, 5) == {7: {"state": "x" * 9999}}
    thread.join()


def test_who_is_stopped_is_told_from_who_has_ended(pair):
    here, there = pair
    began = time.monotonic()
    assert here.ask([7], {"ask": ""}, 0.1) == {7: {"state": SILENT}}
    assert time.monotonic() - began < 3
    there.close()
    assert here.ask([7], {"ask": ""}, 5) == {7: {"state": GONE}}


@pytest.mark.parametrize("text", [b"hello\n", b"[1]\n", b'{"word": "guess"}\n', b""])
def test_a_stranger_is_not_answered(pair, text):
    import socket

    _, there = pair
    thread = served(there)
    host, port, _ = there.address.rsplit(":", 2)
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    thread.join()


def test_who_waits_for_a_message_can_be_woken(pair):
    here, _ = pair
    thread, began = served(here), time.monotonic()
    here.wake()
    thread.join()
    assert time.monotonic() - began < 4


# Records


def test_the_last_hundred_are_kept():
    flight = FlightRecorder()
    for i in range(250):
        recorded(flight, i)
    assert [r.number for r in flight.records] == list(range(150, 250))


def test_a_state_is_where_the_process_is():
    flight = FlightRecorder()
    assert "runs, at " in flight.state() and __file__ in flight.state()
    record = recorded(flight)
    assert 'its last was #0 psum over "data", float32[3]' in flight.state()
    record.waits()
    assert flight.state().startswith('waits in #0 psum over "data", float32[3] at ')
    assert flight.waiting() is record
    record.ended = time.monotonic()
    assert flight.waiting() is None
    flight.said = "raised it"
    assert flight.state() == "raised it"
    recorded(flight, 1)  # it goes on
    assert flight.state().startswith("runs")


def test_a_dump_is_a_line_for_each_record(tmp_path):
    flight = FlightRecorder()
    recorded(flight).ended = 1.0
    recorded(flight, 1).waits()
    recorded(flight, 2).failed = True
    recorded(flight, 3)
    flight.dump(str(tmp_path / "0"), 5)
    first, *rows = map(json.loads, (tmp_path / "0").read_text().splitlines())
    assert first["rank"] == 5 and first["state"].startswith("waits in #1")
    assert any("test_a_dump" in line for line in first["stack"])
    assert [r["state"] for r in rows] == ["ended", "waiting", "failed", "issued"]
    assert rows[0]["shape"] == [3] and rows[0]["dtype"] == "float32"
    assert abs(rows[3]["begun"] - time.time()) < 60


# When, and what


@pytest.mark.parametrize(
    "text, seconds, patience",
    [("", 60, 30), ("", 1800, 300), ("2.5", 60, 2.5), ("0", 60, float("inf"))],
)
def test_patience(monkeypatch, text, seconds, patience):
    monkeypatch.setenv("FSFUNC_WATCHDOG", text)
    assert patience_of(timedelta(seconds=seconds)) == patience


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_patience_that_is_none(monkeypatch, text):
    monkeypatch.setenv("FSFUNC_WATCHDOG", text)
    with pytest.raises(ValueError, match="FSFUNC_WATCHDOG=.*seconds"):
        patience_of(None)


def test_what_a_rank_ends_by_is_known_when_it_is_gone():
    watchdog = Watchdog()
    other = Hotline(lambda m: {"state": ""})
    watchdog.hotline = Hotline(watchdog._answer)
    try:
        watchdog.join(0, {0: "", 1: other.address})
        other.close()
        watchdog._answer({"ended": "raised ValueError: no", "rank": 1})
        error = watchdog.failed(recorded(watchdog.flight), 1, RuntimeError("gloo"))
    finally:
        watchdog.hotline.close()
    assert type(error) is PeerFailed and isinstance(error, RuntimeError)
    first, _, zero, one = str(error).splitlines()
    assert first.endswith("Rank 1 raised ValueError: no, and ended")
    assert zero.startswith("  rank 0 gave up #0 psum") and "rank 1 closed" in zero
    assert one == "  rank 1 raised ValueError: no, and ended"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_stand_in_for_its_parent():
    """As a worker of a data loader: the parent's port closes with the parent."""
    watchdog, caller = Watchdog(), Hotline(lambda m: m)
    caller.others = {0: watchdog.listen()}
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.read(reader, 1)
        os._exit(0)
    try:
        assert caller.ask([0], {}, 5)[0]["state"].startswith("runs, at ")
        watchdog.close()
        assert caller.ask([0], {}, 5) == {0: {"state": GONE}}
    finally:
        os.write(writer, b"x")
        os.waitpid(pid, 0)
        sys.excepthook = watchdog.hook
        caller.close()


LATE = """
    import atexit, json, os, sys, time, torch, fsfunc as ff
    os.environ["FSFUNC_WATCHDOG"], os.environ["FSFUNC_FLIGHT"] = "0.5", sys.argv[1]
    mesh = ff.make_mesh({"a": 2, "b": 2}, timeout=60)
    rank, every = mesh.rank, ("a", "b")

    def total():
        ff.psum(torch.ones(5), every)
        if rank == 3:
            time.sleep(2)
        return ff.psum(torch.ones(5), every).tolist()

    assert ff.spmd(total, mesh)()[0] == [4.0] * 5  # late, and all goes well
    print(json.dumps(sorted(os.listdir(sys.argv[1]))), flush=True)

    def ends():
        ff.psum(torch.ones(5), every)
        if rank == 3:
            atexit.register(time.sleep, 6)  # its groups live on
            raise ValueError("no such token")
        ff.psum(torch.ones(5), {0: "b", 1: "a", 2: every}[rank])

    began = time.perf_counter()
    try:
        ff.spmd(ends, mesh)()
    except RuntimeError as error:
        took = time.perf_counter() - began
        assert took < 5, took
        print("raised ValueError: no such token at" in str(error), flush=True)
        os._exit(0)
"""


@pytest.mark.processes
def test_who_is_missing_is_said_and_who_waits_for_the_dead_is_woken(
    processes, tmp_path
):
    with pytest.raises(AssertionError) as caught:  # rank 3 ends by its error
        processes(LATE, 4, str(tmp_path))
    text = str(caught.value)
    assert "ended with [0, 0, 0, 1]" in text, text
    assert text.splitlines().count("True") == 3
    said = [line for line in text.splitlines() if "[fsfunc] rank 0 has waited" in line]
    table = text.partition(said[0])[2].splitlines()
    assert "  rank 0 waits in #1 psum" in table[1] and "rank 3 runs, at " in table[7]
    files = sorted(tmp_path.glob("fsfunc-*-rank?.jsonl"))
    assert len(files) == 4
    for rank, file in enumerate(sorted(files, key=lambda f: f.stem[-1])):
        first, *rows = map(json.loads, file.read_text().splitlines())
        assert first["rank"] == rank and rows[-1]["op"] == "psum"

"""What ranks tell each other beside their collectives."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsfunc.comm.backends import process_groups
from fsfunc.comm.backends.link import PeerFailed, call_signature
from fsfunc.comm.backends.process_groups import within
from fsfunc.comm.watch import mailboxes, watchdog
from fsfunc.comm.watch.mailboxes import GONE, SILENT, Mailbox
from fsfunc.comm.watch.watchdog import FlightRecorder, Watchdog, patience_of


def recorded(flight, number=0, link=None):
    said = call_signature("psum", {}, ("data",), torch.ones(3), "")
    where = SimpleNamespace(ranks=(0, 1), axis=("data",), link=link)
    return flight.begin(said, where, number)


# The mailboxes


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def boxes(store, monkeypatch):
    """Those of two ranks of three, which answer with what they were asked."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(mailboxes, "_LIMIT", 1.0)
    found = [Mailbox(store, rank, 3, lambda kind: f"asked {kind}") for rank in (0, 1)]
    yield found
    for box in found:
        box.close("")
    assert not any(box.thread.is_alive() for box in found)


def test_a_rank_that_is_asked_answers(boxes, store):
    here, there = boxes
    kept = store.num_keys()
    heard, rest = here.ask([0, 1], "where")
    assert heard == {0: "asked where", 1: "asked where"} and rest == {}
    there.answer = lambda kind: "x" * 9999
    assert here.ask([1], "where")[0][1] == "x" * 4000
    assert store.num_keys() == kept  # nothing is left lying there


def test_of_who_does_not_answer_it_is_said_what_is_known(boxes):
    here, there = boxes
    began = time.monotonic()
    heard, rest = here.ask([1, 2], "where")
    assert 1 <= time.monotonic() - began < 3
    assert [*heard] == [0, 1] and rest[2].startswith("does not answer: its process")
    here.known_states[2] = GONE
    assert here.ask([2], "where")[1] == {2: GONE}
    there.ends("raised ValueError: no")
    assert here.ask([1], "where")[0][1] == "asked where"  # it lives on, and answers
    assert here.last_words([1, 2]) == {1: "raised ValueError: no"}
    there.close("raised ValueError: no")
    began = time.monotonic()
    assert here.ask([1], "where")[1] == {1: "raised ValueError: no, and ended"}
    assert time.monotonic() - began < 0.9  # it is not waited for


STRANGE = [
    b"", b"hello", b"[" * 60_000, b'{"rank": 1}', b"is 3 1\nno such rank", b"is -1 1\n",
    b"is 1 99999999999999999\n", b"is 1 1\n" + b"x" * 5000, b"\xff\xfe 1 1\n",
    b"is 1 \xd9\xa3\n", b"save 1\n",
]  # fmt: skip


def test_what_a_stranger_leaves_is_not_heard(boxes):
    """No recursion, no thread that ends, and nobody else is kept from being heard."""
    here, there = boxes
    for data in STRANGE:
        there.outbox.queue_push("0", data)
        assert there.ask([0], "where")[0][0] == "asked where", data
        assert here.thread.is_alive() and here.latest.keys() <= {("is", 0), ("is", 1)}
    word = mailboxes.parse(b"is 1 1\nruns \x1b[31m\x07\xc2\x9b\xff\n  on", 2)
    assert word.text == "runs ?[31m??\ufffd\n  on"  # nothing that a terminal obeys


STORE = """
    import time, torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def kept():
    """A process that keeps a store, and the store."""
    args = [sys.executable, "-c", textwrap.dedent(STORE)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        yield process, dist.TCPStore("127.0.0.1", port, is_master=False)
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, of_it, of_others",
    [(signal.SIGKILL, GONE, "has gone"), (signal.SIGSTOP, SILENT, "is silent")],
)
def test_who_keeps_the_store_may_go_or_stop(kept, monkeypatch, how, of_it, of_others):
    """Nobody hangs, and the rank that kept it is named."""
    monkeypatch.setattr(mailboxes, "_LIMIT", 1.0)
    process, store = kept
    box = Mailbox(store, 1, 3, lambda kind: "here")
    assert box.ask([1], "where")[0] == {1: "here"}
    os.kill(process.pid, how)
    if how == signal.SIGKILL:
        box.wait(20, lambda: box.lost)
    else:
        os.waitpid(process.pid, os.WUNTRACED)
    for _ in range(2):
        began = time.monotonic()
        heard, rest = box.ask([0, 2], "where")
        assert time.monotonic() - began < 5
        assert heard == {} and rest[0] == of_it
        assert rest[2].startswith("cannot be asked: the store at 127.0.0.1:")
        assert f"that rank 0 keeps {of_others}" in rest[2]
    began = time.monotonic()
    box.close("")
    assert time.monotonic() - began < 5
    process.kill()
    box.thread.join(20)
    assert not box.thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["before", "between"])
def test_who_keeps_the_store_may_stop_while_others_join(kept, monkeypatch, stopped):
    """Before they connect, or between two of their questions."""
    process, store = kept
    monkeypatch.setattr(process_groups, "ANSWERS", 1.0)
    monkeypatch.setattr(process_groups, "_STORES", {})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    fresh = process_groups.fresh

    def stops(*args):
        os.kill(process.pid, signal.SIGSTOP)
        return fresh(*args)

    if stopped == "before":
        stops = fresh
        os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(process_groups, "fresh", stops)
    began = time.monotonic()
    says = (
        "^rank 0 did not join rank 1 of 2, or (is stopped|has gone).* keeps the store"
    )
    with pytest.raises(TimeoutError, match=says):
        process_groups.meet(1, 2, timedelta(seconds=1))
    assert time.monotonic() - began < 8


def test_a_call_that_does_not_return_is_waited_for_in_time():
    over = threading.Event()
    with pytest.raises(TimeoutError, match="timed out"):
        within(0.05, over.wait)
    over.set()
    with pytest.raises(ValueError, match="so"):
        within(5, lambda: int("so"))
    assert within(5, threading.get_ident) != threading.get_ident()


def test_records_hold_no_mesh():
    class Link:
        pass

    link, flight = Link(), FlightRecorder()
    record = recorded(flight, link=link)
    gone = weakref.ref(link)
    assert record.link() is link and "psum" in flight.state()
    del link
    assert gone() is None and record.link() is None and "psum" in flight.state()


def test_who_has_no_descriptor_left_blames_itself(monkeypatch, store):
    """But where another one's end is known."""
    monkeypatch.setattr(watchdog, "out_of_descriptors", lambda: True)
    dog = Watchdog()
    error = dog.failed(recorded(dog.flight), 1, RuntimeError("gloo: closed"))
    assert error.rank == 0 and "Rank 0 itself: this process has no file" in str(error)
    assert dog.flight.error_text.endswith("; it blames rank 0")
    dog.mailbox = Mailbox(store, 0, 2, dog._answer)
    dog.mailbox.put(mailboxes.Message("is", 1, mailboxes._ENDED, "raised ValueError"))
    try:
        error = dog.failed(recorded(dog.flight), 1, RuntimeError("gloo: closed"))
    finally:
        dog.mailbox.close("")
    assert error.rank == 1


def test_patience(monkeypatch):
    for text, seconds, patience in (
        ("", 60, 30), ("", 1800, 300), ("2.5", 60, 2.5), ("0", 60, float("inf")),
    ):  # fmt: skip
        monkeypatch.setenv("FSFUNC_WATCHDOG", text)
        assert patience_of(timedelta(seconds=seconds)) == patience
    for text in "soon", "-1", "nan":
        monkeypatch.setenv("FSFUNC_WATCHDOG", text)
        with pytest.raises(ValueError, match="FSFUNC_WATCHDOG=.*seconds"):
            patience_of(None)


def test_what_a_rank_ends_by_is_known_when_it_is_gone(store):
    dog, other = Watchdog(), Mailbox(store, 1, 2, str)
    dog.mailbox = Mailbox(store, 0, 2, dog._answer)
    try:
        other.close("raised ValueError: no")
        error = dog.failed(recorded(dog.flight), 1, RuntimeError("gloo"))
    finally:
        dog.mailbox.close("")
    assert type(error) is PeerFailed and error.rank == 1
    assert type(error) is PeerFailed and isinstance(error, RuntimeError)
    first, _, zero, one = str(error).splitlines()
    assert first.endswith("Rank 1 raised ValueError: no, and ended")
    assert zero.startswith("  rank 0 gave up #0 psum") and "rank 1 closed" in zero
    assert one == "  rank 1 raised ValueError: no, and ended"


GAVE_UP = "gave up #1 psum: rank 2 closed its connection; it blames rank 2, and ended"
CANNOT = "cannot be asked: the store that rank 0 keeps has gone"


@pytest.mark.parametrize(
    "states, other, blamed, says",
    [
        ({0: GAVE_UP, 1: "gave up #1 psum: so", 2: CANNOT}, 0, 2, f"rank 0 {GAVE_UP}"),
        ({0: GAVE_UP, 1: "gave up #1 psum: so", 2: GONE}, 0, 2, f"Rank 2 {GONE}"),
        ({0: "runs, at a", 1: "x", 2: "runs, at b"}, 2, 2, "Rank 2 runs, at b"),
        ({0: GAVE_UP, 1: "x", 2: "runs, at b", 3: "runs, at c"}, 3, 2, "Rank 2 runs"),
        (
            {0: "raised A", 1: "x", 2: "raised B", 3: GAVE_UP},
            None,
            2,
            "Rank 2 raised B",
        ),
        ({0: GAVE_UP.replace("k 2", "k 1"), 1: "x", 2: CANNOT}, 0, 1, "Rank 1 itself"),
        ({0: "waits in #1", 2: "waits in #2"}, 2, None, ""),
        ({1: "x"}, None, None, ""),
    ],
)
def test_who_gave_up_before_names_the_cause(states, other, blamed, says):
    states = {r: text for r, text in states.items() if r != 1}
    found, text = watchdog._find_cause(states, 1, other)
    assert found == blamed and says in text, text
    assert text.startswith(f"Rank {blamed}") or not text


HERE = 'waits in #0 psum over "data", float32[3] at a.py:1, for 2.0 s'
THERE = 'gave up #0 psum over "data", float64[3] at a.py:1: rank 0 did not come in time'


@pytest.mark.parametrize(
    "states, other, says",
    [
        ({0: HERE, 2: THERE, 3: HERE}, 0, "Rank 2 gave up #0 psum"),
        ({0: THERE, 2: THERE.replace("64[3]", "64[3] "), 3: THERE}, 2, "Rank 1 itself"),
        ({0: THERE}, None, "Rank 0 gave up"),
        ({0: HERE, 2: HERE}, 2, "Rank 2 waits"),
        ({0: CANNOT, 2: HERE}, 0, "Rank 2 waits"),
        ({0: CANNOT, 2: CANNOT}, 2, "Rank 2 cannot"),
        ({}, 2, ""),
    ],
)
def test_who_is_at_another_collective_than_most_is_named(states, other, says):
    record = recorded(FlightRecorder())
    record.ranks = (0, 1, 2, 3)
    text = watchdog._find_odd_rank(states, record, 1, other)
    assert text.startswith(says) and bool(text) == bool(says)


def test_what_follows_from_a_wait_in_vain_is_not_its_cause():
    """A survivor that goes on into its closed mesh has not raised of itself."""
    dog = Watchdog()
    error = dog.failed(recorded(dog.flight), 1, RuntimeError("gloo: closed"))
    assert error.rank is None  # without a mailbox nobody else is heard
    dog.note_raised(RuntimeError("this mesh is closed since PeerFailed in psum"))
    assert dog.flight.state().startswith("gave up #0 psum")
    recorded(dog.flight)
    dog.note_raised(ValueError("no such token"))
    assert dog.flight.state().startswith("raised ValueError: no such token")


@pytest.mark.parametrize("kind", ["file", "before libuv"])
def test_without_queues_ranks_know_what_gloo_tells(tmp_path, kind):
    if kind == "file":
        store = dist.FileStore(str(tmp_path / "store"), 2)
    else:
        how = {"wait_for_workers": False, "use_libuv": False}
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, **how)
    dog, hook = Watchdog(), sys.excepthook
    try:
        dog.join(0, 2, store)
        error = dog.failed(recorded(dog.flight), 1, RuntimeError("gloo"))
    finally:
        dog.close()
        sys.excepthook = hook
    assert dog.mailbox is None
    assert "To it, rank 1 closed its connection, or called another" in str(error)


LATE = """
    import atexit, json, os, sys, time, torch, fsfunc as ff
    os.environ["FSFUNC_WATCHDOG"] = "0.5"
    mesh = ff.make_mesh({"a": 2, "b": 2}, timeout=60)
    rank, every = mesh.rank, ("a", "b")

    def total():
        ff.psum(torch.ones(5), every)
        if rank == 3:
            time.sleep(2)
        return ff.psum(torch.ones(5), every).tolist()

    assert ff.spmd(total, mesh)()[0] == [4.0] * 5  # late, and all goes well

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
"""


@pytest.mark.processes
def test_who_is_missing_is_said_and_who_waits_for_the_dead_is_woken(processes):
    with pytest.raises(AssertionError) as caught:  # rank 3 ends by its error
        processes(LATE, 4)
    text = str(caught.value)
    assert "ended with [0, 0, 0, 1]" in text, text
    assert text.splitlines().count("True") == 3
    said = [line for line in text.splitlines() if "[fsfunc] rank 0 has waited" in line]
    table = text.partition(said[0])[2].splitlines()
    assert "  rank 0 waits in #1 psum" in table[1] and "rank 3 runs, at " in table[4]

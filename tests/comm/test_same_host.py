"""Processes of one host meet, or send by gloo: both of two, and both say so."""

import errno
import gc
import os
import resource
import socket
import threading
import time
import warnings

import pytest
import torch

from fsfunc.comm.backends import same_host
from fsfunc.comm.backends.channels import Channel

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="shared memory needs Linux"
)


class Table:
    """What each of ``n`` threads says, once all have said it."""

    def __init__(self, n):
        self.rounds, self.n, self.lock = [{}, {}], n, threading.Lock()

    def tell(self, rank):
        count = iter(self.rounds)

        def said(row):
            rows = next(count)
            rows[rank] = list(row)
            table = lambda: [rows[r] for r in range(self.n)]  # noqa: E731

            def wait():
                end = time.monotonic() + 20
                while len(rows) < self.n and time.monotonic() < end:
                    time.sleep(0.001)
                return table()

            return type("Rows", (), {"done": lambda _: len(rows) == self.n,
                                     "wait": lambda _: wait()})()  # fmt: skip

        return said


def met(doors, before=lambda rank: None):
    """(by rank, who has met whom; their neighbours), of threads with these doors."""
    table, near, errors = Table(len(doors)), {}, []

    def rank(r):
        try:
            before(r)
            addresses = {i: door.address for i, door in enumerate(doors)}
            near[r] = doors[r].meet(r, addresses, 20.0, table.tell(r))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(doors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for door in doors:
        door.close()
    assert not errors and not any(thread.is_alive() for thread in threads)
    by_rank = [set() if near[r] is None else set(near[r].by_rank) for r in near]
    return [by_rank[list(near).index(r)] for r in range(len(doors))], near


def check_messages(near):
    """Each sends to each that it has met."""
    channels = {r: Channel(None, (0, 1), one) for r, one in near.items() if one}
    for r, channel in channels.items():
        for other in near[r].by_rank:
            channel.send(torch.full((3000,), 10.0 * r + other), other, 0)
    for r, channel in channels.items():
        for other in near[r].by_rank:
            into = torch.zeros(3000)
            channel.receive(into, other, 0)[1].wait()
            assert into.unique().tolist() == [10.0 * other + r]


@pytest.fixture(autouse=True)
def nothing_stays():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_all_of_one_host_meet_and_those_without_a_door_do_not(monkeypatch):
    doors = [same_host.Door(True) for _ in range(4)]
    doors[2].close()
    doors[2].address = ""
    who, near = met(doors)
    assert who == [{1, 3}, {0, 3}, set(), {0, 1}]
    check_messages(near)
    alone = [same_host.Door(True), same_host.Door(False)]
    assert met(alone) == ([set(), set()], {0: None, 1: None})


def test_those_of_two_users_send_by_gloo_and_say_so(monkeypatch):
    monkeypatch.setattr(same_host, "_is_same_user", lambda connection: False)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning) as said:
        who, _ = met([same_host.Door(True) for _ in range(3)])
    assert who == [set()] * 3 and time.monotonic() - began < 4  # nobody is waited for
    texts = sorted(str(w.message) for w in said)
    assert [t.partition(" (")[0].partition(" with ")[2] for t in texts] == [
        f"ranks {r} of this host" for r in ([0, 1], [0, 2], [1, 2])
    ]
    for text in texts:
        assert "(another user's processes): messages to them go by gloo" in text


def test_a_stranger_is_sent_away_and_forgotten():
    """It says nothing, or anything, also with a descriptor; it may stay or go."""
    doors, knocking = [same_host.Door(True) for _ in range(3)], []
    words = [b"", b"x", b"x" * 24, b"x" * 9000, bytes(16) + (1).to_bytes(8, "little")]

    def knock(rank):
        name = same_host.Address(*doors[rank].address.split()).name
        for i, word in enumerate(words):
            one = socket.socket(socket.AF_UNIX)
            one.connect(f"\0fsfunc-{name}")
            if word:
                socket.send_fds(one, [word], [doors[rank].file] if i % 2 else [])
            knocking.append(one) if i % 3 else one.close()

    with warnings.catch_warnings(action="error"):
        who, near = met(doors, knock)
    assert who == [{1, 2}, {0, 2}, {0, 1}]
    check_messages(near)
    for one in knocking:
        one.close()


def test_a_crowd_before_a_door_is_let_in(monkeypatch):
    """As many as it holds wait there, and others come all the time."""
    monkeypatch.setattr(same_host, "_BACKLOG", 2)
    doors, over = [same_host.Door(True) for _ in range(2)], threading.Event()
    name = same_host.Address(*doors[0].address.split()).name

    def crowd():
        while not over.is_set():
            with socket.socket(socket.AF_UNIX) as one:
                one.setblocking(False)
                try:
                    one.connect(f"\0fsfunc-{name}")
                    one.send(b"x" * 100)
                except OSError:
                    time.sleep(0.001)

    threads = [threading.Thread(target=crowd) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.1)
        who, near = met(doors)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert who == [{1}, {0}]
    check_messages(near)


def test_a_door_that_stays_full_is_left_in_time(monkeypatch):
    monkeypatch.setattr(same_host, "_BACKLOG", 0)
    monkeypatch.setattr(same_host, "_PATIENCE", 0.3)
    doors = [same_host.Door(True) for _ in range(2)]
    name = same_host.Address(*doors[0].address.split()).name
    first = socket.socket(socket.AF_UNIX)
    first.connect(f"\0fsfunc-{name}")
    monkeypatch.setattr(same_host._Encounter, "admit", lambda self: time.sleep(0.01))
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="temporarily unavailable") as said:
        assert met(doors)[0] == [set(), set()]
    assert time.monotonic() - began < 5 and len(said) == 2
    first.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("spare", range(0, 9))
def test_without_descriptors_messages_go_by_gloo(spare, late, monkeypatch):
    """Wherever they run out: at a socket, at a door, at a memory that has come.

    late: a rank speaks once the other had time to shut its door.
    """
    if late:
        send_fds = socket.send_fds
        slowly = lambda *args: time.sleep(0.05) or send_fds(*args)  # noqa: E731
        monkeypatch.setattr(socket, "send_fds", slowly)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    doors = [same_host.Door(True) for _ in range(2)]
    # Exactly ``spare`` are left only once the gaps below the highest are filled.
    last = max(int(name) for name in os.listdir("/proc/self/fd"))
    filled = [os.open(os.devnull, os.O_RDONLY)]
    while filled[-1] < last:
        filled.append(os.open(os.devnull, os.O_RDONLY))
    limit = filled[-1] + 1 + spare
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            who, near = met(doors)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in filled:
            os.close(one)
    assert who in ([{1}, {0}], [set(), set()])
    if who[0]:
        check_messages(near)
        assert not said
    else:
        short = os.strerror(errno.EMFILE)
        assert len(said) == 2 and all(short in str(w.message) for w in said), said


def test_a_system_that_refuses_shared_memory_leaves_gloo(monkeypatch):
    def refuses(*args):
        raise PermissionError("not here")

    for name in ("shared_file", "host"):
        with monkeypatch.context() as patch:
            patch.setattr(same_host, name, refuses)
            with pytest.warns(RuntimeWarning, match=r"\(not here\): messages .* gloo"):
                door = same_host.Door(True)
        assert door.address == ""
        assert door.meet(0, {0: "", 1: "here other key"}, 1.0, None) is None
        door.close()

"""Processes of one host: messages come whole, memory is free when it was read."""

import ctypes
import gc
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.comm.backends.channels import Channel, Loan
from fsfunc.comm.backends.neighbours import Disconnected, Neighbours
from fsfunc.comm.backends.process_collectives import Pairs
from fsfunc.comm.backends.shared_memory import (
    PAGE,
    SharedMemory,
    SharedPool,
    shared_file,
)
from fsfunc.comm.groups import RankGroup
from fsfunc.runtime.memory import BufferPool, fresh_buffers
from tests.covering import examples

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="shared memory needs Linux"
)
LARGE = 1 << 21


def both(limit=20.0):
    """The channels of two ranks, both in this process."""
    files, ends = [shared_file(), shared_file()], socket.socketpair()
    copies = [SharedMemory(os.dup(file)) for file in files]
    others = [{1 - i: (ends[i], copies[1 - i])} for i in (0, 1)]
    near = [Neighbours(SharedMemory(files[i]), others[i], limit) for i in (0, 1)]
    return [Channel(None, (0, 1), one) for one in near]


def value(count, number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-9, 9, (count,), generator=generator).to(dtype)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_messages_come_whole_and_in_order(data):
    """Of any size, early or expected, waited for in any order, under any tag."""
    here, there = both()
    counts = data.draw(st.lists(st.sampled_from([1, 5, 300, 70_000, LARGE // 4])))
    tags = [data.draw(st.integers(0, 2)) for _ in counts]
    early, lies, comes = [[data.draw(st.booleans()) for _ in counts] for _ in "123"]
    into, works = [torch.full((n,), 99.0) for n in counts], [None] * len(counts)
    receive = lambda i: there.receive(into[i], 0, tags[i])[1]  # noqa: E731
    sent = []
    for i, n in enumerate(counts):
        # Of one tag the n-th receive is of the n-th send.
        before = [j for j in range(i) if tags[j] == tags[i] and works[j] is None]
        if not early[i]:
            for j in (*before, i):
                works[j] = receive(j)
        x = value(n, i)
        if lies[i]:
            x = here.neighbours.pool.get(n, x.dtype, x).copy_(x)
        sent.append(here.send(x, 1, tags[i], answered=early[i])[1])
        x.fill_(7)  # it may be written at once
        if comes[i]:
            there.neighbours.progress()
    works = [receive(i) if w is None else w for i, w in enumerate(works)]
    for i in data.draw(st.permutations(range(len(counts)))):
        works[i].wait()
        assert torch.equal(into[i], value(counts[i], i))
    there.neighbours.progress()
    for work in sent:
        work.wait()
    here.neighbours.progress()
    assert not here.neighbours.by_rank[1].unread
    assert not there.neighbours.by_rank[0].early


def test_a_spent_tensor_is_read_where_it_is_and_free_once_it_was_read():
    here, there = both()
    pool = here.neighbours.pool
    x = pool.get(LARGE, torch.float32, torch.empty(0))
    at = x.data_ptr()
    x.fill_(3)
    here.send(x, 1, 0, read_only=True)
    del x
    loan = there.borrow(torch.empty(2, LARGE // 2), 0, 0, BufferPool())
    loan.work[1].wait()
    assert loan.buffer is None and loan.read().unique().tolist() == [3.0]
    other = pool.get(LARGE, torch.float32, torch.empty(0)).fill_(9)
    assert other.data_ptr() != at
    assert loan.read().unique().tolist() == [3.0]
    loan.end()
    assert pool.get(LARGE, torch.float32, torch.empty(0)).data_ptr() == at


def test_an_answered_send_is_over_when_it_was_received():
    here, there = both(limit=0.05)
    work = here.send(torch.ones(3), 1, 4, answered=True)[1]
    assert not work.is_completed()
    into = torch.zeros(3)
    there.receive(into, 0, 4)[1].wait()
    assert work.is_completed() and into.tolist() == [1.0] * 3
    lost = here.send(torch.ones(3), 1, 5, answered=True)[1]
    with pytest.raises(Disconnected, match="timed out"):
        lost.wait()


def test_who_waits_in_vain_hangs_up_and_what_had_come_is_read():
    here, there = both(limit=0.05)
    there.send(torch.ones(9), 0, 1)
    with pytest.raises(Disconnected, match="timed out"):
        here.receive(torch.zeros(9), 1, 0)[1].wait()
    into = torch.zeros(9)
    here.receive(into, 1, 1)[1].wait()
    assert into.tolist() == [1.0] * 9
    with pytest.raises(Disconnected, match="closed its connection"):
        there.receive(torch.zeros(9), 0, 0)[1].wait()
    with pytest.raises(Disconnected):
        there.send(torch.ones(9), 0, 1)


def test_another_size_than_expected_is_an_error():
    here, there = both()
    here.send(torch.ones(1000), 1, 0)
    into = torch.zeros(999)
    with pytest.raises(Disconnected, match="sent 4000 bytes, not 3996"):
        there.receive(into, 0, 0)[1].wait()
    assert not into.any()


def test_two_that_send_more_than_a_socket_holds_do_not_wait_for_each_other():
    channels = both()
    x = [[value(200, 1000 * i + k) for k in range(3000)] for i in (0, 1)]
    found = [[torch.zeros(200) for _ in range(3000)] for _ in (0, 1)]

    def run(me):
        sent = [channels[me].send(y, 1 - me, k)[1] for k, y in enumerate(x[me])]
        for k, y in enumerate(found[me]):
            channels[me].receive(y, 1 - me, k)[1].wait()
        for work in sent:
            work.wait()

    threads = [threading.Thread(target=run, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for me in (0, 1):
        assert all(map(torch.equal, found[me], x[1 - me]))


def test_who_waits_goes_on_with_the_messages_of_its_other_meshes():
    (here, there), (others, theirs) = both(), both()
    for k in range(300):
        here.send(value(200, k), 1, k)
    assert here.neighbours.by_rank[1].out
    into = torch.zeros(3)
    thread = threading.Thread(target=others.receive(into, 1, 0)[1].wait)
    thread.start()
    while here.neighbours.by_rank[1].out and thread.is_alive():
        there.neighbours.progress()
    theirs.send(torch.ones(3), 0, 0)
    thread.join(60)
    assert into.tolist() == [1.0] * 3


def test_two_threads_wait_for_messages_of_one_connection():
    here, there = both()
    into = [torch.zeros(600) for _ in range(40)]
    works = [there.receive(y, 0, k)[1] for k, y in enumerate(into)]
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    for k in reversed(range(40)):
        here.send(value(600, k), 1, k)
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(y, value(600, k)) for k, y in enumerate(into))


def test_a_message_is_there_only_when_it_is_whole(monkeypatch):
    """`ctypes` lets other threads run while it copies, such as the one that waits."""
    here, there = both()
    work = there.receive(torch.zeros(600), 0, 0)[1]
    copy, seen = ctypes.memmove, []

    def copying(*args):
        seen.append(work.over())
        return copy(*args)

    here.send(torch.ones(600), 1, 0)
    monkeypatch.setattr(ctypes, "memmove", copying)
    work.wait()
    assert seen == [False] and work.over()


def test_who_has_gone_is_not_waited_for():
    here, there = both()
    work = here.send(torch.ones(3), 1, 0, answered=True)[1]
    assert not work.is_completed()
    there.neighbours.close()
    there.neighbours.progress()
    assert work.is_completed()
    with pytest.raises(Disconnected, match="closed its connection"):
        work.wait()


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.device("meta"),
        fresh_buffers,
        torch.inference_mode,
        lambda: torch.device("cpu"),
    ],
)
def test_a_context_of_the_caller_changes_nothing(context):
    here, there = both()
    x, into = value(5000, 3), torch.zeros(5000)
    with context():
        here.send(x, 1, 0)
        there.receive(into, 0, 0)[1].wait()
        room = here.neighbours.pool.get(3, torch.float32, x)
    assert torch.equal(into, x) and room.device == x.device


def test_what_is_sent_is_contiguous_and_what_decode_may_write_is_copied():
    sent = []
    link = SimpleNamespace(
        start=lambda op, x, where, **how: sent.append((x, how["read_only"])),
        moves_data=True,
    )
    where = RankGroup(("data",), (0, 1), 0, 0, link)
    x = torch.arange(8.0)

    class Half(ff.Gather):
        exact = False

    for how in (ff.Gather(), Half()):
        how.move(x, where, torch.zeros(16), "")
    for y in (x[::2], torch._neg_view(x)):
        ff.Reduction().move(y, where, False, "")
    assert [spent for _, spent in sent] == [True, False, True, True]
    assert all(x.is_contiguous() and not x.is_neg() for x, _ in sent)


# Memory


def test_a_mesh_that_is_dropped_leaves_nothing():
    def left():
        gc.collect()
        with open("/proc/self/maps") as file:
            maps = sum("memfd:fsfunc" in line for line in file)
        return maps, len(os.listdir("/proc/self/fd"))

    before = left()
    here, there = both()
    here.send(torch.ones(5000), 1, 0)
    there.receive(torch.zeros(5000), 0, 0)[1].wait()
    kept = here.neighbours.pool.get(0, torch.float32, torch.empty(0))
    assert left() > before
    del here, there, kept
    assert left() == before


def test_what_a_mesh_sent_is_there_when_it_is_dropped():
    here, there = both()
    here.send(value(5000, 1), 1, 0)
    into = torch.zeros(5000)
    del here
    gc.collect()
    there.receive(into, 0, 0)[1].wait()
    assert torch.equal(into, value(5000, 1))


def pool_of_pages(count):
    file = os.memfd_create("test")
    os.ftruncate(file, count * PAGE)
    kept = os.dup(file)
    pool = SharedPool(SharedMemory(file), lambda: None)
    return pool, lambda: os.fstat(kept).st_blocks * 512 // PAGE


def get(pool, pages):
    return pool.get(pages * PAGE, torch.uint8, torch.empty(0)).fill_(1)


def test_pages_are_given_back_and_gaps_are_filled():
    pool, used = pool_of_pages(8)
    a, b, c = get(pool, 2), get(pool, 3), get(pool, 1)
    at = b.data_ptr()
    assert used() == 6
    del b
    pool.trim(0)
    assert used() == 3
    with pytest.raises(MemoryError, match=f"{5 * PAGE} bytes .* beside {3 * PAGE}"):
        get(pool, 5)
    assert get(pool, 3).data_ptr() == at
    assert a.eq(1).all() and c.eq(1).all()


def mapped():
    """Pages of shared memory on this process's account."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) * 1024 // PAGE


def test_pages_that_were_read_leave_the_account_but_for_the_last():
    pool, _ = pool_of_pages(1536)
    xs = [get(pool, 512) for _ in range(3)]
    before = mapped()
    for x in xs:
        pool.memory.leave(pool.memory.offset(x), x.nbytes, last=2)
    left = before - mapped()
    assert 256 < left < 768, left  # the kernel counts in batches
    assert all(x.eq(1).all() for x in xs)


def test_a_fork_gives_nothing_back():
    pool, used = pool_of_pages(4)
    x = get(pool, 3)
    at = get(pool, 1).data_ptr()
    if not (child := os.fork()):
        del x
        its_own = get(pool, 1).data_ptr() != at
        pool.trim(0)
        os._exit(not its_own)
    assert os.waitpid(child, 0)[1] == 0
    assert used() == 4 and x.eq(1).all()


class NotedChannel:
    """Notes calls of a channel to rank 1 of this host and rank 2 of another."""

    def __init__(self):
        self.by_rank, self.calls = {1: None}, []

    def send_all(self, by_rank, *_):
        self.calls.append(("send", *by_rank))
        return []

    def receive(self, into, rank, tag):
        self.calls.append(("receive", rank))
        return rank, None

    def borrow(self, like, rank, tag, pool):
        return Loan(*self.receive(like, rank, tag), like)


@pytest.mark.parametrize("op", ["psum", "psum_scatter", "all_gather"])
def test_a_receive_from_another_host_is_posted_before_what_is_sent(op):
    """Behind the data its notice would come late, and the other way be idle."""
    channel, link = NotedChannel(), SimpleNamespace(dropped=[])
    group = SimpleNamespace(size=3, index=0, ranks=(0, 1, 2), link=link)
    signature = (op, (), ("data",), (3,), torch.float32, "")
    record = SimpleNamespace(number=0, signature=signature)
    pairs = Pairs(record, group, channel, BufferPool(), True, False)
    exchange = pairs.start(op, torch.ones(3), None)
    assert channel.calls == [("receive", 2), ("send", 1, 2), ("receive", 1)]
    assert [rank for rank, _ in exchange.works] == [2, 1]

"""Ranges of a file, read by several threads: the right bytes, read once, proven."""

import os
import threading
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsfunc.checkpoint import blocks
from fsfunc.checkpoint.blocks import SLAB, Blocks, Threads, copy
from fsfunc.checkpoint.stored import BLOCK, CheckpointError, Stored, StoredFile

SIZE = 2 * SLAB + BLOCK + 12345
DATA = os.urandom(SIZE)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "x").write_bytes(DATA)
    sums = tuple(zlib.crc32(DATA[a : a + BLOCK]) for a in range(0, SIZE, BLOCK))
    return Stored(folder, {}, files={"x": StoredFile(SIZE, sums)})


@pytest.fixture
def reads(monkeypatch):
    """(where, how many bytes) of every read."""
    found, preadv = [], os.preadv

    def noted(file, into, at):
        count = preadv(file, into, at)
        found.append((at, count))
        return count

    monkeypatch.setattr(blocks.os, "preadv", noted)
    return found


@st.composite
def ranges(draw):
    edges = [0, 1, BLOCK - 1, BLOCK, SLAB - 1, SLAB, SLAB + 1, 2 * SLAB, SIZE]
    point = st.one_of(st.sampled_from(edges), st.integers(0, SIZE))
    pairs = draw(st.lists(st.tuples(point, point), max_size=8))
    return [(min(pair), max(pair)) for pair in pairs]


def read(source, *wanted):
    """What was read of (begin, stop) pairs of a file."""
    into = [bytearray(stop - start) for start, stop in wanted]
    with Threads() as threads, Blocks(source, "x", threads) as file:
        file.read(
            (start, memoryview(x)) for (start, _), x in zip(wanted, into, strict=True)
        )
    return into


@given(ranges(), st.booleans())
def test_any_ranges_in_any_order(stored, wanted, known):
    """With checksums or without."""
    name = StoredFile(SIZE, stored.files["x"].sums if known else None)
    source = Stored(stored.path, {}, files={"x": name})
    assert read(source, *wanted) == [DATA[start:stop] for start, stop in wanted]


def test_a_block_is_read_once_for_ranges_that_follow_each_other(stored, reads):
    cuts = sorted({*range(0, SIZE, BLOCK // 3 + 7), SIZE})
    assert b"".join(read(stored, *zip(cuts, cuts[1:], strict=False))) == DATA
    assert sorted(reads) == [(a, min(SLAB, SIZE - a)) for a in range(0, SIZE, SLAB)]


def test_only_the_blocks_of_a_range_are_read(stored, reads):
    assert read(stored, (BLOCK + 5, BLOCK + 15)) == [DATA[BLOCK + 5 :][:10]]
    assert reads == [(BLOCK, BLOCK)]


def test_what_is_not_proven_goes_nowhere(stored, tmp_path):
    spoilt = bytearray(DATA)
    spoilt[SLAB + 3] ^= 1
    (tmp_path / "x").write_bytes(spoilt)
    source = Stored(tmp_path, {}, files=stored.files)
    good, into = bytearray(SLAB), bytearray(BLOCK)
    with Threads() as threads, Blocks(source, "x", threads) as file:
        with pytest.raises(CheckpointError, match=f"between bytes {SLAB} and"):
            file.read([(0, memoryview(good)), (SLAB, memoryview(into))])
    assert good == DATA[:SLAB] and into == bytearray(BLOCK)
    with pytest.raises(CheckpointError, match=f"between bytes {SLAB} and"):
        blocks.prove(source)
    beside = SLAB + BLOCK, SLAB + 2 * BLOCK
    assert read(source, beside) == [DATA[slice(*beside)]]


def test_an_error_leaves_no_thread_and_no_open_file(stored, monkeypatch):
    def broken(*_):
        raise OSError(5, "the disk is broken")

    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else set()
    monkeypatch.setattr(blocks.os, "preadv", broken)
    with pytest.raises(OSError, match="the disk is broken"):
        blocks.prove(stored)
    assert not any(t.name.startswith("read") for t in threading.enumerate())
    if before:
        assert set(os.listdir("/proc/self/fd")) == before


def test_after_an_error_nobody_reads_from_a_closed_file(stored, monkeypatch):
    """Its number may be another file's by then."""
    preadv, begun, ended = os.preadv, [], []

    def slow(file, into, at):
        if at == 0:
            raise OSError(5, "the disk is broken")
        begun.append(at)
        time.sleep(0.05)
        count = preadv(file, into, at)
        ended.append(at)
        return count

    monkeypatch.setattr(blocks.os, "preadv", slow)
    with Threads() as threads:
        with pytest.raises(OSError, match="the disk is broken"):
            with Blocks(stored, "x", threads) as file:
                file.prove()
        assert begun and sorted(ended) == sorted(begun)


def test_an_interrupt_waits_for_who_reads(stored, monkeypatch):
    preadv, begun, ended = os.preadv, threading.Event(), []

    def slow(file, into, at):
        begun.set()
        time.sleep(0.1)
        ended.append(preadv(file, into, at))
        return ended[-1]

    def interrupted(self):
        assert begun.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(blocks.os, "preadv", slow)
    monkeypatch.setattr(blocks.Future, "result", interrupted)
    with Threads() as threads:
        with pytest.raises(KeyboardInterrupt):
            with Blocks(stored, "x", threads) as file:
                file.read([(0, memoryview(bytearray(10)))])
        assert ended == [BLOCK]


def test_a_range_past_the_end_is_refused(stored):
    with pytest.raises(CheckpointError, match=f"ends at byte {SIZE}, and {SIZE + 1}"):
        read(stored, (SIZE - 1, SIZE + 1))


def test_no_more_is_under_way_than_threads_can_take(stored, monkeypatch):
    """So that what is asked for, however much, holds no more than a few slabs."""
    most, lock, running, preadv = [], threading.Lock(), [], os.preadv
    submit = blocks.ThreadPoolExecutor.submit

    def counted(self, *args):
        work = submit(self, *args)
        running.append(work)
        most.append(sum(not work.done() for work in running))
        return work

    def slow(*args):
        with lock:
            time.sleep(0.02)
            return preadv(*args)

    monkeypatch.setattr(blocks.ThreadPoolExecutor, "submit", counted)
    monkeypatch.setattr(blocks.os, "preadv", slow)
    monkeypatch.setattr(blocks, "THREADS", 1)
    whole = [(a, min(a + SLAB, SIZE)) for a in range(0, SIZE, SLAB)]
    assert b"".join(read(stored, *whole, *whole)) == DATA + DATA
    assert len(most) == 6 and max(most) <= 3


def test_a_copy_reads_nothing_beyond_its_source():
    with pytest.raises(ValueError, match="3 bytes are to come from 2"):
        copy(memoryview(bytearray(3)), memoryview(bytearray(2)))

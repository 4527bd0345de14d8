"""Ranges of a file, read by several threads: the right bytes, read once, proven."""

import os
import threading
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsfunc.checkpoint import reading
from fsfunc.checkpoint.reading import SLAB, Blocks, threads
from fsfunc.checkpoint.stored import BLOCK, CheckpointError, Stored, StoredFile

SIZE = 2 * SLAB + BLOCK + 12345
DATA = os.urandom(SIZE)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "x").write_bytes(DATA)
    sums = tuple(zlib.crc32(DATA[a : a + BLOCK]) for a in range(0, SIZE, BLOCK))
    return Stored(folder, {}, files={"x": StoredFile(SIZE, sums)})


@st.composite
def ranges(draw):
    edges = [0, 1, BLOCK - 1, BLOCK, SLAB - 1, SLAB, SLAB + 1, 2 * SLAB, SIZE]
    point = st.one_of(st.sampled_from(edges), st.integers(0, SIZE))
    pairs = draw(st.lists(st.tuples(point, point), max_size=8))
    return [(min(pair), max(pair)) for pair in pairs]


def read(source, *wanted):
    """What was read of (begin, stop) pairs of a file."""
    into = [bytearray(stop - start) for start, stop in wanted]
    with threads() as pool, Blocks(source, "x", pool) as file:
        file.read(
            (start, memoryview(x)) for (start, _), x in zip(wanted, into, strict=True)
        )
    return into


@settings(max_examples=6)
@given(ranges(), st.booleans())
def test_any_ranges_in_any_order(stored, wanted, known):
    """With checksums or without."""
    name = StoredFile(SIZE, stored.files["x"].sums if known else None)
    source = Stored(stored.path, {}, files={"x": name})
    assert read(source, *wanted) == [DATA[start:stop] for start, stop in wanted]


def test_what_is_not_proven_goes_nowhere(stored, tmp_path):
    spoilt = bytearray(DATA)
    spoilt[SLAB + 3] ^= 1
    (tmp_path / "x").write_bytes(spoilt)
    source = Stored(tmp_path, {}, files=stored.files)
    good, into = bytearray(SLAB), bytearray(BLOCK)
    with threads() as pool, Blocks(source, "x", pool) as file:
        with pytest.raises(CheckpointError, match=f"between bytes {SLAB} and"):
            file.read([(0, memoryview(good)), (SLAB, memoryview(into))])
    assert good == DATA[:SLAB] and into == bytearray(BLOCK)
    with pytest.raises(CheckpointError, match=f"between bytes {SLAB} and"):
        reading.prove(source)
    beside = SLAB + BLOCK, SLAB + 2 * BLOCK
    assert read(source, beside) == [DATA[slice(*beside)]]


def test_an_error_leaves_no_thread_and_no_open_file(stored, monkeypatch):
    def broken(*_):
        raise OSError(5, "the disk is broken")

    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else set()
    monkeypatch.setattr(reading.os, "preadv", broken)
    with pytest.raises(OSError, match="the disk is broken"):
        reading.prove(stored)
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

    monkeypatch.setattr(reading.os, "preadv", slow)
    with threads() as pool:
        with pytest.raises(OSError, match="the disk is broken"):
            with Blocks(stored, "x", pool) as file:
                file.prove()
        assert begun and sorted(ended) == sorted(begun)


def test_a_range_past_the_end_is_refused(stored):
    with pytest.raises(CheckpointError, match=f"ends at byte {SIZE}, and {SIZE + 1}"):
        read(stored, (SIZE - 1, SIZE + 1))

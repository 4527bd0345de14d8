"""Files read by several threads and proven; disks that fail at any moment."""

import errno
import math
import os
import resource
import shutil
import threading
import time
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsfunc as ff
from fsfunc.checkpoint import reading
from fsfunc.checkpoint.reading import SLAB, Blocks, Request, threads
from fsfunc.checkpoint.stored import (
    BLOCK,
    CheckpointError,
    Chunk,
    Stored,
    StoredFile,
    StoredTensor,
)
from fsfunc.comm.mesh import here
from tests.checkpoint.trees import PAIR, empty, on, tree_of
from tests.checks import same
from tests.covering import examples

SIZE = 2 * SLAB + BLOCK + 12345
DATA = os.urandom(SIZE)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    (folder / "x").write_bytes(DATA)
    sums = tuple(zlib.crc32(DATA[a : a + BLOCK]) for a in range(0, SIZE, BLOCK))
    return Stored(folder, {}, files={"x": StoredFile(SIZE, sums)})


def wanted_of(begin, sizes, dtype, box, target):
    """A request for a box of a chunk that begins anywhere in the file."""
    chunk = Chunk("x", begin, (0,) * len(sizes), tuple(sizes))
    offsets, lengths = zip(*((a, b - a) for a, b in box), strict=True)
    return Request(
        StoredTensor(sizes, dtype, (chunk,)), chunk, offsets, lengths, target
    )


def read(source, *asked):
    with threads() as pool, Blocks(source, "x", pool) as file:
        file.read(asked)


def bytes_read(source, start, stop):
    into, n = torch.zeros(stop - start, dtype=torch.uint8), stop - start
    read(source, wanted_of(start, (n,), torch.uint8, [(0, n)], into))
    return bytes(into.tolist())


BEGINS = [0, 1, BLOCK - 1, SLAB - 300_001, SLAB - 4, SLAB]
SHAPES = [(3, 500, 211), (1 << 18, 2), (5, 1 << 17), (1 << 20,)]


@st.composite
def boxes(draw, sizes):
    """All, or the middle, or any part along each dim."""
    ends = [[(0, n), (n // 3, n - n // 3)] for n in sizes]
    ends = [
        [*some, (draw(st.integers(0, some[0][1] - 1)), some[0][1])] for some in ends
    ]
    return [draw(st.sampled_from(some)) for some in ends]


@settings(max_examples=examples(16))
@given(data=st.data(), begin=st.sampled_from(BEGINS), sizes=st.sampled_from(SHAPES))
def test_any_boxes_wherever_they_lie(stored, data, begin, sizes):
    """With checksums or without, in any order, across the edges of slabs, into memory
    of other strides and dtypes."""
    kind = data.draw(st.sampled_from([torch.uint8, torch.int16]))
    begin = min(begin, SIZE - math.prod(sizes) * kind.itemsize)
    part = bytearray(DATA[begin : begin + math.prod(sizes) * kind.itemsize])
    whole = torch.frombuffer(part, dtype=kind).view(sizes)
    asked, expected = [], []
    for box in data.draw(st.lists(boxes(sizes), min_size=1, max_size=3)):
        x = whole[tuple(slice(*pair) for pair in box)]
        wide = data.draw(st.sampled_from([kind, torch.int64]))
        target = torch.zeros_like(x, dtype=wide)
        if data.draw(st.booleans()):
            target = target.movedim(0, -1).contiguous().movedim(-1, 0)
        asked.append(wanted_of(begin, sizes, kind, box, target))
        expected.append(x.to(wide))
    sums = stored.files["x"].checksums if data.draw(st.booleans()) else None
    read(Stored(stored.path, {}, files={"x": StoredFile(SIZE, sums)}), *asked)
    same([one.target for one in asked], expected)


def test_what_is_not_proven_goes_nowhere(stored, tmp_path):
    spoilt = bytearray(DATA)
    spoilt[SLAB + 3] ^= 1
    (tmp_path / "x").write_bytes(spoilt)
    source = Stored(tmp_path, {}, files=stored.files)
    into = torch.zeros(SLAB + BLOCK, dtype=torch.uint8)
    asked = wanted_of(0, into.shape, torch.uint8, [(0, len(into))], into)
    with pytest.raises(CheckpointError, match=f"between bytes {SLAB} and"):
        read(source, asked)
    assert bytes(into[:SLAB].tolist()) == DATA[:SLAB] and not into[SLAB:].any()
    with pytest.raises(CheckpointError, match=f"between bytes {SLAB} and"):
        reading.prove(source)
    beside = SLAB + BLOCK, SLAB + 2 * BLOCK
    assert bytes_read(source, *beside) == DATA[slice(*beside)]


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


def test_a_file_that_becomes_shorter_is_refused(stored, monkeypatch):
    """After its length was looked at: a read past the end gives nothing."""
    preadv = os.preadv
    cut = lambda file, into, at: 0 if at >= SLAB else preadv(file, into, at)  # noqa: E731
    monkeypatch.setattr(reading.os, "preadv", cut)
    with pytest.raises(CheckpointError, match=f"ends at byte {SLAB}, and {SIZE} bytes"):
        bytes_read(stored, SLAB - 1, SLAB + 1)


# Disks that fail at any moment


def test_a_disk_that_is_full_in_the_middle_of_a_file(tmp_path):
    """The limit of a file's size: the system itself refuses to write more."""
    ff.save(tmp_path / "step-1", {"w": torch.ones(9)})
    files = list(tmp_path.rglob("*.safetensors"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for save in (ff.save, lambda *a: ff.save_async(*a).wait()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                save(tmp_path / "step-2", {"w": torch.ones(1 << 20)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.rglob("*.safetensors")) == files
    assert ff.latest(tmp_path) == tmp_path / "step-1"
    same(ff.load(tmp_path / "step-1", {"w": torch.zeros(9)}), {"w": torch.ones(9)})


class Failing:
    """Calls of the file system below a folder; the ``at``-th of a rank fails."""

    CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "write")

    def __init__(self, patch, folder, rank=None):
        self.folder, self.rank, self.at, self.count = str(folder), rank, None, 0
        for name in self.CALLS:
            if name != "write":
                patch.setattr(os, name, self._counted(getattr(os, name)))
        opened = self._counted(open)
        patch.setattr("builtins.open", opened)
        patch.setattr("io.open", opened)

    def _counted(self, real):
        def call(*args, **options):
            inside = isinstance(args[0], int) or self.folder in os.fspath(args[0])
            if self.at is not None and inside and self._mine():
                self.count += 1
                if self.count == self.at:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **options)

        return call

    def _mine(self):
        try:
            rank = here().rank
        except RuntimeError:
            rank = None
        return rank == self.rank


@pytest.mark.parametrize("rank", [None, 0, 1], ids="alone first second".split())
def test_every_call_of_the_file_system_may_fail(tmp_path, monkeypatch, rank):
    """In turn: all ranks raise, nothing is left, and the last checkpoint is whole."""
    axes, old, new = ({} if rank is None else PAIR), tree_of(step=1), tree_of(step=2)
    on(axes, lambda mesh: ff.save(tmp_path / "step-1", old))
    failing = Failing(monkeypatch, tmp_path, rank)

    def main(mesh):
        try:
            ff.save(tmp_path / "step-2", new)
        except OSError as error:
            return error
        return None

    for at in range(1, 100):
        failing.at, failing.count = at, 0
        errors = on(axes, main)
        failing.at = None
        complete = ff.latest(tmp_path)
        same(ff.load(complete, empty(new)), new if complete.name[-1] == "2" else old)
        assert ff.latest(tmp_path) is not None
        if errors[0] is None:  # mkdir forgives where the folder is there
            assert errors == [None] * len(errors) and complete.name == "step-2"
            if failing.count < at:
                break
        else:
            assert all("No space left" in str(e) for e in errors), errors
        left = {p.name for p in tmp_path.iterdir()} - {"step-1"}
        # Only a failure after the rename leaves something: the whole checkpoint.
        assert left <= {"step-2"}, f"the {at}th call failed"
        shutil.rmtree(tmp_path / "step-2", ignore_errors=True)
    else:
        raise AssertionError("it never ends")
    assert at > 3

"""A checkpoint file read by several threads, each block proven by its checksum."""

from __future__ import annotations

import ctypes
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fsfunc.checkpoint.headers import check_headers
from fsfunc.checkpoint.stored import BLOCK, CheckpointError, Stored, open_regular
from fsfunc.runtime.memory import populate

# A thread waits for the disk, sums and copies in turn: with several of them disk and
# cores are both busy. A slab fits a core's cache, so that it comes from memory once.
SLAB = 2 * BLOCK  # bytes that a thread reads at once
THREADS = 6
_MANY = 1 << 16  # bytes from which pages are taken at once

Range = tuple[int, memoryview]  # (where in the file, what to fill)


def threads() -> ThreadPoolExecutor:
    """Threads that read, each with a slab of memory of its own."""
    return ThreadPoolExecutor(THREADS, "read", _make_slab)


_LOCAL = threading.local()


def _make_slab() -> None:
    _LOCAL.slab = memoryview(bytearray(SLAB))


class Blocks:
    """A file of a checkpoint, of which every block is proven before it is copied."""

    def __init__(self, stored: Stored, name: str, pool: ThreadPoolExecutor):
        self.path = stored.path / name
        self.nbytes, self.sums, self.origin = stored.files[name]
        self.pool = pool
        self.file = open_regular(self.path, follow=stored.version is None)

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        os.close(self.file)

    def read(self, wanted: Iterable[Range]) -> None:
        """Fills pieces of memory, each with the bytes from its place in the file on.

        Args:
            wanted: best in the file's order: ranges of one slab, one after the other,
                are read once.

        Raises:
            CheckpointError: the file ends too soon, or a checksum is wrong.
        """
        self._run(self._slabs(wanted))

    def prove(self) -> None:
        """Reads the whole file for its checksums alone.

        Raises:
            CheckpointError: as `read`.
        """
        lows = range(self.origin, self.nbytes, SLAB)
        self._run((low, min(low + SLAB, self.nbytes), []) for low in lows)

    def _slabs(self, wanted: Iterable[Range]) -> Iterator[tuple[int, int, list[Range]]]:
        """(begin, end, ranges) of each slab, no wider than the blocks of its ranges."""
        pieces = self._cut(wanted)
        for _, some in groupby(pieces, lambda piece: self._floor(piece[0], SLAB)):
            ranges = list(some)
            end = max(at + len(into) for at, into in ranges)
            low = self._floor(min(at for at, _ in ranges), BLOCK)
            yield low, min(self._floor(end + BLOCK - 1, BLOCK), self.nbytes), ranges

    def _cut(self, wanted: Iterable[Range]) -> Iterator[Range]:
        """The ranges, cut where slabs meet."""
        for at, into in wanted:
            if at + len(into) > self.nbytes:
                raise self._truncated(self.nbytes, at + len(into))
            while into:
                count = self._floor(at, SLAB) + SLAB - at
                yield at, into[:count]
                at, into = at + count, into[count:]

    def _floor(self, at: int, size: int) -> int:
        """The beginning of the piece of ``size`` that ``at`` lies in."""
        return at - (at - self.origin) % size

    def _run(self, slabs: Iterable[tuple[int, int, list[Range]]]) -> None:
        """Fills slabs by the threads; when it ends, well or not, nobody reads."""
        running = [self.pool.submit(self._fill, *slab) for slab in slabs]
        try:
            for work in running:
                work.result()
        finally:
            for work in running:
                work.cancel()
            wait(running)

    def _fill(self, low: int, end: int, ranges: list[Range]) -> None:
        """Reads the blocks of one slab, verifies and copies them, on a thread."""
        slab = _LOCAL.slab
        self._read(low, end - low, slab)
        self._prove(low, slab[: end - low])
        for at, into in ranges:
            if len(into) >= _MANY:
                populate(torch.frombuffer(into, dtype=torch.uint8))
            copy(into, slab[at - low :])

    def _read(self, low: int, size: int, slab: memoryview) -> None:
        done = 0
        while done < size:
            count = os.preadv(self.file, [slab[done:size]], low + done)
            if count == 0:
                raise self._truncated(low + done, self.nbytes)
            done += count

    def _truncated(self, end: int, expected: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} ends at byte {end}, and {expected} bytes were written: the "
            "file is truncated; go back to an earlier checkpoint"
        )

    def _prove(self, begin: int, blocks: memoryview) -> None:
        """Compares the checksums of blocks that lie from ``begin`` on."""
        if self.sums is None:
            return
        for low in range(begin, begin + len(blocks), BLOCK):
            block = blocks[low - begin :][:BLOCK]
            found, expected = zlib.crc32(block), self.sums[(low - self.origin) // BLOCK]
            if found != expected:
                raise CheckpointError(
                    f"{self.path} is damaged between bytes {low} and "
                    f"{low + len(block)}: their checksum is {found:08x}, and "
                    f"{expected:08x} was written; go back to an earlier checkpoint"
                )


def prove(stored: Stored) -> int:
    """Reads every file and compares its checksums; returns how many bytes that were.

    Raises:
        CheckpointError: a file is missing, too short, or damaged; or has no checksums.
    """
    check_files(stored, stored.files)
    with threads() as pool:
        for name, file in stored.files.items():
            if file.sums is None:
                raise CheckpointError(
                    f"{stored.path / name} has no checksums to prove it by"
                )
            with Blocks(stored, name, pool) as blocks:
                blocks.prove()
    check_headers(stored, stored.tensors.values(), stored.files)
    return sum(file.nbytes for file in stored.files.values())


def check_files(stored: Stored, names: Iterable[str]) -> None:
    """Raises where a file is missing, or not as long as it was written.

    Raises:
        CheckpointError: names the file and both lengths.
    """
    for name in names:
        path, expected = stored.path / name, stored.files[name].nbytes
        try:
            found = os.stat(path, follow_symlinks=stored.version is None).st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is missing: the checkpoint had a file of {expected} bytes "
                "there; go back to an earlier one"
            ) from error
        if found != expected:
            raise CheckpointError(
                f"{path} has {found} bytes, and {expected} were written: the file is "
                "damaged; go back to an earlier checkpoint"
            )


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, to be read and written.

    The view keeps the tensor alive. numpy would do the same, but not for bfloat16, and
    it is not a dependency.

    >>> import torch
    >>> bytes_of(torch.tensor([1, 258], dtype=torch.int16)).tolist()
    [1, 0, 2, 1]
    """
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            f"a view of bytes needs a contiguous CPU tensor, not {x.device}"
        )
    if x.nbytes == 0:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.tensor = x
    return memoryview(memory).cast("B")


def copy(into: memoryview, source: memoryview) -> None:
    """Fills ``into`` with the first bytes of ``source``, both writable.

    Other threads run meanwhile, as they do not for a slice's assignment; and it takes
    no threads of its own, as torch's copies do.

    >>> into = bytearray(2)
    >>> copy(memoryview(into), memoryview(bytearray(b"abc")))
    >>> into
    bytearray(b'ab')
    """
    if len(into) > len(source):
        raise ValueError(f"{len(into)} bytes are to come from {len(source)}")
    if len(into):
        target, first = map(ctypes.c_char.from_buffer, (into, source))
        ctypes.memmove(ctypes.byref(target), ctypes.byref(first), len(into))

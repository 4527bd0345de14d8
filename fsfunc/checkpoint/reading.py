"""Reads of boxes of tensors: by several threads, each block proven by its checksum."""

from __future__ import annotations

import ctypes
import math
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from operator import sub
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.checkpoint.headers import check_files, check_headers
from fsfunc.checkpoint.stored import (
    BLOCK,
    CheckpointError,
    Chunk,
    Stored,
    StoredTensor,
    bytes_of,
    open_regular,
)
from fsfunc.runtime.pages import populate
from fsfunc.sharded.slices import Box

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


# What waits to be put in another order: bytes, and tensors.
_HELD, _TENSORS = 8 * BLOCK, 1024


class Request(NamedTuple):
    """A box of a chunk, ``offsets`` and ``lengths`` counted in it, and its place.

    The target's dtype may be another than that of the leaf.
    """

    leaf: StoredTensor
    chunk: Chunk
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: Tensor

    @property
    def begin(self) -> int:
        """The position of its first element in the file."""
        at = sum(o * s for o, s in zip(self.offsets, self.strides, strict=True))
        return self.chunk.begin + at * self.leaf.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        sizes = self.chunk.sizes
        return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))

    @property
    def span(self) -> int:
        """Bytes from its first element to the end of its last."""
        steps = zip(self.lengths, self.strides, strict=True)
        return (sum((n - 1) * s for n, s in steps) + 1) * self.leaf.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """True if its bytes are laid out in the file as in memory."""
        x = self.target
        as_written = x.is_contiguous() and not (x.is_conj() or x.is_neg())
        return (
            x.dtype == self.leaf.dtype
            and as_written
            and x.device.type == "cpu"
            and self.span == x.nbytes
        )

    def pieces(self) -> Iterator[Request]:
        """The request, cut along its first dims into what can wait in memory."""
        if self.is_plain or self.span <= _HELD or self.target.numel() == 1:
            yield self
            return
        dim = next(d for d, n in enumerate(self.lengths) if n > 1)
        half = self.lengths[dim] // 2
        for start, length in ((0, half), (half, self.lengths[dim] - half)):
            offsets, lengths = list(self.offsets), list(self.lengths)
            offsets[dim], lengths[dim] = offsets[dim] + start, length
            target = self.target.narrow(dim, start, length)
            piece = self._replace(
                offsets=tuple(offsets), lengths=tuple(lengths), target=target
            )
            yield from piece.pieces()


def requests(leaf: StoredTensor, box: Box, target: Tensor) -> Iterator[Request]:
    """The requests that fill a box of a leaf from its stored boxes.

    Args:
        target: the elements of ``box``, of its shape.
    """
    for chunk in leaf.chunks:
        starts = tuple(map(max, chunk.offsets, box.offsets))
        lengths = tuple(
            min(o + n, a + m) - start
            for start, o, n, a, m in zip(starts, *chunk[2:], *box[:2], strict=True)
        )
        if all(n > 0 for n in lengths):
            part = target
            for dim, (start, n) in enumerate(zip(starts, lengths, strict=True)):
                part = part.narrow(dim, start - box.offsets[dim], n)
            offsets = tuple(map(sub, starts, chunk.offsets))
            yield Request(leaf, chunk, offsets, lengths, part)


def read(stored: Stored, wanted: Iterable[Request]) -> None:
    """Fills the targets of requests.

    Raises:
        CheckpointError: a block whose checksum is not that of its bytes.

    Cost: each block of a file that holds something asked for is read once where
    requests follow each other; some 20 MiB of memory.
    """
    by_file: dict[str, list[Request]] = defaultdict(list)
    for request in wanted:
        by_file[request.chunk.file].append(request)
    with threads() as pool:
        for name, some in by_file.items():
            some.sort(key=lambda request: request.begin)
            with Blocks(stored, name, pool) as file:
                for batch in _batches(some):
                    file.read((request.begin, bytes_of(x)) for request, x in batch)
                    _land(batch)


def _land(batch: list[tuple[Request, Tensor]]) -> None:
    """Puts what was read in its place, and lets it go."""
    while batch:
        request, x = batch.pop()
        if x is not request.target:
            ordered = x.as_strided(request.target.shape, request.strides)
            if ordered.dtype != request.target.dtype:
                _check_range(request.leaf, ordered, request.target.dtype)
            request.target.copy_(ordered)


def _check_range(leaf: StoredTensor, x: Tensor, dtype: torch.dtype) -> None:
    """Raises where a number would be infinite, or none, in another floating dtype."""
    if not dtype.is_floating_point or x.numel() == 0:
        return
    size = x.double().nan_to_num(0, 0, 0).abs().max().item()
    if size > torch.finfo(dtype).max:
        raise ValueError(
            f"{leaf.name!r} {leaf} holds a number of size {size:g}, which does not fit "
            f"into {dtype}: give a target of a wider dtype"
        )


def _batches(wanted: Iterable[Request]) -> Iterator[list[tuple[Request, Tensor]]]:
    """Requests, each with the memory that is read into: its target, where that lies so.

    What does not lie in memory as it does in the file comes into memory of its own
    first; a batch has no more of that than may wait to be put in its place.
    """
    batch: list[tuple[Request, Tensor]] = []
    waiting = nbytes = 0
    for request in (piece for one in wanted for piece in one.pieces()):
        x = request.target
        if not request.is_plain:
            if nbytes + request.span > _HELD or waiting == _TENSORS:
                yield batch
                batch, waiting, nbytes = [], 0, 0
            count = request.span // request.leaf.dtype.itemsize
            x = torch.empty(count, dtype=request.leaf.dtype, device="cpu")
            waiting, nbytes = waiting + 1, nbytes + request.span
        batch.append((request, x))
    yield batch

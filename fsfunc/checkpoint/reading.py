"""Reads of boxes of tensors, by several threads, with a checksum for each block.

    file    |block|block|block|block|block|     a checksum each
            |   slab    |   slab    |  ...      read by one thread at once
    boxes        ~~~~~~~~~~~~~~ ~~              requests, cut where slabs meet

`loading` and `safetensors.consolidate` call `read` with requests; `prove` reads files
for their checksums alone. A thread reads a slab, compares the checksums of its blocks,
and only then copies the pieces to their targets: so nothing that is damaged reaches a
tensor.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import groupby
from operator import attrgetter, sub
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.checkpoint.folders import open_regular
from fsfunc.checkpoint.headers import check_files
from fsfunc.checkpoint.stored import BLOCK, CheckpointError, Chunk, Stored, StoredTensor
from fsfunc.runtime import host_copies
from fsfunc.runtime.stores import populate
from fsfunc.sharded.complex_numbers import as_real
from fsfunc.sharded.slices import Box

# A thread waits for the disk, sums and copies in turn: with several of them disk and
# cores are both busy. A slab fits a core's cache, so that it comes from memory once.
SLAB = 2 * BLOCK  # bytes that a thread reads at once
THREADS = 6
_POPULATE_FROM = 1 << 16  # bytes of a target from which its pages are taken at once


class Request(NamedTuple):
    """A box of a chunk that is to be read, and the tensor that it fills.

    Args:
        offsets: where the box begins in the chunk.
        lengths: its sizes.
        target: of these sizes; its dtype may be another than the leaf's.
    """

    leaf: StoredTensor
    chunk: Chunk
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the chunk in its file, in elements."""
        sizes = self.chunk.sizes
        return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))

    @property
    def span(self) -> tuple[int, int]:
        """Positions in the file of its first byte, and behind its last."""
        first = last = 0
        rows = zip(self.offsets, self.lengths, self.strides, strict=True)
        for offset, length, stride in rows:
            first += offset * stride
            last += (offset + length - 1) * stride
        width, begin = self.leaf.dtype.itemsize, self.chunk.begin
        return begin + first * width, begin + (last + 1) * width

    def part(self, dim: int, start: int, stop: int) -> Request:
        """Returns a request for its rows from ``start`` to ``stop`` along a dim."""
        offsets, lengths = list(self.offsets), list(self.lengths)
        offsets[dim], lengths[dim] = offsets[dim] + start, stop - start
        target = self.target.narrow(dim, start, stop - start)
        return Request(self.leaf, self.chunk, tuple(offsets), tuple(lengths), target)

    def pieces(self, edge_after: Callable[[int], int]) -> Iterator[Piece]:
        """Cuts the request where it crosses an edge between slabs.

        A single element may lie across one, as files need not be aligned.

        Args:
            edge_after: returns the first edge behind a position in the file.
        """
        remaining = [self]
        while remaining:
            piece = remaining.pop()
            begin, end = piece.span
            edge = edge_after(begin)
            if end <= edge or piece.target.numel() == 1:
                yield Piece(begin, end, piece)
                continue
            # Cut along the outermost dim, whose rows lie one behind another.
            dim = next(d for d, n in enumerate(piece.lengths) if n > 1)
            count, step = piece.lengths[dim], piece.strides[dim]
            step *= piece.leaf.dtype.itemsize
            rows_beyond = -(-(end - edge) // step)  # rows that end behind the edge
            rows_before = max(count - rows_beyond, 1)
            # The first part goes last onto the stack, so pieces come in file order.
            remaining += [
                piece.part(dim, rows_before, count),
                piece.part(dim, 0, rows_before),
            ]

    def take(self, slab: memoryview, begin: int, end: int) -> None:
        """Fills the target from the bytes of its span, ``slab[begin:end]``."""
        x, raw = self.target, slab[begin:end]
        # The usual case by one memmove, which needs no tensor over the slab.
        is_plain = x.is_contiguous() and not (x.is_conj() or x.is_neg())
        is_plain = is_plain and x.device.type == "cpu" and x.nbytes == len(raw)
        if is_plain and x.dtype == self.leaf.dtype:
            # New memory takes a page fault for each 4 KiB: here one call for all.
            if len(raw) >= _POPULATE_FROM:
                populate(x)
            copy(bytes_of(x), raw)
            return
        # A tensor's elements must be aligned in memory; those in a file need not be.
        is_aligned = begin % self.leaf.dtype.itemsize == 0
        stored = torch.frombuffer(
            raw if is_aligned else bytearray(raw), dtype=self.leaf.dtype
        )
        stored = stored.as_strided(self.lengths, self.strides)
        if stored.dtype != x.dtype:
            _check_range(self.leaf, stored, x.dtype)
        x.copy_(stored)


class Piece(NamedTuple):
    """A request, and its span."""

    begin: int
    end: int
    request: Request


class Slab(NamedTuple):
    """A range of a file that a thread reads at once, and what is copied out of it."""

    begin: int
    end: int
    pieces: Sequence[Piece]


def _check_range(leaf: StoredTensor, x: Tensor, dtype: torch.dtype) -> None:
    """Raises if a finite number would be infinite in another dtype."""
    if not (dtype.is_floating_point or dtype.is_complex) or x.numel() == 0:
        return
    # NaN and infinities are saved values like others: they stay what they are.
    largest = as_real(x).double().nan_to_num(0, 0, 0).abs().max().item()
    if largest > torch.finfo(dtype).max:
        raise ValueError(
            f"{leaf.name!r} {leaf} holds a number of size {largest:g}, which does not "
            f"fit into {dtype}: give a target of a wider dtype"
        )


def copy(into: memoryview, source: memoryview) -> None:
    """Fills ``into`` with as many bytes of ``source``.

    Both are writable, and have one byte at least.

    >>> into = bytearray(2)
    >>> copy(memoryview(into), memoryview(bytearray(b"ab")))
    >>> into
    bytearray(b'ab')
    """
    target, first = map(ctypes.c_char.from_buffer, (into, source))
    # ctypes releases the GIL, as a slice's assignment does not; and memmove starts no
    # threads of its own, as torch's copies do.
    ctypes.memmove(ctypes.byref(target), ctypes.byref(first), len(into))


def bytes_of(x: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU, to be read and written.

    The view keeps the tensor alive.

    >>> import torch
    >>> bytes_of(torch.tensor([1, 258], dtype=torch.int16)).tolist()
    [1, 0, 2, 1]
    """
    if x.nbytes == 0:
        return memoryview(bytearray())
    # Not by numpy, which has no bfloat16 and is not a dependency.
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.tensor = x  # kept alive
    return memoryview(memory).cast("B")


def threads(targets: Iterable[Tensor] = ()) -> ThreadPoolExecutor:
    """Returns threads that read, each with memory of its own for a slab.

    Args:
        targets: what they will fill.
    """
    # On a GPU they write in the caller's streams: behind the zeros that were put there,
    # and ahead of whoever reads them. A cast may still run when a thread has ended.
    streams = host_copies.current_streams(targets)
    return ThreadPoolExecutor(THREADS, "read", _begin_thread, (streams,))


_THREAD_LOCAL = threading.local()


def _begin_thread(streams: Sequence[torch.cuda.Stream]) -> None:
    host_copies.enter(streams)
    # An element across an edge is read with the block after it.
    _THREAD_LOCAL.slab = memoryview(bytearray(SLAB + BLOCK))


class Blocks:
    """A file of a checkpoint, of which every block is proven before it is copied."""

    nbytes: int
    checksums: tuple[int, ...] | None
    origin: int

    def __init__(self, stored: Stored, name: str, pool: ThreadPoolExecutor):
        self.path: Path = stored.path / name
        self.nbytes, self.checksums, self.origin = stored.files[name]
        self.pool = pool
        self.file: int = open_regular(self.path, follow=stored.version is None)

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.file)

    def read(self, wanted: Iterable[Request]) -> None:
        """Fills the targets of requests, all of which are of this file.

        Raises:
            CheckpointError: the file has become shorter, or a checksum is wrong.
        """
        edge_after = lambda position: self._floor(position, SLAB) + SLAB  # noqa: E731
        pieces = [p for request in wanted for p in request.pieces(edge_after)]
        # In file order, so that each slab is read once for all that lies in it.
        pieces.sort(key=attrgetter("begin"))
        by_slab = groupby(pieces, lambda piece: self._floor(piece.begin, SLAB))
        self._run(self._slab_of(list(group)) for _, group in by_slab)

    def prove(self) -> None:
        """Reads the whole file for its checksums alone.

        Raises:
            CheckpointError: as `read`.
        """
        begins = range(self.origin, self.nbytes, SLAB)
        self._run(Slab(b, min(b + SLAB, self.nbytes), ()) for b in begins)

    def _slab_of(self, pieces: Sequence[Piece]) -> Slab:
        """Returns a slab no wider than the blocks of its pieces."""
        end = max(piece.end for piece in pieces)
        slab_begin = self._floor(pieces[0].begin, BLOCK)
        slab_end = min(self._floor(end + BLOCK - 1, BLOCK), self.nbytes)
        return Slab(slab_begin, slab_end, pieces)

    def _floor(self, position: int, size: int) -> int:
        """Returns the begin of the block of ``size`` bytes that a position lies in."""
        return position - (position - self.origin) % size

    def _run(self, slabs: Iterable[Slab]) -> None:
        """Reads slabs by the threads, and waits for them, also if one raises."""
        futures = [self.pool.submit(self._fill, slab) for slab in slabs]
        try:
            for future in futures:
                future.result()
        finally:
            # The caller closes the file next: its descriptor may then be another
            # file's, from which a thread would read.
            for future in futures:
                future.cancel()
            wait(futures)

    def _fill(self, slab: Slab) -> None:
        """Reads the blocks of one slab, proves and copies them, on a thread."""
        first, size, memory = slab.begin, slab.end - slab.begin, _THREAD_LOCAL.slab
        self._read(first, size, memory)
        self._prove(first, memory[:size])
        # A target may be an inference tensor, which is written to in that mode alone.
        # Modes are each thread's own.
        with torch.inference_mode():
            for begin, end, request in slab.pieces:
                request.take(memory, begin - first, end - first)

    def _read(self, begin: int, size: int, slab: memoryview) -> None:
        n_read = 0
        while n_read < size:  # the system may return less than was asked for
            count = os.preadv(self.file, [slab[n_read:size]], begin + n_read)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {begin + n_read}, and {self.nbytes} "
                    "bytes were written: the file is truncated; go back to an earlier "
                    "checkpoint"
                )
            n_read += count

    def _prove(self, begin: int, blocks: memoryview) -> None:
        """Compares the checksums of blocks that lie from ``begin`` on."""
        if self.checksums is None:
            return
        for first in range(begin, begin + len(blocks), BLOCK):
            block = blocks[first - begin :][:BLOCK]
            expected = self.checksums[(first - self.origin) // BLOCK]
            actual = zlib.crc32(block)
            if actual != expected:
                raise CheckpointError(
                    f"{self.path} is damaged between bytes {first} and "
                    f"{first + len(block)}: their checksum is {actual:08x}, and "
                    f"{expected:08x} was written; go back to an earlier checkpoint"
                )


def prove(stored: Stored) -> int:
    """Reads every file and compares its checksums; returns how many bytes that were.

    Raises:
        CheckpointError: a file is missing, too short, or damaged; or has no checksums.
    """
    check_files(stored, stored.files, stored.tensors.values())
    with threads() as pool:
        for name, file in stored.files.items():
            if file.checksums is None:
                raise CheckpointError(
                    f"{stored.path / name} has no checksums to prove it by"
                )
            with Blocks(stored, name, pool) as blocks:
                blocks.prove()
    return sum(file.nbytes for file in stored.files.values())


def requests(leaf: StoredTensor, box: Box, target: Tensor) -> Iterator[Request]:
    """Yields the requests that fill a box of a leaf from its stored boxes.

    Args:
        target: the elements of ``box``, of its shape.
    """
    # Each stored box is intersected with the box that is wanted.
    for chunk in leaf.chunks:
        starts = tuple(map(max, chunk.offsets, box.offsets))
        lengths = tuple(
            min(chunk_offset + n, box_offset + m) - start
            for start, chunk_offset, n, box_offset, m in zip(
                starts, *chunk[2:], *box[:2], strict=True
            )
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
        ValueError: a number that does not fit into the target's dtype.

    Cost: each block of a file that is needed is read once; some 20 MiB of memory.
    """
    by_file: dict[str, list[Request]] = defaultdict(list)
    for request in wanted:
        by_file[request.chunk.file].append(request)
    targets = (request.target for group in by_file.values() for request in group)
    with threads(targets) as pool:
        for name, group in by_file.items():
            with Blocks(stored, name, pool) as file:
                file.read(group)

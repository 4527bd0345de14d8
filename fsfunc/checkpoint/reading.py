"""Reads of boxes of tensors, by several threads, with a checksum for each block.

Requests are cut into pieces within one slab each. A thread reads a slab, compares the
checksums of its blocks, and only then copies the pieces to their targets.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.checkpoint.folders import open_regular
from fsfunc.checkpoint.headers import check_files
from fsfunc.checkpoint.stored import (
    BLOCK,
    CheckpointError,
    Chunk,
    Stored,
    StoredTensor,
)
from fsfunc.runtime import host_copies
from fsfunc.runtime.stores import populate
from fsfunc.sharded.complex_numbers import as_real
from fsfunc.sharded.slices import Box

# A thread waits for the disk, sums and copies in turn: with several of them disk and
# cores are both busy. A slab fits a core's cache, so that it comes from memory once.
SLAB = 2 * BLOCK  # bytes that a thread reads at once
THREADS = 6
_MANY = 1 << 16  # bytes from which pages are taken at once


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
    def strides(self) -> tuple[int, ...]:
        sizes = self.chunk.sizes
        return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))

    @property
    def span(self) -> tuple[int, int]:
        """The positions in the file of its first element, and behind its last."""
        first = last = 0
        rows = zip(self.offsets, self.lengths, self.strides, strict=True)
        for offset, length, stride in rows:
            first += offset * stride
            last += (offset + length - 1) * stride
        width, begin = self.leaf.dtype.itemsize, self.chunk.begin
        return begin + first * width, begin + (last + 1) * width

    def part(self, dim: int, start: int, stop: int) -> Request:
        """Of its rows along a dim those from ``start`` to ``stop``."""
        offsets, lengths = list(self.offsets), list(self.lengths)
        offsets[dim], lengths[dim] = offsets[dim] + start, stop - start
        target = self.target.narrow(dim, start, stop - start)
        return Request(self.leaf, self.chunk, tuple(offsets), tuple(lengths), target)

    def pieces(self, edge_after: Callable[[int], int]) -> Iterator[Piece]:
        """The request in pieces, none across an edge but where an element lies so.

        Args:
            edge_after: gives the first edge behind a position in the file.
        """
        rest = [self]
        while rest:
            piece = rest.pop()
            begin, end = piece.span
            edge = edge_after(begin)
            if end <= edge or piece.target.numel() == 1:
                yield Piece(begin, end, piece)
                continue
            dim = next(d for d, n in enumerate(piece.lengths) if n > 1)
            count, step = piece.lengths[dim], piece.strides[dim]
            step *= piece.leaf.dtype.itemsize
            beyond = -(-(end - edge) // step)  # rows that end behind the edge
            before = max(count - beyond, 1)
            rest += [piece.part(dim, before, count), piece.part(dim, 0, before)]

    def take(self, slab: memoryview, begin: int, end: int) -> None:
        """Fills the target from the bytes of its span, which lie there in a slab."""
        x, raw = self.target, slab[begin:end]
        is_plain = x.is_contiguous() and not (x.is_conj() or x.is_neg())
        is_plain = is_plain and x.device.type == "cpu" and x.nbytes == len(raw)
        if is_plain and x.dtype == self.leaf.dtype:
            if len(raw) >= _MANY:
                populate(x)
            copy(bytes_of(x), raw)
            return
        aligned = begin % self.leaf.dtype.itemsize == 0
        found = torch.frombuffer(
            raw if aligned else bytearray(raw), dtype=self.leaf.dtype
        )
        found = found.as_strided(self.lengths, self.strides)
        if found.dtype != x.dtype:
            _check_range(self.leaf, found, x.dtype)
        x.copy_(found)


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
    """Raises where a number would be infinite, or none, in another dtype."""
    if not (dtype.is_floating_point or dtype.is_complex) or x.numel() == 0:
        return
    size = as_real(x).double().nan_to_num(0, 0, 0).abs().max().item()
    if size > torch.finfo(dtype).max:
        raise ValueError(
            f"{leaf.name!r} {leaf} holds a number of size {size:g}, which does not fit "
            f"into {dtype}: give a target of a wider dtype"
        )


def copy(into: memoryview, source: memoryview) -> None:
    """Fills ``into`` with as many bytes of ``source``, both writable, at least one.

    Other threads run meanwhile, as they do not for a slice's assignment; and it takes
    no threads of its own, as torch's copies do.

    >>> into = bytearray(2)
    >>> copy(memoryview(into), memoryview(bytearray(b"ab")))
    >>> into
    bytearray(b'ab')
    """
    target, first = map(ctypes.c_char.from_buffer, (into, source))
    ctypes.memmove(ctypes.byref(target), ctypes.byref(first), len(into))


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, to be read and written.

    The view keeps the tensor alive. numpy would do the same, but not for bfloat16, and
    it is not a dependency.

    >>> import torch
    >>> bytes_of(torch.tensor([1, 258], dtype=torch.int16)).tolist()
    [1, 0, 2, 1]
    """
    if x.nbytes == 0:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.tensor = x
    return memoryview(memory).cast("B")


def threads(targets: Iterable[Tensor] = ()) -> ThreadPoolExecutor:
    """Threads that read, each with a slab of memory of its own.

    On a GPU they write ``targets`` in the caller's streams: behind the zeros that were
    put there, and ahead of whoever reads them (a cast may go on when a thread ends).
    """
    streams = host_copies.current_streams(targets)
    return ThreadPoolExecutor(THREADS, "read", _begin, (streams,))


_LOCAL = threading.local()


def _begin(streams: Sequence[Any]) -> None:
    host_copies.enter(streams)
    # An element across an edge is read with the block after it.
    _LOCAL.slab = memoryview(bytearray(SLAB + BLOCK))


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

    def read(self, wanted: Iterable[Request]) -> None:
        """Fills the targets of requests, all of this file.

        Raises:
            CheckpointError: the file has become shorter, or a checksum is wrong.
        """
        edge_after = lambda at: self._floor(at, SLAB) + SLAB  # noqa: E731
        pieces = [piece for one in wanted for piece in one.pieces(edge_after)]
        pieces.sort(key=attrgetter("begin"))
        slabs = groupby(pieces, lambda piece: self._floor(piece.begin, SLAB))
        self._run(self._slab(list(some)) for _, some in slabs)

    def prove(self) -> None:
        """Reads the whole file for its checksums alone.

        Raises:
            CheckpointError: as `read`.
        """
        lows = range(self.origin, self.nbytes, SLAB)
        self._run(Slab(low, min(low + SLAB, self.nbytes), ()) for low in lows)

    def _slab(self, pieces: Sequence[Piece]) -> Slab:
        """A slab no wider than the blocks of its pieces."""
        end = max(piece.end for piece in pieces)
        low = self._floor(pieces[0].begin, BLOCK)
        high = min(self._floor(end + BLOCK - 1, BLOCK), self.nbytes)
        return Slab(low, high, pieces)

    def _floor(self, at: int, size: int) -> int:
        """The beginning of the piece of ``size`` that ``at`` lies in."""
        return at - (at - self.origin) % size

    def _run(self, slabs: Iterable[Slab]) -> None:
        """Fills slabs by the threads; when it ends, well or not, nobody reads."""
        running = [self.pool.submit(self._fill, slab) for slab in slabs]
        try:
            for work in running:
                work.result()
        finally:
            for work in running:
                work.cancel()
            wait(running)

    def _fill(self, slab: Slab) -> None:
        """Reads the blocks of one slab, verifies and copies them, on a thread."""
        low, size, memory = slab.begin, slab.end - slab.begin, _LOCAL.slab
        self._read(low, size, memory)
        self._prove(low, memory[:size])
        with torch.inference_mode():  # of each thread its own; into all kinds of memory
            for begin, end, request in slab.pieces:
                request.take(memory, begin - low, end - low)

    def _read(self, low: int, size: int, slab: memoryview) -> None:
        done = 0
        while done < size:
            count = os.preadv(self.file, [slab[done:size]], low + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {low + done}, and {self.nbytes} bytes "
                    "were written: the file is truncated; go back to an earlier "
                    "checkpoint"
                )
            done += count

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
    check_files(stored, stored.files, stored.tensors.values())
    with threads() as pool:
        for name, file in stored.files.items():
            if file.sums is None:
                raise CheckpointError(
                    f"{stored.path / name} has no checksums to prove it by"
                )
            with Blocks(stored, name, pool) as blocks:
                blocks.prove()
    return sum(file.nbytes for file in stored.files.values())


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
        ValueError: a number that does not fit into the target's dtype.

    Cost: each block of a file that is needed is read once; some 20 MiB of memory.
    """
    by_file: dict[str, list[Request]] = defaultdict(list)
    for request in wanted:
        by_file[request.chunk.file].append(request)
    targets = (request.target for some in by_file.values() for request in some)
    with threads(targets) as pool:
        for name, some in by_file.items():
            with Blocks(stored, name, pool) as file:
                file.read(some)

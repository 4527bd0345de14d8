"""Requests for boxes of tensors, and the reads that fill them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import sub
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc.checkpoint.blocks import Blocks, bytes_of, threads
from fsfunc.checkpoint.stored import BLOCK, Chunk, Stored, StoredTensor
from fsfunc.sharded.slices import Box

# What waits to be put in another order: bytes, and tensors.
_HELD, _MANY = 8 * BLOCK, 1024


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
            if nbytes + request.span > _HELD or waiting == _MANY:
                yield batch
                batch, waiting, nbytes = [], 0, 0
            count = request.span // request.leaf.dtype.itemsize
            x = torch.empty(count, dtype=request.leaf.dtype, device="cpu")
            waiting, nbytes = waiting + 1, nbytes + request.span
        batch.append((request, x))
    yield batch

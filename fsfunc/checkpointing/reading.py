"""Reading boxes out of checkpoint files, each block proven by its checksum.

`Reader` is a storage reader of torch.distributed.checkpoint, so that whatever plans by
its rules can read what fsfunc wrote.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    StorageReader,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.futures import Future as Promise

from fsfunc.checkpointing.manifest import BLOCK, CheckpointError, Chunk, Stored
from fsfunc.checkpointing.memory import bytes_of

__all__ = ["Blocks", "Reader", "check_files", "prove"]

_SLAB = 8 * BLOCK  # bytes that are read at once
_AHEAD = 32 * BLOCK  # bytes that the disk is asked for while those before are proven


class Reader(StorageReader):
    """Reads what ``stored`` describes, for any load plan of DCP."""

    def __init__(self, stored: Stored):
        self.stored = stored
        self.chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {
            (path, chunk.offsets): chunk
            for path, leaf in stored.tensors.items()
            for chunk in leaf.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What DCP plans by."""
        return Metadata(
            {
                path: TensorStorageMetadata(
                    TensorProperties(dtype=leaf.dtype),
                    torch.Size(leaf.shape),
                    [
                        ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                        for c in leaf.chunks
                    ],
                )
                for path, leaf in self.stored.tensors.items()
            },
            storage_data={
                MetadataIndex(path, offsets): chunk
                for (path, offsets), chunk in self.chunks.items()
            },
            storage_meta=StorageMeta(),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Promise[None]:
        """Fills the tensors that the planner resolves.

        Raises:
            CheckpointError: a block whose checksum is not that of its bytes.

        Cost: each block of a file that holds something asked for is read once where
        requests follow each other; memory for one slab (8 MiB).
        """
        by_file: dict[str, list[_Request]] = defaultdict(list)
        for item in plan.items:
            chunk = self.chunk_of(item)
            target = planner.resolve_tensor(item)
            asked = _Request(
                chunk, tuple(item.storage_offsets), tuple(item.lengths), target
            )
            by_file[chunk.file].append(asked)
        for name, requests in by_file.items():
            requests.sort(key=lambda r: r.begin)
            with Blocks(self.stored, name) as blocks:
                for request in requests:
                    _fill(blocks, request)
        done: Promise[None] = Promise()
        done.set_result(None)
        return done

    def chunk_of(self, item: ReadItem) -> Chunk:
        """The stored box that an item of a plan reads of."""
        index = item.storage_index
        return self.chunks[index.fqn, tuple(index.offset or ())]

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return Path(checkpoint_id).exists()


class _Request(NamedTuple):
    """A box of a chunk, ``offsets`` and ``lengths`` counted in it, and its place."""

    chunk: Chunk
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: Tensor

    @property
    def begin(self) -> int:
        """Where in the file its first element lies."""
        at = sum(o * s for o, s in zip(self.offsets, self.strides, strict=True))
        return self.chunk.begin + at * self.target.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        sizes = self.chunk.sizes
        return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))

    @property
    def span(self) -> int:
        """Bytes from its first element to the end of its last."""
        steps = zip(self.lengths, self.strides, strict=True)
        return (sum((n - 1) * s for n, s in steps) + 1) * self.target.itemsize

    def halves(self) -> tuple[_Request, _Request]:
        """The request cut in two along its first dim that has anything to cut."""
        dim = next(d for d, n in enumerate(self.lengths) if n > 1)
        half = self.lengths[dim] // 2
        first, second = list(self.lengths), list(self.lengths)
        first[dim], second[dim] = half, self.lengths[dim] - half
        offsets = list(self.offsets)
        offsets[dim] += half
        left = self.target.narrow(dim, 0, half)
        right = self.target.narrow(dim, half, second[dim])
        return (
            _Request(self.chunk, self.offsets, tuple(first), left),
            _Request(self.chunk, tuple(offsets), tuple(second), right),
        )


def _fill(blocks: Blocks, request: _Request) -> None:
    target = request.target
    if target.numel() == 0:
        return
    begin, span = request.begin, request.span
    one_range = span == target.nbytes
    if one_range and target.device.type == "cpu" and target.is_contiguous():
        blocks.read(begin, bytes_of(target))
    elif span <= _SLAB or target.numel() == 1:
        slab = torch.empty(span // target.itemsize, dtype=target.dtype, device="cpu")
        blocks.read(begin, bytes_of(slab))
        blocks.settle()  # so that one slab is there at a time
        target.copy_(slab.as_strided(target.shape, request.strides))
    else:
        for half in request.halves():
            _fill(blocks, half)


class Blocks:
    """A file, read in ranges, of which every block is proven before `close` returns.

    Blocks are proven by a thread, while the next ones come from the disk.
    """

    def __init__(self, stored: Stored, name: str):
        self.path = stored.path / name
        self.nbytes, self.sums = stored.files[name]
        self.file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.scratch = memoryview(bytearray(BLOCK))
        self.held = -1  # the number of the block in the scratch
        self.asked = 0  # up to where the disk was asked to read ahead
        self.prover = ThreadPoolExecutor(1, "prove")
        self.unproven: list[Future[None]] = []

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        os.close(self.file)
        self.prover.shutdown(cancel_futures=error is not None)
        if error is None:
            self.settle()

    def settle(self) -> None:
        """Waits until all that was read is proven."""
        while self.unproven:
            self.unproven.pop().result()

    def read(self, begin: int, into: memoryview) -> None:
        """Fills ``into`` with the bytes from ``begin`` on.

        Raises:
            CheckpointError: the file ends too soon, or (then or at the end) a checksum
                is wrong.
        """
        if self.sums is None:
            self._read(begin, into)
            return
        at, end = begin, begin + len(into)
        while at < end:
            whole = (end if end == self.nbytes else end // BLOCK * BLOCK) - at
            if at % BLOCK == 0 and whole > 0:
                part = into[at - begin :][: min(whole, _SLAB)]
                self._read(at, part)
                self.unproven.append(self.prover.submit(self._prove, at, part))
                at += len(part)
            else:
                at += self._read_part(at, into[at - begin :])

    def _read_part(self, at: int, into: memoryview) -> int:
        """Fills ``into`` up to the end of one block, of which only a part is wanted."""
        low = at // BLOCK * BLOCK
        block = self.scratch[: min(BLOCK, self.nbytes - low)]
        if self.held != low:
            self.held = -1
            self._read(low, block)
            self._prove(low, block)
            self.held = low
        count = min(len(block) - (at - low), len(into))
        into[:count] = block[at - low :][:count]
        return count

    def _read(self, begin: int, into: memoryview) -> None:
        end = min(begin + _AHEAD, self.nbytes)
        if hasattr(os, "posix_fadvise") and end - self.asked > _AHEAD // 2:
            start = max(begin, self.asked)
            os.posix_fadvise(self.file, start, end - start, os.POSIX_FADV_WILLNEED)
            self.asked = end
        done = 0
        while done < len(into):
            count = os.preadv(self.file, [into[done:]], begin + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {begin + done}, and {self.nbytes} bytes "
                    "were written: the file is truncated; go back to an earlier "
                    "checkpoint"
                )
            done += count

    def _prove(self, begin: int, blocks: memoryview) -> None:
        """Compares the checksums of blocks that lie from ``begin`` on."""
        assert self.sums is not None
        for low in range(begin, begin + len(blocks), BLOCK):
            block = blocks[low - begin :][:BLOCK]
            found, expected = zlib.crc32(block), self.sums[low // BLOCK]
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
    check_files(stored, list(stored.files))
    total, into = 0, memoryview(bytearray(_SLAB))
    for name, file in stored.files.items():
        if file.sums is None:
            raise CheckpointError(
                f"{stored.path / name} has no checksums to prove it by"
            )
        with Blocks(stored, name) as blocks:
            for begin in range(0, file.nbytes, _SLAB):
                blocks.read(begin, into[: min(_SLAB, file.nbytes - begin)])
                blocks.settle()  # before the next bytes take its place
        total += file.nbytes
    return total


def check_files(stored: Stored, names: Sequence[str]) -> None:
    """Raises where a file is missing, or not as long as it was written.

    Raises:
        CheckpointError: names the file and both lengths.
    """
    for name in names:
        path, expected = stored.path / name, stored.files[name].nbytes
        try:
            found = path.stat().st_size
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

"""Reading boxes out of checkpoint files, each block proven by its checksum.

`Reader` is a storage reader of torch.distributed.checkpoint, so that whatever plans by
its rules can read what fsfunc wrote.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
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

from fsfunc.checkpointing.blocks import Blocks, Threads
from fsfunc.checkpointing.manifest import BLOCK, Chunk, Stored
from fsfunc.checkpointing.memory import bytes_of

__all__ = ["Reader"]

# What waits to be put in another order: bytes, and tensors.
_HELD, _MANY = 8 * BLOCK, 1024


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
        requests follow each other; some 20 MiB of memory.
        """
        by_file: dict[str, list[_Request]] = defaultdict(list)
        for item in plan.items:
            chunk = self.chunk_of(item)
            target = planner.resolve_tensor(item)
            asked = _Request(
                chunk, tuple(item.storage_offsets), tuple(item.lengths), target
            )
            by_file[chunk.file].append(asked)
        with Threads() as threads:
            for name, requests in by_file.items():
                requests.sort(key=lambda r: r.begin)
                with Blocks(self.stored, name, threads) as blocks:
                    filling = _Filling(blocks)
                    for request in requests:
                        filling.add(request)
                    filling.land()
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


class _Filling:
    """Filling what requests ask for from one file.

    What lies in the file as it does in memory goes there at once. What does not comes
    into memory of its own first, and goes to its place when there is enough of it.
    """

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self.held: list[tuple[_Request, Tensor]] = []
        self.nbytes = 0

    def add(self, request: _Request) -> None:
        target = request.target
        if target.numel() == 0:
            return
        begin, span = request.begin, request.span
        one_range = span == target.nbytes
        plain = not (target.is_conj() or target.is_neg())  # its bytes are its values
        on_cpu = target.device.type == "cpu"
        if one_range and on_cpu and plain and target.is_contiguous():
            self.blocks.read(begin, bytes_of(target))
        elif span <= _HELD or target.numel() == 1:
            if self.nbytes + span > _HELD or len(self.held) == _MANY:
                self.land()
            found = torch.empty(
                span // target.itemsize, dtype=target.dtype, device="cpu"
            )
            self.blocks.read(begin, bytes_of(found))
            self.held.append((request, found))
            self.nbytes += span
        else:
            for half in request.halves():
                self.add(half)

    def land(self) -> None:
        """Waits for what was asked for, and puts it in its place."""
        self.blocks.settle()
        for request, found in self.held:
            target = request.target
            target.copy_(found.as_strided(target.shape, request.strides))
        self.held, self.nbytes = [], 0

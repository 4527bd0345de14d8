"""Safetensors files, written as torch.distributed.checkpoint lays them out.

`tasks` calls `write_parts` on each rank of a save; `consolidate` makes one file of a
checkpoint.

A rank's file has a box of each leaf, under the leaf's path, and its header has the
box's place in the whole tensor (``DCP_SHARDING_INFO``). So torch's
`HuggingFaceStorageReader` reads the folder, and safetensors each file. In a file a name
occurs once: a leaf of which a rank has several boxes (a range of a packed buffer, cut
at rows) goes into as many files.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.folders import (
    begin_saving,
    check_absent,
    discard,
    publish,
    unique_name,
)
from fsfunc.checkpoint.headers import (
    PART_OF,
    VERSION,
    Entry,
    check_files,
    extra_facts,
    fill_checksums,
    make_header,
    seal,
)
from fsfunc.checkpoint.reading import Request, bytes_of, read, requests
from fsfunc.checkpoint.stored import BLOCK, Stored, StoredFile, StoredTensor
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.sharded.slices import Box

_WRITE_SIZE = 8 * BLOCK  # bytes that are summed and handed to the system at a time


def write_parts(
    folder: Path, rank: int, parts: Iterable[tuple[str, Box, Tensor]]
) -> dict[str, StoredFile]:
    """Writes the boxes that a rank is to write, and returns its files by name.

    Args:
        parts: (path, box, its elements); of one path in the order of the elements.

    Raises:
        OSError: the disk is full, or the like.

    Cost: the bytes of the parts, read once for their checksums and once to be written;
    memory for nothing (on a GPU for one box). Returns when the disk has it all.
    """
    by_file: dict[int, list[Entry]] = defaultdict(list)
    box_counts: dict[str, int] = defaultdict(int)  # by path, so far
    for path, box, x in parts:
        read = lambda x=x: to_plain(x)  # noqa: E731
        entry = Entry(path, x.dtype, box.sizes, read, box.offsets)
        by_file[box_counts[path]].append(entry)
        box_counts[path] += 1
    files: dict[str, StoredFile] = {}
    for number, entries in sorted(by_file.items()):
        name = (
            f"shard-{rank + 1:05}-model-{number + 1:05}-of-{len(by_file):05}"
            ".safetensors"
        )
        # Safetensors aligns nothing. With the widest elements first all are aligned.
        entries.sort(key=lambda e: -e.dtype.itemsize)
        offsets = {e.name: {"saved_offsets": e.in_file[1].offsets} for e in entries}
        fields = {
            "DCP_SHARDING_INFO": json.dumps(offsets),
            "DCP_VERSION": "1.0",
            PART_OF: str(VERSION),
        }
        files[name] = write_file(folder / name, make_header(entries, fields), entries)
    return files


def to_plain(x: Tensor) -> Tensor:
    """Returns the elements in order, on the CPU.

    A view that is lazily conjugated, negated or transposed has others in its memory.
    """
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def write_file(
    path: Path,
    header: bytes,
    entries: Iterable[Entry],
    seal_header: Callable[[tuple[int, ...]], bytes] | None = None,
) -> StoredFile:
    """Writes a safetensors file, and returns its length and checksums.

    It returns when the file is on the disk.

    Args:
        seal_header: for a sealed file, makes the final header from the checksums of
            the data; it is as long as ``header``. Without it the file's checksums
            include the header.
    """
    checksums = _BlockSums()
    with open(path, "xb", buffering=BLOCK) as file:
        _write(file, checksums, memoryview(header))
        # The header of a sealed file is not final, so blocks begin behind it.
        if seal_header is not None:
            checksums = _BlockSums()
        for entry in entries:
            _write(file, checksums, bytes_of(entry.read()))
        if seal_header is not None:
            file.seek(0)
            file.write(seal_header(checksums.finish().checksums or ()))
        file.flush()
        os.fsync(file.fileno())
    return checksums.finish()


def _write(file: BinaryIO, checksums: _BlockSums, data: memoryview) -> None:
    """Writes the bytes of one leaf, and adds them to the checksums.

    This is a function so that nothing refers to the leaf when the next one is read.
    """
    for start in range(0, len(data), _WRITE_SIZE):
        part = data[start : start + _WRITE_SIZE]
        checksums.add(part)
        file.write(part)


class _BlockSums:
    """The checksums of a stream: one of each whole block, and one of the tail."""

    def __init__(self) -> None:
        self.checksums: list[int] = []  # of the blocks that are complete
        self.current, self.length = 0, 0  # checksum of the last block so far; of all

    def add(self, data: memoryview) -> None:
        offset = 0
        while offset < len(data):
            free = BLOCK - self.length % BLOCK
            part = data[offset : offset + free]
            self.current = zlib.crc32(part, self.current)
            self.length += len(part)
            offset += len(part)
            if self.length % BLOCK == 0:
                self.checksums.append(self.current)
                self.current = 0

    def finish(self) -> StoredFile:
        tail = [self.current] if self.length % BLOCK else []
        return StoredFile(self.length, (*self.checksums, *tail))


@api_boundary
def consolidate(
    path: str | os.PathLike[str], file: str | os.PathLike[str], *, at: str = ""
) -> Path:
    """Writes one safetensors file with every tensor of a checkpoint whole.

    Returns its path.

    ``safetensors.torch.load_file`` reads it, under the tensors' paths; so does `load`,
    which finds the other values in its header, and checksums: of every mebibyte and of
    the header itself. It needs no mesh and no process group: one process calls it.

    Args:
        path: the checkpoint.
        file: where the file will be; it appears whole or not at all.
        at: the path of a subtree: with ``at="params"`` the names begin below it.

    Raises:
        FileExistsError: ``file`` exists.
        CheckpointError: the checkpoint is damaged.

    Cost: reads and writes every byte once; memory for one leaf.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.save(f"{folder}/a", {"params": {"w": torch.ones(2)}, "step": 3})
    ...     _ = ff.consolidate(f"{folder}/a", f"{folder}/a.safetensors")
    ...     ff.load(f"{folder}/a.safetensors", {"w": torch.zeros(2)}, at="params")
    {'w': tensor([1., 1.])}
    """
    stored, file = metadata(path).below(at), Path(file)
    # Before memory is allocated for what a table says, which may be forged.
    check_files(stored, stored.files, stored.tensors.values())
    check_absent(file)
    # Wide elements first, so that all are aligned.
    leaves = sorted(stored.tensors.items(), key=lambda pair: -pair[1].dtype.itemsize)
    tensors = read_whole(stored, [leaf for _, leaf in leaves])
    entries = [Entry(p, x.dtype, x.shape, lambda: next(tensors)) for p, x in leaves]
    nbytes = sum(e.nbytes for e in entries)
    header = make_header(entries, seal(extra_facts(stored), nbytes))
    part = begin_saving(file, unique_name())
    try:
        write_file(
            part, header, entries, lambda checksums: fill_checksums(header, checksums)
        )
        publish(part, file)
    except BaseException:
        discard(part)
        raise
    return file


def read_whole(stored: Stored, leaves: Sequence[StoredTensor]) -> Iterator[Tensor]:
    """Yields the leaves one after another; small ones are read together."""
    for batch in _batches(leaves):
        tensors = deque(
            torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in batch
        )
        wanted: list[Request] = []
        for leaf, x in zip(batch, tensors, strict=True):
            whole = Box(tuple(0 for _ in leaf.shape), leaf.shape, 0)
            wanted += requests(leaf, whole, x)
        read(stored, wanted)
        # Each tensor is let go when it is written: memory is for one leaf at a time.
        del wanted, x
        while tensors:
            yield tensors.popleft()


def _batches(leaves: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Yields consecutive leaves together as long as they fit a block."""
    batch: list[StoredTensor] = []
    nbytes = 0
    for leaf in leaves:
        if batch and nbytes + leaf.nbytes > BLOCK:
            yield batch
            batch, nbytes = [], 0
        batch.append(leaf)
        nbytes += leaf.nbytes
    if batch:
        yield batch

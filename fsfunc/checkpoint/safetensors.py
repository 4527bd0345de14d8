"""Safetensors files, written as torch.distributed.checkpoint lays them.

A rank's file has a box of each leaf, under the leaf's path, and its header has the
box's place in the whole tensor (``DCP_SHARDING_INFO``). So torch's
`HuggingFaceStorageReader` reads the folder, and safetensors each file. A leaf of which
a rank has several boxes (as its range of a packed buffer cuts) goes into as many files.
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
    appear,
    begin_saving,
    check_absent,
    discard,
    own_name,
)
from fsfunc.checkpoint.headers import (
    PART_OF,
    VERSION,
    Entry,
    check_files,
    header_of,
    said_of,
    seal,
    with_sums,
)
from fsfunc.checkpoint.reading import Request, bytes_of, read, requests
from fsfunc.checkpoint.stored import BLOCK, Stored, StoredFile, StoredTensor
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.sharded.slices import Box

_STRIDE = 8 * BLOCK  # bytes handed to the system at a time


def write_parts(
    folder: Path, rank: int, parts: Iterable[tuple[str, Box, Tensor]]
) -> dict[str, StoredFile]:
    """Writes the boxes that a rank holds; returns its files by name.

    Args:
        parts: (path, box, its elements); of one path in the order of the elements.

    Raises:
        OSError: the disk is full, or the like.

    Cost: the bytes of the parts, read once for their checksums and once to be written;
    memory for nothing (on a GPU for one box). Returns when the disk has it all.
    """
    by_file: dict[int, list[Entry]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for path, box, x in parts:
        read = lambda x=x: _plain(x)  # noqa: E731
        by_file[seen[path]].append(Entry(path, x.dtype, box.sizes, read, box.offsets))
        seen[path] += 1
    files: dict[str, StoredFile] = {}
    for number, entries in sorted(by_file.items()):
        name = (
            f"shard-{rank + 1:05}-model-{number + 1:05}-of-{len(by_file):05}"
            ".safetensors"
        )
        # Wide elements first: safetensors aligns nothing, and so all are aligned.
        entries.sort(key=lambda e: -e.dtype.itemsize)
        info = {e.name: {"saved_offsets": e.in_file[1].offsets} for e in entries}
        said = {
            "DCP_SHARDING_INFO": json.dumps(info),
            "DCP_VERSION": "1.0",
            PART_OF: str(VERSION),
        }
        files[name] = write_file(folder / name, header_of(entries, said), entries)
    return files


def _plain(x: Tensor) -> Tensor:
    """The elements as they are, in order, on the CPU: a view may only promise them."""
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def write_file(
    path: Path,
    head: bytes,
    entries: Iterable[Entry],
    sealed: Callable[[tuple[int, ...]], bytes] | None = None,
) -> StoredFile:
    """Writes a safetensors file; returns length and checksums when it is on disk.

    Args:
        sealed: gives the head that takes the place of ``head``, as long, from the
            checksums of what comes after it; without it they are of all.
    """
    sums = _BlockSums()
    with open(path, "xb", buffering=BLOCK) as file:
        _write(file, sums, memoryview(head))
        if sealed is not None:
            sums = _BlockSums()
        for e in entries:
            _write(file, sums, bytes_of(e.read()))
        if sealed is not None:
            file.seek(0)
            file.write(sealed(sums.done().sums or ()))
        file.flush()
        os.fsync(file.fileno())
    return sums.done()


def _write(file: BinaryIO, sums: _BlockSums, piece: memoryview) -> None:
    """A call of its own, so that nothing of a piece is held when the next is made."""
    for start in range(0, len(piece), _STRIDE):
        part = piece[start : start + _STRIDE]
        sums.add(part)
        file.write(part)


class _BlockSums:
    """The checksum of each block of a stream."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.last, self.length = 0, 0

    def add(self, piece: memoryview) -> None:
        at = 0
        while at < len(piece):
            room = BLOCK - self.length % BLOCK
            part = piece[at : at + room]
            self.last = zlib.crc32(part, self.last)
            self.length += len(part)
            at += len(part)
            if self.length % BLOCK == 0:
                self.sums.append(self.last)
                self.last = 0

    def done(self) -> StoredFile:
        tail = [self.last] if self.length % BLOCK else []
        return StoredFile(self.length, (*self.sums, *tail))


@api_boundary
def consolidate(
    path: str | os.PathLike[str], file: str | os.PathLike[str], *, at: str = ""
) -> Path:
    """One safetensors file with every tensor of a checkpoint whole; returns its path.

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
    # Before there is room for what they say.
    check_files(stored, stored.files, stored.tensors.values())
    check_absent(file)
    leaves = sorted(stored.tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    whole = _whole(stored, [leaf for _, leaf in leaves])
    entries = [Entry(p, x.dtype, x.shape, lambda: next(whole)) for p, x in leaves]
    nbytes = sum(e.nbytes for e in entries)
    head = header_of(entries, seal(said_of(stored), nbytes))
    part = begin_saving(file, own_name())
    try:
        write_file(part, head, entries, lambda sums: with_sums(head, sums))
        appear(part, file)
    except BaseException:
        discard(part)
        raise
    return file


def _whole(stored: Stored, leaves: Sequence[StoredTensor]) -> Iterator[Tensor]:
    """The leaves one after another; small ones are read together."""
    for some in _batches(leaves):
        made = deque(torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in some)
        wanted: list[Request] = []
        for leaf, x in zip(some, made, strict=True):
            everything = Box(tuple(0 for _ in leaf.shape), leaf.shape, 0)
            wanted += requests(leaf, everything, x)
        read(stored, wanted)
        del wanted, x
        while made:
            yield made.popleft()


def _batches(leaves: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    some: list[StoredTensor] = []
    nbytes = 0
    for leaf in leaves:
        if some and nbytes + leaf.nbytes > BLOCK:
            yield some
            some, nbytes = [], 0
        some.append(leaf)
        nbytes += leaf.nbytes
    if some:
        yield some

"""Safetensors files, as torch.distributed.checkpoint lays them: written, and opened.

A rank's file holds a box of each leaf, under the leaf's path, and says in its header
where in the whole it lies (``DCP_SHARDING_INFO``). So `HuggingFaceStorageReader` of
torch reads the folder, and safetensors each file. A leaf of which a rank holds several
boxes (the few that its range of a flat buffer cuts) goes into as many files.

A consolidated file is sealed: its header holds what a manifest would, and checksums of
itself and of what comes after it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from fsfunc.checkpoint.blocks import bytes_of
from fsfunc.checkpoint.manifest import (
    BLOCK,
    VERSION,
    CheckpointError,
    Chunk,
    StoredFile,
    as_hex,
    from_hex,
)
from fsfunc.sharded.slices import Box

__all__ = [
    "PART_OF",
    "SAFE_DTYPES",
    "Entry",
    "head_at",
    "header_of",
    "seal",
    "sums_of",
    "unsealed",
    "with_sums",
    "write_file",
    "write_parts",
]

SAFE_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

PART_OF = "fsfunc.part"  # in a header: the file is nothing without its manifest

_OURS, _SUMS = "fsfunc", "fsfunc.sums"
_LONGEST_HEAD = 100_000_000  # bytes; what safetensors itself accepts
_STRIDE = 8 * BLOCK  # bytes handed to the system at a time


class Entry(NamedTuple):
    """A tensor of a file: its name, its dtype and shape, and where it lies in a whole.

    ``read()`` returns the elements, contiguous, on the CPU, when they are written.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    offsets: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_parts(
    folder: Path, rank: int, parts: Iterable[tuple[str, Box, Tensor]]
) -> tuple[dict[str, StoredFile], dict[str, list[Chunk]]]:
    """Writes the boxes that a rank holds; returns its files, and the chunks by path.

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
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for number, entries in sorted(by_file.items()):
        name = (
            f"shard-{rank + 1:05}-model-{number + 1:05}-of-{len(by_file):05}"
            ".safetensors"
        )
        # Wide elements first: safetensors aligns nothing, and so all are aligned.
        entries.sort(key=lambda e: -e.dtype.itemsize)
        info = {e.name: {"saved_offsets": e.offsets} for e in entries}
        said = {
            "DCP_SHARDING_INFO": json.dumps(info),
            "DCP_VERSION": "1.0",
            PART_OF: str(VERSION),
        }
        head, begins = header_of(entries, said)
        files[name] = write_file(folder / name, head, entries)
        for e, begin in zip(entries, begins, strict=True):
            chunks[e.name].append(Chunk(name, begin, e.offsets, e.shape))
    return files, chunks


def _plain(x: Tensor) -> Tensor:
    """The elements as they are, in order, on the CPU: a view may only promise them."""
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def header_of(
    entries: Sequence[Entry], metadata: dict[str, str]
) -> tuple[bytes, list[int]]:
    """The head of a safetensors file, and where in the file each entry begins."""
    said: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    ends = [0]
    for e in entries:
        ends.append(ends[-1] + e.nbytes)
        said[e.name] = {
            "dtype": SAFE_DTYPES[e.dtype],
            "shape": e.shape,
            "data_offsets": ends[-2:],
        }
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + end for end in ends[:-1]]


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


def head_at(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and all the bytes before its data.

    Raises:
        ValueError: there is none; says what is there.
    """
    with open(path, "rb") as file:
        size = file.read(8)
        length = int.from_bytes(size, "little")
        if not 2 <= length <= _LONGEST_HEAD:
            raise ValueError(f"a header of {length} bytes")
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"{len(text)} of the header's {length} bytes")
    head = json.loads(text)
    if not isinstance(head, dict):
        raise ValueError("a header that is no table")
    return head, size + text


def seal(said: dict[str, Any], nbytes: int) -> dict[str, str]:
    """What a consolidated file says besides its tensors, as a header holds it.

    Args:
        nbytes: of its tensors, for whose checksums there is room: see `with_sums`.
    """
    text, room = json.dumps(said | {"sums": True}), "0" * 8 * (-(-nbytes // BLOCK) + 1)
    crc = str(zlib.crc32(text.encode()))
    return {_OURS: text, f"{_OURS}.crc32": crc, _SUMS: room}


def unsealed(extra: dict[str, str], path: Path) -> dict[str, Any]:
    """What `seal` was given; nothing of a file that is not sealed.

    Raises:
        CheckpointError: it is not what was written.
    """
    text = extra.get(_OURS)
    if text is None:
        return {}
    if extra.get(f"{_OURS}.crc32") != str(zlib.crc32(text.encode())):
        raise _damaged(path)
    said = json.loads(text)
    if said.pop("sums", False) and _SUMS not in extra:
        raise _damaged(path)
    return said


def with_sums(head: bytes, sums: Sequence[int]) -> bytes:
    """The head of a sealed file with its checksums: of the blocks, and of itself."""
    said = as_hex((*sums, zlib.crc32(head))).encode()
    field = f'"{_SUMS}":"'.encode()
    return head.replace(field + b"0" * len(said), field + said, 1)


def sums_of(
    head: bytes, extra: dict[str, str], nbytes: int, path: Path
) -> tuple[int, ...] | None:
    """The checksums of a sealed file's blocks; None of another's.

    Raises:
        CheckpointError: the head is not what was written.
    """
    if (said := extra.get(_SUMS)) is None:
        return None
    try:
        *sums, own = from_hex(said)
    except ValueError:
        raise _damaged(path) from None
    blank = head.replace(said.encode(), b"0" * len(said), 1)
    right = zlib.crc32(blank) == own and said == as_hex((*sums, own))
    if not right or len(sums) != -(-nbytes // BLOCK):
        raise _damaged(path)
    return tuple(sums)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: the checksum of its header is not that of its text"
    )

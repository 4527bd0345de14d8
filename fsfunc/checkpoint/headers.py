"""Headers of safetensors files: made, and read.

A consolidated file is sealed: the ``__metadata__`` of its header has the contents of a
manifest, and checksums of the header and of the data, which other readers ignore.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.checkpoint.manifest import SAFE_DTYPES, as_hex, from_hex, in_file
from fsfunc.checkpoint.parsing import Said, Wrong, say, table_of
from fsfunc.checkpoint.stored import (
    BLOCK,
    CheckpointError,
    Chunk,
    Stored,
    StoredFile,
    StoredTensor,
    is_pickle,
    open_regular,
    refuse_pickle,
)
from fsfunc.runtime.scopes import uncollected

PART_OF = "fsfunc.part"  # in a header: the file is nothing without its manifest

_OURS, _SUMS = "fsfunc", "fsfunc.sums"
_LONGEST = 100_000_000  # bytes; what safetensors itself accepts
_UNLIKE = "the checksum of its header is not that of its text"
_DTYPES = {name: dtype for dtype, name in SAFE_DTYPES.items()}


class Entry(NamedTuple):
    """A tensor of a file: its name, dtype and shape, and its box in a whole tensor.

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


class Header(NamedTuple):
    """The parsed header of a file.

    Args:
        nbytes: of the header: where the tensors begin.
        file: the whole's length, and checksums where it is sealed.
        boxes: dtype and place of each tensor, by name.
        ours: what `seal` was given.
        is_part: whether it is nothing without its manifest.
    """

    nbytes: int
    file: StoredFile
    boxes: dict[str, tuple[torch.dtype, Chunk]]
    ours: Said
    is_part: bool


def header_at(path: Path, *, follow: bool = False) -> Header:
    """The header of the safetensors file at ``path``.

    Raises:
        CheckpointError: it is none, holds pickles, or is damaged.
    """
    with open(open_regular(path, follow=follow), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        size = file.read(8)
        length = int.from_bytes(size, "little")
        text = file.read(length) if 2 <= length <= min(_LONGEST, nbytes - 8) else b""
    try:
        if not text:
            raise Wrong(f"it has a header of {length} bytes, and {nbytes} in all")
        with uncollected():
            return _parsed(path.name, size + text, nbytes)
    except Wrong as error:
        if is_pickle(path):
            raise refuse_pickle(path) from error
        raise CheckpointError(
            f"{path} is damaged, or no safetensors file: {error}"
        ) from error


def _parsed(name: str, head: bytes, nbytes: int) -> Header:
    said = table_of(head[8:])
    extra: dict[str, str] = {}
    if "__metadata__" in said:
        extra = said.texts("__metadata__")
        del said["__metadata__"]
    info = table_of(extra.get("DCP_SHARDING_INFO", "{}").encode(errors="replace"))
    sums, ours = _sums_of(head, extra, nbytes - len(head)), _unsealed(extra)
    boxes: dict[str, tuple[torch.dtype, Chunk]] = {}
    for path in said:
        entry = said.table(path).only("dtype", "shape", "data_offsets")
        sizes, ends = entry.numbers("shape"), entry.numbers("data_offsets")
        dtype = _DTYPES.get(entry.text("dtype"))
        if dtype is None:
            raise Wrong(f"{path[:99]!r} is of the dtype {say(entry['dtype'])}")
        if len(ends) != 2 or ends[1] - ends[0] != math.prod(sizes) * dtype.itemsize:
            raise Wrong(
                f"{path[:99]!r} of shape {say(sizes)} lies at the bytes {say(ends)}"
            )
        offsets = (0,) * len(sizes)
        if path in info:
            offsets = info.table(path).numbers("saved_offsets")
        boxes[path] = dtype, Chunk(name, len(head) + ends[0], offsets, sizes)
    file = StoredFile(nbytes, sums, 0 if sums is None else len(head))
    return Header(len(head), file, boxes, ours, PART_OF in extra)


def check_headers(
    stored: Stored, leaves: Iterable[StoredTensor], names: Iterable[str]
) -> None:
    """Raises where files do not say of themselves what the manifest says of them.

    Two witnesses: a manifest that names another place, dtype or leaf than was written
    is found, though its checksum be right.

    Raises:
        CheckpointError: names the leaf and what each says.

    Cost: reads the header of each file of ``names``; none without a manifest.
    """
    if stored.version is None:
        return
    expected: dict[str, dict[str, tuple[torch.dtype, Chunk]]] = {n: {} for n in names}
    for leaf in leaves:
        for chunk in leaf.chunks:
            if chunk.file in expected:
                dtype, sizes, at = in_file(leaf.dtype, chunk.sizes, chunk.offsets)
                box = chunk._replace(sizes=sizes, offsets=at)
                expected[chunk.file][leaf.name] = dtype, box
    for name, boxes in expected.items():
        found = header_at(stored.path / name).boxes
        for path, box in boxes.items():
            if found.get(path) != box:
                raise CheckpointError(
                    f"{stored.path / name} is damaged, or its manifest: of {path!r} it "
                    f"says {say(str(found.get(path)))}, and the manifest "
                    f"{say(str(box))}; go back to an earlier checkpoint"
                )


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


def header_of(
    entries: Sequence[Entry], metadata: dict[str, str]
) -> tuple[bytes, list[int]]:
    """The head of a safetensors file, and where in the file each entry begins."""
    said: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    ends = [0]
    for e in entries:
        ends.append(ends[-1] + e.nbytes)
        dtype, sizes, _ = in_file(e.dtype, e.shape, ())
        said[e.name] = {
            "dtype": SAFE_DTYPES[dtype],
            "shape": sizes,
            "data_offsets": ends[-2:],
        }
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + end for end in ends[:-1]]


def seal(said: dict[str, Any], nbytes: int) -> dict[str, str]:
    """The metadata of a consolidated file, as header fields.

    Args:
        nbytes: of its tensors, for whose checksums there is room: see `with_sums`.
    """
    text, room = json.dumps(said | {"sums": True}), "0" * 8 * (-(-nbytes // BLOCK) + 1)
    crc = str(zlib.crc32(text.encode()))
    return {_OURS: text, f"{_OURS}.crc32": crc, _SUMS: room}


def with_sums(head: bytes, sums: Sequence[int]) -> bytes:
    """The head of a sealed file with its checksums: of the blocks, and of itself."""
    said = as_hex((*sums, zlib.crc32(head))).encode()
    field = f'"{_SUMS}":"'.encode()
    return head.replace(field + b"0" * len(said), field + said, 1)


def _unsealed(extra: dict[str, str]) -> Said:
    """The metadata that `seal` was given; empty for a file that is not sealed."""
    text = extra.get(_OURS)
    if text is None:
        return Said()
    if extra.get(f"{_OURS}.crc32") != str(zlib.crc32(text.encode(errors="replace"))):
        raise Wrong(_UNLIKE)
    said = table_of(text.encode())
    if said.pop("sums", False) and _SUMS not in extra:
        raise Wrong(_UNLIKE)
    return said


def _sums_of(head: bytes, extra: dict[str, str], nbytes: int) -> tuple[int, ...] | None:
    """The checksums of a sealed file's blocks; None of another's."""
    if (said := extra.get(_SUMS)) is None:
        return None
    *sums, own = from_hex(said) or (0,)
    blank = head.replace(said.encode(), b"0" * len(said), 1)
    if zlib.crc32(blank) != own or len(sums) != -(-nbytes // BLOCK):
        raise Wrong(_UNLIKE)
    return tuple(sums)

"""Files of recordings: one for each rank and call, with checksums, written atomically.

``rank-00003-call-00000057.safetensors`` has the tensors, and in its header all else,
with checksums of both, in the format of a consolidated checkpoint's files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.checkpoint.folders import (
    begin_saving,
    discard,
    list_folder,
    publish,
    unique_name,
)
from fsfunc.checkpoint.headers import (
    SAFE_DTYPES,
    Entry,
    check_files,
    fill_checksums,
    make_header,
    read_header,
    seal,
)
from fsfunc.checkpoint.reading import read, requests
from fsfunc.checkpoint.safetensors import write_file
from fsfunc.checkpoint.stored import CheckpointError, Stored, StoredTensor
from fsfunc.sharded.slices import Box

VERSION = 1
_NAME = re.compile(r"rank-(\d{5,})-call-(\d{8,})\.safetensors")


class CallFile(NamedTuple):
    """The file of a complete recording of one call of a rank."""

    call: int
    rank: int
    path: Path


def path_of(folder: Path, rank: int, call: int) -> Path:
    """Returns the file of one call of a rank; names sort in the order of calls."""
    return folder / f"rank-{rank:05}-call-{call:08}.safetensors"


def recorded_calls(folder: Path, rank: int | None = None) -> list[CallFile]:
    """Lists the complete recordings in a folder (of a rank), the oldest first."""
    names = [_NAME.fullmatch(path.name) for path in list_folder(folder)]
    files = [
        CallFile(int(name[2]), int(name[1]), folder / name[0]) for name in names if name
    ]
    return sorted(file for file in files if rank in (None, file.rank))


def write_call(
    path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Writes a recording; it gets its name once all of it is on the disk.

    Args:
        fields: what the header has beside the tensors' names, as JSON.

    Raises:
        OSError: the disk is full, or the like; then no file is left behind.
    """
    dtypes_and_shapes = {
        name: [str(x.dtype)[6:], list(x.shape)] for name, x in tensors.items()
    }
    storable = {
        name: x if x.dtype in SAFE_DTYPES else _as_bytes(x)
        for name, x in tensors.items()
    }
    # Wide elements first, so that all are aligned.
    widest_first = sorted(storable.items(), key=lambda item: -item[1].dtype.itemsize)
    stored_entries = [
        Entry(name, x.dtype, tuple(x.shape), lambda x=x: x) for name, x in widest_first
    ]
    header = {"recording": VERSION, "kinds": dtypes_and_shapes, **fields}
    head = make_header(
        stored_entries, seal(header, sum(entry.nbytes for entry in stored_entries))
    )
    temporary = begin_saving(path, unique_name())
    try:
        write_file(
            temporary, head, stored_entries, lambda sums: fill_checksums(head, sums)
        )
        publish(temporary, path)
    except BaseException:
        discard(temporary)
        raise


def _as_bytes(x: Tensor) -> Tensor:
    """Returns the bytes of a tensor whose dtype safetensors does not have."""
    return x.reshape(-1).view(torch.uint8)


def read_call(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads the header's fields and the tensors of a recording.

    Raises:
        CheckpointError: it is damaged, or no recording that this library can read.
    """
    head = read_header(path)
    if head.sealed.get("recording") != VERSION:
        raise CheckpointError(
            f"{path} is no recording of version {VERSION}: ff.testing.recorded(folder) "
            "writes one"
        )
    leaves = {
        name: StoredTensor(chunk.sizes, dtype, (chunk,), name)
        for name, (dtype, chunk) in head.boxes.items()
    }
    stored = Stored(path.parent, leaves, files={path.name: head.file}, version=1)
    check_files(stored, stored.files)
    tensors, reads = {}, []
    for name, leaf in leaves.items():
        target = tensors[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        reads += requests(leaf, Box((0,) * target.ndim, leaf.shape, 0), target)
    read(stored, reads)
    for name, (dtype, shape) in head.sealed["kinds"].items():
        target = tensors[name]
        if str(target.dtype) != f"torch.{dtype}":
            tensors[name] = target.view(getattr(torch, dtype)).view(shape)
    return dict(head.sealed), tensors

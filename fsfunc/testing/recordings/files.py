"""Files of recordings: one a rank and call, sealed, which appears whole or not at all.

``rank-00003-call-00000057.safetensors`` has the tensors, and in its header all else,
with checksums of both, as a consolidated checkpoint has them.
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
    """A complete recording of one call of a rank."""

    call: int
    rank: int
    path: Path


def path_of(folder: Path, rank: int, call: int) -> Path:
    """Returns the file of one call of a rank, by names that sort in order of calls."""
    return folder / f"rank-{rank:05}-call-{call:08}.safetensors"


def recorded_calls(folder: Path, rank: int | None = None) -> list[CallFile]:
    """Lists the complete recordings in a folder (of a rank), the oldest first."""
    names = [_NAME.fullmatch(path.name) for path in list_folder(folder)]
    found = [
        CallFile(int(name[2]), int(name[1]), folder / name[0]) for name in names if name
    ]
    return sorted(one for one in found if rank in (None, one.rank))


def write_call(path: Path, said: Mapping[str, Any], tensors: Mapping[str, Tensor]):
    """Writes a recording, which has its name once all of it is on the disk.

    Raises:
        OSError: the disk is full, or the like; then nothing is left of it.
    """
    kinds = {n: [str(x.dtype)[6:], list(x.shape)] for n, x in tensors.items()}
    safe = {n: x if x.dtype in SAFE_DTYPES else _bytes(x) for n, x in tensors.items()}
    # Wide elements first, so that all are aligned.
    order = sorted(safe.items(), key=lambda item: -item[1].dtype.itemsize)
    held = [Entry(n, x.dtype, tuple(x.shape), lambda x=x: x) for n, x in order]
    ours = {"recording": VERSION, "kinds": kinds, **said}
    head = make_header(held, seal(ours, sum(e.nbytes for e in held)))
    part = begin_saving(path, unique_name())
    try:
        write_file(part, head, held, lambda sums: fill_checksums(head, sums))
        publish(part, path)
    except BaseException:
        discard(part)
        raise


def _bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor of which safetensors has no dtype."""
    return x.reshape(-1).view(torch.uint8)


def read_call(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads what a recording says, and its tensors.

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
    found, wanted = {}, []
    for name, leaf in leaves.items():
        x = found[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
        wanted += requests(leaf, Box((0,) * x.ndim, leaf.shape, 0), x)
    read(stored, wanted)
    for name, (dtype, shape) in head.sealed["kinds"].items():
        x = found[name]
        if str(x.dtype) != f"torch.{dtype}":
            found[name] = x.view(getattr(torch, dtype)).view(shape)
    return dict(head.sealed), found

"""What a checkpoint says of itself: ``fsfunc.json``, one small file.

    {"crc32": of the rest, "body": {"version": 1, "leaves": ..., "values": ...,
     "files": ..., "metadata": ..., "random": ..., "mesh": ...}}

Tensors lie in safetensors files beside it, keyed by their paths in the tree, as boxes
(``Chunk``); each file has a checksum for every mebibyte, so that any part of it can be
read and proven without the rest. Numbers, strings and bools of the tree are values.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsfunc.sharded.placements import describe

__all__ = [
    "BLOCK",
    "CheckpointError",
    "Chunk",
    "MANIFEST",
    "Stored",
    "StoredFile",
    "StoredTensor",
    "VERSION",
    "dtype_name",
    "as_hex",
    "from_hex",
    "read_manifest",
    "write_manifest",
]

MANIFEST = "fsfunc.json"
VERSION = 1
BLOCK = 1 << 20  # bytes that one checksum covers; they fit a core's cache


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or was not completed."""


class Chunk(NamedTuple):
    """A box of a leaf, and where its bytes begin in a file."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredFile(NamedTuple):
    """A file's length in bytes, and the CRC-32 of each `BLOCK` of it, if known.

    ``origin``: where the first block begins; what lies before is proven elsewhere.
    """

    nbytes: int
    sums: tuple[int, ...] | None = None
    origin: int = 0


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the saved tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether the chunks hold every element once (they never overlap)."""
        held = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        return held == math.prod(self.shape)

    def __str__(self) -> str:
        return describe(self.shape, self.dtype, "")


@dataclass(frozen=True)
class Stored:
    """What lies in a checkpoint, read without any mesh and without the tensors.

    Args:
        path: where it is.
        tensors: path in the saved tree -> its shape, dtype and chunks.
        values: path in the saved tree -> number, string or bool.
        metadata: what the user gave to ``save``.
        mesh: the axes of the mesh that saved it.
        files: names and lengths of the files that hold the tensors.
        random: states of the default generators, and which of them each rank had.
        version: of the format; None for files that fsfunc did not write.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    values: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    version: int | None = VERSION

    @property
    def leaves(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Path -> (global shape, dtype) of every tensor."""
        return {path: (leaf.shape, leaf.dtype) for path, leaf in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.nbytes for leaf in self.tensors.values())

    @property
    def identity(self) -> str:
        """Its name, and a checksum that no other checkpoint has."""
        text = repr((self.tensors, self.values, self.files, self.random))
        return f"{self.path.name} ({zlib.crc32(text.encode()):08x})"

    @property
    def complete(self) -> bool:
        """Whether the chunks make up every tensor."""
        return all(leaf.is_whole for leaf in self.tensors.values())

    def below(self, at: str) -> Stored:
        """The subtree at the path ``at``, its paths beginning there.

        Raises:
            KeyError: there is no such path.
        """
        if not at:
            return self

        def inside(found: Mapping[str, Any]) -> dict[str, Any]:
            if at in found:
                return {"": found[at]}
            return {
                p[len(at) + 1 :]: x for p, x in found.items() if p.startswith(f"{at}/")
            }

        tensors, values = inside(self.tensors), inside(self.values)
        if not tensors and not values:
            tops = sorted({p.partition("/")[0] for p in (*self.tensors, *self.values)})
            raise KeyError(
                f"{self.path} holds nothing at {at!r}; at its top are {tops}"
            )
        return replace(self, tensors=tensors, values=values)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.nbytes:,} bytes in {len(self.files)} files"]
        lines += [f"  {path} {leaf}" for path, leaf in self.tensors.items()]
        lines += [f"  {path} {value!r}" for path, value in self.values.items()]
        return "\n".join(lines)


def write_manifest(stored: Stored, folder: Path) -> None:
    """Writes ``fsfunc.json`` into ``folder``, and waits until the disk has it."""
    names = {name: i for i, name in enumerate(stored.files)}
    body = {
        "version": VERSION,
        "leaves": {
            path: {
                "shape": leaf.shape,
                "dtype": dtype_name(leaf.dtype),
                "chunks": [(names[c.file], *c[1:]) for c in leaf.chunks],
            }
            for path, leaf in stored.tensors.items()
        },
        "values": stored.values,
        "files": [
            {"name": name, "bytes": file.nbytes, "crc32": as_hex(file.sums or ())}
            for name, file in stored.files.items()
        ],
        "metadata": stored.metadata,
        "random": stored.random,
        "mesh": stored.mesh,
    }
    text = json.dumps(body, separators=(",", ":"))
    sum_ = zlib.crc32(text.encode())
    with open(folder / MANIFEST, "w", encoding="utf-8") as file:
        file.write(f'{{"crc32": {sum_}, "body":\n{text}\n}}\n')
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Stored:
    """What ``fsfunc.json`` in ``folder`` says.

    Raises:
        CheckpointError: it is damaged, or of a version that this library cannot read.
    """
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
        said = json.loads(raw)
        body, sum_ = said["body"], said["crc32"]
        text = raw.split(b"\n")[1]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{path} is damaged (it is no manifest: {error}): go back to an earlier "
            "checkpoint"
        ) from error
    version = body.get("version") if isinstance(body, Mapping) else None
    if sum_ != zlib.crc32(text):
        raise CheckpointError(
            f"{path} is damaged (its checksum is not that of its text): go back to an "
            "earlier checkpoint"
        )
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}, and this fsfunc reads version "
            f"{VERSION}: load it with the release that wrote it and save it again, or "
            "update fsfunc"
        )
    files = {
        file["name"]: StoredFile(file["bytes"], from_hex(file["crc32"]))
        for file in body["files"]
    }
    names = list(files)
    leaves = {
        at: StoredTensor(
            tuple(leaf["shape"]),
            getattr(torch, leaf["dtype"]),
            tuple(
                Chunk(names[i], begin, tuple(offsets), tuple(sizes))
                for i, begin, offsets, sizes in leaf["chunks"]
            ),
        )
        for at, leaf in body["leaves"].items()
    }
    kept = {name: body[name] for name in ("values", "metadata", "random", "mesh")}
    return Stored(folder, leaves, files=files, **kept)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def as_hex(sums: tuple[int, ...]) -> str:
    """Checksums as one text, eight letters each; `from_hex` is the inverse."""
    return "".join(f"{s:08x}" for s in sums)


def from_hex(text: str) -> tuple[int, ...]:
    """The checksums of which `as_hex` made ``text``."""
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))

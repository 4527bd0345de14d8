"""The manifest of a checkpoint: ``fsfunc.json``, one small file.

{"crc32": of the rest, "body":
{"version": 1, "leaves": ..., "values": ..., "files": ..., "metadata": ...,
 "random": ..., "mesh": ...}
}
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import torch

from fsfunc.checkpoint.parsing import (
    LONGEST,
    Said,
    Wrong,
    number_of,
    numbers_of,
    proven,
    say,
    table_of,
)
from fsfunc.checkpoint.stored import (
    BLOCK,
    CheckpointError,
    Chunk,
    Stored,
    StoredFile,
    StoredTensor,
    read_regular,
)
from fsfunc.runtime.scopes import uncollected

MANIFEST = "fsfunc.json"
VERSION = 1
SAFE_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

# Of what safetensors has none: a tensor of these is kept as pairs, with a dim more.
PAIRS = {torch.complex128: torch.float64}

_FRAME = re.compile(rb'\{"crc32": ([0-9]{1,10}), "body":\n([^\n]*)\n\}\n')
_FILE = re.compile(r"shard-[0-9]{5,9}-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_LEAF = ("shape", "dtype", "chunks")
_BODY = ("version", "leaves", "values", "files", "metadata", "random", "mesh")


def write_manifest(stored: Stored, folder: Path) -> None:
    """Writes ``fsfunc.json`` into ``folder``, and waits until it is on the disk.

    Raises:
        CheckpointError: it could not be read again.
    """
    names = {name: i for i, name in enumerate(stored.files)}
    body = {
        "version": VERSION,
        "leaves": {
            path: {
                "shape": leaf.shape,
                "dtype": dtype_name(leaf.dtype),
                "chunks": [(names[c.file], *c[1:]) for c in leaf.chunks],
            }
            | ({"own": dict(leaf.own)} if leaf.own else {})
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
    text = json.dumps(body, separators=(",", ":")).encode()
    raw = b'{"crc32": %d, "body":\n%s\n}\n' % (zlib.crc32(text), text)
    parse(raw, folder)
    with open(folder / MANIFEST, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Stored:
    """The parsed ``fsfunc.json`` of ``folder``.

    Raises:
        CheckpointError: it is damaged, or of a version that this library cannot read.
    """
    return parse(read_regular(folder / MANIFEST, LONGEST + 1), folder)


def parse(raw: bytes, folder: Path) -> Stored:
    """The parsed and validated bytes of a manifest.

    Raises:
        CheckpointError: they are no manifest, or of a version that is not known.
    """
    try:
        with uncollected():
            return _parsed(raw, folder)
    except Wrong as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged ({error}): go back to an earlier "
            "checkpoint"
        ) from error


def _parsed(raw: bytes, folder: Path) -> Stored:
    frame = _FRAME.fullmatch(raw)
    if frame is None:
        raise Wrong("it is no manifest")
    if int(frame[1]) != zlib.crc32(frame[2]):
        raise Wrong("its checksum is not that of its text")
    body = table_of(frame[2])
    version = body.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST} has format version {say(version)}, and this fsfunc "
            f"reads version {VERSION}: load it with the release that wrote it and save "
            "it again, or update fsfunc"
        )
    body.only(*_BODY)
    files = _files(body)
    names = list(files)
    leaves = body.tables("leaves").items()
    tensors = {path: _tensor(path, said, names) for path, said in leaves}
    values, metadata, random, mesh = map(
        body.table, ("values", "metadata", "random", "mesh")
    )
    return proven(
        Stored(
            folder, tensors, dict(values), dict(metadata), dict(mesh), files,
            dict(random), VERSION,
        )
    )  # fmt: skip


def _files(body: Said) -> dict[str, StoredFile]:
    found: dict[str, StoredFile] = {}
    for i, said in enumerate(body.row("files")):
        file = Said(x=said).table("x").only("name", "bytes", "crc32")
        name, nbytes = file.text("name"), file.number("bytes")
        if not _FILE.fullmatch(name) or name in found:
            raise Wrong(f"its file {i} is called {name[:99]!r}")
        sums = from_hex(file.text("crc32"))
        if len(sums) != -(-nbytes // BLOCK):
            raise Wrong(f"{name} of {nbytes} bytes has {len(sums)} checksums")
        found[name] = StoredFile(nbytes, sums)
    return found


def _tensor(path: str, said: Said, names: list[str]) -> StoredTensor:
    own = said.table("own") if "own" in said else Said()
    said.only(*_LEAF, *(["own"] if own else []))
    dtype = _DTYPES.get(said.text("dtype"))
    if dtype is None:
        raise Wrong(f"{path[:99]!r} is of dtype {said.text('dtype')[:99]!r}")
    chunks = tuple([_chunk(path, box, names) for box in said.row("chunks")])
    return StoredTensor(said.numbers("shape"), dtype, chunks, path, dict(own))


def _chunk(path: str, said: Any, names: list[str]) -> Chunk:
    if type(said) is not list or len(said) != 4:
        raise Wrong(f"a box of {path[:99]!r} is {say(said)}")
    file, begin, offsets, sizes = said
    if number_of(file, "file") >= len(names):
        raise Wrong(f"a box of {path[:99]!r} lies in file {file} of {len(names)}")
    begin, offsets = number_of(begin, "begin"), numbers_of(offsets, "offsets")
    return Chunk(names[file], begin, offsets, numbers_of(sizes, "sizes"))


def in_file(
    dtype: torch.dtype, sizes: tuple[int, ...], offsets: tuple[int, ...]
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """A box as safetensors holds it: that of complex128 as pairs of float64.

    >>> in_file(torch.complex128, (3,), (4,))
    (torch.float64, (3, 2), (4, 0))
    """
    if dtype not in PAIRS:
        return dtype, sizes, offsets
    return PAIRS[dtype], (*sizes, 2), (*offsets, 0)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def as_hex(sums: tuple[int, ...]) -> str:
    """Checksums as one text, eight letters each; `from_hex` is the inverse."""
    return "".join(f"{s:08x}" for s in sums)


def from_hex(text: str) -> tuple[int, ...]:
    """The checksums of which `as_hex` made ``text``.

    Raises:
        Wrong: it made no such text.
    """
    try:
        raw = bytes.fromhex(text)
        found = struct.unpack(f">{len(raw) // 4}I", raw)
    except (ValueError, struct.error):
        raise Wrong("checksums that are none") from None
    if raw.hex() != text:
        raise Wrong("checksums that are written in another way")
    return found


_DTYPES = {dtype_name(dtype): dtype for dtype in (*SAFE_DTYPES, *PAIRS)}

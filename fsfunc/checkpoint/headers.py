"""What a checkpoint says of itself: the headers of its files, and its manifest.

A header has the dtype and the place of each box in its file. The table of a checkpoint
is derived from headers, by `tensors_in`: of files that others wrote, of one sealed file
(`consolidate`), and of those that the ranks of a save have just written. The first rank
keeps what it derived as the manifest, ``fsfunc.json``:

    {"crc32": of the rest, "body":
    {"version": 1, "leaves": ..., "values": ..., "files": ..., "metadata": ...,
     "random": ..., "mesh": ...}
    }

It is written last, so where it is all files are; it has their checksums; and whoever
loads a part need not read the headers of all files. Those that are read must say the
same (`check_files`): what is not as it was written has to be wrong twice, and alike.

A sealed file has the contents of a manifest in the ``__metadata__`` of its header, with
checksums of the header and of the data, which other readers ignore.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.checkpoint.folders import (
    MANIFEST,
    is_pickle,
    open_regular,
    read_regular,
    refuse_pickle,
    sync,
)
from fsfunc.checkpoint.parsing import (
    LONGEST,
    Said,
    Wrong,
    number_of,
    numbers_of,
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
    check_count,
    proven,
)
from fsfunc.runtime.scopes import gc_paused

VERSION = 1
PART_OF = "fsfunc.part"  # in a header: the file is nothing without its manifest
SAFE_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

# Of what safetensors has none: a tensor of these is kept as pairs, with a dim more.
PAIRS = {torch.complex128: torch.float64}

# Columns of a leaf beside its shape, dtype and boxes, which headers of safetensors have
# not: an attribute of `StoredTensor`, and how it is read. All else goes by this table.
COLUMNS: dict[str, Callable[[Said], Any]] = {"own": lambda row: dict(row.table("own"))}
_FACTS = ("values", "metadata", "random", "mesh")  # of `Stored`, beside its tensors

_OURS, _SUMS = "fsfunc", "fsfunc.sums"
_LONGEST = 100_000_000  # bytes; what safetensors itself accepts
_UNLIKE = "the checksum of its header is not that of its text"
_FRAME = re.compile(rb'\{"crc32": ([0-9]{1,10}), "body":\n([^\n]*)\n\}\n')
_FILE = re.compile(r"shard-[0-9]{5,9}-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {name: dtype for dtype, name in SAFE_DTYPES.items()}
_NAMED = {dtype_name(dtype): dtype for dtype in (*SAFE_DTYPES, *PAIRS)}


# What is derived from headers


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


def said_of(stored: Stored) -> dict[str, Any]:
    """What no header of safetensors has of a checkpoint; `tensors_in` takes it.

    The facts of `Stored`, and of leaves a table by name for each column.
    """
    said: dict[str, Any] = {name: getattr(stored, name) for name in _FACTS}
    for path, leaf in stored.tensors.items():
        columns = _columns_of(leaf) | ({"pairs": True} if leaf.dtype in PAIRS else {})
        for column, value in columns.items():
            said.setdefault(column, {})[path] = value
    return said


def facts_in(said: Said) -> dict[str, Any]:
    """The facts of `Stored` that something says; empty ones where it does not."""
    return {name: dict(said.optional(name)) for name in _FACTS}


def tensors_in(headers: Iterable[Header], said: Said) -> dict[str, StoredTensor]:
    """The tensors whose boxes lie in files; each reaches as far as its boxes do.

    Args:
        said: what `said_of` gave.

    Raises:
        Wrong: boxes of one name are no boxes of one tensor; a column of what is none.
    """
    found: dict[str, list[tuple[torch.dtype, Chunk]]] = {}
    for header in headers:
        for name, box in header.boxes.items():
            found.setdefault(name, []).append(box)
    tensors = {name: _joined(name, boxes) for name, boxes in sorted(found.items())}
    for name in said.optional("pairs"):
        if name not in tensors or tensors[name].shape[-1:] != (2,):
            raise Wrong(f"{name[:99]!r} is of complex numbers, and no tensor of pairs")
        tensors[name] = _complex(tensors[name])
    for column in COLUMNS:
        for name, value in said.optional(column).items():
            if name not in tensors:
                raise Wrong(f"{column!r} is said of {name[:99]!r}, which is no tensor")
            tensors[name] = _with_columns(tensors[name], Said({column: value}))
    return tensors


def _columns_of(leaf: StoredTensor) -> dict[str, Any]:
    return {name: getattr(leaf, name) for name in COLUMNS if getattr(leaf, name)}


def _with_columns(leaf: StoredTensor, row: Said) -> StoredTensor:
    columns = {name: read(row) for name, read in COLUMNS.items() if name in row}
    return leaf._replace(**columns) if columns else leaf


def _joined(name: str, boxes: list[tuple[torch.dtype, Chunk]]) -> StoredTensor:
    (dtype, first), chunks = boxes[0], tuple([chunk for _, chunk in boxes])
    if len(chunks) == 1 and not any(first.offsets):
        return StoredTensor(first.sizes, dtype, chunks, name)
    dims = {len(dims) for chunk in chunks for dims in (chunk.offsets, chunk.sizes)}
    if dims != {len(first.sizes)} or any(other != dtype for other, _ in boxes):
        raise Wrong(f"the boxes of {name[:99]!r} are not of one dtype and dims")
    ends = [[o + n for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    return StoredTensor(shape, dtype, chunks, name)


def _complex(leaf: StoredTensor) -> StoredTensor:
    """The leaf that a file has as pairs."""
    dtype = next((k for k, half in PAIRS.items() if half == leaf.dtype), None)
    if dtype is None:
        raise Wrong(f"{leaf.name[:99]!r} is of pairs of {leaf.dtype}")
    chunks = tuple(
        [c._replace(offsets=c.offsets[:-1], sizes=c.sizes[:-1]) for c in leaf.chunks]
    )
    return leaf._replace(shape=leaf.shape[:-1], dtype=dtype, chunks=chunks)


def as_pairs(dtype: torch.dtype, chunk: Chunk) -> tuple[torch.dtype, Chunk]:
    """A box as safetensors holds it: that of complex128 as pairs of float64.

    >>> as_pairs(torch.complex128, Chunk("file", 0, (4,), (3,)))
    (torch.float64, Chunk(file='file', begin=0, offsets=(4, 0), sizes=(3, 2)))
    """
    if dtype not in PAIRS:
        return dtype, chunk
    offsets, sizes = (*chunk.offsets, 0), (*chunk.sizes, 2)
    return PAIRS[dtype], chunk._replace(offsets=offsets, sizes=sizes)


# Headers read


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
        with gc_paused():
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


def check_files(
    stored: Stored, names: Iterable[str], leaves: Iterable[StoredTensor] = ()
) -> None:
    """Raises where a file is not as it was written, as far as is seen without its data.

    Args:
        leaves: whose boxes the files must say of themselves as the manifest says them.
            A manifest that names another place, dtype or leaf than was written is so
            found, though its checksum be right.

    Raises:
        CheckpointError: a file is missing or of another length; or names a leaf, and
            what each says of it.

    Cost: of each file of ``names`` the length, and where there are ``leaves`` and a
    manifest the header.
    """
    boxes: dict[str, dict[str, tuple[torch.dtype, Chunk]]] = {
        name: {} for name in names
    }
    for name in boxes:
        path, nbytes = stored.path / name, stored.files[name].nbytes
        try:
            length = os.stat(path, follow_symlinks=stored.version is None).st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is missing: the checkpoint had a file of {nbytes} bytes "
                "there; go back to an earlier one"
            ) from error
        if length != nbytes:
            raise CheckpointError(
                f"{path} has {length} bytes, and {nbytes} were written: the file is "
                "damaged; go back to an earlier checkpoint"
            )
    for leaf in leaves if stored.version is not None else ():
        for chunk in leaf.chunks:
            if chunk.file in boxes:
                boxes[chunk.file][leaf.name] = as_pairs(leaf.dtype, chunk)
    for name, expected in boxes.items():
        found = header_at(stored.path / name).boxes if expected else {}
        for leaf, box in expected.items():
            if found.get(leaf) != box:
                raise CheckpointError(
                    f"{stored.path / name} is damaged, or its manifest: of {leaf!r} it "
                    f"says {say(str(found.get(leaf)))}, and the manifest "
                    f"{say(str(box))}; go back to an earlier checkpoint"
                )


# Headers made


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

    @property
    def in_file(self) -> tuple[torch.dtype, Chunk]:
        """Its dtype and box as safetensors holds them."""
        return as_pairs(self.dtype, Chunk("", 0, self.offsets, self.shape))


def header_of(entries: Sequence[Entry], metadata: dict[str, str]) -> bytes:
    """The head of a safetensors file."""
    said: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for e in entries:
        dtype, box = e.in_file
        begin, end = end, end + e.nbytes
        said[e.name] = {
            "dtype": SAFE_DTYPES[dtype],
            "shape": box.sizes,
            "data_offsets": [begin, end],
        }
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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
    said = _as_hex((*sums, zlib.crc32(head))).encode()
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
    *sums, own = _from_hex(said) or (0,)
    blank = head.replace(said.encode(), b"0" * len(said), 1)
    if zlib.crc32(blank) != own or len(sums) != -(-nbytes // BLOCK):
        raise Wrong(_UNLIKE)
    return tuple(sums)


def _as_hex(sums: Sequence[int]) -> str:
    """Checksums as one text, eight letters each; `_from_hex` is the inverse."""
    return "".join(f"{s:08x}" for s in sums)


def _from_hex(text: str) -> tuple[int, ...]:
    try:
        raw = bytes.fromhex(text)
        found = struct.unpack(f">{len(raw) // 4}I", raw)
    except (ValueError, struct.error):
        raise Wrong("checksums that are none") from None
    if raw.hex() != text:
        raise Wrong("checksums that are written in another way")
    return found


# The manifest


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
                **_columns_of(leaf),
            }
            for path, leaf in stored.tensors.items()
        },
        "files": [
            {"name": name, "bytes": file.nbytes, "crc32": _as_hex(file.sums or ())}
            for name, file in stored.files.items()
        ],
        **{name: getattr(stored, name) for name in _FACTS},
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    raw = b'{"crc32": %d, "body":\n%s\n}\n' % (zlib.crc32(text), text)
    _read_manifest(raw, folder)
    (folder / MANIFEST).write_bytes(raw)
    sync(folder / MANIFEST)


def read_manifest(folder: Path) -> Stored:
    """The table that the manifest of ``folder`` keeps.

    Raises:
        CheckpointError: it is damaged, or of a version that this library cannot read.
    """
    return _read_manifest(read_regular(folder / MANIFEST, LONGEST + 1), folder)


def _read_manifest(raw: bytes, folder: Path) -> Stored:
    try:
        with gc_paused():
            return _table(raw, folder)
    except Wrong as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged ({error}): go back to an earlier "
            "checkpoint"
        ) from error


def _table(raw: bytes, folder: Path) -> Stored:
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
    body.only("version", "leaves", "files", *_FACTS)
    files: dict[str, StoredFile] = {}
    for i, said in enumerate(body.row("files")):
        file = Said(x=said).table("x").only("name", "bytes", "crc32")
        name, nbytes = file.text("name"), file.number("bytes")
        if not _FILE.fullmatch(name) or name in files:
            raise Wrong(f"its file {i} is called {name[:99]!r}")
        sums = _from_hex(file.text("crc32"))
        if len(sums) != -(-nbytes // BLOCK):
            raise Wrong(f"{name} of {nbytes} bytes has {len(sums)} checksums")
        files[name] = StoredFile(nbytes, sums)
    leaves, names = body.table("leaves"), list(files)
    check_count(len(leaves))
    tensors = {path: _tensor(path, leaves.table(path), names) for path in leaves}
    facts = facts_in(body)
    return proven(Stored(folder, tensors, files=files, version=VERSION, **facts))


def _tensor(path: str, row: Said, names: list[str]) -> StoredTensor:
    row.only("shape", "dtype", "chunks", *(name for name in COLUMNS if row.get(name)))
    dtype = _NAMED.get(row.text("dtype"))
    if dtype is None:
        raise Wrong(f"{path[:99]!r} is of dtype {row.text('dtype')[:99]!r}")
    chunks = tuple([_chunk(path, box, names) for box in row.row("chunks")])
    leaf = StoredTensor(row.numbers("shape"), dtype, chunks, path)
    return _with_columns(leaf, row)


def _chunk(path: str, said: Any, names: list[str]) -> Chunk:
    if type(said) is not list or len(said) != 4:
        raise Wrong(f"a box of {path[:99]!r} is {say(said)}")
    file, begin, offsets, sizes = said
    if number_of(file, "file") >= len(names):
        raise Wrong(f"a box of {path[:99]!r} lies in file {file} of {len(names)}")
    begin, offsets = number_of(begin, "begin"), numbers_of(offsets, "offsets")
    return Chunk(names[file], begin, offsets, numbers_of(sizes, "sizes"))

"""What a checkpoint says of itself: the headers of its files, and its manifest.

A safetensors file begins with a header, which has the dtype and the place of each box:

    8 bytes: length of the JSON | {"w": {"dtype": "F32", "shape": [2, 8],
    "data_offsets": [0, 64]}, "__metadata__": {...}} | the elements of all boxes

The table of a checkpoint is derived from headers, by `tensors_from`. They are those of
files that others wrote, of one sealed file (`consolidate`), or of the files that the
ranks of a save have just written. The first rank of a save writes what it derived as
the manifest, ``fsfunc.json``:

    {"crc32": of the body's text, "body":
    {"version": 1, "leaves": ..., "values": ..., "files": ..., "metadata": ...,
     "random": ..., "mesh": ...}
    }

It is written last: where a manifest is, all files are. It has their checksums, and
whoever loads a part need not read the headers of all files. The headers that are read
must say the same (`check_files`), so damage is missed only if both are wrong, alike.

A sealed file has the contents of a manifest in the ``__metadata__`` of its header, with
checksums of the header and of the data. Other readers of safetensors ignore them.

A new column of the table (a fact about each leaf) is a field of `StoredTensor`, a line
of `COLUMNS`, and its value in `tasks._derive_table`. `stored.validate` checks what is
read. A version that does not know the column refuses a file with it, so the number of
the format is raised.
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
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsfunc.checkpoint.folders import (
    MANIFEST,
    is_pickle,
    open_regular,
    pickle_error,
    read_regular,
    sync,
)
from fsfunc.checkpoint.parsing import (
    MAX_JSON_BYTES,
    InvalidTable,
    JsonTable,
    abbreviate,
    checked_number,
    checked_numbers,
    parse_table,
)
from fsfunc.checkpoint.stored import (
    BLOCK,
    CheckpointError,
    Chunk,
    Stored,
    StoredFile,
    StoredTensor,
    check_count,
    validate,
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

# Dtypes that safetensors lacks: their elements are stored as pairs, with one dim more.
STORED_AS_PAIRS = {torch.complex128: torch.float64}


class Column(NamedTuple):
    """A column of the table: a field of `StoredTensor`, and a reader of its JSON."""

    field: str
    read: Callable[[JsonTable], Any]


# What is known of a leaf beside its shape, dtype and boxes, by the column's name on
# disk. Headers of safetensors have no room for it: it is in the manifest, or the seal.
COLUMNS: dict[str, Column] = {
    "own": Column("stacked_axes", lambda row: dict(row.table("own"))),
}
_FACTS = ("values", "metadata", "random", "mesh")  # of `Stored`, beside its tensors

_SEALED_KEY, _CHECKSUMS_KEY = "fsfunc", "fsfunc.sums"  # in a header's __metadata__
_MAX_HEADER_BYTES = 100_000_000  # what safetensors itself accepts
_HEADER_MISMATCH = "the checksum of its header is not that of its text"
_MANIFEST_FRAME = re.compile(rb'\{"crc32": ([0-9]{1,10}), "body":\n([^\n]*)\n\}\n')
_FILE_NAME = re.compile(r"shard-[0-9]{5,9}-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")


FileBox: TypeAlias = tuple[torch.dtype, Chunk]
"""What a header says of one tensor: the dtype of its elements, and their place."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns ``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


_DTYPES_BY_SAFE_NAME = {name: dtype for dtype, name in SAFE_DTYPES.items()}
_DTYPES_BY_NAME = {
    dtype_name(dtype): dtype for dtype in (*SAFE_DTYPES, *STORED_AS_PAIRS)
}


# What is derived from headers


class Header(NamedTuple):
    """The parsed header of a file.

    Args:
        nbytes: length of the header, behind which the tensors begin.
        file: length of the whole file, and its checksums if it is sealed.
        boxes: dtype and place of each tensor, by name.
        sealed: the facts that `seal` was given; empty if the file is not sealed.
        is_part: whether a save wrote it, so that it means nothing without its manifest.
    """

    nbytes: int
    file: StoredFile
    boxes: dict[str, FileBox]
    sealed: JsonTable
    is_part: bool


def extra_facts(stored: Stored) -> dict[str, Any]:
    """Returns the facts of a checkpoint for which safetensors' headers have no place.

    These are the facts of `Stored`, and for each column a table of leaves by name.
    `tensors_from` takes them.
    """
    facts: dict[str, Any] = {name: getattr(stored, name) for name in _FACTS}
    for path, leaf in stored.tensors.items():
        is_paired = leaf.dtype in STORED_AS_PAIRS
        columns = _columns_of(leaf) | ({"pairs": True} if is_paired else {})
        for column, value in columns.items():
            facts.setdefault(column, {})[path] = value
    return facts


def facts_from(table: JsonTable) -> dict[str, Any]:
    """Returns the facts of `Stored` in a table; those that it lacks are empty."""
    return {name: dict(table.optional_table(name)) for name in _FACTS}


def tensors_from(
    headers: Iterable[Header], extras: JsonTable
) -> dict[str, StoredTensor]:
    """Derives the tensors from the boxes that lie in files.

    A tensor's shape is not in these headers: it reaches as far as its boxes do.

    Args:
        extras: what `extra_facts` returned.

    Raises:
        InvalidTable: boxes of one name are no boxes of one tensor; or a column names a
            tensor that is none.
    """
    by_name: dict[str, list[FileBox]] = {}
    for header in headers:
        for name, box in header.boxes.items():
            by_name.setdefault(name, []).append(box)
    tensors = {
        name: _join_boxes(name, boxes) for name, boxes in sorted(by_name.items())
    }
    for name in extras.optional_table("pairs"):
        if name not in tensors or tensors[name].shape[-1:] != (2,):
            raise InvalidTable(
                f"{name[:99]!r} is of complex numbers, and no tensor of pairs"
            )
        tensors[name] = _complex_of_pairs(tensors[name])
    for column in COLUMNS:
        for name, value in extras.optional_table(column).items():
            if name not in tensors:
                raise InvalidTable(
                    f"{column!r} is said of {name[:99]!r}, which is no tensor"
                )
            tensors[name] = _with_columns(tensors[name], JsonTable({column: value}))
    return tensors


def _columns_of(leaf: StoredTensor) -> dict[str, Any]:
    return {
        name: getattr(leaf, column.field)
        for name, column in COLUMNS.items()
        if getattr(leaf, column.field)
    }


def _with_columns(leaf: StoredTensor, row: JsonTable) -> StoredTensor:
    fields = {c.field: c.read(row) for name, c in COLUMNS.items() if name in row}
    return leaf._replace(**fields) if fields else leaf


def _join_boxes(name: str, boxes: list[FileBox]) -> StoredTensor:
    (dtype, first), chunks = boxes[0], tuple([chunk for _, chunk in boxes])
    if len(chunks) == 1 and not any(first.offsets):
        return StoredTensor(first.sizes, dtype, chunks, name)
    ndims = {len(ndims) for chunk in chunks for ndims in (chunk.offsets, chunk.sizes)}
    if ndims != {len(first.sizes)} or any(other != dtype for other, _ in boxes):
        raise InvalidTable(f"the boxes of {name[:99]!r} are not of one dtype and dims")
    ends = [[o + n for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    return StoredTensor(shape, dtype, chunks, name)


def _complex_of_pairs(leaf: StoredTensor) -> StoredTensor:
    """Returns the complex leaf that files hold as pairs."""
    dtype = next((k for k, real in STORED_AS_PAIRS.items() if real == leaf.dtype), None)
    if dtype is None:
        raise InvalidTable(f"{leaf.name[:99]!r} is of pairs of {leaf.dtype}")
    chunks = tuple(
        [c._replace(offsets=c.offsets[:-1], sizes=c.sizes[:-1]) for c in leaf.chunks]
    )
    return leaf._replace(shape=leaf.shape[:-1], dtype=dtype, chunks=chunks)


def as_pairs(dtype: torch.dtype, chunk: Chunk) -> FileBox:
    """Returns a box as safetensors holds it: that of complex128 as pairs of float64.

    >>> as_pairs(torch.complex128, Chunk("file", 0, (4,), (3,)))
    (torch.float64, Chunk(file='file', begin=0, offsets=(4, 0), sizes=(3, 2)))
    """
    if dtype not in STORED_AS_PAIRS:
        return dtype, chunk
    offsets, sizes = (*chunk.offsets, 0), (*chunk.sizes, 2)
    return STORED_AS_PAIRS[dtype], chunk._replace(offsets=offsets, sizes=sizes)


# Headers read


def read_header(path: Path, *, follow: bool = False) -> Header:
    """Reads the header of the safetensors file at ``path``.

    Args:
        follow: whether the file may be a link.

    Raises:
        CheckpointError: it is none, holds pickles, or is damaged.
    """
    with open(open_regular(path, follow=follow), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        size = file.read(8)
        length = int.from_bytes(size, "little")
        # Nothing is read, or allocated, of a length that the file cannot have.
        is_possible = 2 <= length <= min(_MAX_HEADER_BYTES, nbytes - 8)
        text = file.read(length) if is_possible else b""
    try:
        if not text:
            raise InvalidTable(
                f"it has a header of {length} bytes, and {nbytes} in all"
            )
        with gc_paused():
            return _parse_header(path.name, size + text, nbytes)
    except InvalidTable as error:
        # A pickle is most often what was meant: that error names the way out.
        if is_pickle(path):
            raise pickle_error(path) from error
        raise CheckpointError(
            f"{path} is damaged, or no safetensors file: {error}"
        ) from error


def _parse_header(name: str, head: bytes, nbytes: int) -> Header:
    """Parses a header, with the 8 bytes before it, of a file of ``nbytes``."""
    table = parse_table(head[8:])
    extra_fields: dict[str, str] = {}
    if "__metadata__" in table:
        extra_fields = table.texts("__metadata__")
        del table["__metadata__"]
    # torch.distributed.checkpoint writes there where in its tensor each box lies.
    sharding_info = parse_table(
        extra_fields.get("DCP_SHARDING_INFO", "{}").encode(errors="replace")
    )
    checksums, sealed = (
        _checksums_of_sealed(head, extra_fields, nbytes - len(head)),
        _unseal(extra_fields),
    )
    boxes: dict[str, FileBox] = {}
    for path in table:
        entry = table.table(path).with_keys("dtype", "shape", "data_offsets")
        sizes, byte_range = entry.numbers("shape"), entry.numbers("data_offsets")
        dtype = _DTYPES_BY_SAFE_NAME.get(entry.text("dtype"))
        if dtype is None:
            raise InvalidTable(
                f"{path[:99]!r} is of the dtype {abbreviate(entry['dtype'])}"
            )
        if (
            len(byte_range) != 2
            or byte_range[1] - byte_range[0] != math.prod(sizes) * dtype.itemsize
        ):
            raise InvalidTable(
                f"{path[:99]!r} of shape {abbreviate(sizes)} lies at the bytes "
                f"{abbreviate(byte_range)}"
            )
        offsets = (0,) * len(sizes)
        if path in sharding_info:
            offsets = sharding_info.table(path).numbers("saved_offsets")
        boxes[path] = dtype, Chunk(name, len(head) + byte_range[0], offsets, sizes)
    file = StoredFile(nbytes, checksums, 0 if checksums is None else len(head))
    return Header(len(head), file, boxes, sealed, PART_OF in extra_fields)


def check_files(
    stored: Stored, names: Iterable[str], leaves: Iterable[StoredTensor] = ()
) -> None:
    """Raises where a file is not as it was written, as far as its header shows.

    Args:
        names: the files.
        leaves: the leaves whose boxes must be in the files' headers as they are in the
            manifest. So a manifest that names another place, dtype or leaf than was
            written is found, even if its checksum is right.

    Raises:
        CheckpointError: a file is missing or of another length; or names a leaf, and
            what each says of it.

    Cost: reads the length of each file, and where there are ``leaves`` and a manifest
    the header.
    """
    expected_boxes: dict[str, dict[str, FileBox]] = {name: {} for name in names}
    for name in expected_boxes:
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
    # Without a manifest the table was derived from these very headers.
    for leaf in leaves if stored.version is not None else ():
        for chunk in leaf.chunks:
            if chunk.file in expected_boxes:
                expected_boxes[chunk.file][leaf.name] = as_pairs(leaf.dtype, chunk)
    for name, expected in expected_boxes.items():
        boxes_in_file = read_header(stored.path / name).boxes if expected else {}
        for leaf, box in expected.items():
            if boxes_in_file.get(leaf) != box:
                raise CheckpointError(
                    f"{stored.path / name} is damaged, or its manifest: of {leaf!r} it "
                    f"says {abbreviate(str(boxes_in_file.get(leaf)))}, and the "
                    f"manifest {abbreviate(str(box))}; go back to an earlier checkpoint"
                )


# Headers made


class Entry(NamedTuple):
    """A tensor of a file: its name, dtype and shape, and its box in a whole tensor.

    Args:
        read: returns the elements, contiguous, on the CPU. It is called when they are
            written, so that copies of all leaves do not exist at once.
        offsets: where the box begins in the whole tensor; none if it is all of it.
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
    def in_file(self) -> FileBox:
        """Its dtype and box as safetensors holds them."""
        return as_pairs(self.dtype, Chunk("", 0, self.offsets, self.shape))


def make_header(entries: Sequence[Entry], metadata: dict[str, str]) -> bytes:
    """Makes the header of a safetensors file, with the 8 bytes before it."""
    table: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for entry in entries:
        dtype, box = entry.in_file
        begin, end = end, end + entry.nbytes
        table[entry.name] = {
            "dtype": SAFE_DTYPES[dtype],
            "shape": box.sizes,
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin aligned
    return len(text).to_bytes(8, "little") + text


def seal(facts: dict[str, Any], nbytes: int) -> dict[str, str]:
    """Makes the header fields of a sealed file, such as a consolidated one.

    The checksums of its data are known once it is written: until then zeros take their
    room, which `fill_checksums` replaces.

    Args:
        facts: what is to be read again as `Header.sealed`.
        nbytes: bytes of all tensors.
    """
    text, blank_checksums = (
        json.dumps(facts | {"sums": True}),
        "0" * 8 * (-(-nbytes // BLOCK) + 1),
    )
    facts_checksum = str(zlib.crc32(text.encode()))
    return {
        _SEALED_KEY: text,
        f"{_SEALED_KEY}.crc32": facts_checksum,
        _CHECKSUMS_KEY: blank_checksums,
    }


def fill_checksums(head: bytes, checksums: Sequence[int]) -> bytes:
    """Returns the header of a sealed file with checksums of the blocks and of itself.

    Its own is that of the header as it is here, with zeros in place of checksums.
    """
    filled = _to_hex((*checksums, zlib.crc32(head))).encode()
    field = f'"{_CHECKSUMS_KEY}":"'.encode()
    return head.replace(field + b"0" * len(filled), field + filled, 1)


def _unseal(extra_fields: dict[str, str]) -> JsonTable:
    """Returns the facts that `seal` was given; none of a file that is not sealed."""
    text = extra_fields.get(_SEALED_KEY)
    if text is None:
        return JsonTable()
    if extra_fields.get(f"{_SEALED_KEY}.crc32") != str(
        zlib.crc32(text.encode(errors="replace"))
    ):
        raise InvalidTable(_HEADER_MISMATCH)
    facts = parse_table(text.encode())
    # The facts say that there are checksums: damage that makes a reader miss the field
    # with these is found too.
    if facts.pop("sums", False) and _CHECKSUMS_KEY not in extra_fields:
        raise InvalidTable(_HEADER_MISMATCH)
    return facts


def _checksums_of_sealed(
    head: bytes, extra_fields: dict[str, str], nbytes: int
) -> tuple[int, ...] | None:
    """Returns the checksums of a sealed file's blocks; None if it is not sealed."""
    if (checksums_text := extra_fields.get(_CHECKSUMS_KEY)) is None:
        return None
    *checksums, header_checksum = _from_hex(checksums_text) or (0,)
    blank_head = head.replace(checksums_text.encode(), b"0" * len(checksums_text), 1)
    if zlib.crc32(blank_head) != header_checksum or len(checksums) != -(
        -nbytes // BLOCK
    ):
        raise InvalidTable(_HEADER_MISMATCH)
    return tuple(checksums)


def _to_hex(checksums: Sequence[int]) -> str:
    """Writes checksums as one text, eight letters each; `_from_hex` is the inverse."""
    return "".join(f"{s:08x}" for s in checksums)


def _from_hex(text: str) -> tuple[int, ...]:
    try:
        raw = bytes.fromhex(text)
        checksums = struct.unpack(f">{len(raw) // 4}I", raw)
    except (ValueError, struct.error):
        raise InvalidTable("checksums that are none") from None
    if raw.hex() != text:  # fromhex takes capitals and spaces too
        raise InvalidTable("checksums that are written in another way")
    return checksums


# The manifest


def write_manifest(stored: Stored, folder: Path) -> None:
    """Writes ``fsfunc.json`` into ``folder``, and waits until it is on the disk.

    Raises:
        CheckpointError: it could not be read again.
    """
    # Boxes name their files by number: a manifest has many boxes, and few files.
    file_numbers = {name: i for i, name in enumerate(stored.files)}
    body = {
        "version": VERSION,
        "leaves": {
            path: {
                "shape": leaf.shape,
                "dtype": dtype_name(leaf.dtype),
                "chunks": [(file_numbers[c.file], *c[1:]) for c in leaf.chunks],
                **_columns_of(leaf),
            }
            for path, leaf in stored.tensors.items()
        },
        "files": [
            {"name": name, "bytes": file.nbytes, "crc32": _to_hex(file.checksums or ())}
            for name, file in stored.files.items()
        ],
        **{name: getattr(stored, name) for name in _FACTS},
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    raw = b'{"crc32": %d, "body":\n%s\n}\n' % (zlib.crc32(text), text)
    _read_manifest(raw, folder)  # what cannot be read again is never written
    (folder / MANIFEST).write_bytes(raw)
    sync(folder / MANIFEST)


def read_manifest(folder: Path) -> Stored:
    """Reads the table in the manifest of ``folder``.

    Raises:
        CheckpointError: it is damaged, or of a version that this library cannot read.
    """
    return _read_manifest(read_regular(folder / MANIFEST, MAX_JSON_BYTES + 1), folder)


def _read_manifest(raw: bytes, folder: Path) -> Stored:
    # The garbage collector would look again and again at objects of which none is
    # garbage: a table of many leaves makes millions.
    try:
        with gc_paused():
            return _parse_manifest(raw, folder)
    except InvalidTable as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged ({error}): go back to an earlier "
            "checkpoint"
        ) from error


def _parse_manifest(raw: bytes, folder: Path) -> Stored:
    frame = _MANIFEST_FRAME.fullmatch(raw)
    if frame is None:
        raise InvalidTable("it is no manifest")
    if int(frame[1]) != zlib.crc32(frame[2]):
        raise InvalidTable("its checksum is not that of its text")
    body = parse_table(frame[2])
    # Before the keys are checked, which are other ones in another version.
    version = body.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST} has format version {abbreviate(version)}, and this "
            f"fsfunc reads version {VERSION}: load it with the release that wrote it "
            "and save it again, or update fsfunc"
        )
    body.with_keys("version", "leaves", "files", *_FACTS)
    files: dict[str, StoredFile] = {}
    for i, row in enumerate(body.array("files")):
        file = JsonTable(x=row).table("x").with_keys("name", "bytes", "crc32")
        name, nbytes = file.text("name"), file.number("bytes")
        # A name such as "../x" would lead out of the folder.
        if not _FILE_NAME.fullmatch(name) or name in files:
            raise InvalidTable(f"its file {i} is called {name[:99]!r}")
        checksums = _from_hex(file.text("crc32"))
        if len(checksums) != -(-nbytes // BLOCK):
            raise InvalidTable(
                f"{name} of {nbytes} bytes has {len(checksums)} checksums"
            )
        files[name] = StoredFile(nbytes, checksums)
    leaves, file_names = body.table("leaves"), list(files)
    check_count(len(leaves))
    tensors = {
        path: _parse_leaf(path, leaves.table(path), file_names) for path in leaves
    }
    facts = facts_from(body)
    return validate(Stored(folder, tensors, files=files, version=VERSION, **facts))


def _parse_leaf(path: str, row: JsonTable, file_names: list[str]) -> StoredTensor:
    row.with_keys(
        "shape", "dtype", "chunks", *(name for name in COLUMNS if row.get(name))
    )
    dtype = _DTYPES_BY_NAME.get(row.text("dtype"))
    if dtype is None:
        raise InvalidTable(f"{path[:99]!r} is of dtype {row.text('dtype')[:99]!r}")
    chunks = tuple([_parse_chunk(path, box, file_names) for box in row.array("chunks")])
    leaf = StoredTensor(row.numbers("shape"), dtype, chunks, path)
    return _with_columns(leaf, row)


def _parse_chunk(path: str, box: Any, file_names: list[str]) -> Chunk:
    if type(box) is not list or len(box) != 4:
        raise InvalidTable(f"a box of {path[:99]!r} is {abbreviate(box)}")
    file, begin, offsets, sizes = box
    if checked_number(file, "file") >= len(file_names):
        raise InvalidTable(
            f"a box of {path[:99]!r} lies in file {file} of {len(file_names)}"
        )
    begin, offsets = checked_number(begin, "begin"), checked_numbers(offsets, "offsets")
    return Chunk(file_names[file], begin, offsets, checked_numbers(sizes, "sizes"))

"""The metadata of a checkpoint, which `parsing` has validated.

Tensors are in safetensors files, keyed by their paths in the tree, as boxes (`Chunk`).
Each file has a checksum for every mebibyte, so that any part of it can be read and
checked without the rest. Numbers, strings and bools of the tree are values.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import randbelow
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.printing.tables import of_axes, visible, visible_lines
from fsfunc.sharded.placements import describe

BLOCK = 1 << 20  # bytes that one checksum covers; they fit a core's cache
_FIELD = (1 << 127) - 1  # a prime


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or was not completed."""

    def __str__(self) -> str:
        return visible_lines(super().__str__())


class Chunk(NamedTuple):
    """A box of a leaf, and where its bytes begin in a file."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredFile(NamedTuple):
    """A file's length in bytes, and the CRC-32 of each `BLOCK` of it, if known.

    ``origin``: where the first block begins; the bytes before have another checksum.
    """

    nbytes: int
    sums: tuple[int, ...] | None = None
    origin: int = 0


class StoredTensor(NamedTuple):
    """A tensor of the saved tree.

    Args:
        name: what its files call it.
        own: sizes of the axes along which ranks had each a value of their own, of which
            this is the stack: ``shape`` is ``(n, *shape of one)``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()
    name: str = ""
    own: Mapping[str, int] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """True if the chunks hold every element of the shape exactly once."""
        return tiles(self.shape, [(c.offsets, c.sizes) for c in self.chunks])

    def __str__(self) -> str:
        if not self.own:
            return describe(self.shape, self.dtype)
        one = describe(self.shape[1:], self.dtype)
        return f"{one}, each rank's own over {visible(of_axes(self.own))}"


@dataclass(frozen=True)
class Stored:
    """The metadata of a checkpoint, read without any mesh and without the tensors.

    Args:
        path: where it is.
        tensors: path in the saved tree -> its shape, dtype and chunks.
        values: path in the saved tree -> number, string or bool.
        metadata: what the user gave to ``save``.
        mesh: the axes of the mesh that saved it.
        files: names and lengths of the files that hold the tensors.
        random: states of the default generators, and which of them each rank had.
        version: of the format; None where there is no manifest.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    values: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    version: int | None = None

    @property
    def leaves(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Path -> (global shape, dtype) of every tensor; of ranks' own, the stack's."""
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
            more = f" and {len(tops) - 8} more" if len(tops) > 8 else ""
            raise KeyError(
                f"{self.path} holds nothing at {at!r}; at its top are {tops[:8]}{more}"
            )
        return replace(self, tensors=tensors, values=values)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.nbytes:,} bytes in {len(self.files)} files"]
        lines += [f"  {path} {leaf}" for path, leaf in self.tensors.items()]
        lines += [f"  {path} {value!r}" for path, value in self.values.items()]
        return "\n".join(map(visible, lines))


def tiles(
    shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> bool:
    """True if boxes (offsets, sizes) hold every element of ``shape`` exactly once.

    Where and only where they do, the sum of the boxes' monomials is that of the whole:
    Σ_boxes ∏_d (x_d^(offset+size) − x_d^offset) = ∏_d (x_d^shape − 1). Both sides are
    compared at a random point of a large field, where different polynomials are equal
    with negligible probability: so the time is proportional to the number of boxes.

    >>> tiles((2, 3), [((0, 0), (2, 1)), ((0, 1), (2, 2))])
    True
    >>> tiles((2, 3), [((0, 0), (2, 2)), ((0, 1), (2, 1))])  # of the right size alone
    False
    """
    whole = (tuple(0 for _ in shape), shape)
    if len(boxes) == 1:
        return boxes[0] == whole
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    cut = [
        d for d, n in enumerate(shape) if any((o[d], s[d]) != (0, n) for o, s in boxes)
    ]
    powers: dict[tuple[int, int], int] = {}
    points = {d: 2 + randbelow(_FIELD - 2) for d in cut}

    def power(d: int, n: int) -> int:
        if (d, n) not in powers:
            powers[d, n] = pow(points[d], n, _FIELD)
        return powers[d, n]

    def sum_of(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        total = 1
        for d in cut:
            ends = power(d, offsets[d] + sizes[d]) - power(d, offsets[d])
            total = total * ends % _FIELD
        return total

    return (sum(sum_of(*box) for box in boxes) - sum_of(*whole)) % _FIELD == 0


_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".distcp", ".metadata")


def open_regular(path: Path, *, follow: bool = False) -> int:
    """A file descriptor, to read from.

    Args:
        follow: it may be a link: one that the user gave, or that `stays`.

    Raises:
        CheckpointError: there is none; or it is a link, a pipe or a device, which may
            lead out of the folder or never answer.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for a writer
    try:
        file = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointError(
                f"{path} is missing: go back to an earlier checkpoint"
            ) from error
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP):
            raise _odd(path) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _odd(path)
    return file


def read_regular(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The first ``most`` bytes of a file, as `open_regular` opens it."""
    with open(open_regular(path, follow=follow), "rb") as file:
        return file.read(most)


def stays(path: Path, folder: Path) -> bool:
    """True if an entry of ``folder`` is in it when links are followed.

    Or in Hugging Face's cache, whose snapshots are folders of links into its blobs.
    """
    real, home = (Path(os.path.realpath(p)) for p in (path, folder))
    cache = home.parent.parent / "blobs"
    return real.is_relative_to(home) or (
        home.parent.name == "snapshots" and real.is_relative_to(cache)
    )


def is_pickle(path: Path) -> bool:
    """True if a file is named as pickles are, or begins as they do."""
    if path.name.endswith(_PICKLES):
        return True
    if not path.is_file():
        return False
    head = read_regular(path, 8, follow=True)  # of torch.save: a zip; before it, none
    return head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04"))


def refuse_pickle(path: Path) -> CheckpointError:
    """The error that is raised in place of loading a pickle."""
    return CheckpointError(
        f"{path} holds pickles, which can run any code and are never loaded: turn it "
        "into safetensors with the library that wrote it (torch.load with "
        "weights_only=True, then safetensors.torch.save_file)"
    )


def _odd(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a link, a pipe or a device, and no regular file: put the file "
        "itself into the checkpoint's folder"
    )


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, to be read and written.

    The view keeps the tensor alive. numpy would do the same, but not for bfloat16, and
    it is not a dependency.

    >>> import torch
    >>> bytes_of(torch.tensor([1, 258], dtype=torch.int16)).tolist()
    [1, 0, 2, 1]
    """
    if x.nbytes == 0:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    memory.tensor = x
    return memoryview(memory).cast("B")

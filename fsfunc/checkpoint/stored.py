"""The table of a checkpoint, and what must be true of it.

Tensors are in safetensors files, keyed by their paths in the tree, as boxes (`Chunk`):

    Stored.tensors["blocks/0/w"] = StoredTensor((4, 8), float32, chunks=(
        Chunk("shard-00001-...", begin=120, offsets=(0, 0), sizes=(2, 8)),
        Chunk("shard-00002-...", begin=120, offsets=(2, 0), sizes=(2, 8))))

Each file has a checksum for every mebibyte, so that any part of it can be read and
checked without the rest. Numbers, strings and bools of the tree are values. What files
say of themselves is untrusted: `validate` checks it together, so that all boxes make
up their tensors and fill their files. No other module checks that.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import randbelow
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from fsfunc.checkpoint.parsing import MAX_INT, InvalidTable, JsonTable, abbreviate
from fsfunc.printing.tables import of_axes, visible, visible_lines
from fsfunc.sharded.placements import describe_tensor

_T = TypeVar("_T")

BLOCK = 1 << 20  # bytes that one checksum covers; they fit a core's cache
_MAX_LEAVES = 1 << 18  # of a tree
_MAX_DEPTH = 200  # names in a path, and levels of metadata
_MAX_PATH_LENGTH = 1 << 16  # of a path
_MAX_DIMS = 64  # of a tensor, as many as torch has
_PRIME = (1 << 127) - 1  # the size of the field that `tiles` computes in


class CheckpointError(RuntimeError):
    """An error: a checkpoint cannot be read, or was not completed."""

    def __str__(self) -> str:
        # A file's names may hold control sequences, which a terminal would obey.
        return visible_lines(super().__str__())


class Chunk(NamedTuple):
    """A box of a leaf, and the position in a file where its bytes begin."""

    file: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredFile(NamedTuple):
    """A file's length in bytes, and the CRC-32 of each `BLOCK` of it, if known.

    ``origin``: where the first block begins; the bytes before have another checksum.
    """

    nbytes: int
    checksums: tuple[int, ...] | None = None
    origin: int = 0


class StoredTensor(NamedTuple):
    """A tensor of the saved tree.

    Args:
        name: what its files call it.
        stacked_axes: sizes of the mesh axes along which each rank had a value of its
            own. The tensor is the stack of these: ``(n, *shape of one)``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = ()
    name: str = ""
    stacked_axes: Mapping[str, int] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Whether the chunks hold every element of the shape exactly once."""
        return tiles(self.shape, [(c.offsets, c.sizes) for c in self.chunks])

    def __str__(self) -> str:
        if not self.stacked_axes:
            return describe_tensor(self.shape, self.dtype)
        row = describe_tensor(self.shape[1:], self.dtype)
        return f"{row}, each rank's own over {visible(of_axes(self.stacked_axes))}"


@dataclass(frozen=True)
class Stored:
    """The metadata of a checkpoint, read without any mesh and without the tensors.

    Args:
        path: where it is.
        tensors: path in the saved tree -> its shape, dtype and chunks.
        values: path in the saved tree -> number, string or bool.
        metadata: what the user gave to ``save``.
        mesh: the axes of the mesh that saved it.
        files: lengths and checksums of the files that hold the tensors, by name.
        random: ``states``, the distinct states of the default generators, and ``of``,
            which of them each rank had.
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
        """Path -> (global shape, dtype) of every tensor, of a stack its own."""
        return {path: (leaf.shape, leaf.dtype) for path, leaf in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.nbytes for leaf in self.tensors.values())

    @property
    def identity(self) -> str:
        """Its name, and a checksum by which ranks see that they load the same one."""
        text = repr((self.tensors, self.values, self.files, self.random))
        return f"{self.path.name} ({zlib.crc32(text.encode()):08x})"

    def below(self, at: str) -> Stored:
        """Returns the subtree at the path ``at``, with paths that begin there.

        Raises:
            KeyError: there is no such path.
        """
        if not at:
            return self

        def inside(leaves: Mapping[str, _T]) -> dict[str, _T]:
            if at in leaves:
                return {"": leaves[at]}
            return {
                p[len(at) + 1 :]: x for p, x in leaves.items() if p.startswith(f"{at}/")
            }

        tensors, values = inside(self.tensors), inside(self.values)
        if not tensors and not values:
            tops = sorted({p.partition("/")[0] for p in (*self.tensors, *self.values)})
            others = f" and {len(tops) - 8} more" if len(tops) > 8 else ""
            raise KeyError(
                f"{self.path} holds nothing at {at!r}; "
                f"at its top are {tops[:8]}{others}"
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
    """Returns whether boxes (offsets, sizes) hold each element of ``shape`` just once.

    An element at ``(i, j)`` stands for the monomial ``x^i y^j``. The boxes tile the
    shape if and only if their monomials have the same sum as those of the whole:

        Σ_boxes ∏_d (x_d^(offset+size) − x_d^offset)  =  ∏_d (x_d^shape − 1)

    (both sides times ``∏_d (x_d − 1)``: each is a product of geometric series). They
    are compared at a random point of a large field, where different polynomials are
    equal with negligible probability. So the time is proportional to the number of
    boxes, where a comparison of all pairs would take its square.

    >>> tiles((2, 3), [((0, 0), (2, 1)), ((0, 1), (2, 2))])
    True
    >>> tiles((2, 3), [((0, 0), (2, 2)), ((0, 1), (2, 1))])  # of the right size alone
    False
    """
    whole = (tuple(0 for _ in shape), shape)
    if len(boxes) == 1:
        return boxes[0] == whole
    # The numbers of elements are compared first: that is cheap, and finds most faults.
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    # A dim that no box cuts gives both sides the same factor.
    cut_dims = [
        d for d, n in enumerate(shape) if any((o[d], s[d]) != (0, n) for o, s in boxes)
    ]
    # Drawn anew each time, so that nobody can forge boxes that agree at the point.
    powers: dict[tuple[int, int], int] = {}
    points = {d: 2 + randbelow(_PRIME - 2) for d in cut_dims}

    def power(d: int, n: int) -> int:
        if (d, n) not in powers:
            powers[d, n] = pow(points[d], n, _PRIME)
        return powers[d, n]

    def monomials(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        product = 1
        for d in cut_dims:
            series = power(d, offsets[d] + sizes[d]) - power(d, offsets[d])
            product = product * series % _PRIME
        return product

    return (sum(monomials(*box) for box in boxes) - monomials(*whole)) % _PRIME == 0


def validate(stored: Stored, data_begins: Mapping[str, int] | None = None) -> Stored:
    """Checks that all of a table makes sense together, and returns it.

    Args:
        data_begins: by file the position where its tensors begin, if that is known.

    Raises:
        InvalidTable: the boxes of a tensor do not make it up, or reach out of it; those
            in a file overlap, leave a gap or do not end where it does; the values, the
            mesh or the generators' states are of the wrong kind.
    """
    check_count(len(stored.tensors) + len(stored.values))
    for path in (*stored.tensors, *stored.values):
        check_path(path)
    if both_kinds := stored.tensors.keys() & stored.values.keys():
        raise InvalidTable(f"{min(both_kinds)!r} is a tensor and a value")
    for path, value in stored.values.items():
        if type(value) not in (bool, int, float, str):
            raise InvalidTable(f"the value {path!r} is {abbreviate(value)}")
    for axis, size in stored.mesh.items():
        if type(size) is not int or size < 1:
            raise InvalidTable(
                f"the mesh's axis {axis!r} is of size {abbreviate(size)}"
            )
    check_depth(stored.metadata)
    # Leaves of equal layers are cut alike: each cut is checked once.
    checked_cuts: set[tuple[Any, ...]] = set()
    for path, leaf in stored.tensors.items():
        cut = leaf.shape, leaf.dtype, tuple([chunk[2:] for chunk in leaf.chunks])
        if cut not in checked_cuts:
            _check_boxes(path, leaf)
            checked_cuts.add(cut)
        if leaf.stacked_axes:
            _check_stack(path, leaf, stored.mesh)
    _check_no_gaps(stored, data_begins)
    return replace(stored, random=_validate_generators(stored.random))


def check_count(count: int) -> None:
    """Raises where there are more leaves than any tree that is saved has."""
    if count > _MAX_LEAVES:
        raise InvalidTable(
            f"it has {count} leaves, and a checkpoint has {_MAX_LEAVES} at the most"
        )


def check_path(path: str) -> None:
    """Raises where no tree has a leaf at a path, or no file could name it."""
    if path.count("/") >= _MAX_DEPTH or len(path) > _MAX_PATH_LENGTH:
        raise InvalidTable(
            f"{path[:99]!r}... lies more than {_MAX_DEPTH} levels deep, or is longer "
            f"than {_MAX_PATH_LENGTH} letters"
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidTable(f"the path {path[:99]!r} is no Unicode text") from None


def check_depth(metadata: dict[str, Any]) -> None:
    """Raises if lists and tables are nested deeper than can be printed."""
    level, depth = [metadata], 0
    while level:
        inner = [x.values() if isinstance(x, dict) else x for x in level]
        level = [x for row in inner for x in row if isinstance(x, dict | list)]
        depth += 1
        if depth > _MAX_DEPTH:
            raise InvalidTable(f"its metadata is more than {_MAX_DEPTH} levels deep")


def _check_boxes(path: str, leaf: StoredTensor) -> None:
    # An empty dim counts as one: torch computes strides so, which overflow otherwise.
    nbytes = math.prod(max(n, 1) for n in leaf.shape) * leaf.dtype.itemsize
    if len(leaf.shape) > _MAX_DIMS or nbytes > MAX_INT:
        raise InvalidTable(f"{path!r} is of shape {str(list(leaf.shape))[:99]}")
    for chunk in leaf.chunks:
        if not len(leaf.shape) == len(chunk.offsets) == len(chunk.sizes) or any(
            o + n > m
            for o, n, m in zip(chunk.offsets, chunk.sizes, leaf.shape, strict=True)
        ):
            raise InvalidTable(
                f"a box of {path!r} {leaf} lies at {str(chunk[2:])[:99]}"
            )
    if not leaf.is_whole:
        raise InvalidTable(
            f"the boxes of {path!r} {leaf} do not make it up once: a file is missing, "
            "or one too many"
        )


def _check_stack(path: str, leaf: StoredTensor, mesh: Mapping[str, int]) -> None:
    """Raises where a stack has not one row for each rank along its axes."""
    # In the mesh's order of axes, in which the stack's rows are.
    sizes = [(axis, n) for axis, n in mesh.items() if axis in leaf.stacked_axes]
    if sizes == [(axis, n) for axis, n in leaf.stacked_axes.items() if type(n) is int]:
        if leaf.shape[:1] == (math.prod(n for _, n in sizes),):
            return
    raise InvalidTable(
        f"of {path[:99]!r}, of shape {str(list(leaf.shape))[:99]}, each rank has a row "
        f"over {abbreviate(leaf.stacked_axes)[:99]}, on a mesh of "
        f"{str(dict(mesh))[:99]}"
    )


def _check_no_gaps(stored: Stored, data_begins: Mapping[str, int] | None) -> None:
    """Raises where a file's boxes do not fill all that follows its header, just once.

    They do where the sorted begins are the sorted ends, moved by one: then each byte is
    behind one more begin than ends, so it lies in one box.
    """
    begins: dict[str, list[int]] = {name: [] for name in stored.files}
    ends: dict[str, list[int]] = {name: [] for name in stored.files}
    for leaf in stored.tensors.values():
        width = leaf.dtype.itemsize
        for name, begin, _, sizes in leaf.chunks:
            begins[name].append(begin)
            ends[name].append(begin + math.prod(sizes) * width)
    for name, file_begins in begins.items():
        file_ends, nbytes = ends[name], stored.files[name].nbytes
        if data_begins is None and not file_begins:
            raise InvalidTable(f"nothing lies in {name}")
        file_begins.sort()
        file_ends.sort()
        first = file_begins[0] if data_begins is None else data_begins[name]
        for begin, end in zip(file_begins, [first, *file_ends], strict=False):
            if begin != end:
                leaves = stored.tensors.items()
                paths = [
                    p for p, x in leaves for c in x.chunks if c[:2] == (name, begin)
                ]
                raise InvalidTable(
                    f"{paths[0]!r} begins at byte {begin} of {name}, and not {end}"
                )
        if (end := file_ends[-1] if file_ends else first) != nbytes:
            raise InvalidTable(
                f"what lies in {name} ends at byte {end}, and not {nbytes}"
            )


def _validate_generators(random: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the generators' states, base64 by device type, and which each rank had."""
    if not random:
        return {}
    table = JsonTable(random)
    if not random.keys() & {"states", "of"}:  # the first checkpoints had one rank's
        table = JsonTable(states=[dict(random)], of=[0])
    table.with_keys("states", "of")
    states, state_of_rank = table.array("states"), table.numbers("of")
    if not state_of_rank or max(state_of_rank) >= len(states):
        raise InvalidTable("the ranks' generators are not those that it holds")
    for state in states:
        for device_type, text in JsonTable(x=state).texts("x").items():
            try:
                base64.b64decode(text, validate=True)
            except ValueError:
                raise InvalidTable(
                    f"the state of the {device_type} generator is no base64"
                ) from None
    return dict(table)

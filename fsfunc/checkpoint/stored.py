"""The table of a checkpoint, and what must be true of it.

Tensors are in safetensors files, keyed by their paths in the tree, as boxes (`Chunk`).
Each file has a checksum for every mebibyte, so that any part of it can be read and
checked without the rest. Numbers, strings and bools of the tree are values. What files
say of themselves is untrusted: `proven` checks it together, so that all boxes make up
their tensors and fill their files, and no other module checks that.
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
from typing import Any, NamedTuple

import torch

from fsfunc.checkpoint.parsing import MOST, Said, Wrong, say
from fsfunc.printing.tables import of_axes, visible, visible_lines
from fsfunc.sharded.placements import describe_tensor

BLOCK = 1 << 20  # bytes that one checksum covers; they fit a core's cache
_LEAVES = 1 << 18  # of a tree
_DEEPEST = 200  # names in a path, and levels of metadata
_LETTERS = 1 << 16  # of a path
_DIMS = 64  # of a tensor, as many as torch has
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
            return describe_tensor(self.shape, self.dtype)
        one = describe_tensor(self.shape[1:], self.dtype)
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


def proven(stored: Stored, heads: Mapping[str, int] | None = None) -> Stored:
    """``stored``, all of which makes sense together.

    Args:
        heads: where in each file its tensors begin, where that is known.

    Raises:
        Wrong: the boxes of a tensor do not make it up, or reach out of it; those in a
            file overlap, leave a gap or do not end where it does; the values, the mesh
            or the generators' states are of the wrong kind.
    """
    check_count(len(stored.tensors) + len(stored.values))
    for path in (*stored.tensors, *stored.values):
        check_path(path)
    if twice := stored.tensors.keys() & stored.values.keys():
        raise Wrong(f"{min(twice)!r} is a tensor and a value")
    for path, value in stored.values.items():
        if type(value) not in (bool, int, float, str):
            raise Wrong(f"the value {path!r} is {say(value)}")
    for axis, size in stored.mesh.items():
        if type(size) is not int or size < 1:
            raise Wrong(f"the mesh's axis {axis!r} is of size {say(size)}")
    check_depth(stored.metadata)
    alike: set[Any] = set()  # many leaves are cut alike
    for path, leaf in stored.tensors.items():
        cut = leaf.shape, leaf.dtype, tuple([chunk[2:] for chunk in leaf.chunks])
        if cut not in alike:
            _check_boxes(path, leaf)
            alike.add(cut)
        if leaf.own:
            _check_own(path, leaf, stored.mesh)
    _check_bytes(stored, heads)
    return replace(stored, random=_random(stored.random))


def check_count(many: int) -> None:
    """Raises where there are more leaves than any tree that is saved has."""
    if many > _LEAVES:
        raise Wrong(f"it has {many} leaves, and a checkpoint has {_LEAVES} at the most")


def check_path(path: str) -> None:
    """Raises where no tree has a leaf at such a path, or no file could name it."""
    if path.count("/") >= _DEEPEST or len(path) > _LETTERS:
        raise Wrong(
            f"{path[:99]!r}... lies more than {_DEEPEST} levels deep, or is longer "
            f"than {_LETTERS} letters"
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise Wrong(f"the path {path[:99]!r} is no Unicode text") from None


def check_depth(said: Any) -> None:
    """Raises if lists and tables are nested deeper than can be printed."""
    level, depth = [said], 0
    while level:
        inner = [x.values() if isinstance(x, dict) else x for x in level]
        level = [x for some in inner for x in some if isinstance(x, dict | list)]
        depth += 1
        if depth > _DEEPEST:
            raise Wrong(f"its metadata is more than {_DEEPEST} levels deep")


def _check_boxes(path: str, leaf: StoredTensor) -> None:
    room = math.prod(max(n, 1) for n in leaf.shape) * leaf.dtype.itemsize
    if len(leaf.shape) > _DIMS or room > MOST:
        raise Wrong(f"{path!r} is of shape {str(list(leaf.shape))[:99]}")
    for chunk in leaf.chunks:
        if not len(leaf.shape) == len(chunk.offsets) == len(chunk.sizes) or any(
            o + n > m
            for o, n, m in zip(chunk.offsets, chunk.sizes, leaf.shape, strict=True)
        ):
            raise Wrong(f"a box of {path!r} {leaf} lies at {str(chunk[2:])[:99]}")
    if not leaf.is_whole:
        raise Wrong(
            f"the boxes of {path!r} {leaf} do not make it up once: a file is missing, "
            "or one too many"
        )


def _check_own(path: str, leaf: StoredTensor, mesh: Mapping[str, int]) -> None:
    """Raises where there are not as many values of their own as ranks along axes."""
    sizes = [(axis, n) for axis, n in mesh.items() if axis in leaf.own]  # in order
    if sizes == [(axis, n) for axis, n in leaf.own.items() if type(n) is int]:
        if leaf.shape[:1] == (math.prod(n for _, n in sizes),):
            return
    raise Wrong(
        f"of {path[:99]!r}, of shape {str(list(leaf.shape))[:99]}, each rank has a row "
        f"over {say(leaf.own)[:99]}, on a mesh of {str(dict(mesh))[:99]}"
    )


def _check_bytes(stored: Stored, heads: Mapping[str, int] | None) -> None:
    """Raises where a file's tensors are not all that follows its header.

    They are where each begins as another one ends: then every byte is in one more of
    those that have begun than of those that have ended.
    """
    begins: dict[str, list[int]] = {name: [] for name in stored.files}
    ends: dict[str, list[int]] = {name: [] for name in stored.files}
    for leaf in stored.tensors.values():
        width = leaf.dtype.itemsize
        for name, begin, _, sizes in leaf.chunks:
            begins[name].append(begin)
            ends[name].append(begin + math.prod(sizes) * width)
    for name, low in begins.items():
        high, nbytes = ends[name], stored.files[name].nbytes
        if heads is None and not low:
            raise Wrong(f"nothing lies in {name}")
        low.sort()
        high.sort()
        at = low[0] if heads is None else heads[name]
        for begin, end in zip(low, [at, *high], strict=False):
            if begin != end:
                found = stored.tensors.items()
                here = [p for p, x in found for c in x.chunks if c[:2] == (name, begin)]
                raise Wrong(
                    f"{here[0]!r} begins at byte {begin} of {name}, and not {end}"
                )
        if (end := high[-1] if high else at) != nbytes:
            raise Wrong(f"what lies in {name} ends at byte {end}, and not {nbytes}")


def _random(said: Mapping[str, Any]) -> dict[str, Any]:
    """The generators' states, base64 by device type, and which each rank had."""
    if not said:
        return {}
    table = Said(said)
    if not said.keys() & {"states", "of"}:  # the first checkpoints had one rank's
        table = Said(states=[dict(said)], of=[0])
    table.only("states", "of")
    states, of = table.row("states"), table.numbers("of")
    if not of or max(of) >= len(states):
        raise Wrong("the ranks' generators are not those that it holds")
    for state in states:
        for kind, text in Said(x=state).texts("x").items():
            try:
                base64.b64decode(text, validate=True)
            except ValueError:
                raise Wrong(f"the state of the {kind} generator is no base64") from None
    return dict(table)

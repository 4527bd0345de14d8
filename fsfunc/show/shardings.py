"""``sharding`` and ``checkpoint``: which rank holds what, and what a file holds.

A layout says all of it, so nothing is communicated: `sharding` draws one leaf as a grid
(`LeafPicture`), and lists the leaves of a tree. `checkpoint` lists what a checkpoint's
table says, without its tensors.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fsfunc import tree
from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.stored import Stored
from fsfunc.comm.launch import PerRank
from fsfunc.comm.mesh import Mesh, maybe_here
from fsfunc.printing.folding import group_alike, name_group
from fsfunc.printing.tables import (
    Printed,
    Report,
    Table,
    of_axes,
    of_bytes,
    picture_line,
)
from fsfunc.sharded.layout import Key, Layout, every_coordinate
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe_tensor
from fsfunc.show.layouts import Grid, grid_of, in_words, part_in_words
from fsfunc.tree.types import Leaf

if TYPE_CHECKING:
    from rich.text import Text

MAX_ROWS = 20  # rows of the table of one leaf
MAX_COORDINATES = 10_000  # that are looked at for it, of a mesh of many axes


@dataclass(frozen=True, repr=False)
class LeafPicture(Printed):
    """One leaf over a mesh, to print: a grid of the holders of each part, and a table.

    ``grid`` is None where its cells are too many to read: the table says it alone.
    """

    layout: Layout
    mesh: Mesh
    rank: int | None
    grid: Grid | None

    @property
    def title(self) -> str:
        """The leaf and its layout in words."""
        layout = self.layout
        leaf = describe_tensor(layout.shape, layout.dtype, layout.name)
        return f"{leaf}, {in_words(layout)}"

    def holders(self, key: Key) -> tuple[int, ...]:
        """Returns the ranks that hold the part at coordinates over ``layout.axes``."""
        coordinates = dict.fromkeys(self.mesh.axes, 0)
        coordinates |= dict(zip(self.layout.axes, key, strict=True))
        # Ranks along the other axes hold copies.
        others = tuple(axis for axis in self.mesh.axes if axis not in self.layout.axes)
        first = self.mesh.rank_at(coordinates)
        return self.mesh.members(others, first) if others else (first,)

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        yield self.title
        if self.grid is not None:
            yield "a cell names the ranks that hold it"
            yield ""
            lines = self.grid.lines(lambda key: of_ranks(self.holders(key)))
            yield from map(picture_line, lines)
        yield ""
        yield self.table()
        if self.empty_count:
            is_one = self.empty_count == 1
            yield (
                "1 other holds nothing"
                if is_one
                else f"{self.empty_count} others hold nothing"
            )
        if self.rank is not None:
            yield ""
            yield f"rank {self.rank} holds {self._share(self.rank)}"

    @cached_property
    def holder_coordinates(self) -> list[dict[str, int]]:
        """The coordinates that hold elements, among the first `MAX_COORDINATES`."""
        looked_at = itertools.islice(every_coordinate(self.layout), MAX_COORDINATES)
        return [c for c in looked_at if math.prod(self.layout.local_shape(c))]

    @property
    def empty_count(self) -> int:
        """The number of coordinates that hold nothing, among those."""
        count = math.prod(self.layout.sizes.values())
        return min(count, MAX_COORDINATES) - len(self.holder_coordinates)

    def table(self) -> Table:
        """Returns a table with a row for each set of ranks that hold the same part."""
        rows = []
        for coordinates in self.holder_coordinates:
            shape = self.layout.local_shape(coordinates)
            ranks = of_ranks(self.holders(self.layout.key(coordinates)))
            position = " ".join(f"{axis}={i}" for axis, i in coordinates.items())
            part = part_in_words(self.layout, coordinates)
            rows.append((ranks, position, part, str(math.prod(shape)), _shape(shape)))
        not_shown = max(math.prod(self.layout.sizes.values()) - MAX_COORDINATES, 0)
        head = ("<rank", "<at", "<holds", ">elements", "<as")
        return Table("", head, rows, MAX_ROWS, hidden=not_shown)

    def _share(self, rank: int) -> str:
        """Describes the part of a rank, and how much of the leaf it is."""
        coordinates = self.mesh.coordinates(rank)
        shape = self.layout.local_shape(coordinates)
        n = math.prod(shape)
        size = of_bytes(n * self.layout.dtype.itemsize)
        share = f"{n} of {self.layout.numel} elements, {size}, as {_shape(shape)}"
        return f"{part_in_words(self.layout, coordinates)}: {share}"


def sharding(
    value: Any, mesh: Mesh | None = None, *, rank: int | None = None
) -> LeafPicture | Report:
    """Shows the elements that each rank holds: of a leaf a picture, of a tree a table.

    A leaf of one or two dims is drawn as it is; of more, the leading ones are rows and
    the rest columns. Nothing is communicated: a layout says it all, so the mesh may be
    abstract, and ``rank`` any of its ranks.

    Args:
        value: a ``Sharded`` leaf or a ``Layout``; or a tree of such and of tensors, as
            a state is; of what ``spmd`` returned, one rank's. Equal layers are one row.
        mesh: by default the one that is running, else the axes that leaves name.
        rank: the rank to show; of a tree by default the calling rank, or 0.

    Returns:
        a ``LeafPicture`` or a ``Report``: print it, or print it with ``rich.print``.

    Raises:
        TypeError: a mesh that is none.
        ValueError: a tree without leaves; a leaf on axes that the mesh has
            not, or has in another size.
        IndexError: a rank that the mesh has not.

    >>> import torch
    >>> from fsfunc.sharded.layout import Flat
    >>> flat = Flat(("data",), 3, "u", offset=0, chunk=9)
    >>> sharding(Layout((5, 5), torch.float32, (flat,), "w"), rank=1)
    w f32[5, 5], flat over data=3
    a cell names the ranks that hold it
    <BLANKLINE>
        0:3    3     4
      ┌─────────────────┐
    0 │  0     0     0  │
      │           ┌─────┤
    1 │  0     0  │  1  │
      ├───────────┘     │
    2 │  1     1     1  │
      │     ┌───────────┤
    3 │  1  │  2     2  │
      ├─────┘           │
    4 │  2     2     2  │
      └─────────────────┘
    <BLANKLINE>
    rank  at      holds         elements  as
    0     data=0  .flat[0:9]           9  [9]
    1     data=1  .flat[9:18]          9  [9]
    2     data=2  .flat[18:25]         7  [7]
    <BLANKLINE>
    rank 1 holds .flat[9:18]: 9 of 25 elements, 36 B, as [9]
    """
    if isinstance(value, PerRank) and value:  # one tree of each rank: this rank's
        value = value[rank if rank is not None and rank < len(value) else 0]
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"sharding is over a mesh, and got {type(mesh).__name__}")
    if isinstance(value, Layout | Sharded):
        layout = value if isinstance(value, Layout) else value.layout
        mesh, _ = _mesh_and_rank([layout], mesh, rank)
        return LeafPicture(layout, mesh, rank, grid_of(layout))
    paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
    if not leaves:
        raise ValueError("the tree has no leaves: there is nothing to show")
    layouts = [_layout(leaf) for leaf in leaves]
    known_layouts = [x for x in layouts if x is not None]
    mesh, shown_rank = _mesh_and_rank(known_layouts, mesh, rank)
    rows, total = [], 0
    keyed = []
    for path, leaf, layout in zip(paths, leaves, layouts, strict=True):
        cells, size = _cells(leaf, layout, mesh.coordinates(shown_rank))
        total += size
        keyed.append((path, (cells, size), cells))
    for names, equal_cells in group_alike(keyed):
        rows.append((name_group(names), *equal_cells[0]))
    axes = of_axes(mesh.axes) or "one rank"
    head = ("<path", "<whole", "<layout", f"<rank {shown_rank} holds", ">bytes each")
    end = f"rank {shown_rank} holds {of_bytes(total)} in {len(leaves)} leaves"
    return Report((f"over {axes}", "", Table("", head, rows, most=200), "", end))


def of_ranks(ranks: Sequence[int]) -> str:
    """Writes ranks in few letters.

    >>> of_ranks([3]), of_ranks([0, 1, 2]), of_ranks([0, 4]), of_ranks([0, 4, 8, 12])
    ('3', '0-2', '0,4', '0,4...12')
    """
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 3:
        return f"{ranks[0]},{ranks[1]}...{ranks[-1]}"
    return ",".join(map(str, ranks))


def _layout(leaf: Leaf) -> Layout | None:
    if isinstance(leaf, Sharded):
        return leaf.layout
    return leaf if isinstance(leaf, Layout) else None


def _cells(
    leaf: Leaf, layout: Layout | None, coordinates: dict[str, int]
) -> tuple[tuple[str, ...], int]:
    """Returns a table's cells for a leaf after its path, and its bytes on a rank."""
    if layout is not None:
        nbytes = math.prod(layout.local_shape(coordinates)) * layout.dtype.itemsize
        whole = describe_tensor(layout.shape, layout.dtype)
        part = part_in_words(layout, coordinates)
        return (whole, in_words(layout), part, of_bytes(nbytes)), nbytes
    if isinstance(leaf, Tensor):
        nbytes = leaf.numel() * leaf.element_size()
        whole = describe_tensor(leaf.shape, leaf.dtype)
        return (whole, "whole", "all", of_bytes(nbytes)), nbytes
    return (type(leaf).__name__, "whole", "all", ""), 0


def _mesh_and_rank(
    layouts: Sequence[Layout], mesh: Mesh | None, rank: int | None
) -> tuple[Mesh, int]:
    """Returns the mesh of the leaves, checked, and the rank to show.

    The mesh is the one given, else the one that is running, else the axes that the
    layouts name.
    """
    calling_rank = 0
    if mesh is None:
        if (here := maybe_here()) is not None:
            mesh, calling_rank = here.mesh, here.rank
        else:
            sizes: dict[str, int] = {}
            for layout in layouts:
                sizes |= {a: n for a, n in layout.sizes.items() if a not in sizes}
            mesh = Mesh(sizes, "abstract")
    for layout in layouts:
        for axis, size in layout.sizes.items():
            if mesh.axes.get(axis) != size:
                has = f"of size {mesh.axes[axis]}" if axis in mesh.axes else "not there"
                raise ValueError(
                    f'{layout.subject} is over axis "{axis}" of size {size}, which is '
                    f"{has} in {mesh}: pass the mesh that it was placed on"
                )
    shown_rank = calling_rank if rank is None else rank
    if not 0 <= shown_rank < mesh.size:
        raise IndexError(
            f"there is no rank {shown_rank} in {mesh}: 0 to {mesh.size - 1}"
        )
    return mesh, shown_rank


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


_MAX_LETTERS = 2000  # of a value


def checkpoint(found: Stored | str | os.PathLike[str], *, at: str = "") -> Report:
    """Shows the tensors, values and files of a checkpoint.

    Args:
        found: what ``metadata(path)`` returned, or a path.
        at: the path of the subtree to show.

    >>> import tempfile, torch, fsfunc as ff
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ff.save(f"{folder}/a", {"w": torch.ones(2, 3), "step": 7})
    ...     print(ff.show.checkpoint(f"{folder}/a").tables["values"].rows)
    [('step', '7')]
    """
    stored = (found if isinstance(found, Stored) else metadata(found)).below(at)
    mesh = of_axes(stored.mesh)
    writer = "fsfunc" if stored.version is not None else "safetensors, of no manifest"
    head = (
        f"{stored.path}: {of_bytes(stored.nbytes)} in {len(stored.tensors)} tensors "
        f"and {len(stored.files)} files, by {writer}" + (f" on {mesh}" if mesh else "")
    )
    tensors = [
        (path, str(leaf), of_bytes(leaf.nbytes), str(len(leaf.chunks)))
        for path, leaf in stored.tensors.items()
    ]
    values = [(path, _short(value)) for path, value in stored.values.items()]
    metadata_rows = [(key, _short(value)) for key, value in stored.metadata.items()]
    parts: list[Table | str] = [head]
    if tensors:
        columns = ("<path", "<tensor", ">bytes", ">boxes")
        parts.append(Table("tensors", columns, tensors))
    if values:
        parts.append(Table("values", ("<path", "<value"), values))
    if metadata_rows:
        parts.append(Table("metadata", ("<key", "<value"), metadata_rows))
    return Report(tuple(parts))


def _short(value: Any) -> str:
    """Writes a value as Python does; of a long text the beginning."""
    text = repr(value)
    hidden = len(text) - _MAX_LETTERS
    if hidden <= 0:
        return text
    return f"{text[:_MAX_LETTERS]}... and {hidden} letters more"

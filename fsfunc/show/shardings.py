"""Tables of the layouts of states and of checkpoints."""

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
from fsfunc.printing.folding import alike, counted
from fsfunc.printing.tables import Printed, Report, Table, of_axes, of_bytes, painted
from fsfunc.sharded.layout import Key, Layout, every_coordinate
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe
from fsfunc.show.layouts import Grid, grid_of, in_words, part_in_words

if TYPE_CHECKING:
    from rich.text import Text

MAX_ROWS = 20  # rows of the table of one leaf
MAX_COORDINATES = 10_000  # sets of ranks, for it


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
        what = describe(layout.shape, layout.dtype, layout.name)
        return f"{what}, {in_words(layout)}"

    def holders(self, key: Key) -> tuple[int, ...]:
        """The ranks that hold the part at these coordinates over ``layout.axes``."""
        at = dict.fromkeys(self.mesh.axes, 0)
        at |= dict(zip(self.layout.axes, key, strict=True))
        others = tuple(axis for axis in self.mesh.axes if axis not in self.layout.axes)
        first = self.mesh.rank_at(at)
        return self.mesh.members(others, first) if others else (first,)

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        yield self.title
        if self.grid is not None:
            yield "a cell names the ranks that hold it"
            yield ""
            lines = self.grid.lines(lambda key: of_ranks(self.holders(key)))
            yield from map(painted, lines)
        yield ""
        yield self.table()
        if self.empty:
            one = self.empty == 1
            yield (
                "1 other holds nothing" if one else f"{self.empty} others hold nothing"
            )
        if self.rank is not None:
            yield ""
            yield f"rank {self.rank} holds {self._share(self.rank)}"

    @cached_property
    def holder_coordinates(self) -> list[dict[str, int]]:
        """The coordinates that hold elements, among the first so many."""
        places = itertools.islice(every_coordinate(self.layout), MAX_COORDINATES)
        return [at for at in places if math.prod(self.layout.local_shape(at))]

    @property
    def empty(self) -> int:
        """The number of coordinates among those that hold nothing."""
        places = math.prod(self.layout.sizes.values())
        return min(places, MAX_COORDINATES) - len(self.holder_coordinates)

    def table(self) -> Table:
        """One row for each set of ranks that hold the same elements."""
        rows = []
        for at in self.holder_coordinates:
            shape = self.layout.local_shape(at)
            ranks = of_ranks(self.holders(self.layout.key(at)))
            place = " ".join(f"{axis}={i}" for axis, i in at.items())
            held = part_in_words(self.layout, at)
            rows.append((ranks, place, held, str(math.prod(shape)), _shape(shape)))
        rest = max(math.prod(self.layout.sizes.values()) - MAX_COORDINATES, 0)
        head = ("<rank", "<at", "<holds", ">elements", "<as")
        return Table("", head, rows, MAX_ROWS, hidden=rest)

    def _share(self, rank: int) -> str:
        at = self.mesh.coordinates(rank)
        shape = self.layout.local_shape(at)
        n = math.prod(shape)
        size = of_bytes(n * self.layout.dtype.itemsize)
        of = f"{n} of {self.layout.numel} elements, {size}, as {_shape(shape)}"
        return f"{part_in_words(self.layout, at)}: {of}"


def sharding(
    value: Any, mesh: Mesh | None = None, *, rank: int | None = None
) -> LeafPicture | Report:
    """The elements that each rank holds: of one leaf a picture, of a tree a table.

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
    mesh, own = _mesh_and_rank([x for x in layouts if x is not None], mesh, rank)
    rows, total = [], 0
    keyed = []
    for path, leaf, layout in zip(paths, leaves, layouts, strict=True):
        cells, size = _cells(leaf, layout, mesh.coordinates(own))
        total += size
        keyed.append((path, (cells, size), cells))
    for names, found in alike(keyed):
        rows.append((counted(names), *found[0]))
    over = of_axes(mesh.axes) or "one rank"
    head = ("<path", "<whole", "<layout", f"<rank {own} holds", ">bytes each")
    end = f"rank {own} holds {of_bytes(total)} in {len(leaves)} leaves"
    return Report((f"over {over}", "", Table("", head, rows, most=200), "", end))


def of_ranks(ranks: Sequence[int]) -> str:
    """Ranks in few letters.

    >>> of_ranks([3]), of_ranks([0, 1, 2]), of_ranks([0, 4]), of_ranks([0, 4, 8, 12])
    ('3', '0-2', '0,4', '0,4...12')
    """
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 3:
        return f"{ranks[0]},{ranks[1]}...{ranks[-1]}"
    return ",".join(map(str, ranks))


def _layout(leaf: Any) -> Layout | None:
    if isinstance(leaf, Sharded):
        return leaf.layout
    return leaf if isinstance(leaf, Layout) else None


def _cells(
    leaf: Any, layout: Layout | None, at: dict[str, int]
) -> tuple[tuple[str, ...], int]:
    """A table's cells for a leaf after its path, and its bytes on this rank."""
    if layout is not None:
        n = math.prod(layout.local_shape(at)) * layout.dtype.itemsize
        what = describe(layout.shape, layout.dtype)
        return (what, in_words(layout), part_in_words(layout, at), of_bytes(n)), n
    if isinstance(leaf, Tensor):
        n = leaf.numel() * leaf.element_size()
        return (describe(leaf.shape, leaf.dtype), "whole", "all", of_bytes(n)), n
    return (type(leaf).__name__, "whole", "all", ""), 0


def _mesh_and_rank(
    layouts: Sequence[Layout], mesh: Mesh | None, rank: int | None
) -> tuple[Mesh, int]:
    """The mesh of the leaves, checked, and the rank to show."""
    asking = 0
    if mesh is None:
        if (found := maybe_here()) is not None:
            mesh, asking = found.mesh, found.rank
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
    own = asking if rank is None else rank
    if not 0 <= own < mesh.size:
        raise IndexError(f"there is no rank {own} in {mesh}: 0 to {mesh.size - 1}")
    return mesh, own


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


_MAX_LETTERS = 2000  # letters of a value


def checkpoint(found: Stored | str | os.PathLike, *, at: str = "") -> Report:
    """The tensors, values and files of a checkpoint, to print.

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
    by = "fsfunc" if stored.version is not None else "safetensors, of no manifest"
    head = (
        f"{stored.path}: {of_bytes(stored.nbytes)} in {len(stored.tensors)} tensors "
        f"and {len(stored.files)} files, by {by}" + (f" on {mesh}" if mesh else "")
    )
    tensors = [
        (path, str(leaf), of_bytes(leaf.nbytes), str(len(leaf.chunks)))
        for path, leaf in stored.tensors.items()
    ]
    values = [(path, _short(value)) for path, value in stored.values.items()]
    said = [(key, _short(value)) for key, value in stored.metadata.items()]
    parts: list[Table | str] = [head]
    if tensors:
        columns = ("<path", "<tensor", ">bytes", ">boxes")
        parts.append(Table("tensors", columns, tensors))
    if values:
        parts.append(Table("values", ("<path", "<value"), values))
    if title:
        parts.append(Table("metadata", ("<key", "<value"), said))
    return Report(tuple(parts))


def _short(value: Any) -> str:
    """A value as Python writes it; of a long text the beginning."""
    text = repr(value)
    more = len(text) - _MAX_LETTERS
    return text if more <= 0 else f"{text[:_MAX_LETTERS]}... and {more} letters more"

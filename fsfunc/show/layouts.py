"""Layouts in words, and as a grid of cells that ranks hold.

A leaf is drawn as a sheet: its leading dims are rows, the others columns. What a rank
holds of it is at most three rectangles (`boxes`), as a range of a flat buffer begins
and ends within a row. Their edges cut the sheet into the cells of a `Grid`:

    ┌─────────────────┐
    │  0     0     0  │
    │           ┌─────┤
    │  0     0  │  1  │
    └───────────┴─────┘
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fsfunc.sharded.layout import Coordinates, Key, Layout, every_coordinate
from fsfunc.sharded.leaf_tables import in_words as in_words  # a rank's part is below
from fsfunc.sharded.placements import Split
from fsfunc.sharded.slices import cut

MAX_ROWS, MAX_COLUMNS = 24, 12  # of cells: what one can still read
_COLORS = (
    "#8aa9d1", "#ecae85", "#8fcbaf", "#c7a8d8",
    "#f0d48a", "#e3a3a3", "#a9d4d9", "#c9cdd6",
)  # fmt: skip
# The corner by the arms that meet in it: up, right, down and left are binary digits.
_CORNERS = "   ┐ ─┌┬ ┘│┤└┴├┼"


class Rectangle(NamedTuple):
    """Rows and columns of a sheet, each from one (inclusive) to one (exclusive)."""

    top: int
    bottom: int
    left: int
    right: int


@dataclass(frozen=True)
class Grid:
    """A leaf as a sheet of rows and columns, cut where its holders change.

    Args:
        dims: how many of the leaf's dims its rows count; the others are its columns.
        rows, columns: where the cells begin, and the last one's end.
        keys: for each row and column the coordinates, over ``layout.axes``, of the
            ranks that hold the cell.
    """

    dims: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    keys: tuple[tuple[Key, ...], ...]

    @property
    def colors(self) -> dict[Key, str]:
        """A colour for the cells of each holder; some colours come again."""
        keys = dict.fromkeys(key for row in self.keys for key in row)
        return dict(zip(keys, itertools.cycle(_COLORS), strict=False))

    def holders_at(self, row: int, column: int) -> Key:
        """Returns the holders of the element at a row and column of the sheet."""
        i = sum(start <= row for start in self.rows) - 1
        return self.keys[i][sum(start <= column for start in self.columns) - 1]

    def lines(
        self, describe_key: Callable[[Key], str]
    ) -> Iterator[list[tuple[str, str]]]:
        """Yields the grid's lines as (letters, styles), with a text in each cell.

        A border stands where holders differ.
        """
        texts = {key: describe_key(key) for row in self.keys for key in row}
        heads = [_range(*ends) for ends in pairwise(self.columns)]
        sides = [_range(*ends) if self.dims else "" for ends in pairwise(self.rows)]
        width = max(map(len, (*heads, *texts.values()))) + 2
        margin = max(map(len, sides)) + 1
        styles = {key: f"#000000 on {color}" for key, color in self.colors.items()}
        yield [(" " * (margin + 1) + " ".join(h.center(width) for h in heads), "")]
        # With a frame of no holders, so that the outer border is drawn like others.
        outside = [None] * (len(heads) + 2)
        framed = [outside, *([None, *row, None] for row in self.keys), outside]
        for i, (above, row) in enumerate(pairwise(framed)):
            yield [(" " * margin + _border(above, row, width), "")]
            if row is outside:
                return
            cells = [(f"{sides[i].rjust(margin - 1)} ", "")]
            for left_key, key in pairwise(row):
                if key is None:
                    break
                is_same = left_key == key
                cells.append((" ", styles[key]) if is_same else ("│", ""))
                cells.append((texts[key].center(width), styles[key]))
            cells.append(("│", ""))
            yield cells


def _border(
    above: Sequence[Key | None], below: Sequence[Key | None], width: int
) -> str:
    """Returns the line between two rows of holders, drawn where they differ."""
    text = ""
    for (a, b), (c, d) in zip(pairwise(above), pairwise(below), strict=True):
        arms = 8 * (a != b) + 4 * (b != d) + 2 * (c != d) + (a != c)
        text += _CORNERS[arms] + ("─" if b != d else " ") * width
    return text.rstrip()


def part_in_words(layout: Layout, coordinates: Coordinates) -> str:
    """Describes the part of a rank, as one would index it.

    ``[2:4, :]`` is a block; ``.flat[5:9]`` a range of the whole, flattened row-major;
    ``[2:4, :].flat[5:9]`` such a range of a block.

    >>> import torch
    >>> from fsfunc.sharded.layout import Flat
    >>> flat = Flat(("data",), 4, "blocks/3", offset=0, chunk=20)
    >>> grid = Layout((10, 7), torch.float32, (Split(1, "model", 2), flat))
    >>> part_in_words(grid, {"model": 1, "data": 1})
    '[:, 4:7].flat[20:30]'
    >>> part_in_words(grid, {"model": 1, "data": 2})
    'nothing'
    >>> part_in_words(Layout((10, 7), torch.float32), {})
    'all'
    """
    box = layout.block(coordinates)
    if box is None:
        return "nothing"
    sizes = [n for _, n in box]
    start, stop = layout.span(coordinates)
    numel = math.prod(sizes)
    if start == stop:
        return "nothing"
    is_cut = sizes != list(layout.shape)
    dims = ", ".join(
        ":" if n == full else f"{low}:{low + n}"
        for (low, n), full in zip(box, layout.shape, strict=True)
    )
    block = f"[{dims}]" if is_cut else ""
    flat_range = f".flat[{start}:{stop}]" if (start, stop) != (0, numel) else ""
    return f"{block}{flat_range}" or "all"


def grid_of(layout: Layout) -> Grid | None:
    """Returns the grid of a leaf; None if that is empty, or has too many cells."""
    dims = rows_of(layout)
    if dims is None or not layout.numel:
        return None
    # Before all coordinates are gone through, of which a large mesh has very many.
    if math.prod(layout.sizes.values()) > MAX_ROWS * MAX_COLUMNS:
        return None
    parts = {layout.key(c): boxes(layout, c, dims) for c in every_coordinate(layout)}
    all_boxes = [box for part in parts.values() for box in part]
    rows = sorted({n for box in all_boxes for n in (box.top, box.bottom)})
    columns = sorted({n for box in all_boxes for n in (box.left, box.right)})
    if len(rows) - 1 > MAX_ROWS or len(columns) - 1 > MAX_COLUMNS:
        return None
    keys: list[list[Key]] = [[()] * (len(columns) - 1) for _ in rows[1:]]
    for key, part in parts.items():
        for box in part:
            for i in range(rows.index(box.top), rows.index(box.bottom)):
                for j in range(columns.index(box.left), columns.index(box.right)):
                    keys[i][j] = key
    return Grid(dims, tuple(rows), tuple(columns), tuple(map(tuple, keys)))


def rows_of(layout: Layout) -> int | None:
    """Returns how many leading dims to count as rows, so that blocks are rectangles.

    None if no number of them does, as of three dims of which two inner ones are cut.

    >>> import torch
    >>> rows_of(Layout((2, 3, 4), torch.float32, (Split(2, "a", 2), Split(0, "b", 2))))
    2
    """
    cut_dims = {part.dim for part in layout.parts if isinstance(part, Split)}
    dims = max([1, *cut_dims]) if layout.ndim > 1 else 0
    return None if cut_dims & set(range(1, dims)) else dims


def boxes(layout: Layout, coordinates: Coordinates, dims: int) -> list[Rectangle]:
    """Returns the part of a rank as at most three rectangles of the leaf's sheet.

    >>> import torch
    >>> from fsfunc.sharded.layout import Flat
    >>> flat = Layout((4, 5), torch.float32, (Flat(("data",), 2, "u", 0, 13),))
    >>> for box in boxes(flat, {"data": 0}, 1):
    ...     print(box)
    Rectangle(top=0, bottom=2, left=0, right=5)
    Rectangle(top=2, bottom=3, left=0, right=3)
    """
    block = layout.block(coordinates)
    if block is None:
        return []
    top, height = _flatten_block(block[:dims], layout.shape[:dims])
    left, width = _flatten_block(block[dims:], layout.shape[dims:])
    return [
        Rectangle(top + row, top + row + rows, left + column, left + column + columns)
        for (row, column), (rows, columns) in cut(
            (height, width), *layout.span(coordinates)
        )
    ]


def _flatten_block(
    block: Sequence[tuple[int, int]], shape: Sequence[int]
) -> tuple[int, int]:
    """Returns (start, length) of a block of dims, of which at most the first is cut."""
    if not block:
        return 0, 1
    inner = math.prod(shape[1:])
    return block[0][0] * inner, block[0][1] * inner


def _range(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"

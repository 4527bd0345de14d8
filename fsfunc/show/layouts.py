"""Layouts in words, and as a grid of cells that ranks hold."""

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
# By the arms that meet, of up, right, down and left, as the digits of a binary number.
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
        dims: how many of the leaf's dims its rows count; the rest are its columns.
        rows, columns: where the cells begin, and the last one's end.
        keys: for each row and column the coordinates (over ``layout.axes``) of those
            of the ranks that hold the cell.
    """

    dims: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    keys: tuple[tuple[Key, ...], ...]

    @property
    def colors(self) -> dict[Key, str]:
        """A colour for the cells of each holder, the same after some."""
        keys = dict.fromkeys(key for row in self.keys for key in row)
        return dict(zip(keys, itertools.cycle(_COLORS), strict=False))

    def holders_at(self, row: int, column: int) -> Key:
        """The holders of the element at this row and column of the sheet."""
        i = sum(start <= row for start in self.rows) - 1
        return self.keys[i][sum(start <= column for start in self.columns) - 1]

    def lines(self, say: Callable[[Key], str]) -> Iterator[list[tuple[str, str]]]:
        """Yield the grid's lines, ``say(key)`` in each cell: letters, and styles.

        A border stands where holders differ.
        """
        said = {key: say(key) for row in self.keys for key in row}
        heads = [_range(*ends) for ends in pairwise(self.columns)]
        sides = [_range(*ends) if self.dims else "" for ends in pairwise(self.rows)]
        width = max(map(len, (*heads, *said.values()))) + 2
        margin = max(map(len, sides)) + 1
        styles = {key: f"#000000 on {color}" for key, color in self.colors.items()}
        yield [(" " * (margin + 1) + " ".join(h.center(width) for h in heads), "")]
        outside = [None] * (len(heads) + 2)
        held = [outside, *([None, *row, None] for row in self.keys), outside]
        for i, (above, row) in enumerate(pairwise(held)):
            yield [(" " * margin + _border(above, row, width), "")]
            if row is outside:
                return
            cells = [(f"{sides[i].rjust(margin - 1)} ", "")]
            for before, key in pairwise(row):
                if key is None:
                    break
                same = before == key
                cells.append((" ", styles[key]) if same else ("│", ""))
                cells.append((said[key].center(width), styles[key]))
            cells.append(("│", ""))
            yield cells


def _border(
    above: Sequence[Key | None], below: Sequence[Key | None], width: int
) -> str:
    """The line between two rows of holders: drawn where they differ."""
    text = ""
    for (a, b), (c, d) in zip(pairwise(above), pairwise(below), strict=True):
        arms = 8 * (a != b) + 4 * (b != d) + 2 * (c != d) + (a != c)
        text += _CORNERS[arms] + ("─" if b != d else " ") * width
    return text.rstrip()


def part_in_words(layout: Layout, coordinates: Coordinates) -> str:
    """The part of a rank, as one would index it.

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
    whole = math.prod(sizes)
    if start == stop:
        return "nothing"
    cut = sizes != list(layout.shape)
    dims = ", ".join(
        ":" if n == full else f"{low}:{low + n}"
        for (low, n), full in zip(box, layout.shape, strict=True)
    )
    block = f"[{dims}]" if cut else ""
    ranges = f".flat[{start}:{stop}]" if (start, stop) != (0, whole) else ""
    return f"{block}{ranges}" or "all"


def grid_of(layout: Layout) -> Grid | None:
    """The grid of a leaf; None where it has no elements, or too many cells to read."""
    dims = rows_of(layout)
    if dims is None or not layout.numel:
        return None
    if math.prod(layout.sizes.values()) > MAX_ROWS * MAX_COLUMNS:
        return None
    held = {layout.key(at): boxes(layout, at, dims) for at in every_coordinate(layout)}
    every = [box for found in held.values() for box in found]
    rows = sorted({n for box in every for n in (box.top, box.bottom)})
    columns = sorted({n for box in every for n in (box.left, box.right)})
    if len(rows) - 1 > MAX_ROWS or len(columns) - 1 > MAX_COLUMNS:
        return None
    keys: list[list[Key]] = [[()] * (len(columns) - 1) for _ in rows[1:]]
    for key, found in held.items():
        for box in found:
            for i in range(rows.index(box.top), rows.index(box.bottom)):
                for j in range(columns.index(box.left), columns.index(box.right)):
                    keys[i][j] = key
    return Grid(dims, tuple(rows), tuple(columns), tuple(map(tuple, keys)))


def rows_of(layout: Layout) -> int | None:
    """The number of leading dims to count as rows, so that blocks are rectangles.

    None where no number of them does: three dims of which two inner ones are cut.

    >>> import torch
    >>> rows_of(Layout((2, 3, 4), torch.float32, (Split(2, "a", 2), Split(0, "b", 2))))
    2
    """
    cut = {part.dim for part in layout.parts if isinstance(part, Split)}
    dims = max([1, *cut]) if layout.ndim > 1 else 0
    return None if cut & set(range(1, dims)) else dims


def boxes(layout: Layout, coordinates: Coordinates, dims: int) -> list[Rectangle]:
    """The part of a rank, as at most three rectangles of the leaf's sheet, in order.

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
    top, height = _side(block[:dims], layout.shape[:dims])
    left, width = _side(block[dims:], layout.shape[dims:])
    return [
        Rectangle(top + row, top + row + rows, left + column, left + column + columns)
        for (row, column), (rows, columns) in cut(
            (height, width), *layout.span(coordinates)
        )
    ]


def _side(block: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[int, int]:
    """(start, length) of a block of dims of which at most the first is cut."""
    if not block:
        return 0, 1
    inner = math.prod(shape[1:])
    return block[0][0] * inner, block[0][1] * inner


def _range(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"

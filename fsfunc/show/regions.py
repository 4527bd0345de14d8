"""A leaf as a grid of cells, each held by one set of ranks, and the grid as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsfunc.layout import Coordinates, Key, Layout, every_coordinate
from fsfunc.placements import Split

__all__ = ["Grid", "Rectangle", "boxes", "grid_of", "sheet"]

MOST_ROWS, MOST_COLUMNS = 24, 12  # of cells: what one can still read
_COLORS = (
    "#8aa9d1", "#ecae85", "#8fcbaf", "#c7a8d8",
    "#f0d48a", "#e3a3a3", "#a9d4d9", "#c9cdd6",
)  # fmt: skip
# By the arms that meet: up, right, down, left.
_CORNERS = {
    "0000": " ", "1010": "│", "0101": "─", "0110": "┌", "0011": "┐", "1100": "└",
    "1001": "┘", "1110": "├", "1011": "┤", "0111": "┬", "1101": "┴", "1111": "┼",
}  # fmt: skip


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
            who hold the cell.
    """

    dims: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    keys: tuple[tuple[Key, ...], ...]

    def at(self, row: int, column: int) -> Key:
        """Who holds the element at this row and column of the sheet."""
        i = sum(start <= row for start in self.rows) - 1
        return self.keys[i][sum(start <= column for start in self.columns) - 1]

    def lines(self, say: Callable[[Key], str]) -> Iterator[list[tuple[str, str]]]:
        """Yield the grid's lines, ``say(key)`` in each cell: letters, and styles."""
        said = {key: say(key) for row in self.keys for key in row}
        heads = [_range(*ends) for ends in _pairs(self.columns)]
        sides = [_range(*ends) for ends in _pairs(self.rows)]
        sides = sides if self.dims else [""] * len(sides)
        width = max(map(len, (*heads, *said.values()))) + 2
        margin = max(map(len, sides)) + 1
        colors = {key: _COLORS[i % len(_COLORS)] for i, key in enumerate(said)}
        yield [(" " * (margin + 1) + " ".join(h.center(width) for h in heads), "")]
        for i, (row, side) in enumerate(zip(self.keys, sides, strict=True)):
            yield [(" " * margin, ""), (self._rule(i, width), "")]
            cells = [(f"{side.rjust(margin - 1)} ", "")]
            for j, key in enumerate(row):
                style = f"#000000 on {colors[key]}"
                same = j > 0 and row[j - 1] == key
                cells.append((" ", style) if same else ("│", ""))
                cells.append((said[key].center(width), style))
            yield [*cells, ("│", "")]
        yield [(" " * margin, ""), (self._rule(len(self.keys), width), "")]

    def _rule(self, i: int, width: int) -> str:
        """The line above row ``i``: drawn where the holders differ."""
        keys, count = self.keys, len(self.columns) - 1
        above = keys[i - 1] if i else None
        below = keys[i] if i < len(keys) else None

        def upright(row: tuple[Key, ...] | None, j: int) -> bool:
            """Whether a line stands left of column ``j`` of a row."""
            return row is not None and (j in (0, count) or row[j - 1] != row[j])

        def lying(j: int) -> bool:
            """Whether the line goes on over column ``j``."""
            inside = 0 <= j < count
            return inside and (above is None or below is None or above[j] != below[j])

        text = ""
        for j in range(count + 1):
            arms = (upright(above, j), lying(j), upright(below, j), lying(j - 1))
            text += _CORNERS.get("".join(str(int(arm)) for arm in arms), " ")
            text += ("─" if lying(j) else " ") * width if j < count else ""
        return text


def grid_of(layout: Layout) -> Grid | None:
    """The grid of a leaf; None where it has no elements, or too many cells to read."""
    dims = sheet(layout)
    if dims is None or not layout.numel:
        return None
    if math.prod(layout.sizes.values()) > MOST_ROWS * MOST_COLUMNS:
        return None
    held = {layout.key(at): boxes(layout, at, dims) for at in every_coordinate(layout)}
    every = [box for found in held.values() for box in found]
    rows = sorted({n for box in every for n in (box.top, box.bottom)})
    columns = sorted({n for box in every for n in (box.left, box.right)})
    if len(rows) - 1 > MOST_ROWS or len(columns) - 1 > MOST_COLUMNS:
        return None
    keys: list[list[Key]] = [[()] * (len(columns) - 1) for _ in rows[1:]]
    for key, found in held.items():
        for box in found:
            for i in range(rows.index(box.top), rows.index(box.bottom)):
                for j in range(columns.index(box.left), columns.index(box.right)):
                    keys[i][j] = key
    return Grid(dims, tuple(rows), tuple(columns), tuple(map(tuple, keys)))


def sheet(layout: Layout) -> int | None:
    """How many dims to count as rows, so that a rank's block is rows by columns.

    None where no number of them does: three dims of which two inner ones are cut.

    >>> import torch
    >>> sheet(Layout((2, 3, 4), torch.float32, (Split("a", 2, 2), Split("b", 2, 0))))
    2
    """
    cut = {part.dim for part in layout.parts if isinstance(part, Split)}
    dims = max([1, *cut]) if layout.ndim > 1 else 0
    return None if cut & set(range(1, dims)) else dims


def boxes(layout: Layout, coordinates: Coordinates, dims: int) -> list[Rectangle]:
    """What a rank holds, as at most three rectangles of the leaf's sheet, in order.

    >>> import torch
    >>> from fsfunc.layout import Flat
    >>> flat = Layout((4, 5), torch.float32, (Flat(("data",), 2, "u", 0, 13),))
    >>> for box in boxes(flat, {"data": 0}, 1):
    ...     print(box)
    Rectangle(top=0, bottom=2, left=0, right=5)
    Rectangle(top=2, bottom=3, left=0, right=3)
    """
    block = layout.block(coordinates)
    start, stop = layout.span(coordinates)
    if block is None or start == stop:
        return []
    top, _ = _side(block[:dims], layout.shape[:dims])
    left, width = _side(block[dims:], layout.shape[dims:])
    found = []
    while start < stop:
        row, column = divmod(start, width)
        whole = 0 if column else (stop - start) // width
        if whole:
            box = (row, row + whole, 0, width)
        else:
            box = (row, row + 1, column, min(column + stop - start, width))
        found.append(
            Rectangle(top + box[0], top + box[1], left + box[2], left + box[3])
        )
        start = (box[1] - 1) * width + box[3]
    return found


def _side(block: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[int, int]:
    """(start, length) of a block of dims of which at most the first is cut."""
    if not block:
        return 0, 1
    inner = math.prod(shape[1:])
    return block[0][0] * inner, block[0][1] * inner


def _pairs(starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(starts, starts[1:], strict=False)


def _range(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"

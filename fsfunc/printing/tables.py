"""Amounts in words, and tables on rich.

What the package shows, plans, tables and pictures, derives from `Printed`: it says its
pieces, and is printed by ``print``, ``rich.print`` or a notebook. Amounts have three
digits; units are decimal: 1 kB is 1,000 bytes, 1 GB is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from fsfunc.printing.letters import visible, visible_lines
from fsfunc.printing.markup import picture_markup, table_markup, text_markup

_LARGE = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_SMALL = ("", "m", "µ", "n", "p")


def of_bytes(value: int | float | Fraction) -> str:
    """Returns bytes as text.

    >>> [of_bytes(n) for n in (0, 999, 1_234, 999_999, 80 * 10**9)]
    ['0 B', '999 B', '1.23 kB', '1.00 MB', '80.0 GB']
    """
    return f"{_large(value)}B"


def of_flops(value: int | float | Fraction) -> str:
    """Returns floating point operations as text.

    >>> of_flops(300), of_flops(3.12e14)
    ('300 FLOP', '312 TFLOP')
    """
    return f"{_large(value)}FLOP"


def of_count(value: int | float | Fraction) -> str:
    """Returns a number of elements, operations or tokens as text.

    >>> of_count(12), of_count(1_500), of_count(-6.02e23)
    ('12', '1.50 k', '-602 Z')
    """
    return _large(value).rstrip()


def of_seconds(value: float) -> str:
    """Returns a time as text.

    >>> [of_seconds(t) for t in (0, 83.1e-6, 0.9999, 75, 4321.0)]
    ['0 s', '83.1 µs', '1.00 s', '75.0 s', '4321 s']
    """
    if not value:
        return "0 s"
    step = 0
    while step < len(_SMALL) - 1 and abs(float(_digits(value * 1000**step))) < 1:
        step += 1
    return f"{_digits(value * 1000**step)} {_SMALL[step]}s"


def of_share(part: float | Fraction, whole: float | Fraction) -> str:
    """Returns a part of ``whole`` in per cent.

    >>> of_share(1, 3), of_share(0, 0), of_share(1, 2000)
    ('33 %', '0 %', '<1 %')
    """
    share = float(100 * part / whole) if whole else 0.0
    return "<1 %" if 0 < share < 0.5 else f"{share:.0f} %"


def of_axes(sizes: Mapping[str, int]) -> str:
    """Returns a mesh's axes as text.

    >>> of_axes({"data": 4, "pipe": 2})
    'data=4, pipe=2'
    """
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def _large(value: int | float | Fraction) -> str:
    """Returns three digits, a blank and the unit's prefix."""
    if abs(value) < 1000 and value == int(value):
        return f"{int(value)} "
    scaled, step = float(value), 0
    while step < len(_LARGE) - 1 and abs(float(_digits(scaled))) >= 1000:
        scaled, step = scaled / 1000, step + 1
    return f"{_digits(scaled)} {_LARGE[step]}"


def _digits(value: float) -> str:
    """Returns three digits, ``1.23``, ``12.3``, ``123``; or all of a longer number."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:.0f}"


if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

# rich takes some 70 ms to import, which who prints nothing should not pay: so it is
# imported inside of the functions that print.
_UNBOUNDED = 100_000  # columns: no line of text is wrapped or cut
_WIDTH = 120  # of a picture, by default


@dataclass(frozen=True)
class Table:
    """A title, a head, and rows of text.

    Args:
        title: the line above; "" for none.
        head: the columns' names, each after a mark: ``<`` flush left, ``>`` right.
        rows: as many cells as the head has.
        most: rows that are shown; how many more there are is said below.
        hidden: rows beyond ``rows`` that there are.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    most: int = 40
    hidden: int = 0

    @property
    def footer(self) -> str:
        """A line on the rows that are not shown; "" if there are none."""
        hidden = max(len(self.rows) - self.most, 0) + self.hidden
        return f"... and {hidden} more" if hidden else ""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        from rich.table import Table as RichTable
        from rich.text import Text

        if self.title:  # not the table's own, which it would wrap
            yield Text(self.title, "bold")
        table = RichTable(box=None, padding=(0, 1), pad_edge=False)
        for mark, *name in self.head:
            justify = "right" if mark == ">" else "left"
            table.add_column(Text("".join(name)), justify=justify, overflow="fold")
        for row in self.rows[: self.most]:
            table.add_row(*(Text(visible(cell)) for cell in row))
        yield table
        if self.footer:
            yield Text(self.footer)

    def markup(self) -> str:
        """Returns the table as HTML."""
        shown = self.rows[: self.most]
        return table_markup(self.title, self.head, shown, self.footer)


class Printed:
    """Something to print: ``print(it)``, or in colours by ``rich.print(it)``.

    A notebook shows it as HTML where it is the last value of a cell.
    """

    def pieces(self, width: int | None) -> Iterable[Table | Text | str]:
        """Returns what to print: tables, lines of pictures, and text.

        rich may wrap text.

        Args:
            width: the columns that a picture may have; None: as many as it likes.
        """
        raise NotImplementedError

    def text(self, width: int | None = _WIDTH) -> str:
        """Returns all of it as text; pictures have at most ``width`` columns."""
        from rich.console import Console
        from rich.text import Text

        file = StringIO()
        console = Console(
            file=file,
            width=_UNBOUNDED,
            color_system=None,
            force_jupyter=False,  # which would show it in a cell, not write to the file
        )
        for piece in self._rendered(width):
            if isinstance(piece, Text):
                file.write(f"{piece.plain}\n")
            else:
                console.print(piece)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:  # what a prompt shows is the thing itself
        return self.text()

    def _repr_html_(self) -> str:
        """Returns what a notebook shows; nothing is sent, and no tensor is read."""
        blocks = list[str]()
        all_pieces = cast("Iterable[Any]", self.pieces(_WIDTH))
        # Lines of one picture, or of one text, follow each other: they are one block.
        for kind, pieces in groupby(all_pieces, key=type):
            if kind is Table:
                blocks += [table.markup() for table in pieces]
            elif kind is str:  # blank lines around it are the blocks' margins
                blocks += [text_markup("\n".join(pieces).strip("\n"))]
            else:
                blocks += [picture_markup(pieces)]
        return "\n".join(["<div>", *filter(None, blocks), "</div>"])

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield from self._rendered(options.max_width)

    def _rendered(self, width: int | None) -> Iterator[Any]:
        from rich.text import Text

        for piece in self.pieces(width):
            yield Text(visible_lines(piece)) if isinstance(piece, str) else piece


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """Tables, and lines between them."""

    parts: tuple[Table | str, ...]

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by their titles."""
        return {part.title: part for part in self.parts if isinstance(part, Table)}

    def pieces(self, width: int | None) -> tuple[Table | str, ...]:
        return self.parts


def picture_line(cells: Iterable[tuple[str, str]]) -> Text:
    """Returns a line of a picture, which is never wrapped.

    Args:
        cells: letters, and rich's style for them ("" for none).
    """
    from rich.text import Text

    runs = groupby(cells, key=lambda cell: cell[1])
    parts = [("".join(letters for letters, _ in run), style) for style, run in runs]
    return Text.assemble(*parts, no_wrap=True, overflow="crop")

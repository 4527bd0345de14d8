"""Tables and lines on rich: plain text by ``print``, in colours by ``rich.print``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

__all__ = ["Printed", "Report", "Table", "painted", "visible", "visible_lines"]

_UNBOUNDED = 100_000  # columns: no line of text is wrapped or cut


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
        rest = max(len(self.rows) - self.most, 0) + self.hidden
        if rest:
            yield Text(f"... and {rest} more")


class Printed:
    """Something to print: ``print(it)``, or in colours by ``rich.print(it)``."""

    def pieces(self, width: int | None) -> Iterable[Table | Text | str]:
        """Tables, lines of pictures, and what is said, which rich may wrap.

        A picture is at most ``width`` columns wide; None: as it likes.
        """
        raise NotImplementedError

    def text(self, width: int | None = 120) -> str:
        """All of it as text; pictures are at most ``width`` columns wide."""
        from rich.console import Console
        from rich.text import Text

        file = StringIO()
        console = Console(file=file, width=_UNBOUNDED, color_system=None)
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


def painted(cells: Iterable[tuple[str, str]]) -> Text:
    """A line of a picture, which is never wrapped.

    Args:
        cells: letters, and rich's style for them ("" for none).
    """
    from rich.text import Text

    runs = groupby(cells, key=lambda cell: cell[1])
    said = [("".join(letters for letters, _ in run), style) for style, run in runs]
    return Text.assemble(*said, no_wrap=True, overflow="crop")


def visible(text: str) -> str:
    """``text`` with escapes for what a terminal would obey in place of showing it.

    Names in a file may hold such letters: colours, moves of the cursor, other
    directions of writing, ends of lines.

    >>> print(visible("a\\x1b[2Jb\\nc"))
    a\\x1b[2Jb\\nc
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def visible_lines(text: str) -> str:
    """The same of several lines, which stay lines."""
    return "\n".join(map(visible, text.split("\n")))

"""Tables and lines that print as plain text, and in colours by rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable

__all__ = ["Line", "Printed", "Report", "Table"]

Line = Sequence[tuple[str, str]]  # letters, and rich's style for them ("" for none)


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
    def shown(self) -> Sequence[tuple[str, ...]]:
        return self.rows[: self.most]

    @property
    def more(self) -> str:
        """What is said of the rows that are not shown."""
        rest = len(self.rows) - len(self.shown) + self.hidden
        return f"... and {rest} more" if rest else ""

    def lines(self) -> Iterator[Line]:
        """Yield the table line by line."""
        if self.title:
            yield [(self.title, "bold")]
        table = [tuple(name[1:] for name in self.head), *self.shown]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = [
                cell.rjust(width) if name[0] == ">" else cell.ljust(width)
                for cell, width, name in zip(row, widths, self.head, strict=True)
            ]
            yield [("  ".join(cells), "bold" if row is table[0] else "")]
        if self.more:
            yield [(self.more, "")]

    def rich(self) -> RichTable:
        """The table as rich's, without its title, which it would wrap."""
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(
            caption=self.more or None,
            caption_justify="left",
            box=None,
            padding=(0, 1),
            pad_edge=False,
        )
        for name in self.head:
            justify = "right" if name[0] == ">" else "left"
            table.add_column(escape(name[1:]), justify=justify, overflow="fold")
        for row in self.shown:
            table.add_row(*map(escape, row))
        return table


class Printed:
    """Something to print: ``print(it)``, or in colours by ``rich.print(it)``."""

    def pieces(self, width: int | None) -> Iterator[Table | Line | str]:
        """Yield tables, lines of pictures, and what is said, which rich may wrap.

        A picture is at most ``width`` columns wide; None: as it likes.
        """
        raise NotImplementedError

    def text(self, width: int | None = 120) -> str:
        """All of it as text; pictures are at most ``width`` columns wide."""
        written = []
        for piece in self.pieces(width):
            if isinstance(piece, str):
                written.append(piece)
                continue
            lines = piece.lines() if isinstance(piece, Table) else [piece]
            written += ["".join(run for run, _ in line).rstrip() for line in lines]
        return "\n".join(written)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:  # what a prompt shows is the thing itself
        return self.text()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        from rich.text import Text

        for piece in self.pieces(options.max_width):
            if isinstance(piece, str):
                yield Text(piece)
            elif isinstance(piece, Table):
                if piece.title:
                    yield Text(piece.title, "bold")
                yield piece.rich()
            else:
                yield Text.assemble(*piece, no_wrap=True, overflow="crop")


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """Tables, and lines between them."""

    parts: tuple[Table | str, ...]

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by their titles."""
        return {part.title: part for part in self.parts if isinstance(part, Table)}

    def pieces(self, width: int | None) -> Iterator[Table | Line | str]:
        yield from self.parts

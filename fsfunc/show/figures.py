"""Pictures by matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fsfunc.printing.tables import Printed
from fsfunc.show.charts import FAINT, INK, Bar, Row, Tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
ROW, BAR = 0.4, 0.8  # inches from row to row, and how much of it a bar takes
NARROWEST, WIDEST = 8.0, 20.0  # inches of a picture
LETTER, TITLE = 0.064, 0.072  # inches of a letter: in a bar, in the title
THIN = 0.032  # inches: a bar that is less wide has no white edge
HAIR = 0.006  # inches: less would not be seen


class Drawn(Printed):
    """A chart that can also be saved as a picture."""

    def figure(self) -> Figure:
        """The picture.

        Raises:
            ImportError: matplotlib is not there.
        """
        raise NotImplementedError

    def svg(self) -> str:
        """The same as SVG, without matplotlib."""
        raise NotImplementedError

    def save(self, path: str | PathLike[str]) -> None:
        """Draw it into a file: ``.svg``, or by matplotlib ``.png`` or ``.pdf``.

        A path without an ending gets ``.png``.

        Raises:
            ImportError: matplotlib is not there.
            ValueError: an ending that matplotlib has no format for.
        """
        if Path(path).suffix == ".svg":
            Path(path).write_text(self.svg(), encoding="utf-8")
        else:
            self.figure().savefig(path)

    def saved(self, path: str | PathLike[str] | None) -> Self:
        """Itself, drawn into a file where one is named."""
        if path is not None:
            self.save(path)
        return self


def sheet(
    title: str,
    width: float,
    height: float,
    marks: Mapping[str, str],
    beside: float = 0.0,
) -> tuple[Figure, Axes]:
    """A white sheet, axes on it, a title above them and a legend of colours under them.

    Args:
        width, height: in inches; of the axes' height what title and legend leave.
        beside: inches that are taken right of the axes, and of the title.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install matplotlib, or print the chart"
        ) from error
    columns = max(int(width / (0.6 + LETTER * max(map(len, marks), default=1))), 1)
    letters = int((width - beside - 1.0) / TITLE)
    lines = [x for line in title.splitlines() for x in textwrap.wrap(line, letters)]
    height += 0.8 + 0.2 * (len(lines) + -(-len(marks) // columns))
    figure = Figure((width, height), DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="x", length=3, labelsize=8, color=FAINT, labelcolor=FAINT)
    axes.set_title("\n".join(lines), loc="left", size=9, color=INK)
    patches = [Patch(facecolor=color, label=mark) for mark, color in marks.items()]
    figure.legend(
        handles=patches, loc="outside lower left", ncols=columns, frameon=False,
        fontsize=8, labelcolor=INK, handlelength=1, handleheight=1,
    )  # fmt: skip
    return figure, axes


def listing(
    figure: Figure,
    title: str,
    parts: Sequence[tuple[str, str]],
    colors: Mapping[str, str],
) -> None:
    """Writes parts, each (kind, words), right of a picture."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colors.get(k, "white"), label=said) for k, said in parts]
    figure.legend(
        handles=patches, loc="outside right upper", frameon=False, fontsize=8,
        labelcolor=INK, title=title, title_fontsize=8, alignment="left",
        handlelength=1, handleheight=1,
    )  # fmt: skip


def lane_figure(
    title: str,
    rows: Sequence[Row],
    start: float,
    end: float,
    marks: Mapping[str, str],
    times: Sequence[Tick],
) -> Figure:
    """The picture of rows of bars over time, the first row on top.

    Args:
        start, end: the time to draw.
        marks: the legend, title -> colour.
        times: the marks of the axis.
    """
    letters = max(
        sum(len(bar.labels[0]) + 1 for bar in row.bars if bar.labels) for row in rows
    )
    width = min(max(2 * letters * LETTER, NARROWEST), WIDEST)
    figure, axes = sheet(title, width, ROW * len(rows), marks)
    axes.set_xlim(start, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names, notes = [row.name for row in rows], [row.note for row in rows]
    for side, said in ((axes, names), (axes.secondary_yaxis("right"), notes)):
        side.set_yticks(range(len(rows)), said)
        side.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK, pad=6)
        side.spines[:].set_visible(False)
    axes.set_xticks([tick.value for tick in times], [tick.text for tick in times])
    beside = LETTER * sum(max(map(len, said)) for said in (names, notes)) + 0.4
    inches = (width - beside) / (end - start)  # of a time unit, nearly
    for place, row in enumerate(rows):
        _paint(axes, place, row.bars, inches)
        for bar in row.bars:
            room = (bar.end - bar.start) * inches / LETTER - 0.5
            label = next((x for x in bar.labels if len(x) <= room), "")
            if label:
                middle = (bar.start + bar.end) / 2
                axes.text(middle, place, label, size=7, color=bar.ink,
                          ha="center", va="center_baseline")  # fmt: skip
    return figure


def _paint(axes: Axes, place: int, bars: Sequence[Bar], inches: float) -> None:
    """Fill a row; bars that are not long keep their colour to the edge."""
    base = (place - BAR / 2, BAR)
    looks: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    for bar in bars:
        long = bar.end - bar.start
        edge = "white" if long * inches >= THIN else bar.color
        line = 0.6 if long * inches >= HAIR else 1.0 if long else 2.0
        looks.setdefault((bar.color, edge, line), []).append((bar.start, long))
    for (color, edge, line), spans in looks.items():
        axes.broken_barh(spans, base, facecolors=color, edgecolors=edge, linewidth=line)

"""The renderer of pictures, by matplotlib: axes with a legend, and rows of bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from fsfunc.printing.tables import Printed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bar", "Drawn", "FAINT", "INK", "Row", "lane_figure", "sheet"]

DPI = 160
INK, FAINT = "#22262e", "#737a87"
ROW, BAR = 0.4, 0.8  # inches from row to row, and how much of it a bar takes
NARROWEST, WIDEST = 8.0, 20.0  # inches of a picture
LETTER = 0.075  # inches of a label's letter
THIN = 0.032  # inches: a bar that is less wide has no white edge


class Drawn(Printed):
    """A chart that can also be saved as a picture."""

    def figure(self) -> Figure:
        """The picture.

        Raises:
            ImportError: matplotlib is not there.
        """
        raise NotImplementedError

    def save(self, path: str | PathLike[str]) -> None:
        """Draw it into a file: ``.png``, or ``.svg`` or ``.pdf``.

        A path without an ending gets ``.png``.

        Raises:
            ImportError: matplotlib is not there.
            ValueError: an ending that matplotlib has no format for.
        """
        self.figure().savefig(path)


class Bar(NamedTuple):
    """A bar from ``start`` to ``end``; a line where that takes no time."""

    start: float
    end: float
    color: str
    label: str = ""  # written into it where there is room


class Row(NamedTuple):
    """A row of bars in the order of painting, its name, and a note right of it."""

    name: str
    bars: Sequence[Bar]
    note: str = ""


def sheet(
    title: str, width: float, height: float, marks: Mapping[str, str]
) -> tuple[Figure, Axes]:
    """A white sheet, axes on it, and a legend of colours under them.

    Args:
        width, height: in inches; of the axes' height what title and legend leave.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install matplotlib, or print the chart"
        ) from error
    columns = max(int(width / (0.6 + LETTER * max(map(len, marks), default=1))), 1)
    height += 0.8 + 0.2 * (len(title.splitlines()) + -(-len(marks) // columns))
    figure = Figure((width, height), DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="x", length=3, labelsize=8, color=FAINT, labelcolor=FAINT)
    axes.set_title(title, loc="left", size=9, color=INK)
    patches = [Patch(facecolor=color, label=mark) for mark, color in marks.items()]
    figure.legend(
        handles=patches, loc="outside lower left", ncols=columns, frameon=False,
        fontsize=8, labelcolor=INK, handlelength=1, handleheight=1,
    )  # fmt: skip
    return figure, axes


def lane_figure(
    title: str,
    rows: Sequence[Row],
    start: float,
    end: float,
    marks: Mapping[str, str],
    say_time: Callable[[float], str] | None = None,
) -> Figure:
    """The picture of rows of bars over time, the first row on top.

    Args:
        start, end: the time to draw.
        marks: the legend, title -> colour.
        say_time: how the axis says a time; as a number by default.
    """
    letters = max(sum(len(bar.label) + 1 for bar in row.bars) for row in rows)
    width = min(max(2 * letters * LETTER, NARROWEST), WIDEST)
    figure, axes = sheet(title, width, ROW * len(rows), marks)
    axes.set_xlim(start, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names, notes = [row.name for row in rows], [row.note for row in rows]
    for side, said in ((axes, names), (axes.secondary_yaxis("right"), notes)):
        side.set_yticks(range(len(rows)), said)
        side.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK, pad=6)
        side.spines[:].set_visible(False)
    if say_time is not None:
        axes.xaxis.set_major_formatter(lambda value, _: say_time(value))
    inches = 0.8 * width / (end - start)  # of a time unit, nearly
    for place, row in enumerate(rows):
        _paint(axes, place, row.bars, thin=THIN / inches)
        for bar in row.bars:
            if bar.label and (bar.end - bar.start) * inches >= LETTER * len(bar.label):
                color = "white" if is_dark(bar.color) else INK
                middle = (bar.start + bar.end) / 2
                axes.text(middle, place, bar.label, size=7, color=color,
                          ha="center", va="center_baseline")  # fmt: skip
    return figure


def _paint(axes: Axes, place: int, bars: Sequence[Bar], thin: float) -> None:
    """Fill a row; bars less long than ``thin`` keep their colour to the edge."""
    base = (place - BAR / 2, BAR)
    looks: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    for bar in bars:
        long = bar.end - bar.start
        edge = "white" if long >= thin else bar.color
        line = 0.6 if long >= thin else 0.0 if long else 2.0
        looks.setdefault((bar.color, edge, line), []).append((bar.start, long))
    for (color, edge, line), spans in looks.items():
        axes.broken_barh(spans, base, facecolors=color, edgecolors=edge, linewidth=line)


def is_dark(color: str) -> bool:
    """True for a colour on which white is easier to read than black.

    >>> is_dark("#4c7cb8"), is_dark("#edb83d")
    (True, False)
    """
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150

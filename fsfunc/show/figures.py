"""Charts as pictures, by matplotlib: rows of bars, and memory stacked by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from statistics import quantiles
from typing import TYPE_CHECKING, NamedTuple

from fsfunc.printing.tables import Printed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bar", "Drawn", "FAINT", "INK", "Row", "lane_figure", "sheet"]

DPI = 160
INK, FAINT = "#22262e", "#737a87"
RIGHT, BOTTOM = 0.35, 0.82  # inches beside and below the axes
TITLE = 0.2  # inches of a line above them
NAME = 0.075  # inches of a letter of a row's name, or note
MARK, MARK_LETTER, MARK_BAND = 0.33, 0.063, 0.18  # a legend's square, letter, line
ROW, BAR = 0.4, 0.32  # from row to row, and how high a bar is
NARROWEST, USUAL, WIDEST = 5.0, 9.6, 20.0  # of the time axis
THIN = 0.032  # a bar that is less wide has no white edge
FINEST = 4000  # bars nearer than this part of the time are one bar
LARGEST, SMALLEST = 8.5, 5.5  # points of the labels in the bars
LETTER = 0.7  # of the font's size: how wide a letter is


class Drawn(Printed):
    """What can also be saved as a picture."""

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
    """What is drawn from ``start`` to ``end``; a line where that takes no time."""

    start: float
    end: float
    color: str
    label: str = ""  # written into it where there is room
    edged: bool = True  # parted from its neighbours


class Row(NamedTuple):
    """A row of bars in the order of painting, its name, and a note right of it."""

    name: str
    bars: Sequence[Bar]
    note: str = ""


def sheet(
    title: str,
    size: tuple[float, float],
    marks: Mapping[str, str],
    left: float,
    right: float = RIGHT,
) -> tuple[Figure, Axes]:
    """A white sheet, axes on it, and a legend under them.

    Args:
        title: what is written above, in one line or more.
        size: width and height of the axes, in inches.
        marks: what colours mean.
        left, right: inches beside them.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install matplotlib, or print the chart"
        ) from error
    width, height = size
    lines = sum(MARK + MARK_LETTER * len(mark) for mark in marks) / (width + right)
    below = BOTTOM + MARK_BAND * (math.ceil(lines) - 1)
    across = left + width + right
    up = below + height + 0.25 + TITLE * len(title.splitlines())
    figure = Figure(figsize=(across, up), dpi=DPI, facecolor="white")
    axes = figure.add_axes((left / across, below / up, width / across, height / up))
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(axis="x", length=3, labelsize=8, color=FAINT, labelcolor=FAINT)
    axes.set_title(title, loc="left", size=9, color=INK)
    figure.legend(
        handles=[Patch(facecolor=color, label=mark) for mark, color in marks.items()],
        loc="lower left",
        bbox_to_anchor=(left / across, 0.14 / up),
        ncols=math.ceil(len(marks) / max(math.ceil(lines), 1)),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        borderpad=0,
        borderaxespad=0,
        handlelength=1,
        handleheight=1,
        handletextpad=0.5,
        columnspacing=1.4,
    )
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

    Labels ask for the width, up to a bound; where they then have no room, there are
    none.

    Args:
        start, end: the time to draw.
        marks: what the colours mean.
        say_time: how the axis says a time; as a number by default.
    """
    labelled = [bar for row in rows for bar in row.bars if bar.label]
    inches = _label_inches([b for b in labelled if b.end > b.start], end - start)
    width = min(max(inches * LARGEST, NARROWEST), WIDEST) if labelled else USUAL
    left, right = (
        RIGHT + NAME * max(map(len, said))
        for said in ([row.name for row in rows], [row.note for row in rows])
    )
    figure, axes = sheet(title, (width, ROW * len(rows)), marks, left, right)
    axes.set_xlim(start, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for side, said in (
        (axes, [row.name for row in rows]),
        (axes.secondary_yaxis("right"), [row.note for row in rows]),
    ):
        side.set_yticks(range(len(rows)), said)
        side.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK, pad=6)
        side.spines[:].set_visible(False)
    if say_time is not None:
        axes.xaxis.set_major_formatter(lambda value, _: say_time(value))
    size = min(width / inches, LARGEST) if inches else 0
    points = 72 * width / (end - start)  # of a time unit
    for place, row in enumerate(rows):
        bars = merged(row.bars, (end - start) / FINEST)
        _paint(axes, place, bars, thin=THIN * 72 / points)
        for bar in bars if size >= SMALLEST else ():
            room = (bar.end - bar.start) * points
            if bar.label and room >= 0.99 * LETTER * size * _letters(bar):
                color = "white" if is_dark(bar.color) else INK
                middle = (bar.start + bar.end) / 2
                axes.text(middle, place, bar.label, size=size, color=color,
                          ha="center", va="center_baseline")  # fmt: skip
    return figure


def _letters(bar: Bar) -> float:
    return len(bar.label) + 0.6  # and a little air


def _label_inches(bars: Sequence[Bar], time: float) -> float:
    """The width in which 90 % of the labels have room, for letters of 1 point."""
    needs = [_letters(bar) / (bar.end - bar.start) for bar in bars]
    if len(needs) > 1:
        needs = quantiles(needs, n=10, method="inclusive")[-1:]
    return sum(needs) * LETTER * time / 72


def _paint(axes: Axes, place: int, bars: Sequence[Bar], thin: float) -> None:
    """Fill a row; bars less long than ``thin`` keep their colour to the edge."""
    base = (place - BAR / ROW / 2, BAR / ROW)
    looks: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    for bar in bars:
        long = bar.end - bar.start
        edge = "white" if bar.edged and long >= thin else bar.color
        line = 0.6 if bar.edged and long else 0.0 if long else 2.0
        looks.setdefault((bar.color, edge, line), []).append((bar.start, long))
    for (color, edge, line), spans in looks.items():
        axes.broken_barh(spans, base, facecolors=color, edgecolors=edge, linewidth=line)


def merged(bars: Sequence[Bar], gap: float) -> list[Bar]:
    """Bars, those too short to tell from a neighbour of their colour as one.

    >>> bars = Bar(0, 1, "a"), Bar(1, 1.2, "a"), Bar(2, 3, "b"), Bar(3, 5, "b")
    >>> [bar[:3] for bar in merged(bars, 0.5)]
    [(0, 1.2, 'a'), (2, 3, 'b'), (3, 5, 'b')]
    """
    found: list[Bar] = []
    for bar in bars:
        if found and found[-1].color == bar.color:
            last = found[-1]
            shortest = min(last.end - last.start, bar.end - bar.start)
            if max(bar.start - last.end, shortest) <= gap and bar.start >= last.start:
                found[-1] = last._replace(end=bar.end)
                continue
        found.append(bar)
    return found


def is_dark(color: str) -> bool:
    """Whether white is easier to read on it than black.

    >>> is_dark("#4c7cb8"), is_dark("#edb83d")
    (True, False)
    """
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150

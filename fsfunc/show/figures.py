"""Pictures by matplotlib, which is imported only when one is drawn.

`Drawn` is the base of charts that can be saved. `lane_figure` draws rows of bars over
time; `sheet` and `listing` are what all pictures share.
"""

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
ROW, BAR = 0.4, 0.8  # inches from row to row, and the share of it that a bar takes
NARROWEST, WIDEST = 8.0, 20.0  # inches of a picture
LETTER, TITLE = 0.064, 0.072  # inches of a letter: in a bar, in the title
THIN = 0.032  # inches: a bar that is less wide has no white edge, or it would vanish
HAIR = 0.006  # inches: a bar that is less wide is drawn with a thicker line


class Drawn(Printed):
    """A chart that can also be saved as a picture."""

    def figure(self) -> Figure:
        """Draws the picture by matplotlib.

        Raises:
            ImportError: matplotlib is not there.
        """
        raise NotImplementedError

    def svg(self) -> str:
        """Draws the same as SVG, without matplotlib."""
        raise NotImplementedError

    def save(self, path: str | PathLike[str]) -> None:
        """Draws it into a file: ``.svg``, or by matplotlib ``.png`` or ``.pdf``.

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
        """Draws it into a file if one is named, and returns it."""
        if path is not None:
            self.save(path)
        return self


def sheet(
    title: str,
    width: float,
    height: float,
    legend_colors: Mapping[str, str],
    beside: float = 0.0,
) -> tuple[Figure, Axes]:
    """Makes a white sheet with axes, a title above and a legend of colours below.

    Args:
        width: inches of the sheet.
        height: inches of the axes; title and legend come on top.
        beside: inches that are taken right of the axes, and of the title.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install matplotlib, or print the chart"
        ) from error
    longest = max(map(len, legend_colors), default=1)
    columns = max(int(width / (0.6 + LETTER * longest)), 1)
    letters = int((width - beside - 1.0) / TITLE)
    lines = [x for line in title.splitlines() for x in textwrap.wrap(line, letters)]
    height += 0.8 + 0.2 * (len(lines) + -(-len(legend_colors) // columns))
    figure = Figure((width, height), DPI, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="x", length=3, labelsize=8, color=FAINT, labelcolor=FAINT)
    axes.set_title("\n".join(lines), loc="left", size=9, color=INK)
    patches = [Patch(facecolor=c, label=title) for title, c in legend_colors.items()]
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
    """Writes a list of parts, each (kind, words), right of a picture."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colors.get(k, "white"), label=text) for k, text in parts]
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
    legend_colors: Mapping[str, str],
    times: Sequence[Tick],
) -> Figure:
    """Draws rows of bars over time, the first row on top.

    Args:
        start, end: the time to draw.
        legend_colors: colours by what they mean.
        times: the marks of the axis.
    """
    # As wide as the longest row of labels asks.
    letters = max(
        sum(len(bar.labels[0]) + 1 for bar in row.bars if bar.labels) for row in rows
    )
    width = min(max(2 * letters * LETTER, NARROWEST), WIDEST)
    figure, axes = sheet(title, width, ROW * len(rows), legend_colors)
    axes.set_xlim(start, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names, notes = [row.name for row in rows], [row.note for row in rows]
    for side, texts in ((axes, names), (axes.secondary_yaxis("right"), notes)):
        side.set_yticks(range(len(rows)), texts)
        side.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK, pad=6)
        side.spines[:].set_visible(False)
    axes.set_xticks([tick.value for tick in times], [tick.text for tick in times])
    beside = LETTER * sum(max(map(len, texts)) for texts in (names, notes)) + 0.4
    # Nearly: matplotlib lays the axes out when it draws, which is after labels are
    # chosen.
    inches = (width - beside) / (end - start)  # of a time unit
    for y, row in enumerate(rows):
        _paint(axes, y, row.bars, inches)
        for bar in row.bars:
            room = (bar.end - bar.start) * inches / LETTER - 0.5
            label = next((x for x in bar.labels if len(x) <= room), "")
            if label:
                middle = (bar.start + bar.end) / 2
                axes.text(middle, y, label, size=7, color=bar.ink,
                          ha="center", va="center_baseline")  # fmt: skip
    return figure


def _paint(axes: Axes, y: int, bars: Sequence[Bar], inches: float) -> None:
    """Fills a row with its bars; short bars have no white edge."""
    base = (y - BAR / 2, BAR)
    # One artist for all bars that look alike: one for each bar would be slow to draw.
    looks: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    for bar in bars:
        length = bar.end - bar.start
        edge = "white" if length * inches >= THIN else bar.color
        line = 0.6 if length * inches >= HAIR else 1.0 if length else 2.0
        looks.setdefault((bar.color, edge, line), []).append((bar.start, length))
    for (color, edge, line), spans in looks.items():
        axes.broken_barh(spans, base, facecolors=color, edgecolors=edge, linewidth=line)

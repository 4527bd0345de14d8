"""A chart as a picture: one row a rank, one colour a kind, the bubbles in grey."""

from __future__ import annotations

import math
from os import PathLike
from statistics import quantiles
from typing import TYPE_CHECKING

from fsfunc.show.lanes import Bar, Chart
from fsfunc.show.palette import COMPUTE, GAPS, lighter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

DPI = 160
ROW, BAR = 0.44, 0.36  # inches: from rank to rank, and how high a bar is
LEFT, RIGHT, TOP, BOTTOM = 0.75, 1.15, 0.42, 0.74  # inches around the rows
NARROWEST, WIDEST = 5.0, 20.0  # inches of the time axis
LARGEST, SMALLEST = 8.5, 5.5  # points of the labels in the bars
MARK, MARK_LETTER, MARK_BAND = 0.33, 0.063, 0.18  # inches: a legend's square, letter
LETTER = 0.7  # of the font's size: how wide a letter is
INK, FAINT = "#22262e", "#737a87"


def draw(chart: Chart, path: str | PathLike[str]) -> None:
    """Draw a chart into a file whose ending names the format.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: an ending that matplotlib has no format for, or no action that
            takes time.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a picture of a timeline needs matplotlib: pip install matplotlib, or "
            "print the timeline"
        ) from error

    bars = [b for lane in chart.lanes for b in lane.bars if b.end > b.start]
    if not bars:
        raise ValueError("every action takes no time: give costs above 0")
    needs = [_letters(bar) / (bar.end - bar.start) for bar in bars]  # a time unit's
    need = quantiles(needs, n=10, method="inclusive")[-1] if needs[1:] else needs[0]
    inches = LETTER * need * chart.makespan / 72  # of 90 % of the labels, at 1 point
    width = min(max(inches * LARGEST, NARROWEST), WIDEST)
    height = ROW * len(chart.lanes)
    marks = _marks(chart)
    long = sum(MARK + MARK_LETTER * len(title) for title in marks)
    bands = math.ceil(long / (width + RIGHT))  # of the legend
    below = BOTTOM + MARK_BAND * (bands - 1)
    whole = (LEFT + width + RIGHT, TOP + height + below)
    figure = Figure(figsize=whole, dpi=DPI, facecolor="white")
    place = (LEFT / whole[0], below / whole[1], width / whole[0], height / whole[1])
    axes = figure.add_axes(place)
    axes.set_xlim(0, chart.makespan)
    axes.set_ylim(len(chart.lanes) - 0.5, -0.5)  # rank 0 on top
    _rows(axes, chart)
    size = min(width / inches, LARGEST)
    if size >= SMALLEST:
        _labels(axes, chart, size, 72 * width / chart.makespan)
    _margins(axes, chart)
    _legend(figure, marks, math.ceil(len(marks) / bands))
    figure.savefig(path, dpi=DPI)


def _rows(axes: Axes, chart: Chart) -> None:
    """Fill each rank's row with its gaps and its bars."""
    for rank, lane in enumerate(chart.lanes):
        base = (rank - BAR / ROW / 2, BAR / ROW)
        pieces: dict[str, list[tuple[float, float]]] = {}
        for gap in lane.gaps:
            span = (gap.start, gap.end - gap.start)
            pieces.setdefault(GAPS[gap.kind].color, []).append(span)
        for color, spans in pieces.items():
            axes.broken_barh(spans, base, facecolors=color, linewidth=0)
        pieces, marks = {}, []
        for bar in lane.bars:
            span = (bar.start, bar.end - bar.start)
            if not span[1]:
                marks.append(bar)
                continue
            pieces.setdefault(_color(bar, chart), []).append(span)
        for color, spans in pieces.items():
            axes.broken_barh(
                spans, base, facecolors=color, edgecolors="white", linewidth=0.7
            )
        for bar in marks:
            ends = (base[0], sum(base))
            axes.vlines(bar.start, *ends, colors=_color(bar, chart), linewidth=2)


def _color(bar: Bar, chart: Chart) -> str:
    return lighter(COMPUTE[bar.kind].color, bar.chunk, chart.chunks)


def _short(bar: Bar) -> str:
    return bar.label.partition("@")[0]  # the shade tells the stage


def _letters(bar: Bar) -> float:
    return len(_short(bar)) + 0.6  # and a little air


def _labels(axes: Axes, chart: Chart, size: float, points: float) -> None:
    """Name the bars that have room; ``points`` are those of a time unit."""
    for rank, lane in enumerate(chart.lanes):
        for bar in lane.bars:
            room = (bar.end - bar.start) * points
            if room < 0.99 * LETTER * size * _letters(bar):
                continue
            axes.text(
                (bar.start + bar.end) / 2,
                rank,
                _short(bar),
                size=size,
                color="white" if _is_dark(_color(bar, chart)) else INK,
                ha="center",
                va="center_baseline",
            )


def _is_dark(color: str) -> bool:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def _margins(axes: Axes, chart: Chart) -> None:
    """Write the ranks, the times, and each rank's figures."""
    ranks = range(len(chart.lanes))
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK, pad=6)
    axes.tick_params(axis="x", length=3, labelsize=8, color=FAINT, labelcolor=FAINT)

    def write(
        text: str,
        x: float,
        y: float,
        right: float = 0,
        color: str = INK,
        va: str = "center_baseline",
        size: float = 8,
    ) -> None:
        axes.annotate(
            text,
            (x, y),
            (right, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=color,
            ha="right" if right else "left",
            va=va,
            size=size,
        )

    above = -0.5 - 0.12 / ROW  # a line over the rows
    idle = sum(lane.bubble for lane in chart.lanes) / (len(ranks) * chart.makespan)
    title = f"makespan {float(chart.makespan):.4g}, {float(100 * idle):.0f} % bubble"
    write(title, 0, above, va="baseline", size=10)
    write("bubble", 1, above, 38, FAINT, "baseline")
    write("held", 1, above, 66, FAINT, "baseline")
    for rank, lane in enumerate(chart.lanes):
        write(f"{float(100 * lane.bubble / chart.makespan):.0f} %", 1, rank, 38)
        write(f"{float(lane.held):.4g}", 1, rank, 66)


def _marks(chart: Chart) -> dict[str, str]:
    """The legend, for what the picture has: words and their colours."""
    seen = {piece.kind for lane in chart.lanes for piece in (*lane.bars, *lane.gaps)}
    looks = COMPUTE | GAPS
    marks = {look.title: look.color for kind, look in looks.items() if kind in seen}
    if chart.chunks > 1:
        pale = lighter(COMPUTE["F"].color, chart.chunks - 1, chart.chunks)
        marks["lighter: a rank's later stage"] = pale
    return marks


def _legend(figure: Figure, marks: dict[str, str], columns: int) -> None:
    """Write what the colours mean under the picture."""
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(facecolor=color, label=title) for title, color in marks.items()],
        loc="lower left",
        bbox_to_anchor=(LEFT / figure.get_figwidth(), 0.14 / figure.get_figheight()),
        ncols=columns,
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

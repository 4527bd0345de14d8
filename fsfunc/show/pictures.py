"""A chart as a picture: one row a rank, one colour a kind, the bubbles in grey."""

from __future__ import annotations

import math
from os import PathLike
from statistics import quantiles
from typing import TYPE_CHECKING

from fsfunc.show.canvases import (
    DPI,
    FAINT,
    INK,
    MARK_BAND,
    canvas,
    check_drawing,
    is_dark,
    legend,
    legend_bands,
)
from fsfunc.show.lanes import Bar, Chart
from fsfunc.show.palette import COMPUTE, GAPS, lighter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

ROW, BAR = 0.44, 0.36  # inches: from rank to rank, and how high a bar is
LEFT, RIGHT, TOP, BOTTOM = 0.75, 1.15, 0.42, 0.74  # inches around the rows
NARROWEST, WIDEST = 5.0, 20.0  # inches of the time axis
LARGEST, SMALLEST = 8.5, 5.5  # points of the labels in the bars
LETTER = 0.7  # of the font's size: how wide a letter is


def draw(chart: Chart, path: str | PathLike[str]) -> None:
    """Draw a chart into a file whose ending names the format.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: an ending that matplotlib has no format for, or no action that
            takes time.
    """
    check_drawing("timeline")
    bars = [b for lane in chart.lanes for b in lane.bars if b.end > b.start]
    if not bars:
        raise ValueError("every action takes no time: give costs above 0")
    needs = [_letters(bar) / (bar.end - bar.start) for bar in bars]  # a time unit's
    need = quantiles(needs, n=10, method="inclusive")[-1] if needs[1:] else needs[0]
    inches = LETTER * need * chart.makespan / 72  # of 90 % of the labels, at 1 point
    width = min(max(inches * LARGEST, NARROWEST), WIDEST)
    height = ROW * len(chart.lanes)
    marks = _marks(chart)
    bands = legend_bands(marks, width + RIGHT)
    below = BOTTOM + MARK_BAND * (bands - 1)
    whole = (LEFT + width + RIGHT, TOP + height + below)
    figure, axes = canvas(whole, (LEFT, below, width, height))
    axes.set_xlim(0, chart.makespan)
    axes.set_ylim(len(chart.lanes) - 0.5, -0.5)  # rank 0 on top
    _rows(axes, chart)
    size = min(width / inches, LARGEST)
    if size >= SMALLEST:
        _labels(axes, chart, size, 72 * width / chart.makespan)
    _margins(axes, chart)
    legend(figure, marks, LEFT, math.ceil(len(marks) / bands))
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
                color="white" if is_dark(_color(bar, chart)) else INK,
                ha="center",
                va="center_baseline",
            )


def _margins(axes: Axes, chart: Chart) -> None:
    """Write the ranks, the times, and each rank's figures."""
    ranks = range(len(chart.lanes))
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK, pad=6)

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

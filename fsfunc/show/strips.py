"""Streams as a picture: one row a stream, one colour a phase or a kind of transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fsfunc.show.amounts import of_seconds
from fsfunc.show.canvases import (
    INK,
    MARK_BAND,
    canvas,
    check_drawing,
    legend,
    legend_bands,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Strip", "drawn", "merged"]

ROW, BAR = 0.34, 0.26  # inches: from row to row, and how high a bar is
WIDTH, RIGHT, TOP, BOTTOM = 9.6, 0.35, 0.45, 0.74
LETTER = 0.075  # inches of a stream's name
CROWDED = 300  # bars of a row, beyond which they stand edge to edge
THIN = 300  # a bar that takes less than this part of the time has no white edge
FINEST = 4000  # spans nearer than this part of the time are one bar


class Strip(NamedTuple):
    """One row of a picture.

    Args:
        name: what is written before it.
        bars: (start, end, colour), in order.
        waits: the (start, end, colour) that lies behind the bars.
    """

    name: str
    bars: Sequence[tuple[float, float, str]]
    waits: tuple[float, float, str] | None


def drawn(
    title: str,
    strips: Sequence[Strip],
    start: float,
    end: float,
    marks: Mapping[str, str],
) -> Figure:
    """The picture of some streams.

    Args:
        strips: the rows, from above.
        start, end: the time to draw.
        marks: what the colours mean.

    Raises:
        ImportError: matplotlib is not there.
    """
    check_drawing("stream chart")
    left = 0.3 + LETTER * max(len(strip.name) for strip in strips)
    bands = legend_bands(marks, WIDTH)
    below = BOTTOM + MARK_BAND * (bands - 1)
    height = ROW * len(strips)
    whole = (left + WIDTH + RIGHT, TOP + height + below)
    figure, axes = canvas(whole, (left, below, WIDTH, height))
    axes.set_xlim(start, end)
    axes.set_ylim(len(strips) - 0.5, -0.5)
    for row, strip in enumerate(strips):
        base = (row - BAR / ROW / 2, BAR / ROW)
        if strip.waits:
            first, last, color = strip.waits
            axes.broken_barh([(first, last - first)], base, facecolors=color)
        looks: dict[tuple[str, str], list[tuple[float, float]]] = {}
        bars = merged(strip.bars, (end - start) / FINEST)
        for low, high, color in bars:
            # An edge of its own colour keeps a thin bar in sight.
            thin = high - low < (end - start) / THIN or len(bars) > CROWDED
            looks.setdefault((color, color if thin else "white"), []).append(
                (low, high - low)
            )
        for (color, edge), spans in looks.items():
            axes.broken_barh(
                spans, base, facecolors=color, edgecolors=edge, linewidth=0.5
            )
    axes.set_yticks(range(len(strips)), [strip.name for strip in strips])
    axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK, pad=6)
    axes.xaxis.set_major_formatter(lambda value, _: of_seconds(value))
    axes.annotate(
        title or f"streams, {of_seconds(end - start)}",
        (0, 1),
        (0, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        size=9,
        color=INK,
    )
    legend(figure, marks, left, math.ceil(len(marks) / bands))
    return figure


def merged(
    bars: Sequence[tuple[float, float, str]], gap: float
) -> list[tuple[float, float, str]]:
    """Bars in order, those too short to tell from a neighbour of their colour as one.

    >>> merged([(0, 1, "a"), (1, 1.2, "a"), (2, 3, "b"), (3, 5, "b")], 0.5)
    [(0, 1.2, 'a'), (2, 3, 'b'), (3, 5, 'b')]
    """
    found: list[tuple[float, float, str]] = []
    for start, end, color in bars:
        if found and found[-1][2] == color and start - found[-1][1] <= gap:
            first, last, _ = found[-1]
            if min(last - first, end - start) <= gap:
                found[-1] = (first, end, color)
                continue
        found.append((start, end, color))
    return found

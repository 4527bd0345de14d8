"""Memory over a step as a picture: one colour a kind, stacked, the peak marked."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from fsfunc.memory_kinds import KINDS
from fsfunc.show.amounts import of_bytes
from fsfunc.show.canvases import (
    FAINT,
    INK,
    MARK_BAND,
    canvas,
    check_drawing,
    legend,
    legend_bands,
)
from fsfunc.show.curves import Curve
from fsfunc.show.palette import MEMORY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["drawn"]

WIDTH, HEIGHT = 8.6, 3.6  # inches of the axes
LEFT, RIGHT, TOP, BOTTOM = 0.85, 0.25, 0.7, 0.85
COLUMNS = 1200  # more than there are pixels between two of them
# Of the phases' line under the axis: no kind's colours.
GREYS = {
    "forward": "#d5d9e0",
    "recompute": "#aab1bd",
    "backward": "#737a87",
    "update": "#22262e",
}
STRIP = 0.03  # of the height: the phases' line under the axis


def drawn(curve: Curve, title: str, kinds: list[str]) -> Figure:
    """The picture of a curve.

    Args:
        kinds: those that are ever held, from below.

    Raises:
        ImportError: matplotlib is not there.
    """
    check_drawing("memory chart")
    seen = {turn.phase for turn in curve.turns}
    marks = {kind: MEMORY[kind].color for kind in reversed(kinds)}
    marks |= {f"in the {p}": grey for p, grey in GREYS.items() if p in seen}
    bands = legend_bands(marks, WIDTH)
    below_axes = BOTTOM + MARK_BAND * (bands - 1)
    whole = (LEFT + WIDTH + RIGHT, TOP + HEIGHT + below_axes)
    figure, axes = canvas(whole, (LEFT, below_axes, WIDTH, HEIGHT))
    count = max(min(COLUMNS, curve.length), 1)
    edges = [i * max(curve.length, 1) / count for i in range(count + 1)]
    columns = curve.columns(count)
    columns.append(columns[-1])
    below = [0] * (count + 1)
    for kind in kinds:
        i = KINDS.index(kind)
        above = [b + held[i] for b, held in zip(below, columns, strict=True)]
        axes.fill_between(
            edges, below, above, step="post", color=MEMORY[kind].color, linewidth=0
        )
        below = above
    top, (at, held) = sum(curve.peak[1]), curve.peak
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, 1.04 * top)
    axes.yaxis.set_major_formatter(lambda value, _: of_bytes(value))
    axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.set_xlabel("operators that ran", size=8, color=FAINT)
    axes.axvline(at, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    of_kinds = ", ".join(
        f"{kind} {of_bytes(held[KINDS.index(kind)])}"
        for kind in reversed(kinds)
        if held[KINDS.index(kind)]
    )
    for text, up, size, ink in ((title, 24, 10, INK), (of_kinds, 9, 8, FAINT)):
        axes.annotate(
            text,
            (0, 1),
            (0, up),
            xycoords="axes fraction",
            textcoords="offset points",
            size=size,
            color=ink,
        )
    start = 0
    for phase, group in groupby(curve.phases(count)):
        end = start + len(list(group))
        axes.axvspan(
            edges[start],
            edges[end],
            -STRIP,
            0,
            color=GREYS.get(phase, "white"),
            clip_on=False,
            linewidth=0,
        )
        start = end
    axes.tick_params(axis="x", pad=STRIP * HEIGHT * 72 + 2)
    legend(figure, marks, LEFT, math.ceil(len(marks) / bands))
    return figure

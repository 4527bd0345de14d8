"""What all pictures share: the sheet, its inks, and the legend under it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["canvas", "check_drawing", "is_dark", "legend", "legend_bands"]

DPI = 160
MARK, MARK_LETTER, MARK_BAND = 0.33, 0.063, 0.18  # inches: a legend's square, letter
LEGEND = 0.14  # inches under it
INK, FAINT = "#22262e", "#737a87"


def check_drawing(what: str) -> None:
    """Raises ImportError if matplotlib, which draws the picture, is not there."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"a picture of a {what} needs matplotlib: pip install matplotlib, or "
            f"print the {what}"
        ) from error


def canvas(
    inches: tuple[float, float], place: tuple[float, float, float, float]
) -> tuple[Figure, Axes]:
    """A white sheet and axes on it.

    Args:
        inches: width and height of the sheet.
        place: left, bottom, width and height of the axes, in inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=DPI, facecolor="white")
    left, bottom, width, height = place
    across, up = inches
    axes = figure.add_axes((left / across, bottom / up, width / across, height / up))
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(axis="x", length=3, labelsize=8, color=FAINT, labelcolor=FAINT)
    return figure, axes


def is_dark(color: str) -> bool:
    """Whether white is easier to read on it than black.

    >>> is_dark("#4c7cb8"), is_dark("#edb83d")
    (True, False)
    """
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def legend_bands(marks: Mapping[str, str], width: float) -> int:
    """The lines that a legend takes in so many inches."""
    return math.ceil(sum(MARK + MARK_LETTER * len(title) for title in marks) / width)


def legend(figure: Figure, marks: Mapping[str, str], left: float, columns: int) -> None:
    """Write what the colours mean under the picture."""
    from matplotlib.patches import Patch

    figure.legend(
        handles=[Patch(facecolor=color, label=title) for title, color in marks.items()],
        loc="lower left",
        bbox_to_anchor=(left / figure.get_figwidth(), LEGEND / figure.get_figheight()),
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

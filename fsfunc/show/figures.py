"""Pictures by matplotlib, in one set of colours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple, Self

from fsfunc.planning.simulation import Span
from fsfunc.printing.tables import Printed

COMPUTE = "compute"  # the stream on which a rank computes


@dataclass(frozen=True, eq=False)
class Look:
    """The look of one kind: in words, in print, in a picture and in a trace.

    There is one of each: they are compared, and found in dicts, as objects.
    """

    title: str
    sign: str  # in text: what the action's name begins with, what a gap is filled with
    color: str  # "#rrggbb"
    reserved: str = ""  # the nearest of the names that trace viewers have colours for

    @property
    def style(self) -> str:
        """As rich writes its sign."""
        return "bright_black" if self.sign in "░·" else f"#000000 on {self.color}"


def _by_title(*looks: Look) -> dict[str, Look]:
    return {look.title: look for look in looks}


COMPUTING = _by_title(
    Look("forward", "F", "#4c7cb8", "rail_response"),
    Look("recompute", "R", "#c94f5d", "bad"),
    Look("backward", "B", "#e07b39", "thread_state_iowait"),
    Look("input gradient", "I", "#edb83d", "yellow"),
    Look("weight gradient", "W", "#4fa37b", "thread_state_running"),
    Look("update", "U", "#8b5fa8", "black"),
)
# A rank that waits between two of its actions is not one that has not begun: zero
# bubble schedules end the first and keep the second.
WAITS = Look("waits for another rank", "░", "#c9cdd6")
STALL = Look("waits for a transfer", "░", "#c9cdd6")
OUTSIDE = Look("not begun, or done", "·", "#eff1f4")
GAPS = _by_title(WAITS, STALL, OUTSIDE)
_ON_COMPUTE = COMPUTING | GAPS

SENDING = _by_title(
    Look("all_gather", "g", "#4fa37b", "thread_state_running"),
    Look("psum_scatter", "s", "#edb83d", "yellow"),
    Look("psum", "+", "#b8a13c", "olive"),
    Look("pmax", "^", "#b8a13c", "olive"),
    Look("pmin", "v", "#b8a13c", "olive"),
    Look("all_to_all", "x", "#c26a9a", "terrible"),
    Look("pbroadcast", "b", "#6bb3b8", "good"),
    Look("ppermute", "p", "#ecae85", "rail_animation"),
    Look("message", ">", "#ecae85", "rail_animation"),
)
# Of a pipeline's schedule, by the action's kind.
TRANSFERS = {
    "SF": Look("send activations", "SF", "#8aa9d1", "rail_idle"),
    "RF": Look("receive activations", "RF", "#8aa9d1", "rail_idle"),
    "SB": Look("send gradients", "SB", "#ecae85", "rail_animation"),
    "RB": Look("receive gradients", "RB", "#ecae85", "rail_animation"),
}
# Memory by kind, as it is stacked: what stays lies below what comes and goes.
MEMORY = _by_title(
    Look("parameters", "p", "#4c7cb8"),
    Look("moments", "m", "#8b5fa8"),
    Look("buffers", "b", "#edb83d"),
    Look("gradients", "d", "#e07b39"),
    Look("gathered", "g", "#8aa9d1"),
    Look("activations", "a", "#4fa37b"),
)
OTHER = Look("other", "?", "#a5abb7", "generic_work")
LOOKS = (*COMPUTING.values(), *GAPS.values(), *SENDING.values(), OTHER)
_MESSAGES = {"send", "receive"}


def look_of(span: Span) -> Look:
    """The look of a span: by its phase where it computes, else by what is sent."""
    if span.stream == COMPUTE:
        return _ON_COMPUTE.get(span.phase, OTHER)
    return SENDING.get("message" if span.name in _MESSAGES else span.name, OTHER)


def by_sign(kind: str) -> Look:
    """The look of an action that computes, by its kind: "F"."""
    return next(look for look in COMPUTING.values() if look.sign == kind)


def legend(looks: Sequence[Look], width: int | None) -> Iterator[list[tuple[str, str]]]:
    """Yield what signs mean, line by line: letters, and rich's style for them."""
    line: list[tuple[str, str]] = []
    for look in looks:
        entry = [(f" {look.sign} ", look.style), (f" {look.title}  ", "")]
        long = sum(len(letters) for letters, _ in [*line, *entry]) - 2
        if line and width is not None and long > width:
            yield line
            line = []
        line += entry
    if line:
        yield line


def lighter(color: str, chunk: int, chunks: int) -> str:
    """The colour of a rank's ``chunk``-th stage of ``chunks``: later is lighter.

    >>> lighter("#4c7cb8", 0, 2), lighter("#4c7cb8", 1, 2)
    ('#4c7cb8', '#a2bbda')
    """
    amount = 0.0 if chunks < 2 else min(0.7, 0.24 * chunks) * chunk / (chunks - 1)
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + amount * (255 - p)):02x}" for p in parts)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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

    def saved(self, path: str | PathLike[str] | None) -> Self:
        """Itself, drawn into a file where one is named."""
        if path is not None:
            self.save(path)
        return self


class Bar(NamedTuple):
    """A bar from ``start`` to ``end``; a line where that takes no time."""

    start: float
    end: float
    color: str
    label: str = ""  # written into it where there is room, or its last word


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
            room = (bar.end - bar.start) * inches / LETTER
            label = bar.label if len(bar.label) <= room else bar.label.split(" ")[-1]
            if label and len(label) <= room:
                color = "white" if is_dark(bar.color) else INK
                middle = (bar.start + bar.end) / 2
                axes.text(middle, place, label, size=7, color=color,
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

"""The model of charts: bars, what they look like and what is written into them.

A chart is rows of bars (`Row`, `Bar`) over an axis with marks (`Tick`). ``lanes.py``
shows it as text, ``figures.py`` as a picture of matplotlib's, ``chart_svg.py`` as SVG
and ``pages.py`` as HTML. All of them take the look of a kind (`Look`) from here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsfunc.pipelining.actions import KINDS, ActionKind
from fsfunc.planning.simulation import COMPUTE, Span


@dataclass(frozen=True, eq=False)
class Look:
    """The look of one kind of thing: in words, in print, in a picture and in a trace.

    There is one object for each kind: they are compared, and found in dicts, by
    identity.
    """

    title: str
    sign: str  # a letter in text: the first one of an action's name, or a gap's filling
    color: str  # "#rrggbb"
    reserved: str = ""  # the nearest of the names that trace viewers have colours for

    @property
    def style(self) -> str:
        """The style in which rich writes its sign."""
        return "bright_black" if self.sign in "░▒·" else f"#000000 on {self.color}"


def _by_title(*looks: Look) -> dict[str, Look]:
    return {look.title: look for look in looks}


@functools.cache
def _look(kind: ActionKind) -> Look:
    return Look(kind.title, kind.letter, kind.color, kind.reserved)


def by_sign(letters: str) -> Look:
    """Returns the look of a kind of action in a pipeline's schedule, such as "F"."""
    return _look(KINDS[letters])


_RECOMPUTE = Look("recompute", "R", "#c94f5d", "bad")


def computing() -> dict[str, Look]:
    """Returns the looks of computation, by title: a step's phases, actions' kinds."""
    forward, *others = (_look(kind) for kind in KINDS.values() if not kind.transfer)
    return _by_title(forward, _RECOMPUTE, *others)


# The time before a rank's first action and after its last one has a look of its own:
# zero bubble schedules have such times, but no waits between two actions of a rank.
WAITS = Look("waits for another rank", "░", "#c9cdd6")
STALL = Look("waits for a transfer", "▒", "#f0bcc3")
OUTSIDE = Look("not begun, or done", "·", "#f1f3f6")
GAPS = _by_title(WAITS, STALL, OUTSIDE)

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
_MESSAGES = {"send", "receive"}


def look_of(span: Span) -> Look:
    """Returns the look of a span: by its phase if it computes, else by what is sent."""
    if span.stream == COMPUTE:
        return GAPS.get(span.phase) or computing().get(span.phase, OTHER)
    return SENDING.get("message" if span.name in _MESSAGES else span.name, OTHER)


def palette() -> list[Look]:
    """Returns all looks of spans, in the order of a legend."""
    return [*computing().values(), *GAPS.values(), *SENDING.values(), OTHER]


def legend(looks: Sequence[Look], width: int | None) -> Iterator[list[tuple[str, str]]]:
    """Yields the legend line by line, as (letters, rich's style for them).

    Args:
        width: columns of a line at most; None for one line.
    """
    line: list[tuple[str, str]] = []
    for look in looks:
        entry = [(f" {look.sign} ", look.style), (f" {look.title}  ", "")]
        # Without the two blanks at the end.
        length = sum(len(letters) for letters, _ in [*line, *entry]) - 2
        if line and width is not None and length > width:
            yield line
            line = []
        line += entry
    if line:
        yield line


def lighter(color: str, chunk: int, chunks: int) -> str:
    """Returns the colour of a rank's stage ``chunk`` of ``chunks``: later is lighter.

    >>> lighter("#4c7cb8", 0, 2), lighter("#4c7cb8", 1, 2)
    ('#4c7cb8', '#a2bbda')
    """
    amount = 0.0 if chunks < 2 else min(0.7, 0.24 * chunks) * chunk / (chunks - 1)
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + amount * (255 - p)):02x}" for p in parts)


INK, FAINT = "#22262e", "#737a87"  # of text, and of axes


class Bar(NamedTuple):
    """A bar from ``start`` to ``end``; a line if that takes no time.

    Args:
        labels: texts for it: the first one that has room is written into it.
        words: the text that is shown where one points at it.
        shade: its colour, if that is not the look's.
    """

    start: float
    end: float
    look: Look
    labels: tuple[str, ...] = ()
    words: str = ""
    shade: str = ""

    @property
    def color(self) -> str:
        return self.shade or self.look.color

    @property
    def ink(self) -> str:
        """The colour of its label."""
        return "#ffffff" if is_dark(self.color) else INK


class Row(NamedTuple):
    """A row of bars in the order of painting, its name, and a note right of it.

    ``short``: the name under that of its rank.
    """

    name: str
    bars: Sequence[Bar]
    note: str = ""
    short: str = ""


def is_dark(color: str) -> bool:
    """Returns whether white is easier to read than black on a colour.

    >>> is_dark("#4c7cb8"), is_dark("#edb83d")
    (True, False)
    """
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


class Tick(NamedTuple):
    """A mark of an axis; one of a ``level`` above 0 is shown if the axis is wide."""

    value: float
    text: str
    level: int = 0


def ticks(
    end: float,
    format_value: Callable[[float], str],
    limits: Sequence[int] = (5,),
    start: float = 0,
) -> list[Tick]:
    """Returns marks from ``start`` to ``end`` at round values.

    Args:
        limits: how many there may be of the first level, of the first two, and so on;
            each level's are among the next one's.

    >>> [tick.text for tick in ticks(2.5, lambda value: f"{value:.2f} s")]
    ['0 s', '0.5 s', '1 s', '1.5 s', '2 s', '2.5 s']
    """
    steps: list[float] = []
    for limit in limits:
        least_step = (end - start) / limit
        power = 10.0 ** math.floor(math.log10(least_step))
        round_steps = [
            m * power for m in (1, 2, 5, 10) if m * power >= least_step * 0.999
        ]
        # A finer step must divide the coarser one: 2 is no step below 5.
        ratios = [steps[-1] / s for s in round_steps] if steps else [1.0]
        fits = [s for s, n in zip(round_steps, ratios, strict=False) if _is_whole(n)]
        steps += fits[:1] if steps else round_steps[:1]
    marks: list[Tick] = []
    finest = steps[-1]
    # Values are multiples of the step, not sums: these would gather rounding.
    for i in range(math.ceil(start / finest - 1e-6), int(end / finest + 1e-6) + 1):
        value = i * finest
        level = next(n for n, step in enumerate(steps) if _is_whole(value / step))
        marks.append(Tick(value, _without_zeros(format_value(value)), level))
    return marks


def _is_whole(value: float) -> bool:
    return value > -1e-6 and abs(value - round(value)) < 1e-6 * max(value, 1)


def _without_zeros(text: str) -> str:
    """Returns ``1.5 s`` of ``1.50 s``."""
    number, blank, unit = text.partition(" ")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{number}{blank}{unit}"


def outline(
    below: Sequence[int],
    above: Sequence[int],
    top: float,
    column_width: float = 1.0,
) -> str:
    """Returns the SVG path around an area of columns, 1000 high.

    Args:
        below, above: the sizes at the lower and the upper edge of each column.
        top: the size at the upper edge of the chart.
    """

    def steps(sizes: Sequence[int], columns: Iterable[int]) -> Iterator[str]:
        before: int | None = None
        for column in columns:
            level = round(1000 - 1000 * sizes[column] / top)
            if level != before:
                yield f"V{level}"
            yield f"H{(column + (sizes is above)) * column_width:.6g}"
            before = level

    # To the right along the upper edge, and back along the lower one.
    edges = (
        steps(above, range(len(above))),
        steps(below, reversed(range(len(below)))),
    )
    return f"M0 1000{''.join(_merge_steps(step for edge in edges for step in edge))}Z"


def _merge_steps(steps: Iterable[str]) -> Iterator[str]:
    """Yields the steps of a path, of horizontal ones in a row only the last."""
    pending = ""
    for step in steps:
        if pending and (step[0] != "H" or pending[0] != "H"):
            yield pending
        pending = step
    yield pending

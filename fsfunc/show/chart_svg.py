"""Charts as SVG files, which need no other library.

`Drawing` collects elements from top to bottom. `lanes_svg` draws rows of bars over
time, `areas_svg` stacked areas such as memory. A browser shows the text of a bar that
one points at.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fsfunc.printing.tables import of_bytes, visible
from fsfunc.show.charts import FAINT, INK, Bar, Row, Tick, ticks

LETTER, LINE = 6.8, 17  # pixels of a letter, and from line to line
ROW, BAR = 27, 22  # pixels from row to row, and of a bar
NARROWEST, WIDEST = 900, 1440  # pixels of a chart of lanes
WIDTH = 1060  # pixels of areas, with what stands beside them
_STYLE = (
    "text{font:11px system-ui,'DejaVu Sans',sans-serif;dominant-baseline:central}"
    ".m{text-anchor:middle}.e{text-anchor:end}"
    f"text{{fill:{INK}}}.f{{fill:{FAINT}}}.w{{fill:#fff}}"
)


class Drawing:
    """An SVG as it grows: elements, one a line, and the height that they take.

    Args:
        title: is wrapped to the width.
        beside: pixels at the right that are left free of title and legend.
    """

    width: float
    beside: float
    parts: list[str]
    below: float  # the height so far

    def __init__(self, width: float, title: str, beside: float = 0.0):
        self.width, self.beside, self.parts, self.below = (
            width,
            beside,
            list[str](),
            12.0,
        )
        self.colors: dict[str, str] = {}  # by colour, a class of the style sheet
        letters = int((width - beside - 20) / LETTER)
        for line in title.splitlines():
            for part in textwrap.wrap(line, letters):
                self.text(8, self.below, part)
                self.below += LINE

    def text(self, x: float, y: float, words: str, classes: str = "") -> None:
        style = f' class="{classes}"' if classes else ""
        self.parts.append(
            f'<text x="{x:.6g}" y="{y:.6g}"{style}>{_escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, size: tuple[float, float], color: str, words: str = ""
    ) -> None:
        """Adds a filled rectangle, with words for where one points at it."""
        width, height = size
        name = self.colors.setdefault(color, f"c{len(self.colors)}")
        shape = f'x="{x:.6g}" y="{y:.6g}" width="{width:.4g}" height="{height:.4g}"'
        end = f"><title>{_escape(words)}</title></rect>" if words else "/>"
        self.parts.append(f'<rect class="{name}" {shape}{end}')

    def line(self, x: float, y: float, dx: float, dy: float) -> None:
        self.parts.append(f'<path class="l" d="M{x:.6g} {y:.6g}l{dx:.6g} {dy:.6g}"/>')

    def axis(self, marks: Iterable[Tick], x_of: Callable[[float], float]) -> None:
        """Adds an axis under what has been drawn."""
        for mark in marks:
            self.line(x_of(mark.value), self.below, 0, 4)
            x, end = x_of(mark.value), self.width - 1
            # The text of a mark at the very end would be cut in the middle.
            is_cut = x + LETTER * len(mark.text) / 2 > end
            place = (end, "e f") if is_cut else (x, "m f")
            self.text(place[0], self.below + 12, mark.text, place[1])
        self.below += 32

    def legend(self, colors: Mapping[str, str]) -> None:
        """Adds colours and what they mean, in as many lines as they take."""
        x = 8.0
        for title, color in colors.items():
            length = LETTER * len(title) + 34
            if x > 8 and x + length > self.width - self.beside:
                x, self.below = 8.0, self.below + LINE
            self.box(x, self.below - 5, (11, 11), color)
            self.text(x + 16, self.below + 1, title)
            x += length
        self.below += LINE

    def to_text(self) -> str:
        """Returns the file's text."""
        fills = "".join(f".{name}{{fill:{c}}}" for c, name in self.colors.items())
        lines = f".l{{stroke:{FAINT};stroke-width:.6;fill:none}}"
        size = f'width="{self.width:.0f}" height="{self.below:.0f}"'
        box = f'viewBox="0 0 {self.width:.0f} {self.below:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>'
        paper = '<rect width="100%" height="100%" fill="#fff"/>'
        style = f"<style>{_STYLE}{fills}{lines}</style>"
        return "\n".join([head, style, paper, *self.parts, "</svg>\n"])


def lanes_svg(
    title: str,
    rows: Sequence[Row],
    start: float,
    end: float,
    legend_colors: Mapping[str, str],
    times: Sequence[Tick],
) -> str:
    """Draws rows of bars over time, the first row on top; see ``lane_figure``."""
    longest = max(
        sum(len(bar.labels[0]) + 1 for bar in row.bars if bar.labels) for row in rows
    )
    width = min(max(1.3 * LETTER * longest, NARROWEST), WIDEST)
    left = LETTER * max(len(row.name) for row in rows) + 18
    note = max(len(row.note) for row in rows)
    scale = (width - left - (LETTER * note + 16 if note else 14)) / (end - start)
    drawing = Drawing(width, title)
    drawing.below += 4

    def x_of(time: float) -> float:
        return left + (time - start) * scale

    for row in rows:
        middle = drawing.below + BAR / 2
        drawing.text(left - 8, middle, row.name, "e")
        for bar in row.bars:
            _draw_bar(drawing, bar, x_of(bar.start), x_of(bar.end))
        if row.note:
            drawing.text(x_of(end) + 8, middle, row.note)
        drawing.below += ROW
    drawing.axis(times, x_of)
    drawing.legend(legend_colors)
    return drawing.to_text()


def _draw_bar(drawing: Drawing, bar: Bar, left: float, right: float) -> None:
    gap = 0.7 if right - left > 4 else 0.0  # white between neighbours
    size = max(right - left - gap, 0.8), BAR
    drawing.box(left, drawing.below, size, bar.color, bar.words)
    room = (right - left - 6) / LETTER
    label = next((x for x in bar.labels if len(x) <= room), "")
    if label:
        ink = "m" if bar.ink == INK else "m w"
        drawing.text((left + right) / 2, drawing.below + BAR / 2, label, ink)


@dataclass(frozen=True)
class StackedAreas:
    """Areas over an axis, one on the other, and what there is at the peak.

    Args:
        areas: (colour, path in a box of 1000 by 1000) of each.
        top: bytes at the upper edge.
        axis: the marks of the axis.
        length: of the axis, in its own unit.
        phases: (colour, first, last) of stretches along the axis.
        peak: a position on the axis.
        legend_colors: colours by what they mean.
        parts_title: the title of the list beside the areas.
        parts: (colour, words) of each part of the peak.
    """

    title: str
    areas: Sequence[tuple[str, str]]
    top: float
    axis: Sequence[Tick]
    length: float
    phases: Iterable[tuple[str, float, float]]
    peak: float
    legend_colors: Mapping[str, str]
    parts_title: str
    parts: Sequence[tuple[str, str]]


def areas_svg(chart: StackedAreas) -> str:
    """Draws stacked areas, and beside them a list of what there is at the peak."""
    top, length = chart.top, chart.length or 1.0
    beside = LETTER * max(len(words) for _, words in chart.parts) + 40
    drawing = Drawing(WIDTH, chart.title, beside)
    left, height = 66.0, 240.0
    width = WIDTH - beside - left - 20
    upper = drawing.below + 6
    lower = upper + height
    for mark in ticks(top, of_bytes, (6,)):
        y = lower - height * mark.value / top
        drawing.text(left - 8, y, mark.text, "e f")
        drawing.line(left, y, width, 0)
    scale = f"{width / 1000:.5g} {height / 1000:.5g}"
    transform = f"translate({left} {upper:.6g}) scale({scale})"
    drawing.parts.append(f'<g transform="{transform}">')
    drawing.parts += [
        f'<path fill="{color}" d="{path}"/>' for color, path in chart.areas
    ]
    drawing.parts.append("</g>")

    def x_of(position: float) -> float:
        return left + width * position / length

    # A triangle that points down at the peak.
    drawing.parts.append(
        f'<path d="M{x_of(chart.peak):.6g} {upper}l-4 -7h8z" fill="{INK}"/>'
    )
    for color, first, last in chart.phases:
        size = max(x_of(last) - x_of(first), 0.5), 7
        drawing.box(x_of(first), lower, size, color)
    drawing.below = lower + 8
    drawing.axis(chart.axis, x_of)
    drawing.legend(chart.legend_colors)
    y = upper
    x = WIDTH - beside + 8
    drawing.text(x, y, chart.parts_title)
    for color, words in chart.parts:
        y += LINE
        if color:
            drawing.box(x, y - 5, (11, 11), color)
        drawing.text(x + 16, y, words)
    return drawing.to_text()


def _escape(words: str) -> str:
    return escape(visible(words), quote=False)

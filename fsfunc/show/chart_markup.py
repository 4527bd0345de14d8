"""Charts as HTML: rows of bars and stacked areas over an axis of time.

All places are shares of the chart's width, so that it fits any page and can be widened.
A label is shown where its bar has room for it, by rules of the page's style that ask
for the bar's width: nothing runs in the browser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from html import escape

from fsfunc.printing.tables import of_bytes, visible
from fsfunc.runtime.memory import KINDS
from fsfunc.show.charts import Bar, Look, Row, Tick, outline, ticks
from fsfunc.show.memory_plot import MemoryChart

WIDEST = 60  # times the page's width: how far a chart can be widened
COLUMNS = 600  # of the memory, one to hover over each
_LETTER, _PADDING, _PAGE = 6.7, 6, 1500  # pixels of a label, of a wide page
_TICKS = {0: 5, 800: 12, 2400: 36, 8000: 120}  # how many on an axis so many pixels wide
STYLE = """
.time { min-width: 100% }
.row { display: grid; grid-template-columns: 76px 1fr; padding-right: 54px;
  align-items: stretch }
.key { position: sticky; left: 0; z-index: 2; background: #fff; color: #737a87;
  font-size: 11px; line-height: 22px; padding-right: 6px; text-align: right;
  overflow-wrap: anywhere }
.lane { position: relative; height: 22px; overflow: hidden; margin: 1px 0;
  background: linear-gradient(90deg, #22262e1c 1px, #0000 1px) 0 0 / var(--grid) }
.lane i { position: absolute; top: 0; bottom: 0; min-width: 1px; overflow: hidden;
  font: 11px/22px system-ui, sans-serif; text-align: center; white-space: nowrap;
  box-shadow: inset 1px 0 #fff9; container-type: inline-size }
.lane i span, .axis span { display: none }
.lane i:hover { filter: brightness(.85) }
.plain i { box-shadow: none }
.axis { position: relative; height: 20px; container-type: inline-size; margin: 0 0 8px;
  border-top: 1px solid #b9bec8 }
.axis span { position: absolute; white-space: nowrap; padding-left: 3px; color: #737a87;
  font: 11px/18px system-ui, sans-serif; border-left: 1px solid #b9bec8 }
.area { position: relative; height: 170px; margin-top: 10px;
  background: linear-gradient(90deg, #22262e1c 1px, #0000 1px) 0 0 / var(--grid) }
.area svg { display: block; width: 100%; height: 100% }
.area u { position: absolute; left: 0; right: 0; border-top: 1px solid #22262e26 }
.area rect:hover { fill: #22262e; fill-opacity: .25 }
.sizes { position: sticky; left: 0; z-index: 2; background: #fff; margin-top: 10px }
.sizes span { position: absolute; right: 6px; transform: translateY(50%);
  white-space: nowrap; font: 11px/1 system-ui, sans-serif; color: #737a87 }
.sizes span:first-child { transform: none }
.marks span { white-space: nowrap; margin-right: 1.1em }
.marks i { display: inline-block; width: .9em; height: .9em; margin-right: .35em;
  vertical-align: -.1em }
"""


class Sheet:
    """A chart's time axis, and the style of what has been drawn over it so far."""

    def __init__(self, start: float, end: float, say: Callable[[float], str]):
        self.start, self.end = start, end
        self.looks: dict[tuple[str, str], str] = {}  # (colour, ink) -> class
        self.rooms: set[tuple[int, int]] = set()
        self.ticks: list[Tick] = []
        if end > start:
            self.ticks = ticks(end, say, tuple(_TICKS.values()), start)

    def style(self) -> str:
        """The rules that the page needs for what was drawn."""
        first = [tick.value for tick in self.ticks if not tick.level][:2]
        grid = self._share(first[1] - first[0]) if len(first) > 1 else 100.0
        rules = [STYLE, f":root {{ --grid: {grid:.4f}% 100% }}"]
        for (color, ink), name in self.looks.items():
            rules.append(f".{name} {{ background: {color}; color: {ink} }}")
        for low, high in sorted(self.rooms):
            least = f"(min-width: {_pixels(low)}px)"
            most = f" and (max-width: {_pixels(high) - 0.01:.2f}px)" if high else ""
            rule = f".lane .w{low}-{high} {{ display: inline }}"
            rules.append(f"@container {least}{most} {{ {rule} }}")
        for level, width in enumerate(_TICKS):
            rule = f".axis .t{level} {{ display: inline }}"
            rules.append(f"@container (min-width: {width}px) {{ {rule} }}")
        return "\n".join(rules)

    def _share(self, time: float) -> float:
        """A length of time, in per cent of the width."""
        return 100 * time / (self.end - self.start)

    def row(self, row: Row) -> Iterator[str]:
        """Yield a row of bars, its name left of it."""
        plain = "" if len(row.bars) < _PAGE / 4 else " plain"
        yield f'<div class="row"><div class="key">{text(row.short)}</div>'
        yield f'<div class="lane{plain}">'
        yield from map(self._bar, row.bars)
        yield "</div></div>"

    def _bar(self, bar: Bar) -> str:
        left, width = self._share(bar.start - self.start), bar.end - bar.start
        look = self.looks.setdefault((bar.color, bar.ink), f"c{len(self.looks)}")
        where = f"left:{left:.3f}%;width:{self._share(width):.3f}%"
        most = WIDEST * _PAGE * self._share(width) / 100
        said, longer = [], 0
        for label in bar.labels:
            room = len(label)
            if label and _pixels(room) <= most:
                self.rooms.add((room, longer))
                said.append(f'<span class="w{room}-{longer}">{text(label)}</span>')
                longer = room
        about = f'class="{look}" style="{where}" title="{text(bar.words)}"'
        return f"<i {about}>{''.join(said)}</i>"

    def axis(self) -> Iterator[str]:
        """Yield the marks of time."""
        yield '<div class="row"><div class="key"></div><div class="axis">'
        for tick in self.ticks:
            left = self._share(tick.value - self.start)
            how = f'class="t{tick.level}" style="left:{left:.3f}%"'
            yield f"<span {how}>{text(tick.text)}</span>"
        yield "</div></div>"

    def memory(self, chart: MemoryChart, top: int) -> Iterator[str]:
        """Yield a rank's memory as stacked areas, with what each moment holds.

        Args:
            top: bytes at the upper edge, one for all charts of a page.
        """
        curve = chart.curve
        columns = curve.columns(COLUMNS)
        sizes = [tick for tick in ticks(top, of_bytes, (4,)) if tick.value <= top]
        yield '<div class="row"><div class="sizes">'
        places = [f'style="bottom:{100 * tick.value / top:.2f}%"' for tick in sizes]
        for tick, place in zip(sizes, places, strict=True):
            yield f"<span {place}>{tick.text}</span>"
        yield '</div><div class="area">'
        yield from (f"<u {place}></u>" for place in places[1:])
        yield f'<svg viewBox="0 0 {COLUMNS} 1000" preserveAspectRatio="none">'
        for look, below, above in chart.areas(columns):
            yield f'<path fill="{look.color}" d="{outline(below, above, top)}"/>'
        start = 0
        for x, held in enumerate(columns):
            if x + 1 < COLUMNS and columns[x + 1] == held:
                continue
            each = (
                f"{look.title} {of_bytes(held[KINDS.index(look.title)])}"
                for look, *_ in chart.areas([held])
            )
            when = chart.moment(start * curve.length / COLUMNS)
            words = text(f"{when}: {of_bytes(sum(held))}: {', '.join(each)}")
            shape = f'x="{start}" width="{x + 1 - start}" height="1000"'
            yield f'<rect {shape} fill-opacity="0"><title>{words}</title></rect>'
            start = x + 1
        yield "</svg></div></div>"


def text(words: str) -> str:
    """Words as HTML, with escapes for letters that would not be seen."""
    return escape(visible(words))


def marks(looks: Iterable[Look]) -> str:
    """The legend of looks."""
    said = (
        f'<span><i style="background:{look.color}"></i>{text(look.title)}</span> '
        for look in looks
    )
    return f'<p class="marks">{"".join(said)}</p>'


def _pixels(letters: int) -> float:
    """The width of a label."""
    return round(_LETTER * letters + _PADDING, 2)

"""A chart in letters: one row a rank, one cell a time unit, in bands that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from fsfunc.show.lanes import Bar, Chart, Gap, Lane
from fsfunc.show.palette import BORDER, COMPUTE, GAPS

__all__ = ["Run", "lines"]

Run = tuple[str, str]  # letters, and the kind that colours them ("" for none)

_EDGE, _CUT = "│", "┆"  # where something begins or ends; where a band ends amid it
_MOST_COLUMNS = 5_000  # in all: beyond, labels are left out
_TICK = 8  # columns from one time on the ruler to the next, at least


@dataclass(frozen=True)
class Grid:
    """Columns for times: ``rate`` columns a time unit, bands cut at ``pitch``."""

    rate: float
    pitch: int

    def column(self, time: float) -> int:
        return round(time * self.rate)


def grid_of(chart: Chart) -> Grid:
    """The grid whose cells are the largest unit that divides every time.

    A cell is as wide as the labels ask. Times without such a unit (those of a real
    run) are rounded to columns, as many as most labels ask.
    """
    bars = [b for lane in chart.lanes for b in lane.bars if b.end > b.start]
    unit = common_unit(bars)
    if unit is not None:
        pitch = max(
            math.ceil((len(b.label) + 1) / round((b.end - b.start) / unit))
            for b in bars
        )
        pitch = max(pitch, 2)  # an edge, and something to see beside it
        if chart.makespan / unit * pitch <= _MOST_COLUMNS:
            return Grid(float(pitch / unit), pitch)
    rates = sorted((len(b.label) + 1) / (b.end - b.start) for b in bars)
    rate = rates[9 * (len(rates) - 1) // 10]  # 90 % of the labels fit
    return Grid(min(rate, _MOST_COLUMNS / chart.makespan), 1)


def common_unit(bars: list[Bar]) -> Fraction | None:
    """The largest unit of which all times are multiples; None if none is sensible."""
    times = [Fraction(time) for bar in bars for time in (bar.start, bar.end)]
    shortest = min(Fraction(bar.end) - Fraction(bar.start) for bar in bars)
    scaled = [time / shortest for time in times]
    exact = [time.limit_denominator(100) for time in scaled]
    noise = max(scaled) / 10**9
    if any(abs(e - t) > noise for e, t in zip(exact, scaled, strict=True)):
        return None
    below = math.lcm(*(time.denominator for time in exact))
    unit = Fraction(math.gcd(*(int(time * below) for time in exact)), below)
    return unit * shortest


def letters(lane: Lane, grid: Grid, columns: int) -> tuple[str, list[str]]:
    """A rank's whole row, and for each of its letters the kind that colours it."""
    text, kinds, marks = [" "] * columns, [""] * columns, []
    text.append(_EDGE)
    kinds.append(BORDER)
    for piece in sorted((*lane.gaps, *lane.bars), key=lambda piece: piece.start):
        first, last = grid.column(piece.start), grid.column(piece.end)
        room = last - first - 1
        if room < 0:  # too short for a column
            if isinstance(piece, Bar) and piece.kind == "U":
                marks.append(first)
            continue
        text[first:last] = [_EDGE, *body(piece, room)]
        kinds[first:last] = [BORDER, *[piece.kind] * room]
    for column in marks:  # what takes no time stands where others meet
        text[column] = COMPUTE["U"].sign
    return "".join(text), kinds


def body(piece: Bar | Gap, room: int) -> str:
    """What fills ``room`` columns of a bar or a gap."""
    if isinstance(piece, Gap):
        return GAPS[piece.kind].sign * room
    label = piece.label if len(piece.label) <= room else piece.kind
    return label[:room].ljust(room)


def lines(chart: Chart, width: int | None) -> Iterator[list[Run]]:
    """Yield the chart line by line: bands of rows under a ruler, then the legend.

    Args:
        width: columns of a line at most; a chart that is longer goes on below. None
            for one band however long.
    """
    if not any(bar.end > bar.start for lane in chart.lanes for bar in lane.bars):
        raise ValueError("every action takes no time: give costs above 0")
    grid = grid_of(chart)
    columns = grid.column(chart.makespan)
    rows = [letters(lane, grid, columns) for lane in chart.lanes]
    margin = len(f"rank {len(rows) - 1} ")
    space = columns if width is None else max(width - margin - 1, 2 * grid.pitch)
    space = space // grid.pitch * grid.pitch
    for first in range(0, columns, space):
        last = min(first + space, columns)
        yield [(" " * margin + ruler(grid, first, last, chart.makespan), "")]
        for rank, (text, kinds) in enumerate(rows):
            end = text[last] if kinds[last] == BORDER else _CUT
            yield [
                (f"rank {rank}".ljust(margin), ""),
                *runs(text[first:last], kinds[first:last]),
                (end, BORDER),
            ]
        yield []
    yield from legend(chart, width)


def runs(text: str, kinds: list[str]) -> Iterator[Run]:
    """Yield the longest pieces of one kind each."""
    first = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or kinds[i] != kinds[first]:
            yield text[first:i], kinds[first]
            first = i


def ruler(grid: Grid, first: int, last: int, makespan: float) -> str:
    """The times above the columns ``first`` to ``last``."""
    least = max(_TICK, len(number(makespan)) + 2) / grid.rate
    power = 10.0 ** math.floor(math.log10(least))
    steps = (m * power for m in (1, 2, 2.5, 5, 10))
    step = next(step for step in steps if step >= least * (1 - 1e-9))
    line = ""
    for tick in range(int(last / grid.rate / step) + 2):
        column = grid.column(tick * step)
        time = f"{tick * step:.4g}"
        if first <= column and column + len(time) <= last + 1:
            line = line.ljust(column - first) + time
    return line


def legend(chart: Chart, width: int | None) -> Iterator[list[Run]]:
    """Yield what the letters mean, then each rank's times and what it holds."""
    seen = {piece.kind for lane in chart.lanes for piece in (*lane.bars, *lane.gaps)}
    for looks in (COMPUTE, GAPS):
        line: list[Run] = []
        for kind, look in looks.items():
            if kind not in seen:
                continue
            entry = [(f" {look.sign} ", kind), (f" {look.title}", "")]
            long = sum(len(run) for run, _ in [*line, ("  ", ""), *entry])
            if line and width is not None and long > width:
                yield line
                line = []
            line += [("  ", ""), *entry] if line else entry
        if line:
            yield line
    yield []
    yield [(f"makespan {number(chart.makespan)}", "")]
    table = [("", "busy", "bubble", "", "held")]
    for rank, lane in enumerate(chart.lanes):
        share = f"{float(100 * lane.bubble / chart.makespan):.0f} %"
        table.append(
            (f"rank {rank}", number(lane.busy), number(lane.bubble), share)
            + (number(lane.held),)
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        yield [("  ".join(cells), "")]


def number(value: float) -> str:
    """At most four digits: ``1.5``, ``0.0123``, ``33``."""
    return f"{float(value):.4g}"

"""Ranks' actions as text: one row a rank, one cell a time unit, in bands that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fsfunc.planning.simulation import Span
from fsfunc.show.lanes import Lane
from fsfunc.show.palette import GAPS, look_of

__all__ = ["bands", "number"]

Cell = tuple[str, str]  # a letter, and rich's style for it

_EDGE, _CUT = "│", "┆"  # where something begins or ends; where a band ends amid it
_BORDER = "bright_black"
_MOST_COLUMNS = 5_000  # in all: beyond, labels are left out
_TICK = 8  # columns from one time on the ruler to the next, at least


def bands(
    lanes: Sequence[Lane], makespan: float, width: int | None
) -> Iterator[list[Cell]]:
    """Yield the lines of the lanes' rows, in bands under a ruler.

    Args:
        width: columns of a line at most; what is longer goes on below. None for one
            band however long.
    """
    spans = [s for lane in lanes for s in lane.spans if s.phase not in GAPS]
    grid = columns_of(spans, makespan)
    columns = grid.column(makespan)
    rows = [cells(lane, grid, columns) for lane in lanes]
    margin = len(f"rank {len(rows) - 1} ")
    space = columns if width is None else max(width - margin - 1, 2 * grid.pitch)
    space = space // grid.pitch * grid.pitch
    for first in range(0, columns, space):
        last = min(first + space, columns)
        yield [(" " * margin + ruler(grid, first, last, makespan), "")]
        for rank, row in enumerate(rows):
            whole = last == columns or row[last][0] == _EDGE
            end = row[last] if whole else (_CUT, _BORDER)
            yield [(f"rank {rank}".ljust(margin), ""), *row[first:last], end]
        yield []


@dataclass(frozen=True)
class Columns:
    """Columns for times: ``rate`` columns a time unit, bands cut at ``pitch``."""

    rate: float
    pitch: int

    def column(self, time: float) -> int:
        return round(time * self.rate)


def columns_of(spans: Sequence[Span], makespan: float) -> Columns:
    """The grid whose cells are the largest unit that divides every time.

    A cell is as wide as the labels ask. Times without such a unit (those of a real
    run) are rounded to columns, as many as most labels ask.
    """
    spans = [span for span in spans if span.end > span.start]
    unit = common_unit(spans)
    if unit is not None:
        pitch = max(
            math.ceil((len(s.name) + 1) / round((s.end - s.start) / unit))
            for s in spans
        )
        pitch = max(pitch, 2)  # an edge and a cell
        if makespan / unit * pitch <= _MOST_COLUMNS:
            return Columns(float(pitch / unit), pitch)
    rates = sorted((len(s.name) + 1) / (s.end - s.start) for s in spans)
    rate = rates[9 * (len(rates) - 1) // 10]  # 90 % of the labels fit
    return Columns(min(rate, _MOST_COLUMNS / makespan), 1)


def common_unit(spans: Sequence[Span]) -> Fraction | None:
    """The largest unit of which all times are multiples; None if none is sensible."""
    times = [Fraction(time) for span in spans for time in (span.start, span.end)]
    shortest = min(Fraction(span.end) - Fraction(span.start) for span in spans)
    scaled = [time / shortest for time in times]
    exact = [time.limit_denominator(100) for time in scaled]
    noise = max(scaled) / 10**9
    if any(abs(e - t) > noise for e, t in zip(exact, scaled, strict=True)):
        return None
    below = math.lcm(*(time.denominator for time in exact))
    unit = Fraction(math.gcd(*(int(time * below) for time in exact)), below)
    return unit * shortest


def cells(lane: Lane, grid: Columns, columns: int) -> list[Cell]:
    """A rank's whole row."""
    row: list[Cell] = [(" ", "")] * columns + [(_EDGE, _BORDER)]
    marks = []
    for span in lane.spans:
        first, last = grid.column(span.start), grid.column(span.end)
        room, look = last - first - 1, look_of(span)
        if room >= 0:
            text = span.name if len(span.name) <= room else look.sign
            text = look.sign * room if look.title in GAPS else text[:room].ljust(room)
            row[first:last] = [(_EDGE, _BORDER), *((c, look.style) for c in text)]
        elif look.title == "update":  # it may take no time
            marks.append((first, (look.sign, look.style)))
    for column, mark in marks:  # where others meet
        row[column] = mark
    return row


def ruler(grid: Columns, first: int, last: int, makespan: float) -> str:
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


def number(value: float) -> str:
    """At most four digits: ``1.5``, ``0.0123``, ``33``."""
    return f"{float(value):.4g}"

"""The model of charts over time, lanes of spans; and such a chart as text.

`LaneChart` is the base of ``timeline`` and ``streams``. A `Lane` is what one stream of
a rank does. A picture draws it as a row of bars (`LaneChart.row`), and above that a row
of the rank's actions (`action_rows`); text prints it in bands of columns (`bands`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from fsfunc.pipelining.actions import KINDS, Action
from fsfunc.pipelining.timing import TimedAction
from fsfunc.planning.simulation import Span
from fsfunc.printing.folding import group_alike, name_group
from fsfunc.printing.tables import of_bytes, of_seconds, picture_line
from fsfunc.show.chart_svg import lanes_svg
from fsfunc.show.charts import (
    COMPUTE,
    GAPS,
    OUTSIDE,
    SENDING,
    STALL,
    Bar,
    Look,
    Row,
    Tick,
    by_sign,
    computing,
    legend,
    look_of,
    palette,
    ticks,
)
from fsfunc.show.figures import Drawn, lane_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text

    from fsfunc.planning.estimation import Estimate

MAX_TICKS = 10  # marks of time under a picture
NOISE = 1e-9  # of the whole: sums of floats that should be equal


@dataclass(frozen=True)
class Lane:
    """One stream of one rank, and what it does from the left edge to the right.

    Args:
        alike: how many ranks do the same, this one included.
    """

    rank: int
    stream: str
    spans: tuple[Span, ...]
    alike: int = 1

    @property
    def ranks(self) -> str:
        """``rank 0 ×8``: the rank, and how many do the same."""
        return f"rank {self.rank}" + (f" ×{self.alike}" if self.alike > 1 else "")

    @property
    def name(self) -> str:
        return f"{self.ranks} {self.stream}"

    @property
    def work(self) -> list[Span]:
        """The spans that are no gaps."""
        return [span for span in self.spans if span.phase not in GAPS]

    @property
    def busy(self) -> float:
        return sum(span.end - span.start for span in self.work)

    @property
    def idle(self) -> float:
        return sum(s.end - s.start for s in self.spans) - self.busy

    def columns(self, start: float, end: float, count: int) -> list[Look | None]:
        """Returns the look of what takes most of each of ``count`` equal parts.

        None where there is nothing. Of a stream of transfers, whose gaps are no spans,
        a part in which anything is sent shows what.
        """
        width = (end - start) / count
        # What takes most of a column is shown: what comes first could be a sliver.
        seconds: list[dict[Look, float]] = [{} for _ in range(count)]
        for span in self.spans:
            look = look_of(span)
            first = min(int((span.start - start) / width), count - 1)
            last = min(max(math.ceil((span.end - start) / width), first + 1), count)
            for i in range(first, last):
                low, high = start + i * width, start + (i + 1) * width
                overlap = max(min(span.end, high) - max(span.start, low), 0.0)
                seconds[i][look] = seconds[i].get(look, 0.0) + overlap
        return [max(s, key=s.__getitem__) if s else None for s in seconds]

    def with_gaps(self, start: float, end: float, wait: Look) -> Lane:
        """Returns the lane with its gaps from ``start`` to ``end`` as spans.

        Args:
            wait: the look of gaps between two spans.
        """
        phases = [wait.title] * (len(self.spans) + 1)
        phases[0] = phases[-1] = OUTSIDE.title
        starts = [start, *(span.end for span in self.spans)]
        ends = [*(span.start for span in self.spans), end]
        gaps = [
            Span(self.rank, self.stream, "", "", phase, a, b)
            for phase, a, b in zip(phases, starts, ends, strict=True)
            if b - a > NOISE * (end - start)
        ]
        spans = sorted((*gaps, *self.spans), key=lambda span: span.start)
        return replace(self, spans=tuple(spans))


class LaneChart(Drawn):
    """Lanes from ``start`` to ``end``, in the looks of the palette."""

    lanes: tuple[Lane, ...]
    start: float
    end: float

    def looks(self) -> list[Look]:
        """Returns the looks that are in the chart, in the palette's order."""
        used = {look_of(span) for lane in self.lanes for span in lane.spans}
        return [look for look in palette() if look in used]

    def legends(self, width: int | None) -> Iterator[Text]:
        """Yields legends: of what is computed, of gaps, of what is sent."""
        used = self.looks()
        sent = [look for look in used if look.title in SENDING]
        gaps = [look for look in used if look.title in GAPS]
        computed = [look for look in used if look not in (*sent, *gaps)]
        for looks in (computed, gaps, sent):
            yield from map(picture_line, legend(looks, width))

    def row(self, lane: Lane) -> Row:
        """Returns a lane as the row that pictures have."""
        bars = [bar_of(span) for span in lane.spans]
        return Row(lane.name, bars, short=lane.stream)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows from top to bottom."""
        ranks = dict.fromkeys(lane.rank for lane in self.lanes)
        return [row for rank in ranks for row in self.rows_of(rank)]

    def rows_of(self, rank: int) -> list[Row]:
        """Returns the rows of a rank; over a lane that computes, its actions."""
        lanes = [lane for lane in self.lanes if lane.rank == rank]
        return [row for lane in lanes for row in (*action_rows(lane), self.row(lane))]

    def format_time(self, time: float) -> str:
        """Writes a time of the axis."""
        return of_seconds(time)

    def times(self) -> list[Tick]:
        """Returns the marks of time under its pictures."""
        return ticks(self.end, self.format_time, (MAX_TICKS,), self.start)

    @property
    def caption(self) -> str:
        """The title of its pictures."""
        raise NotImplementedError

    def legend_colors(self) -> dict[str, str]:
        """Returns the legend of its pictures: colours by title."""
        return {look.title: look.color for look in self.looks()}

    def figure(self) -> Figure:
        content = self.caption, self.rows, self.start, self.end, self.legend_colors()
        return lane_figure(*content, self.times())

    def svg(self) -> str:
        content = self.caption, self.rows, self.start, self.end, self.legend_colors()
        return lanes_svg(*content, self.times())


def name_of(span: Span) -> str:
    """Returns the name of a span: its collective, its unit, its microbatch."""
    name = span.name if span.stream == COMPUTE else f"{span.name} {span.unit}".rstrip()
    return f"{name} {span.turn}".rstrip()


def bar_of(span: Span) -> Bar:
    """Returns the bar of a span."""
    look = look_of(span)
    times = _times(span.start, span.end)
    if look.title in GAPS:
        # A gap has the name of the transfer that it waits for.
        title = ": ".join(
            filter(None, (look.title, f"{span.name} {span.unit}".strip()))
        )
        return Bar(span.start, span.end, look, (), f"{title}: {times}")
    name = name_of(span)
    title = ", ".join(filter(None, (name, span.phase)))
    sent = f", {of_bytes(span.bytes)}" if span.bytes else ""
    words = f"{title}: {times}{sent}"
    return Bar(span.start, span.end, look, _labels(span, name), words)


def _labels(span: Span, name: str) -> tuple[str, ...]:
    """Returns what may be written into a span's bar, the longest first.

    That is its whole name; its name without the microbatch; its unit, whole and the end
    of its path; its microbatch.
    """
    tail = ".".join(span.unit.split(".")[-2:])
    shorter = name.removesuffix(span.turn).rstrip(), span.unit, tail, span.turn
    labels = dict.fromkeys(filter(None, (name, *shorter)))
    return tuple(sorted(labels, key=len, reverse=True))


def _times(start: float, end: float) -> str:
    return f"{of_seconds(start)} to {of_seconds(end)}, {of_seconds(end - start)}"


_MIN_SPANS = 3  # spans that are worth a row of their own


def action_rows(lane: Lane) -> list[Row]:
    """Returns a row of what a rank is at: microbatches (``F3``), or phases with layers.

    No row if that would say no more than the lane itself.
    """
    groups: list[tuple[tuple[str, str], list[Span]]] = []
    # Whether a gap parts the next span from the last one. A wait for a transfer is
    # within an action: it parts none.
    is_apart = True
    for span in lane.spans if lane.stream == COMPUTE else ():
        if span.phase in GAPS:
            is_apart = is_apart or span.phase != STALL.title
            continue
        is_scheduled = span.turn[:1] in KINDS
        key = (span.turn, "" if is_scheduled else _phase_group(span.phase))
        if not groups or groups[-1][0] != key or is_apart and not is_scheduled:
            groups.append((key, []))
        groups[-1][1].append(span)
        is_apart = False
    if max((len(group) for _, group in groups), default=0) < _MIN_SPANS:
        return []
    bars = [_action_bar(*key, group) for key, group in groups]
    has_microbatches = any(turn for (turn, _), _ in groups)
    return [Row(lane.ranks, bars, short="action" if has_microbatches else "phase")]


# Recompute and backward alternate, layer by layer: both are one phase.
_BACKWARD = {"recompute"} | {k.title for k in KINDS.values() if set(k.parts) - {"F"}}


def _phase_group(phase: str) -> str:
    return "backward" if phase in _BACKWARD else phase


def _action_bar(turn: str, phase: str, spans: Sequence[Span]) -> Bar:
    look = computing().get(phase) or (
        by_sign(turn[0]) if turn[:1] in KINDS else look_of(spans[0])
    )
    units = [(unit, 0, unit) for unit in dict.fromkeys(s.unit for s in spans) if unit]
    layers = ", ".join(name_group(names) for names, _ in group_alike(units))
    start, end = spans[0].start, spans[-1].end
    short = f"{turn} {phase}".strip()
    words = f"{short or look.title}: {layers}" if layers else short
    labels = (f"{short} {layers}", short) if layers and phase else (short,)
    if phase and turn:
        labels += (turn,)
    return Bar(start, end, look, labels, f"{words}: {_times(start, end)}")


def check_events(events: Iterable[Any]) -> list[TimedAction]:
    """Returns the events as a list, if each is ``(rank, action, start, end)``.

    Raises:
        TypeError: an event that is no such tuple; says which.
        ValueError: no events, or an end before its start; says which.
    """
    checked: list[TimedAction] = []
    for i, event in enumerate(events):
        match event:
            case int() as rank, Action() as action, start, end if rank >= 0:
                _check_times(f"event {i}, {action} of rank {rank}", start, end)
                checked.append(TimedAction(rank, action, start, end))
            case _:
                raise TypeError(
                    f"event {i} is {event!r}: give (rank, action, start, end), as "
                    "a recorded run or simulate(schedule) has them; ranks are 0, 1, "
                    "..., and parse() makes actions of text"
                )
    if not checked:
        raise ValueError("there are no events to show: was the run recorded?")
    return checked


def check_spans(estimate: Estimate | Iterable[Span]) -> list[Span]:
    """Returns the spans of an estimate, or those given, by rank and start.

    Raises:
        TypeError: what is no span; says which.
        ValueError: no spans, or one that ends before it starts.
    """
    iterable: Any = getattr(estimate, "spans", estimate)
    spans: list[Span] = list(iterable)
    for i, span in enumerate(spans):
        if not isinstance(span, Span):
            raise TypeError(
                f"span {i} is {span!r}: give an estimate, as ff.estimate(plan, "
                "hardware) makes it, or its spans"
            )
        _check_times(f"span {i}, {span.name} of {span.rank}", span.start, span.end)
    if not spans:
        raise ValueError("there are no spans to show: the plan has no events")
    return sorted(spans, key=lambda span: (span.rank, span.start, span.end))


def _check_times(subject: str, start: float, end: float) -> None:
    if not (math.isfinite(start) and math.isfinite(end) and start <= end):
        raise ValueError(f"{subject}: it cannot last from {start} to {end}")


Cell: TypeAlias = tuple[str, str]  # a letter, and rich's style for it

_EDGE, _CUT = "│", "┆"  # where something begins or ends; where a band ends amid it
_BORDER = "bright_black"
_MAX_COLUMNS = 5_000  # of a chart: with more, labels are left out
_TICK_WIDTH = 8  # columns from one time on the ruler to the next, at least


def bands(
    lanes: Sequence[Lane], names: Sequence[str], makespan: float, width: int | None
) -> Iterator[list[Cell]]:
    """Yields the lines of the lanes' rows, in bands under a ruler.

    Args:
        names: the lanes' names.
        makespan: the time at the right edge.
        width: columns of a line at most; longer ones are wrapped. None for one band of
            any length.
    """
    spans = [s for lane in lanes for s in lane.spans if s.phase not in GAPS]
    grid = choose_columns(spans, makespan)
    columns = grid.column(makespan)
    rows = [cells(lane, grid, columns) for lane in lanes]
    margin = max(map(len, names)) + 1
    space = columns if width is None else max(width - margin - 1, 2 * grid.pitch)
    space = space // grid.pitch * grid.pitch  # bands are cut where actions may meet
    for first in range(0, columns, space):
        last = min(first + space, columns)
        yield [(" " * margin + ruler(grid, first, last, makespan), "")]
        for name, row in zip(names, rows, strict=True):
            is_edge = last == columns or row[last][0] == _EDGE
            end = row[last] if is_edge else (_CUT, _BORDER)
            yield [(name.ljust(margin), ""), *row[first:last], end]
        yield []


@dataclass(frozen=True)
class Columns:
    """Columns for times: ``rate`` columns a time unit, bands cut at ``pitch``."""

    rate: float
    pitch: int

    def column(self, time: float) -> int:
        return round(time * self.rate)


def choose_columns(spans: Sequence[Span], makespan: float) -> Columns:
    """Returns a grid in which labels have room.

    Its cells are the largest unit that divides every time, each as wide as the labels
    ask. Times without such a unit, those of a real run, are rounded to columns.
    """
    spans = [span for span in spans if span.end > span.start]
    unit = common_unit(spans)
    if unit is not None:
        pitch = max(
            math.ceil((len(s.name) + 1) / round((s.end - s.start) / unit))
            for s in spans
        )
        pitch = max(pitch, 2)  # an edge and a cell
        if makespan / unit * pitch <= _MAX_COLUMNS:
            return Columns(float(pitch / unit), pitch)
    rates = sorted((len(s.name) + 1) / (s.end - s.start) for s in spans)
    # 90 % of the labels fit: for the shortest span the chart would be too wide.
    rate = rates[9 * (len(rates) - 1) // 10]
    return Columns(min(rate, _MAX_COLUMNS / makespan), 1)


def common_unit(spans: Sequence[Span]) -> Fraction | None:
    """Returns the largest unit that divides all times; None if none is sensible."""
    # As fractions, since floats have no greatest common divisor. Relative to the
    # shortest span, planned times are fractions with small denominators; times of a
    # real run are not.
    times = [Fraction(time) for span in spans for time in (span.start, span.end)]
    shortest = min(Fraction(span.end) - Fraction(span.start) for span in spans)
    scaled = [time / shortest for time in times]
    exact = [time.limit_denominator(100) for time in scaled]
    noise = max(scaled) / 10**9
    if any(abs(e - t) > noise for e, t in zip(exact, scaled, strict=True)):
        return None
    denominator = math.lcm(*(time.denominator for time in exact))
    unit = Fraction(math.gcd(*(int(t * denominator) for t in exact)), denominator)
    return unit * shortest


def cells(lane: Lane, grid: Columns, columns: int) -> list[Cell]:
    """Returns the whole row of a lane, letter by letter."""
    row: list[Cell] = [(" ", "")] * columns + [(_EDGE, _BORDER)]
    updates: list[tuple[int, Cell]] = []
    for span in lane.spans:
        first, last = grid.column(span.start), grid.column(span.end)
        room, look = last - first - 1, look_of(span)
        if room >= 0:
            # A name that has no room is a letter, which the legend explains.
            text = span.name if len(span.name) <= room else look.sign
            text = look.sign * room if look.title in GAPS else text[:room].ljust(room)
            row[first:last] = [(_EDGE, _BORDER), *((c, look.style) for c in text)]
        elif look.title == "update":  # it may take no time
            updates.append((first, (look.sign, look.style)))
    for column, cell in updates:  # last, over the edge where two spans meet
        row[column] = cell
    return row


def ruler(grid: Columns, first: int, last: int, makespan: float) -> str:
    """Returns the line of times above the columns ``first`` to ``last``."""
    least_step = max(_TICK_WIDTH, len(format_number(makespan)) + 2) / grid.rate
    power = 10.0 ** math.floor(math.log10(least_step))
    steps = (m * power for m in (1, 2, 2.5, 5, 10))
    step = next(step for step in steps if step >= least_step * (1 - 1e-9))
    line = ""
    for tick in range(int(last / grid.rate / step) + 2):
        column = grid.column(tick * step)
        time = f"{tick * step:.4g}"
        if first <= column and column + len(time) <= last + 1:
            line = line.ljust(column - first) + time
    return line


def format_number(value: float) -> str:
    """Writes at most four digits: ``1.5``, ``0.0123``, ``33``."""
    return f"{float(value):.4g}"

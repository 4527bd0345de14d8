"""``memory``: what a rank holds, kind by kind, over a step and when it holds most."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING

from fsfunc.planning.events import Ran, Took
from fsfunc.planning.plans import Plan, RankPlan
from fsfunc.planning.simulation import Span
from fsfunc.printing.tables import Table, of_bytes, painted
from fsfunc.runtime.memory import KINDS
from fsfunc.show.figures import COMPUTE, FAINT, INK, MEMORY, Drawn, Look, sheet
from fsfunc.show.lanes import Lane
from fsfunc.show.plans import check_plan, peak_words

Held = tuple[int, ...]  # bytes of each of KINDS


@dataclass(frozen=True)
class Curve:
    """The memory that a rank holds while its operators run.

    Args:
        points: (operators that ran before, bytes of each of ``KINDS`` from then on).
        turns: what ran when, in operators: those of one unit and phase are a span.
        length: operators in all.
        peak: the point at which most is held.
        given: what is held before the step begins.
    """

    points: tuple[tuple[int, Held], ...]
    turns: Lane
    length: int
    peak: tuple[int, Held]
    given: Held

    @cached_property
    def most(self) -> Held:
        """The most bytes of each kind at any time."""
        held = [held for _, held in self.points] or [self.given]
        return tuple(map(max, zip(*held, strict=True)))

    def columns(self, count: int) -> list[Held]:
        """The highest moment of each of ``count`` equal parts of the step."""
        tops: list[Held] = [(0,) * len(KINDS)] * count
        ends = [*(at for at, _ in self.points[1:]), self.length]
        for (at, held), until in zip(self.points, ends, strict=False):
            size = sum(held)
            for column in range(self._column(at, count), self._last(at, until, count)):
                if size > sum(tops[column]):
                    tops[column] = held
        return tops

    def peak_column(self, count: int) -> int:
        """The column of the peak."""
        return self._column(self.peak[0], count)

    def _column(self, at: int, count: int) -> int:
        return min(at * count // max(self.length, 1), count - 1)

    def _last(self, at: int, until: int, count: int) -> int:
        """One past the last column that [at, until) reaches, its first at least."""
        if not self.length:  # nothing runs, and what is held is held all along
            return count
        reached = -(-until * count // self.length)
        return min(max(reached, self._column(at, count) + 1), count)


def curve_of(own: RankPlan) -> Curve:
    """The curve of a rank's plan."""
    rows = iter(own.memory)
    row = next(rows, None)
    points: list[tuple[int, Held]] = []
    turns: list[Span] = []
    ran, held = 0, (0,) * len(KINDS)
    peak, given = (0, held), held

    def put(at: int, what: Held) -> None:
        nonlocal peak
        points.append((at, what))
        if sum(what) > sum(peak[1]):
            peak = (at, what)

    for number, event in enumerate(own.events):
        if row is not None and row[0] == number:
            held = row[1]
            put(ran, held)
            given = held if isinstance(event, Took) and not event.op else given
            row = next(rows, None)
        if isinstance(event, Ran):
            before, ran = ran, ran + 1
            unit, phase = event.unit, event.phase
            if turns and (turns[-1].unit, turns[-1].phase) == (unit, phase):
                before = turns.pop().start
            turns.append(Span(own.rank, COMPUTE, unit, unit, phase, before, ran))
    lane = Lane(own.rank, COMPUTE, tuple(turns))
    return Curve(tuple(points), lane, ran, peak, given)


def clock_of(curve: Curve, spans: Sequence[Span]) -> Callable[[int], float]:
    """Times at which operators of a curve have run, by the spans they are part of.

    A turn is one span, or several where it waited; within it, operators are taken to
    be equally long.

    Args:
        spans: what the curve's rank computes, in order.
    """
    merged: list[tuple[tuple[str, str], float, float]] = []
    for s in spans:
        what, start = (s.unit, s.phase), s.start
        if merged and merged[-1][0] == what:
            _, start, _ = merged.pop()
        merged.append((what, start, s.end))
    ends = [turn.end for turn in curve.turns.spans]
    times: list[tuple[float, float]] = []
    place, now = 0, 0.0
    for turn in curve.turns.spans:
        # Taking memory may be a span of its own, without operators.
        for i in range(place, len(merged)):
            what, start, end = merged[i]
            if what == (turn.unit, turn.phase):
                place, now = i + 1, end
                times.append((start, end))
                break
        else:
            times.append((now, now))
    last = spans[-1].end if spans else 0.0

    def clock(at: int) -> float:
        i = bisect_left(ends, at)
        if i == len(ends):
            return last
        turn, (start, end) = curve.turns.spans[i], times[i]
        share = max(at - turn.start, 0) / (turn.end - turn.start)
        return start + share * (end - start)

    return clock


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text


ROWS = 12  # lines of the chart
WIDEST = 100  # its columns, where nothing says how wide the paper is
WIDTH, HEIGHT = 9.6, 3.6  # inches of the picture
PIXELS = 1200  # columns of the picture: more than there are pixels between two of them
STRIP = 0.03  # of the picture's height: the phases' line under the axis
# Of that line: no kind's colours.
GREYS = {
    "forward": "#d5d9e0",
    "recompute": "#aab1bd",
    "backward": "#737a87",
    "update": "#22262e",
}


@dataclass(frozen=True, repr=False)
class MemoryChart(Drawn):
    """Memory over a step to print: ``print(m)``, ``rich.print(m)``, or saved.

    A column is a share of the step's operators, and shows the moment in it at which
    most is held. Letters are kinds; what stays lies below what comes and goes.
    """

    curve: Curve
    rank: int
    peak: str  # when it is

    @property
    def title(self) -> str:
        """The rank, its peak, and when that is."""
        top = of_bytes(sum(self.curve.peak[1]))
        when = f", {self.peak}" if self.peak else ""
        return f"memory of rank {self.rank}: at most {top}{when}"

    @property
    def kinds(self) -> list[str]:
        """The kinds that are ever held, from below."""
        most = self.curve.most
        return [kind for kind in MEMORY if most[KINDS.index(kind)]]

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        curve, kinds = self.curve, self.kinds
        top = sum(curve.peak[1])
        yield self.title
        yield ""
        scale = {ROWS: of_bytes(top), ROWS // 2: of_bytes(top / 2), 0: "0 B"}
        margin = max(map(len, scale.values())) + 1
        room = WIDEST if width is None else max(width - margin - 2, 10)
        count = max(min(room, WIDEST), 1)
        columns = [stack(held, kinds, top) for held in curve.columns(count)]
        pointer = " " * (margin + 1 + curve.peak_column(count)) + "▼"
        yield painted([(pointer, "")])
        for row in reversed(range(ROWS)):
            said = scale.get(row + 1, "").rjust(margin - 1)
            looks = [MEMORY[c[row]] if row < len(c) else None for c in columns]
            cells = [(look.sign, look.style) if look else (" ", "") for look in looks]
            yield painted([(f"{said} {'┤' if said.strip() else '│'}", ""), *cells])
        yield painted([(f"{'0 B'.rjust(margin - 1)} └{'─' * count}", "")])
        yield painted([(" " * (margin + 1), ""), *phase_line(self._phases(count))])
        yield ""
        yield self._table()

    def _phases(self, count: int) -> list[Look | None]:
        """The phase that ran most in each of ``count`` equal parts of the step."""
        length = self.curve.length
        return self.curve.turns.columns(0, length, count) if length else [None] * count

    def _table(self) -> Table:
        points, peak = self.curve.points, self.curve.peak[1]
        last = points[-1][1] if points else self.curve.given
        moments = (self.curve.given, peak, self.curve.most, last)
        rows = []
        for kind in reversed(self.kinds):
            sizes = (of_bytes(held[KINDS.index(kind)]) for held in moments)
            rows.append((MEMORY[kind].sign, kind, *sizes))
        # The kinds are not at their most at one time.
        together = map(sum, (self.curve.given, peak, peak, last))
        rows.append(("", "together", *map(of_bytes, together)))
        head = ("<", "<kind", ">at first", ">at the peak", ">at most", ">at last")
        return Table("", head, rows)

    def figure(self) -> Figure:
        curve, kinds = self.curve, self.kinds
        seen = {turn.phase for turn in curve.turns.spans}
        marks = {kind: MEMORY[kind].color for kind in reversed(kinds)}
        marks |= {f"in the {p}": grey for p, grey in GREYS.items() if p in seen}
        at, held = curve.peak
        sizes = {kind: held[KINDS.index(kind)] for kind in reversed(kinds)}
        said = ", ".join(f"{k} {of_bytes(size)}" for k, size in sizes.items() if size)
        figure, axes = sheet(f"{self.title}\n{said}", WIDTH, HEIGHT, marks)
        count = max(min(PIXELS, curve.length), 1)
        edges = [i * max(curve.length, 1) / count for i in range(count + 1)]
        columns = curve.columns(count)
        columns.append(columns[-1])
        below = [0] * (count + 1)
        for kind in kinds:
            i, color = KINDS.index(kind), MEMORY[kind].color
            above = [b + held[i] for b, held in zip(below, columns, strict=True)]
            axes.fill_between(
                edges, below, above, step="post", color=color, linewidth=0
            )
            below = above
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(0, 1.04 * sum(held))
        axes.yaxis.set_major_formatter(lambda value, _: of_bytes(value))
        axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK)
        axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
        axes.set_xlabel("operators that ran", size=8, color=FAINT)
        axes.axvline(at, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        start = 0
        for look, group in groupby(self._phases(count)):
            end = start + len(list(group))
            ends = edges[start], edges[end]
            color = GREYS.get(look.title, "white") if look else "white"
            axes.axvspan(*ends, -STRIP, 0, color=color, clip_on=False, linewidth=0)
            start = end
        axes.tick_params(axis="x", pad=STRIP * HEIGHT * 72 + 2)
        return figure


def memory(
    plan: Plan, rank: int | None = None, *, path: str | PathLike[str] | None = None
) -> MemoryChart:
    """The memory that a rank holds over a step, split by what it is for.

    Args:
        plan: of ``ff.plan``.
        rank: the rank; by default the lowest that was planned.
        path: where to draw it as a picture too (``.png``, ``.svg``, ``.pdf``).

    Returns:
        A ``MemoryChart``: print it, or print it in colours with ``rich.print``.

    Raises:
        TypeError: no plan.
        IndexError: a rank that the mesh has not.
        ValueError: a plan in which no memory is held.
        ImportError: ``path`` is given and matplotlib is not there.

    >>> import torch
    >>> from fsfunc.planning.events import Gave, Op, Ran, Took
    >>> from fsfunc.comm.mesh import Mesh
    >>> op = Op("aten.mm", 20, 12, torch.float32)
    >>> forward, backward = Ran(op, "f", "forward"), Ran(op, "f", "backward")
    >>> given, made = Took(0, 600, "", "", ""), Took(1, 600, "aten.mm", "f", "forward")
    >>> events = [given, forward, made, forward, backward, Gave(1), backward]
    >>> own = RankPlan(0, 1, {}, events, {0: "parameters"}, [], [])
    >>> print(memory(Plan(Mesh({}, "abstract"), (own,))).text(28))
    memory of rank 0: at most 1.20 kB, in the forward of f, by aten.mm
    <BLANKLINE>
                 ▼
    1.20 kB ┤    aaaaaaaaaa
            │    aaaaaaaaaa
            │    aaaaaaaaaa
            │    aaaaaaaaaa
            │    aaaaaaaaaa
            │    aaaaaaaaaa
      600 B ┤pppppppppppppppppp
            │pppppppppppppppppp
            │pppppppppppppppppp
            │pppppppppppppppppp
            │pppppppppppppppppp
            │pppppppppppppppppp
        0 B └──────────────────
             forward  backward
    <BLANKLINE>
       kind         at first  at the peak  at most  at last
    a  activations       0 B        600 B    600 B      0 B
    p  parameters      600 B        600 B    600 B    600 B
       together        600 B      1.20 kB  1.20 kB    600 B
    """
    own: RankPlan = check_plan(plan).on(rank)
    if not own.peak_bytes:
        raise ValueError("there is no memory to show: the plan holds none at any time")
    rank = own.rank if rank is None else rank
    return MemoryChart(curve_of(own), rank, peak_words(own)).saved(path)


def stack(held: tuple[int, ...], kinds: list[str], top: int) -> list[str]:
    """The kind of each line of a column, from below.

    >>> stack((3, 0, 0, 1, 0, 0), ["parameters", "moments"], 8)
    ['parameters', 'parameters', 'parameters', 'parameters', 'moments', 'moments']
    """
    lines, below = [], 0
    for kind in kinds:
        below += held[KINDS.index(kind)]
        lines += [kind] * (round(ROWS * below / top) - len(lines))
    return lines


def phase_line(looks: list[Look | None]) -> Iterator[tuple[str, str]]:
    """Yield the phases under the chart: by name where there is room, else by letter."""
    for look, group in groupby(looks):
        room = len(list(group))
        title, sign, color = (look.title, look.sign, look.color) if look else 3 * ("",)
        yield (title if len(title) < room else sign * room).ljust(room), color

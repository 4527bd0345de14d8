"""``memory``: the memory of a rank over a step, kind by kind, and what its peak is.

`memory` makes a `Curve` of a plan (in `memory_curves`) and a `MemoryChart` of that,
which is printed as text, or drawn by matplotlib (``figure``) or as SVG (``svg``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING

from fsfunc.planning.estimation import Estimate
from fsfunc.planning.plans import Plan, RankPlan
from fsfunc.printing.tables import Table, of_bytes, of_seconds, of_share, picture_line
from fsfunc.runtime.memory import KINDS
from fsfunc.show.chart_svg import StackedAreas, areas_svg
from fsfunc.show.charts import FAINT, INK, MEMORY, Look, Tick, outline, ticks
from fsfunc.show.figures import LETTER, Drawn, listing, sheet
from fsfunc.show.memory_curves import (
    BytesByKind,
    Curve,
    curve_of,
    peak_by_unit,
    peak_words,
)
from fsfunc.show.plans import check_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text


ROWS = 12  # lines of the chart
LISTED_PARTS = 8  # parts of the peak that are listed
WIDEST = 100  # columns of the chart, if nothing says how wide the paper is
WIDTH, HEIGHT = 9.6, 3.6  # inches of the picture
PIXELS = 1200  # columns of the picture: each is narrower than one can see
STRIP = 0.03  # of the picture's height: the phases' line under the axis
# The colours of that line: none that a kind has.
GREYS = {
    "forward": "#d5d9e0",
    "recompute": "#aab1bd",
    "backward": "#737a87",
    "update": "#22262e",
}


@dataclass(frozen=True, repr=False)
class MemoryChart(Drawn):
    """Memory over a step to print: ``print(m)``, ``rich.print(m)``, or saved.

    A column is a share of the step's time, or of its operators, and shows the moment
    in it at which most is held. Letters are kinds; what stays lies below what comes
    and goes.

    Args:
        peak: when most is held, in words.
        contents: (kind, unit, bytes) of what is held at the peak.
    """

    curve: Curve
    rank: int
    peak: str
    contents: Sequence[tuple[str, str, int]]

    @property
    def title(self) -> str:
        """The rank, its peak, and when that is."""
        most = of_bytes(sum(self.curve.peak[1]))
        time = f" at {of_seconds(self.curve.peak[0])}" if self.curve.timed else ""
        when = f", {self.peak}" if self.peak else ""
        return f"memory of rank {self.rank}: at most {most}{time}{when}"

    @property
    def kinds(self) -> list[str]:
        """The kinds that there ever are, from below."""
        most = self.curve.most
        return [kind for kind in MEMORY if most[KINDS.index(kind)]]

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        curve, kinds = self.curve, self.kinds
        top = sum(curve.peak[1])
        yield self.title
        yield ""
        scale = {ROWS: of_bytes(top), ROWS // 2: of_bytes(top / 2), 0: "0 B"}  # by row
        margin = max(map(len, scale.values())) + 1
        room = WIDEST if width is None else max(width - margin - 2, 10)
        count = max(min(room, WIDEST), 1)
        columns = [stack(sizes, kinds, top) for sizes in curve.columns(count)]
        pointer = " " * (margin + 1 + curve.peak_column(count)) + "▼"
        yield picture_line([(pointer, "")])
        for row in reversed(range(ROWS)):
            label = scale.get(row + 1, "").rjust(margin - 1)
            looks = [MEMORY[c[row]] if row < len(c) else None for c in columns]
            cells = [(look.sign, look.style) if look else (" ", "") for look in looks]
            yield picture_line(
                [(f"{label} {'┤' if label.strip() else '│'}", ""), *cells]
            )
        yield picture_line([(f"{'0 B'.rjust(margin - 1)} └{'─' * count}", "")])
        yield picture_line([(" " * (margin + 1), ""), *phase_line(self.phases(count))])
        if curve.timed:
            ruler = f"0 s{of_seconds(curve.length):>{count - 3}}"
            yield picture_line([(" " * (margin + 1) + ruler, "")])
        yield ""
        yield self._table()
        rows = [(k, u, of_bytes(n), of_share(n, top)) for k, u, n in self.contents]
        yield ""
        yield Table(
            "at the peak", ("<kind", "<unit", ">bytes", ">share"), rows, LISTED_PARTS
        )

    def phases(self, count: int) -> list[tuple[Look | None, int, int]]:
        """Returns the phase that ran most in each of ``count`` equal parts of the step.

        Equal neighbours are one: (look, first part, one past the last).
        """
        length, end = self.curve.length, 0
        stretches: list[tuple[Look | None, int, int]] = []
        looks: list[Look | None] = [None] * count
        if length:
            looks = self.curve.phases.columns(0, length, count)
        for look, group in groupby(looks):
            start, end = end, end + len(list(group))
            stretches.append((look, start, end))
        return stretches

    def areas(
        self, columns: Sequence[BytesByKind]
    ) -> list[tuple[Look, list[int], list[int]]]:
        """Returns the kinds as areas from below: (look, lower edge, upper edge)."""
        areas: list[tuple[Look, list[int], list[int]]] = []
        below = [0] * len(columns)
        for kind in self.kinds:
            i = KINDS.index(kind)
            above = [b + sizes[i] for b, sizes in zip(below, columns, strict=True)]
            areas.append((MEMORY[kind], below, above))
            below = above
        return areas

    def describe_position(self, position: float) -> str:
        """Describes a position on the axis: a time, or an operator."""
        return of_seconds(position) if self.curve.timed else f"operator {position:.0f}"

    def _table(self) -> Table:
        """Returns the bytes of each kind: first, at the peak, its most, and last."""
        points, peak = self.curve.points, self.curve.peak[1]
        last = points[-1][1] if points else self.curve.at_start
        moments = (self.curve.at_start, peak, self.curve.most, last)
        rows = []
        for kind in reversed(self.kinds):
            cells = (of_bytes(sizes[KINDS.index(kind)]) for sizes in moments)
            rows.append((MEMORY[kind].sign, kind, *cells))
        # Kinds are not at their most at one time, so the most of all is at the peak.
        together = map(sum, (self.curve.at_start, peak, peak, last))
        rows.append(("", "together", *map(of_bytes, together)))
        head = ("<", "<kind", ">at first", ">at the peak", ">at most", ">at last")
        return Table("", head, rows)

    def peak_parts(self) -> list[tuple[str, str]]:
        """Returns the largest parts of the peak: (kind, words)."""
        parts = [
            (kind, f"{kind}{unit and f' of {unit}'}: {of_bytes(size)}")
            for kind, unit, size in self.contents[:LISTED_PARTS]
        ]
        others = sum(size for _, _, size in self.contents[LISTED_PARTS:])
        return [*parts, *([("", f"others: {of_bytes(others)}")] if others else [])]

    def legend_colors(self) -> dict[str, str]:
        """Returns the colours of kinds, and of phases in the line under the areas."""
        phases = {span.phase for span in self.curve.phases.spans}
        kinds = {kind: MEMORY[kind].color for kind in reversed(self.kinds)}
        return kinds | {f"in the {p}": grey for p, grey in GREYS.items() if p in phases}

    def svg(self) -> str:
        curve, legend_colors = self.curve, self.legend_colors()
        top = 1.06 * sum(self.curve.peak[1])
        columns = curve.columns(PIXELS)
        areas = [
            (look.color, outline(below, above, top, 1000 / PIXELS))
            for look, below, above in self.areas(columns)
        ]
        length = curve.length / PIXELS
        phases = [
            (GREYS[look.title], first * length, last * length)
            for look, first, last in self.phases(PIXELS)
            if look is not None and look.title in GREYS
        ]
        parts = [
            (legend_colors.get(kind, ""), words) for kind, words in self.peak_parts()
        ]
        return areas_svg(
            StackedAreas(
                title=self.title,
                areas=areas,
                top=top,
                axis=self.axis(),
                length=curve.length,
                phases=phases,
                peak=curve.peak[0],
                legend_colors=legend_colors,
                parts_title=f"at the peak, {of_bytes(sum(curve.peak[1]))}",
                parts=parts,
            )
        )

    def axis(self) -> list[Tick]:
        """Returns the marks of time, or of operators."""
        if not self.curve.length:
            return []
        format_value = of_seconds if self.curve.timed else lambda n: f"{n:.0f}"
        return ticks(self.curve.length, format_value, (8,))

    def figure(self) -> Figure:
        curve, legend_colors = self.curve, self.legend_colors()
        peak, most = curve.peak[0], sum(curve.peak[1])
        parts = self.peak_parts()
        beside = LETTER * max(len(words) for _, words in parts) + 0.5
        figure, axes = sheet(self.title, WIDTH, HEIGHT, legend_colors, beside)
        listing(figure, f"at the peak, {of_bytes(most)}", parts, legend_colors)
        count = PIXELS if curve.timed else max(min(PIXELS, int(curve.length)), 1)
        edges = [i * (curve.length or 1) / count for i in range(count + 1)]
        columns = curve.columns(count)
        columns.append(columns[-1])  # step="post" needs a value at the last edge
        for look, below, above in self.areas(columns):
            axes.fill_between(
                edges, below, above, step="post", color=look.color, linewidth=0
            )
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(0, 1.06 * most)
        sizes = ticks(1.06 * most, of_bytes, (8,))
        axes.set_yticks([tick.value for tick in sizes], [tick.text for tick in sizes])
        axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=INK)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
        times = self.axis()
        axes.set_xticks([t.value for t in times], [t.text for t in times])
        if not curve.timed:
            axes.set_xlabel("operators that ran", size=8, color=FAINT)
        axes.plot([peak], [1.03 * most], "v", color=INK, markersize=5, clip_on=False)
        for look, first, last in self.phases(count):
            ends = edges[first], edges[last]
            color = GREYS.get(look.title, "white") if look else "white"
            axes.axvspan(*ends, -STRIP, 0, color=color, clip_on=False, linewidth=0)
        axes.tick_params(axis="x", pad=STRIP * HEIGHT * 72 + 2)
        return figure


def memory(
    plan: Plan,
    rank: int | None = None,
    *,
    estimate: Estimate | None = None,
    path: str | PathLike[str] | None = None,
) -> MemoryChart:
    """Shows the memory that a rank holds over a step, split by what it is for.

    Args:
        plan: of ``ff.plan``.
        rank: the rank; by default the lowest that was planned.
        estimate: of the plan: the chart is then over its time, else over operators.
        path: where to draw it as a picture too (``.png``, ``.svg``, ``.pdf``).

    Returns:
        A ``MemoryChart``: print it, or print it in colours with ``rich.print``.

    Raises:
        TypeError: no plan.
        IndexError: a rank that the mesh has not.
        ValueError: a plan in which no memory is held, or the estimate of another.
        ImportError: a ``path`` to no ``.svg``, and matplotlib is not there.

    >>> import torch
    >>> from fsfunc.planning.events import Allocated, Freed, Op, Ran
    >>> from fsfunc.comm.mesh import Mesh
    >>> op = Op("aten.mm", 20, 12, torch.float32)
    >>> forward, backward = Ran(op, "f", "forward"), Ran(op, "f", "backward")
    >>> given = Allocated(0, 600, "", "", "")
    >>> made = Allocated(1, 600, "aten.mm", "f", "forward")
    >>> events = [given, forward, made, forward, backward, Freed(1), backward]
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
    <BLANKLINE>
    at the peak
    kind         unit  bytes  share
    activations  f     600 B   50 %
    parameters         600 B   50 %
    """
    rank_plan: RankPlan = check_plan(plan).on(rank)
    if not rank_plan.peak_bytes:
        raise ValueError("there is no memory to show: the plan holds none at any time")
    rank = rank_plan.rank if rank is None else rank
    curve = curve_of(rank_plan, None if estimate is None else estimate.spans)
    chart = MemoryChart(curve, rank, peak_words(rank_plan), peak_by_unit(rank_plan))
    return chart.saved(path)


def stack(sizes: BytesByKind, kinds: list[str], top: int) -> list[str]:
    """Returns the kind of each line of a column, from below.

    >>> stack((3, 0, 0, 1, 0, 0), ["parameters", "moments"], 8)
    ['parameters', 'parameters', 'parameters', 'parameters', 'moments', 'moments']
    """
    lines, total = list[str](), 0
    for kind in kinds:
        total += sizes[KINDS.index(kind)]
        # Rounded are the running sums, not the sizes: rounded sizes would not add up to
        # the height of the whole.
        lines += [kind] * (round(ROWS * total / top) - len(lines))
    return lines


def phase_line(
    phases: Sequence[tuple[Look | None, int, int]],
) -> Iterator[tuple[str, str]]:
    """Yields the phases under the chart: by name if there is room, else by letter."""
    for look, first, last in phases:
        room = last - first
        title, sign, color = (look.title, look.sign, look.color) if look else 3 * ("",)
        yield (title if len(title) < room else sign * room).ljust(room), color

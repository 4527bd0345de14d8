"""``memory``: what a rank holds, kind by kind, over a step and when it holds most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING, Any

from fsfunc.planning.events import Ran, Took
from fsfunc.planning.plans import Plan, RankPlan
from fsfunc.printing.folding import alike, together
from fsfunc.printing.tables import Table, of_bytes, of_share, painted
from fsfunc.runtime.memory import KINDS
from fsfunc.show.figures import FAINT, INK, MEMORY, Drawn, Look, sheet
from fsfunc.show.memory_curve import Curve, curve_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text


OUTSIDE_UNITS = "(outside units)"
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


def check_plan(plan: Any) -> Plan:
    """``plan``, if it is one."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"this shows a plan, and got {type(plan).__name__}: make one by ff.plan("
            "step, state, batch) inside spmd; a rank's own is chosen by rank="
        )
    return plan


def kinds_table(own: RankPlan) -> Table:
    """The memory of each kind when most is held."""
    rows = [
        (kind, of_bytes(size), of_share(size, own.peak_bytes))
        for kind, size in own.peak.items()
        if size
    ]
    at = peak_words(own)
    rows.append(("total", of_bytes(own.peak_bytes), ""))
    title = f"memory at the peak{f', {at}' if at else ''}"
    head = ("<kind", ">bytes", ">share")
    return Table(title, head, rows if own.peak_bytes else [])


def peak_words(own: RankPlan) -> str:
    """The moment of most memory: ``in the backward of block, by aten.mm``."""
    event = own.events[own.peak_at] if own.events else None
    if isinstance(event, Took) and event.op:
        return f"in {_turn(event.unit, event.phase)}, by {_operator(event.op)}"
    if isinstance(event, Ran):
        return f"in {_turn(event.unit, event.phase)}"
    return "before anything runs" if event is not None else ""


def _turn(unit: str, phase: str) -> str:
    """``the backward of block``."""
    return f"the {phase or 'step'}" + (f" of {unit}" if unit else "")


def _operator(op: str) -> str:
    """Without the overload, which says nothing to a reader."""
    return op.removesuffix(".default")


def alive_table(own: RankPlan) -> Table:
    """The largest groups of what is held at the peak."""
    sizes: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for held in own.alive():
        sizes[held.kind, held.op, held.unit, held.phase].append(held.bytes)

    keyed = [
        (unit, (kind, op, phase), ((kind, op, phase), numbers))
        for (kind, op, unit, phase), numbers in sizes.items()
    ]
    found: list[tuple[int, tuple[str, ...]]] = []
    for names, groups in alike(keyed):
        kind, op, phase = groups[0][0]
        total = sum(sum(numbers) for _, numbers in groups)
        by = _operator(op) if op else "(given to the step)"
        unit = together(names) or (OUTSIDE_UNITS if op else "")
        count = str(sum(len(numbers) for _, numbers in groups))
        share = of_share(total, own.peak_bytes)
        row = (kind, unit, by, phase, count, of_bytes(total), share)
        found.append((total, row))
    found.sort(key=lambda row: -row[0])
    head = ("<kind", "<unit", "<taken by", "<phase", ">tensors", ">bytes", ">share")
    title = "what is held then, largest first"
    return Table(title, head, [row for _, row in found], most=10)

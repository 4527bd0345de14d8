"""``memory``: what a rank holds over a step, kind by kind, in letters or drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from os import PathLike

from fsfunc.foresight.plans import Plan, RankPlan
from fsfunc.memory_kinds import KINDS
from fsfunc.show.amounts import of_bytes
from fsfunc.show.curves import Curve, curve_of
from fsfunc.show.palette import MEMORY, PHASE, look_of
from fsfunc.show.peaks import check_plan, peak_words
from fsfunc.show.tables import Line, Printed, Table

__all__ = ["MemoryChart", "memory"]

ROWS = 12  # lines of the chart
WIDEST = 100  # its columns, where nothing says how wide the paper is


@dataclass(frozen=True, repr=False)
class MemoryChart(Printed):
    """Memory over a step to print: ``print(m)``, ``rich.print(m)``, or saved.

    A column is a share of the step's operators, and shows the moment in it at which
    most is held. Letters are kinds; what stays lies below what comes and goes.
    """

    curve: Curve
    rank: int
    peak: str  # when it is

    @property
    def title(self) -> str:
        """Whose memory it is, and its peak."""
        top = of_bytes(sum(self.curve.peak[1]))
        when = f", {self.peak}" if self.peak else ""
        return f"memory of rank {self.rank}: at most {top}{when}"

    @property
    def kinds(self) -> list[str]:
        """The kinds that are ever held, from below."""
        most = self.curve.most
        return [kind for kind in MEMORY if most[KINDS.index(kind)]]

    def pieces(self, width: int | None) -> Iterator[Table | Line | str]:
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
        yield [(pointer, "")]
        for row in reversed(range(ROWS)):
            said = scale.get(row + 1, "").rjust(margin - 1)
            kinds_here = [
                column[row] if row < len(column) else "" for column in columns
            ]
            yield [
                (f"{said} {'┤' if said.strip() else '│'}", ""),
                *_painted(kinds_here),
            ]
        yield [(f"{'0 B'.rjust(margin - 1)} └{'─' * count}", "")]
        yield [(" " * (margin + 1), ""), *_turns(curve.phases(count))]
        yield []
        yield self._table()

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

    def save(self, path: str | PathLike[str]) -> None:
        """Draw the chart into a file: ``.png``, or ``.svg`` or ``.pdf``.

        Raises:
            ImportError: matplotlib is not there.
            ValueError: an ending that matplotlib has no format for.
        """
        from fsfunc.show.stacks import drawn

        drawn(self.curve, self.title, self.kinds).savefig(path)


def memory(
    plan: Plan, rank: int | None = None, *, path: str | PathLike[str] | None = None
) -> MemoryChart:
    """The memory that a rank holds over a step, split by what it is for.

    Args:
        plan: of ``ff.plan``.
        rank: whose; the lowest that was planned by default.
        path: where to draw it as a picture too (``.png``, ``.svg``, ``.pdf``).

    Returns:
        A ``MemoryChart``: print it, or print it in colours with ``rich.print``.

    Raises:
        TypeError: no plan.
        IndexError: a rank that the mesh has not.
        ValueError: a plan in which no memory is held.
        ImportError: ``path`` is given and matplotlib is not there.

    >>> import torch
    >>> from fsfunc.foresight.events import Gave, Op, Ran, Took
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
    shown = MemoryChart(curve_of(own), rank, peak_words(own))
    if path is not None:
        shown.save(path)
    return shown


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


def _painted(kinds: list[str]) -> Line:
    """A line of the chart: letters, each kind on its colour."""
    runs = []
    for kind, group in groupby(kinds):
        sign = MEMORY[kind].sign if kind else " "
        style = f"#000000 on {MEMORY[kind].color}" if kind else ""
        runs.append((sign * len(list(group)), style))
    return runs


def _turns(phases: list[str]) -> Line:
    """The phases under the chart: by name where there is room, else by letter."""
    runs = []
    for phase, group in groupby(phases):
        room, look = len(list(group)), look_of(PHASE, phase)
        name = phase if len(phase) < room else look.sign * room
        runs.append((name.ljust(room), look.color))
    return runs

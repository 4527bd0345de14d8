"""``timeline``: a schedule as lanes over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

from fsfunc.pipelining.actions import Action, Schedule, parse, stages_of
from fsfunc.pipelining.timing import Costs, TimedAction, simulate
from fsfunc.pipelining.verification import held
from fsfunc.planning.simulation import Span
from fsfunc.printing.tables import Table, of_share, painted
from fsfunc.show.figures import (
    COMPUTE,
    COMPUTING,
    WAITS,
    Bar,
    Row,
    by_sign,
    lighter,
    look_of,
)
from fsfunc.show.lanes import (
    NOISE,
    Lane,
    LaneChart,
    bands,
    check_events,
    number,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text


@dataclass(frozen=True, repr=False)
class Timeline(LaneChart):
    """A timeline to print: ``print(t)``, in colours by ``rich.print(t)``, or saved.

    Each rank has a row. ``F3`` is the forward of microbatch 3 (``F3@5``: of stage 5,
    where ranks have several), as wide as it lasts. A rank that waits between two
    of its actions shows ``░``; before its first and after its last it shows ``·``.
    Lines that are too wide are wrapped; ``text(None)`` makes one band.

    Args:
        lanes: what each rank computes from time 0, and its gaps; a span's unit is its
            stage.
        makespan: from the first action's start to the last one's end.
        held: the most microbatch activations that each rank holds at once.
    """

    lanes: tuple[Lane, ...]
    makespan: float
    held: tuple[float, ...]
    start = 0.0

    @property
    def end(self) -> float:
        return self.makespan

    @classmethod
    def of_events(cls, events: Sequence[tuple[int, Action, float, float]]) -> Timeline:
        """The timeline of a recorded run.

        Args:
            events: (rank, action, start, end) of one step, times in seconds.

        Raises:
            TypeError, ValueError: events of another form, or of one rank that overlap.
        """
        return _timeline_of(events)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The time in which each rank computes nothing, of the makespan."""
        return tuple(lane.idle for lane in self.lanes)

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        yield from map(painted, bands(self.lanes, self.makespan, width))
        yield from self.legends(width)
        yield ""
        yield f"makespan {number(self.makespan)}"
        rows = [
            (f"rank {lane.rank}", number(lane.busy), number(lane.idle), *notes)
            for lane, notes in zip(self.lanes, self._notes(), strict=True)
        ]
        yield Table("", ("<", ">busy", ">bubble", ">", ">held"), rows)

    def row(self, lane: Lane) -> Row:
        stages = sorted({span.unit for span in lane.work}, key=int)
        bars = []
        for span in lane.spans:
            color = look_of(span).color
            if span.unit:  # else a gap
                color = lighter(color, stages.index(span.unit), self._chunks)
            label = span.name.partition("@")[0]  # the shade tells the stage
            bars.append(Bar(span.start, span.end, color, label))
        note = "{} bubble, {} held".format(*self._notes()[lane.rank])
        return Row(f"rank {lane.rank}", bars, note)

    @property
    def _chunks(self) -> int:
        """The most stages of a rank."""
        return max(len({span.unit for span in lane.work}) for lane in self.lanes)

    def figure(self) -> Figure:
        marks, chunks = {}, self._chunks
        if chunks > 1:
            pale = lighter(COMPUTING["forward"].color, chunks - 1, chunks)
            marks["lighter: a rank's later stage"] = pale
        idle = of_share(sum(self.bubble), len(self.lanes) * self.makespan)
        return self.picture(f"makespan {number(self.makespan)}, {idle} bubble", marks)

    def _notes(self) -> list[tuple[str, str]]:
        """The bubble's share and what is held, by rank."""
        shares = (of_share(bubble, self.makespan) for bubble in self.bubble)
        return list(zip(shares, map(number, self.held), strict=True))


def timeline(
    schedule: Schedule | Sequence[str | Sequence[Action | str]],
    costs: Costs | None = None,
    *,
    edges: Iterable[tuple[int, int]] | None = None,
    path: str | PathLike[str] | None = None,
) -> Timeline:
    """The timeline of a schedule whose actions take what ``costs`` says.

    Every action starts as soon as its rank is free and what it needs has arrived.

    Args:
        schedule: actions for each rank, or rows of text that ``parse`` reads.
        costs: how long actions take; where None, those of a rank's stages together
            take one unit for F, I and W, and two for B.
        edges: the (producer, consumer) stages; the chain of all stages where None.
        path: where to draw it as a picture too (``.png``, ``.svg``, ``.pdf``).

    Returns:
        A ``Timeline``: print it, or print it in colours with ``rich.print``.

    Raises:
        ScheduleError: a schedule that cannot run, or an entry that is no action.
        ImportError: ``path`` is given and matplotlib is not there.

    Cost: nothing is run; a thousand actions take some milliseconds, a picture of them
    about a second.

    >>> from fsfunc.pipelining.schedules import one_f_one_b
    >>> timeline(one_f_one_b(2, 3))
           0              5              10
    rank 0 │F0│F1│░░░░░│B0   │F2│B1   │░░│B2   │
    rank 1 │··│F0│B0   │F1│B1   │F2│B2   │·····│
    <BLANKLINE>
     F  forward   B  backward
     ░  waits for another rank   ·  not begun, or done
    <BLANKLINE>
    makespan 12
            busy  bubble        held
    rank 0     9       3  25 %     2
    rank 1     9       3  25 %     1
    """
    rows = parse(schedule)
    return _timeline_of(simulate(rows, costs, edges=edges), len(rows)).saved(path)


def _timeline_of(events: Sequence[Any], n_ranks: int = 0) -> Timeline:
    """The timeline of events, of so many ranks at least.

    Transfers are not drawn, as ranks compute meanwhile.
    """
    computed = [event for event in check_events(events) if event.action.is_compute]
    if not computed:
        raise ValueError("there is no F, B, I or W among the events to show")
    zero = min(event.start for event in computed)
    makespan = max(event.end for event in computed) - zero
    count = max(n_ranks, *(event.rank + 1 for event in computed))
    rows: list[list[TimedAction]] = [[] for _ in range(count)]
    for event in sorted(computed, key=lambda event: (event.start, event.end)):
        rows[event.rank].append(event)
    actions = tuple(tuple(event.action for event in row) for row in rows)
    several = any(len(stages_of(row)) > 1 for row in actions)
    lanes = []
    for rank, row in enumerate(rows):
        spans = tuple(
            Span(
                rank,
                COMPUTE,
                event.action.text(stage=several),
                str(event.action.stage),
                by_sign(event.action.kind).title,
                event.start - zero,
                event.end - zero,
            )
            for event in row
        )
        for before, span in pairwise(spans):
            if span.start < before.end - NOISE * makespan:
                raise ValueError(
                    f"rank {rank}: {span.name} starts at {span.start:.6g}, "
                    f"before {before.name} ends at {before.end:.6g}: a rank computes "
                    "one action at a time"
                )
        lanes.append(Lane(rank, COMPUTE, spans).filled(0.0, makespan, WAITS))
    if not any(lane.busy for lane in lanes):
        raise ValueError("every action takes no time: give costs above 0")
    return Timeline(tuple(lanes), makespan, tuple(held(actions)))

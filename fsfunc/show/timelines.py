"""``timeline``: a pipeline's schedule as lanes over time.

`timeline` simulates a schedule by the costs of its actions, and draws what each rank
computes; a run that was recorded is drawn beside it. Each rank has one lane, or two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from statistics import median
from typing import TYPE_CHECKING, Any

from fsfunc.pipelining.actions import KINDS, Action, Schedule, parse, stages_of
from fsfunc.pipelining.timing import Costs, TimedAction, simulate
from fsfunc.pipelining.verification import peak_microbatches
from fsfunc.planning.simulation import Span
from fsfunc.printing.tables import Table, of_seconds, of_share, picture_line
from fsfunc.show.charts import (
    COMPUTE,
    WAITS,
    Bar,
    Row,
    by_sign,
    computing,
    lighter,
    look_of,
)
from fsfunc.show.lanes import NOISE, Lane, LaneChart, bands, check_events, format_number

if TYPE_CHECKING:
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
        measured: the makespan of a run that is shown beside the plan, in seconds, as
            ``makespan`` is then: each rank has two lanes, planned and measured.
    """

    lanes: tuple[Lane, ...]
    makespan: float
    held: tuple[float, ...]
    measured: float | None = None
    start = 0.0

    @property
    def end(self) -> float:
        return max(self.makespan, self.measured or 0.0)

    @property
    def names(self) -> list[str]:
        """The name of each lane."""
        kinds = ("",) if self.measured is None else (" planned", " measured")
        return [
            f"rank {lane.rank}{kinds[i % len(kinds)]}"
            for i, lane in enumerate(self.lanes)
        ]

    @classmethod
    def of_events(cls, events: Sequence[tuple[int, Action, float, float]]) -> Timeline:
        """Returns the timeline of a recorded run.

        Args:
            events: (rank, action, start, end) of one step, times in seconds.

        Raises:
            TypeError, ValueError: events of another form, or of one rank that overlap.
        """
        return _timeline_of(events)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The time in which each lane computes nothing, of its makespan."""
        pairs = zip(self.lanes, self._makespans(), strict=True)
        # A shorter step's lane is filled up to the end of the longer one.
        return tuple(lane.idle - (self.end - makespan) for lane, makespan in pairs)

    def _makespans(self) -> list[float]:
        """Returns the makespan of each lane's step: planned and measured in turns."""
        makespans = self.makespan, self.measured or 0.0
        n = 1 if self.measured is None else 2
        return [makespans[i % n] for i, _ in enumerate(self.lanes)]

    def pieces(self, width: int | None) -> Iterator[Table | Text | str]:
        yield from map(picture_line, bands(self.lanes, self.names, self.end, width))
        yield from self.legends(width)
        yield ""
        yield self.title
        figures = zip(self.names, self.lanes, self.bubble, self._notes(), strict=True)
        rows = [
            (name, self.format_time(lane.busy), self.format_time(bubble), *notes)
            for name, lane, bubble, notes in figures
        ]
        yield Table("", ("<", ">busy", ">bubble", ">", ">held"), rows)

    @cached_property
    def rows(self) -> list[Row]:
        pairs = zip(self.lanes, self.names, self._notes(), strict=True)
        return [
            Row(name, self._bars(lane), "{} bubble, {} held".format(*notes), name)
            for lane, name, notes in pairs
        ]

    def _bars(self, lane: Lane) -> list[Bar]:
        stages = sorted({span.unit for span in lane.work}, key=int)
        bars = []
        for span in lane.spans:
            look, shade = look_of(span), ""
            if span.unit:  # else a gap
                shade = lighter(look.color, stages.index(span.unit), self._chunks)
            label = span.name.partition("@")[0]  # the shade tells the stage
            times = f"{format_number(span.start)} to {format_number(span.end)}"
            words = f"{span.name or look.title}: {times}"
            bars.append(Bar(span.start, span.end, look, (label,), words, shade))
        return bars

    def format_time(self, time: float) -> str:
        return of_seconds(time) if self.measured is not None else format_number(time)

    @property
    def _chunks(self) -> int:
        """The most stages of a rank."""
        return max(len({span.unit for span in lane.work}) for lane in self.lanes)

    def legend_colors(self) -> dict[str, str]:
        chunks = self._chunks
        if chunks < 2:
            return super().legend_colors()
        last = lighter(computing()["forward"].color, chunks - 1, chunks)
        return super().legend_colors() | {"lighter: a rank's later stage": last}

    @property
    def caption(self) -> str:
        idle = of_share(sum(self.bubble), sum(self._makespans()))
        return self.title + (f", {idle} bubble" if self.measured is None else "")

    @property
    def title(self) -> str:
        """How long it lasts, in words."""
        title = f"makespan {self.format_time(self.makespan)}"
        if self.measured is None:
            return title
        return f"{title} planned, {self.format_time(self.measured)} measured"

    def _notes(self) -> list[tuple[str, str]]:
        """Returns the bubble's share and what is held, by lane."""
        shares = map(of_share, self.bubble, self._makespans())
        return list(zip(shares, map(format_number, self.held), strict=True))


def timeline(
    schedule: Schedule | Sequence[str | Sequence[Action | str]],
    costs: Costs | None = None,
    *,
    measured: Sequence[tuple[int, Action, float, float]] | None = None,
    edges: Iterable[tuple[int, int]] | None = None,
    path: str | PathLike[str] | None = None,
) -> Timeline:
    """Shows the timeline of a schedule whose actions take what ``costs`` says.

    Every action starts as soon as its rank is free and what it needs has arrived. With
    ``measured`` a run of it is shown beside that, over the same time.

    Args:
        schedule: actions for each rank, or rows of text that ``parse`` reads.
        costs: how long actions take; where None, those of a rank's stages together
            take one unit for F, I and W, and two for B; beside a run, what each
            stage's took there, the median of its microbatches.
        measured: (rank, action, start, end) of each action of one step that ran, as
            ``ff.clock`` records them, of all ranks; ``costs`` are then in seconds.
        edges: the (producer, consumer) stages; the chain of all stages where None.
        path: where to draw it as a picture too (``.png``, ``.svg``, ``.pdf``).

    Returns:
        A ``Timeline``: print it, or print it in colours with ``rich.print``.

    Raises:
        ScheduleError: a schedule that cannot run, or an entry that is no action.
        ValueError: a run of another schedule, or of several steps; says which action.
        ImportError: a ``path`` to no ``.svg``, and matplotlib is not there.

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
    if measured is None:
        return _timeline_of(simulate(rows, costs, edges=edges), len(rows)).saved(path)
    ran = [event for event in check_events(measured) if event.action.is_compute]
    _check_run(rows, ran)
    planned = simulate(rows, _costs_of(ran) if costs is None else costs, edges=edges)
    timelines = _timeline_of(planned, len(rows)), _timeline_of(ran, len(rows))
    return _merge_timelines(*timelines).saved(path)


def _check_run(schedule: Schedule, events: Sequence[TimedAction]) -> None:
    """Raises ValueError unless a run has each action of the schedule once."""
    scheduled = Counter((rank, a) for rank, row in enumerate(schedule) for a in row)
    ran = Counter((event.rank, event.action) for event in events)
    for rank, action in (*scheduled, *ran):
        times, expected = ran[rank, action], scheduled[rank, action]
        if times != expected and action.is_compute:
            raise ValueError(
                f"rank {rank} ran {action} {times} times, and the schedule has it "
                f"{expected} times: measured= takes all events of one step by this "
                "schedule, as one ff.clock() around it records them on each rank"
            )


def _costs_of(events: Sequence[TimedAction]) -> Costs:
    """Returns the median times of each stage's actions.

    An action with several costs, as B is I and W, gives each an equal share, unless the
    run has the parts by themselves.
    """
    times: dict[tuple[tuple[str, ...], int], list[float]] = defaultdict(list)
    for _, action, start, end in events:
        times[action.traits.costs, action.stage].append(end - start)
    medians = {key: median(each) for key, each in times.items()}
    stages = range(1 + max(stage for _, stage in times))

    def of_stage(cost: str, stage: int) -> float:
        shares = (
            time / len(costs)
            for (costs, where), time in medians.items()
            if where == stage and cost in costs
        )
        return medians.get(((cost,), stage), next(shares, 0.0))

    names = {cost for kind in KINDS.values() for cost in kind.costs}
    times_of: dict[str, Any] = {n: [of_stage(n, s) for s in stages] for n in names}
    return Costs(**times_of)


def _merge_timelines(planned: Timeline, measured: Timeline) -> Timeline:
    """Merges two charts: each rank has two lanes, to the end of the longer step."""
    end = max(planned.makespan, measured.makespan)
    lanes: list[Lane] = []
    activations: list[float] = []
    for pair in zip(planned.lanes, measured.lanes, strict=True):
        for lane in pair:
            # The gaps of its own chart end with its own makespan.
            work = replace(lane, spans=tuple(lane.work))
            lanes.append(work.with_gaps(0.0, end, WAITS))
    for pair in zip(planned.held, measured.held, strict=True):
        activations += pair
    return Timeline(
        tuple(lanes), planned.makespan, tuple(activations), measured.makespan
    )


def _timeline_of(
    events: Iterable[tuple[int, Action, float, float]], n_ranks: int = 0
) -> Timeline:
    """Makes the timeline of events.

    Args:
        events: (rank, action, start, end).
        n_ranks: the number of ranks, if some of them have no events.
    """
    # Transfers are not drawn, as ranks compute meanwhile.
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
    has_chunks = any(len(stages_of(row)) > 1 for row in actions)
    lanes = []
    for rank, row in enumerate(rows):
        spans = tuple(
            Span(
                rank,
                COMPUTE,
                event.action.text(stage=has_chunks),
                str(event.action.stage),
                by_sign(event.action.kind).title,
                event.start - zero,
                event.end - zero,
            )
            for event in row
        )
        for previous, span in pairwise(spans):
            if span.start < previous.end - NOISE * makespan:
                raise ValueError(
                    f"rank {rank}: {span.name} starts at {span.start:.6g}, "
                    f"before {previous.name} ends at {previous.end:.6g}: a rank "
                    "computes one action at a time"
                )
        lanes.append(Lane(rank, COMPUTE, spans).with_gaps(0.0, makespan, WAITS))
    if not any(lane.busy for lane in lanes):
        raise ValueError("every action takes no time: give costs above 0")
    return Timeline(tuple(lanes), makespan, tuple(peak_microbatches(actions)))

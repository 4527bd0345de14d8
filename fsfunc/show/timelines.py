"""``timeline``: a schedule as one looks at it, in letters or as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from fsfunc.pipelining.actions import Action, Schedule, parse
from fsfunc.pipelining.timing import Costs, simulate
from fsfunc.show.lanes import Chart, draft
from fsfunc.show.lettering import lines
from fsfunc.show.palette import BORDER, COMPUTE, OUTSIDE, WAITS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Timeline", "timeline"]

STYLES = {kind: f"#000000 on {look.color}" for kind, look in COMPUTE.items()} | {
    WAITS: "bright_black",
    OUTSIDE: "bright_black",
    BORDER: "bright_black",
}


@dataclass(frozen=True, repr=False)
class Timeline:
    """A timeline to print: ``print(t)``, in colours by ``rich.print(t)``, or saved.

    Each rank has a row. ``F3`` is the forward of microbatch 3 (``F3@5``: of stage 5,
    where ranks have several), as wide as it lasts. A rank that waits between two
    of its actions shows ``░``; before its first and after its last it shows ``·``.
    """

    chart: Chart

    @classmethod
    def of_events(cls, events: Sequence[tuple[int, Action, float, float]]) -> Timeline:
        """The timeline of a recorded run.

        Args:
            events: (rank, action, start, end) of one step, times in seconds.

        Raises:
            TypeError, ValueError: events of another form, or actions of one rank that
                overlap.
        """
        return cls(draft(events))

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end."""
        return self.chart.makespan

    @property
    def bubble(self) -> tuple[float, ...]:
        """The time in which each rank computes nothing, of the makespan."""
        return tuple(lane.bubble for lane in self.chart.lanes)

    @property
    def held(self) -> tuple[float, ...]:
        """The most microbatch activations that each rank holds at once."""
        return tuple(lane.held for lane in self.chart.lanes)

    def text(self, width: int | None = 120) -> str:
        """The timeline as text of at most ``width`` columns, longer ones in bands.

        ``width=None`` makes one band, for a file that one scrolls.
        """
        rows = ("".join(run for run, _ in line) for line in lines(self.chart, width))
        return "\n".join(row.rstrip() for row in rows)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__  # what a prompt shows is the timeline

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        from rich.text import Text

        for line in lines(self.chart, options.max_width):
            row = [(run, STYLES.get(kind, "")) for run, kind in line]
            yield Text.assemble(*row, no_wrap=True, overflow="crop")

    def save(self, path: str | PathLike[str]) -> None:
        """Draw the timeline into a file: ``.png``, or ``.svg`` or ``.pdf``.

        A path without an ending gets ``.png``.

        Raises:
            ImportError: matplotlib is not there.
            ValueError: an ending that matplotlib has no format for.
        """
        from fsfunc.show.pictures import draw

        draw(self.chart, path)


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

    >>> from fsfunc.pipelining.alternating import one_f_one_b
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
    shown = Timeline(draft(simulate(rows, costs, edges=edges), len(rows)))
    if path is not None:
        shown.save(path)
    return shown

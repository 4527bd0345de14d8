"""The stages of the model under --pipe: what each has, where, and in what order."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from gpt import loss_fn
from options import STAGES_OF_A_RANK
from rich.console import Console

import fsfunc as ff
from fsfunc import show

Row = tuple[int, str, float, float]  # rank, action, start and end in seconds


class Stages(NamedTuple):
    schedule: ff.schedules.Schedule
    units: list[list[str]]  # the unit calls of each stage

    @property
    def counts(self) -> list[int]:
        return [len(names) for names in self.units]


def make_stages(
    args: Namespace,
    params_of: Callable[[Namespace], Any],
    batch_of: Callable[[Namespace], Any],
) -> Stages:
    """Stages of about equal FLOPs, and the schedule by which they run."""
    n = args.pipe * STAGES_OF_A_RANK[args.schedule]
    calls = ff.program(loss_fn, params_of(args), batch_of(args)).calls
    counts = ff.balance([call.flops for call in calls], n)
    names = (call.name for call in calls)
    units = [[next(names) for _ in range(count)] for count in counts]
    return Stages(getattr(ff.schedules, args.schedule)(n, args.microbatches), units)


def show_stages(console: Console, stages: Stages) -> None:
    """Prints which units each stage has, and the schedule as a timeline."""
    console.rule("stages, by their place along the axis pipe")
    owners = ff.schedules.owners(stages.schedule)
    for number, (rank, names) in enumerate(zip(owners, stages.units, strict=True)):
        runs = [(name, len(list(run))) for name, run in groupby(names)]
        shown = ", ".join(f"{n} x{count}" if count > 1 else n for n, count in runs)
        console.print(f"stage {number} on rank {rank}: {shown}")
    console.print()
    console.print(show.timeline(stages.schedule))


def as_rows(
    events: Iterable[tuple[int, ff.schedules.Action, float, float]],
) -> list[Row]:
    """What `ff.clock` gives, fit for JSON."""
    return [(rank, str(action), start, end) for rank, action, start, end in events]


def save_trace(path: Path, ranks: Sequence[Sequence[Row]]) -> None:
    """Writes the rows of all ranks for a trace viewer."""
    rows = [row for rows in ranks for row in rows]
    (actions,) = ff.schedules.parse([[text for _, text, _, _ in rows]])
    events = [(r, a, s, e) for (r, _, s, e), a in zip(rows, actions, strict=True)]
    show.trace(events, path)

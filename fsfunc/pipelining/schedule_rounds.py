"""Rounds of a schedule: a plan runs a few of them, and notes the others.

Between its first forwards and its last backwards a rank comes to the same actions again
and again, each time of later microbatches. What was in flight is then renamed, as if
the rounds that were noted had run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.pipelining.actions import Action, stretches


class ScheduleRounds:
    """The rounds of one rank's actions, as the rounds of a plan ask for them.

    Args:
        worker: the `runtime.Worker` that runs them.
        rounds: of the tracer: ``begin`` and ``after`` are called.
    """

    def __init__(self, worker: Any, rounds: Any):
        self.worker, self.rounds, self.actions = worker, rounds, worker.actions
        of = {(id(m.cut), m.share) for m in worker.microbatches}
        observed = any(h.observes for h in worker.frame.handlers)
        alike = len(of) == 1 and not observed
        # Parameters that change are no longer those that the round before has found.
        alike = alike and not any(a.of_kind.updates for a in self.actions)
        self.stretches = stretches(tuple(self.actions)) if alike else {}
        self.start = self.stop = self.size = self.by = 0  # of the stretch that runs

    def begin(self, at: int) -> None:
        """Hears that action ``at`` begins."""
        if at in self.stretches:
            self.size, self.by, more = self.stretches[at]
            self.start, self.stop = at, at + self.size * (1 + more)
            self.rounds.anew()
        a = self.actions[at]
        self.rounds.begin((a.kind, a.stage, a.peer), a.microbatch)

    def after(self, at: int) -> Sequence[Action]:
        """Hears that action ``at`` is over; returns the next ones that are noted."""
        here = at + 1
        if not self.start < here < self.stop or (here - self.start) % self.size:
            return ()
        ran = self.actions[here - self.size : here]
        flying = self._in_flight() | {a.microbatch for a in ran}
        first, left = ran[0].microbatch, (self.stop - here) // self.size
        handed = [self, *(runtime.sums for _, runtime in self.worker.frame.runtimes)]
        noted = self.rounds.after(
            handed,
            self._tables(first),
            left,
            first,
            by=self.by,
            flying=flying,
            stays=self._results(),
        )
        if noted:
            self._rename(noted, {a.microbatch for a in ran if a.of_kind.is_forward})
        return self.actions[here : here + noted * self.size]

    # What rounds hand on

    def carried(self) -> list[Tensor]:
        """The gradients so far."""
        return [x.grad for x in self.worker.values if x.grad is not None]

    def counts(self) -> None:
        """Nothing is counted."""

    def repeat(self, before: None, times: int) -> None:
        """Counts ``times`` more rounds: nothing."""

    def _in_flight(self) -> set[int]:
        return {key[2] for table in self.worker.tables for key in table}

    def _tables(self, first: int) -> list[Any]:
        """The values in flight, by microbatches after the ``first`` of a round."""
        return [
            sorted((str(k[0]), k[1], k[2] - first, *k[3:]) for k in table)
            for table in self.worker.tables
        ]

    def _results(self) -> list[Tensor]:
        """The tensors among the results of the last stage."""
        every = tree.leaves(self.worker.results)
        return [x for x in every if isinstance(x, Tensor)]

    def _rename(self, noted: int, forwards: set[int]) -> None:
        """Takes what is in flight for what the last round that is noted would leave."""
        worker, last = self.worker, noted * self.by
        made = {m: worker.results[m] for m in forwards if m in worker.results}
        for by in range(self.by, last + 1, self.by):
            stand_in = partial(self._stand_in, by)
            worker.results |= {m + by: tree.map(stand_in, x) for m, x in made.items()}
        for table in worker.tables:
            moved = {(*k[:2], k[2] + last, *k[3:]): x for k, x in table.items()}
            table.clear()
            table.update(moved)

    def _stand_in(self, by: int, x: Any) -> Any:
        return self.rounds.stand_in(x, by) if isinstance(x, Tensor) else x

"""Sends and receives written into a schedule of compute actions.

A send is right after the action that makes its tensors. A receive is before the compute
action that precedes its use, in the sender's order. Where blocking sends would then
wait for each other in a ring, a receive is moved further ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fsfunc.pipelining.actions import Action, Schedule, ScheduleError
from fsfunc.pipelining.player import (
    Dependencies,
    Edge,
    Player,
    Posting,
    made,
    other_end,
)
from fsfunc.pipelining.verification import verify


def with_transfers(schedule: Schedule, edges: Iterable[Edge] | None = None) -> Schedule:
    """Return the schedule with every send and receive written out.

    For each edge between two ranks and each microbatch there is one message from the
    producer to the consumer after the producer's F (`SF`, `RF`), and, where the
    schedule has backwards, one back after the consumer's B or I (`SB`, `RB`), however
    many tensors they carry. Edges within a rank send nothing. What comes back
    passes `verify` for the same edges.

    Args:
        schedule: compute actions alone.
        edges: pairs (producer stage, later consumer stage), over any distance; None:
            each stage feeds the next.

    Raises:
        ScheduleError: a schedule that has transfers already, or that `verify` refuses.

    >>> from fsfunc.pipelining.schedules import listing, one_f_one_b
    >>> print(listing(with_transfers(one_f_one_b(2, 2))))
    0: F0 SF0>1 RB0<1 F1 SF1>1 RB1<1 B0 B1
    1: RF0<0 F0 RF1<0 B0 SB0>0 F1 B1 SB1>0
    """
    edges = None if edges is None else set(edges)
    if any(not action.is_compute for row in schedule for action in row):
        raise ScheduleError("this schedule has transfers already: give it without")
    verify(schedule, edges=edges)
    computing = tuple(
        tuple(a for a in row if not a.of_kind.updates) for row in schedule
    )
    rows = _Lowering(computing, edges).run()
    return tuple(map(_with_updates, schedule, rows))


def _with_updates(
    row: tuple[Action, ...], lowered: tuple[Action, ...]
) -> tuple[Action, ...]:
    """Return a rank's lowered row with its updates.

    An update stays before its compute action, after sends to other ranks.
    """
    found: list[Action] = []
    rest = deque(row)
    for action in lowered:
        while action.is_compute and rest[0] != action:
            found.append(rest.popleft())
        if action.is_compute:
            rest.popleft()
        found.append(action)
    return (*found, *rest)


class _Lowering(Player):
    """The schedule simulated with blocking sends, to place receives.

    Every rank runs as far as it can. When none can run, the first one that waits in a
    send has its receive posted at the receiver's position. Ranks that can run stay able
    to, so the result runs to its end in any order of events.
    """

    def __init__(self, schedule: Schedule, edges: Iterable[Edge] | None) -> None:
        super().__init__()
        self.schedule = schedule
        self.dependencies = Dependencies(schedule, edges)
        self.dependencies.explicit = True  # what comes from other ranks is received
        self.rows: list[list[Action]] = [[] for _ in schedule]
        # Of each pair of ranks, what is not posted yet, in the sender's order.
        self.expected: dict[tuple[int, int], deque[Action]] = {}
        for row in schedule:
            for action in row:
                for send in self.dependencies.sends(action):
                    receive = other_end(send)
                    self.expected.setdefault(self._pair(receive), deque()).append(
                        receive
                    )

    def _pair(self, receive: Action) -> tuple[int, int]:
        """The sending and the receiving rank."""
        rank_of = self.dependencies.rank_of
        return rank_of[receive.peer or 0], rank_of[receive.stage]

    def run(self) -> Schedule:
        self.play(map(self._rank, self.schedule, self.rows))
        while blocked := [need for need in self.waits if isinstance(need, Posting)]:
            self._post(blocked[0].receive)
            self.go_on()
        return tuple(tuple(row) for row in self.rows)

    def _rank(self, row: Sequence[Action], made_row: list[Action]) -> Iterator[Any]:
        self._post_for(row[:2])
        for at, action in enumerate(row):
            yield from self.dependencies.needs(action)
            for name in made(action):
                self.happened(name)
            made_row.append(action)
            for send in self.dependencies.sends(action):
                receive = other_end(send)
                yield Posting(receive)
                self.happened(receive)
                made_row.append(send)
            self._post_for(row[at + 2 : at + 3])

    def _post_for(self, actions: Iterable[Action]) -> None:
        """Posts what these compute actions receive."""
        for action in actions:
            for need in self.dependencies.needs(action):
                if need.peer is not None:
                    self._post(need)

    def _post(self, receive: Action) -> None:
        """Posts a receive, and first those that its sender sends before it."""
        expected = self.expected[self._pair(receive)]
        while Posting(receive) not in self.times:
            first = expected.popleft()
            self.rows[self.dependencies.rank_of[first.stage]].append(first)
            self.happened(Posting(first))

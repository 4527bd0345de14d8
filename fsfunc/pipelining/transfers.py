"""Sends and receives written into a schedule of compute actions.

A send stands right after the action that makes its tensors. A receive stands before
the compute action that precedes its user, in the sender's order. Where that would let
blocking sends wait for each other in a ring, a receive moves further ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fsfunc.pipelining.actions import Action, Schedule, ScheduleError
from fsfunc.pipelining.dependencies import Dependencies, Edge, made, other_end
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
    computing = tuple(tuple(a for a in row if a.kind != "U") for row in schedule)
    rows = _Lowering(computing, edges).run()
    return tuple(map(_with_updates, schedule, rows))


def _with_updates(
    row: tuple[Action, ...], lowered: tuple[Action, ...]
) -> tuple[Action, ...]:
    """Return a rank's lowered row with its updates.

    An update stands before the compute action that it stood before: what goes to
    other ranks goes first.
    """
    found: list[Action] = []
    rest = list(row)
    for action in lowered:
        while action.is_compute and rest[0] != action:
            found.append(rest.pop(0))
        if action.is_compute:
            rest.pop(0)
        found.append(action)
    return (*found, *rest)


class _Lowering:
    """One run of the schedule with blocking sends, in which receives find a place.

    Every rank goes on as far as it can. When none can, the first one that stands in a
    send has the receive posted where the receiver stands. Ranks that can go on stay
    able to, so the lists that come out run through in any order of events.
    """

    def __init__(self, schedule: Schedule, edges: Iterable[Edge] | None) -> None:
        self.schedule = schedule
        self.dependencies = Dependencies(schedule, edges)
        self.dependencies.explicit = True  # what comes from other ranks is received
        self.rows: list[list[Action]] = [[] for _ in schedule]
        self.at = [0] * len(schedule)  # the next compute action of each rank
        self.sending: list[list[Action]] = [[] for _ in schedule]
        self.posted: set[Action] = set()
        self.done: set[Action] = set()
        self.expected: dict[
            tuple[int, int], deque[Action]
        ] = {}  # in the sender's order
        for rank, row in enumerate(schedule):
            for action in row:
                for send in self.dependencies.sends(action):
                    pair = rank, self._rank(other_end(send))
                    self.expected.setdefault(pair, deque()).append(other_end(send))

    def _rank(self, action: Action) -> int:
        return self.dependencies.rank_of[action.stage]

    def run(self) -> Schedule:
        ranks = range(len(self.schedule))
        for rank in ranks:
            self._post_for(rank, 0)
            self._post_for(rank, 1)
        while True:
            if any([self._go_on(rank) for rank in ranks]):
                continue
            blocked = next((rank for rank in ranks if self.sending[rank]), None)
            if blocked is None:
                return tuple(tuple(row) for row in self.rows)
            self._post(other_end(self.sending[blocked][0]), blocked)

    def _go_on(self, rank: int) -> bool:
        """Take the rank as far as it goes; return whether it moved."""
        moved = False
        while self._send(rank) or self._compute(rank):
            moved = True
        return moved

    def _send(self, rank: int) -> bool:
        sending = self.sending[rank]
        if not sending or other_end(sending[0]) not in self.posted:
            return False
        self.done.add(other_end(sending[0]))
        self.rows[rank].append(sending.pop(0))
        if not sending:
            self._post_for(rank, self.at[rank] + 1)
        return True

    def _compute(self, rank: int) -> bool:
        if self.sending[rank] or self.at[rank] == len(self.schedule[rank]):
            return False
        action = self.schedule[rank][self.at[rank]]
        if not self.done.issuperset(self.dependencies.needs(action)):
            return False
        self.done.add(made(action))
        self.rows[rank].append(action)
        self.at[rank] += 1
        self.sending[rank] = list(self.dependencies.sends(action))
        if not self.sending[rank]:
            self._post_for(rank, self.at[rank] + 1)
        return True

    def _post_for(self, rank: int, position: int) -> None:
        """Post what the compute action at that position receives."""
        if position < len(self.schedule[rank]):
            for need in self.dependencies.needs(self.schedule[rank][position]):
                if need.peer is not None:
                    self._post(need, self.dependencies.rank_of[need.peer])

    def _post(self, receive: Action, source: int) -> None:
        """Post a receive, and first those that its sender sends before it."""
        expected = self.expected[source, self._rank(receive)]
        while receive not in self.posted:
            first = expected.popleft()
            self.posted.add(first)
            self.rows[self._rank(receive)].append(first)

"""Sends and receives written into a schedule of compute actions.

`handler` calls `with_transfers` once for each cut of a loss, before a rank's actions
run. A send is placed right after the action that makes its tensors. A receive is posted
one compute action before its use, so that the message travels while that one computes;
receives from one rank are in the order of its sends. Where blocking sends would wait
for each other in a ring, a receive is moved further ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence

from fsfunc.pipelining.actions import Action, Schedule, ScheduleError
from fsfunc.pipelining.player import (
    Dependencies,
    Edge,
    Player,
    Posting,
    name_results,
    other_end,
)
from fsfunc.pipelining.verification import verify


def with_transfers(schedule: Schedule, edges: Iterable[Edge] | None = None) -> Schedule:
    """Returns the schedule with every send and receive written out.

    For each edge between two ranks and each microbatch there is one message from the
    producer to the consumer after the producer's F (`SF`, `RF`), and, where the
    schedule has backwards, one back after the consumer's B or I (`SB`, `RB`), however
    many tensors they carry. Edges within a rank send nothing. What comes back
    passes `verify` with the same edges.

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
    edges = None if edges is None else set(edges)  # they are read twice
    if any(not action.is_compute for row in schedule for action in row):
        raise ScheduleError("this schedule has transfers already: give it without")
    verify(schedule, edges=edges)
    # Updates send nothing and no other rank waits for them, so receives are placed
    # without them. `_with_updates` puts them back.
    computing = tuple(tuple(a for a in row if not a.traits.updates) for row in schedule)
    rows = _Lowering(computing, edges).run()
    return tuple(map(_with_updates, schedule, rows))


def _with_updates(
    row: tuple[Action, ...], lowered: tuple[Action, ...]
) -> tuple[Action, ...]:
    """Returns a rank's row of actions and transfers with its updates put back.

    An update comes after the transfers that precede its next compute action, so that
    other ranks get their gradients before this one updates.
    """
    merged: list[Action] = []
    remaining = deque(row)
    for action in lowered:
        while action.is_compute and remaining[0] != action:
            merged.append(remaining.popleft())
        if action.is_compute:
            remaining.popleft()
        merged.append(action)
    return (*merged, *remaining)


class _Lowering(Player):
    """A schedule played with blocking sends, which finds where receives belong.

    Every rank runs as far as it can. When none can run, the receive that the first
    blocked send waits for is posted where its receiver stands. To post a receive early
    never stops a rank that could run, so the rows end in any order of events.
    """

    def __init__(self, schedule: Schedule, edges: Iterable[Edge] | None) -> None:
        super().__init__()
        self.schedule = schedule
        self.dependencies = Dependencies(schedule, edges)
        self.dependencies.has_transfers = True  # so that needs are receives
        self.rows: list[list[Action]] = [[] for _ in schedule]
        # By (sending rank, receiving rank): receives to post, in the sender's order.
        self.unposted: dict[tuple[int, int], deque[Action]] = {}
        for row in schedule:
            for action in row:
                for send in self.dependencies.sends(action):
                    receive = other_end(send)
                    self.unposted.setdefault(self._rank_pair(receive), deque()).append(
                        receive
                    )

    def _rank_pair(self, receive: Action) -> tuple[int, int]:
        """Returns the sending and the receiving rank."""
        rank_of = self.dependencies.rank_of
        return rank_of[receive.peer or 0], rank_of[receive.stage]

    def run(self) -> Schedule:
        # `verify` has shown that compute actions alone end. So a rank that waits for
        # nothing but a posting is in a ring of blocking sends, and one receive more
        # always lets it go on.
        self.play(map(self._rank, self.schedule, self.rows))
        while blocked := [need for need in self.waits if isinstance(need, Posting)]:
            self._post(blocked[0].receive)
            self.run_awake()
        return tuple(tuple(row) for row in self.rows)

    def _rank(
        self, row: Sequence[Action], lowered_row: list[Action]
    ) -> Iterator[Hashable]:
        # A receive is posted one compute action before the one that needs it: while
        # that computes, the message travels.
        self._post_for(row[:2])
        for index, action in enumerate(row):
            yield from self.dependencies.needs(action)
            for name in name_results(action):
                self.record(name)
            lowered_row.append(action)
            for send in self.dependencies.sends(action):
                receive = other_end(send)
                yield Posting(receive)
                self.record(receive)
                lowered_row.append(send)
            self._post_for(row[index + 2 : index + 3])

    def _post_for(self, actions: Iterable[Action]) -> None:
        """Posts the receives that compute actions need."""
        for action in actions:
            for need in self.dependencies.needs(action):
                if need.peer is not None:
                    self._post(need)

    def _post(self, receive: Action) -> None:
        """Posts a receive, after those of what the same rank sends before it."""
        unposted = self.unposted[self._rank_pair(receive)]
        while Posting(receive) not in self.times:
            first = unposted.popleft()
            self.rows[self.dependencies.rank_of[first.stage]].append(first)
            self.record(Posting(first))

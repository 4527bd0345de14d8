"""The player: an event loop in which ranks take actions and wait for each other.

Each rank is a generator: it yields the name of an event that it waits for, and records
the events that it causes. There is no thread and no real clock; time is a number::

    rank 0:  F0 ──record(F0@0)──▶ ...      rank 1:  yield F0@0 ... F0, at its time

Four callers play what has an order on each rank: `verification` and `timing` a
schedule, to prove that it ends and to time it (`ScheduleRun`); `transfers` its compute
actions, to place sends and receives; `schedules.greedy` a schedule while it chooses
it; and `planning.simulation` the events of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from fsfunc.pipelining.actions import (
    BACKWARD,
    FORWARD,
    PART_SENT,
    Action,
    Schedule,
    ScheduleError,
    owners,
)

Edge = tuple[int, int]  # (producer stage, later consumer stage)


class Player:
    """An event loop over ranks, each an iterator of the events that it waits for.

    A rank continues once its event is recorded. Ranks that can continue do so in the
    order of time, then of ranks. A rank that yields None sleeps until :meth:`wake`.

    >>> player = Player()
    >>> def second():
    ...     yield "first"
    ...     print(f"second at {player.times['first']}, then for ever")
    ...     yield "third"
    >>> def first():
    ...     yield from ()
    ...     player.record("first", 2.0)
    >>> player.play([second(), first()])
    second at 2.0, then for ever
    >>> player.waits
    ['third', None]
    """

    def __init__(self) -> None:
        self.times: dict[Hashable, float] = {}  # of every recorded event
        self.waits: list[Hashable] = []  # each rank's awaited event; None: nothing
        self.now: float = 0
        self._ranks: list[Iterator[Hashable]] = []
        self._asleep: dict[Hashable, list[int]] = {}  # the ranks that await an event
        self._awake: list[tuple[float, int]] = []  # a heap of (time, rank)

    def record(self, event: Hashable, time: float = 0) -> None:
        """Records the time of an event, and wakes the ranks that wait for it."""
        self.times[event] = time
        # At the event's time, not now: whoever waited continues in the order of time.
        for rank in self._asleep.pop(event, ()):
            self.wake(rank, time)

    def wake(self, rank: int, time: float) -> None:
        heappush(self._awake, (time, rank))

    def play(self, ranks: Iterable[Iterator[Hashable]]) -> None:
        """Runs every rank until it ends, or waits for what nobody records."""
        self._ranks = list(ranks)
        self.waits = [None] * len(self._ranks)
        for rank in range(len(self._ranks)):
            self.wake(rank, 0)
        self.run_awake()

    def run_awake(self) -> None:
        """Runs the ranks that have been woken."""
        while self._awake:
            self.now, rank = heappop(self._awake)
            self.waits[rank] = None
            # The loop goes on in the rank's generator where it stopped the last time.
            for event in self._ranks[rank]:
                if event is None:
                    break
                if event not in self.times:
                    self.waits[rank] = event
                    self._asleep.setdefault(event, []).append(rank)
                    break


class Posting(NamedTuple):
    """The event that a receive is posted, for which its send waits."""

    receive: Action


class Dependencies:
    """The actions of a schedule that each of its actions waits for.

    An edge (p, c) says that stage c takes outputs of the earlier stage p: c's forward
    needs p's, and p's backward needs c's. Without edges each stage feeds the next.
    A need is an `Action` that names a part: gradients are "I", also where a whole
    backward "B" makes them. If the schedule has transfers, an action needs the receive
    that brings what another rank made; if not, it needs the other rank's action.
    """

    def __init__(self, schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
        self.rank_of: tuple[int, ...] = owners(schedule)
        stages = len(self.rank_of)
        chain = {(s, s + 1) for s in range(stages - 1)}
        self.edges: set[Edge] = chain if edges is None else set(edges)
        # An edge to an earlier stage would be a circle of forwards.
        for producer, consumer in self.edges:
            if not 0 <= producer < consumer < stages:
                raise ScheduleError(
                    f"the edge ({producer}, {consumer}) has to lead from a stage to a "
                    f"later one of the {stages}"
                )
        producers = [self._linked_stages(1, 0, s) for s in range(stages)]
        consumers = [self._linked_stages(0, 1, s) for s in range(stages)]
        # By direction and stage: the stages that messages come from, and go to.
        self.sources: dict[str, list[list[int]]]
        self.targets: dict[str, list[list[int]]]
        self.sources = {FORWARD: producers, BACKWARD: consumers}
        self.targets = {FORWARD: consumers, BACKWARD: producers}
        self.has_transfers: bool = any(
            not action.is_compute for actions in schedule for action in actions
        )

    def _linked_stages(self, end: int, far_end: int, stage: int) -> list[int]:
        return sorted(edge[far_end] for edge in self.edges if edge[end] == stage)

    def crosses(self, stage: int, other: int) -> bool:
        return self.rank_of[stage] != self.rank_of[other]

    def needs(self, action: Action) -> Iterator[Action]:
        """Yields what must have ended before the action starts."""
        kind, stage, microbatch = action.traits, action.stage, action.microbatch
        for part in kind.needs:
            yield Action(part, stage, microbatch)
        for source in self.sources[kind.incoming][stage] if kind.incoming else ():
            if self.has_transfers and self.crosses(source, stage):
                yield Action(f"R{kind.incoming}", stage, microbatch, source)
            else:
                yield Action(PART_SENT[kind.incoming], source, microbatch)

    def sends(self, action: Action) -> Iterator[Action]:
        """Yields the sends that follow a compute action."""
        stage, direction = action.stage, action.traits.outgoing
        for peer in self.targets[direction][stage] if direction else ():
            if self.crosses(stage, peer):
                yield Action(f"S{direction}", stage, action.microbatch, peer)


def name_results(action: Action) -> tuple[Action, ...]:
    """Returns the names by which others need an action's results: "I" and "W" of a "B".

    The first name is that of the result that other stages wait for.
    """
    parts = action.traits.parts
    if parts in ((), (action.kind,)):
        return (action,)
    return tuple(Action(part, action.stage, action.microbatch) for part in parts)


def other_end(transfer: Action) -> Action:
    """Returns the receive of a send, the send of a receive.

    >>> print(other_end(Action("SF", 0, 3, 1)))
    RF3@1<0
    """
    kind, peer = transfer.traits, transfer.peer
    if peer is None:
        raise ScheduleError(f"{transfer} is no transfer: it has no other end")
    letter = "R" if kind.transfer == ">" else "S"
    return Action(letter + kind.carries, peer, transfer.microbatch, transfer.stage)


class ScheduleRun(Player):
    """A schedule played: when each action starts, and what each rank waits for.

    The model is stricter than any backend, so that what ends here ends everywhere: a
    send blocks its rank until the receive is posted. A receive is posted without
    waiting, and the compute action that needs it waits for it. Blocking costs no time,
    and a message takes none of its ranks' time: it arrives ``send`` after the later of
    its send and the posting of its receive.

    Args:
        cost: the duration of a compute action.
        send: the time from a send to its arrival at another rank.

    ``starts`` has the start of each action that a rank came to. ``times`` has the ends:
    of compute actions by `name_results`, of messages by their receives.
    """

    dependencies: Dependencies
    cost: Callable[[Action], float]
    send: float

    def __init__(
        self,
        schedule: Schedule,
        dependencies: Dependencies,
        cost: Callable[[Action], float] = lambda action: 0,
        send: float = 0,
    ) -> None:
        super().__init__()
        self.dependencies, self.cost, self.send = dependencies, cost, send
        self.starts: list[list[float]] = [[] for _ in schedule]
        self.play(map(self._rank, schedule, self.starts))

    def _rank(self, row: Iterable[Action], starts: list[float]) -> Iterator[Hashable]:
        times, dependencies, free_at = self.times, self.dependencies, 0
        for action in row:
            start = free_at
            if action.is_compute:
                for need in dependencies.needs(action):
                    yield need
                    # A receive is recorded at its arrival. Without receives, what
                    # another rank made still has to travel.
                    travels = need.peer is None and dependencies.crosses(
                        need.stage, action.stage
                    )
                    start = max(start, times[need] + (self.send if travels else 0))
                free_at = start + self.cost(action)
                for name in name_results(action):
                    self.record(name, free_at)
            elif action.traits.transfer == "<":
                self.record(Posting(action), start)
            else:
                receive = other_end(action)
                yield Posting(receive)
                arrival = max(start, times[Posting(receive)]) + self.send
                self.record(receive, arrival)
            starts.append(start)

    def unmet_needs(self, action: Action) -> list[Action]:
        """Returns the needs of an action that were not met; of a send, its receive."""
        if action.is_compute:
            needs = self.dependencies.needs(action)
            return [need for need in needs if need not in self.times]
        return [other_end(action)]

"""The player: ranks that go through actions, and wait for each other's.

Whatever has an order on each rank is played by it: a schedule, to prove that it runs
and to time it; its compute actions alone, to find where sends and receives belong; a
schedule that is only being found; and the events of a plan. They differ in what a rank
does between two waits, and in what they note on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from fsfunc.pipelining.actions import (
    BACKWARD,
    FORWARD,
    MADE_BY,
    Action,
    Schedule,
    ScheduleError,
    owners,
)

Edge = tuple[int, int]  # (producer stage, later consumer stage)


class Player:
    """One event loop. A rank is an iterator that yields what it waits for.

    It continues when that has happened. Ranks that can continue do so in the order of
    time, then of ranks. A rank that yields None sleeps until :meth:`wake`.

    >>> player = Player()
    >>> def second():
    ...     yield "first"
    ...     print(f"second at {player.times['first']}, then for ever")
    ...     yield "third"
    >>> def first():
    ...     yield from ()
    ...     player.happened("first", 2.0)
    >>> player.play([second(), first()])
    second at 2.0, then for ever
    >>> player.waits
    ['third', None]
    """

    def __init__(self) -> None:
        self.times: dict[Hashable, float] = {}  # of all that has happened
        self.waits: list[Hashable] = []  # what each rank waits for; None: nothing
        self.now: float = 0
        self._ranks: list[Iterator[Hashable]] = []
        self._asleep: dict[Hashable, list[int]] = {}
        self._awake: list[tuple[float, int]] = []

    def happened(self, what: Hashable, time: float = 0) -> None:
        """Records the time of an event, and wakes the ranks that wait for it."""
        self.times[what] = time
        for rank in self._asleep.pop(what, ()):
            self.wake(rank, time)

    def wake(self, rank: int, time: float) -> None:
        heappush(self._awake, (time, rank))

    def play(self, ranks: Iterable[Iterator[Hashable]]) -> None:
        """Takes every rank as far as it goes."""
        self._ranks = list(ranks)
        self.waits = [None] * len(self._ranks)
        for rank in range(len(self._ranks)):
            self.wake(rank, 0)
        self.go_on()

    def go_on(self) -> None:
        """Runs the ranks that have been woken."""
        while self._awake:
            self.now, rank = heappop(self._awake)
            self.waits[rank] = None
            for what in self._ranks[rank]:
                if what is None:
                    break
                if what not in self.times:
                    self.waits[rank] = what
                    self._asleep.setdefault(what, []).append(rank)
                    break


class Posting(NamedTuple):
    """The posting of a receive, for which its send waits."""

    receive: Action


class Dependencies:
    """The needs of each action of a schedule.

    An edge (p, c) says that stage c takes outputs of the earlier stage p: c's forward
    needs p's, and p's backward needs c's. Without edges each stage feeds the next.
    What is needed is named by its part: gradients by "I", also where a whole backward
    "B" makes them. Where the schedule has transfers of its own, what another rank makes
    is needed in the form of the receive that brings it; else the action itself is.
    """

    def __init__(self, schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
        self.rank_of = owners(schedule)
        stages = len(self.rank_of)
        chain = {(s, s + 1) for s in range(stages - 1)}
        self.edges = chain if edges is None else set(edges)
        for producer, consumer in self.edges:
            if not 0 <= producer < consumer < stages:
                raise ScheduleError(
                    f"the edge ({producer}, {consumer}) has to lead from a stage to a "
                    f"later one of the {stages}"
                )
        producers = [self._ends(1, 0, s) for s in range(stages)]
        consumers = [self._ends(0, 1, s) for s in range(stages)]
        # Of a direction: by stage, those from which messages come and to which they go.
        self.sources = {FORWARD: producers, BACKWARD: consumers}
        self.targets = {FORWARD: consumers, BACKWARD: producers}
        self.explicit = any(not a.is_compute for row in schedule for a in row)

    def _ends(self, here: int, there: int, stage: int) -> list[int]:
        return sorted(edge[there] for edge in self.edges if edge[here] == stage)

    def crosses(self, stage: int, other: int) -> bool:
        return self.rank_of[stage] != self.rank_of[other]

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield what must be done before the action, receives meaning their end."""
        kind, stage, microbatch = action.of_kind, action.stage, action.microbatch
        for part in kind.needs:
            yield Action(part, stage, microbatch)
        for source in self.sources[kind.takes][stage] if kind.takes else ():
            if self.explicit and self.crosses(source, stage):
                yield Action(f"R{kind.takes}", stage, microbatch, source)
            else:
                yield Action(MADE_BY[kind.takes], source, microbatch)

    def sends(self, action: Action) -> Iterator[Action]:
        """Yield the sends that follow a compute action."""
        stage, direction = action.stage, action.of_kind.gives
        for peer in self.targets[direction][stage] if direction else ():
            if self.crosses(stage, peer):
                yield Action(f"S{direction}", stage, action.microbatch, peer)


def made(action: Action) -> tuple[Action, ...]:
    """Return the names under which others need the action: of a "B" its "I", and "W".

    The first is that of what it makes for other stages.
    """
    parts = action.of_kind.parts
    if parts in ((), (action.kind,)):
        return (action,)
    return tuple(Action(part, action.stage, action.microbatch) for part in parts)


def other_end(transfer: Action) -> Action:
    """Return the receive of a send, the send of a receive.

    >>> print(other_end(Action("SF", 0, 3, 1)))
    RF3@1<0
    """
    kind, peer = transfer.of_kind, transfer.peer
    if peer is None:
        raise ScheduleError(f"{transfer} is no transfer: it has no other end")
    letter = "R" if kind.transfer == ">" else "S"
    return Action(letter + kind.carries, peer, transfer.microbatch, transfer.stage)


class ScheduleRun(Player):
    """A schedule played: when each action starts, and what each rank waits for.

    The model is harder than any backend: a send blocks its rank until the receive has
    been posted, a receive is posted without waiting, and the compute action that needs
    it waits for it. Blocking takes no time, and neither does a message take any of its
    rank's: it arrives ``send`` after the later of its send and its receive's posting.

    Args:
        cost: of a compute action.
        send: from a send to its arrival at another rank.

    ``starts`` has those of the actions that each rank got to; ``times`` the ends, by
    what others need: the names `made` of compute actions, receives for messages.
    """

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
        times, dependencies, clock = self.times, self.dependencies, 0
        for action in row:
            start = clock
            if action.is_compute:
                for need in dependencies.needs(action):
                    yield need
                    # What is received has been on its way already.
                    sent = need.peer is None and dependencies.crosses(
                        need.stage, action.stage
                    )
                    start = max(start, times[need] + (self.send if sent else 0))
                clock = start + self.cost(action)
                for name in made(action):
                    self.happened(name, clock)
            elif action.of_kind.transfer == "<":
                self.happened(Posting(action), start)
            else:
                receive = other_end(action)
                yield Posting(receive)
                arrival = max(start, times[Posting(receive)]) + self.send
                self.happened(receive, arrival)
            starts.append(start)

    def missing(self, action: Action) -> list[Action]:
        """The unmet needs of an action; for a send, its receive."""
        if action.is_compute:
            needs = self.dependencies.needs(action)
            return [need for need in needs if need not in self.times]
        return [other_end(action)]

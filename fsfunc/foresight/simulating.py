"""A plan played through: when every rank does what, given what each thing costs.

Every rank that was planned has a stream that computes. Collectives run on streams
beside it, one for each group of ranks; messages on one for each pair of ranks and
direction. What comes out is the largest of sums of costs, so it does not depend on the
order in which ranks are looked at, and nothing gets earlier where a cost grows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsfunc.comm.backends.baton import Deadlock
from fsfunc.comm.ledgers import Record
from fsfunc.foresight.events import (
    Asked,
    Op,
    Ran,
    Replayed,
    Segment,
    Sent,
    Started,
    Took,
    Waited,
)
from fsfunc.foresight.plans import Plan, RankPlan
from fsfunc.foresight.transferring import Lane, Party, Transfer

__all__ = ["Played", "Prices", "RankTimes", "Span", "play_through"]

COMPUTE = "compute"


@dataclass(frozen=True)
class Prices:
    """What things cost, in seconds.

    Args:
        op, segment: of an operator, and of a body that is replayed as a whole.
        collective: of (its record, the ranks of its group).
        message: of (its bytes, the rank it comes from, the rank it goes to).
        taken: of so many bytes of memory that an operator takes, beside its use; None:
            nothing.
        overlap: the share of a transfer's time that costs computing nothing.
    """

    op: Callable[[Op], float]
    segment: Callable[[Segment], float]
    collective: Callable[[Record, tuple[int, ...]], float]
    message: Callable[[float, int, int], float]
    taken: Callable[[int, str], float] | None = None
    overlap: float = 1.0


class Span(NamedTuple):
    """What a stream of a rank does from ``start`` to ``end``, in seconds.

    On the stream ``compute``, all that a unit (or, where ``unit`` is "", nothing that
    has a name) runs in one phase without a wait in between; on a stream named after
    axes, a collective; on ``to 3`` and ``from 3``, a message.
    """

    rank: int
    stream: str
    name: str
    unit: str
    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTimes:
    """Where the time of one rank goes; the four add up to that of the step.

    Args:
        rank, alike: the one that was planned, and how many it stands for.
        compute: seconds in which it computes.
        exposed: in which it only waits for collectives in flight, and what
            transfers take from its computing.
        bubble: in which it waits for messages, or for a rank that runs another
            program to come to a collective.
        idle: from its own end to that of the last rank.
    """

    rank: int
    alike: int
    compute: float
    exposed: float
    bubble: float
    idle: float


class Played(NamedTuple):
    """A plan played through: seconds until all is over, and where they went."""

    seconds: float
    ranks: list[RankTimes]
    spans: list[Span]


class _Actor:
    """One planned rank on its way through its events."""

    def __init__(self, plan: RankPlan):
        self.plan, self.at = plan, 0
        self.clock = self.compute = self.exposed = self.bubble = 0.0
        self.pending: dict[int, Transfer] = {}  # issued and not yet waited for
        self.over: set[int] = set()
        self.spans: list[Span] = []
        self._unit, self._phase, self._start, self._end = "", "", 0.0, 0.0

    def work(self, seconds: float, unit: str, phase: str) -> None:
        """Computes: a part of the last span, where nothing has come in between."""
        start = self.clock
        self.clock += seconds
        self.compute += seconds
        if start != self._end or unit != self._unit or phase != self._phase:
            self.rest()
            self._unit, self._phase, self._start = unit, phase, start
        self._end = self.clock

    def rest(self) -> None:
        """What was computed since the last rest is one span."""
        if self._end > self._start:
            what = (self._unit or self._phase, self._unit, self._phase)
            self.spans.append(
                Span(self.plan.rank, COMPUTE, *what, self._start, self._end)
            )

    def wait(self, number: int, overlap: float) -> None:
        """Goes on when a transfer is over and what it took is made up for."""
        transfer = self.pending.pop(number)
        self.over.add(number)
        begun, end = self.clock, transfer.end or 0.0
        self.clock = max(begun + transfer.length * (1 - overlap), end)
        # Until the others came it was theirs to be late, and a message's whole way.
        late = end if transfer.lane.is_message else transfer.met
        bubble = max(late - begun, 0.0)
        self.bubble += bubble
        self.exposed += self.clock - begun - bubble


def play_through(plan: Plan, prices: Prices) -> Played:
    """The times of every planned rank, and the spans of all their streams.

    A collective starts when all planned ranks of its group have issued it and the one
    before it on their stream is over; members that were not planned run what a planned
    one runs, at the same time. The n-th message from one rank to another starts when
    it was sent and asked for and the one before is over. A step ends when all that it
    started is over. Streams do not take bandwidth from each other.

    A transfer of length t, waited for at time c and over at time e, lets its rank go on
    at max(e, c + (1 - overlap) t): what it took from the computing beside it is added
    where it is waited for. With overlap 0 a rank never does both at once.

    Raises:
        Deadlock: ranks that wait for each other, or for what is never issued.
        CollectiveMismatch: ranks that meet in different collectives.
        ValueError: a message of a rank that was not planned; a wait for what was not
            started.

    Cost: some microseconds an event.
    """
    return _Play(plan, prices).run()


class _Play:
    """One run of :func:`play_through`."""

    def __init__(self, plan: Plan, prices: Prices):
        self.plan, self.prices = plan, prices
        self.actors = [_Actor(r) for r in plan.ranks]
        self.lanes: dict[Any, Lane] = {}
        self.groups: dict[Any, Lane] = {}
        self.lengths: dict[Any, float] = {}
        self.costs: dict[Any, float] = {}
        self.ready = deque(self.actors)

    def run(self) -> Played:
        while self.ready:
            self._go_on(self.ready.popleft())
        stuck = [a for a in self.actors if a.at < len(a.plan.events) or a.pending]
        if stuck:
            raise Deadlock("no rank can go on: " + "; ".join(map(_state, stuck)))
        whole = max((a.clock for a in self.actors), default=0.0)
        times, spans = [], []
        for a in self.actors:
            a.rest()
            sums = (a.compute, a.exposed, a.bubble, whole - a.clock)
            times.append(RankTimes(a.plan.rank, a.plan.alike, *sums))
            spans += a.spans
        for lane in self.lanes.values():
            for t in lane.transfers:
                between = (t.start, t.end or 0.0)
                spans += [Span(*drawn, *between) for drawn in t.arrived.values()]
        return Played(whole, times, spans)

    def _go_on(self, actor: _Actor) -> None:
        """Plays a rank's events until one that must wait for another rank."""
        events, costs, prices = actor.plan.events, self.costs, self.prices
        while actor.at < len(events):
            event = events[actor.at]
            if isinstance(event, Ran):
                op = event.op
                if op not in costs:
                    costs[op] = prices.op(op)
                actor.work(costs[op], event.unit, event.phase)
            elif isinstance(event, Replayed):
                segment = event.segment
                if segment not in costs:
                    costs[segment] = prices.segment(segment)
                actor.work(costs[segment], event.unit, event.phase)
            elif isinstance(event, Waited):
                if not self._over(actor, event.number):
                    return
            elif isinstance(event, Took):
                if prices.taken is not None and event.op:
                    cost = prices.taken(event.bytes, event.op)
                    actor.work(cost, event.unit, event.phase)
            elif isinstance(event, (Started, Sent, Asked)):
                self._come(actor, event)
            actor.at += 1
        for number in list(actor.pending):
            if not self._over(actor, number):
                return

    def _over(self, actor: _Actor, number: int) -> bool:
        """Whether a transfer is over; if so, the rank has waited for it."""
        transfer = actor.pending.get(number)
        if transfer is None and number not in actor.over:
            raise ValueError(
                f"rank {actor.plan.rank} waits for number {number}, which it has not "
                f"started before event {actor.at}"
            )
        if transfer is None:
            return True
        if transfer.end is None:
            transfer.waiting.append(actor)
            return False
        actor.wait(number, self.prices.overlap)
        return True

    def _come(self, actor: _Actor, event: Started | Sent | Asked) -> None:
        rank = actor.plan.rank
        if isinstance(event, Started):
            r = event.record
            lane = self._group(event)
            party = Party(rank, "issued")
            key = (lane, r.op, r.bytes, r.dtype)
            if key not in self.lengths:
                self.lengths[key] = self.prices.collective(r, event.ranks)
            drawn = (rank, ", ".join(r.axis), r.op, r.unit, r.phase)
            what, length = r.op, self.lengths[key]
        elif isinstance(event, Sent):
            r, size = event.record, float(event.record.bytes)
            lane = self._pair(rank, event.to)
            party = Party(rank, "sent")
            drawn = (rank, f"to {event.to}", "send", r.unit, r.phase)
            what, length = "message", self.prices.message(size, rank, event.to)
        else:
            lane = self._pair(event.source, rank)
            party = Party(rank, "asked for")
            drawn = (rank, f"from {event.source}", "receive", "", "")
            what, length = "message", 0.0
        transfer = lane.come(party, what, actor.clock, length, drawn)
        actor.pending[event.number] = transfer
        if transfer.end is not None:
            self.ready.extend(transfer.waiting)
            transfer.waiting.clear()

    def _group(self, event: Started) -> Lane:
        """The stream of a collective's group: one for the planned ranks in it."""
        axis, ranks = event.record.axis, event.ranks
        key = (axis, len(ranks), ranks[0], ranks[-1])
        if key not in self.groups:
            found = {self._planned(rank) for rank in ranks} - {None}
            parties = frozenset(Party(p.rank, "issued") for p in found if p)
            names = ", ".join(f'"{name}"' for name in axis)
            lane = Lane(parties, f"over {names}", is_message=False)
            self.groups[key] = self.lanes.setdefault((axis, parties), lane)
        return self.groups[key]

    def _pair(self, source: int, to: int) -> Lane:
        """The stream of messages from one rank to another, or between such as they."""
        sender, receiver = self._planned(source), self._planned(to)
        if sender is None or receiver is None:
            missing = source if sender is None else to
            raise ValueError(
                f"rank {source} sends to rank {to}, but rank {missing} of "
                f"{self.plan.mesh} was not planned: plan the step for an abstract "
                "mesh, which looks at every distinct rank"
            )
        mesh = self.plan.mesh
        at, there = mesh.coordinates(source), mesh.coordinates(to)
        way = tuple((there[a] - at[a]) % size for a, size in mesh.axes.items())
        key = (sender.rank, receiver.rank, way)
        if key not in self.lanes:
            sides = (Party(sender.rank, "sent"), Party(receiver.rank, "asked for"))
            label = f"from rank {sender.rank} to rank {receiver.rank}"
            self.lanes[key] = Lane(frozenset(sides), label, is_message=True)
        return self.lanes[key]

    def _planned(self, rank: int) -> RankPlan | None:
        try:
            return self.plan[rank]
        except KeyError:
            return None  # the plan of one rank alone


def _state(actor: _Actor) -> str:
    """What a rank that cannot go on waits for, and who has not done their part."""
    events, rank = actor.plan.events, actor.plan.rank
    left = events[actor.at] if actor.at < len(events) else None
    # After its last event it waits for all that it has started.
    number = left.number if isinstance(left, Waited) else next(iter(actor.pending))
    t = actor.pending[number]
    parties = sorted(t.lane.parties - set(t.arrived))
    missing = " and ".join(f"rank {p.rank} has not {p.did} it" for p in parties)
    which = f"{t.what} {t.number} {t.lane.label}"
    return f"rank {rank} waits, at event {actor.at}, for {which}: {missing}"

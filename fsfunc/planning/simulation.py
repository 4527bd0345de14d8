"""Simulation of a plan: start and end of all that every rank does.

Every rank that was planned has a stream that computes. Collectives run on streams
beside it, one for each group of ranks; messages on one for each pair of ranks and
direction. What comes out is the largest of sums of costs, so it does not depend on the
order in which ranks are looked at, and nothing gets earlier where a cost grows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsfunc.comm.backends.baton import Deadlock
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.pipelining.player import Player
from fsfunc.planning import cost_model
from fsfunc.planning.events import Allocated, Op, Ran, Started, Waited
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, RankPlan


class Party(NamedTuple):
    """A rank's side of a transfer."""

    rank: int
    did: str  # "issued", "sent" or "asked for"


@dataclass(eq=False)
class Rendezvous:
    """One collective, or one message, from its first mention to its end."""

    stream: Stream
    number: int
    what: str
    arrived: dict[Party, Any] = field(default_factory=dict)  # spans without times
    met: float = 0.0  # when the last party came
    length: float = 0.0
    start: float = 0.0
    end: float | None = None


class Stream:
    """A stream between parties that meet in order: the n-th call of each is one."""

    def __init__(self, parties: frozenset[Party], label: str, is_message: bool):
        self.parties, self.label, self.is_message = parties, label, is_message
        self.transfers: list[Rendezvous] = []
        self.counts: dict[Party, int] = defaultdict(int)
        self.free = 0.0

    def come(
        self,
        party: Party,
        what: str,
        time: float,
        length: float,
        span: Any,
    ) -> Rendezvous:
        """The next one of ``party``, which issues it now."""
        number = self.counts[party]
        self.counts[party] += 1
        if number == len(self.transfers):
            self.transfers.append(Rendezvous(self, number, what))
        transfer = self.transfers[number]
        if transfer.what != what:
            others = ", ".join(str(p.rank) for p in transfer.arrived)
            raise CollectiveMismatch(
                f"call {number} {self.label} is a {what} of rank {party.rank} but a "
                f"{transfer.what} of rank {others}: all ranks of a group issue their "
                "collectives in one order"
            )
        transfer.arrived[party] = span
        transfer.met = max(transfer.met, time)
        transfer.length = max(transfer.length, length)
        if len(transfer.arrived) == len(self.parties):
            transfer.start = max(transfer.met, self.free)
            transfer.end = self.free = transfer.start + transfer.length
        return transfer


COMPUTE = "compute"
EXPOSED, BUBBLE = "exposed", "bubble"  # phases of spans in which a rank waits


class Span(NamedTuple):
    """An interval of a rank's stream, from ``start`` to ``end`` in seconds.

    On the stream ``compute``, all that a unit (or, where ``unit`` is "", nothing that
    has a name) runs in one phase without a wait in between; on a stream named after
    axes, a collective; on ``to 3`` and ``from 3``, a message. ``turn``: the microbatch
    that the rank is at, ``F3`` of a pipeline's schedule, ``F3@5`` of stage 5 where it
    has several, ``m3`` of ``accumulate``. ``bytes``: that it sends.
    """

    rank: int
    stream: str
    name: str
    unit: str
    phase: str
    start: float
    end: float
    turn: str = ""
    bytes: float = 0


@dataclass(frozen=True)
class RankTimes:
    """The time of one rank in four parts, which add up to that of the step.

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
    """A plan played through: seconds until all is over, and where they went.

    ``costs``: seconds of each distinct operator; ``waits``: spans in which a rank
    computes nothing, with the name and the unit of the transfer that it waits for.
    """

    seconds: float
    ranks: list[RankTimes]
    spans: list[Span]
    costs: dict[Op, float]
    waits: list[Span]


class _RankRun:
    """One planned rank on its way through its events."""

    def __init__(self, plan: RankPlan):
        self.plan, self.rank, self.at = plan, plan.rank, 0
        self.clock = self.compute = self.exposed = self.bubble = 0.0
        self.host = 0.0  # when the host has launched the last operator
        self.pending: dict[int, Rendezvous] = {}  # issued and not yet waited for
        self.over: set[int] = set()
        self.spans: list[Span] = []
        self.waits: list[Span] = []
        self.turn = ""
        self._what, self._start, self._end = ("", "", ""), 0.0, 0.0

    def work(self, seconds: float, unit: str, phase: str) -> None:
        """Computes: a part of the last span, where nothing has come in between."""
        start = self.clock
        self.clock += seconds
        self.compute += seconds
        what = (unit, phase, self.turn)
        if start != self._end or what != self._what:
            self.rest()
            self._what, self._start = what, start
        self._end = self.clock

    def launch(self, seconds: float, overhead: float, unit: str, phase: str) -> None:
        """Computes what the host launches ahead: it is over no sooner than launched."""
        self.host += overhead
        self.work(max(seconds, self.host - self.clock), unit, phase)

    def rest(self) -> None:
        """Ends the span of what was computed since the last rest."""
        if self._end > self._start:
            unit, phase, turn = self._what
            what, times = (unit or phase, unit, phase), (self._start, self._end)
            self.spans.append(Span(self.plan.rank, COMPUTE, *what, *times, turn))

    def wait(self, number: int, overlap: float) -> None:
        """Goes on when a transfer is over and what it took is made up for."""
        transfer = self.pending.pop(number, None)
        if transfer is None:
            if number in self.over:
                return
            raise ValueError(
                f"rank {self.plan.rank} waits for number {number}, which it has not "
                f"started before event {self.at}"
            )
        self.over.add(number)
        begun, end = self.clock, transfer.end or 0.0
        self.clock = max(begun + transfer.length * (1 - overlap), end)
        # Until the others came it was theirs to be late, and a message's whole way.
        late = end if transfer.stream.is_message else transfer.met
        bubble = max(late - begun, 0.0)
        self.bubble += bubble
        self.exposed += self.clock - begun - bubble
        for_it = next(s for p, s in transfer.arrived.items() if p.rank == self.rank)
        for phase, start, end in (
            (BUBBLE, begun, begun + bubble), (EXPOSED, begun + bubble, self.clock),
        ):  # fmt: skip
            if end > start:
                span = for_it._replace(stream=COMPUTE, phase=phase)
                self.waits.append(span._replace(start=start, end=end, turn=self.turn))


def play_through(
    plan: Plan, hardware: Hardware, attention: str | None = None
) -> Played:
    """The times of every planned rank, and the spans of all their streams.

    A collective starts when all planned ranks of its group have issued it and the one
    before it on their stream is over; members that were not planned run what a planned
    one runs, at the same time. The n-th message from one rank to another starts when
    it was sent and asked for and the one before is over. A step ends when all that it
    started is over. Streams do not take bandwidth from each other.

    A transfer of length t, waited for at time c and over at time e, lets its rank go on
    at max(e, c + (1 - hardware.overlap) t): what it took from the computing beside it
    is added where it is waited for. With overlap 0 a rank never does both at once.

    Where the hardware gives its ``processors``, its host launches an operator each
    ``overhead`` seconds from the start, and none is over before it is launched.
    Otherwise host and device are one, and the overhead is part of each cost.

    Raises:
        Deadlock: ranks that wait for each other, or for what is never issued.
        CollectiveMismatch: ranks that meet in different collectives.
        ValueError: a message of a rank that was not planned; a wait for what was not
            started.

    Cost: some microseconds an event.
    """
    return _PlanRun(plan, hardware, attention).run()


class _PlanRun(Player):
    """One run of :func:`play_through`."""

    def __init__(self, plan: Plan, hardware: Hardware, attention: str | None):
        super().__init__()
        self.plan, self.hardware, self.attention = plan, hardware, attention
        self.ranks = [_RankRun(r) for r in plan.ranks]
        self.streams: dict[Any, Stream] = {}
        self.groups: dict[Any, Stream] = {}
        self.lengths: dict[Any, float] = {}
        self.costs: dict[Op, float] = {}

    def run(self) -> Played:
        self.play(map(self._rank, self.ranks))
        stuck = [r for r in self.ranks if r.pending]
        if stuck:
            raise Deadlock("no rank can go on: " + "; ".join(map(_state, stuck)))
        whole = max((r.clock for r in self.ranks), default=0.0)
        times, spans, waits = [], [], []
        for r in self.ranks:
            r.rest()
            sums = (r.compute, r.exposed, r.bubble, whole - r.clock)
            times.append(RankTimes(r.plan.rank, r.plan.alike, *sums))
            spans += r.spans
            waits += r.waits
        for t in [t for stream in self.streams.values() for t in stream.transfers]:
            between = {"start": t.start, "end": t.end or 0.0}
            spans += [span._replace(**between) for span in t.arrived.values()]
        return Played(whole, times, spans, self.costs, waits)

    def _rank(self, run: _RankRun) -> Iterator[Rendezvous]:
        """Plays a rank's events; it waits for transfers alone."""
        costs, hardware = self.costs, self.hardware
        touching, overlap = hardware.fresh is not None, hardware.overlap
        turns = {turn.next_event: turn.label for turn in run.plan.turns}
        for at, event in enumerate(run.plan.events):
            run.at, run.turn = at, turns.get(at, run.turn)
            if isinstance(event, Ran):
                op = event.op
                if op not in costs:
                    costs[op] = cost_model.op_seconds(op, hardware, self.attention)
                if hardware.processors:
                    run.launch(costs[op], hardware.overhead, event.unit, event.phase)
                else:
                    run.work(costs[op], event.unit, event.phase)
            elif isinstance(event, Waited):
                if event.number in run.pending:
                    yield run.pending[event.number]
                run.wait(event.number, overlap)
            elif isinstance(event, Allocated):
                if touching and event.op:
                    cost = cost_model.taken_seconds(event.bytes, hardware, event.op)
                    run.work(cost, event.unit, event.phase)
            elif isinstance(event, Started):
                self._come(run, event)
        run.at = len(run.plan.events)
        for number in list(run.pending):
            yield run.pending[number]
            run.wait(number, overlap)

    def _come(self, run: _RankRun, event: Started) -> None:
        r, ranks, what, length = event.record, event.ranks, "message", 0.0
        if r is None:
            stream, shown = self._pair(*ranks), (f"from {ranks[0]}", "receive", "", "")
        elif event.part == "sent":
            (source, to), size = ranks, float(r.bytes)
            length = cost_model.message_seconds(size, source, to, self.hardware)
            stream, shown = self._pair(*ranks), (f"to {to}", "send", r.unit, r.phase)
        else:
            stream, what = self._group(r.axis, ranks), r.op
            key = (stream, r.op, r.bytes, r.dtype)
            if key not in self.lengths:
                length = cost_model.collective_seconds(r, ranks, self.hardware)
                self.lengths[key] = length
            length = self.lengths[key]
            shown = (", ".join(r.axis), r.op, r.owner, r.phase)
        party, size = Party(run.plan.rank, event.part), 0 if r is None else r.bytes
        span = Span(run.plan.rank, *shown, 0.0, 0.0, run.turn, float(size))
        transfer = stream.come(party, what, run.clock, length, span)
        run.pending[event.number] = transfer
        if transfer.end is not None:
            self.record(transfer, transfer.end)

    def _group(self, axis: tuple[str, ...], ranks: tuple[int, ...]) -> Stream:
        """The stream of a collective's group: one for the planned ranks in it."""
        key = (axis, len(ranks), ranks[0], ranks[-1])
        if key not in self.groups:
            found = {self._planned(rank) for rank in ranks} - {None}
            parties = frozenset(Party(p.rank, "issued") for p in found if p)
            names = ", ".join(f'"{name}"' for name in axis)
            stream = Stream(parties, f"over {names}", is_message=False)
            self.groups[key] = self.streams.setdefault((axis, parties), stream)
        return self.groups[key]

    def _pair(self, source: int, to: int) -> Stream:
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
        if key not in self.streams:
            sides = (Party(sender.rank, "sent"), Party(receiver.rank, "asked for"))
            label = f"from rank {sender.rank} to rank {receiver.rank}"
            self.streams[key] = Stream(frozenset(sides), label, is_message=True)
        return self.streams[key]

    def _planned(self, rank: int) -> RankPlan | None:
        try:
            return self.plan[rank]
        except KeyError:
            return None  # the plan of one rank alone


def _state(run: _RankRun) -> str:
    """A message for a rank that cannot go on: what it waits for, and who is missing."""
    events, rank = run.plan.events, run.plan.rank
    left = events[run.at] if run.at < len(events) else None
    # After its last event it waits for all that it has started.
    number = left.number if isinstance(left, Waited) else next(iter(run.pending))
    t = run.pending[number]
    parties = sorted(t.stream.parties - set(t.arrived))
    missing = " and ".join(f"rank {p.rank} has not {p.did} it" for p in parties)
    which = f"{t.what} {t.number} {t.stream.label}"
    return f"rank {rank} waits, at event {run.at}, for {which}: {missing}"

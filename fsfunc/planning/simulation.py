"""Simulation of a plan: when each rank computes, sends and waits.

`estimation.estimate` calls `play_through`. Each planned rank is a generator of the
`pipelining.player.Player`, which goes through its events: an operator moves the rank's
clock on, a collective starts when the last rank of its group has come, a wait moves
the clock to the end of what it waits for::

    rank 0  compute   ██ mm ██ mm ██ ▒ waits ▒██ mm ██
            "data"       ████ all_gather ████        one stream for each group of ranks

Each end is a maximum of sums of costs. So the result does not depend on the order in
which ranks are played, and no end gets earlier if a cost grows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fsfunc.comm.backends.baton import Deadlock
from fsfunc.comm.backends.link import CollectiveMismatch
from fsfunc.pipelining.player import Player
from fsfunc.planning import cost_model
from fsfunc.planning.events import Allocated, Op, Ran, Started, Waited
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, RankPlan


class Party(NamedTuple):
    """A rank's side of a transfer: ``part`` is "issued", "sent" or "asked for"."""

    rank: int
    part: str


@dataclass(eq=False)
class Rendezvous:
    """One collective or message, from when the first party comes to its end.

    Args:
        stream: on which it runs.
        number: its place there.
        kind: the collective's operation, or "message".
        arrived: the parties that have come, each with its span, without times.
        last_arrival: when the last party came, in seconds.
        duration: how long it takes, by the party that says most.
        start, end: when it runs; None until all parties have come.
    """

    stream: Stream
    number: int
    kind: str
    arrived: dict[Party, Span] = field(default_factory=dict)
    last_arrival: float = 0.0
    duration: float = 0.0
    start: float = 0.0
    end: float | None = None


class Stream:
    """The transfers between some parties, one after another.

    The n-th call of each party belongs to the n-th transfer, as collectives are matched
    by their order.
    """

    parties: frozenset[Party]
    label: str
    is_message: bool

    def __init__(self, parties: frozenset[Party], label: str, is_message: bool):
        self.parties, self.label, self.is_message = parties, label, is_message
        self.transfers: list[Rendezvous] = []
        self.counts: dict[Party, int] = defaultdict(int)
        self.free_at: float = 0.0

    def arrive(
        self,
        party: Party,
        kind: str,
        time: float,
        duration: float,
        span: Span,
    ) -> Rendezvous:
        """Returns the next transfer of ``party``, which comes to it at ``time``."""
        number = self.counts[party]
        self.counts[party] += 1
        if number == len(self.transfers):
            self.transfers.append(Rendezvous(self, number, kind))
        transfer = self.transfers[number]
        if transfer.kind != kind:
            others = ", ".join(str(p.rank) for p in transfer.arrived)
            raise CollectiveMismatch(
                f"call {number} {self.label} is a {kind} of rank {party.rank} but a "
                f"{transfer.kind} of rank {others}: all ranks of a group issue their "
                "collectives in one order"
            )
        # The receiver of a message does not know how long it takes: its sender does.
        transfer.arrived[party] = span
        transfer.last_arrival = max(transfer.last_arrival, time)
        transfer.duration = max(transfer.duration, duration)
        if len(transfer.arrived) == len(self.parties):
            transfer.start = max(transfer.last_arrival, self.free_at)
            transfer.end = self.free_at = transfer.start + transfer.duration
        return transfer


COMPUTE = "compute"
# Phases of spans in which a rank waits: for a transfer that runs, for another rank.
EXPOSED, BUBBLE = "exposed", "bubble"


class Span(NamedTuple):
    """An interval of a rank's stream, from ``start`` to ``end`` in seconds.

    Args:
        stream: ``compute``; the axes of a collective, joined by commas; ``to 3`` or
            ``from 3`` of a message.
        name: of the unit, the collective, "send" or "receive".
        unit: the unit that runs or communicates; "" for none. On ``compute`` a span is
            all that it runs in one phase without a wait in between.
        turn: the microbatch that the rank is at: ``F3`` of a pipeline's schedule,
            ``F3@5`` of stage 5 if it has several, ``m3`` of ``accumulate``.
        bytes: how much it sends.
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
        rank: the rank that was planned.
        alike: how many ranks it stands for.
        compute: the seconds in which it computes.
        exposed: those in which it only waits for collectives in flight, and those that
            transfers take from its computing.
        bubble: those in which it waits for messages, or for a rank with another program
            to come to a collective.
        idle: those from its own end to that of the last rank.
    """

    rank: int
    alike: int
    compute: float
    exposed: float
    bubble: float
    idle: float


class Played(NamedTuple):
    """A plan played through: seconds until all is over, and where they went.

    Args:
        spans: what each stream of each rank does.
        costs: the seconds of each distinct operator.
        waits: the spans in which a rank computes nothing, with the name and the unit of
            the transfer that it waits for.
    """

    seconds: float
    ranks: list[RankTimes]
    spans: list[Span]
    costs: dict[Op, float]
    waits: list[Span]


class _RankRun:
    """One planned rank on its way through its events.

    Attributes:
        event_number: the event that it is at.
        clock: its time; ``compute``, ``exposed`` and ``bubble`` are where that went.
        launched_at: when the host had launched the last operator.
        pending: by number, transfers that it started and has not waited for.
        issued_at: by number, when its host had launched its part of them.
        finished: the numbers of those that it has waited for.
        turn: the label of the microbatch that it is at.
    """

    def __init__(self, plan: RankPlan):
        self.plan, self.rank, self.event_number = plan, plan.rank, 0
        self.clock = self.compute = self.exposed = self.bubble = 0.0
        self.launched_at = 0.0
        self.pending: dict[int, Rendezvous] = {}
        self.issued_at: dict[int, float] = {}
        self.finished: set[int] = set()
        self.spans: list[Span] = []
        self.waits: list[Span] = []
        self.turn = ""
        self._label, self._span_start, self._span_end = ("", "", ""), 0.0, 0.0

    def work(self, seconds: float, unit: str, phase: str) -> None:
        """Computes for some seconds: in the last span, if nothing came in between."""
        start = self.clock
        self.clock += seconds
        self.compute += seconds
        label = (unit, phase, self.turn)
        # One span for all operators of a unit that follow each other: a chart of each
        # operator would be unreadable.
        if start != self._span_end or label != self._label:
            self.end_span()
            self._label, self._span_start = label, start
        self._span_end = self.clock

    def launch(self, seconds: float, overhead: float, unit: str, phase: str) -> None:
        """Computes what the host launches ahead, but not before it is launched."""
        self.launched_at += overhead
        self.work(max(seconds, self.launched_at - self.clock), unit, phase)

    def issue(self, overhead: float) -> float:
        """Has the host launch a transfer; returns when the device comes to it."""
        self.launched_at += overhead
        return max(self.clock, self.launched_at)

    def end_span(self) -> None:
        """Ends the span of what was computed last."""
        if self._span_end > self._span_start:
            unit, phase, turn = self._label
            name, times = unit or phase, (self._span_start, self._span_end)
            self.spans.append(
                Span(self.plan.rank, COMPUTE, name, unit, phase, *times, turn)
            )

    def wait(self, number: int, overlap: float) -> None:
        """Waits for a transfer, and makes up for what it took from computing.

        Args:
            overlap: the share of the transfer's time that goes on beside computing.
        """
        transfer = self.pending.pop(number, None)
        if transfer is None:
            if number in self.finished:  # a handle may be waited for twice
                return
            raise ValueError(
                f"rank {self.plan.rank} waits for number {number}, which it has not "
                f"started before event {self.event_number}"
            )
        self.finished.add(number)
        began, end = self.clock, transfer.end or 0.0
        self.clock = max(began + transfer.duration * (1 - overlap), end)
        # Time until the others came is a bubble, as is all the time of a message; the
        # rest is exposed communication, with what its own host was late by.
        others_late = end if transfer.stream.is_message else transfer.last_arrival
        alone_until = max(began, self.issued_at.pop(number, began))
        bubble = max(others_late - alone_until, 0.0)
        self.bubble += bubble
        self.exposed += self.clock - began - bubble
        own_span = next(s for p, s in transfer.arrived.items() if p.rank == self.rank)
        for phase, start, end in (
            (BUBBLE, began, began + bubble), (EXPOSED, began + bubble, self.clock),
        ):  # fmt: skip
            if end > start:
                span = own_span._replace(stream=COMPUTE, phase=phase)
                self.waits.append(span._replace(start=start, end=end, turn=self.turn))


def play_through(
    plan: Plan, hardware: Hardware, attention: str | None = None
) -> Played:
    """Returns the times of every planned rank, and the spans of all their streams.

    A collective starts when all planned ranks of its group have issued it and the one
    before it on their stream is over; members that were not planned run what a planned
    one runs, at the same time. The n-th message from one rank to another starts when
    it was sent and asked for and the one before is over. A step ends when all that it
    started is over. Streams do not take bandwidth from each other.

    A transfer of length t, waited for at time c and over at time e, lets its rank go on
    at max(e, c + (1 - hardware.overlap) t): what it took from the computing beside it
    is added where it is waited for. With overlap 0 a rank never does both at once.

    Where the hardware gives its ``processors``, its host launches an operator or a
    transfer each ``overhead`` seconds from the start. No operator is over, and no
    transfer starts, before it is launched: so a step takes at least what its rank's
    host takes for all of them.
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
    """One run of :func:`play_through`.

    Attributes:
        streams: by (axes, parties) or (sender, receiver, offset).
        group_streams: by a group's axes and ranks, the stream of ``streams``.
        durations: by stream and what a collective sends, its seconds.
        costs: by operator, its seconds.
    """

    def __init__(self, plan: Plan, hardware: Hardware, attention: str | None):
        super().__init__()
        self.plan, self.hardware, self.attention = plan, hardware, attention
        self.ranks = [_RankRun(r) for r in plan.ranks]
        self.streams: dict[Hashable, Stream] = {}
        self.group_streams: dict[Hashable, Stream] = {}
        self.durations: dict[Hashable, float] = {}
        self.costs: dict[Op, float] = {}

    def run(self) -> Played:
        self.play(map(self._rank, self.ranks))
        stuck = [run for run in self.ranks if run.pending]
        if stuck:
            raise Deadlock("no rank can go on: " + "; ".join(map(_state, stuck)))
        total = max((run.clock for run in self.ranks), default=0.0)
        times, spans, waits = [], [], []
        for run in self.ranks:
            run.end_span()
            parts = (run.compute, run.exposed, run.bubble, total - run.clock)
            times.append(RankTimes(run.plan.rank, run.plan.alike, *parts))
            spans += run.spans
            waits += run.waits
        for transfer in [
            t for stream in self.streams.values() for t in stream.transfers
        ]:
            times_of = {"start": transfer.start, "end": transfer.end or 0.0}
            spans += [span._replace(**times_of) for span in transfer.arrived.values()]
        return Played(total, times, spans, self.costs, waits)

    def _rank(self, run: _RankRun) -> Iterator[Rendezvous]:
        """Plays a rank's events; yields the transfers that it waits for."""
        costs, hardware = self.costs, self.hardware
        # Only memory that no caching allocator keeps costs when it is first written.
        costs_first_touch, overlap = hardware.fresh is not None, hardware.overlap
        turns = {turn.next_event: turn.label for turn in run.plan.turns}
        for number, event in enumerate(run.plan.events):
            run.event_number, run.turn = number, turns.get(number, run.turn)
            if isinstance(event, Ran):
                op = event.op
                if op not in costs:
                    costs[op] = cost_model.op_seconds(op, hardware, self.attention)
                # With `processors` given the host is modelled apart from the device.
                if hardware.processors:
                    run.launch(costs[op], hardware.overhead, event.unit, event.phase)
                else:
                    run.work(costs[op], event.unit, event.phase)
            elif isinstance(event, Waited):
                if event.number in run.pending:
                    yield run.pending[event.number]
                run.wait(event.number, overlap)
            elif isinstance(event, Allocated):
                if costs_first_touch and event.op:
                    cost = cost_model.taken_seconds(event.bytes, hardware, event.op)
                    run.work(cost, event.unit, event.phase)
            elif isinstance(event, Started):
                self._start_transfer(run, event)
        # A step ends when all that it started has ended.
        run.event_number = len(run.plan.events)
        for number in list(run.pending):
            yield run.pending[number]
            run.wait(number, overlap)

    def _start_transfer(self, run: _RankRun, event: Started) -> None:
        """Brings a rank to its transfer, and records its end if it came last."""
        record, ranks, kind, duration = event.record, event.ranks, "message", 0.0
        if record is None:
            stream = self._message_stream(*ranks)
            label = (f"from {ranks[0]}", "receive", "", "")
        elif event.part == "sent":
            (source, target), size = ranks, float(record.bytes)
            duration = cost_model.message_seconds(size, source, target, self.hardware)
            stream = self._message_stream(*ranks)
            label = (f"to {target}", "send", record.unit, record.phase)
        else:
            stream, kind = self._group_stream(record.axis, ranks), record.op
            key = (stream, record.op, record.bytes, record.dtype)
            if key not in self.durations:
                duration = cost_model.collective_seconds(record, ranks, self.hardware)
                self.durations[key] = duration
            duration = self.durations[key]
            label = (", ".join(record.axis), record.op, record.owner, record.phase)
        party = Party(run.plan.rank, event.part)
        n_bytes = 0 if record is None else record.bytes
        span = Span(run.plan.rank, *label, 0.0, 0.0, run.turn, float(n_bytes))
        # With `processors` given the host launches transfers as it does operators.
        issued_at = run.clock
        if self.hardware.processors:
            issued_at = run.issue(self.hardware.overhead)
        transfer = stream.arrive(party, kind, issued_at, duration, span)
        run.pending[event.number] = transfer
        run.issued_at[event.number] = issued_at
        if transfer.end is not None:
            self.record(transfer, transfer.end)

    def _group_stream(self, axis: tuple[str, ...], ranks: tuple[int, ...]) -> Stream:
        """Returns the stream of a collective's group.

        Its parties are the planned ranks that stand for the group's members.
        """
        key = (axis, len(ranks), ranks[0], ranks[-1])
        if key not in self.group_streams:
            planned = {self._planned_rank(rank) for rank in ranks} - {None}
            parties = frozenset(Party(plan.rank, "issued") for plan in planned if plan)
            names = ", ".join(f'"{name}"' for name in axis)
            stream = Stream(parties, f"over {names}", is_message=False)
            self.group_streams[key] = self.streams.setdefault((axis, parties), stream)
        return self.group_streams[key]

    def _message_stream(self, source: int, target: int) -> Stream:
        """Returns the stream of messages from one rank to another.

        Ranks that run the same programs at the same distance share a stream.
        """
        sender, receiver = self._planned_rank(source), self._planned_rank(target)
        if sender is None or receiver is None:
            missing = source if sender is None else target
            raise ValueError(
                f"rank {source} sends to rank {target}, but rank {missing} of "
                f"{self.plan.mesh} was not planned: plan the step for an abstract "
                "mesh, which looks at every distinct rank"
            )
        mesh = self.plan.mesh
        place, target_place = mesh.coordinates(source), mesh.coordinates(target)
        offset = tuple(
            (target_place[a] - place[a]) % size for a, size in mesh.axes.items()
        )
        key = (sender.rank, receiver.rank, offset)
        if key not in self.streams:
            parties = (Party(sender.rank, "sent"), Party(receiver.rank, "asked for"))
            label = f"from rank {sender.rank} to rank {receiver.rank}"
            self.streams[key] = Stream(frozenset(parties), label, is_message=True)
        return self.streams[key]

    def _planned_rank(self, rank: int) -> RankPlan | None:
        try:
            return self.plan[rank]
        except KeyError:
            return None  # the plan of one rank alone


def _state(run: _RankRun) -> str:
    """Returns what a rank that cannot go on waits for, and who is missing."""
    events, rank = run.plan.events, run.plan.rank
    event = events[run.event_number] if run.event_number < len(events) else None
    # After its last event it waits for all that it has started.
    number = event.number if isinstance(event, Waited) else next(iter(run.pending))
    transfer = run.pending[number]
    parties = sorted(transfer.stream.parties - set(transfer.arrived))
    missing = " and ".join(f"rank {p.rank} has not {p.part} it" for p in parties)
    which = f"{transfer.kind} {transfer.number} {transfer.stream.label}"
    return f"rank {rank} waits, at event {run.event_number}, for {which}: {missing}"

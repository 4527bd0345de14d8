"""Equal rounds of a loop in a plan: noted once more, in place of being run again.

The microbatches of ``accumulate`` are of one shape, and so are those of a pipeline,
whose schedule comes to the same actions again and again. Where one round found what is
held as the one before it had found it, the next would do the same with other storages:
its events are copied, with their numbers.

A loop says where each section of a round begins (`Rounds.begin`), and what it hands on
when a round is over (`Rounds.after`). Units and layers have no such loop: the user's
own Python runs them, and autograd, and a round of theirs cannot be left out. Where the
library knows that the loop's rounds are equal, all layers of a microbatch are noted at
once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.ledgers import Record
from fsfunc.core.tracers import Round
from fsfunc.planning.events import Gave, Ran, Started, Took, Waited


class LoopPart(NamedTuple):
    """The plan's counts when a part of a round began: ``what``, of a microbatch.

    Args:
        storages, events, turns, transfers, records: how many there were.
    """

    what: Hashable
    microbatch: int
    storages: int
    events: int
    turns: int
    transfers: int
    records: int


class _Mark(NamedTuple):
    """The state of a plan between two rounds.

    Args:
        looks: what the rounds hand on, but for its storages, and Python's own state.
        held: names of all other storages that are held, and of transfers under way.
        carried: the storages of what the rounds hand on; ``counts``: its counts.
        flying: the microbatches in flight.
        section: the number of the next section; ``end``: what it begins with.
        calls: of units.
    """

    looks: tuple[Any, ...]
    held: frozenset[Hashable]
    carried: tuple[int | None, ...]
    counts: list[dict[Hashable, int]]
    flying: frozenset[int]
    section: int
    end: LoopPart
    calls: dict[tuple[str, str], int]


class _Reference(NamedTuple):
    """An event that has the number of a storage, or of a transfer.

    Args:
        place: among the events of its section; ``event``: its class; ``rest``: all but
            its number.
        number: counted from where its owner begins.
        owner: a section, its microbatch and what is counted; None of what is carried.
    """

    place: int
    event: Any
    number: int
    owner: tuple[Hashable, int, str] | None
    rest: Any


_COUNTED = {kind: attrgetter(kind) for kind in ("storages", "transfers")}
_NUMBERED = {Took: "storages", Gave: "storages"}
_NUMBERED |= {Started: "transfers", Waited: "transfers"}


class Rounds:
    """The rounds of a loop, as an observer of a plan sees them.

    What a microbatch in flight took or started is named by the section that did it, and
    its number there: in the next round the same has that name, of a later microbatch.

    Args:
        observer: it; ``link``: its place, which numbers transfers and has the ledger.
        named: what comes before a microbatch's number at the end of records' names.
    """

    def __init__(self, observer: Any, link: Any, named: str = ""):
        self.named = named
        self.observer, self.link, self.book = observer, link, observer.book
        self.sections: list[LoopPart] = []
        self.places: dict[tuple[Hashable, int], int] = {}  # of sections
        self.before: _Mark | None = None
        self.alike: list[tuple[int, int]] = []  # storages, and those that became them

    def begin(self, what: Hashable, microbatch: int) -> LoopPart:
        """Hears that a section of a round begins, before its turn is noted."""
        self.places[what, microbatch] = len(self.sections)
        self.sections.append(section := self._now(what, microbatch))
        return section

    def anew(self) -> None:
        """Hears that what comes now is not a round like those before."""
        self.before = None

    def after(self, done: Round) -> int:
        """Hears that a round is over; returns how many of the next it has noted."""
        if done.remaining < 1:
            return 0
        last, now = self.before, self._mark(done)
        self.before = now
        if last is None or (last.looks, last.held) != (now.looks, now.held):
            return 0
        # Until its backward a body's copies of parameters are not told from others. And
        # of two storages that became one nobody knows which of them that will be.
        pairs = set(zip(last.carried, now.carried, strict=True))
        unique = len(pairs) == len(set(last.carried)) == len(set(now.carried))
        if self.observer.keeps_copies or not unique:
            return 0
        again = _RoundAgain(self, last, now)
        if not (again.is_closed and self._did_alike(done.in_flight)):
            return 0
        if not self._lie_apart(done.lasting):
            return 0
        for turn in range(1, done.remaining + 1):
            again.note(turn * done.stride)
        again.rename(done)
        for key, count in now.calls.items():
            self.observer.calls[key] += done.remaining * (
                count - last.calls.get(key, 0)
            )
        for each, counts in zip(done.carriers, last.counts, strict=True):
            for key, counted in each.carried().counted.items():
                counted.count += done.remaining * (counted.count - counts.get(key, 0))
        return done.remaining

    def end(self) -> None:
        """Hears that the loop is over, and all is known of what was held in it."""
        kinds = self.book.kinds
        for number, other in self.alike:
            if (kind := kinds.get(other)) is not None:
                kinds[number] = kind

    def stand_in(self, x: Tensor, by: int) -> Tensor:
        """A noted round's value in the place of ``x``, which this one left."""
        held, observer = self.book.held, self.observer
        before, observer.paused = observer.paused, True
        try:
            y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        finally:
            observer.paused = before
        held[y] = self.later(held.facts[_torch.storage_key(x)], by, "storages")
        return y

    # Names of storages and transfers

    def section(self, number: int, kind: str) -> LoopPart:
        """The section that took a storage, or started a transfer."""
        return self.sections[
            bisect_right(self.sections, number, key=_COUNTED[kind]) - 1
        ]

    def later(self, number: int, by: int, kind: str) -> int:
        """The storage or transfer of a later microbatch that is like one of these."""
        section = self.section(number, kind)
        there = self.sections[self.places[section.what, section.microbatch + by]]
        return number - getattr(section, kind) + getattr(there, kind)

    def is_flying(self, number: int, flying: Collection[int], kind: str) -> bool:
        """True if a storage or transfer is of a microbatch in flight."""
        before = not self.sections or number < getattr(self.sections[0], kind)
        return not before and self.section(number, kind).microbatch in flying

    def held(self, flying: Collection[int]) -> list[int]:
        """The storages of microbatches in flight that are held."""
        numbers = set(self.book.held.facts.values())
        return [n for n in numbers if self.is_flying(n, flying, "storages")]

    # Whether rounds are equal

    def _now(self, what: Hashable = None, microbatch: int = 0) -> LoopPart:
        book, link = self.book, self.link
        events, turns, records = book.events, book.turns, link.log.records
        sizes = len(book.sizes), len(events), len(turns), link.count, len(records)
        return LoopPart(what, microbatch, *sizes)

    def _mark(self, done: Round) -> _Mark:
        book, each = self.book, [one.carried() for one in done.carriers]
        tensors: list[Tensor] = [x for one in each for x in one.tensors]
        carried = tuple(book.held.get(x) for x in tensors)
        looks = [
            (x.dtype, x.shape, x.stride(), x.storage_offset(), x.requires_grad)
            for x in tensors
        ]

        def name(number: int, kind: str) -> Hashable:
            if not self.is_flying(number, done.in_flight, kind):
                return kind, number
            section = self.section(number, kind)
            since = section.microbatch - done.microbatch
            return kind, section.what, since, number - getattr(section, kind)

        others = set(book.held.facts.values())
        others = others.difference(carried, map(book.held.get, done.lasting))
        held = [name(number, "storages") for number in others]
        held += [name(move.number, "transfers") for move in self.link.under_way()]
        return _Mark(
            (done.state, *(len(one.tensors) for one in each), *looks),
            frozenset(held),
            carried,
            [{key: x.count for key, x in one.counted.items()} for one in each],
            frozenset(done.in_flight),
            len(self.sections),
            self._now(),
            dict(self.observer.calls),
        )

    def _did_alike(self, flying: Collection[int]) -> bool:
        """True if sections of one kind, of which something is held, did the same.

        That is their operators, the memory that they took, and gave back themselves.
        """
        known: dict[Hashable, list[Hashable]] = {}
        for section in {self.section(n, "storages") for n in self.held(flying)}:
            place = self.places[section.what, section.microbatch]
            end, did = [*self.sections, self._now()][place + 1].events, []
            for event in self.book.events[section.events : end]:
                if isinstance(event, Ran):
                    did.append(event)
                elif isinstance(event, Took):
                    did.append(event[1:])
                elif isinstance(event, Gave) and event.key >= section.storages:
                    did.append(event.key - section.storages)
            if known.setdefault(section.what, did) != did:
                return False
        return True

    def _lie_apart(self, stays: Sequence[Tensor]) -> bool:
        """True if each of these fills memory of its own."""
        numbers = [self.book.held.get(x) for x in stays]
        return (
            None not in numbers
            and len(set(numbers)) == len(numbers)
            and all(
                x.nbytes == x.untyped_storage().nbytes() and not x.requires_grad
                for x in stays
            )
        )


class _RoundAgain:
    """A round that is noted again, of later microbatches.

    Args:
        rounds: those; ``last``, ``now``: the marks before it and after it.

    Attributes:
        is_closed: whether it waits for and frees only what is carried, or in flight.
    """

    def __init__(self, rounds: Rounds, last: _Mark, now: _Mark):
        self.rounds, self.book, self.link = rounds, rounds.book, rounds.link
        self.now, self.is_closed = now, True
        # By each storage that was carried: that which is now, and as noted so far.
        self.became = dict(zip(last.carried, now.carried, strict=True))
        self.names: dict[Any, Any] = dict(self.became)
        sections = rounds.sections[last.section : now.section]
        self.flying = last.flying | {section.microbatch for section in sections}
        ends = [*sections[1:], now.end]
        self.parts = [
            (section, end, self._references(section, end))
            for section, end in zip(sections, ends, strict=True)
        ]

    def _references(self, section: LoopPart, end: LoopPart) -> list[_Reference]:
        references: list[_Reference] = []
        events = self.book.events[section.events : end.events]
        for place, event in enumerate(events):
            if (kind := _NUMBERED.get(type(event))) is None:
                continue
            number: Any = event[0]
            if type(event) is Gave and number in self.became:
                references.append(_Reference(place, Gave, event.key, None, ()))
            elif self.rounds.is_flying(number, self.flying, kind):
                by = self.rounds.section(number, kind)
                owner, number = (*by[:2], kind), number - getattr(by, kind)
                one = _Reference(place, type(event), number, owner, event[1:])
                references.append(one)
            else:
                self.is_closed = False
        return references

    def note(self, by: int) -> None:
        """Notes the round once more, of microbatches that come ``by`` later."""
        book, log, rounds = self.book, self.link.log, self.rounds
        starts: dict[Any, int] = {}  # where owners' later sections begin
        for section, end, references in self.parts:
            start = rounds.begin(section.what, section.microbatch + by)
            for i in range(section.storages, end.storages):
                if (kind := book.kinds.get(i)) is not None:
                    book.kinds[start.storages + i - section.storages] = kind
            book.sizes += book.sizes[section.storages : end.storages]
            for i, turn in enumerate(book.turns[section.turns : end.turns]):
                at = turn.at - section.events + start.events
                microbatch = turn.microbatch + (0 if i else by)  # the first is its own
                book.turns.append(turn._replace(at=at, microbatch=microbatch))
            self.link.count += end.transfers - section.transfers
            # Events of transfers have the ledger's own records, by identity.
            records = log.records[section.records : end.records]
            later = [self._later(record, section.microbatch, by) for record in records]
            record_of = dict(zip(map(id, records), later, strict=True))
            log.records += later
            events: list[Any] = book.events[section.events : end.events]
            for place, event, number, owner, rest in references:
                if owner is None:
                    events[place] = Gave(self.names[number])
                    continue
                if (first := starts.get(owner)) is None:
                    what, microbatch, kind = owner
                    there = rounds.sections[rounds.places[what, microbatch + by]]
                    first = starts[owner] = getattr(there, kind)
                if event is Started:
                    part, ranks, record = rest
                    record = record_of.get(id(record))
                    events[place] = Started(first + number, part, ranks, record)
                else:
                    events[place] = event(first + number, *rest)
            book.events += events
        self.names = {
            a: self.names[b]
            if b is None or b in self.names
            else rounds.later(b, by, "storages")
            for a, b in self.became.items()
        }

    def _later(self, record: Record, microbatch: int, by: int) -> Record:
        """The same record of a later microbatch."""
        named = self.rounds.named
        end = f"{named}{microbatch}"
        if not (named and record.what.endswith(end)):
            return record
        name = record.what.removesuffix(end)
        return replace(record, what=f"{name}{named}{microbatch + by}")

    def rename(self, done: Round) -> None:
        """Says of what is held, and under way, that it is of the last round noted."""
        rounds, held, by = self.rounds, self.book.held, done.stride
        # All storages of a kind that is told later are told that of the last round.
        for section, end, _ in self.parts:
            count = end.storages - section.storages
            own = [section.storages + i for i in range(count)]
            own = [n for n in own if n not in self.now.carried]
            *turns, last = (
                rounds.sections[rounds.places[section.what, section.microbatch + each]]
                for each in range(0, (done.remaining + 1) * by, by)
            )
            for turn in turns:
                rounds.alike += [
                    (n - section.storages + turn.storages,
                     n - section.storages + last.storages)
                    for n in own
                ]  # fmt: skip
        stays = set(map(held.get, done.lasting))
        ends: dict[Any, int] = {b: self.names[a] for a, b in self.became.items()}
        for number in rounds.held(self.now.flying):
            if number not in stays and number not in ends:
                ends[number] = rounds.later(number, done.remaining * by, "storages")
        rounds.alike += [(n, m) for n, m in ends.items() if n not in self.now.carried]
        for key, number in held.facts.items():
            held.facts[key] = ends.get(number, number)
        rounds.observer.chains.rename(ends)
        for move in self.link.under_way():
            if rounds.is_flying(move.number, self.now.flying, "transfers"):
                move.number = rounds.later(
                    move.number, done.remaining * by, "transfers"
                )

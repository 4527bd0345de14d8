"""Equal rounds of a loop in a plan: their events are copied, and they are not run.

The microbatches of ``accumulate`` have one shape, and so have those of a pipeline,
whose schedule comes to the same actions again and again. If a round begins with the
memory as the round before it began, the next round would do the same with other
storages. So its events are copied from the last round, with other numbers::

    round 1   runs                       marks are compared: storages alive, transfers
    round 2   runs, and began as 1 did   under way, shapes of what is handed on
    round 3.. are copies of round 2, in which storage 17 is storage 17 + 9, ...

`transforms.accumulation` and `pipelining.runtime.ScheduleRounds` call `Rounds.begin`
at each section of a round (an action, a microbatch), and `Rounds.after` with a
`core.tracers.Round` when a round is over. The layers of a model have no such loop: the
user's own Python and autograd run them, and cannot leave a layer out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.ledgers import Record
from fsfunc.comm.traffic import Ledger
from fsfunc.core.tracers import Round
from fsfunc.planning.device_kernels import FusedChains
from fsfunc.planning.events import (
    Allocated,
    Event,
    Freed,
    Ran,
    Reserved,
    ReservedTransfer,
    Started,
    Turn,
    Waited,
)
from fsfunc.runtime.memory import StorageTable


class LoopPart(NamedTuple):
    """Where a section of a round begins: the plan's counts at that moment.

    Args:
        kind: what the section does, equal for each microbatch.
        microbatch: on which.
        storages, events, turns, transfers, records: how many there were in the plan.
    """

    kind: Hashable
    microbatch: int
    storages: int
    events: int
    turns: int
    transfers: int
    records: int


class _Mark(NamedTuple):
    """The state of a plan between two rounds; a round is like the last if two agree.

    Args:
        state: the loop's own state, and shapes of the tensors that rounds hand on.
        live_names: names of all other storages that are alive, and of transfers under
            way, relative to the round's microbatch.
        carried: the storage numbers of the tensors that rounds hand on.
        counts: the counts that rounds hand on.
        in_flight: the microbatches in flight.
        section: the number of the next section.
        end: the plan's counts, with which that section will begin.
        calls: how often units ran.
    """

    state: tuple[Any, ...]
    live_names: frozenset[Hashable]
    carried: tuple[int | None, ...]
    counts: list[dict[Hashable, int]]
    in_flight: frozenset[int]
    section: int
    end: LoopPart
    calls: dict[tuple[str, str], int]


class _Reference(NamedTuple):
    """An event that names a storage or a transfer by its number.

    Args:
        index: the event's place in its section.
        event: its class.
        number: the number, counted from the first of the owner's section; for what
            rounds carry on, as it is.
        owner: the section that made the storage or started the transfer, as (kind,
            microbatch, "storages" or "transfers"); None for what rounds carry on.
        other_fields: the event's fields but its number.
    """

    index: int
    event: type[Event]
    number: int
    owner: tuple[Hashable, int, str] | None
    other_fields: Any


class NumberedTransfer(Protocol):
    """A transfer under way, whose number a round changes."""

    number: int


class RoundsLink(Protocol):
    """A `planner.PlannedLink`, as far as rounds read and write it."""

    log: Ledger
    count: int

    def under_way(self) -> Sequence[NumberedTransfer]: ...


class RoundsBook(Protocol):
    """An `observer.Book`, as far as rounds read and write it."""

    events: list[Event]
    turns: list[Turn]
    kinds: dict[int, str]
    sizes: list[int]
    storage_numbers: StorageTable[int]


class RoundsObserver(Protocol):
    """An `observer.Observer`, as far as rounds read and write it."""

    is_paused: bool
    calls: Counter[tuple[str, str]]
    chains: FusedChains

    @property
    def book(self) -> RoundsBook: ...
    @property
    def has_pending_copies(self) -> bool: ...


# What an event's number counts, and how a section says how many there were.
_COUNTED = {kind: attrgetter(kind) for kind in ("storages", "transfers")}
_NUMBERED = {Allocated: "storages", Freed: "storages"}
_NUMBERED |= {Started: "transfers", Waited: "transfers"}
_NUMBERED |= {Reserved: "storages", ReservedTransfer: "transfers"}


class Rounds:
    """The rounds of a loop in a plan, of which it notes those that would repeat.

    A storage or transfer of a microbatch in flight is named by the section that made
    it, and its number there: in the next round the one with the same name, of a later
    microbatch, takes its place.

    Args:
        observer: the plan's.
        link: numbers transfers, and has the ledger.
        infix: what stands before the microbatch's number, at the end of the names of
            messages.

    Attributes:
        section_numbers: by (kind, microbatch), the index in ``sections``.
        last_mark: the plan's state when the last round was over.
        kinds_from: pairs of storages of which the first is told its kind by the second.
    """

    observer: RoundsObserver
    link: RoundsLink
    book: RoundsBook

    def __init__(self, observer: RoundsObserver, link: RoundsLink, infix: str = ""):
        self.infix = infix
        self.observer, self.link, self.book = observer, link, observer.book
        self.sections: list[LoopPart] = []
        self.section_numbers: dict[tuple[Hashable, int], int] = {}
        self.last_mark: _Mark | None = None
        self.kinds_from: list[tuple[int, int]] = []

    def begin(self, kind: Hashable, microbatch: int) -> LoopPart:
        """Begins a section of a round, before its turn is recorded."""
        self.section_numbers[kind, microbatch] = len(self.sections)
        self.sections.append(section := self._position(kind, microbatch))
        return section

    def anew(self) -> None:
        """Forgets the last round: what comes now is not like those before."""
        self.last_mark = None

    def after(self, done: Round) -> int:
        """Ends a round; returns how many of the next ones it has noted.

        That is all that are left, or none.
        """
        if done.remaining < 1:
            return 0
        before, after = self.last_mark, self._mark(done)
        self.last_mark = after
        if before is None or (before.state, before.live_names) != (
            after.state,
            after.live_names,
        ):
            return 0
        # A body's copies of parameters are only told from its activations when its
        # backward begins. And where two carried storages became one, it is unknown
        # which of them the next round would write.
        pairs = set(zip(before.carried, after.carried, strict=True))
        unique = len(pairs) == len(set(before.carried)) == len(set(after.carried))
        if self.observer.has_pending_copies or not unique:
            return 0
        repeated = _RoundAgain(self, before, after)
        if not (repeated.is_closed and self._sections_repeat(done.in_flight)):
            return 0
        if not self._are_separate(done.lasting):
            return 0
        for n in range(1, done.remaining + 1):
            repeated.note(n * done.stride)
        repeated.rename(done)
        for key, count in after.calls.items():
            self.observer.calls[key] += done.remaining * (
                count - before.calls.get(key, 0)
            )
        for handed, counts in zip(done.carriers, before.counts, strict=True):
            for key, counted in handed.carried().counted.items():
                counted.count += done.remaining * (counted.count - counts.get(key, 0))
        return done.remaining

    def end(self) -> None:
        """Ends the loop: the kinds of all storages that ran are known now."""
        kinds = self.book.kinds
        for number, told_by in self.kinds_from:
            if (kind := kinds.get(told_by)) is not None:
                kinds[number] = kind

    def stand_in(self, x: Tensor, by: int) -> Tensor:
        """Returns the value that a noted round leaves, where this one left ``x``.

        Args:
            by: how much later the noted round's microbatches are.
        """
        numbers, observer = self.book.storage_numbers, self.observer
        was_paused, observer.is_paused = observer.is_paused, True
        try:  # the copied events have its storage already: it is not recorded anew
            y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        finally:
            observer.is_paused = was_paused
        numbers[y] = self.shift_number(
            numbers.facts[_torch.storage_key(x)], by, "storages"
        )
        return y

    # Names of storages and transfers

    def section_of(self, number: int, counted: str) -> LoopPart:
        """Returns the section that made a storage, or started a transfer."""
        return self.sections[
            bisect_right(self.sections, number, key=_COUNTED[counted]) - 1
        ]

    def shift_number(self, number: int, shift: int, counted: str) -> int:
        """Returns the number of the same storage or transfer of a later microbatch."""
        section = self.section_of(number, counted)
        later_section = self.sections[
            self.section_numbers[section.kind, section.microbatch + shift]
        ]
        return number - getattr(section, counted) + getattr(later_section, counted)

    def is_in_flight(
        self, number: int, in_flight: Collection[int], counted: str
    ) -> bool:
        """Returns whether a storage or transfer is of a microbatch in flight."""
        is_older = not self.sections or number < getattr(self.sections[0], counted)
        return not is_older and self.section_of(number, counted).microbatch in in_flight

    def live_in_flight(self, in_flight: Collection[int]) -> list[int]:
        """Returns the storages of microbatches in flight that are alive."""
        numbers = set(self.book.storage_numbers.facts.values())
        return [n for n in numbers if self.is_in_flight(n, in_flight, "storages")]

    # Whether rounds are equal

    def _position(self, kind: Hashable = None, microbatch: int = 0) -> LoopPart:
        book, link = self.book, self.link
        events, turns, records = book.events, book.turns, link.log.records
        sizes = len(book.sizes), len(events), len(turns), link.count, len(records)
        return LoopPart(kind, microbatch, *sizes)

    def _mark(self, done: Round) -> _Mark:
        book, carried_by = (
            self.book,
            [carried_one.carried() for carried_one in done.carriers],
        )
        tensors: list[Tensor] = [
            x for carried_one in carried_by for x in carried_one.tensors
        ]
        carried_numbers = tuple(book.storage_numbers.get(x) for x in tensors)
        traits = [
            (x.dtype, x.shape, x.stride(), x.storage_offset(), x.requires_grad)
            for x in tensors
        ]

        def name(number: int, counted: str) -> Hashable:
            if not self.is_in_flight(number, done.in_flight, counted):
                return counted, number
            section = self.section_of(number, counted)
            microbatches_since = section.microbatch - done.microbatch
            return (
                counted,
                section.kind,
                microbatches_since,
                number - getattr(section, counted),
            )

        other_numbers = set(book.storage_numbers.facts.values())
        other_numbers = other_numbers.difference(
            carried_numbers, map(book.storage_numbers.get, done.lasting)
        )
        live_names = [name(number, "storages") for number in other_numbers]
        live_names += [name(move.number, "transfers") for move in self.link.under_way()]
        return _Mark(
            (
                done.state,
                *(len(carried_one.tensors) for carried_one in carried_by),
                *traits,
            ),
            frozenset(live_names),
            carried_numbers,
            [
                {key: x.count for key, x in carried_one.counted.items()}
                for carried_one in carried_by
            ],
            frozenset(done.in_flight),
            len(self.sections),
            self._position(),
            dict(self.observer.calls),
        )

    def _sections_repeat(self, in_flight: Collection[int]) -> bool:
        """Returns whether sections of one kind, of which something is alive, did alike.

        That is: ran the same operators, and allocated and freed the same of their own
        storages. Else their storages have no counterparts in later microbatches.
        """
        deeds_by_kind: dict[Hashable, list[Hashable]] = {}
        for section in {
            self.section_of(n, "storages") for n in self.live_in_flight(in_flight)
        }:
            index = self.section_numbers[section.kind, section.microbatch]
            end, deeds = [*self.sections, self._position()][index + 1].events, []
            for event in self.book.events[section.events : end]:
                if isinstance(event, Ran):
                    deeds.append(event)
                elif isinstance(event, Allocated):
                    deeds.append(event[1:])
                elif isinstance(event, Freed) and event.storage >= section.storages:
                    deeds.append(event.storage - section.storages)
            if deeds_by_kind.setdefault(section.kind, deeds) != deeds:
                return False
        return True

    def _are_separate(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether each of these tensors fills a storage of its own."""
        numbers = [self.book.storage_numbers.get(x) for x in tensors]
        return (
            None not in numbers
            and len(set(numbers)) == len(numbers)
            and all(
                x.nbytes == x.untyped_storage().nbytes() and not x.requires_grad
                for x in tensors
            )
        )


class _RoundAgain:
    """A round that ran, to be noted again for later microbatches.

    Args:
        rounds: the loop's.
        before, after: the marks before it and after it.

    Attributes:
        is_closed: whether it waits for and frees only what is carried or in flight, so
            that each number in it has a counterpart in later rounds.
        next_storage: by storage that the round before carried, the one that took its
            place; ``latest_storage``: the one that took it in the last round noted.
        parts: its sections, with the counts at their ends and the numbers in them.
    """

    def __init__(self, rounds: Rounds, before: _Mark, after: _Mark):
        self.rounds, self.book, self.link = rounds, rounds.book, rounds.link
        self.mark_after, self.is_closed = after, True
        self.next_storage = dict(zip(before.carried, after.carried, strict=True))
        self.latest_storage: dict[int | None, Any] = dict(self.next_storage)
        sections = rounds.sections[before.section : after.section]
        self.in_flight = before.in_flight | {section.microbatch for section in sections}
        ends = [*sections[1:], after.end]
        self.parts = [
            (section, end, self._references(section, end))
            for section, end in zip(sections, ends, strict=True)
        ]

    def _references(self, section: LoopPart, end: LoopPart) -> list[_Reference]:
        """Returns the events of a section that name a storage or transfer."""
        references: list[_Reference] = []
        events = self.book.events[section.events : end.events]
        for index, event in enumerate(events):
            if (counted := _NUMBERED.get(type(event))) is None:
                continue
            number: Any = event[0]
            if type(event) is Freed and number in self.next_storage:
                references.append(_Reference(index, Freed, event.storage, None, ()))
            elif self.rounds.is_in_flight(number, self.in_flight, counted):
                maker = self.rounds.section_of(number, counted)
                owner, number = (*maker[:2], counted), number - getattr(maker, counted)
                reference = _Reference(index, type(event), number, owner, event[1:])
                references.append(reference)
            else:
                self.is_closed = False
        return references

    def note(self, shift: int) -> None:
        """Copies the round's events, sizes, turns and records for later microbatches.

        Args:
            shift: how much later.
        """
        book, log, rounds = self.book, self.link.log, self.rounds
        # By owner, the first number of its section in the later round.
        starts: dict[tuple[Hashable, int, str], int] = {}
        for section, end, references in self.parts:
            later_start = rounds.begin(section.kind, section.microbatch + shift)
            for i in range(section.storages, end.storages):
                if (kind := book.kinds.get(i)) is not None:
                    book.kinds[later_start.storages + i - section.storages] = kind
            book.sizes += book.sizes[section.storages : end.storages]
            # A section's first turn is its own. Further ones are of loops inside it,
            # whose microbatches have the same numbers in each round.
            for i, turn in enumerate(book.turns[section.turns : end.turns]):
                next_event = turn.next_event - section.events + later_start.events
                microbatch = turn.microbatch + (0 if i else shift)
                book.turns.append(
                    turn._replace(next_event=next_event, microbatch=microbatch)
                )
            self.link.count += end.transfers - section.transfers
            # Events of transfers have the ledger's own records, by identity.
            records = log.records[section.records : end.records]
            later_records = [
                self._later(record, section.microbatch, shift) for record in records
            ]
            record_of = dict(zip(map(id, records), later_records, strict=True))
            log.records += later_records
            events: list[Any] = book.events[section.events : end.events]
            for index, event, number, owner, other_fields in references:
                if owner is None:
                    events[index] = Freed(self.latest_storage[number])
                    continue
                if (first_number := starts.get(owner)) is None:
                    section_kind, microbatch, counted = owner
                    later_section = rounds.sections[
                        rounds.section_numbers[section_kind, microbatch + shift]
                    ]
                    first_number = starts[owner] = getattr(later_section, counted)
                if event is Started:
                    part, ranks, record = other_fields
                    record = record_of.get(id(record))
                    events[index] = Started(first_number + number, part, ranks, record)
                else:
                    events[index] = event(first_number + number, *other_fields)  # type: ignore
            book.events += events
        self.latest_storage = {
            a: self.latest_storage[b]
            if b is None or b in self.latest_storage
            else rounds.shift_number(b, shift, "storages")
            for a, b in self.next_storage.items()
        }

    def _later(self, record: Record, microbatch: int, shift: int) -> Record:
        """Returns the record of the same message for a later microbatch."""
        infix = self.rounds.infix
        end = f"{infix}{microbatch}"
        if not (infix and record.what.endswith(end)):
            return record
        name = record.what.removesuffix(end)
        return replace(record, what=f"{name}{infix}{microbatch + shift}")

    def rename(self, done: Round) -> None:
        """Renumbers what is alive and under way as the last noted round leaves it."""
        rounds, numbers, shift = self.rounds, self.book.storage_numbers, done.stride
        # What a storage is for is often known later, as for gradients at the step's
        # end. Then only the last round's storages are there to be told, and all
        # earlier rounds' take their kinds from them.
        for section, end, _ in self.parts:
            count = end.storages - section.storages
            made = [section.storages + i for i in range(count)]
            made = [n for n in made if n not in self.mark_after.carried]
            *middle_rounds, last_round = (
                rounds.sections[
                    rounds.section_numbers[section.kind, section.microbatch + n]
                ]
                for n in range(0, (done.remaining + 1) * shift, shift)
            )
            for part in middle_rounds:
                rounds.kinds_from += [
                    (n - section.storages + part.storages,
                     n - section.storages + last_round.storages)
                    for n in made
                ]  # fmt: skip
        staying = set(map(numbers.get, done.lasting))
        # By storage now, the one that the last noted round leaves in its place.
        final_number: dict[Any, int] = {
            b: self.latest_storage[a] for a, b in self.next_storage.items()
        }
        for number in rounds.live_in_flight(self.mark_after.in_flight):
            if number not in staying and number not in final_number:
                final_number[number] = rounds.shift_number(
                    number, done.remaining * shift, "storages"
                )
        rounds.kinds_from += [
            (n, m) for n, m in final_number.items() if n not in self.mark_after.carried
        ]
        for key, number in numbers.facts.items():
            numbers.facts[key] = final_number.get(number, number)
        rounds.observer.chains.rename(final_number)
        for move in self.link.under_way():
            if rounds.is_in_flight(move.number, self.mark_after.in_flight, "transfers"):
                move.number = rounds.shift_number(
                    move.number, done.remaining * shift, "transfers"
                )

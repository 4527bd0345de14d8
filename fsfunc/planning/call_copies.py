"""Copies of the events of unit calls, for equal calls that a plan has not run.

Where `left_out_calls` has left out the middle of a run of equal calls, the events of
those that ran are put into their places, once the step is over. A storage is named by
the call that made it, and its number there; in a copy, the storage with the same name
of as much later a call takes its place::

    5      allocates its 0th, 1st; frees the 1st of call 4
    6..93  are copies: call i allocates its 0th and 1st, frees the 1st of call i - 1
    94     ran after 5, and has freed the 1st of 5: it frees the 1st of call 93

In the backward calls come in the other order, and free what the forwards made too. So
do transfers, and the names of the buffers in the ledger.

`KEPT` calls ran at each end. All but the outermost must have done the same, by these
names, or `UnlikeCalls` is raised; as it is where a copy would keep something alive that
nothing stands for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from fsfunc.comm.ledgers import Record
from fsfunc.planning.events import (
    Allocated,
    CallBegan,
    Event,
    Freed,
    Provisional,
    Ran,
    Reserved,
    ReservedTransfer,
    Started,
    Turn,
    Waited,
)
from fsfunc.planning.left_out_calls import KEPT, OUTERMOST, UnlikeCalls


class StepNotes(NamedTuple):
    """What a plan has noted of a step: see `plans.RankPlan`."""

    events: Sequence[Any]
    turns: Sequence[Turn]
    kinds: dict[int, str]
    records: Sequence[Record]


def with_copies(noted: StepNotes, storage_count: int, transfer_count: int) -> StepNotes:
    """Returns a plan with copies in the places of the calls that were left out.

    Args:
        noted: of the calls that ran, with marks of where calls began.
        storage_count, transfer_count: of which new numbers are counted on.

    Raises:
        UnlikeCalls: a call was not like the others.
    """
    writer = _Writer(noted, storage_count, transfer_count)
    writer.write_all()
    return writer.written()


@dataclass(eq=False)
class _Calls:
    """One pass through the calls of a run, forward or backward.

    Attributes:
        sections: by the index of a call, its events.
    """

    run: int
    count: int
    is_backward: bool
    sections: dict[int, _Section] = field(default_factory=dict, repr=False)

    @property
    def left_out(self) -> range:
        return range(KEPT, self.count - KEPT)

    def is_compared(self, index: int) -> bool:
        """Returns whether a call is to be like others: all but the outermost are."""
        is_inside = OUTERMOST <= index < self.count - OUTERMOST
        return is_inside and index not in self.left_out

    def beside(self, index: int, other: int) -> int:
        """Returns the call that ``other`` stands for, as a neighbour of ``index``.

        The calls on both sides of the ones that were left out ran next to each other.
        """
        is_across = (index < self.left_out.start) != (other < self.left_out.start)
        return self.across(other) if is_across else other

    def across(self, index: int) -> int:
        """Returns the call that one stands for, to those on the other side."""
        n = len(self.left_out)
        return index + n if index < self.left_out.start else index - n


@dataclass(eq=False)
class _Section:
    """The events of a call, from its mark to the next one.

    Args:
        calls: None of what lies between runs.
        start, stop: their range in the events of the plan.

    Attributes:
        storages, transfers: the numbers of what it made, in order.
        reserved: by place among them, the number of one that is in use; so
            ``reserved_transfers``.
        records: those of its collectives.
    """

    calls: _Calls | None
    index: int
    start: int
    stop: int = 0
    storages: list[int] = field(default_factory=list)
    transfers: list[int] = field(default_factory=list)
    reserved: dict[int, int] = field(default_factory=dict)
    reserved_transfers: dict[int, int] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    @property
    def is_left_out(self) -> bool:
        return self.calls is not None and self.index in self.calls.left_out


class _Name(NamedTuple):
    """A storage or transfer, by the call that made it, seen from another call.

    Args:
        calls: the pass that made it; ``offset``: how much later a call.
        place: which one of that call's.
    """

    calls: _Calls
    offset: int
    place: int


# (place among the events, the event's class, the name, the other fields)
_Reference: TypeAlias = tuple[int, type, _Name, tuple[Any, ...]]
_Owner: TypeAlias = tuple[_Section, int]


class _Writer:
    """Writes the events of a plan anew, with copies.

    Attributes:
        sections: all events, in parts.
        owner_of_storage, owner_of_transfer: by number, the section that made it, and
            its place there.
        buffers: by run and call, the names of the buffers that it reads.
        written_at: by section, how many events were written before it.
        new_storages, new_transfers: made by copies, and not freed or awaited so far.
        freed: all storages that were freed.
        stand_ins: the numbers of what stands for things of calls that were left out.
        left_to_copies: those that stood for something, and were freed as nothing else
            stood for it: copies have to free them.
    """

    def __init__(self, noted: StepNotes, storage_count: int, transfer_count: int):
        self.noted = noted
        self.storage_count, self.transfer_count = storage_count, transfer_count
        self.kinds = dict(noted.kinds)
        self.sections: list[_Section] = []
        self.owner_of_storage: dict[int, _Owner] = {}
        self.owner_of_transfer: dict[int, _Owner] = {}
        self.buffers: dict[tuple[int, int], tuple[str, ...]] = {}
        self.calls_of_buffer: dict[tuple[int, str | None], tuple[int, int]] = {}
        self.events: list[Any] = []
        self.records: list[Record] = []
        self.written_at: list[int] = []
        self.new_storages: set[int] = set()
        self.new_transfers: set[int] = set()
        self.freed: set[int] = set()
        self.left_to_copies: set[int] = set()
        self.stand_ins: set[tuple[type, int]] = set()
        self._next_record = 0  # in the records of the plan as it was
        self._templates: dict[tuple[_Calls, int], _Template] = {}
        self._find_sections()

    # What there is

    def _find_sections(self) -> None:
        """Parts the events by their marks."""
        open_calls: dict[tuple[int, bool], _Calls] = {}
        section = _Section(None, 0, 0)
        self.sections.append(section)
        stand_ins: list[tuple[_Calls | None, Reserved | ReservedTransfer]] = []
        for place, event in enumerate(self.noted.events):
            kind = type(event)
            if kind is CallBegan:
                section.stop = place
                key = event.run, event.is_backward
                is_over = event.index == event.count
                is_first = event.index == (event.count - 1 if event.is_backward else 0)
                if is_first:
                    open_calls[key] = _Calls(event.run, event.count, event.is_backward)
                calls = None if is_over else open_calls.get(key)
                if calls is None and not is_over:
                    raise UnlikeCalls("a backward did not come by the last call")
                section = _Section(calls, event.index, place)
                if calls is not None:
                    calls.sections[event.index] = section
                    self._note_buffers(event)
                self.sections.append(section)
            elif kind is Allocated:
                self.owner_of_storage[event.storage] = section, len(section.storages)
                section.storages.append(event.storage)
            elif kind is Started:
                self.owner_of_transfer[event.number] = section, len(section.transfers)
                section.transfers.append(event.number)
                if event.record is not None:
                    section.records.append(event.record)
            elif kind is Reserved or kind is ReservedTransfer:
                stand_ins.append((section.calls, event))
        section.stop = len(self.noted.events)
        for calls, event in stand_ins:
            self._place_stand_in(calls, event)

    def _place_stand_in(
        self, calls: _Calls | None, event: Reserved | ReservedTransfer
    ) -> None:
        """Has a call make what stands for a thing of a call that was left out."""
        maker = None if calls is None else calls.sections.get(event.index)
        if calls is None or maker is None:
            raise UnlikeCalls("something stands for what no call makes")
        is_storage, number, place = type(event) is Reserved, event[0], event.place
        self.stand_ins.add((type(event), number))
        if not maker.is_left_out:
            # What this call has made, next to a call on the other side of those left
            # out, is what another one made for that call.
            numbers = maker.storages if is_storage else maker.transfers
            if not calls.is_compared(event.index) or place >= len(numbers):
                raise UnlikeCalls("something stands for what an outermost call makes")
            numbers[place], number = number, numbers[place]
            maker = calls.sections.get(calls.across(event.index))
            if maker is None:
                raise UnlikeCalls("a call that was left out has no backward")
        reserved = maker.reserved if is_storage else maker.reserved_transfers
        if reserved.setdefault(place, number) != number:
            raise UnlikeCalls("two things stand for one")

    def _note_buffers(self, event: CallBegan) -> None:
        if not event.is_backward:
            self.buffers[event.run, event.index] = event.buffers
            for i, name in enumerate(event.buffers):
                self.calls_of_buffer[event.run, name] = event.index, i

    # What is written

    def write_all(self) -> None:
        """Writes all sections, in order."""
        for section in self.sections:
            calls = section.calls
            self.written_at.append(len(self.events))
            if section.is_left_out:
                self._write_copy(section)
            elif calls is None or not calls.is_compared(section.index):
                self._write(section, list(self._events_of(section)))
            else:
                template = self._template(calls, section.index)
                first = self._template(calls, _first_compared(calls))
                if template.deeds != first.deeds:
                    raise UnlikeCalls("a call did something else than those before it")
                self._write(section, template.renamed(self, section.index, section))
        self.records += self.noted.records[self._next_record :]
        kept = self.left_to_copies - self.freed
        if kept or self.new_storages or self.new_transfers:
            raise UnlikeCalls("a call keeps what nothing stands for")

    def written(self) -> StepNotes:
        """Returns the plan with all that was written."""
        starts = [section.start for section in self.sections]

        def moved(turn: Turn) -> Turn:
            # Before its own section, and of that the part before it. Each but the
            # first begins with a mark, which is not written.
            number = bisect_right(starts, turn.next_event) - 1
            before = turn.next_event - starts[number] - (number > 0)
            place = self.written_at[number] + max(before, 0)
            return turn._replace(next_event=place)

        turns = list(map(moved, self.noted.turns))
        return StepNotes(self.events, turns, self.kinds, self.records)

    def _events_of(self, section: _Section) -> Iterator[Event]:
        events = self.noted.events[section.start : section.stop]
        return (e for e in events if not isinstance(e, Provisional))

    def _write(self, section: _Section, events: list[Any]) -> None:
        """Writes the events of calls that ran."""
        for event in events:
            if type(event) is Started and event.record is not None:
                self._write_records(section, event.record)
        self._extend(events)

    def _write_records(self, section: _Section, record: Record) -> None:
        """Writes the ledger's records up to that of a transfer, perhaps renamed."""
        original, records = section.records.pop(0), self.noted.records
        while records[self._next_record] is not original:
            self.records.append(records[self._next_record])
            self._next_record += 1
        self.records.append(record)
        self._next_record += 1

    def _extend(self, events: list[Any]) -> None:
        for event in events:
            kind = type(event)
            if kind is Freed:
                if event.storage in self.freed:
                    raise UnlikeCalls("a call frees what another one has freed")
                self.freed.add(event.storage)
                self.new_storages.discard(event.storage)
            elif kind is Waited:
                self.new_transfers.discard(event.number)
        self.events += events

    def _write_copy(self, section: _Section) -> None:
        """Writes a copy of a call that ran in the place of one that was left out."""
        calls = section.calls
        assert calls is not None, "what lies between runs was not left out"
        for event in self._events_of(section):
            # Of what stood for something of the call: a copy frees it, too.
            is_freed = type(event) is Freed
            if not (is_freed and (Reserved, event.storage) in self.stand_ins):
                raise UnlikeCalls("something is done between calls")
            self.left_to_copies.add(event.storage)
        template = self._template(
            calls,
            calls.left_out.start - 1 if not calls.is_backward else calls.left_out.stop,
        )
        events = template.renamed(self, section.index, None)
        self.records += [
            e.record for e in events if type(e) is Started and e.record is not None
        ]
        self._extend(events)

    def _template(self, calls: _Calls, index: int) -> _Template:
        key = calls, index
        if key not in self._templates:
            self._templates[key] = _Template(self, calls, calls.sections[index])
        return self._templates[key]

    # Names

    def name(
        self, number: int, owners: dict[int, _Owner], calls: _Calls, index: int
    ) -> _Name | None:
        """Returns a storage's or transfer's name, seen from a call, if it has one."""
        section, place = owners.get(number, (None, 0))
        if section is None or section.calls is None or section.calls.run != calls.run:
            return None
        return _Name(section.calls, calls.beside(index, section.index) - index, place)

    def new_numbers(self, section: _Section, template: _Section) -> None:
        """Numbers what a copy makes: as is reserved, else on from the last number."""
        if section.storages or section.transfers:
            raise UnlikeCalls("a call that was left out has made something")
        for place, storage in enumerate(template.storages):
            if (number := section.reserved.get(place)) is None:
                number, self.storage_count = self.storage_count, self.storage_count + 1
                self.new_storages.add(number)
                if (kind := self.kinds.get(storage)) is not None:
                    self.kinds[number] = kind
            section.storages.append(number)
        for place in range(len(template.transfers)):
            if (number := section.reserved_transfers.get(place)) is None:
                number, self.transfer_count = (
                    self.transfer_count,
                    self.transfer_count + 1,
                )
                self.new_transfers.add(number)
            section.transfers.append(number)


def _first_compared(calls: _Calls) -> int:
    return calls.count - 1 - OUTERMOST if calls.is_backward else OUTERMOST


class _Template:
    """What a call did, by names relative to it.

    Attributes:
        events: its events, of which those in ``references`` name something.
        records: of the references that start a collective: by place, the record, and
            the name of its buffer as (how much later a call, which of its buffers).
        deeds: the same, to be compared with another call's.
    """

    def __init__(self, writer: _Writer, calls: _Calls, section: _Section):
        self.calls, self.section = calls, section
        self.events: list[Any] = list(writer._events_of(section))
        self.references: list[_Reference] = []
        self.buffers: dict[int, tuple[int, int]] = {}
        self.deeds: list[Hashable] = []
        index = section.index
        for place, event in enumerate(self.events):
            kind = type(event)
            if kind is Ran:
                self.deeds.append(event)
                continue
            is_storage = kind in (Allocated, Freed)
            owners = writer.owner_of_storage if is_storage else writer.owner_of_transfer
            name = writer.name(event[0], owners, calls, index)
            if name is None:
                raise UnlikeCalls("a call frees or awaits what is none of the calls'")
            self.references.append((place, kind, name, event[1:]))
            deed: tuple[Hashable, ...] = kind, name
            if kind is Allocated:
                deed += *event[1:], writer.kinds.get(event[0])
            elif kind is Started:
                deed += event[1:3]
                record = event.record
                buffer = writer.calls_of_buffer.get((calls.run, record and record.what))
                if buffer is not None:
                    offset = calls.beside(index, buffer[0]) - index
                    self.buffers[place] = offset, buffer[1]
                    record = replace(record, what="")
                deed += record, self.buffers.get(place)
            self.deeds.append(deed)

    def renamed(
        self, writer: _Writer, index: int, section: _Section | None
    ) -> list[Any]:
        """Returns its events as those of call ``index``.

        Args:
            section: that of the call itself, if it ran; else what it makes is numbered.
        """
        calls, events = self.calls, list(self.events)
        if section is None:
            writer.new_numbers(calls.sections[index], self.section)
        for place, kind, name, other_fields in self.references:
            made_by = name.calls.sections.get(index + name.offset)
            numbers: Sequence[int] = ()
            if made_by is not None:
                is_storage = kind in (Allocated, Freed)
                numbers = made_by.storages if is_storage else made_by.transfers
            if name.place >= len(numbers):
                raise UnlikeCalls("a call frees or awaits what another one never made")
            fields: tuple[Any, ...] = other_fields
            if kind is Started:
                part, ranks, record = other_fields
                if (buffer := self.buffers.get(place)) is not None:
                    offset, which = buffer
                    what = writer.buffers[calls.run, index + offset][which]
                    record = (
                        record if record.what == what else replace(record, what=what)
                    )
                elif section is None and record is not None:
                    record = replace(record)
                fields = part, ranks, record
            events[place] = kind(numbers[name.place], *fields)
        return events

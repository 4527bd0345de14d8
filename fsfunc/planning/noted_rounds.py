"""One round of a loop in a plan, noted again in place of being run again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from fsfunc.comm.ledgers import Record
from fsfunc.planning.events import Gave, Started, Took, Waited


class LoopPart(NamedTuple):
    """The plan's count when a part of a round began: ``what``, of a microbatch.

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


class Mark(NamedTuple):
    """The state of a plan between two rounds.

    Args:
        looks: what the rounds hand on, but for its storages, and Python's own state;
            ``carried``: those.
        held: names of all other storages that are held, and of transfers under way.
        flying: the microbatches in flight.
        counts: what the rounds hand on, counted.
        block: the number of the next block; ``end``: what it begins with.
        calls: of units.
    """

    looks: tuple[Any, ...]
    carried: tuple[int | None, ...]
    held: frozenset[Hashable]
    flying: frozenset[int]
    counts: list[Any]
    block: int
    end: LoopPart
    calls: dict[tuple[str, str], int]


PLACES = {"storages": attrgetter("storages"), "transfers": attrgetter("transfers")}
_NUMBERED = {Took: "storages", Gave: "storages", Started: "transfers"}
_NUMBERED[Waited] = "transfers"


class _Reference(NamedTuple):
    """An event that has the number of a storage, or of a transfer.

    Args:
        at: its place among those of its block; ``event``: its class; ``rest``: all but
            its number.
        owner: what begins the number: a block, its microbatch and what is counted; None
            of what is carried.
        number: counted from there.
    """

    at: int
    event: Any
    number: int
    owner: tuple[Hashable, int, str] | None
    rest: Any


class NotedRound:
    """A round that is noted again, of later microbatches.

    Args:
        rounds: those; ``last``, ``now``: the marks before it and after it.

    Attributes:
        is_closed: whether it waits for and frees only what is carried, or in flight.
    """

    def __init__(self, rounds: Any, last: Mark, now: Mark):
        self.rounds, self.book, self.link = rounds, rounds.book, rounds.link
        self.now, self.is_closed = now, True
        self.old = dict(zip(last.carried, now.carried, strict=True))
        self.names: dict[Any, Any] = dict(self.old)
        blocks = rounds.blocks[last.block : now.block]
        self.flying = last.flying | {block.microbatch for block in blocks}
        ends = [*blocks[1:], now.end]
        self.parts = [
            (b, e, self._references(b, e)) for b, e in zip(blocks, ends, strict=True)
        ]

    def _references(self, block: LoopPart, end: LoopPart) -> list[_Reference]:
        found: list[_Reference] = []
        for at, event in enumerate(self.book.events[block.events : end.events]):
            if (kind := _NUMBERED.get(type(event))) is None:
                continue
            number: Any = event[0]
            if type(event) is Gave and number in self.old:
                found.append(_Reference(at, Gave, event.key, None, ()))
            elif self.rounds.is_flying(number, self.flying, kind):
                by = self.rounds.block(number, kind)
                owner, number = (*by[:2], kind), number - getattr(by, kind)
                found.append(_Reference(at, type(event), number, owner, event[1:]))
            else:
                self.is_closed = False
        return found

    def note(self, by: int) -> None:
        """Notes the round once more, of microbatches that come ``by`` later."""
        starts: dict[Any, int] = {}
        for block, end, references in self.parts:
            self.rounds.begin(block.what, block.microbatch + by)
            self._note(block, end, by)
            self._note_events(block, end, references, by, starts)
        self.names = {
            a: self.names[b] if b is None or b in self.names else self._later(b, by)
            for a, b in self.old.items()
        }

    def _note(self, block: LoopPart, end: LoopPart, by: int) -> None:
        """Notes all but the events."""
        book, start = self.book, self.rounds.blocks[-1]
        for i in range(block.storages, end.storages):
            if (kind := book.kinds.get(i)) is not None:
                book.kinds[start.storages + i - block.storages] = kind
        for i, turn in enumerate(book.turns[block.turns : end.turns]):
            at = turn.at - block.events + start.events
            microbatch = turn.microbatch + (0 if i else by)  # the first is its own
            book.turns.append(turn._replace(at=at, microbatch=microbatch))
        book.sizes += book.sizes[block.storages : end.storages]
        self.link.count += end.transfers - block.transfers

    def _note_events(
        self,
        block: LoopPart,
        end: LoopPart,
        references: Sequence[_Reference],
        by: int,
        starts: dict[Any, int],
    ) -> None:
        """Notes events and records, with the numbers of storages and transfers.

        Args:
            starts: where owners' later blocks begin, as far as they are known.
        """
        log, rounds = self.link.log, self.rounds
        records = log.records[block.records : end.records]
        later = [self._later_record(r, block.microbatch, by) for r in records]
        named = dict(zip(map(id, records), later, strict=True))
        events: list[Any] = self.book.events[block.events : end.events]
        for at, event, number, owner, rest in references:
            if owner is None:
                events[at] = Gave(self.names[number])
                continue
            if (start := starts.get(owner)) is None:
                what, microbatch, kind = owner
                there = rounds.blocks[rounds.at[what, microbatch + by]]
                start = starts[owner] = getattr(there, kind)
            if event is Started:
                part, ranks, record = rest
                events[at] = Started(start + number, part, ranks, named.get(id(record)))
            else:
                events[at] = event(start + number, *rest)
        self.book.events += events
        log.records += later

    def _later_record(self, record: Record, microbatch: int, by: int) -> Record:
        """The same record of a later microbatch."""
        named = self.rounds.named
        end = f"{named}{microbatch}"
        if not (named and record.what.endswith(end)):
            return record
        name = record.what.removesuffix(end)
        return replace(record, what=f"{name}{named}{microbatch + by}")

    def _later(self, number: int, by: int) -> int:
        return self.rounds.later(number, by, "storages")

    def rename(self, left: int, by: int, stays: Sequence[Tensor]) -> None:
        """Says of what is held, and under way, that it is of the last round noted."""
        rounds, held = self.rounds, self.book.held
        self._tell_kinds(left, by)
        kept = set(map(held.get, stays))
        ends = {b: self.names[a] for a, b in self.old.items()}
        for number in rounds.held(self.now.flying):
            if number not in kept and number not in ends:
                ends[number] = self._later(number, left * by)
        rounds.alike += [(n, m) for n, m in ends.items() if n not in self.now.carried]
        for key, number in held.facts.items():
            held.facts[key] = ends.get(number, number)
        rounds.observer.chains.rename(ends)
        for move in self.link.under_way():
            if rounds.is_flying(move.number, self.now.flying, "transfers"):
                move.number = rounds.later(move.number, left * by, "transfers")

    def _tell_kinds(self, left: int, by: int) -> None:
        """Says that storages are of the kind of those of the last round noted."""
        rounds, carried = self.rounds, set(self.now.carried)
        for block, end, _ in self.parts:
            count = end.storages - block.storages
            own = [i for i in range(count) if block.storages + i not in carried]
            *starts, last = (
                rounds.blocks[rounds.at[block.what, block.microbatch + turn * by]]
                for turn in range(left + 1)
            )
            for start in starts:
                each = ((start.storages + i, last.storages + i) for i in own)
                rounds.alike += each

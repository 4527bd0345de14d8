"""Equal rounds of a loop in a plan: noted once more, in place of being run again.

The microbatches of ``accumulate`` are of one shape. Where one of them found memory as
the one before it had found it, the next would do the same with other storages: its
events are copied, with their numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsfunc.planning.events import Event, Gave, Ran, Started, Took, Waited


@dataclass(frozen=True)
class _Mark:
    """The state of a plan between two rounds.

    Args:
        looks: what the rounds hand on, but for its storages; ``carried``: those.
        held: all other storages that are held.
        events, turns, storages, transfers, records: how many there are; ``calls``: of
            units.
    """

    looks: Hashable
    carried: tuple[int | None, ...]
    held: frozenset[int]
    events: int
    turns: int
    storages: int
    transfers: int
    records: int
    calls: dict[tuple[str, str], int]


class Rounds:
    """The rounds of one loop, as an observer of a plan sees them.

    Args:
        observer: it; ``link``: its place, which numbers transfers and has the ledger.
    """

    def __init__(self, observer: Any, link: Any):
        self.observer, self.link = observer, link
        self.before: _Mark | None = None

    def after(self, handed: Sequence[Any], how: Hashable, left: int) -> int:
        """Hears that a round is over; returns how many of the next it has noted.

        Args:
            handed: what the loop hands on: ``carried()`` gives the tensors, always in
                one order.
            how: whatever else decides what the next round will do.
            left: how many more rounds there are that do what this one did if they find
                what it found.
        """
        last, now = self.before, self._mark([s.carried() for s in handed], how)
        self.before = now
        if last is None or left < 1 or not self._alike(last, now):
            return 0
        book, link = self.observer.book, self.link
        template = book.events[last.events : now.events]
        if not _is_closed(template, last, set(last.carried)):
            return 0
        records = link.log.records[last.records : now.records]
        storages, transfers = now.storages - last.storages, link.count - last.transfers
        old = dict(zip(last.carried, now.carried, strict=True))
        names, sizes = dict(old), book.sizes[last.storages :]
        kinds = [book.kinds.get(last.storages + i) for i in range(storages)]
        turns = book.turns[last.turns : now.turns]  # the round's own is the first
        moving = [(i, e) for i, e in enumerate(template) if type(e) is not Ran]
        for turn in range(1, left + 1):
            by, sent = turn * storages, turn * transfers
            for i, kind in enumerate(kinds):
                if kind is not None:
                    book.kinds[last.storages + by + i] = kind
            again = template.copy()
            for i, event in moving:
                again[i] = _moved(event, last.storages, names, by, sent)
            book.events += again
            later = turn * len(template)
            book.turns += [
                one._replace(
                    at=one.at + later,
                    microbatch=one.microbatch + (0 if i else turn),
                )
                for i, one in enumerate(turns)
            ]
            names = {
                a: names[b] if b is None or b in names else _later(b, last.storages, by)
                for a, b in old.items()
            }
        book.sizes += sizes * left
        link.log.records += records * left
        link.count += transfers * left
        for key, count in self.observer.calls.items():
            self.observer.calls[key] += left * (count - last.calls.get(key, 0))
        ends = dict(zip(now.carried, map(names.get, last.carried), strict=True))
        for key, number in book.held.facts.items():
            book.held.facts[key] = ends.get(number, number)
        return left

    def _mark(self, each: Sequence[Sequence[Tensor]], how: Hashable) -> _Mark:
        book, carried = self.observer.book, [x for tensors in each for x in tensors]
        at = tuple(book.held.get(x) for x in carried)
        looks = [
            (x.dtype, x.shape, x.stride(), x.storage_offset(), x.requires_grad)
            for x in carried
        ]
        return _Mark(
            (how, *map(len, each), *looks),
            at,
            frozenset(book.held.facts.values()) - set(at),
            len(book.events),
            len(book.turns),
            len(book.sizes),
            self.link.count,
            len(self.link.log.records),
            dict(self.observer.calls),
        )

    def _alike(self, a: _Mark, b: _Mark) -> bool:
        """True if what is held at two marks is told apart by numbers alone."""
        pairs = set(zip(a.carried, b.carried, strict=False))
        one_to_one = len(pairs) == len(set(a.carried)) == len(set(b.carried))
        same = a.looks == b.looks and a.held == b.held
        return same and one_to_one and not self.observer.keeps_copies


def _is_closed(template: Sequence[Event], mark: _Mark, carried: set[Any]) -> bool:
    """True if a round waits for all that it starts, and frees no others' memory."""
    open_ = set[int]()
    for event in template:
        if isinstance(event, Started):
            open_.add(event.number)
        elif isinstance(event, Waited):
            if event.number not in open_:
                return False
            open_.discard(event.number)
        elif isinstance(event, Gave):
            if event.key < mark.storages and event.key not in carried:
                return False
    return not open_


def _later(key: int, first: int, by: int) -> int:
    return key + by if key >= first else key


def _moved(
    event: Event, first: int, names: dict[Any, Any], by: int, sent: int
) -> Event:
    """An event of a later round: of storages and transfers with other numbers.

    Args:
        first: the first storage that the round took; ``by``, ``sent``: how much later.
        names: of the storages that the round was given.
    """
    if isinstance(event, Gave):
        return Gave(event.key + by if event.key >= first else names[event.key])
    later = by if isinstance(event, Took) else sent
    return type(event)(event[0] + later, *event[1:])  # pyright: ignore

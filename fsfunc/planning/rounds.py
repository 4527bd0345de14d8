"""Equal rounds of a loop in a plan: noted once more, in place of being run again.

The microbatches of ``accumulate`` are of one shape, and so are those of a pipeline,
whose schedule comes to the same actions again and again. Where one round found what is
held as the one before it had found it, the next would do the same with other storages:
its events are copied, with their numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.planning.events import Gave, Ran, Took
from fsfunc.planning.noted_rounds import PLACES, LoopPart, Mark, NotedRound


class Rounds:
    """The rounds of a loop, as an observer of a plan sees them.

    What a microbatch in flight took or started is named by the block that did it, and
    its number there: in the next round the same has that name, of a later microbatch.

    Args:
        observer: it; ``link``: its place, which numbers transfers and has the ledger.
        named: what comes before a microbatch's number at the end of records' names.
    """

    def __init__(self, observer: Any, link: Any, named: str = ""):
        self.named = named
        self.observer, self.link, self.book = observer, link, observer.book
        self.blocks: list[LoopPart] = []
        self.at: dict[tuple[Hashable, int], int] = {}  # the places of blocks
        self.before: Mark | None = None
        self.alike: list[tuple[int, int]] = []  # storages, and those that became them

    def begin(self, what: Hashable, microbatch: int) -> None:
        """Hears that a part of a round begins, before its turn is noted."""
        self.at[what, microbatch] = len(self.blocks)
        self.blocks.append(self._now(what, microbatch))

    def anew(self) -> None:
        """Hears that what comes now is not a round like those before."""
        self.before = None

    def after(
        self,
        handed: Sequence[Any],
        how: Hashable,
        left: int,
        microbatch: int,
        *,
        by: int = 1,
        flying: Collection[int] = (),
        stays: Sequence[Tensor] = (),
    ) -> int:
        """Hears that a round is over; returns how many of the next it has noted.

        Args:
            handed: what the loop hands on: ``carried()`` gives the tensors, always in
                one order; ``counts()`` and ``repeat(counts, times)`` what it counts.
            how: whatever else decides what the next round will do.
            left: how many more rounds there are that do what this one did if they find
                what it found.
            microbatch: of the round; ``by``: how much that grows from round to round.
            flying: the microbatches in flight; ``stays``: what others have left, until
                the loop ends.
        """
        if left < 1:
            return 0
        last = self.before
        now = self.before = self._mark(handed, how, microbatch, flying, stays)
        alike = last is not None and last.looks == now.looks and last.held == now.held
        if last is None or not alike or self.observer.keeps_copies:
            return 0
        pairs = set(zip(last.carried, now.carried, strict=True))
        if not len(pairs) == len(set(last.carried)) == len(set(now.carried)):
            return 0
        again = NotedRound(self, last, now)
        if not (again.is_closed and self._are_alike(flying) and self._apart(stays)):
            return 0
        for turn in range(1, left + 1):
            again.note(turn * by)
        again.rename(left, by, stays)
        for key, count in now.calls.items():
            self.observer.calls[key] += left * (count - last.calls.get(key, 0))
        for s, counts in zip(handed, last.counts, strict=True):
            s.repeat(counts, left)
        return left

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

    def later(self, number: int, by: int, kind: str) -> int:
        """The storage or transfer of a later microbatch that is like one of these."""
        block = self.block(number, kind)
        there = self.blocks[self.at[block.what, block.microbatch + by]]
        return number - getattr(block, kind) + getattr(there, kind)

    def is_flying(self, number: int, flying: Collection[int], kind: str) -> bool:
        """True if a storage or transfer is of a microbatch in flight."""
        before = not self.blocks or number < getattr(self.blocks[0], kind)
        return not before and self.block(number, kind).microbatch in flying

    def held(self, flying: Collection[int]) -> list[int]:
        """The storages of microbatches in flight that are held."""
        numbers = set(self.book.held.facts.values())
        return [n for n in numbers if self.is_flying(n, flying, "storages")]

    def block(self, number: int, kind: str) -> LoopPart:
        """The block that took a storage, or started a transfer."""
        place = PLACES[kind]
        return self.blocks[bisect_right(self.blocks, number, key=place) - 1]

    def _now(self, what: Hashable = None, microbatch: int = 0) -> LoopPart:
        book, link = self.book, self.link
        events, turns, records = book.events, book.turns, link.log.records
        sizes = len(book.sizes), len(events), len(turns), link.count, len(records)
        return LoopPart(what, microbatch, *sizes)

    def _mark(
        self,
        handed: Sequence[Any],
        how: Hashable,
        microbatch: int,
        flying: Collection[int],
        stays: Sequence[Tensor],
    ) -> Mark:
        book, each = self.book, [s.carried() for s in handed]
        carried: list[Tensor] = [x for tensors in each for x in tensors]
        at = tuple(book.held.get(x) for x in carried)
        looks = [
            (x.dtype, x.shape, x.stride(), x.storage_offset(), x.requires_grad)
            for x in carried
        ]

        def name(number: int, kind: str) -> Hashable:
            if not self.is_flying(number, flying, kind):
                return kind, number
            block = self.block(number, kind)
            since = block.microbatch - microbatch
            return kind, block.what, since, number - getattr(block, kind)

        rest = set(book.held.facts.values()).difference(at, map(book.held.get, stays))
        held = [name(n, "storages") for n in rest]
        held += [name(x.number, "transfers") for x in self.link.under_way()]
        counts = [s.counts() for s in handed]
        calls = dict(self.observer.calls)
        state = (how, *map(len, each), *looks), at, frozenset(held)
        state = *state, frozenset(flying), counts
        return Mark(*state, len(self.blocks), self._now(), calls)

    def _are_alike(self, flying: Collection[int]) -> bool:
        """True if blocks of one kind, of which something is held, did the same."""
        found: dict[Hashable, list[Hashable]] = {}
        for block in {self.block(n, "storages") for n in self.held(flying)}:
            did = self._did(block)
            if found.setdefault(block.what, did) != did:
                return False
        return True

    def _did(self, block: LoopPart) -> list[Hashable]:
        """The operators of a block, the memory that it took, and gave back itself."""
        at = self.at[block.what, block.microbatch]
        end, did = [*self.blocks, self._now()][at + 1].events, []
        for event in self.book.events[block.events : end]:
            if isinstance(event, Ran):
                did.append(event)
            elif isinstance(event, Took):
                did.append(event[1:])
            elif isinstance(event, Gave) and event.key >= block.storages:
                did.append(event.key - block.storages)
        return did

    def _apart(self, stays: Sequence[Tensor]) -> bool:
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

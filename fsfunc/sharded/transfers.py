"""What each rank sends to each other when a tensor goes from one layout to another.

`Transfer` is arithmetic on two layouts; nothing is sent here. A rank needs the elements
of its new part that are not in its old one, and gets each of them once, from one rank
that has it. So what all ranks together send is the least that there is to send::

    flat over 4        | 0 0 0 | 1 1 1 | 2 2 2 | 3 3 3 |
    flat over 3        | 0 0 0   0 | 1 1   1 1 | 2 2   2 2 |      (rank 3 has none)
    sent                         1>0      2>1       3>2 3>2 3>2

Parts may overlap in any way: a flat range is a few boxes of the tensor, a split is one
box, and two boxes meet in a box.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fsfunc.sharded.layout import Coordinates, Key, Layout
from fsfunc.sharded.placements import row_major
from fsfunc.sharded.slices import Box, boxes

Extent = tuple[tuple[int, ...], tuple[int, ...]]  # of a box: offsets, sizes
Positions = tuple[Coordinates | None, ...]
"""By rank, its coordinates; None of a rank that has no part of anything."""


@dataclass(frozen=True, eq=False)
class Side:
    """The parts of one tensor on all ranks, before a move or after it.

    Args:
        layout: the tensor's layout.
        positions: by rank, its coordinates on the axes of the layout (others are
            ignored); None of a rank that has no part.
    """

    layout: Layout
    positions: Positions

    @cached_property
    def keys(self) -> tuple[Key | None, ...]:
        """By rank, which part it has: its coordinates on the layout's axes."""
        return tuple(None if p is None else self.layout.key(p) for p in self.positions)

    @cached_property
    def ranks_by_key(self) -> dict[Key, list[int]]:
        """By part, the ranks that have it, in order."""
        ranks: dict[Key, list[int]] = defaultdict(list)
        for rank, key in enumerate(self.keys):
            if key is not None:
                ranks[key].append(rank)
        return dict(ranks)

    @cached_property
    def boxes(self) -> dict[Key, list[Box]]:
        """By part, the boxes that make it up."""
        axes = self.layout.axes
        return {
            key: boxes(self.layout, dict(zip(axes, key, strict=True)))
            for key in self.ranks_by_key
        }

    @cached_property
    def are_ranges(self) -> bool:
        """Whether each part is one range of the flattened tensor: whole rows, cut."""
        return all(split.dim == 0 for split in self.layout.splits)

    @cached_property
    def ranges(self) -> dict[Key, list[Box]]:
        """By part, its range of the flattened tensor, as a box of one dim."""
        ranges: dict[Key, list[Box]] = {}
        for key, parts in self.boxes.items():
            ranges[key] = []
            if parts:
                first = row_major(zip(parts[0].offsets, self.layout.shape, strict=True))
                ranges[key] = [Box((first,), (sum(box.numel for box in parts),), 0)]
        return ranges

    @property
    def identity(self) -> tuple[Layout, tuple[Key | None, ...]]:
        return self.layout, self.keys


@dataclass(frozen=True, eq=False)
class Transfer:
    """One tensor's move between two layouts: who sends which elements to whom.

    Args:
        old, new: its parts on all ranks before and after.

    Raises:
        ValueError: no rank has some of the elements: names the part that is missing.

    >>> from fsfunc.sharded.layout import Flat
    >>> def flat(n, chunk):
    ...     where = Flat(("data",), n, "u", 0, chunk)
    ...     positions = tuple({"data": i} if i < n else None for i in range(4))
    ...     return Side(Layout((12,), torch.float32, (where,), "w"), positions)
    >>> for row in Transfer(flat(4, 3), flat(3, 4)).counts:
    ...     print(*row)
    0 0 0 0
    1 0 0 0
    0 2 0 0
    0 0 3 0
    """

    old: Side
    new: Side
    _met: dict[tuple[Key, Key], list[Extent]] = field(default_factory=dict, init=False)
    _flattened: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # Ranges meet in one range, where their boxes meet in several.
        flattened = self.old.are_ranges and self.new.are_ranges
        object.__setattr__(self, "_flattened", flattened)
        if self.old.layout.shape != self.new.layout.shape:
            raise ValueError(
                f"{self.old.layout} cannot become {self.new.layout}: they differ in "
                "shape"
            )

    @cached_property
    def sources(self) -> list[dict[Key, int]]:
        """By rank: for each old part that it needs some of, the rank that sends it.

        A rank that has an old part itself sends it to nobody. Of several that have it,
        the nearest one by number sends it: ranks of near numbers share a host.
        """
        by_rank: list[dict[Key, int]] = []
        for rank, new_key in enumerate(self.new.keys):
            by_rank.append({})
            for old_key in () if new_key is None else self._parts_met[new_key]:
                if old_key != self.old.keys[rank]:
                    ranks = self.old.ranks_by_key[old_key]
                    by_rank[rank][old_key] = min(ranks, key=lambda r: abs(r - rank))  # noqa: B023
        return by_rank

    @cached_property
    def _receivers(self) -> dict[int, list[tuple[int, Key]]]:
        """By sender, the ranks that it sends to, and the old part that it sends of."""
        receivers: dict[int, list[tuple[int, Key]]] = defaultdict(list)
        for receiver, sources in enumerate(self.sources):
            for old_key, sender in sources.items():
                receivers[sender].append((receiver, old_key))
        return receivers

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of elements that ranks send: ``counts[sender][receiver]``."""
        ranks = range(len(self.new.positions))
        rows = [[0] * len(ranks) for _ in ranks]
        for receiver in ranks:
            new_key = self.new.keys[receiver]
            for old_key, sender in self.sources[receiver].items():
                extents = self._extents(old_key, new_key or ())
                rows[sender][receiver] += sum(math.prod(sizes) for _, sizes in extents)
        return tuple(map(tuple, rows))

    @property
    def sends_anything(self) -> bool:
        return any(map(any, self.counts))

    def elements_sent(self, rank: int, part: Tensor) -> Tensor:
        """Returns what a rank sends, 1-D: in the order of receivers.

        Args:
            part: the rank's old part.

        Cost: a copy of these elements.
        """
        views: list[Tensor] = []
        made: dict[Extent, Tensor] = {}  # several ranks may be sent the same elements
        for receiver, old_key in self._receivers.get(rank, ()):
            for extent in self._extents(old_key, self.new.keys[receiver] or ()):
                if extent not in made:
                    made[extent] = self._view(part, self.old, old_key, extent)
                views.append(made[extent])
        if not views:
            return part.new_empty(0)
        return torch.cat([view.reshape(-1) for view in views])

    def write_received(self, rank: int, part: Tensor, received: Tensor) -> None:
        """Writes what a rank received to its new part.

        Args:
            part: the new part; the rank's own old elements are not written: see
                `write_own`.
            received: 1-D, in the order of senders.
        """
        new_key = self.new.keys[rank] or ()
        by_sender = sorted(self.sources[rank].items(), key=lambda item: item[1])
        extents = [
            e for old_key, _ in by_sender for e in self._extents(old_key, new_key)
        ]
        start = 0
        for extent in _joined(extents) if self._flattened else extents:
            view = self._view(part, self.new, new_key, extent)
            view.copy_(received[start : start + view.numel()].view(view.shape))
            start += view.numel()

    def write_own(self, rank: int, old_part: Tensor, part: Tensor) -> None:
        """Copies to a rank's new part what it has in its old one."""
        old_key, new_key = self.old.keys[rank], self.new.keys[rank]
        if old_key is None or new_key is None:
            return
        for extent in self._extents(old_key, new_key):
            source = self._view(old_part, self.old, old_key, extent)
            self._view(part, self.new, new_key, extent).copy_(source)

    @cached_property
    def _parts_met(self) -> dict[Key, list[Key]]:
        """By new part, the old parts that have some of its elements, in order.

        Raises:
            ValueError: some element of a new part is in no old part.
        """
        # First by the bounds of their elements in memory order: of the ranks of a large
        # mesh few meet, and two lists of boxes take microseconds.
        old_bounds = [
            (key, *self._bounds(self.old, key)) for key in self._pieces(self.old)
        ]
        met: dict[Key, list[Key]] = {}
        for new_key, new_boxes in self._pieces(self.new).items():
            low, high = self._bounds(self.new, new_key)
            near = [key for key, a, b in old_bounds if a < high and low < b]
            met[new_key] = [key for key in near if self._extents(key, new_key)]
            pairs = [(old_key, new_key) for old_key in met[new_key]]
            count = sum(math.prod(s) for pair in pairs for _, s in self._extents(*pair))
            if count != sum(box.numel for box in new_boxes):
                raise ValueError(
                    f"{self.old.layout}: no rank has all of the elements that "
                    f"{self.new.layout} needs at {new_key}"
                )
        return met

    def _bounds(self, side: Side, key: Key) -> tuple[int, int]:
        """Returns [first, last + 1] of a part's elements, in memory order."""
        lows, highs = [], []
        shape = (side.layout.numel,) if self._flattened else side.layout.shape
        for offsets, sizes, _ in self._pieces(side)[key]:
            last = [start + n - 1 for start, n in zip(offsets, sizes, strict=True)]
            lows.append(row_major(zip(offsets, shape, strict=True)))
            highs.append(row_major(zip(last, shape, strict=True)) + 1)
        return min(lows, default=0), max(highs, default=0)

    def _view(self, part: Tensor, side: Side, key: Key, extent: Extent) -> Tensor:
        """Returns the view of a rank's part that has the elements of a box.

        Args:
            part: the part at ``key``, of its layout's shape, or flattened.
            extent: a box that lies in one of the part's own.
        """
        offsets, sizes = extent
        box = next(b for b in self._pieces(side)[key] if _contains(b, extent))
        if self._flattened:
            start = offsets[0] - box.offsets[0]
            return part.reshape(-1)[start : start + sizes[0]]
        if side.layout.flat is not None or part.ndim != len(box.sizes):
            part = part.view(-1)[box.start : box.start + box.numel].view(box.sizes)
        for dim, (start, n) in enumerate(zip(offsets, sizes, strict=True)):
            if n < part.shape[dim]:
                part = part.narrow(dim, start - box.offsets[dim], n)
        return part

    def _pieces(self, side: Side) -> dict[Key, list[Box]]:
        """Returns, by part of a side, the boxes that make it up, or its range."""
        return side.ranges if self._flattened else side.boxes

    def _extents(self, old_key: Key, new_key: Key) -> list[Extent]:
        """Returns the boxes in which an old part and a new one meet."""
        pair = old_key, new_key
        if pair not in self._met:
            self._met[pair] = [
                extent
                for a in self._pieces(self.old)[old_key]
                for b in self._pieces(self.new)[new_key]
                if (extent := _intersection(a, b)) is not None
            ]
        return self._met[pair]


def transfer_between(old: Side, new: Side) -> Transfer:
    """Returns the transfer between two sides; equal leaves share one."""
    return _transfer(old.identity, new.identity, _Sides(old, new))


class _Sides(tuple[Side, Side]):
    """Two sides, which a cache does not compare: their identities are."""

    def __new__(cls, old: Side, new: Side) -> _Sides:
        return super().__new__(cls, (old, new))

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@lru_cache(512)
def _transfer(_old: object, _new: object, sides: _Sides) -> Transfer:
    return Transfer(*sides)


def _joined(ranges: list[Extent]) -> list[Extent]:
    """Returns ranges of one dim, those that follow each other as one."""
    joined: list[Extent] = []
    for (start,), (n,) in ranges:
        (last_start,), (last_n,) = joined[-1] if joined else ((-1,), (0,))
        if start == last_start + last_n:
            joined[-1] = ((last_start,), (last_n + n,))
        else:
            joined.append(((start,), (n,)))
    return joined


def _contains(box: Box, extent: Extent) -> bool:
    return all(
        a <= start and start + n <= a + size
        for a, size, start, n in zip(box.offsets, box.sizes, *extent, strict=True)
    )


def _intersection(a: Box, b: Box) -> Extent | None:
    """Returns the box in which two boxes meet; None where they do not."""
    offsets, sizes = [], []
    for i, m, j, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start, stop = max(i, j), min(i + m, j + n)
        if stop <= start:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return tuple(offsets), tuple(sizes)

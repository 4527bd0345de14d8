"""The schedule of a ring: which keys go to which rank, and which blocks it computes.

At step s each rank has the keys and values of the rank s before it, sent by that rank
itself. All follows from how the sequence is cut and how far a query sees, which every
rank knows: a block that is masked as a whole is not computed, and a part is sent only
where some query sees it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

Pairs = tuple[tuple[int, int], ...]


class SequenceCut(NamedTuple):
    """The order of a sequence on the ranks, and the distance that its queries see.

    Args:
        size: the number of ranks.
        zigzag: whether a rank has two half-blocks, in zig-zag order, or one part.
        length: of a part.
        left, right: how many positions before and after its own a query sees; None:
            all. Causal attention has ``right=0``.
    """

    size: int
    zigzag: bool
    length: int
    left: int | None
    right: int | None

    @property
    def parts(self) -> int:
        """Into how many parts a rank's positions are cut."""
        return 2 if self.zigzag else 1

    def place(self, rank: Any, part: int) -> Any:
        """The number of a part, in the order of the sequence."""
        return 2 * self.size - 1 - rank if part else rank


class Block(NamedTuple):
    """Attention of queries of part ``rows`` to keys of part ``part`` of those received.

    Query r sees key c where ``least <= r - c <= most``; None is no limit.
    """

    rows: Any
    part: Any
    least: Any = None
    most: Any = None


@lru_cache(maxsize=1 << 10)
def ring_moves(step: int, cut: SequenceCut) -> tuple[Pairs, ...]:
    """For each part of keys, who sends it to whom before this step.

    In causal zig-zag order all see a rank's first half, and those before it the second.

    >>> ring_moves(2, SequenceCut(3, True, 4, None, 0))
    (((0, 2), (1, 0), (2, 1)), ((1, 0), (2, 1)))
    """
    hops = [(j, (j + step) % cut.size) for j in range(cut.size)]
    return tuple(
        tuple((j, t) for j, t in hops if any(b.part == p for b in _blocks(j, t, cut)))
        for p in range(cut.parts)
    )


@lru_cache(maxsize=1 << 10)
def ring_blocks(step: int, index: int, cut: SequenceCut) -> tuple[Block, ...]:
    """The work of rank ``index`` in this step: as much as any other's in zig-zag order.

    >>> [block[:2] for block in ring_blocks(1, 0, SequenceCut(2, True, 4, None, 0))]
    [(1, 1), (1, 0)]
    """
    return _blocks((index - step) % cut.size, index, cut)


@lru_cache(maxsize=1 << 10)
def ring_slots(step: int, cut: SequenceCut) -> tuple[Block, ...]:
    """The blocks of all ranks side by side, with a tuple of each field of all ranks.

    A rank with fewer blocks than another has empty ones, of which nothing is seen.
    """
    work = [ring_blocks(step, index, cut) for index in range(cut.size)]
    slots = []
    for k in range(max(map(len, work))):
        some = next(blocks[k] for blocks in work if len(blocks) > k)
        empty = some._replace(least=cut.length)
        blocks = [blocks[k] if len(blocks) > k else empty for blocks in work]
        rows, parts, least, most = zip(*blocks, strict=True)
        slots.append(Block(rows, parts, _or(-cut.length, least), _or(cut.length, most)))
    return tuple(slots)


def _or(free: int, limits: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Limits as numbers, where some rank has one."""
    if all(x is None for x in limits):
        return limits
    return tuple(free if x is None else x for x in limits)


def _blocks(source: int, index: int, cut: SequenceCut) -> tuple[Block, ...]:
    """The keys of one rank that another one sees; of its own its parts first."""
    pairs = [(a, a ^ turned) for turned in range(cut.parts) for a in range(cut.parts)]
    limits = (_limits(cut.place(index, a), cut.place(source, b), cut) for a, b in pairs)
    return tuple(
        Block(*pair, *found)
        for pair, found in zip(pairs, limits, strict=True)
        if found is not None
    )


def _limits(
    row: int, key: int, cut: SequenceCut
) -> tuple[int | None, int | None] | None:
    """The limits of a block of these places; None if nothing is seen of it."""
    off, reach = (key - row) * cut.length, cut.length - 1
    least = None if cut.right is None else off - cut.right
    most = None if cut.left is None else off + cut.left
    if least is not None:
        if least > reach:
            return None
        least = least if least > -reach else None
    if most is not None:
        if most < -reach:
            return None
        most = most if most < reach else None
    return least, most

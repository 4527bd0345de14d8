"""Zig-zag order of a sequence, and which rank computes which block of attention when.

Under causal attention with contiguous parts the last rank's queries see every key, and
the first rank's only their own. In zig-zag order the sequence is cut into 2 W
half-blocks, and rank i takes number i and number 2 W - 1 - i. Then every rank has as
many (query, key) pairs as any other. With W = 2:

    half-blocks 0 1 2 3:   rank 0 has 0 and 3,   rank 1 has 1 and 2

The schedule of a ring (``ring.py`` runs it): at step s each rank has the keys and
values of the rank s before it, which that rank itself has sent. How the sequence is cut
and how far a query sees is known to every rank, so each knows all moves: a block that
is masked as a whole is not computed, and a part is sent only to ranks that see it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fsfunc.comm.collectives import ppermute
from fsfunc.comm.groups import axis_index, axis_size
from fsfunc.comm.mesh import Axis

Index = TypeVar("Index", int, Tensor)  # of a rank; a tensor on a mesh made of vmap
Limit = int | Tensor | None
"""A bound on a distance. None: no bound. A tensor on a mesh made of ``vmap``, where it
differs by rank."""


def zigzag(x: Tensor, axis_size: int, dim: int) -> Tensor:
    """Puts ``x`` in zig-zag order along ``dim``: each rank's two half-blocks in a row.

    Of 2 W half-blocks, W the size of the axis, rank i's are number i and number
    2 W - 1 - i. Cut the result into W equal parts: part i is rank i's.

    Args:
        x: a whole sequence, the same on every rank: tokens, targets, embeddings.
        axis_size: the number of ranks among which it is cut.
        dim: that of the sequence.

    Returns:
        A tensor of the shape of ``x``.

    Raises:
        ValueError: twice the axis size does not divide the sequence, or no such dim.

    Cost: one copy of ``x``; nothing is sent.

    Source: Brandon et al., 2023, Striped attention (the imbalance); the order is that
    of Llama 3 (Dubey et al., 2024, sec. 3.3.2).

    >>> zigzag(torch.arange(8), 2, dim=0).chunk(2)
    (tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
    """
    return _reorder(x, axis_size, dim, _half_block_order(axis_size))


def unzigzag(x: Tensor, axis_size: int, dim: int) -> Tensor:
    """Puts ``x``, in zig-zag order along ``dim``, back in the order of the sequence.

    Args:
        x: the parts of the ranks joined along ``dim``, in axis order.
        axis_size, dim: as for :func:`zigzag`.

    Returns:
        A tensor of the shape of ``x``.

    Raises:
        ValueError: as :func:`zigzag`.

    Cost: one copy of ``x``; nothing is sent.

    >>> unzigzag(zigzag(torch.arange(8), 2, dim=0), 2, dim=0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    order = _half_block_order(axis_size)
    return _reorder(x, axis_size, dim, sorted(range(len(order)), key=order.__getitem__))


def zigzag_positions(
    length: int, axis_size: int, index: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Returns the positions that one rank has: for rotary or learned embeddings.

    Args:
        length: of the whole sequence.
        axis_size: the number of ranks among which it is cut.
        index: the rank's index along the axis, ``ff.axis_index(axis)``.

    Returns:
        [length / axis_size] int64, ascending.

    Raises:
        ValueError: twice the axis size does not divide the length, or the index is off
            the axis.

    >>> zigzag_positions(8, 2, 0).tolist()
    [0, 1, 6, 7]
    """
    half_length = _half_block_length(length, axis_size)
    if not 0 <= index < axis_size:
        raise ValueError(f"index={index} is off an axis of size {axis_size}")
    starts = (
        torch.tensor([index, 2 * axis_size - 1 - index], device=device) * half_length
    )
    return (starts[:, None] + torch.arange(half_length, device=device)).flatten()


# Between the ranks


def zigzag_parts(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Exchanges contiguous parts for parts in zig-zag order; returns this rank's.

    Cost: each rank sends the bytes of ``x``, less the halves that stay. Transpose:
    :func:`contiguous_parts`.
    """
    # A contiguous part is half-blocks 2 r and 2 r + 1. Every rank gets one even block
    # and one odd one, so two permutations suffice.
    size = axis_size(axis)
    first, second = x.chunk(2, dim)
    even = ppermute(first, axis, [(r, _rank_of(2 * r, size)) for r in range(size)])
    odd = ppermute(second, axis, [(r, _rank_of(2 * r + 1, size)) for r in range(size)])
    odd_first = _odd_block_first(axis, x)
    low, high = torch.where(odd_first, odd, even), torch.where(odd_first, even, odd)
    return torch.cat([low, high], dim)


def contiguous_parts(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Exchanges parts in zig-zag order for contiguous ones; returns this rank's.

    Cost and transpose: as :func:`zigzag_parts`.
    """
    size = axis_size(axis)
    low, high = x.chunk(2, dim)
    odd_first = _odd_block_first(axis, x)
    even, odd = torch.where(odd_first, high, low), torch.where(odd_first, low, high)
    first = ppermute(even, axis, [(_rank_of(2 * r, size), r) for r in range(size)])
    second = ppermute(odd, axis, [(_rank_of(2 * r + 1, size), r) for r in range(size)])
    return torch.cat([first, second], dim)


def _rank_of(block: int, ranks: int) -> int:
    """Returns the rank that has a half-block in zig-zag order."""
    return block if block < ranks else 2 * ranks - 1 - block


def _odd_block_first(axis: Axis, x: Tensor) -> Tensor:
    """Returns whether the odd one of this rank's two half-blocks comes first.

    A tensor, since on a mesh made of ``vmap`` it differs along the mapped dim.
    """
    return torch.as_tensor(axis_index(axis) % 2 == 1, device=x.device)


def _half_block_order(axis_size: int) -> list[int]:
    """Returns the numbers of all half-blocks, rank after rank."""
    return [
        block for rank in range(axis_size) for block in (rank, 2 * axis_size - 1 - rank)
    ]


def _reorder(x: Tensor, axis_size: int, dim: int, order: list[int]) -> Tensor:
    dim = range(x.ndim)[dim]
    half_length = _half_block_length(x.shape[dim], axis_size)
    blocks = x.unflatten(dim, (2 * axis_size, half_length))
    reordered = blocks.index_select(dim, torch.tensor(order, device=x.device))
    return reordered.flatten(dim, dim + 1)


def _half_block_length(length: int, axis_size: int) -> int:
    """Returns the length of a half-block; raises ValueError if none divides evenly."""
    count = 2 * axis_size
    if length % count:
        raise ValueError(
            f"a sequence of {length} is not cut into the {count} half-blocks of an "
            f"axis of size {axis_size}: lengths that work are multiples of {count}"
        )
    return length // count


Pairs = tuple[tuple[int, int], ...]  # (from, to) indices of ranks


class SequenceCut(NamedTuple):
    """How a sequence lies on the ranks, and how far its queries see.

    A part is what moves and is computed as one: a half-block in zig-zag order, else all
    of a rank's positions.

    Args:
        size: the number of ranks.
        zigzag: whether a rank has two half-blocks, in zig-zag order, or one part.
        length: the number of positions of a part.
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
        """The number of parts of a rank."""
        return 2 if self.zigzag else 1

    def part_number(self, rank: Index, part: int) -> Index:
        """Returns the number, in the order of the sequence, of a rank's first part (0)
        or second (1)."""
        return 2 * self.size - 1 - rank if part else rank


class Block(NamedTuple):
    """A block of attention: one part of the queries times one part of the keys.

    Query r sees key c where ``least <= r - c <= most``.

    Args:
        rows: which of this rank's parts the queries are, 0 or 1.
        part: which of the parts of keys received.
        least, most: limits of the distance.
    """

    rows: Any  # an int; a tensor where it differs by rank and the graph may not
    part: Any
    least: Limit = None
    most: Limit = None


class Slot(NamedTuple):
    """The blocks that the ranks compute side by side: fields of ``Block``, by rank."""

    rows: tuple[int, ...]
    part: tuple[int, ...]
    least: tuple[int | None, ...]
    most: tuple[int | None, ...]


@lru_cache(maxsize=1 << 10)
def ring_moves(step: int, cut: SequenceCut) -> tuple[Pairs, ...]:
    """Returns, for each part of keys, who sends it to whom before this step.

    In causal zig-zag order all ranks see a rank's first half-block, and only those
    before it see its second.

    >>> ring_moves(2, SequenceCut(3, True, 4, None, 0))
    (((0, 2), (1, 0), (2, 1)), ((1, 0), (2, 1)))
    """
    hops = [(source, (source + step) % cut.size) for source in range(cut.size)]
    return tuple(
        tuple(
            (source, target)
            for source, target in hops
            if any(b.part == part for b in _blocks_of_pair(source, target, cut))
        )
        for part in range(cut.parts)
    )


@lru_cache(maxsize=1 << 10)
def ring_blocks(step: int, index: int, cut: SequenceCut) -> tuple[Block, ...]:
    """Returns the blocks that rank ``index`` computes in this step.

    >>> [block[:2] for block in ring_blocks(1, 0, SequenceCut(2, True, 4, None, 0))]
    [(1, 1), (1, 0)]
    """
    return _blocks_of_pair((index - step) % cut.size, index, cut)


@lru_cache(maxsize=1 << 10)
def ring_slots(step: int, cut: SequenceCut) -> tuple[Slot, ...]:
    """Returns the blocks of a step: slot k has the k-th block of every rank.

    A rank with fewer blocks than another has empty ones, in which no query sees a key,
    so that all ranks run the same operators.
    """
    blocks_by_rank = [ring_blocks(step, index, cut) for index in range(cut.size)]
    slots = []
    for slot in range(max(map(len, blocks_by_rank))):
        filled = next(blocks[slot] for blocks in blocks_by_rank if len(blocks) > slot)
        empty = filled._replace(least=cut.length)
        blocks = [
            blocks[slot] if len(blocks) > slot else empty for blocks in blocks_by_rank
        ]
        rows, parts, least, most = zip(*blocks, strict=True)
        slots.append(
            Slot(
                rows,
                parts,
                _fill_limits(-cut.length, least),
                _fill_limits(cut.length, most),
            )
        )
    return tuple(slots)


def _fill_limits(
    no_limit: int, limits: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    """Replaces None by ``no_limit``, unless no rank has a limit."""
    if all(x is None for x in limits):
        return limits
    return tuple(no_limit if x is None else x for x in limits)


def _blocks_of_pair(source: int, index: int, cut: SequenceCut) -> tuple[Block, ...]:
    """Returns the blocks of rank ``index`` with the keys of rank ``source``.

    Blocks of a part with the part of the same number come first.
    """
    pairs = [
        (rows, rows ^ swap) for swap in range(cut.parts) for rows in range(cut.parts)
    ]
    limits_of_pairs = (
        _block_limits(cut.part_number(index, rows), cut.part_number(source, part), cut)
        for rows, part in pairs
    )
    return tuple(
        Block(*pair, *limits)
        for pair, limits in zip(pairs, limits_of_pairs, strict=True)
        if limits is not None
    )


def _block_limits(
    row_part: int, key_part: int, cut: SequenceCut
) -> tuple[int | None, int | None] | None:
    """Returns the limits of a block within it; None if no query sees any key.

    Args:
        row_part, key_part: the numbers of the two parts in the sequence.
    """
    # Row r and key c of the parts are r - c - offset positions apart, and r - c lies
    # within -farthest to farthest: a limit beyond that hides all, or nothing.
    offset, farthest = (key_part - row_part) * cut.length, cut.length - 1
    least = None if cut.right is None else offset - cut.right
    most = None if cut.left is None else offset + cut.left
    if least is not None:
        if least > farthest:
            return None
        least = least if least > -farthest else None
    if most is not None:
        if most < -farthest:
            return None
        most = most if most < farthest else None
    return least, most

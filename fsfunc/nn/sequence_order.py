"""Zig-zag order of a sequence: equal work for all ranks in causal attention.

In contiguous parts the last rank's queries see every key, and the first one's see its
own alone. Cut into 2 W half-blocks, of which rank i takes number i and number
2 W - 1 - i, every rank has as many (query, key) pairs as any other.

The schedule of a ring: at step s each rank has the keys and values of the rank s before
it, sent by that rank itself. All follows from how the sequence is cut and how far a
query sees, which every rank knows: a block that is masked as a whole is not computed,
and a part is sent only where some query sees it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.comm.collectives import ppermute
from fsfunc.comm.groups import axis_index, axis_size
from fsfunc.comm.mesh import Axis


def zigzag(x: Tensor, axis_size: int, dim: int) -> Tensor:
    """``x`` in zig-zag order along ``dim``: each rank's two half-blocks in a row.

    Of 2 W half-blocks, W the size of the axis, rank i's are number i and number
    2 W - 1 - i; cut into W equal parts, the result is what the ranks take.

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
    return _picked(x, axis_size, dim, _order(axis_size))


def unzigzag(x: Tensor, axis_size: int, dim: int) -> Tensor:
    """The sequence of which ``zigzag`` made ``x``: what the ranks hold, in a row.

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
    order = _order(axis_size)
    return _picked(x, axis_size, dim, sorted(range(len(order)), key=order.__getitem__))


def zigzag_positions(
    length: int, axis_size: int, index: int, *, device: torch.device | str | None = None
) -> Tensor:
    """The positions of what one rank holds: for rotary or learned embeddings.

    Args:
        length: of the whole sequence.
        axis_size: the number of ranks among which it is cut.
        index: the rank's along the axis, ``ff.axis_index(axis)``.

    Returns:
        [length / axis_size] int64, ascending.

    Raises:
        ValueError: twice the axis size does not divide the length, or the index is off
            the axis.

    >>> zigzag_positions(8, 2, 0).tolist()
    [0, 1, 6, 7]
    """
    half = _half(length, axis_size)
    if not 0 <= index < axis_size:
        raise ValueError(f"index={index} is off an axis of size {axis_size}")
    starts = torch.tensor([index, 2 * axis_size - 1 - index], device=device) * half
    return (starts[:, None] + torch.arange(half, device=device)).flatten()


# Between the ranks


def zigzag_parts(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part in zig-zag order, of ranks that hold contiguous ones.

    Cost: the bytes of ``x`` from each rank, less what it keeps. Transpose:
    :func:`contiguous_parts`.
    """
    size = axis_size(axis)
    first, second = x.chunk(2, dim)
    even = ppermute(first, axis, [(r, _owner(2 * r, size)) for r in range(size)])
    odd = ppermute(second, axis, [(r, _owner(2 * r + 1, size)) for r in range(size)])
    turned = _is_odd(axis, x)
    low, high = torch.where(turned, odd, even), torch.where(turned, even, odd)
    return torch.cat([low, high], dim)


def contiguous_parts(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's contiguous part, of ranks that hold theirs in zig-zag order.

    Cost and transpose: as :func:`zigzag_parts`.
    """
    size = axis_size(axis)
    low, high = x.chunk(2, dim)
    turned = _is_odd(axis, x)
    even, odd = torch.where(turned, high, low), torch.where(turned, low, high)
    first = ppermute(even, axis, [(_owner(2 * r, size), r) for r in range(size)])
    second = ppermute(odd, axis, [(_owner(2 * r + 1, size), r) for r in range(size)])
    return torch.cat([first, second], dim)


def _owner(block: int, size: int) -> int:
    """The rank that holds a half-block in zig-zag order."""
    return block if block < size else 2 * size - 1 - block


def _is_odd(axis: Axis, x: Tensor) -> Any:
    """True if the odd one of this rank's two half-blocks comes first."""
    return torch.as_tensor(axis_index(axis) % 2 == 1, device=x.device)


def _order(axis_size: int) -> list[int]:
    """The half-blocks in zig-zag order."""
    return [b for i in range(axis_size) for b in (i, 2 * axis_size - 1 - i)]


def _picked(x: Tensor, axis_size: int, dim: int, order: list[int]) -> Tensor:
    dim = range(x.ndim)[dim]
    half = _half(x.shape[dim], axis_size)
    blocks = x.unflatten(dim, (2 * axis_size, half))
    picked = blocks.index_select(dim, torch.tensor(order, device=x.device))
    return picked.flatten(dim, dim + 1)


def _half(length: int, axis_size: int) -> int:
    """The length of a half-block."""
    n = 2 * axis_size
    if length % n:
        raise ValueError(
            f"a sequence of {length} is not cut into the {n} half-blocks of an axis of "
            f"size {axis_size}: lengths that work are multiples of {n}"
        )
    return length // n


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

"""The part of a tensor that a rank holds, as boxes of the whole.

A flat range of a row-major tensor is no box, but a few: the end of a row, whole rows,
the beginning of another, and so on in each dim. Formats that know of boxes alone
(checkpoints of torch) can so hold any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fsfunc.layout import Coordinates, Layout

__all__ = ["Box", "boxes"]


class Box(NamedTuple):
    """A block of a tensor, contiguous in the local part that holds it.

    `offsets` and `sizes` are counted in the whole tensor, one for each dim; `start` is
    the block's first element in the flattened local part.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(layout: Layout, coordinates: Coordinates) -> list[Box]:
    """The boxes that make up a rank's part, in the order of its elements.

    None where it holds no element; at most 2 * ndim - 1 under a `Flat`, else one.

    >>> import torch
    >>> from fsfunc.layout import Flat
    >>> layout = Layout((4, 3), torch.float32, (Flat(("data",), 2, "u", 0, 7),))
    >>> for box in boxes(layout, {"data": 0}):
    ...     print(*box)
    (0, 0) (2, 3) 0
    (2, 0) (1, 1) 6
    """
    block = layout.block(coordinates)
    if block is None:
        return []
    begins = tuple(start for start, _ in block)
    found, at = [], 0
    span = layout.span(coordinates)
    for offsets, sizes in _cut(tuple(n for _, n in block), *span):
        where = tuple(a + b for a, b in zip(begins, offsets, strict=True))
        found.append(Box(where, sizes, at))
        at += found[-1].numel
    return found


def _cut(
    sizes: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that cover [start, stop) of a flattened block."""
    if start == stop:
        return
    if not sizes:
        yield (), ()
        return
    inner = tuple(sizes[1:])
    row = math.prod(inner)
    first, last = start // row, stop // row

    def within(index: int, low: int, high: int):
        for offsets, lengths in _cut(inner, low, high):
            yield (index, *offsets), (1, *lengths)

    if first == last:
        yield from within(first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from within(first, start % row, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    if stop % row:
        yield from within(last, 0, stop % row)

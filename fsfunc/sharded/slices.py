"""A rank's part of a tensor: taken from the whole, put together again, as boxes.

`assemble` is the inverse of `take`; `boxes` says the same without any tensor. A flat
range of a row-major tensor is no box, but a few: the end of a row, whole rows, the
beginning of another, and so on in each dim::

    . . . x x        1. the end of a row
    x x x x x        2. whole rows
    x x x x x
    x x . . .        3. the beginning of a row

So formats that know of boxes alone (checkpoints of torch) can store any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fsfunc.sharded.layout import (
    Coordinates,
    Key,
    Layout,
    Ranges,
    Region,
    every_coordinate,
)

Locals = Mapping[Key, Tensor] | Iterable[tuple[Coordinates, Tensor]]
"""Local parts by `layout.key(coordinates)`, or beside their coordinates."""


def take(full: Tensor, layout: Layout, coordinates: Coordinates) -> Tensor:
    """Returns the part of a full tensor that the rank at these coordinates has.

    1-D under a `Flat`, the cut block under `Split`, `full` itself with no parts, an
    empty 1-D tensor where an `Owned` is absent.

    Args:
        full: a tensor of the layout's shape, of any dtype.

    Raises:
        ValueError: another shape.

    Cost: a view where the part is one range of `full`'s memory or a block of it, else
    a copy of the part alone. An empty flat part keeps no storage alive.

    >>> from fsfunc.sharded.layout import Flat
    >>> layout = Layout((3, 2), torch.int64, (Flat(("data",), 4, "u", 0, 2),))
    >>> [take(torch.arange(6).view(3, 2), layout, {"data": i}).tolist() for i in (1, 3)]
    [[2, 3], []]
    """
    if tuple(full.shape) != layout.shape:
        raise ValueError(
            f"cannot take a part of {layout.subject} from a tensor of shape "
            f"{list(full.shape)}; pass the whole tensor"
        )
    box = layout.block(coordinates)
    if box is None:
        return full.new_empty(0)
    block = _narrow(full, box)
    if layout.flat is None:
        return block
    pieces = [piece.reshape(-1) for piece in _cover(block, *layout.span(coordinates))]
    if not pieces:
        return full.new_empty(0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def assemble(parts: Locals, layout: Layout) -> Tensor:
    """Returns the full tensor of which every rank took its part: inverts `take`.

    Args:
        parts: for each point of the layout's axes the local part; points that hold no
            element may be left out.
        layout: the layout that all parts have.

    Raises:
        ValueError: a part of another shape; elements that no part holds.

    >>> from fsfunc.sharded.layout import Split
    >>> layout = Layout((3,), torch.int64, (Split(0, "data", 2),))
    >>> x = torch.tensor([5, 6, 7])
    >>> assemble([(at, take(x, layout, at)) for at in every_coordinate(layout)], layout)
    tensor([5, 6, 7])
    """
    parts_by_key = _by_key(parts, layout)
    like = next(iter(parts_by_key.values()), torch.empty(0, dtype=layout.dtype))
    full = like.new_empty(layout.shape)
    missing = []
    for coordinates in every_coordinate(layout):
        region = layout.region(coordinates)
        local = parts_by_key.get(layout.key(coordinates))
        if local is not None:
            write(full, region, local.reshape(-1))
        elif region[1] < region[2]:
            missing.append(coordinates)
    if missing:
        raise ValueError(
            f"cannot assemble {layout.subject}: the parts at {missing} are missing; "
            "pass those of every point of its axes"
        )
    return full


def write(full: Tensor, region: Region, row: Tensor) -> None:
    """Copies a rank's part into the full tensor.

    Args:
        region: that of the part, by `Layout.region`.
        row: a 1-D tensor that begins with the part, such as a row of a gather.
    """
    box, start, stop = region
    # A rank without a block has an empty range: nothing is copied then.
    for piece in _cover(_narrow(full, box or ()), start, stop):
        piece.copy_(row[: piece.numel()].view(piece.shape))
        row = row[piece.numel() :]


def _by_key(parts: Locals, layout: Layout) -> dict[Key, Tensor]:
    """Returns the parts by key, their shapes checked."""
    pairs: list[tuple[Coordinates, Tensor]] = []
    if isinstance(parts, Mapping):
        for key, local in cast(Mapping[Key, Tensor], parts).items():
            pairs.append((dict(zip(layout.axes, key, strict=True)), local))
    else:
        pairs.extend(parts)
    by_key: dict[Key, Tensor] = {}
    for coordinates, local in pairs:
        shape = layout.local_shape(coordinates)
        if tuple(local.shape) != shape:
            raise ValueError(
                f"the part of {layout.subject} at {dict(coordinates)} has shape "
                f"{list(local.shape)}, not {list(shape)} as its layout says: {layout}"
            )
        by_key[layout.key(coordinates)] = local
    return by_key


def _narrow(full: Tensor, box: Ranges) -> Tensor:
    # A dim that is whole is not cut, so that `full` itself is the part of a whole one.
    for dim, (start, length) in enumerate(box):
        if length < full.shape[dim]:
            full = full.narrow(dim, start, length)
    return full


def _cover(block: Tensor, start: int, stop: int) -> list[Tensor]:
    """Returns views that make up [start, stop) of a block's flattening, in order.

    A cut block is not contiguous, and flattening all of it would copy all of it.
    """
    if start == stop:
        return []
    if block.is_contiguous():
        return [block.view(-1)[start:stop]]
    return [
        _narrow(block, tuple(zip(offsets, sizes, strict=True)))
        for offsets, sizes in cut(block.shape, start, stop)
    ]


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
    """Returns the boxes that make up a rank's part, in the order of its elements.

    There is none where it has no element; at most 2 * ndim - 1 under a `Flat`, else
    one.

    >>> import torch
    >>> from fsfunc.sharded.layout import Flat
    >>> layout = Layout((4, 3), torch.float32, (Flat(("data",), 2, "u", 0, 7),))
    >>> for box in boxes(layout, {"data": 0}):
    ...     print(*box)
    (0, 0) (2, 3) 0
    (2, 0) (1, 1) 6
    """
    block = layout.block(coordinates)
    if block is None:
        return []
    block_offsets = tuple(start for start, _ in block)
    rank_boxes: list[Box] = []
    local_offset = 0
    span = layout.span(coordinates)
    for offsets, sizes in cut(tuple(n for _, n in block), *span):
        in_tensor = tuple(a + b for a, b in zip(block_offsets, offsets, strict=True))
        rank_boxes.append(Box(in_tensor, sizes, local_offset))
        local_offset += rank_boxes[-1].numel
    return rank_boxes


def cut(
    sizes: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields (offsets, sizes) of boxes covering [start, stop) of a flattened block."""
    if start == stop:
        return
    if not sizes:  # a scalar
        yield (), ()
        return
    inner = tuple(sizes[1:])
    row = math.prod(inner)
    first, last = start // row, stop // row

    def boxes_in_row(
        index: int, low: int, high: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for offsets, lengths in cut(inner, low, high):
            yield (index, *offsets), (1, *lengths)

    if first == last:  # all of it lies in one row
        yield from boxes_in_row(first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from boxes_in_row(first, start % row, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from boxes_in_row(last, 0, stop % row)

"""The elements a rank holds: taken from a full tensor, named, put together again.

`assemble` is the inverse of `take`; `runs` says the same without any tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor

from fsfunc.layout import Coordinates, Key, Layout, every_coordinate

Locals = Mapping[Key, Tensor] | Iterable[tuple[Coordinates, Tensor]]
"""Local parts by `layout.key(coordinates)`, or beside their coordinates."""


def runs(layout: Layout, coordinates: Coordinates) -> Tensor:
    """The elements a rank holds: int64 [k, 2] of (global row-major start, length).

    They are in local order, which is also ascending; none touches the next.
    Cost: O(k), at most one run for each row that is cut.

    >>> from fsfunc.layout import Split
    >>> layout = Layout((3, 4), torch.float32, (Split("model", 2, 1),))
    >>> runs(layout, {"model": 1}).tolist()
    [[2, 2], [6, 2], [10, 2]]
    """
    box = layout.block(coordinates)
    start, stop = layout.span(coordinates)
    if box is None or start == stop:
        return torch.empty((0, 2), dtype=torch.int64, device="cpu")
    lengths = [n for _, n in box]
    strides = [math.prod(layout.shape[dim + 1 :]) for dim in range(layout.ndim)]
    cut = [dim for dim, n in enumerate(layout.shape) if lengths[dim] < n]
    outer = cut[-1] if cut else 0  # dims before this one step from run to run
    length = math.prod(lengths[outer:])
    first, end = start // length, -(-stop // length)
    rest = torch.arange(first, end, dtype=torch.int64, device="cpu")
    at = sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))
    begins = torch.full_like(rest, at)
    for dim in reversed(range(outer)):
        begins += rest % lengths[dim] * strides[dim]
        rest = rest // lengths[dim]
    found = torch.stack([begins, torch.full_like(begins, length)], dim=1)
    skip = start - first * length  # a Flat may begin and end inside a run
    found[0] += torch.tensor([skip, -skip], device="cpu")
    found[-1, 1] -= end * length - stop
    return found


def take(full: Tensor, layout: Layout, coordinates: Coordinates) -> Tensor:
    """The part of a full tensor that the rank at these coordinates holds.

    1-D under a `Flat`, the cut block under `Split`, `full` itself with no parts, an
    empty 1-D tensor where an `Owned` is absent.

    Args:
        full: a tensor of the layout's shape, of any dtype.

    Raises:
        ValueError: another shape.

    Cost: a view where the part is one range of `full`'s memory or a block of it, else
    a copy of the part alone. An empty flat part keeps no storage alive.

    >>> from fsfunc.layout import Flat
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
    """The full tensor of which every rank took its part: the inverse of `take`.

    Args:
        parts: for each point of the layout's axes the local part; points that hold no
            element may be left out.
        layout: the layout that all parts have.

    Raises:
        ValueError: a part of another shape; elements that no part holds.

    >>> from fsfunc.layout import Split
    >>> layout = Layout((3,), torch.int64, (Split("data", 2, 0),))
    >>> x = torch.tensor([5, 6, 7])
    >>> assemble([(at, take(x, layout, at)) for at in every_coordinate(layout)], layout)
    tensor([5, 6, 7])
    """
    held = by_key(parts, layout)
    full = first_or_empty(held, layout).new_empty(layout.shape)
    missing = []
    for coordinates in every_coordinate(layout):
        start, stop = layout.span(coordinates)
        local = held.get(layout.key(coordinates))
        if start == stop:
            continue
        if local is None:
            missing.append(coordinates)
            continue
        block, rest = _narrow(full, layout.block(coordinates) or ()), local.reshape(-1)
        for piece in _cover(block, start, stop):
            piece.copy_(rest[: piece.numel()].view(piece.shape))
            rest = rest[piece.numel() :]
    if missing:
        raise ValueError(
            f"cannot assemble {layout.subject}: the parts at {missing} are missing; "
            "pass those of every point of its axes"
        )
    return full


def by_key(parts: Locals, layout: Layout) -> dict[Key, Tensor]:
    """The parts by key, their shapes checked."""
    pairs: list[tuple[Coordinates, Tensor]] = []
    if isinstance(parts, Mapping):
        for key, local in cast(Mapping[Key, Tensor], parts).items():
            pairs.append((dict(zip(layout.axes, key, strict=True)), local))
    else:
        pairs.extend(parts)
    held = {}
    for coordinates, local in pairs:
        shape = layout.local_shape(coordinates)
        if tuple(local.shape) != shape:
            raise ValueError(
                f"the part of {layout.subject} at {dict(coordinates)} has shape "
                f"{list(local.shape)}, not {list(shape)} as its layout says: {layout}"
            )
        held[layout.key(coordinates)] = local
    return held


def first_or_empty(held: Mapping[Key, Tensor], layout: Layout) -> Tensor:
    """A tensor with the dtype and device of the parts."""
    return next(iter(held.values()), torch.empty(0, dtype=layout.dtype))


def _narrow(full: Tensor, box: tuple[tuple[int, int], ...]) -> Tensor:
    for dim, (start, length) in enumerate(box):
        if length < full.shape[dim]:
            full = full.narrow(dim, start, length)
    return full


def _cover(block: Tensor, start: int, stop: int) -> list[Tensor]:
    """Views that make up [start, stop) of a block's flattening, in order.

    A cut block is not contiguous, and flattening all of it would copy all of it: whole
    rows are one view, and the rows at either end are cut in turn.
    """
    if start == stop:
        return []
    if block.is_contiguous():
        return [block.view(-1)[start:stop]]
    row = block[0].numel()
    first, last = start // row, stop // row
    if first == last:
        return _cover(block[first], start - first * row, stop - first * row)
    head = _cover(block[first], start % row, row) if start % row else []
    tail = _cover(block[last], 0, stop % row) if stop % row else []
    rows = block[first + bool(head) : last]
    return [*head, *([rows] if len(rows) else []), *tail]

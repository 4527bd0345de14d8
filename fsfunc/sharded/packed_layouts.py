"""Layouts of leaves that share a packed buffer, and of stacks of ranks' own values.

``state.placing`` lays the leaves of a unit out by `pack_flat`. Checkpoints store values
that differ between ranks as one tensor, by `stacked`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fsfunc.sharded.layout import Layout
from fsfunc.sharded.placements import Flat, Placement, Split, largest_block


def pack_flat(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    names: Sequence[str],
    axes: Sequence[str],
    size: int | Sequence[int],
    buffer: str,
    *,
    outer: Sequence[Sequence[Placement]] | None = None,
) -> tuple[Layout, ...]:
    """Returns the layouts of leaves that lie one after another in one packed buffer.

    chunk = ceil(total / size); all padding is at the buffer's end.

    Args:
        shapes: the leaves' global shapes.
        dtype: the dtype of all of them.
        names: their paths.
        axes: the axes over which the buffer is cut, the major one first.
        size: the number of ranks; with several axes, the size of each.
        buffer: the name of this buffer, unlike those of others.
        outer: for each leaf the placements before its `Flat`, if any. A leaf then
            takes the room of its largest block, the same on every rank.

    >>> shapes = [(3,), (), (5,)]
    >>> for layout in pack_flat(shapes, torch.float32, "abc", ["data"], 4, "u"):
    ...     print(layout)
    a f32[3] flat over data=4 at 0:3 of 4x3
    b f32[] flat over data=4 at 3:4 of 4x3
    c f32[5] flat over data=4 at 4:9 of 4x3
    """
    sizes = (size,) if isinstance(size, int) else tuple(size)
    before = [()] * len(shapes) if outer is None else [tuple(parts) for parts in outer]
    blocks = [
        Layout(tuple(shape), dtype, parts, name)
        for shape, parts, name in zip(shapes, before, names, strict=True)
    ]
    offsets = [0]
    for block in blocks:
        offsets.append(offsets[-1] + largest_block(block.shape, block.parts))
    chunk = -(-offsets[-1] // math.prod(sizes)) if math.prod(sizes) else 0
    flats = [
        Flat(tuple(axes), math.prod(sizes), buffer, offset, chunk, sizes)
        for offset in offsets[:-1]
    ]
    return tuple(
        Layout(block.shape, block.dtype, (*block.parts, flat), block.name)
        for block, flat in zip(blocks, flats, strict=True)
    )


# Values that differ between ranks are no global tensor, but their stack is one,
# `[n, *shape]`, split along dim 0: so they are saved and loaded.


def rows_over(sizes: Mapping[str, int]) -> tuple[Split, ...]:
    """Returns the placements of a stack of which each rank along axes has one row."""
    return tuple(Split(0, axis, size) for axis, size in sizes.items())


def stacked(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """Returns the layout of the stack of the values of ranks along some axes.

    Args:
        layout: the layout of each value, over other axes.
        sizes: the sizes of the axes, the first varying slowest.

    >>> print(stacked(Layout((3,), torch.float32, name="h"), {"data": 2}))
    h f32[2, 3] split over data=2 along dim 0
    """
    parts = (*rows_over(sizes), *_moved(layout.parts, 1))
    return replace(
        layout, shape=(math.prod(sizes.values()), *layout.shape), parts=parts
    )


def unstacked(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """Returns the layout of one row of a stack: inverts `stacked`."""
    parts = _moved(layout.parts[len(sizes) :], -1)
    return replace(layout, shape=layout.shape[1:], parts=parts)


def _moved(parts: Sequence[Placement], offset: int) -> tuple[Placement, ...]:
    """Returns the placements, with an offset added to the dims that they split."""
    return tuple(
        replace(p, dim=p.dim + offset) if isinstance(p, Split) else p for p in parts
    )

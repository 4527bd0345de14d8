"""The stack of what each rank has of its own, as one tensor.

Such values are no tensor that is one value along those axes. Their stack is one:
``[n, *shape]``, split along dim 0, each rank holding its row. It is saved and loaded as
any other, and to turn the values into their stack moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsfunc.sharded.layout import Layout
from fsfunc.sharded.placements import Placement, Split


def rows_over(sizes: Mapping[str, int]) -> tuple[Split, ...]:
    """The parts by which ranks along these axes hold a row each of a stack."""
    return tuple(Split(0, axis, size) for axis, size in sizes.items())


def stacked(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout of the stack of what ranks along axes hold, each as ``layout`` says.

    Args:
        sizes: of the axes, the first varying slowest; the leaf lies over others.

    >>> import torch
    >>> print(stacked(Layout((3,), torch.float32, name="h"), {"data": 2}))
    h f32[2, 3] split over data=2 along dim 0
    """
    parts = (*rows_over(sizes), *_moved(layout.parts, 1))
    return replace(
        layout, shape=(math.prod(sizes.values()), *layout.shape), parts=parts
    )


def unstacked(layout: Layout, sizes: Mapping[str, int]) -> Layout:
    """The layout of one row: `stacked` is the inverse."""
    parts = _moved(layout.parts[len(sizes) :], -1)
    return replace(layout, shape=layout.shape[1:], parts=parts)


def _moved(parts: Sequence[Placement], by: int) -> tuple[Placement, ...]:
    """Parts of a tensor that has one dim more, or less, in front."""
    return tuple(
        replace(p, dim=p.dim + by) if isinstance(p, Split) else p for p in parts
    )

"""Values that each rank has of its own: their marks, and all of them as one tensor.

What a sharded function returns as each rank's own, in its state, is marked; so is what
a checkpoint has of each rank. Another sharded function that is given it then knows.

Such values are no tensor that is one value along those axes. Their stack is one:
``[n, *shape]``, split along dim 0, each rank holding its row. It is saved and loaded as
any other, and to turn the values into their stack moves nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc.sharded.layout import Layout
from fsfunc.sharded.placements import Placement, Split

__all__ = [
    "is_rank_local",
    "mark_rank_local",
    "rows_over",
    "stacked",
    "unstacked",
]


_MARKED: dict[int, weakref.ref] = {}


def mark_rank_local(x: Tensor) -> None:
    """Says of a tensor that each rank has its own, for as long as it is there."""
    key = id(x)
    if key not in _MARKED:
        _MARKED[key] = weakref.ref(x, partial(_forget, key))


def is_rank_local(x: Any) -> bool:
    """True if a tensor was marked."""
    found = _MARKED.get(id(x))
    return found is not None and found() is x


def _forget(key: int, gone: weakref.ref) -> None:
    if _MARKED.get(key) is gone:
        del _MARKED[key]


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

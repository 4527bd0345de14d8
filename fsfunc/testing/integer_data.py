"""Integers as floats: whatever order they are added in, the sums have the same bits.

So do products and, over powers of two, means: a sharded step must give the very bits of
one device, and a test needs no tolerance.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["integers"]


def integers(
    *shape: int, seed: int = 0, high: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Integers of ``-high`` to ``high``, the same for one seed and shape.

    >>> integers(2, 3)
    tensor([[ 2.,  2.,  1.],
            [-2.,  1.,  2.]])
    """
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=draw).to(dtype)

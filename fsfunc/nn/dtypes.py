"""Dtypes of sums, and of products under autocast."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which sums over ``x`` are held: fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def is_autocast(x: Tensor) -> bool:
    """True if autocast is on for the device of ``x``."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def autocast(*xs: Tensor) -> Sequence[Tensor]:
    """Tensors in autocast's dtype, where it is on and the first is not fp64."""
    if not is_autocast(xs[0]) or xs[0].dtype == torch.float64:
        return xs
    return [x.to(torch.get_autocast_dtype(x.device.type)) for x in xs]


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Inside, products are made in the dtypes of their factors."""
    if not is_autocast(x):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)

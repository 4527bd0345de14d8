"""``precision``: compute in one dtype, keep and update in another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fsfunc.core.frames import frame, inside

__all__ = ["precision"]


def precision(
    f: Callable[..., Any],
    compute: torch.dtype,
    reduce: torch.dtype | None = None,
) -> Callable[..., Any]:
    """``f`` with units computing in ``compute`` on parameters kept as they are.

    A unit's parameters and floating inputs are cast; under ``shard`` the rank's part is
    cast before the gather, which then moves the smaller dtype, and no full-size copy in
    the wider one exists. Gradients are reduced in ``reduce`` and given in the dtype of
    the parameters. Buffers of a module (`from_module`) are left as they are: running
    statistics and counters would not survive a narrow dtype.

    Args:
        f: a unit, a loss, or a train step.
        compute: the dtype of units' arithmetic, such as ``torch.bfloat16``.
        reduce: the dtype of the reductions; by default ``compute``.

    Raises:
        ValueError: a dtype that is not floating.

    >>> import torch, fsfunc as ff
    >>> unit = ff.unit(lambda p, x: p * x)
    >>> ff.precision(unit, torch.bfloat16)(torch.ones(2), torch.ones(2)).dtype
    torch.bfloat16
    """
    for name, dtype in (("compute", compute), ("reduce", reduce)):
        if dtype is None and name == "reduce":
            continue
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{name}={dtype!r}: it is a floating dtype, such as torch.bfloat16"
            )

    @functools.wraps(f)
    def run(*args: Any, **keywords: Any) -> Any:
        outer = frame()
        with inside(replace(outer, compute=compute, reduce=reduce)):
            return f(*args, **keywords)

    return run

"""A narrower dtype on the wire than units compute in, or sums are taken in."""

from __future__ import annotations

import torch
from torch import Tensor

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.transforms.messages.wire import Gather, Reduction

__all__ = ["CastGather", "CastReduction"]


class CastGather(Gather):
    """Parameters gathered in ``dtype``, and computed with in what they would be.

    ``precision(compute=dtype)`` also computes in it.

    Args:
        dtype: floating.

    Cost: an all-gather in ``dtype``, and a cast of the whole.

    >>> CastGather(torch.bfloat16)
    CastGather(to=torch.bfloat16)
    """

    exact = False

    def __init__(self, dtype: torch.dtype):
        self.to = _checked(dtype)

    def encode(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        return part.to(self.to)

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int) -> Tensor:
        return arrived.to(dtype)


class CastReduction(Reduction):
    """Gradients sent in ``dtype``, and summed in float32.

    ``precision(reduce=dtype)`` also sums in it, which loses more the more ranks there
    are. What the cast loses, `error_feedback` sends later.

    Args:
        dtype: floating.

    Cost: an all-to-all in ``dtype``, (n-1)/n of a gradient sent, in place of a
    reduce-scatter. At zero=0 an all-reduce, summed in ``dtype``.
    """

    exact = False

    def __init__(self, dtype: torch.dtype):
        self.to = _checked(dtype)

    def encode(self, buffer: Tensor, ranks: int) -> Tensor:
        return buffer.to(self.to)

    def move(self, sent: Tensor, where: RankGroup, whole: bool, what: str) -> Handle:
        if whole:
            return super().move(sent, where, whole, what)
        return where.start("all_to_all", sent.view(where.size, -1), what=what)

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int | None) -> Tensor:
        if arrived.ndim == 1:
            return arrived.to(dtype)
        return arrived.sum(0, dtype=torch.float32).to(dtype)


def _checked(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(
            f"dtype={dtype!r}: it is a floating dtype such as torch.bfloat16"
        )
    return dtype

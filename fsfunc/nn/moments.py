"""Mean and variance of values that are spread over ranks, and normalisation by them.

Each rank sums its values about their own mean c, with d = x - c in the dtype of ``x``
(fp32 at least), and moves the sums to the origin in fp64, where those of all ranks add
up in one all-reduce (see ``statistics``):

    sum x = n c + sum d          sum x^2 = sum d^2 + 2 c sum d + n c^2

What is normalised is d too: y = (d + (c - mean)) / sqrt(var + eps), with c - mean in
fp64. So a mean far larger than the deviation costs what it costs in fp64 alone. The
shift is a constant to derivatives, which is exact, since nothing depends on it; and the
sum's transpose is a sum, so that every derivative is composed of these.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsfunc.comm.collectives import psum
from fsfunc.nn.dtypes import wide

__all__ = ["normalized", "normalizer", "shifted_sums", "summed"]


def shifted_sums(
    x: Tensor, dims: list[int], keep: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x - c, c, sum x, sum x^2) over ``dims``, kept at size 1: sums in fp64.

    ``x - c`` is in fp32 at least; without ``keep`` its memory is that of the squares.
    """
    x = x.to(wide(x))
    n = math.prod(x.shape[d] for d in dims)
    c = x.detach().mean(dims, keepdim=True)
    off = x - c
    first = off.sum(dims, keepdim=True).double()
    second = (off.square() if keep else off.square_()).sum(dims, keepdim=True).double()
    c = c.double()
    return off, c, n * c + first, second + 2 * c * first + n * c * c


def normalizer(
    c: Tensor, mean: Tensor, square: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(scale, shift) that take x - c to its normalised value."""
    factor = torch.rsqrt((square - mean * mean).clamp(min=0) + eps)
    return factor, (c - mean) * factor


def normalized(off: Tensor, factor: Tensor, move: Tensor, like: Tensor) -> Tensor:
    """``off * factor + move``, which keeps ``off`` alone for its backward."""
    return (off * factor.to(off.dtype) + move.to(off.dtype)).to(like.dtype)


def summed(x: Tensor, axis: tuple[str, ...]) -> Tensor:
    """The sum over the axis, as each rank's own: its transpose is a sum again."""
    return psum(x, axis, of="V", to="V") if axis else x

"""Norms of split features; mean and variance over ranks.

Two numbers a row are summed over the axis, as ``moments`` says, forward and backward.
A leaf that is split along dim 0 gives the axis; a plain weight is this rank's part.

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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import axis_size
from fsfunc.nn.numerics import not_negative, wide
from fsfunc.nn.tensor_parallel import Leaf, part_of


class ShiftedSums(NamedTuple):
    """Sums of x over some dims, which are kept at size 1.

    Args:
        off: x - c, in fp32 at least.
        c: about the mean, which no derivative is taken of; in fp64.
        total: sum x; ``squares``: sum x^2; both in fp64.
    """

    off: Tensor
    c: Tensor
    total: Tensor
    squares: Tensor


def shifted_sums(x: Tensor, dims: list[int], keep: bool = True) -> ShiftedSums:
    """Sums of ``x`` over ``dims``, computed from its distance to about its mean.

    Without ``keep`` the memory of ``off`` is that of the squares. Of no values the sums
    are 0, and so is c.
    """
    x = x.to(wide(x))
    n = math.prod(x.shape[d] for d in dims)
    c = x.detach().sum(dims, keepdim=True) / max(n, 1)
    off = x - c
    first = off.sum(dims, keepdim=True).double()
    second = (off.square() if keep else off.square_()).sum(dims, keepdim=True).double()
    c = c.double()
    squares = second + 2 * c * first + n * c * c
    return ShiftedSums(off, c, n * c + first, squares)


def normalizer(
    c: Tensor, mean: Tensor, square: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(scale, shift) that take x - c to its normalised value."""
    factor = torch.rsqrt(not_negative(square - mean * mean) + eps)
    return factor, (c - mean) * factor


def normalized(off: Tensor, factor: Tensor, move: Tensor, like: Tensor) -> Tensor:
    """``off * factor + move``, which keeps ``off`` alone for its backward."""
    return (off * factor.to(off.dtype) + move.to(off.dtype)).to(like.dtype)


def summed(x: Tensor, axis: tuple[str, ...]) -> Tensor:
    """The sum over the axis, as each rank's own: its transpose is a sum again."""
    return psum(x, axis, of="V", to="V") if axis else x


def layer_norm(
    x: Tensor,
    weight: Leaf | None = None,
    bias: Leaf | None = None,
    *,
    axis: str | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``x`` normalised over its last dim, which may be split over an axis.

    y = weight * (x - mean) / sqrt(var + eps) + bias, with the mean and the biased
    variance over all features.

    Args:
        x: [..., features / n], floating, this rank's features.
        weight, bias: [features], leaves that are split along dim 0; or this rank's part
            [features / n] as a tensor of its own.
        axis: the axis that the features are split over; by default that of a split
            leaf. Without one, or of size 1: torch's layer norm.
        eps: added to the variance, in units of ``x`` squared.

    Raises:
        ValueError: a leaf split along another dim or over another axis; one of another
            size than this rank's features.

    Cost: one all-reduce of two numbers of 8 bytes a row, and one backward. Two copies
    of ``x``, in fp32 at least, are kept for the backward (with no weight, one).

    Source: Ba, Kiros and Hinton, 2016.

    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=1e-9).tolist()
    [[-1.0, 1.0]]
    """
    w, b, axis = _parts("layer_norm", x, weight, bias, axis)
    if axis is None:
        return F.layer_norm(x, x.shape[-1:], w, b, eps)
    off, shift, total, squares = shifted_sums(x, [-1])
    n = x.shape[-1] * axis_size(axis)
    total, squares = summed(torch.stack([total, squares]), (axis,)).unbind()
    factor, move = normalizer(shift, total / n, squares / n, eps)
    y = off * factor.to(off.dtype) + move.to(off.dtype)
    y = y if w is None else y * w
    return (y if b is None else y + b).to(x.dtype)


def rms_norm(
    x: Tensor, weight: Leaf | None = None, *, axis: str | None = None, eps: float = 1e-6
) -> Tensor:
    """``x`` over the root of its mean square, over a last dim that may be split.

    y = weight * x / sqrt(mean(x^2) + eps)

    Args, Raises: those of :func:`layer_norm`.

    Cost: one all-reduce of one number a row, in the dtype of ``x`` (fp32 at least), and
    one backward. Two copies of ``x`` in that dtype are kept for the backward.

    Source: Zhang and Sennrich, 2019.

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, 3.0]])).round().tolist()
    [[1.0, 1.0]]
    """
    w, _, axis = _parts("rms_norm", x, weight, None, axis)
    if axis is None:
        return F.rms_norm(x, x.shape[-1:], w, eps)
    y = x.to(wide(x))
    squares = summed(y.square().sum(-1, keepdim=True), (axis,))
    y = y * torch.rsqrt(squares / (x.shape[-1] * axis_size(axis)) + eps)
    return (y if w is None else y * w).to(x.dtype)


class _Parts(NamedTuple):
    """This rank's parts of weight and bias; the axis, None where one rank has all."""

    weight: Any
    bias: Any
    axis: str | None


def _parts(what: str, x: Tensor, weight: Any, bias: Any, axis: str | None) -> _Parts:
    """The parts of weight and bias, checked against the features of ``x``."""
    parts, features = [], x.shape[-1]
    for name, leaf in (("weight", weight), ("bias", bias)):
        if leaf is None:
            parts.append(None)
            continue
        part, axis = part_of(what, leaf, (0,), axis=axis)
        parts.append(part)
        if part.shape != (features,):
            raise ValueError(
                f"{what}: this rank has {features} features of shape {tuple(x.shape)}, "
                f"and of the {name} {tuple(part.shape)}: lay it out by ff.Split(0, "
                "axis) as the features are"
            )
    if axis is not None and axis_size(axis) == 1:
        axis = None
    claim_rank_local(x, axis, what)
    return _Parts(parts[0], parts[1], axis)

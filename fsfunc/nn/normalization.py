"""Layer norm and RMS norm of features that are split over ranks.

Batch norms (``statistics.py``) sum by the functions of this file too. The sums of a row
go over the axis in one all-reduce, forward and backward. A weight leaf that is split
along dim 0 names the axis; a plain weight is this rank's part.

Each rank sums its values about their own mean c, with d = x - c in the dtype of ``x``
(fp32 at least), and moves the sums to the origin in fp64, where those of all ranks add
up (``statistics.py`` says why neither plain sums nor centered ones alone would do):

    sum x = n c + sum d          sum x^2 = sum d^2 + 2 c sum d + n c^2

The result is made of d too: y = (d + (c - mean)) / sqrt(var + eps), with c - mean in
fp64. So where the mean is far larger than the deviation, only as many digits are lost
as fp64 loses. Derivatives take c as a constant, which is exact, since the result does
not depend on c. The transpose of a sum over ranks is such a sum again, so every
derivative is composed of these operations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import axis_size
from fsfunc.comm.mesh import Axis, axis_names
from fsfunc.nn.numerics import clamp_at_zero, sum_dtype
from fsfunc.nn.tensor_parallel import ParamLeaf, local_part


class ShiftedSums(NamedTuple):
    """Sums of x over some dims; these stay in the shape, with size 1.

    Args:
        centered: x - center, in fp32 at least.
        center: the mean of x up to rounding, detached, in fp64.
        total: sum x, in fp64.
        squares: sum x^2, in fp64.
    """

    centered: Tensor
    center: Tensor
    total: Tensor
    squares: Tensor


def shifted_sums(x: Tensor, dims: list[int], keep_centered: bool = True) -> ShiftedSums:
    """Returns the sums of ``x`` over ``dims``, computed about its mean.

    Without ``keep_centered`` the field ``centered`` is squared in place, and must not
    be read. For an empty ``x`` the sums and the center are 0.
    """
    x = x.to(sum_dtype(x))
    n = math.prod(x.shape[d] for d in dims)
    center = x.detach().sum(dims, keepdim=True) / max(n, 1)
    centered = x - center
    centered_sum = centered.sum(dims, keepdim=True).double()
    centered_squares = (
        (centered.square() if keep_centered else centered.square_())
        .sum(dims, keepdim=True)
        .double()
    )
    center = center.double()
    squares = centered_squares + 2 * center * centered_sum + n * center * center
    return ShiftedSums(centered, center, n * center + centered_sum, squares)


def scale_and_shift(
    center: Tensor, mean: Tensor, mean_square: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns (scale, shift) with which scale * (x - center) + shift is normalised."""
    scale = torch.rsqrt(clamp_at_zero(mean_square - mean * mean) + eps)
    return scale, (center - mean) * scale


def apply_scale_and_shift(
    centered: Tensor, scale: Tensor, shift: Tensor, like: Tensor
) -> Tensor:
    """Returns ``centered * scale + shift`` in the dtype of ``like``.

    Scale and shift are one number a row, so autograd saves ``centered`` alone.
    """
    return (centered * scale.to(centered.dtype) + shift.to(centered.dtype)).to(
        like.dtype
    )


def sum_over_ranks(x: Tensor, axis: tuple[str, ...]) -> Tensor:
    """Sums over the axis, typed V -> V: its transpose is a sum over the ranks too.

    Each rank uses the sum on values of its own, so each one's cotangent counts.
    """
    return psum(x, axis, of="V", to="V") if axis else x


def layer_norm(
    x: Tensor,
    weight: ParamLeaf | None = None,
    bias: ParamLeaf | None = None,
    *,
    axis: Axis | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalises ``x`` over its last dim, which may be split over an axis.

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
    of ``x``, in fp32 at least, are saved for the backward (with no weight, one).

    Source: Ba, Kiros and Hinton, 2016.

    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=1e-9).tolist()
    [[-1.0, 1.0]]
    """
    w, b, axis = _local_params("layer_norm", x, weight, bias, axis)
    if axis is None:
        return F.layer_norm(x, x.shape[-1:], w, b, eps)
    centered, center, total, squares = shifted_sums(x, [-1])
    n = x.shape[-1] * axis_size(axis)
    sums = sum_over_ranks(torch.stack([total, squares]), axis_names(axis))
    total, squares = sums.unbind()
    scale, shift = scale_and_shift(center, total / n, squares / n, eps)
    y = centered * scale.to(centered.dtype) + shift.to(centered.dtype)
    y = y if w is None else y * w
    return (y if b is None else y + b).to(x.dtype)


def rms_norm(
    x: Tensor,
    weight: ParamLeaf | None = None,
    *,
    axis: Axis | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Divides ``x`` by its root mean square over its last dim, which may be split.

    y = weight * x / sqrt(mean(x^2) + eps)

    Args, Raises: those of :func:`layer_norm`.

    Cost: one all-reduce of one number a row, in the dtype of ``x`` (fp32 at least), and
    one backward. Two copies of ``x`` in that dtype are saved for the backward.

    Source: Zhang and Sennrich, 2019.

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, 3.0]])).round().tolist()
    [[1.0, 1.0]]
    """
    w, _, axis = _local_params("rms_norm", x, weight, None, axis)
    if axis is None:
        return F.rms_norm(x, x.shape[-1:], w, eps)
    y = x.to(sum_dtype(x))
    squares = sum_over_ranks(y.square().sum(-1, keepdim=True), axis_names(axis))
    y = y * torch.rsqrt(squares / (x.shape[-1] * axis_size(axis)) + eps)
    return (y if w is None else y * w).to(x.dtype)


class _LocalParams(NamedTuple):
    """This rank's parts of weight and bias; the axis, None where one rank has all."""

    weight: Tensor | None
    bias: Tensor | None
    axis: Axis | None


def _local_params(
    layer: str,
    x: Tensor,
    weight: ParamLeaf | None,
    bias: ParamLeaf | None,
    axis: Axis | None,
) -> _LocalParams:
    """Returns the local parts of weight and bias, checked against ``x``'s features.

    Args:
        layer: the public function's name, for messages.
    """
    parts: list[Tensor | None] = []
    features = x.shape[-1]
    for name, leaf in (("weight", weight), ("bias", bias)):
        if leaf is None:
            parts.append(None)
            continue
        part, axis = local_part(layer, leaf, (0,), axis=axis)
        parts.append(part)
        if part.shape != (features,):
            raise ValueError(
                f"{layer}: this rank has {features} features of shape "
                f"{tuple(x.shape)}, and of the {name} {tuple(part.shape)}: lay it out "
                "by ff.Split(0, axis) as the features are"
            )
    if axis is not None and axis_size(axis) == 1:
        axis = None
    claim_rank_local(x, axis, layer)
    return _LocalParams(parts[0], parts[1], axis)

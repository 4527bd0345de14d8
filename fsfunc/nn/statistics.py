"""Batch normalisation as functions: statistics leave the loss as sums.

    y, stats = batch_norm(params, x)          in the loss: sums of x and of x^2
    running = commit_statistics(running, stats)    once a batch, outside the loss

A batch that is cut into microbatches, or spread over ranks, is normalised piece by
piece, each by its own statistics. The sums that the pieces return are added up by the
gradient call. So running statistics are those of the whole batch, committed once,
however it was cut. ``sync_batch_norm`` normalises by the statistics of all ranks.

How it stays exact: in fp32 a plain sum of squares loses the variance where the mean is
large, and sums of squares about each piece's own mean do not simply add up. So each
piece is summed about its own mean, and the sums are moved to the origin in fp64
(``shifted_sums`` in ``normalization.py``). fp64 loses (mean / deviation)^2 / 2^53 of
the variance. fp32 data of that mean were themselves rounded by more:
(mean / deviation)^2 / 2^48.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.groups import axis_size, get_group
from fsfunc.comm.mesh import Axis, here
from fsfunc.comm.typed_maps import pcast
from fsfunc.core.frames import recording
from fsfunc.core.losses import Summed
from fsfunc.nn.normalization import (
    apply_scale_and_shift,
    scale_and_shift,
    shifted_sums,
    sum_over_ranks,
)
from fsfunc.nn.numerics import sum_dtype
from fsfunc.tree.types import PyTree

_Tree = TypeVar("_Tree")


class Moments(NamedTuple):
    """Sums over the values of each channel, in fp64: those of two batches add up.

    Args:
        total: [C], the sum of the values.
        squares: [C], the sum of their squares.
        count: [], the number of values a channel has, in fp64: exact up to 2^53.
    """

    total: Tensor
    squares: Tensor
    count: Tensor


class RunningStatistics(NamedTuple):
    """The statistics by which evaluation normalises.

    Args:
        mean: [C], of the values.
        var: [C], their unbiased variance.
        count: [] int64, how many batches were committed.
    """

    mean: Tensor
    var: Tensor
    count: Tensor


def init_statistics(
    channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> RunningStatistics:
    """Returns running statistics before the first batch: mean 0, variance 1, count 0.

    >>> init_statistics(2)
    RunningStatistics(mean=tensor([0., 0.]), var=tensor([1., 1.]), count=tensor(0))
    """
    return RunningStatistics(
        torch.zeros(channels, dtype=dtype, device=device),
        torch.ones(channels, dtype=dtype, device=device),
        torch.zeros((), dtype=torch.int64, device=device),
    )


def batch_norm(
    params: Mapping[str, Tensor] | None,
    x: Tensor,
    *,
    eps: float = 1e-5,
    running: RunningStatistics | None = None,
) -> tuple[Tensor, Summed[Moments] | None]:
    """Normalises ``x`` channel by channel; returns that, and the sums of ``x``.

    y = weight * (x - mean) / sqrt(var + eps) + bias, with the mean and the biased
    variance of this very ``x``; or, with ``running``, with those.

    Return ``stats`` from the unit and, beside its value, from the loss; then give them
    to :func:`commit_statistics`. They are not differentiated, and those that a
    recompute makes are dropped: nothing is counted twice.

    Args:
        params: ``{"weight": [C], "bias": [C]}``; either may be missing (1 and 0).
        x: [N, C, *], floating; N is this microbatch's.
        eps: added to the variance, in units of ``x`` squared.
        running: statistics to normalise by, for evaluation.

    Returns:
        ``y`` like ``x``, and ``Summed(Moments)``, or None where ``running`` is given.

    Raises:
        ValueError: fewer than two values a channel to take statistics of; a weight,
            bias or running statistics of another shape.

    Cost: that of torch's batch norm and, for the statistics, three more reads of ``x``
    and one copy, freed once they are made. The statistics take 16 C + 8 bytes.

    Source: Ioffe and Szegedy, 2015, algorithm 1; deferred as in FairScale's Pipe; the
    sums about a shift: Chan, Golub and LeVeque, 1983.

    >>> import torch
    >>> y, stats = batch_norm(None, torch.tensor([[1.0], [3.0]]), eps=1e-9)
    >>> y.tolist(), [x.tolist() for x in stats.tree]
    ([[-1.0], [1.0]], [[4.0], [10.0], 2.0])
    """
    check_channel_shapes(params, x, running)
    y = torch_batch_norm(params, x, eps, running)
    if running is not None:
        return y, None
    dims = [d for d in range(x.ndim) if d != 1]
    _, _, total, squares = shifted_sums(x.detach(), dims, keep_centered=False)
    n = x.numel() // x.shape[1]
    count = torch.full((), n, dtype=torch.float64, device=x.device)
    return y, Summed(Moments(total.flatten(), squares.flatten(), count))


def torch_batch_norm(
    params: Mapping[str, Tensor] | None,
    x: Tensor,
    eps: float,
    running: RunningStatistics | None,
) -> Tensor:
    """Calls torch's batch norm, by running statistics or by those of ``x``."""
    tensors = dict(params or {})
    if running is not None:
        tensors |= {"running_mean": running.mean, "running_var": running.var}
    # torch's kernels take statistics and weights in one dtype, fp32 for half inputs.
    tensors = {name: value.to(sum_dtype(x)) for name, value in tensors.items()}
    absent = {"running_mean": None, "running_var": None}
    return F.batch_norm(x, **(absent | tensors), training=running is None, eps=eps)  # type: ignore


def check_channel_shapes(
    params: Mapping[str, Tensor] | None, x: Tensor, running: RunningStatistics | None
) -> None:
    """Raises ValueError if a weight, bias or statistic is not one number a channel."""
    tensors = dict(params or {})
    if running is not None:
        tensors |= {"running mean": running.mean, "running var": running.var}
    for name, value in tensors.items():
        if value.shape != x.shape[1:2]:
            raise ValueError(
                f"batch_norm: {name} has shape {tuple(value.shape)}, and x has shape "
                f"{tuple(x.shape)}, with its channels in dim 1"
            )


def commit_statistics(
    running: _Tree, stats: PyTree, momentum: float | None = 0.1
) -> _Tree:
    """Returns running statistics with one more batch in them, as new tensors.

    mean' = (1 - m) mean + m batch mean, and the same for the unbiased variance. m is
    the momentum, or 1 / (number of batches) for the average over all of them. Call it
    outside the loss, once a batch, on the statistics that ``value_and_grad`` returned:
    they are sums over all microbatches and ranks.

    Args:
        running: :class:`RunningStatistics`, or a tree of them.
        stats: the statistics that :func:`batch_norm` returned, in a tree of that form.
        momentum: within [0, 1], or None for the average.

    Returns:
        ``running``'s form and dtypes; on every rank the same bits.

    Raises:
        ValueError: another number of channels.
        TreeMismatch: the trees differ in form.

    Cost: a few operations on [C].

    Source: Ioffe and Szegedy, 2015, algorithm 2; momentum as in torch.nn.BatchNorm.

    >>> import torch
    >>> _, stats = batch_norm(None, torch.tensor([[1.0], [3.0]]))
    >>> commit_statistics(init_statistics(1), stats, momentum=None)
    RunningStatistics(mean=tensor([2.]), var=tensor([2.]), count=tensor(1))
    """
    commit = partial(_commit_one, momentum=momentum)
    return tree.map(commit, running, stats, is_leaf=_is_running)


def _is_running(x: PyTree) -> bool:
    return isinstance(x, RunningStatistics)


def _commit_one(
    running: RunningStatistics, stats: Summed[Moments], momentum: float | None
) -> RunningStatistics:
    total, squares, n = stats.tree
    if total.shape != running.mean.shape:
        raise ValueError(
            f"commit_statistics: statistics of {total.shape[0]} channels for running "
            f"ones of {running.mean.shape[0]}"
        )
    mean = total / n
    var = (squares - total * mean).clamp(min=0) / (n - 1)
    count = running.count + 1
    batch_weight = 1 / count.double() if momentum is None else momentum
    return RunningStatistics(
        _interpolate(running.mean, mean, batch_weight),
        _interpolate(running.var, var, batch_weight),
        count,
    )


def _interpolate(old: Tensor, new: Tensor, new_weight: float | Tensor) -> Tensor:
    """Returns ``old`` with ``new_weight`` of ``new`` in it, added in fp64."""
    return ((1 - new_weight) * old.double() + new_weight * new).to(old.dtype)


def sync_batch_norm(
    params: Mapping[str, Tensor] | None,
    x: Tensor,
    axis: Axis | None,
    *,
    eps: float = 1e-5,
    running: RunningStatistics | None = None,
) -> tuple[Tensor, Summed[Moments] | None]:
    """Normalises channel by channel by the statistics of all ranks' ``x`` together.

    It is ``batch_norm`` of the ranks' ``x`` joined along any dim but 1:

    y = weight * (x - mean) / sqrt(var + eps) + bias, with the mean and the biased
    variance of a channel over the ranks of ``axis``; or, with ``running``, with those.
    ``stats`` are those of :func:`~fsfunc.nn.statistics.batch_norm`. Over axes of a
    surrounding ``shard`` each rank returns its own, and the loss's gradient call sums
    them. Over other axes, which split the work of one loss, it returns their sum.

    Args:
        params: ``{"weight": [C], "bias": [C]}``, whole; either may be missing. Over
            axes that split the work of one loss their gradients are summed here.
        x: [N, C, *], floating; N and * may differ from rank to rank, and be 0 on some.
        axis: one name or several; None, or of size 1: ``batch_norm``.
        eps: added to the variance, in units of ``x`` squared.
        running: statistics to normalise by, for evaluation.

    Returns:
        ``y`` like ``x``, and ``Summed(Moments)``, or None where ``running`` is given.

    Raises:
        ValueError, TypeError: what ``batch_norm`` refuses, of the values of all ranks
            together: fewer than two a channel are seen after the all-reduce.

    Cost: one all-reduce of 2 C + 1 numbers of 8 bytes, and one backward (another of the
    parameters' gradients, 2 C numbers of 8 bytes, over axes that split the work of one
    loss); with ``running`` none of the statistics. A recompute sends the first again,
    and counts nothing again. One copy of ``x``, in fp32 at least, is saved for the
    backward.

    Source: torch.nn.SyncBatchNorm; the sums about a shift: Chan, Golub and LeVeque,
    1983.

    >>> import fsfunc as ff, torch
    >>> def main():
    ...     x = torch.tensor([[1.0], [3.0]])[ff.axis_index("data")][None]
    ...     return sync_batch_norm(None, x, "data", eps=1e-9)[0].item()
    >>> ff.spmd(main, ff.make_mesh({"data": 2}, "simulated"))()
    [-1.0, 1.0]
    """
    if axis is None or axis_size(axis) == 1:
        return batch_norm(params, x, eps=eps, running=running)
    check_channel_shapes(params, x, running)
    claim_rank_local(x, axis, "sync_batch_norm")
    # The gradient call sums ``stats`` over the axes of a ``shard`` and no others: over
    # those (``mean_axes``) each rank returns its own, over the others their sum.
    axes = here().mesh.check(axis)
    mean_axes = tuple(name for name in axes if get_group(name).loss_is_mean)
    sum_axes = tuple(name for name in axes if name not in mean_axes)
    # In fp64, as the channels' statistics are.
    wide_params = {name: value.double() for name, value in (params or {}).items()}
    # The same weight on all ranks meets values that are each rank's own: the cast's
    # transpose sums the ranks' gradients of it. Stacked, they go in one all-reduce.
    if wide_params and sum_axes:
        entered = pcast(torch.stack(list(wide_params.values())), sum_axes, to="V")
        wide_params = dict(zip(wide_params, entered.unbind(), strict=True))
    if running is not None:
        return torch_batch_norm(wide_params, x, eps, running), None
    row_dims = [d for d in range(x.ndim) if d != 1]
    centered, center, total, squares = shifted_sums(x, row_dims)
    n = x.numel() // x.shape[1]
    count = torch.full((1,), n, dtype=torch.float64, device=x.device)
    sums = torch.cat([total.flatten(), squares.flatten(), count])
    sums = sum_over_ranks(sums, sum_axes)
    stats = _split_moments(sums.detach(), x.shape[1])  # before the sum over mean_axes
    total, squares, count = _split_moments(sum_over_ranks(sums, mean_axes), x.shape[1])
    # Reading ``count`` waits for the device, so only where this rank has too few values
    # itself; a recording and ``vmap`` have no number to read.
    if n < 2 and not recording() and not _torch.functorch_active() and count < 2:
        raise ValueError(
            "batch_norm takes the statistics of two values a channel at least, and the "
            f"ranks of {axis!r} have {int(count)} together, of which shape "
            f"{tuple(x.shape)} has {n}"
        )
    scale, shift = scale_and_shift(
        center.flatten(), total / count, squares / count, eps
    )
    scale, shift = (y * wide_params.get("weight", 1) for y in (scale, shift))
    shift = shift + wide_params.get("bias", 0)
    return apply_scale_and_shift(
        centered, scale.view_as(center), shift.view_as(center), x
    ), Summed(stats)


def _split_moments(sums: Tensor, channels: int) -> Moments:
    """Splits the buffer [2 C + 1] that the ranks exchanged."""
    total, squares, count = sums.split([channels, channels, 1])
    return Moments(total, squares, count.squeeze(0))

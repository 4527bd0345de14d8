"""Batch normalisation by the statistics of all ranks' batches, joined."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fsfunc.comm.collectives import pcast
from fsfunc.comm.groups import axis_size, group
from fsfunc.comm.mesh import Axis, here
from fsfunc.core.losses import Summed
from fsfunc.nn.normalization import normalized, normalizer, shifted_sums, summed
from fsfunc.nn.statistics import (
    Moments,
    RunningStatistics,
    batch_norm,
    check_norm,
    stock_norm,
)


def sync_batch_norm(
    params: Mapping[str, Tensor] | None,
    x: Tensor,
    axis: Axis | None,
    *,
    eps: float = 1e-5,
    running: RunningStatistics | None = None,
) -> tuple[Tensor, Summed | None]:
    """``batch_norm`` by the statistics of all ranks' ``x`` joined, along any dim but 1.

    y = weight * (x - mean) / sqrt(var + eps) + bias, with the mean and the biased
    variance of a channel over the ranks of ``axis``; or, with ``running``, with those.
    ``stats`` are those of :func:`~fsfunc.nn.statistics.batch_norm`: over axes of a
    ``shard`` around each rank returns its own, which the loss's gradient call sums;
    over others, that split the work of one loss, their sum.

    Args:
        params: ``{"weight": [C], "bias": [C]}``, whole; either may be missing. Over
            axes that split the work of one loss their gradients are summed here.
        x: [N, C, *], floating; N and * may differ from rank to rank.
        axis: one name or several; None, or of size 1: ``batch_norm``.
        eps: added to the variance, in units of ``x`` squared.
        running: statistics to normalise by, for evaluation.

    Returns:
        ``y`` like ``x``, and ``Summed(Moments)``, or None where ``running`` is given.

    Raises:
        ValueError, TypeError: what ``batch_norm`` refuses, but that one value a channel
            is enough.

    Cost: one all-reduce of 2 C + 1 numbers of 8 bytes, and one backward (another of the
    parameters' gradients, 2 C numbers of 8 bytes, over axes that split the work of one
    loss); with ``running`` none of the statistics. A recompute sends the first again,
    and counts nothing again. One copy of ``x``, in fp32 at least, is kept for the
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
    check_norm(params, x, running, least=1)
    names = here().mesh.check(axis)
    means = tuple(name for name in names if group(name).mean)
    others = tuple(name for name in names if name not in means)
    # In fp64, as the channels' statistics are.
    given = {name: value.double() for name, value in (params or {}).items()}
    if given and others:  # one value on all ranks meets what is each rank's own
        entered = pcast(torch.stack(list(given.values())), others, to="V")
        given = dict(zip(given, entered.unbind(), strict=True))
    if running is not None:
        return stock_norm(given, x, eps, running), None
    rows = [d for d in range(x.ndim) if d != 1]
    off, shift, total, squares = shifted_sums(x, rows)
    n = x.numel() // x.shape[1]
    count = torch.full((1,), n, dtype=torch.float64, device=x.device)
    sums = torch.cat([total.flatten(), squares.flatten(), count])
    sums = summed(sums, others)
    stats = Moments(*_cut(sums.detach(), x.shape[1]))
    total, squares, count = _cut(summed(sums, means), x.shape[1])
    factor, move = normalizer(shift.flatten(), total / count, squares / count, eps)
    factor, move = (y * given.get("weight", 1) for y in (factor, move))
    move = move + given.get("bias", 0)
    return normalized(off, factor.view_as(shift), move.view_as(shift), x), Summed(stats)


def _cut(sums: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """(total, squares, count) of what was sent as one."""
    total, squares, count = sums.split([channels, channels, 1])
    return total, squares, count.squeeze(0)

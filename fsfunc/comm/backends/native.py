"""Collectives between processes by torch.distributed's own: what is right on NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ALL_GATHER", "issue", "permuted"]

# torch 2.13 renamed these two; 2.11 only knows the old names.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None)
ALL_GATHER = ALL_GATHER or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None)
_REDUCE_SCATTER = _REDUCE_SCATTER or dist.reduce_scatter_tensor


_KNOWN = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip
_REDUCES = {"psum", "psum_scatter", "pmax"}


def issue(
    op: str, x: Tensor, where: Any, out: Tensor | None, group: Any, **how: Any
) -> tuple[list[Any], Callable[[], Tensor]]:
    """The works of ``op`` on ``x``, and what then gives its result.

    Other dtypes than NCCL's travel as bytes, or are reduced as what holds them: complex
    numbers as two real ones, short integers as longer ones.
    """
    dtype, shape = x.dtype, list(x.shape)
    if op == "all_gather":
        shape[0] *= where.size
    elif op == "psum_scatter":
        shape[0] //= where.size
    if not x.numel():
        y = x.new_empty(shape) if out is None else out
        return [], lambda: y
    if dtype in _KNOWN:
        works, y = _issue(op, x, where, out, group, **how)
        return works, lambda: y
    if op not in _REDUCES:
        x = x.view(-1).view(torch.uint8)
    else:
        x = torch.view_as_real(x) if dtype.is_complex else x.to(torch.int32)
    works, found = _issue(op, x, where, None, group, **how)

    def finish() -> Tensor:
        if op not in _REDUCES:
            y = found.view(dtype).view(shape)
        else:
            y = torch.view_as_complex(found) if dtype.is_complex else found.to(dtype)
        return y if out is None else out.copy_(y)

    return works, finish


def _issue(
    op: str,
    x: Tensor,
    where: Any,
    out: Tensor | None,
    group: Any,
    pairs: Sequence[tuple[int, int]] = (),
    source: int = 0,
) -> tuple[list[Any], Tensor]:
    """The works of ``op`` on ``x``, and where its result will be."""
    n = where.size
    if op == "ppermute":
        y, sent, got = permuted(x, where.index, out, pairs)
        calls = [
            dist.P2POp(send, t, where.ranks[r], group)
            for send, by_rank in ((dist.isend, sent), (dist.irecv, got))
            for r, t in by_rank.items()
        ]
        # One batch: single sends and receives would wait for each other on NCCL.
        works = dist.batch_isend_irecv(calls) if calls else []
        return works, y
    if op == "all_gather":
        y = x.new_empty((n * x.shape[0], *x.shape[1:])) if out is None else out
        work = ALL_GATHER(y, x, group=group, async_op=True)
    elif op == "psum_scatter":
        y = x.new_empty((x.shape[0] // n, *x.shape[1:])) if out is None else out
        work = _REDUCE_SCATTER(y, x, group=group, async_op=True)
    elif op == "all_to_all":
        y = torch.empty_like(x) if out is None else out
        work = dist.all_to_all_single(y, x, group=group, async_op=True)
    else:
        y = x.clone() if out is None else out.copy_(x)
        if op == "pbroadcast":
            root = where.ranks[source]
            work = dist.broadcast(y, root, group=group, async_op=True)
        else:
            kind = dist.ReduceOp.MAX if op == "pmax" else dist.ReduceOp.SUM
            work = dist.all_reduce(y, kind, group=group, async_op=True)
    return [work], y


def permuted(
    x: Tensor, me: int, out: Tensor | None, pairs: Sequence[tuple[int, int]]
) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """(a rank's result, what it sends by target, where it receives by source)."""
    y = torch.zeros_like(x) if out is None else out.zero_()
    if (me, me) in pairs:
        y.copy_(x)
    sent = {d: x for s, d in pairs if s == me != d}
    return y, sent, {s: y for s, d in pairs if d == me != s}

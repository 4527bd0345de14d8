"""Attention of some queries to some keys: one block, and how blocks become a whole.

A block gives its output and, for each query, the log of the sum of the exponentials of
its scores. Two blocks of the same queries and other keys make one by these alone: the
running maximum and sum of the online softmax, as one number.

Sums are held in fp32 at least. On CPU, where values are as wide as keys, torch's fused
kernel computes a block that is seen as a whole, or up to its diagonal; elsewhere plain
products do, some rows of scores at a time, in fp32 at least. Queries are [batch, heads,
n, head_dim], keys and values may have fewer heads: as torch counts them, query heads
g k to g k + g - 1 read head k. They are computed as [batch, key heads, g n, head_dim],
so that keys are never copied g times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.nn.attention_masks import NOTHING, Visible
from fsfunc.nn.numerics import wide


class Attended(NamedTuple):
    """Attention of queries to some keys.

    Args:
        out: [batch, heads, n, value_dim].
        lse: [batch, heads, n, 1], the log of the sum of the exponentials.
    """

    out: Tensor
    lse: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Visible, scale: float) -> Attended:
    """Attention by plain operators, differentiable in any way."""
    scores = _scores(q, k, scale, seen)
    lse = scores.logsumexp(-1, keepdim=True)
    out = scores.softmax(-1) @ v.to(scores.dtype)
    return Attended(_unfold(out, q), _unfold(lse, q))


def joined(one: Attended | None, other: Attended) -> Attended:
    """The attention of the same queries to the keys of both."""
    if one is None:
        return other
    # Sums may be 1e30 apart, which has no place in an exponential that grows.
    top = torch.maximum(one.lse, other.lse).detach()
    new = (other.lse - top).exp()
    total = (one.lse - top).exp() + new
    out = torch.lerp(one.out, other.out.to(one.out.dtype), new / total)
    return Attended(out, top + total.log())


def settled(x: Attended) -> Attended:
    """The same, with zeros where a query has seen nothing at all."""
    nothing = x.lse < NOTHING / 2
    return Attended(*(y.masked_fill(nothing, 0) for y in x))


# Without a graph: kernels of torch's that give both, or rows of scores at a time.


def attend_in_place(
    q: Tensor, k: Tensor, v: Tensor, seen: Visible, scale: float
) -> Attended:
    """:func:`attend` without a graph, which never holds all the scores."""
    if _has_kernel(q, k, v, seen):
        causal = seen.causal
        heads, k, v = _for_kernel(q, k, v, causal)
        out, lse = _torch.CPU_ATTENTION(heads, k, v, 0.0, causal, scale=scale)
        lse = lse.reshape(*q.shape[:3], 1)
        return Attended(out.reshape(q.shape).to(wide(q)), lse.to(wide(q)))
    outs, sums = [], []
    for here, keys in _tiles(q, k, seen):
        rows = q[:, :, here]
        scores = _scores(rows, k[:, :, keys], scale, seen.at(here, keys))
        top = scores.amax(-1, keepdim=True)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        out = (scores @ v[:, :, keys].to(scores.dtype)).div_(total)
        outs.append(_unfold(out, rows))
        sums.append(_unfold(top.add_(total.log_()), rows))
    return Attended(torch.cat(outs, 2), torch.cat(sums, 2))


def pull(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    of: Attended,
    seen: Visible,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of the gradients by q, k and v, computing its scores again.

    Args:
        g: the cotangent of the whole output.
        of: the whole output and sum, over the keys of all blocks, settled.

    Returns:
        Tensors of the shapes of q, k and v, in fp32 at least or as a kernel gives them.

    Source: Dao et al., 2022, FlashAttention, appendix B.
    """
    if _has_kernel(q, k, v, seen):
        return _pull_by_kernel(g, q, k, v, of, seen.causal, scale)
    dtype = wide(q)
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    dqs = []
    for here, there in _tiles(q, k, seen):
        rows = q[:, :, here]
        keys, values = k[:, :, there].to(dtype), v[:, :, there].to(dtype)
        gs = _fold(g[:, :, here], k).to(dtype)
        out, lse = (_fold(x[:, :, here], k).to(dtype) for x in of)
        p = _scores(rows, keys, scale, seen.at(here, there)).sub_(lse).exp_()
        dv[:, :, there] += p.transpose(-1, -2) @ gs
        ds = gs @ values.transpose(-1, -2)
        ds.sub_((gs * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        dk[:, :, there] += ds.transpose(-1, -2) @ _fold(rows, k).to(dtype)
        dqs.append(_unfold(ds @ keys, rows))
    return torch.cat(dqs, 2), dk, dv


def _tiles(q: Tensor, k: Tensor, seen: Visible) -> Iterator[tuple[slice, slice]]:
    """Some queries at a time, and the keys between which all lie that they may see."""
    batch, heads, n, _ = q.shape
    m = k.shape[2]
    rows = max(_ROWS, _SCORES // max(1, batch * heads * m))
    for start in range(0, max(n, 1), rows):
        stop, first, last = min(start + rows, n), 0, m
        if seen.most is not None:
            first = min(max(start - seen.most, 0), m - 1)  # one is always computed
        if seen.least is not None:
            last = min(max(stop - seen.least, first + 1), m)
        yield slice(start, stop), slice(first, last)


_ROWS = 64  # fewer at once are no work for a product
_SCORES = 1 << 20  # held at once, unless that is fewer rows


def _pull_by_kernel(g, q, k, v, of, causal, scale):
    heads, keys, values = _for_kernel(q, k, v, causal)
    gs, out = (x.to(q.dtype).reshape(heads.shape).contiguous() for x in (g, of.out))
    lse = of.lse.reshape(heads.shape[:3]).contiguous()
    dq, dk, dv = _torch.CPU_ATTENTION_BACKWARD(
        gs, heads, keys, values, out, lse, 0.0, causal, scale=scale
    )
    if keys.shape != k.shape:
        each = (k.shape[1], -1)
        dk, dv = (x.unflatten(1, each).sum(2, dtype=wide(q)) for x in (dk, dv))
    return dq.reshape(q.shape), dk, dv


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, seen: Visible) -> bool:
    """True if torch has one kernel for it that also gives the sums."""
    some = q.numel() and k.numel() and (seen.whole or seen.causal)
    return bool(q.device.type == "cpu" and some and v.shape == k.shape)


def _for_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool):
    """q, k and v with as many heads each, and dense in the last dim."""
    groups = q.shape[1] // k.shape[1]
    if not causal:
        q = _fold(q, k)
    elif groups > 1:  # rows are counted within a head
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))


def _scores(q: Tensor, k: Tensor, scale: float, seen: Visible) -> Tensor:
    """[batch, key heads, g n, m]: NOTHING for keys that a query does not see."""
    scores = (_fold(q, k).to(wide(q)) * scale) @ k.to(wide(q)).transpose(-1, -2)
    if seen.whole:
        return scores
    of_heads = scores.unflatten(2, (q.shape[1] // k.shape[1], q.shape[2]))
    return seen.masked(of_heads).flatten(2, 3)


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """Queries of all heads that read one key head, in a row."""
    batch, heads, n, width = x.shape
    return x.reshape(batch, k.shape[1], heads // k.shape[1] * n, width)


def _unfold(x: Tensor, q: Tensor) -> Tensor:
    return x.reshape(*q.shape[:3], x.shape[-1])

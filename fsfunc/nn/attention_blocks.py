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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.nn.attention_masks import NOTHING, Visible
from fsfunc.nn.numerics import wide


class Heads(NamedTuple):
    """Queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor

    def at(self, rows: slice, keys: slice) -> Heads:
        """Some of the queries, and some of the keys."""
        return Heads(self.q[:, :, rows], self.k[:, :, keys], self.v[:, :, keys])

    @property
    def has_kernel(self) -> bool:
        """True if torch has one kernel for it that also gives the sums."""
        some = self.q.numel() and self.k.numel()
        on_cpu = self.q.device.type == "cpu"
        return bool(on_cpu and some and self.v.shape == self.k.shape)


class Attended(NamedTuple):
    """Attention of queries to some keys.

    Args:
        out: [batch, heads, n, value_dim].
        lse: [batch, heads, n, 1], the log of the sum of the exponentials.
    """

    out: Tensor
    lse: Tensor


def attend(x: Heads, seen: Visible, scale: float) -> Attended:
    """Attention by plain operators, differentiable in any way."""
    scores = _scores(x, scale, seen)
    lse = scores.logsumexp(-1, keepdim=True)
    out = scores.softmax(-1) @ x.v.to(scores.dtype)
    return Attended(_unfold(out, x.q), _unfold(lse, x.q))


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


# Without a graph: a kernel of torch's that gives both, or products; by tiles.


def attend_in_place(x: Heads, seen: Visible, scale: float) -> Attended:
    """:func:`attend` without a graph, which never holds all the scores."""
    attended = _attended_by_kernel if x.has_kernel else _attended
    tiles = _tiles(x, seen)
    found = [attended(x.at(*where), of_tile, scale) for *where, of_tile in tiles]
    return Attended(*(torch.cat(parts, 2) for parts in zip(*found, strict=True)))


def pull(
    g: Tensor, x: Heads, of: Attended, seen: Visible, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of the gradients by q, k and v, computing its scores again.

    Args:
        g: the cotangent of the whole output.
        of: the whole output and sum, over the keys of all blocks, settled.

    Returns:
        Tensors of the shapes of q, k and v, in fp32 at least or as a kernel gives them.

    Source: Dao et al., 2022, FlashAttention, appendix B.
    """
    pulled = _pulled_by_kernel if x.has_kernel else _pulled
    if _at_once(x, seen):
        return pulled(g, x, of, seen, scale)
    dqs, dk, dv = [], *(torch.zeros_like(y, dtype=wide(x.q)) for y in (x.k, x.v))
    for rows, keys, of_tile in _tiles(x, seen):
        mine = Attended(*(y[:, :, rows] for y in of))
        dq, dks, dvs = pulled(g[:, :, rows], x.at(rows, keys), mine, of_tile, scale)
        dqs.append(dq)
        dk[:, :, keys] += dks
        dv[:, :, keys] += dvs
    return torch.cat(dqs, 2), dk, dv


def _tiles(x: Heads, seen: Visible) -> Iterator[tuple[slice, slice, Visible]]:
    """Some queries, the keys between which all lie that they may see, and what of them.

    A kernel takes all at once where it needs no mask.
    """
    batch, heads, n, _ = x.q.shape
    m = x.k.shape[2]
    at_once = _at_once(x, seen)
    rows = n if at_once else max(_ROWS, _SCORES // max(1, batch * heads * m))
    for start in range(0, max(n, 1), max(rows, 1)):
        stop, first, last = min(start + rows, n), 0, m
        if seen.most is not None:
            first = min(max(start - seen.most, 0), m - 1)  # one is always computed
        if seen.least is not None:
            last = m if at_once else min(max(stop - seen.least, first + 1), m)
        here, there = slice(start, stop), slice(first, last)
        yield here, there, seen.at(here, there)


_ROWS = 64  # fewer at once are no work for a product
_SCORES = 1 << 20  # held at once, unless that is fewer rows


def _at_once(x: Heads, seen: Visible) -> bool:
    """True where a kernel needs no mask, whatever the length."""
    return x.has_kernel and (seen.whole or seen.causal)


def _attended(x, seen, scale):
    scores = _scores(x, scale, seen)
    top = scores.amax(-1, keepdim=True)
    total = scores.sub_(top).exp_().sum(-1, keepdim=True)
    out = (scores @ x.v.to(scores.dtype)).div_(total)
    return Attended(_unfold(out, x.q), _unfold(top.add_(total.log_()), x.q))


def _pulled(g, x, of, seen, scale):
    q, k, v = x
    dtype = wide(q)
    keys, values, gs = k.to(dtype), v.to(dtype), _fold(g, k).to(dtype)
    out, lse = (_fold(y, k).to(dtype) for y in of)
    p = _scores(x._replace(k=keys), scale, seen).sub_(lse).exp_()
    dv = p.transpose(-1, -2) @ gs
    ds = gs @ values.transpose(-1, -2)
    ds.sub_((gs * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    dk = ds.transpose(-1, -2) @ _fold(q, k).to(dtype)
    return _unfold(ds @ keys, q), dk, dv


def _attended_by_kernel(x, seen, scale):
    heads, how = _for_kernel(x, seen, scale)
    out, lse = _torch.CPU_ATTENTION(*heads, **how)
    lse = lse.reshape(*x.q.shape[:3], 1)
    return Attended(out.reshape(x.q.shape).to(wide(x.q)), lse.to(wide(x.q)))


def _pulled_by_kernel(g, x, of, seen, scale):
    (q, k, _), (heads, how) = x, _for_kernel(x, seen, scale)
    shape = heads.q.shape
    gs, out = (y.to(q.dtype).reshape(shape).contiguous() for y in (g, of.out))
    lse = of.lse.reshape(shape[:3]).contiguous()
    dq, dk, dv = _torch.CPU_ATTENTION_BACKWARD(gs, *heads, out, lse, **how)
    if heads.k.shape != k.shape:
        each = (k.shape[1], -1)
        dk, dv = (y.unflatten(1, each).sum(2, dtype=wide(q)) for y in (dk, dv))
    return dq.reshape(q.shape), dk, dv


def _for_kernel(x: Heads, seen: Visible, scale: float) -> tuple[Heads, dict[str, Any]]:
    """The same with as many heads each, and dense in the last dim; and the mask."""
    q, k, v = x
    groups = q.shape[1] // k.shape[1]
    how: dict[str, Any] = {"dropout_p": 0.0, "is_causal": seen.causal, "scale": scale}
    if not seen.whole and not seen.causal:
        n, m = q.shape[2], k.shape[2]
        none = torch.zeros(1, 1, 1, n, m, dtype=wide(q), device=q.device)
        how["attn_mask"] = seen.masked(none).flatten(1, 2)
    if seen.whole:
        q = _fold(q, k)
    elif groups > 1:  # rows are counted within a head
        k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
    return Heads(*(y if y.stride(-1) == 1 else y.contiguous() for y in (q, k, v))), how


def _scores(x: Heads, scale: float, seen: Visible) -> Tensor:
    """[batch, key heads, g n, m]: NOTHING for keys that a query does not see."""
    q, k, _ = x
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

"""Attention of some queries to some keys: one block, and how blocks are joined.

``ring.py`` calls ``attend`` where a graph is wanted, and else ``attend_by_tiles`` and
``pull_back``. A block gives its output and, for each query, lse = log sum exp(scores).
Two blocks of the same queries and other keys are joined by these alone:

    lse = log(exp(lse_1) + exp(lse_2))
    out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

lse stands for the running maximum and sum of the online softmax, as one number.

Sums are taken in fp32 at least. On CPU, where values are as wide as keys, torch's fused
kernel computes a block. Elsewhere plain products do, some rows of scores at a time.

Queries are [batch, heads, n, head_dim]. Keys and values may have fewer heads: as torch
counts them, query heads g k to g k + g - 1 read key head k. Queries are folded to
[batch, key heads, g n, head_dim], so that keys are never copied g times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.nn.attention_masks import HIDDEN_SCORE, Visible
from fsfunc.nn.numerics import sum_dtype


class Heads(NamedTuple):
    """Queries, keys and values."""

    q: Tensor
    k: Tensor
    v: Tensor

    def tile(self, rows: slice, keys: slice) -> Heads:
        """Returns some of the queries, and some of the keys with their values."""
        return Heads(self.q[:, :, rows], self.k[:, :, keys], self.v[:, :, keys])

    @property
    def has_kernel(self) -> bool:
        """Whether torch has a fused kernel for these that also returns ``lse``."""
        not_empty = self.q.numel() and self.k.numel()
        on_cpu = self.q.device.type == "cpu"
        return bool(on_cpu and not_empty and self.v.shape == self.k.shape)


class Attended(NamedTuple):
    """Attention of queries to some keys.

    Args:
        out: [batch, heads, n, value_dim].
        lse: [batch, heads, n, 1], the log of the sum of the scores' exponentials.
    """

    out: Tensor
    lse: Tensor


def attend(x: Heads, visible: Visible, scale: float) -> Attended:
    """Computes attention by plain operators, differentiable in any way."""
    scores = _scores(x, scale, visible)
    lse = scores.logsumexp(-1, keepdim=True)
    out = scores.softmax(-1) @ x.v.to(scores.dtype)
    return Attended(_unfold_heads(out, x.q), _unfold_heads(lse, x.q))


def join_blocks(old: Attended | None, new: Attended) -> Attended:
    """Joins the attention of the same queries to two sets of keys."""
    if old is None:
        return new
    # Sums may be 1e30 apart, which has no place in an exponential that grows.
    largest = torch.maximum(old.lse, new.lse).detach()
    new_weight = (new.lse - largest).exp()
    total_weight = (old.lse - largest).exp() + new_weight
    out = torch.lerp(old.out, new.out.to(old.out.dtype), new_weight / total_weight)
    return Attended(out, largest + total_weight.log())


def zero_unseen(x: Attended) -> Attended:
    """Sets output and lse to 0 where a query saw no key of any block."""
    # A score that was seen is far above this: masks of numbers have a largest of 0.
    unseen = x.lse < HIDDEN_SCORE / 2
    return Attended(*(y.masked_fill(unseen, 0) for y in x))


# Without a graph, tile by tile: by torch's fused kernel, or by products.


def attend_by_tiles(x: Heads, visible: Visible, scale: float) -> Attended:
    """Computes :func:`attend` without a graph, and never has all scores at once."""
    attend_tile = _attend_by_kernel if x.has_kernel else _attend_tile
    tiles = _tiles(x, visible)
    tiles_attended = [
        attend_tile(x.tile(*slices), tile_visible, scale)
        for *slices, tile_visible in tiles
    ]
    return Attended(
        *(torch.cat(parts, 2) for parts in zip(*tiles_attended, strict=True))
    )


def pull_back(
    g: Tensor, x: Heads, whole: Attended, visible: Visible, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a block's share of the gradients of q, k and v.

    The block's scores are computed again. Its probabilities are exp(scores - lse) with
    the lse over all blocks, so no other block is needed.

    Args:
        g: the cotangent of the whole output.
        whole: the output and lse over the keys of all blocks, after ``zero_unseen``.

    Returns:
        Tensors of the shapes of q, k and v, in fp32 at least or as a kernel gives them.

    Source: Dao et al., 2022, FlashAttention, appendix B.
    """
    pull_back_tile = _pull_back_by_kernel if x.has_kernel else _pull_back_tile
    if _kernel_takes_all(x, visible):
        return pull_back_tile(g, x, whole, visible, scale)
    dqs, dk, dv = [], *(torch.zeros_like(y, dtype=sum_dtype(x.q)) for y in (x.k, x.v))
    for rows, keys, tile_visible in _tiles(x, visible):
        tile_whole = Attended(*(y[:, :, rows] for y in whole))
        dq, dk_tile, dv_tile = pull_back_tile(
            g[:, :, rows], x.tile(rows, keys), tile_whole, tile_visible, scale
        )
        dqs.append(dq)
        dk[:, :, keys] += dk_tile
        dv[:, :, keys] += dv_tile
    return torch.cat(dqs, 2), dk, dv


def _tiles(x: Heads, visible: Visible) -> Iterator[tuple[slice, slice, Visible]]:
    """Yields tiles: some queries, the range of keys they may see, and which of these.

    The kernel takes all queries at once where it needs no mask. Else a tile has as many
    rows as ``_MAX_SCORES`` allows, and leaves out keys that no row of it can see.
    """
    batch, heads, n, _ = x.q.shape
    m = x.k.shape[2]
    takes_all = _kernel_takes_all(x, visible)
    tile_rows = (
        n if takes_all else max(_MIN_ROWS, _MAX_SCORES // max(1, batch * heads * m))
    )
    for start in range(0, max(n, 1), max(tile_rows, 1)):
        stop, first, last = min(start + tile_rows, n), 0, m
        if visible.most is not None:
            # At least one key, though hidden: a softmax of no scores has no result.
            first = min(max(start - visible.most, 0), m - 1)
        if visible.least is not None:
            last = m if takes_all else min(max(stop - visible.least, first + 1), m)
        queries, keys = slice(start, stop), slice(first, last)
        yield queries, keys, visible.tile(queries, keys)


_MIN_ROWS = 64  # of queries in a tile: a product of fewer rows is slow
_MAX_SCORES = 1 << 20  # in memory at once, unless that is fewer than ``_MIN_ROWS`` rows


def _kernel_takes_all(x: Heads, visible: Visible) -> bool:
    """Returns whether the kernel computes this without a mask, at whatever length."""
    return x.has_kernel and (visible.sees_all or visible.is_causal)


def _attend_tile(x: Heads, visible: Visible, scale: float) -> Attended:
    """Computes a tile by products, in place where it can."""
    scores = _scores(x, scale, visible)
    largest = scores.amax(-1, keepdim=True)
    sums = scores.sub_(largest).exp_().sum(-1, keepdim=True)
    out = (scores @ x.v.to(scores.dtype)).div_(sums)
    return Attended(
        _unfold_heads(out, x.q), _unfold_heads(largest.add_(sums.log_()), x.q)
    )


def _pull_back_tile(
    g: Tensor, x: Heads, whole: Attended, visible: Visible, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a tile of ``pull_back`` by products.

    With p = exp(scores - lse) and ds = p (g v^T - sum(g out)) scale:
    dq = ds k, dk = ds^T q, dv = p^T g.
    """
    q, k, v = x
    dtype = sum_dtype(q)
    keys, values, g_folded = k.to(dtype), v.to(dtype), _fold_heads(g, k).to(dtype)
    out, lse = (_fold_heads(y, k).to(dtype) for y in whole)
    p = _scores(x._replace(k=keys), scale, visible).sub_(lse).exp_()
    dv = p.transpose(-1, -2) @ g_folded
    ds = g_folded @ values.transpose(-1, -2)
    ds.sub_((g_folded * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    dk = ds.transpose(-1, -2) @ _fold_heads(q, k).to(dtype)
    return _unfold_heads(ds @ keys, q), dk, dv


def _attend_by_kernel(x: Heads, visible: Visible, scale: float) -> Attended:
    """Computes a tile by torch's fused CPU kernel."""
    heads, options = _kernel_arguments(x, visible, scale)
    out, lse = _torch.CPU_ATTENTION(*heads, **options)
    lse = lse.reshape(*x.q.shape[:3], 1)
    return Attended(out.reshape(x.q.shape).to(sum_dtype(x.q)), lse.to(sum_dtype(x.q)))


def _pull_back_by_kernel(
    g: Tensor, x: Heads, whole: Attended, visible: Visible, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a tile of ``pull_back`` by torch's fused CPU kernel."""
    (q, k, _), (heads, options) = x, _kernel_arguments(x, visible, scale)
    shape = heads.q.shape
    g_shaped, out = (y.to(q.dtype).reshape(shape).contiguous() for y in (g, whole.out))
    lse = whole.lse.reshape(shape[:3]).contiguous()
    dq, dk, dv = _torch.CPU_ATTENTION_BACKWARD(g_shaped, *heads, out, lse, **options)
    if heads.k.shape != k.shape:
        key_heads = (k.shape[1], -1)
        dk, dv = (
            y.unflatten(1, key_heads).sum(2, dtype=sum_dtype(q)) for y in (dk, dv)
        )
    return dq.reshape(q.shape), dk, dv


def _kernel_arguments(
    x: Heads, visible: Visible, scale: float
) -> tuple[Heads, dict[str, Any]]:
    """Returns q, k and v with equal numbers of heads, and the kernel's options.

    The kernel needs a last dim of stride 1.
    """
    q, k, v = x
    groups = q.shape[1] // k.shape[1]
    options: dict[str, Any] = {
        "dropout_p": 0.0,
        "is_causal": visible.is_causal,
        "scale": scale,
    }
    if not visible.sees_all and not visible.is_causal:
        n, m = q.shape[2], k.shape[2]
        no_bias = torch.zeros(1, 1, 1, n, m, dtype=sum_dtype(q), device=q.device)
        options["attn_mask"] = visible.mask_scores(no_bias).flatten(1, 2)
    # Where all is seen, the order of rows does not matter: queries are folded, and
    # nothing is copied. Under a mask or a diagonal the kernel counts rows by head.
    if visible.sees_all:
        q = _fold_heads(q, k)
    elif groups > 1:
        k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
    return Heads(
        *(y if y.stride(-1) == 1 else y.contiguous() for y in (q, k, v))
    ), options


def _scores(x: Heads, scale: float, visible: Visible) -> Tensor:
    """Returns masked scores [batch, key heads, g n, m], in fp32 at least."""
    q, k, _ = x
    scores = (_fold_heads(q, k).to(sum_dtype(q)) * scale) @ k.to(
        sum_dtype(q)
    ).transpose(-1, -2)
    if visible.sees_all:
        return scores
    by_head = scores.unflatten(2, (q.shape[1] // k.shape[1], q.shape[2]))
    return visible.mask_scores(by_head).flatten(2, 3)


def _fold_heads(x: Tensor, k: Tensor) -> Tensor:
    """Puts the queries of all heads that read one key head in a row."""
    batch, heads, n, width = x.shape
    return x.reshape(batch, k.shape[1], heads // k.shape[1] * n, width)


def _unfold_heads(x: Tensor, q: Tensor) -> Tensor:
    """Returns [batch, heads, n, ...], the inverse of ``_fold_heads``."""
    return x.reshape(*q.shape[:3], x.shape[-1])

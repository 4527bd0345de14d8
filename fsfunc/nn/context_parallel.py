"""Attention over a sequence that is cut among ranks, in two forms.

In :func:`ring_attention` keys and values are passed from rank to rank; in
:func:`all_to_all_attention` the ranks exchange positions for heads, and each attends to
the whole sequence with some of the heads. They take and return the same tensors, so one
can replace the other.

``order`` gives the positions of the parts where they matter, under ``causal``,
``window`` and ``attn_mask``: ``"zigzag"`` (see :func:`fsfunc.nn.zigzag`) or
``"contiguous"``. It cannot be seen from a part, so the caller must give it.
"""

from __future__ import annotations

from torch import Tensor

from fsfunc.comm.collectives import all_gather, all_to_all
from fsfunc.comm.groups import axis_index, group
from fsfunc.comm.mesh import Axis
from fsfunc.nn.attention_blocks import Heads
from fsfunc.nn.attention_checks import Reach, Window, check_heads, checked
from fsfunc.nn.attention_masks import Masks
from fsfunc.nn.ring import Ring, attention
from fsfunc.nn.sequence_order import (
    SequenceCut,
    contiguous_parts,
    unzigzag,
    zigzag,
    zigzag_parts,
)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis | None,
    *,
    causal: bool = False,
    order: str | None = None,
    attn_mask: Tensor | None = None,
    documents: Tensor | None = None,
    window: Window = None,
    scale: float | None = None,
    recompute: bool = True,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks along ``axis``.

    softmax(scale q k^T) v, block by block: the output of each rank's keys, and the sum
    of the exponentials of their scores, are enough to join them, in fp32 at least.
    Under plain autograd the backward has keys and values sent again and computes each
    block's probabilities again.

    ``causal``, ``window``, ``documents`` and ``attn_mask`` may all be given: a query
    sees what all of them let it see, and where that is nothing its output is 0, as are
    the gradients.

    All derivatives hold. Those other than the first of plain autograd
    (``create_graph``, ``torch.func``, forward mode, that of a mask) keep all blocks'
    probabilities, as does ``recompute=False``: a W-th of the whole, but quadratic in
    the sequence.

    Args:
        q: [batch, heads, n, head_dim], floating: n positions of the sequence, as many
            on every rank.
        k, v: [batch, key heads, m, head_dim or value_dim], of the dtype of ``q``; the
            key heads divide the heads: query heads in a row read one.
        axis: that over which the sequence is cut; None: it is whole, and nothing moves.
        causal: whether a query sees the positions up to its own alone. Then n = m.
        order: under ``causal``, ``window`` or ``attn_mask`` over an axis, which
            positions these are: "zigzag", as :func:`fsfunc.nn.zigzag` cuts them, so
            that under ``causal`` each step is two blocks of n/2 x n/2 for every rank,
            and n is even; or "contiguous". Under ``causal`` alone or with ``documents``
            contiguous parts of an even n are exchanged for such in zig-zag order first,
            and the output back. Parts that are cut otherwise than is said give numbers
            that are wrong.
        attn_mask: [batch, heads, n, S] or what broadcasts to it, of this rank's queries
            and the S = W m keys of all, in the order of the sequence: True where a
            query sees a key, or numbers that are added to the scores, which may be
            learnt. It is the whole mask, cut along dim -2 as ``q`` is.
        documents: [batch or 1, n] integers, the documents of this rank's positions, cut
            as ``q`` is: a query sees the keys of its own. Then n = m. Of ``cu_seqlens``
            the whole is ``torch.bucketize(torch.arange(S), cu_seqlens, right=True)``.
        window: a query sees that many positions before and as many after its own, or a
            pair (before, after), as flash-attn's ``window_size``; None is all of them.
            Under ``causal`` none after. A Mistral's ``sliding_window`` is one more,
            since it counts the query's own. Then n = m.
        scale: 1 / sqrt(head_dim) by default.
        recompute: whether to forget the probabilities.

    Returns:
        [batch, heads, n, value_dim], of the dtype of ``q``.

    Raises:
        ValueError: shapes that do not fit, an odd n in "zigzag", no such order.
        TypeError: dtypes that are not floating, or not one; documents or masks of other
            kinds; no order over an axis, where it counts; a scale that is a tensor.

    Cost: b being the bytes of this rank's k and v, W ranks, i this rank's index:

        ==================  =============  =================  ===============
        .                   forward        and its backward   recompute=False
        ==================  =============  =================  ===============
        every key           (W-1) b        3 (W-1) b          2 (W-1) b
        causal, zigzag      (W-1+i) b/2    (4 (W-1) + i) b/2  3 (W-1) b/2
        ==================  =============  =================  ===============

        in W-1 steps, each under way while the one before it is computed. A part is sent
        only where some query sees it by ``causal`` and ``window``, and its gradient
        back from there: with a window of up to n contiguous positions b forward, to the
        next rank, and 3 b with the backward. Where "contiguous" parts are exchanged, q,
        k, v and the output go once more each way, less the halves that stay.
        ``documents`` are gathered once, (W-1) times their bytes, and nothing is skipped
        by them. A mask stays where it is.

        Kept for the backward: q, k, v, the output and one number a query; the documents
        of all ranks, and the mask, in fp32 if it has numbers. While it runs, some ten
        parts like k and v, and rows of scores: a W-th of the whole. What is masked by
        distance is computed at the edges of what is not alone.

    Source: Liu, Zaharia and Abbeel, 2023, Ring attention; Dao et al., 2022.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"context": 2}, "simulated")
    >>> q = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    >>> whole = torch.nn.functional.scaled_dot_product_attention(*q, is_causal=True)
    >>> def main():
    ...     mine = zigzag(q, 2, dim=3).chunk(2, dim=3)[ff.axis_index("context")]
    ...     return ring_attention(*mine, "context", causal=True, order="zigzag")
    >>> parts = ff.spmd(main, mesh)()
    >>> torch.allclose(unzigzag(torch.cat(parts, 2), 2, dim=2), whole)
    True
    """
    name, masks = "ring_attention", Masks(documents, attn_mask)
    x, scale, masks, (left, right) = checked(
        name, q, k, v, axis, causal, order, scale, masks, window
    )
    if axis is None or group(axis).size == 1:
        return _alone(x, masks, (left, right), scale, recompute)
    where, n = group(axis), q.shape[2]
    limited = left is not None or right is not None
    zigzagged = limited and order == "zigzag"
    turns = causal and left is None and attn_mask is None and order == "contiguous"
    turns &= n % 2 == 0
    if turns:
        x = Heads(*(zigzag_parts(y, axis, 2) for y in x))
    ids, mask = masks
    if ids is not None:
        ids = all_gather(ids, axis, dim=1)
        ids = zigzag(ids, where.size, 1) if turns else ids
    if mask is not None and order == "zigzag":  # its columns, as the ranks hold keys
        mask = zigzag(mask, where.size, 3)
    masks, halves = Masks(ids, mask), zigzagged or turns
    cut = SequenceCut(where.size, halves, n // 2 if halves else n, left, right)
    index = axis_index(axis) if limited or any(y is not None for y in masks) else 0
    out = attention(x, masks, Ring(where, index, cut, scale), recompute)
    return contiguous_parts(out, axis, 2) if turns else out


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis | None,
    *,
    causal: bool = False,
    order: str | None = None,
    attn_mask: Tensor | None = None,
    documents: Tensor | None = None,
    window: Window = None,
    scale: float | None = None,
    recompute: bool = True,
) -> Tensor:
    """:func:`ring_attention`, computed with whole sequences and some of the heads.

    An all-to-all takes each of q, k and v from all heads of some positions to some
    heads of all positions, and one takes the output back.

    Args:
        q, k, v: as for :func:`ring_attention`; ``axis`` divides both numbers of heads.
        axis, causal, documents, window, scale, recompute: as there.
        attn_mask: as there; each rank gets all rows of it, of its heads.
        order: as there; in "zigzag" order q, k, v and the output are copied once more,
            to put them in a row and back.

    Returns:
        [batch, heads, n, value_dim], of the dtype of ``q``.

    Raises:
        ValueError: as :func:`ring_attention`, and heads that the axis does not divide.
        TypeError: as :func:`ring_attention`.

    Cost: four all-to-alls forward and four backward, (W-1)/W of the bytes of q, k, v
    and the output each way. ``documents`` are gathered, W-1 times their bytes, and so
    is a mask; of several heads (W-1)/W of its bytes go by an all-to-all. Kept for the
    backward: those of q, k, v and the output once more, of some heads.

    Source: Jacobs et al., 2023, DeepSpeed Ulysses.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"context": 2}, "simulated")
    >>> q = torch.randn(1, 2, 4, 8)
    >>> mine = lambda: q.chunk(2, dim=2)[ff.axis_index("context")]
    >>> main = lambda: all_to_all_attention(mine(), mine(), mine(), "context")
    >>> whole = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> torch.allclose(torch.cat(ff.spmd(main, mesh)(), 2), whole, atol=1e-6)
    True
    """
    name, masks = "all_to_all_attention", Masks(documents, attn_mask)
    x, scale, masks, reach = checked(
        name, q, k, v, axis, causal, order, scale, masks, window
    )
    if axis is None or group(axis).size == 1:
        return _alone(x, masks, reach, scale, recompute)
    where, (ids, mask), n = group(axis), masks, q.shape[2]
    check_heads(name, q.shape[1], k.shape[1], where)
    limited = reach != (None, None) or mask is not None
    x = Heads(*(all_to_all(y, axis, split_dim=1, concat_dim=2) for y in x))
    ids = ids if ids is None else all_gather(ids, axis, dim=1)
    if mask is not None and mask.shape[1] > 1:
        mask = all_to_all(mask, axis, split_dim=1, concat_dim=2)
    elif mask is not None:
        mask = all_gather(mask, axis, dim=2)
    if mask is not None and mask.shape[2] == where.size:  # one row of each rank
        mask = mask.repeat_interleave(n, 2)
    turns = limited and order == "zigzag"
    if turns:
        x = Heads(*(unzigzag(y, where.size, 2) for y in x))
        ids = ids if ids is None else unzigzag(ids, where.size, 1)
        mask = mask if mask is None else unzigzag(mask, where.size, 2)
    out = _alone(x, Masks(ids, mask), reach, scale, recompute)
    if turns:
        out = zigzag(out, where.size, 2)
    return all_to_all(out, axis, split_dim=2, concat_dim=1)


def _alone(
    x: Heads, masks: Masks, reach: Reach, scale: float, recompute: bool
) -> Tensor:
    """Attention to what this rank has."""
    ring = Ring(None, 0, SequenceCut(1, False, x.q.shape[2], *reach), scale)
    return attention(x, masks, ring, recompute)

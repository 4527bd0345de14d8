"""Attention over a sequence that is cut among ranks, in two public forms.

In :func:`ring_attention` keys and values are passed from rank to rank. In
:func:`all_to_all_attention` the ranks exchange positions for heads, and each attends to
the whole sequence with some of the heads. They take and return the same tensors, so one
can replace the other. This file checks arguments and brings tensors into order;
``ring.py`` computes.

``order`` says which positions a rank has: ``"zigzag"`` (see :func:`fsfunc.nn.zigzag`)
or ``"contiguous"``. It matters under ``causal``, ``window`` and ``attn_mask``. It
cannot be seen from a part, so the caller must give it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc.comm.collective_ops import claim_rank_local
from fsfunc.comm.collectives import all_gather, all_to_all
from fsfunc.comm.groups import RankGroup, axis_index, get_group
from fsfunc.comm.mesh import Axis
from fsfunc.nn.attention_blocks import Heads
from fsfunc.nn.attention_masks import Masks
from fsfunc.nn.numerics import cast_by_autocast
from fsfunc.nn.ring import Ring, attention
from fsfunc.nn.sequence_order import (
    SequenceCut,
    contiguous_parts,
    unzigzag,
    zigzag,
    zigzag_parts,
)

Window = int | tuple[int | None, int | None] | None  # as the caller gives it
Reach = tuple[int | None, int | None]  # positions before and after; None: all


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
    """Computes the attention of this rank's queries to the keys of all ranks.

    softmax(scale q k^T) v, block by block. The output for each rank's keys, and the sum
    of the exponentials of their scores, are enough to join them, in fp32 at least.
    Under plain autograd the backward sends keys and values again, and computes each
    block's probabilities again.

    ``causal``, ``window``, ``documents`` and ``attn_mask`` may all be given: a query
    sees what all of them let it see. Where that is nothing, its output is 0, as are its
    gradients.

    All derivatives hold. Those other than the first of plain autograd
    (``create_graph``, ``torch.func``, forward mode, that of a mask) save all blocks'
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
            and the output back. Parts in another order than ``order`` says give wrong
            numbers.
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
        recompute: whether to compute the probabilities again instead of saving them.

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

        Saved for the backward: q, k, v, the output and one number a query; the
        documents of all ranks, and the mask, in fp32 if it has numbers. While it runs,
        some ten parts like k and v, and rows of scores: a W-th of the whole. Blocks
        that distance masks as a whole are not computed.

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
    x, masks = Heads(q, k, v), Masks(documents, attn_mask)
    call = _AttentionCall(
        "ring_attention", x, axis, causal, order, masks, window, scale
    ).check()
    if axis is None or get_group(axis).size == 1:
        return call.attend_locally(recompute)
    ranks, n = get_group(axis), q.shape[2]
    x, (doc_ids, mask), left, right, scale = call
    is_limited = call.is_limited
    is_zigzag = is_limited and order == "zigzag"
    # Causal parts in a row leave the last rank most work (``sequence_order.py``). Under
    # a window they have even work already; the rows of a mask would have to move too.
    reorders = causal and left is None and attn_mask is None and order == "contiguous"
    reorders &= n % 2 == 0
    if reorders:
        x = Heads(*(zigzag_parts(y, axis, 2) for y in x))
    if doc_ids is not None:
        doc_ids = all_gather(doc_ids, axis, dim=1)
        doc_ids = zigzag(doc_ids, ranks.size, 1) if reorders else doc_ids
    if mask is not None and order == "zigzag":  # its columns, as the ranks hold keys
        mask = zigzag(mask, ranks.size, 3)
    masks, in_halves = Masks(doc_ids, mask), is_zigzag or reorders
    cut = SequenceCut(ranks.size, in_halves, n // 2 if in_halves else n, left, right)
    # Blocks depend on the rank only under limits and masks. A mesh made of ``vmap`` has
    # a tensor for the index, and what depends on it takes more operators.
    index = axis_index(axis) if is_limited or any(y is not None for y in masks) else 0
    out = attention(x, masks, Ring(ranks, index, cut, scale), recompute)
    return contiguous_parts(out, axis, 2) if reorders else out


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
    """Computes :func:`ring_attention` with whole sequences and some of the heads.

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
    is a mask. Of a mask of several heads (W-1)/W of its bytes go by an all-to-all.
    Saved for the backward: q, k, v and the output once more, of some heads.

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
    name, x, masks = "all_to_all_attention", Heads(q, k, v), Masks(documents, attn_mask)
    call = _AttentionCall(name, x, axis, causal, order, masks, window, scale).check()
    if axis is None or get_group(axis).size == 1:
        return call.attend_locally(recompute)
    ranks, (doc_ids, mask), n = get_group(axis), call.masks, q.shape[2]
    _check_heads(name, q.shape[1], k.shape[1], ranks)
    is_limited, x = call.is_limited or mask is not None, call.x
    x = Heads(*(all_to_all(y, axis, split_dim=1, concat_dim=2) for y in x))
    doc_ids = doc_ids if doc_ids is None else all_gather(doc_ids, axis, dim=1)
    if mask is not None and mask.shape[1] > 1:
        mask = all_to_all(mask, axis, split_dim=1, concat_dim=2)
    elif mask is not None:
        mask = all_gather(mask, axis, dim=2)
    if mask is not None and mask.shape[2] == ranks.size:  # one row of each rank
        mask = mask.repeat_interleave(n, 2)
    reorders = is_limited and order == "zigzag"
    if reorders:
        x = Heads(*(unzigzag(y, ranks.size, 2) for y in x))
        doc_ids = doc_ids if doc_ids is None else unzigzag(doc_ids, ranks.size, 1)
        mask = mask if mask is None else unzigzag(mask, ranks.size, 2)
    out = call._replace(x=x, masks=Masks(doc_ids, mask)).attend_locally(recompute)
    if reorders:
        out = zigzag(out, ranks.size, 2)
    return all_to_all(out, axis, split_dim=2, concat_dim=1)


class Attention(NamedTuple):
    """The checked arguments of either form.

    Args:
        x: q, k and v in autocast's dtype.
        masks: with all dims: [batch or 1, n] and [batch or 1, heads or 1, n or 1, S].
        left, right: how far a query sees before and after itself; None: all the way.
        scale: the factor of the scores, above 0.
    """

    x: Heads
    masks: Masks
    left: int | None
    right: int | None
    scale: float

    @property
    def is_limited(self) -> bool:
        """Whether distance limits what a query sees."""
        return self.left is not None or self.right is not None

    def attend_locally(self, recompute: bool) -> Tensor:
        """Computes attention to this rank's own keys: all there are, or some heads."""
        cut = SequenceCut(1, False, self.x.q.shape[2], self.left, self.right)
        return attention(self.x, self.masks, Ring(None, 0, cut, self.scale), recompute)


@dataclass(frozen=True)
class _AttentionCall:
    """The arguments of either form, as the caller gave them."""

    name: str
    x: Heads
    axis: Axis | None
    causal: bool
    order: str | None
    masks: Masks
    window: Window
    scale: float | None

    def check(self) -> Attention:
        """Checks the arguments on every rank, before anything is sent.

        Raises:
            ValueError, TypeError: as the public functions say.
        """
        name, (q, k, v), axis, order = self.name, self.x, self.axis, self.order
        if order not in ("zigzag", "contiguous", None):
            raise ValueError(f"{name}: order={order!r} is not 'zigzag' or 'contiguous'")
        reach = _reach_of_queries(name, self.causal, self.window)
        needs_order = {
            "causal=True": self.causal,
            f"window={self.window}": self.window is not None,
            "attn_mask": self.masks.mask is not None,
        }
        if any(needs_order.values()) and axis is not None and order is None:
            argument = next(key for key, is_given in needs_order.items() if is_given)
            raise TypeError(
                f"{name}: {argument} over {axis!r} needs order=, which positions a "
                'rank has: "zigzag", of sequences cut by ff.nn.zigzag (equal work for '
                'all ranks), or "contiguous", of sequences cut in a row'
            )
        if isinstance(self.scale, Tensor):
            raise TypeError(
                f"{name}: scale is a tensor, and a number has no gradient: multiply q "
                "by it, and give scale=1"
            )
        needs_square = reach != (None, None) or self.masks.documents is not None
        _check_shapes(name, self.x, needs_square)
        for y in self.x:
            claim_rank_local(y, axis, name)
        ranks = None if axis is None else get_group(axis)
        rank_count = 1 if ranks is None else ranks.size
        documents = _checked_documents(name, self.masks.documents, q)
        masks = Masks(documents, _checked_mask(name, self.masks.mask, q, k, rank_count))
        needs_halves = order == "zigzag" and any(needs_order.values())
        if ranks is not None and rank_count > 1 and needs_halves:
            _check_halves(name, q.shape[2], ranks)
        # Before the exchange, so that messages and saved tensors are of the low dtype.
        x = Heads(*cast_by_autocast(q, k, v))
        scale = self.scale
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
        # Kernels multiply hidden scores of -inf by the scale: 0 would make NaN of them,
        # a negative one inf. So q takes the sign.
        if scale <= 0:
            x = x._replace(q=x.q * (-1 if scale else 0))
        return Attention(x, masks, *reach, abs(scale) or 1.0)


def _check_shapes(name: str, x: Heads, square: bool) -> None:
    """Raises ValueError unless q, k and v fit each other.

    Args:
        square: whether there must be as many queries as keys.
    """
    q, k, v = x
    heads = {"q": q, "k": k, "v": v}.items()
    shapes = ", ".join(f"{key} {y.dtype} {tuple(y.shape)}" for key, y in heads)
    if any(y.ndim != 4 for y in x):
        raise ValueError(f"{name} takes [batch, heads, n, head_dim], got {shapes}")
    fits = {
        "q, k and v are of one floating dtype": q.is_floating_point()
        and q.dtype == k.dtype == v.dtype,
        "k and v are alike in batch, heads and length": k.shape[:3] == v.shape[:3],
        "q and k are alike in batch": q.shape[0] == k.shape[0],
        "q and k are alike in head_dim": q.shape[3] == k.shape[3],
        "there are keys": 0 not in k.shape[1:],
        "causal=True, window= and documents= take as many queries as keys": not square
        or q.shape[2] == k.shape[2],
        "query heads are a multiple of key heads": not q.shape[1] % (k.shape[1] or 1),
    }
    for condition, is_met in fits.items():
        if not is_met:
            raise ValueError(f"{name}: {condition}; got {shapes}")


def _reach_of_queries(name: str, causal: bool, window: Window) -> Reach:
    """Returns how far a query sees before and after itself, by both arguments."""
    reach = window if isinstance(window, tuple) else (window, window)
    valid = [x is None or x.__class__ is int and x >= 0 for x in reach]
    if len(reach) != 2 or not all(valid):
        raise ValueError(
            f"{name}: window={window!r} is no number of positions, from 0 on, before "
            "and after a query that it sees, nor a pair of such"
        )
    return (reach[0], 0) if causal else reach


def _checked_documents(name: str, documents: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns ``documents``; raises unless they are integers [batch or 1, n]."""
    if documents is None:
        return None
    dtype, shape = documents.dtype, tuple(documents.shape)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"{name}: documents are numbered by integers, got {dtype}")
    batch, _, n, _ = q.shape
    if shape not in ((batch, n), (1, n)):
        raise ValueError(
            f"{name}: documents are [batch, n], ({batch}, {n}) or (1, {n}), of the "
            f"positions that this rank has, got {shape}"
        )
    return documents


def _checked_mask(
    name: str, mask: Tensor | None, q: Tensor, k: Tensor, rank_count: int
) -> Tensor | None:
    """Returns the mask as [batch or 1, heads or 1, n or 1, S]; raises if it cannot."""
    if mask is None:
        return None
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        raise TypeError(
            f"{name}: attn_mask has truth values (False: not seen) or numbers that are "
            f"added to scores, got {mask.dtype}"
        )
    full_shape = q.shape[0], q.shape[1], q.shape[2], k.shape[2] * rank_count
    leading = (1,) * (4 - mask.ndim)
    shape = (*leading, *mask.shape)
    matches = mask.ndim >= 2 and len(shape) == 4 and shape[3] == full_shape[3]
    if not matches or any(
        x not in (1, y) for x, y in zip(shape, full_shape, strict=True)
    ):
        raise ValueError(
            f"{name}: attn_mask is [batch, heads, n, S], {full_shape}, of this rank's "
            "queries and the keys of all, or 1 in place of any but the last; got "
            f"{tuple(mask.shape)}"
        )
    return mask.view(shape)


def _check_halves(name: str, n: int, ranks: RankGroup) -> None:
    """Raises ValueError unless ``n`` positions a rank are two half-blocks."""
    if n % 2:
        raise ValueError(
            f"{name}: {n} positions a rank are not two half-blocks: in zig-zag order "
            f"over {ranks.name} the length of a sequence is a multiple of "
            f"{2 * ranks.size}, not {n * ranks.size}"
        )


def _check_heads(name: str, heads: int, key_heads: int, ranks: RankGroup) -> None:
    """Raises ValueError unless the ranks divide query heads and key heads."""
    if heads % ranks.size or key_heads % ranks.size:
        raise ValueError(
            f"{name}: {heads} query heads and {key_heads} key heads are not cut into "
            f"{ranks.size} by {ranks.name}: take a size that divides "
            f"{math.gcd(heads, key_heads)}, or ring_attention, which cuts no heads"
        )

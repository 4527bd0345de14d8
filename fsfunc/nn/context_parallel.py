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
from fsfunc.nn.numerics import autocast
from fsfunc.nn.ring import Ring, attention
from fsfunc.nn.sequence_order import (
    SequenceCut,
    contiguous_parts,
    unzigzag,
    zigzag,
    zigzag_parts,
)

Window = int | tuple[int | None, int | None] | None
Reach = tuple[int | None, int | None]


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
    x, masks = Heads(q, k, v), Masks(documents, attn_mask)
    given = _Arguments(
        "ring_attention", x, axis, causal, order, masks, window, scale
    ).checked()
    if axis is None or get_group(axis).size == 1:
        return given.alone(recompute)
    where, n = get_group(axis), q.shape[2]
    x, (ids, mask), left, right, scale = given
    limited = given.limited
    zigzagged = limited and order == "zigzag"
    turns = causal and left is None and attn_mask is None and order == "contiguous"
    turns &= n % 2 == 0
    if turns:
        x = Heads(*(zigzag_parts(y, axis, 2) for y in x))
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
    name, x, masks = "all_to_all_attention", Heads(q, k, v), Masks(documents, attn_mask)
    given = _Arguments(name, x, axis, causal, order, masks, window, scale).checked()
    if axis is None or get_group(axis).size == 1:
        return given.alone(recompute)
    where, (ids, mask), n = get_group(axis), given.masks, q.shape[2]
    _check_heads(name, q.shape[1], k.shape[1], where)
    limited, x = given.limited or mask is not None, given.x
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
    out = given._replace(x=x, masks=Masks(ids, mask)).alone(recompute)
    if turns:
        out = zigzag(out, where.size, 2)
    return all_to_all(out, axis, split_dim=2, concat_dim=1)


class Attention(NamedTuple):
    """What either form computes, checked before anything is sent.

    Args:
        x: q, k and v as autocast has them.
        masks: in full form, [batch or 1, n] and [batch or 1, heads or 1, n or 1, S].
        left, right: the distances that a query sees before and after itself; None:
            without an end.
        scale: that of the scores, above 0.
    """

    x: Heads
    masks: Masks
    left: int | None
    right: int | None
    scale: float

    @property
    def limited(self) -> bool:
        """True if a query does not see every position."""
        return self.left is not None or self.right is not None

    def alone(self, recompute: bool) -> Tensor:
        """Attention to what this rank has."""
        cut = SequenceCut(1, False, self.x.q.shape[2], self.left, self.right)
        return attention(self.x, self.masks, Ring(None, 0, cut, self.scale), recompute)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of either form, as it is called."""

    name: str
    x: Heads
    axis: Axis | None
    causal: bool
    order: str | None
    masks: Masks
    window: Window
    scale: float | None

    def checked(self) -> Attention:
        """The same in full form.

        Raises:
            ValueError, TypeError: as the public functions say.
        """
        name, (q, k, v), axis, order = self.name, self.x, self.axis, self.order
        if order not in ("zigzag", "contiguous", None):
            raise ValueError(f"{name}: order={order!r} is not 'zigzag' or 'contiguous'")
        reach = _reach(name, self.causal, self.window)
        ordered = {
            "causal=True": self.causal,
            f"window={self.window}": self.window is not None,
            "attn_mask": self.masks.mask is not None,
        }
        if any(ordered.values()) and axis is not None and order is None:
            what = next(key for key, given in ordered.items() if given)
            raise TypeError(
                f"{name}: {what} over {axis!r} needs order=, which positions a rank "
                'has: "zigzag", of sequences cut by ff.nn.zigzag (equal work for all '
                'ranks), or "contiguous", of sequences cut in a row'
            )
        if isinstance(self.scale, Tensor):
            raise TypeError(
                f"{name}: scale is a tensor, and a number has no gradient: multiply q "
                "by it, and give scale=1"
            )
        square = reach != (None, None) or self.masks.documents is not None
        _check_shapes(name, self.x, square)
        for y in self.x:
            claim_rank_local(y, axis, name)
        where = None if axis is None else get_group(axis)
        size = 1 if where is None else where.size
        documents = _documents(name, self.masks.documents, q)
        masks = Masks(documents, _mask(name, self.masks.mask, q, k, size))
        cut_in_halves = order == "zigzag" and any(ordered.values())
        if where is not None and size > 1 and cut_in_halves:
            _check_halves(name, q.shape[2], where)
        x = Heads(*autocast(q, k, v))  # what is sent and saved is of the low dtype, too
        scale = self.scale
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
        # By a scale of 0 or less kernels turn the -inf of what is not seen into NaN or
        # inf: q takes its sign.
        if scale <= 0:
            x = x._replace(q=x.q * (-1 if scale else 0))
        return Attention(x, masks, *reach, abs(scale) or 1.0)


def _check_shapes(name: str, x: Heads, square: bool) -> None:
    """Raises ValueError unless q, k and v fit each other.

    Args:
        square: whether there are to be as many queries as keys.
    """
    q, k, v = x
    given = {"q": q, "k": k, "v": v}.items()
    said = ", ".join(f"{key} {y.dtype} {tuple(y.shape)}" for key, y in given)
    if any(y.ndim != 4 for y in x):
        raise ValueError(f"{name} takes [batch, heads, n, head_dim], got {said}")
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
    for condition, fit in fits.items():
        if not fit:
            raise ValueError(f"{name}: {condition}; got {said}")


def _reach(name: str, causal: bool, window: Window) -> Reach:
    """The distances that a query sees before and after itself; None: without an end."""
    both = window if isinstance(window, tuple) else (window, window)
    fit = [x is None or x.__class__ is int and x >= 0 for x in both]
    if len(both) != 2 or not all(fit):
        raise ValueError(
            f"{name}: window={window!r} is no number of positions, from 0 on, before "
            "and after a query that it sees, nor a pair of such"
        )
    return (both[0], 0) if causal else both


def _documents(name: str, documents: Tensor | None, q: Tensor) -> Tensor | None:
    if documents is None:
        return None
    kind, shape = documents.dtype, tuple(documents.shape)
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise TypeError(f"{name}: documents are numbered by integers, got {kind}")
    batch, _, n, _ = q.shape
    if shape not in ((batch, n), (1, n)):
        raise ValueError(
            f"{name}: documents are [batch, n], ({batch}, {n}) or (1, {n}), of the "
            f"positions that this rank has, got {shape}"
        )
    return documents


def _mask(
    name: str, mask: Tensor | None, q: Tensor, k: Tensor, size: int
) -> Tensor | None:
    """[batch or 1, heads or 1, n or 1, S]."""
    if mask is None:
        return None
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        raise TypeError(
            f"{name}: attn_mask has truth values (False: not seen) or numbers that are "
            f"added to scores, got {mask.dtype}"
        )
    full = q.shape[0], q.shape[1], q.shape[2], k.shape[2] * size
    lead = (1,) * (4 - mask.ndim)
    sizes = (*lead, *mask.shape)
    fits = mask.ndim >= 2 and len(sizes) == 4 and sizes[3] == full[3]
    if not fits or any(x not in (1, y) for x, y in zip(sizes, full, strict=True)):
        raise ValueError(
            f"{name}: attn_mask is [batch, heads, n, S], {full}, of this rank's "
            "queries and the keys of all, or 1 in place of any but the last; got "
            f"{tuple(mask.shape)}"
        )
    return mask.view(sizes)


def _check_halves(name: str, n: int, where: RankGroup) -> None:
    """Raises ValueError unless ``n`` positions a rank are two half-blocks."""
    if n % 2:
        raise ValueError(
            f"{name}: {n} positions a rank are not two half-blocks: in zig-zag order "
            f"over {where.name} the length of a sequence is a multiple of "
            f"{2 * where.size}, not {n * where.size}"
        )


def _check_heads(name: str, heads: int, read: int, where: RankGroup) -> None:
    """Raises ValueError unless ``where`` cuts query heads and key heads evenly."""
    if heads % where.size or read % where.size:
        raise ValueError(
            f"{name}: {heads} query heads and {read} key heads are not cut into "
            f"{where.size} by {where.name}: take a size that divides "
            f"{math.gcd(heads, read)}, or ring_attention, which cuts no heads"
        )

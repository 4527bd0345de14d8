"""Attention over a sequence that is cut among ranks, in two forms.

In :func:`ring_attention` keys and values go from rank to rank, and a rank's queries
stay where they are; in :func:`all_to_all_attention` the ranks exchange positions for
heads, and each attends to the whole sequence with some of the heads. They take and give
the same tensors, so that one stands for the other.

``order`` says which positions the parts hold where that counts, under ``causal``:
``"zigzag"`` (see :func:`fsfunc.nn.zigzag`) or ``"contiguous"``. Nobody can see from a
part which it is, so it is taken from nobody but the caller.
"""

from __future__ import annotations

import math

from torch import Tensor

from fsfunc.comm.collectives import all_to_all
from fsfunc.comm.groups import RankGroup, axis_index, group
from fsfunc.comm.mesh import Axis
from fsfunc.nn.numerics import autocast
from fsfunc.nn.ring import Ring, attention
from fsfunc.nn.sequence_order import (
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
    scale: float | None = None,
    recompute: bool = True,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks along ``axis``.

    softmax(scale q k^T) v, block by block: the output of each rank's keys, and the sum
    of the exponentials of their scores, are enough to join them, in fp32 at least.
    Under plain autograd the backward has keys and values sent again and computes each
    block's probabilities again.

    All derivatives hold. Those other than the first of plain autograd
    (``create_graph``, ``torch.func``, forward mode) keep all blocks' probabilities, as
    does ``recompute=False``: a W-th of the whole, but quadratic in the sequence.

    Args:
        q: [batch, heads, n, head_dim], floating: n positions of the sequence, as many
            on every rank.
        k, v: [batch, key heads, m, head_dim or value_dim], of the dtype of ``q``; the
            key heads divide the heads: query heads in a row read one.
        axis: that over which the sequence is cut; None: it is whole, and nothing moves.
        causal: whether a query sees the positions up to its own alone. Then n = m.
        order: under ``causal`` over an axis, which positions these are: "zigzag", as
            :func:`fsfunc.nn.zigzag` cuts them, so that each step is two blocks of
            n/2 x n/2 for every rank; or "contiguous": then parts are exchanged for such
            in zig-zag order first, and the output back. Parts that are cut otherwise
            than is said give numbers that are wrong. n is even.
        scale: 1 / sqrt(head_dim) by default.
        recompute: whether to forget the probabilities.

    Returns:
        [batch, heads, n, value_dim], of the dtype of ``q``.

    Raises:
        ValueError: shapes that do not fit, an odd n under ``causal``, no such order.
        TypeError: dtypes that are not floating, or not one; ``causal`` over an axis,
            and no order; a scale that is a tensor.

    Cost: b being the bytes of this rank's k and v, W ranks, i this rank's index:

        ==================  =============  =================  ===============
        .                   forward        and its backward   recompute=False
        ==================  =============  =================  ===============
        every key           (W-1) b        3 (W-1) b          2 (W-1) b
        causal, zigzag      (W-1+i) b/2    (4 (W-1) + i) b/2  3 (W-1) b/2
        ==================  =============  =================  ===============

        in W-1 steps, each under way while the one before it is computed; "contiguous"
        order sends q, k, v and the output once more each way, less the halves that
        stay. Kept for the backward: q, k, v, the output and one number a query; while
        it runs, some ten parts like k and v, and rows of scores: a W-th of the whole.
        Nothing is computed for a block that is masked as a whole, and a part is sent
        only where some query sees it.

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
    q, k, v, scale = _checked("ring_attention", q, k, v, axis, causal, order, scale)
    if axis is None or group(axis).size == 1:
        return _alone(q, k, v, causal, scale, recompute)
    where, index = group(axis), 0
    if causal:
        _check_halves("ring_attention", q.shape[2], where)
        index = axis_index(axis)
    turns = causal and order == "contiguous"
    if turns:
        q, k, v = (zigzag_parts(x, axis, 2) for x in (q, k, v))
    out = attention(q, k, v, Ring(where, index, causal, scale), recompute)
    return contiguous_parts(out, axis, 2) if turns else out


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis | None,
    *,
    causal: bool = False,
    order: str | None = None,
    scale: float | None = None,
    recompute: bool = True,
) -> Tensor:
    """:func:`ring_attention`, computed with whole sequences and some of the heads.

    An all-to-all takes each of q, k and v from all heads of some positions to some
    heads of all positions, and one takes the output back.

    Args:
        q, k, v: as for :func:`ring_attention`; ``axis`` divides both numbers of heads.
        axis, causal, scale, recompute: as there.
        order: as there; in "zigzag" order q, k, v and the output are copied once more,
            to put them in a row and back.

    Returns:
        [batch, heads, n, value_dim], of the dtype of ``q``.

    Raises:
        ValueError: as :func:`ring_attention`, and heads that the axis does not divide.
        TypeError: as :func:`ring_attention`.

    Cost: four all-to-alls forward and four backward, (W-1)/W of the bytes of q, k, v
    and the output each way. Kept for the backward: those of q, k, v and the output once
    more, of some heads.

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
    name = "all_to_all_attention"
    q, k, v, scale = _checked(name, q, k, v, axis, causal, order, scale)
    if axis is None or group(axis).size == 1:
        return _alone(q, k, v, causal, scale, recompute)
    where = group(axis)
    _check_heads(name, q.shape[1], k.shape[1], where)
    turns = causal and order == "zigzag"
    if turns:
        _check_halves(name, q.shape[2], where)
    q, k, v = (all_to_all(x, axis, split_dim=1, concat_dim=2) for x in (q, k, v))
    if turns:
        q, k, v = (unzigzag(x, where.size, 2) for x in (q, k, v))
    out = _alone(q, k, v, causal, scale, recompute)
    if turns:
        out = zigzag(out, where.size, 2)
    return all_to_all(out, axis, split_dim=2, concat_dim=1)


def _alone(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, recompute: bool
) -> Tensor:
    """Attention to what this rank has."""
    return attention(q, k, v, Ring(None, 0, causal, scale), recompute)


def _checked(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis | None,
    causal: bool,
    order: str | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v as autocast has them, and the scale."""
    if order not in ("zigzag", "contiguous", None):
        raise ValueError(f"{name}: order={order!r} is not 'zigzag' or 'contiguous'")
    if causal and axis is not None and order is None:
        raise TypeError(
            f"{name}: causal=True over {axis!r} needs order=, which positions a "
            'rank has: "zigzag", of sequences cut by ff.nn.zigzag (equal work for all '
            'ranks), or "contiguous", of sequences cut in a row'
        )
    if isinstance(scale, Tensor):
        raise TypeError(
            f"{name}: scale is a tensor, and a number has no gradient: multiply q by "
            "it, and give scale=1"
        )
    given = {"q": q, "k": k, "v": v}
    shapes = ", ".join(f"{key} {tuple(x.shape)}" for key, x in given.items())
    if any(x.ndim != 4 for x in given.values()):
        raise ValueError(f"{name} takes [batch, heads, n, head_dim], got {shapes}")
    dtypes = {x.dtype for x in given.values()}
    if len(dtypes) > 1 or not q.is_floating_point():
        said = ", ".join(f"{key} {x.dtype}" for key, x in given.items())
        raise TypeError(f"{name} takes q, k and v of one floating dtype, got {said}")
    fits = {
        "k and v differ in batch, heads or length": k.shape[:3] == v.shape[:3],
        "q and k differ in batch": q.shape[0] == k.shape[0],
        "q and k differ in head_dim": q.shape[3] == k.shape[3],
        "there are no keys": 0 not in k.shape[1:],
        "under causal=True there are as many queries as keys": not causal
        or q.shape[2] == k.shape[2],
    }
    for what, fit in fits.items():
        if not fit:
            raise ValueError(f"{name}: {what}; got {shapes}")
    heads, read = q.shape[1], k.shape[1]
    if heads % read:
        work = ", ".join(map(str, _divisors(heads)))
        raise ValueError(
            f"{name}: {heads} query heads do not share {read} key heads evenly; "
            f"numbers of key heads that work: {work}; got {shapes}"
        )
    q, k, v = autocast(q, k, v)  # what is sent and saved is of the low dtype, too
    return q, k, v, 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)


def _check_halves(name: str, n: int, where: RankGroup) -> None:
    if n % 2:
        length, step = n * where.size, 2 * where.size
        near = [x for x in (length - where.size, length + where.size) if x]
        raise ValueError(
            f"{name}: {n} positions a rank are not two half-blocks. In zig-zag order "
            f"over {where.name} of size {where.size} the length of a sequence is a "
            f"multiple of {step}, such as {' or '.join(map(str, near))}, not {length}"
        )


def _check_heads(name: str, heads: int, read: int, where: RankGroup) -> None:
    if heads % where.size or read % where.size:
        work = ", ".join(map(str, _divisors(math.gcd(heads, read))))
        below = read // where.size * where.size
        near = [str(x) for x in (below, below + where.size) if x]
        raise ValueError(
            f"{name}: {heads} query heads and {read} key heads are not cut into "
            f"{where.size} by {where.name}. Axis sizes that work: {work}; or "
            f"{' or '.join(near)} key heads, and a multiple of that of query heads; or "
            "ring_attention, which cuts no heads"
        )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]

"""Checks of the arguments of attention over a cut sequence, before anything is sent."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsfunc.comm.collective_ops import claim_own
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Axis
from fsfunc.nn.attention_blocks import Heads
from fsfunc.nn.attention_masks import Masks
from fsfunc.nn.numerics import autocast

Window = int | tuple[int | None, int | None] | None
Reach = tuple[int | None, int | None]


def checked(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis | None,
    causal: bool,
    order: str | None,
    scale: float | None,
    masks: Masks,
    window: Window,
) -> tuple[Heads, float, Masks, Reach]:
    """q, k and v as autocast has them, the scale, masks in full form, and the reach."""
    if order not in ("zigzag", "contiguous", None):
        raise ValueError(f"{name}: order={order!r} is not 'zigzag' or 'contiguous'")
    reach = _reach(name, causal, window)
    ordered = {
        "causal=True": causal,
        f"window={window}": window is not None,
        "attn_mask": masks.mask is not None,
    }
    if any(ordered.values()) and axis is not None and order is None:
        what = next(key for key, given in ordered.items() if given)
        raise TypeError(
            f"{name}: {what} over {axis!r} needs order=, which positions a rank has: "
            '"zigzag", of sequences cut by ff.nn.zigzag (equal work for all ranks), or '
            '"contiguous", of sequences cut in a row'
        )
    if isinstance(scale, Tensor):
        raise TypeError(
            f"{name}: scale is a tensor, and a number has no gradient: multiply q by "
            "it, and give scale=1"
        )
    given = {"q": q, "k": k, "v": v}.items()
    said = ", ".join(f"{key} {x.dtype} {tuple(x.shape)}" for key, x in given)
    if any(x.ndim != 4 for _, x in given):
        raise ValueError(f"{name} takes [batch, heads, n, head_dim], got {said}")
    square = reach != (None, None) or masks.documents is not None
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
    for x in (q, k, v):
        claim_own(x, axis, name)
    where = None if axis is None else group(axis)
    size = 1 if where is None else where.size
    masks = Masks(
        _documents(name, masks.documents, q), _mask(name, masks.mask, q, k, size)
    )
    if where is not None and size > 1 and order == "zigzag" and any(ordered.values()):
        check_halves(name, q.shape[2], where)
    x = Heads(*autocast(q, k, v))  # what is sent and saved is of the low dtype, too
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    if (
        scale <= 0
    ):  # by which kernels turn the -inf of what is not seen into NaN, or inf
        x = x._replace(q=x.q * (-1 if scale else 0))
    return x, abs(scale) or 1.0, masks, reach


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


def check_halves(name: str, n: int, where: RankGroup) -> None:
    """Raises ValueError unless ``n`` positions a rank are two half-blocks."""
    if n % 2:
        raise ValueError(
            f"{name}: {n} positions a rank are not two half-blocks: in zig-zag order "
            f"over {where.name} the length of a sequence is a multiple of "
            f"{2 * where.size}, not {n * where.size}"
        )


def check_heads(name: str, heads: int, read: int, where: RankGroup) -> None:
    """Raises ValueError unless ``where`` cuts query heads and key heads evenly."""
    if heads % where.size or read % where.size:
        raise ValueError(
            f"{name}: {heads} query heads and {read} key heads are not cut into "
            f"{where.size} by {where.name}: take a size that divides "
            f"{math.gcd(heads, read)}, or ring_attention, which cuts no heads"
        )

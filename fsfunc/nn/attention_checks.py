"""Checks of the arguments of attention over a cut sequence, before anything is sent."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
        "causal=True, window= and documents= take as many queries as keys": (
            reach == (None, None) and masks.documents is None
        )
        or q.shape[2] == k.shape[2],
    }
    for condition, fit in fits.items():
        if not fit:
            raise ValueError(f"{name}: {condition}; got {shapes}")
    heads, read = q.shape[1], k.shape[1]
    if heads % read:
        work = ", ".join(map(str, _divisors(heads)))
        raise ValueError(
            f"{name}: {heads} query heads do not share {read} key heads evenly; "
            f"numbers of key heads that work: {work}; got {shapes}"
        )
    where = None if axis is None else group(axis)
    size = 1 if where is None else where.size
    masks = Masks(
        _documents(name, masks.documents, q), _mask(name, masks.mask, q, k, size)
    )
    if where is not None and size > 1 and order == "zigzag" and any(ordered.values()):
        check_halves(name, q.shape[2], where)
    x = Heads(*autocast(q, k, v))  # what is sent and saved is of the low dtype, too
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    return x, scale, masks, reach


def _reach(name: str, causal: bool, window: Window) -> Reach:
    """The distances that a query sees before and after itself; None: without an end."""
    both = window if isinstance(window, tuple) else (window, window)
    if len(both) != 2 or any(type(x) not in (int, type(None)) for x in both):
        raise TypeError(
            f"{name}: window={window!r} is no number of positions before and after a "
            "query that it sees, nor a pair of such"
        )
    if any(x is not None and x < 0 for x in both):
        raise ValueError(
            f"{name}: window={window!r}: numbers of positions are not negative, and "
            "None is all of them"
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
        length, step = n * where.size, 2 * where.size
        near = [x for x in (length - where.size, length + where.size) if x]
        raise ValueError(
            f"{name}: {n} positions a rank are not two half-blocks. In zig-zag order "
            f"over {where.name} of size {where.size} the length of a sequence is a "
            f"multiple of {step}, such as {' or '.join(map(str, near))}, not {length}"
        )


def check_heads(name: str, heads: int, read: int, where: RankGroup) -> None:
    """Raises ValueError unless ``where`` cuts query heads and key heads evenly."""
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

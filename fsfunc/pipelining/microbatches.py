"""A batch in microbatches: which leaves are cut, and how much each part counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.inputs import arguments, refuse, rows_of
from fsfunc.sharded import is_sharded

__all__ = ["Part", "cut_batch", "folded"]


@dataclass(frozen=True)
class Part:
    """The arguments of one microbatch.

    Args:
        args, keywords: of the loss; what is not cut is in every part.
        share: what a mean over its rows counts: its rows, over those of an average
            part.
        shapes: what tells parts apart that need programs of their own; autocast too,
            under which the same unit gives other dtypes.
    """

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    share: float
    shapes: tuple[Any, ...]


def cut_batch(
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    kept: Collection[int],
    n: int,
) -> list[Part]:
    """``n`` parts along dim 0, as even as can be, the smaller ones last.

    Args:
        args, keywords: of the loss: tensors of one dim or more are cut, all alike;
            sharded leaves and scalars are not.
        kept: positions in ``args`` that are not cut (the parameters).
        n: how many.

    Raises:
        ValueError: batch leaves that differ in dim 0, or fewer rows than parts.
    """
    others = [None if i in kept else x for i, x in enumerate(args)]
    given = (others, dict(keywords))
    names = [*arguments(len(args)), *keywords]
    refuse("array sparse", "pipeline", [*others, *keywords.values()], *names)
    paths, leaves, treedef = tree.flatten_with_paths(given, is_leaf=is_sharded)
    cut = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.ndim]
    count = rows_of({paths[i].partition("/")[2]: leaves[i] for i in cut}, n)
    pieces = {i: leaves[i].tensor_split(n) for i in cut}
    parts, casts = [], _casts()
    for m in range(n):
        own = [pieces[i][m] if i in pieces else x for i, x in enumerate(leaves)]
        size = own[cut[0]].shape[0] if cut else 1
        some, rest = tree.unflatten(treedef, own)
        some = [args[k] if k in kept else x for k, x in enumerate(some)]
        shapes = (treedef, casts, *(_kind(x) for x in own))
        parts.append(Part(tuple(some), rest, size * n / count, shapes))
    return parts


def _casts() -> tuple[Any, ...]:
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    return tuple((k, torch.get_autocast_dtype(k)) for k in kinds)


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor) or is_sharded(x):
        return tuple(x.shape), x.dtype
    try:
        hash(x)
    except TypeError:
        return type(x)
    return x


def folded(parts: Sequence[Part]) -> tuple[list[Part], int]:
    """The parts, with a mean over them in their shares, and what is left to divide by.

    To divide by a power of two is exact at any time: better one scalar now than all
    gradients later.
    """
    n = len(parts)
    if n & (n - 1):
        return list(parts), n
    return [replace(part, share=part.share / n) for part in parts], 1

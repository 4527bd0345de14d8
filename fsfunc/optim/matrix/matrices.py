"""What optimizers of whole matrices ask of their leaves, and what they give back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.optim.leaves import Tree, local, paths_of, said, trainable
from fsfunc.optim.matching import Decay, Matched
from fsfunc.sharded.leaf import is_sharded

__all__ = ["check_matrices", "decays", "laid_as_parameters", "move_in_place"]


def check_matrices(params: Tree, name: str) -> None:
    """Raises where a leaf to train is no matrix, by its global shape.

    Raises:
        ValueError: names the leaf and the way out.
    """
    leaves, treedef = tree.flatten(params, is_sharded)
    for i, leaf in enumerate(leaves):
        if trainable(leaf) and leaf.ndim != 2:
            raise ValueError(
                f"{name} takes matrices, and {paths_of(treedef)[i]!r} is {said(leaf)}: "
                f'write ff.partition({{"matrix": ff.{name}(...), "other": '
                'ff.sharded_adam(...)}, lambda path, leaf: "matrix" if leaf.ndim == 2 '
                'else "other"), and name embeddings and heads as other too'
            )


def laid_as_parameters(
    matched: Matched, parts: Sequence[Tensor], factors: Sequence[float]
) -> list[Any]:
    """The parts times their factors, as leaves that lie as the active ones do.

    In the dtypes of the parameters, those of one buffer in a buffer of their own.
    """
    params = matched.buffers[0]
    leaves = [matched.trees[0][i] for i in matched.active]
    rows = list(zip(leaves, parts, factors, strict=True))
    if matched.differentiated:
        made = [x.to(leaf.dtype) * factor for leaf, x, factor in rows]
        return [
            leaf.with_local(x) if is_sharded(leaf) else x
            for leaf, x in zip(leaves, made, strict=True)
        ]
    flats = [torch.empty_like(x) for x in params.tensors]
    for flat, (_, packed) in zip(flats, params.groups, strict=True):
        end = 0  # of what the leaves before take; what is beside them stays zero
        for start, stop in () if packed is None else [*packed.ranges, _end(flat)]:
            flat[end:start].zero_()
            end = max(end, stop)
    out = params.rebuild(flats)
    targets = [local(leaf) for leaf in out]
    if targets:
        torch._foreach_copy_(targets, list(parts))
    scaled = [(x, f) for x, f in zip(targets, factors, strict=True) if f != 1]
    if scaled:
        torch._foreach_mul_(*map(list, zip(*scaled, strict=True)))
    return out


def _end(flat: Tensor) -> tuple[int, int]:
    return flat.numel(), flat.numel()


def decays(decay: Decay) -> bool:
    """Whether a leaf loses any of itself."""
    return isinstance(decay, Tensor) or bool(decay)


def move_in_place(
    params: list[Tensor], ways: list[Tensor], *, rate: Any, weight_decay: float
) -> None:
    """Writes ``p - rate weight_decay p - rate way`` into the parameters."""
    if weight_decay:
        torch._foreach_mul_(params, 1 - rate * weight_decay)
    if isinstance(rate, Tensor):
        torch._foreach_add_(params, torch._foreach_mul(ways, -rate))
    else:
        torch._foreach_add_(params, ways, alpha=-rate)

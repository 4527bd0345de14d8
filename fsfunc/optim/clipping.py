"""Numbers that reduce over every element of a tree, exact where leaves are sharded.

A sum over the elements that a rank holds is not a sum over the tree: each leaf counts
over the axes of its own layout, and a replicated one once. Leaves that are spread over
the same axes are reduced together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fsfunc import tree
from fsfunc.collectives import pmax, psum
from fsfunc.optim import kernels
from fsfunc.optim.base import Optimizer, State
from fsfunc.optim.leafwise import Tree, map_flat, split, trainable
from fsfunc.sharded import is_sharded

Axes = tuple[str, ...]


def tree_sum(values: Tree) -> Tensor:
    """The sum of all elements of the floating leaves, equal on every rank.

    Args:
        values: a tree of tensors and shards of any shapes; other leaves count nothing.

    Returns:
        0-dim, accumulated in float32, or in float64 where a leaf is; 0 for no leaves.

    Cost: one psum of one number over each distinct set of axes in the layouts.

    >>> tree_sum({"w": torch.ones(2, 3), "b": torch.ones(2), "step": 7})
    tensor(8.)
    """
    held, dtype = _by_axes(values)
    sums = []
    for axes, tensors in held:
        local = [t.sum(dtype=dtype) for t in tensors]
        sums.append(_psum(_combined(local, torch.sum, tensors[0].device, dtype), axes))
    return _combined(sums, torch.sum, _device(held), dtype)


def global_norm(values: Tree, p: float = 2.0) -> Tensor:
    """The p-norm of all elements of the floating leaves, equal on every rank.

    ``(sum |x|^p)^(1/p)``, or ``max |x|`` where p is infinite.

    Args:
        values: a tree of tensors and shards of any shapes; other leaves count nothing.
        p: above 0; ``math.inf`` for the largest magnitude.

    Returns:
        0-dim, accumulated in float32, or in float64 where a leaf is; 0 for no leaves.
        Of a tree that is not sharded, the bits of ``torch.nn.utils.get_total_norm``.

    Raises:
        ValueError: ``p`` is not above 0.

    Cost: one psum (pmax where p is infinite) of one number over each distinct set of
    axes in the layouts.

    >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor(4.0), "frozen": None})
    tensor(5.)
    """
    if not p > 0:
        raise ValueError(f"p is {p}: a norm needs it above 0")
    held, dtype = _by_axes(values)
    norm_of = partial(vector_norm, ord=p)
    local = []
    for axes, tensors in held:
        # The infinite norm has no identity: torch refuses an empty tensor.
        norms = kernels.norms([t for t in tensors if t.numel()], p, dtype)
        local.append((axes, _combined(norms, norm_of, tensors[0].device, dtype)))
    device = _device(held)
    if math.isinf(p):
        maxima = [pmax(norm, axes) if axes else norm for axes, norm in local]
        return _combined(maxima, torch.amax, device, dtype)
    if len(local) == 1 and not local[0][0]:
        return local[0][1]
    powers = [_psum(norm**p, axes) for axes, norm in local]
    power = _combined(powers, torch.sum, device, dtype)
    return power.sqrt() if p == 2 else power ** (1 / p)


def clip_by_global_norm(
    max_norm: float, eps: float = 1e-6, *, p: float = 2.0
) -> Optimizer:
    """The transformation that scales gradients down to a global norm of ``max_norm``.

    ``g min(max_norm / (global_norm(grads) + eps), 1)``, as
    ``torch.nn.utils.clip_grad_norm_`` does it, exact on sharded gradients.

    Args:
        max_norm: above 0.
        eps: added to the norm.
        p: which norm; see `global_norm`.

    Raises:
        ValueError: ``max_norm`` or ``p`` is not above 0, or ``eps`` is negative.

    Cost: that of `global_norm`, one pass and one fresh copy of the gradients, which
    are left as they were. No branch: nothing waits for the device.

    Source: Pascanu et al., On the difficulty of training recurrent networks, 2013.

    >>> clip = clip_by_global_norm(1.0)
    >>> clip.update({"w": torch.tensor([3.0]), "b": torch.tensor(4.0)}, ())[0]
    {'w': tensor([0.6000]), 'b': tensor(0.8000)}
    """
    if not (max_norm > 0 and p > 0 and eps >= 0):
        raise ValueError(
            f"max_norm is {max_norm}, p is {p} and eps is {eps}: the first two must be "
            "above 0, and eps 0 or more"
        )

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Tree, State]:
        factor = (max_norm / (global_norm(grads, p) + eps)).clamp(max=1.0)
        return map_flat(lambda tensors: kernels.scaled(tensors, factor), grads), state

    return Optimizer(lambda params: (), update)


def _by_axes(values: Tree) -> tuple[list[tuple[Axes, list[Tensor]]], torch.dtype]:
    """The flat tensors by the axes they are spread over, and a dtype to sum in.

    Axes in sorted order, also where all that this rank holds is empty: every rank
    issues the same collectives.
    """
    leaves = [x for x in tree.leaves(values, is_sharded) if trainable(x)]
    (buffers,) = split([leaves])
    held: dict[Axes, list[Tensor]] = {}
    dtype = torch.float32
    for tensor, (positions, _) in zip(buffers.tensors, buffers.groups, strict=True):
        first = leaves[positions[0]]
        axes = tuple(sorted(first.layout.axes)) if is_sharded(first) else ()
        held.setdefault(axes, []).append(tensor)
        dtype = torch.promote_types(dtype, tensor.dtype)
    return sorted(held.items()), dtype


def _device(held: list[tuple[Axes, list[Tensor]]]) -> torch.device:
    return held[0][1][0].device if held else torch.device("cpu")


def _psum(x: Tensor, axes: Axes) -> Tensor:
    return psum(x, axes) if axes else x


def _combined(
    numbers: list[Tensor],
    reduce: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """``reduce`` of 0-dim tensors, brought to one device; 0 of none."""
    if not numbers:
        return torch.zeros((), dtype=dtype, device=device)
    return reduce(torch.stack([x.to(device) for x in numbers]))

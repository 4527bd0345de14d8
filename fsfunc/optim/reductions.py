"""Sums over all elements of a tree, and one number into all of them.

Of a sharded leaf a rank holds a part, so a sum over what it holds is no sum over the
leaf: each counts over the axes of its own layout, and a replicated one once. Leaves
that are spread over the same axes are reduced together.

Under ``shard`` all of this may be differentiated, to any order: a sum of parts crosses
into own values, and a number crosses into parts, each with its transpose
(`typed_maps`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.collective_ops import apply_map, claim, issue, summed
from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import averaged_axes
from fsfunc.comm.typed_maps import ENTER, MAX, SPREAD, SUM, check_samples
from fsfunc.core.frames import frame
from fsfunc.optim.leaves import Tree, differentiated, map_flat, scaled, split, trainable
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import Sharded, is_sharded

Spread = tuple[str, ...] | None  # the axes of a sharded leaf; None: a plain tensor


def tree_sum(values: Tree) -> Tensor:
    """The sum of all elements of floating and complex leaves, equal on every rank.

    Args:
        values: a tree of tensors and shards of any shapes; other leaves count nothing.

    Returns:
        0-dim, accumulated in float32, or in float64 where a leaf is; 0 for no leaves.
        Under ``shard`` it is a rank's own value that happens to agree.

    Transpose: of parts, the mean over the ranks of the cotangents, on every element.

    Cost: one psum of one number over each distinct set of axes in the layouts; as many
    backward.

    >>> tree_sum({"w": torch.ones(2, 3), "b": torch.ones(2), "step": 7})
    tensor(8.)
    """
    held, dtype = by_axes(values)
    sums = []
    for axes, tensors in held:
        local = [t.sum(dtype=dtype) for t in tensors]
        total = combined(local, torch.sum, device_of([(axes, tensors)]), dtype)
        sums.append(out_of_parts(total, axes))
    return combined(sums, torch.sum, device_of(held), dtype)


def tree_scale(values: Tree, factor: float | Tensor) -> Tree:
    """``values`` with every leaf that has a derivative multiplied by ``factor``.

    As ``tree.map(lambda x: x * factor, values)``, also where the factor is
    differentiated: a learned rate, a loss, a norm. Of shards each rank sees its parts
    alone, and a plain product would give the factor the gradient of these.

    Args:
        values: a tree of tensors and shards; other leaves stay what they are.
        factor: a number or 0-dim tensor, the same on every rank: a parameter, or what
            a psum or pmean, ``tree_sum`` or ``global_norm`` gives.

    Raises:
        ValueError: a factor with dims.

    Transpose: of the factor, n times the sum over the rank's own parts, n ranks holding
    one each; where it was made one value over the ranks the mean is taken.

    Cost: nothing is sent.

    >>> tree_scale({"w": torch.ones(2), "n": 3}, torch.tensor(0.5))
    {'w': tensor([0.5000, 0.5000]), 'n': 3}
    """
    if isinstance(factor, Tensor) and factor.ndim:
        raise ValueError(
            f"tree_scale by a tensor of shape {tuple(factor.shape)}: one number scales "
            "a tree; multiply leaf by leaf in a unit, or take its mean first"
        )
    claim(factor, "tree_scale")
    if not isinstance(factor, Tensor) or not differentiated([factor]):
        return map_flat(lambda ts: scaled(ts, factor), values)

    def times(leaf: Any) -> Any:
        if not trainable(leaf):
            return leaf
        if not isinstance(leaf, Sharded):
            return leaf * factor
        return leaf.with_local(leaf.local * into_parts(factor, leaf.layout.axes))

    return tree.map(times, values, is_leaf=is_sharded)


def out_of_parts(x: Tensor, axes: Spread) -> Tensor:
    """The ranks' sums over their parts as one sum, each rank's own."""
    if axes is None:
        return x  # each leaf entered by itself
    if not differentiated([x]):
        return issue(x, SUM, group(axes)) if axes else x
    check_samples(x, "a sum over sharded leaves")
    over, others, copies = _parted(axes)
    if copies:
        x = issue(x, ENTER, group(copies))
    if over:
        x = issue(x, SUM, group(over))
    if others:
        with internal():  # of parts by their layouts: no word of the user's is asked
            x = psum(x, others)
    return x


def most_of_parts(x: Tensor, axes: Spread) -> Tensor:
    """The largest of what the ranks found in their parts, which has no derivative."""
    return issue(x, MAX, group(axes)) if axes else x


def over_axes(
    pieces: Sequence[tuple[Spread, Tensor, torch.device]],
    reduce: Callable[[Tensor, Spread], Tensor] = out_of_parts,
) -> list[Tensor]:
    """1-D tensors reduced over the axes of each; those over the same axes at once.

    Args:
        pieces: of each its axes (None, and it stays as it is), the tensor, and the
            device that computes with it.
    """
    out = [x for _, x, _ in pieces]
    places: dict[tuple[str, ...], list[int]] = {}
    for k, (axes, _, _) in enumerate(pieces):
        if axes is not None:
            places.setdefault(axes, []).append(k)
    for axes, at in sorted(places.items()):
        dtype = functools.reduce(torch.promote_types, [out[k].dtype for k in at])
        device, sizes = pieces[at[0]][2], [len(out[k]) for k in at]
        whole = reduce(torch.cat([out[k].to(device, dtype) for k in at]), axes)
        for k, x in zip(at, whole.split(sizes), strict=True):
            out[k] = x.to(out[k].device)
    return out


def entered(x: Tensor) -> Tensor:
    """A plain tensor as each rank's own: of a parameter the gradient is the mean."""
    if differentiated([x]):
        for handler, runtime in frame().runtimes:
            if runtime.ownership.is_replicated(x):
                check_samples(x, "a parameter")
                x = apply_map(x, ENTER, group(handler.axes))  # type: ignore[attr-defined]
    return x


def into_parts(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """A number that all ranks share, as a factor of parts over ``axes``."""
    over, _, _ = _parted(axes)
    return apply_map(x, SPREAD, group(over)) if over else x


def _parted(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """``axes`` that the loss is a mean over, the other ones, and means beside them."""
    means = averaged_axes()
    over = tuple(a for a in axes if a in means)
    others = tuple(a for a in axes if a not in means)
    return over, others, tuple(a for a in means if a not in axes)


def by_axes(values: Tree) -> tuple[list[tuple[Spread, list[Tensor]]], torch.dtype]:
    """The flat tensors by the axes they are spread over, and a dtype to sum in.

    Axes in sorted order, also where all that this rank holds is empty: every rank
    issues the same collectives.
    """
    leaves = [x for x in tree.leaves(values, is_sharded) if trainable(x)]
    summed((x for x in leaves if not is_sharded(x)), "a sum over a tree")
    (buffers,) = split([leaves])
    held: dict[Spread, list[Tensor]] = {}
    dtype = torch.float32
    for tensor, (positions, _) in zip(buffers.tensors, buffers.groups, strict=True):
        first = leaves[positions[0]]
        axes = tuple(sorted(first.layout.axes)) if is_sharded(first) else None
        tensor = entered(tensor) if axes is None else tensor
        held.setdefault(axes, []).append(tensor)
        dtype = torch.promote_types(dtype, tensor.dtype)
    return sorted(held.items(), key=lambda item: item[0] or ()), dtype


def device_of(held: list[tuple[Spread, list[Tensor]]]) -> torch.device:
    """The device of the first tensor; the CPU where there is none."""
    if not held:
        return torch.device("cpu")
    first = held[0][1][0]
    return space_of(first).on_device(first).device


def combined(
    numbers: list[Tensor],
    reduce: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """``reduce`` of 0-dim tensors, brought to one device; 0 of none."""
    if not numbers:
        return torch.zeros((), dtype=dtype, device=device)
    return reduce(torch.stack([x.to(device) for x in numbers]))

"""Numbers over all elements of a tree, in whatever layout: sums, norms, what is finite.

Of a sharded leaf a rank holds a part, so a sum over what it holds is no sum over the
leaf: each counts over the axes of its own layout, and a replicated one once. Leaves
that are spread over the same axes are reduced together. A leaf's own norms are too,
whatever the number of leaves: one collective over each set of axes.

Under ``shard`` all of this may be differentiated, to any order: a sum of parts crosses
into own values, and a number crosses into parts, each with its transpose
(`typed_maps`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.collective_ops import apply_map, assumed, claim, issue, summed
from fsfunc.comm.collectives import psum
from fsfunc.comm.groups import group
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.comm.mesh import averaged_axes
from fsfunc.comm.typed_maps import ENTER, MAX, SPREAD, SUM, check_samples
from fsfunc.core.frames import composable, frame
from fsfunc.optim.leaves import (
    Tree,
    flat_buffers,
    map_flat,
    may_be_differentiated,
    scale_tensors,
    trainable,
)
from fsfunc.optim.places import computing_device
from fsfunc.optim.schedules import check_ranges
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.complex_numbers import as_real
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
    if not isinstance(factor, Tensor) or not may_be_differentiated([factor]):
        return map_flat(lambda ts: scale_tensors(ts, factor), values)

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
    if not may_be_differentiated([x]):
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
    if may_be_differentiated([x]):
        for handler, runtime in frame().runtimes:
            if runtime.ownership.is_replicated(x):
                check_samples(x, "a parameter")
                x = apply_map(x, ENTER, group(handler.axes))  # type: ignore[attr-defined]
    return x


def into_parts(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """A number that all ranks share, as a factor of parts over ``axes``."""
    over = _parted(axes).over
    return apply_map(x, SPREAD, group(over)) if over else x


class _MeanAxes(NamedTuple):
    """Axes that the loss is a mean over, the other ones, and means beside them."""

    over: tuple[str, ...]
    others: tuple[str, ...]
    copies: tuple[str, ...]


def _parted(axes: tuple[str, ...]) -> _MeanAxes:
    means = averaged_axes()
    return _MeanAxes(
        tuple(a for a in axes if a in means),
        tuple(a for a in axes if a not in means),
        tuple(a for a in means if a not in axes),
    )


def by_axes(values: Tree) -> tuple[list[tuple[Spread, list[Tensor]]], torch.dtype]:
    """The flat tensors by the axes they are spread over, and a dtype to sum in.

    Axes in sorted order, also where all that this rank holds is empty: every rank
    issues the same collectives.
    """
    leaves = [x for x in tree.leaves(values, is_sharded) if trainable(x)]
    summed((x for x in leaves if not is_sharded(x)), "a sum over a tree")
    (buffers,) = flat_buffers([leaves])
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
    return computing_device(held[0][1][0])


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


_MAX = LinearMap("pmax", to="I")  # of what each rank made of its parts

Row = tuple[Spread, list[Tensor]]  # parts of leaves that are spread alike


def global_norm(values: Tree, p: float = 2.0) -> Tensor:
    """The p-norm of all elements of the leaves, equal on every rank.

    ``(sum |x|^p)^(1/p)``, or ``max |x|`` where p is infinite, of floating and complex
    numbers. The derivative of the
    norm of zeros is 0; the infinite norm of shards has none.

    Args:
        values: a tree of tensors and shards of any shapes; other leaves count nothing.
        p: above 0; ``math.inf`` for the largest magnitude.

    Returns:
        0-dim, accumulated in float32, or in float64 where a leaf is; 0 for no leaves.
        Of a tree that is not sharded, the bits of ``torch.nn.utils.get_total_norm``.

    Raises:
        ValueError: ``p`` is not above 0.

    Cost: one psum (pmax where p is infinite) of one number over each distinct set of
    axes in the layouts; as many backward.

    >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor(4.0), "frozen": None})
    tensor(5.)
    """
    check_ranges("a norm", p=p)
    held, dtype = by_axes(values)
    dtype = dtype.to_real()
    norm_of = partial(vector_norm, ord=p)
    local = []
    for axes, tensors in held:
        # The infinite norm has no identity: torch refuses an empty tensor.
        norms = _norms([t for t in tensors if t.numel()], p, dtype)
        if may_be_differentiated(tensors):  # the psum's transpose is every rank's
            norms += [_none(t, dtype) for t in tensors if not t.numel()]
        where = device_of([(axes, tensors)])
        local.append((axes, combined(norms, norm_of, where, dtype)))
    device = device_of(held)
    if math.isinf(p):
        maxima = [most_of_parts(norm, axes) for axes, norm in local]
        return combined(maxima, torch.amax, device, dtype)
    if len(local) == 1 and not local[0][0]:
        return out_of_parts(local[0][1], local[0][0])
    powers = [out_of_parts(norm**p, axes) for axes, norm in local]
    return _root(combined(powers, torch.sum, device, dtype), p)


def all_finite(values: Tree) -> Tensor:
    """True if all elements with a derivative are finite, equal on every rank.

    Under a transform over axes of a mesh every rank of the mesh is asked, whatever it
    holds: so a step is skipped everywhere or nowhere.

    Args:
        values: a tree of tensors and shards of any shapes; other leaves count nothing.

    Returns:
        0-dim bool; true for no leaves.

    Cost: one pass, and one pmax of one number.

    >>> all_finite({"w": torch.ones(2), "b": torch.tensor(float("inf")), "n": 3})
    tensor(False)
    """
    held, dtype = by_axes(values)
    dtype = dtype.to_real()
    tensors = [t.detach() for _, ts in held for t in ts if t.numel()]
    norms = _norms(tensors, math.inf, dtype)
    bad = combined(norms, lambda x: ~x.isfinite().all(), device_of(held), torch.bool)
    axes = {a for name, _ in held for a in name or ()}
    at = frame().at
    if at is not None and any(getattr(h, "axes", ()) for h in frame().handlers):
        axes = set(at.mesh.axes)
    if axes:
        mine = assumed(bad.float(), "V")  # no part of a sum, but each rank's word
        # Ranks that train by themselves (`local_sgd`) agree on this all the same.
        where = replace(group(tuple(sorted(axes))), apart=False)
        bad = issue(mine, _MAX, where) > 0
    return ~bad


def holds(found: Tensor) -> bool:
    """The flag as a bool; True on fake tensors, where every step is a good one."""
    if _torch.fake_active() or found.is_meta:
        refuse_in_graph("the update is made only if all gradients are finite")
        return True
    return bool(found)


def leaf_norms(values: Tree, p: float = 2.0) -> Tree:
    """The p-norm of each such leaf, as `global_norm` is of all, on every rank.

    Args:
        values: a tree of tensors and shards of any shapes.
        p: above 0; ``math.inf`` for the largest magnitude.

    Returns:
        a tree like ``values`` of 0-dim tensors in float32, or in float64 where a leaf
        is; None for other leaves.

    Raises:
        ValueError: ``p`` is not above 0.

    Cost: one psum (pmax where p is infinite) over each distinct set of axes in the
    layouts, of one number for each leaf there: of several trees give a tuple, and all
    of their norms go at once.

    >>> leaf_norms({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor(2.0), "n": 1})
    {'w': tensor(5.), 'b': tensor(2.), 'n': None}
    """
    leaves, treedef = tree.flatten(values, is_sharded)
    active = [i for i, leaf in enumerate(leaves) if trainable(leaf)]
    chosen = [leaves[i] for i in active]
    (buffers,) = flat_buffers([chosen])
    out: list[Any] = [None] * len(leaves)
    found = row_norms(rows_of(chosen, buffers), p)
    for (positions, _), norms in zip(buffers.groups, found, strict=True):
        for i, norm in zip(positions, norms.unbind(), strict=True):
            out[active[i]] = norm
    return tree.unflatten(treedef, out)


def rows_of(leaves: Sequence[Any], buffers: Any) -> Iterator[Row]:
    """Of leaves as few flat tensors: of each its axes, and its leaves' parts."""
    for flat, (positions, packed) in zip(buffers.tensors, buffers.groups, strict=True):
        first = leaves[positions[0]]
        axes = tuple(sorted(first.layout.axes)) if is_sharded(first) else None
        parts = [flat] if packed is None else [flat[a:b] for a, b in packed.ranges]
        yield axes, parts


def row_norms(rows: Iterable[Row], p: float = 2.0) -> list[Tensor]:
    """Of each row of leaves' parts, the norms of the leaves, 1-D.

    Cost: that of `leaf_norms`; a row is forgotten before the next is asked for.
    """
    check_ranges("a norm", p=p)
    pieces: list[tuple[Spread, Tensor, torch.device]] = []
    for axes, parts in rows:
        parts = [entered(t) for t in parts] if axes is None else parts
        wide = torch.promote_types(parts[0].dtype, torch.float32).to_real()
        norms = _each_norm(parts, p, wide)
        powers = norms**p if axes is not None and math.isfinite(p) else norms
        pieces.append((axes, powers, computing_device(parts[0])))
        del parts
    if math.isinf(p):
        return over_axes(pieces, most_of_parts)
    found = over_axes(pieces)
    return [
        x if axes is None else _root(x, p)
        for (axes, *_), x in zip(pieces, found, strict=True)
    ]


def _each_norm(parts: Sequence[Tensor], p: float, dtype: torch.dtype) -> Tensor:
    full = [t for t in parts if t.numel()]  # the infinite norm refuses an empty tensor
    norms = iter(_norms(full, p, dtype))
    return torch.stack([next(norms) if t.numel() else _none(t, dtype) for t in parts])


def _none(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of no elements, which has a history if ``x`` has."""
    return as_real(x).sum(dtype=dtype)


def _norms(tensors: Sequence[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The p-norm of each (non-empty) tensor, accumulated in ``dtype``: 0-dim."""
    if composable() or any(t.is_complex() for t in tensors):
        complex_ = dtype.to_complex()
        kinds = [complex_ if t.is_complex() else dtype for t in tensors]
        pairs = zip(tensors, kinds, strict=True)
        return [torch.linalg.vector_norm(t, p, dtype=kind) for t, kind in pairs]
    if math.isinf(p) and not may_be_differentiated(tensors):
        if all(t.device.type == "cpu" for t in tensors):
            return [_largest(t, dtype) for t in tensors]
    return list(torch._foreach_norm(list(tensors), p, dtype=dtype)) if tensors else []


def _largest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The infinite norm; on the host its own operator takes 30 times as long."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).abs().to(dtype)


def _root(power: Tensor, p: float) -> Tensor:
    """``power ** (1/p)``, whose derivative at 0 is 0, as that of a norm is."""
    if not may_be_differentiated([power]):
        return power.sqrt() if p == 2 else power ** (1 / p)
    zero = power == 0
    return torch.where(zero, 0, torch.where(zero, 1, power) ** (1 / p))

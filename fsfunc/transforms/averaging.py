"""What a gradient call gives beside sharded gradients: means over the ranks."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import label
from fsfunc.comm.collective_ops import apply_map
from fsfunc.comm.comparison import compare, whole_values
from fsfunc.comm.crossings import MEAN
from fsfunc.comm.groups import RankGroup, group, strided
from fsfunc.comm.linear_maps import LinearMap
from fsfunc.core.autodiff import Outcome
from fsfunc.core.auxiliary import averaged as is_averaged
from fsfunc.core.auxiliary import is_summed
from fsfunc.sharded.leaf import is_sharded
from fsfunc.transforms.shard_runtime import ShardRuntime

__all__ = ["averaged", "check_whole"]

_SUM = LinearMap("psum", "M", "M")


def averaged(outcome: Outcome, runtime: ShardRuntime, at: Any) -> Outcome:
    """Loss, weight, floating scalars of aux and plain gradients: means over ranks.

    What of aux is summed, is summed over them.
    """
    where = group(runtime.mean_axes, at)
    n = runtime.mean_size
    if n == 1:
        return outcome
    aux, spec = tree.flatten(outcome.aux, is_leaf=is_summed)
    picked = [i for i, x in enumerate(aux) if is_averaged(x)]
    one = torch.ones_like(outcome.total) if outcome.weight is None else outcome.weight
    values = [outcome.total, *[aux[i] for i in picked], one]
    with label("", "loss"):
        # At least fp32: a weight may be a count that bfloat16 cannot tell.
        wide = functools.reduce(
            torch.promote_types, [v.dtype for v in values], torch.float32
        )
        means = list(apply_map(torch.stack([v.to(wide) for v in values]), MEAN, where))
    weight = means.pop()
    weight = None if outcome.weight is None else weight.to(outcome.weight.dtype)
    for i, value in zip(picked, means[1:], strict=True):
        aux[i] = value.to(aux[i].dtype)
    at_sums = [i for i, x in enumerate(aux) if is_summed(x)]
    sums, treedef = tree.flatten([aux[i] for i in at_sums])
    sums = tree.unflatten(treedef, _packed(sums, _SUM, where, "sums"))
    for i, x in zip(at_sums, sums, strict=True):
        aux[i] = x
    return replace(
        outcome,
        total=means[0].to(outcome.total.dtype),
        weight=weight,
        grads=_plain(outcome.grads, runtime, where),
        aux=tree.unflatten(spec, aux),
    )


def check_whole(runtime: ShardRuntime, where: RankGroup) -> None:
    """Raises where ranks differentiate unlike values of what must be one value.

    Raises:
        RanksDiffer: on every rank.
    """
    paths, leaves, _ = tree.flatten_with_paths(
        runtime.differentiated, is_leaf=is_sharded
    )
    mine = [
        x if isinstance(x, Tensor) and runtime.averages(x) else None for x in leaves
    ]
    if any(x is not None for x in mine):
        compare([whole_values(paths, mine, where.link.notes)], where)


def _plain(grads: Any, runtime: ShardRuntime, where: RankGroup) -> Any:
    """The gradients of whole parameters as means; a rank's own stay its own."""
    leaves, treedef = tree.flatten(tuple(runtime.differentiated), is_leaf=is_sharded)
    found: list[Any] = treedef.flatten_up_to(grads)  # type: ignore[arg-type]
    shared = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor)
        and isinstance(found[i], Tensor)
        and runtime.ownership.is_one_value(x)
    ]
    means = _packed([found[i] for i in shared], MEAN, where, "plain gradients")
    for i, x in zip(shared, means, strict=True):
        found[i] = x
    return tree.unflatten(treedef, found)


def _packed(
    tensors: list[Tensor], how: LinearMap, where: RankGroup, name: str
) -> list[Tensor]:
    """``how`` applied to tensors, one collective for each dtype."""
    tensors = [strided(x) for x in tensors]
    out = list(tensors)
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        by_dtype[x.dtype].append(i)
    for positions in by_dtype.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in positions])
        with label("", name):
            flat = apply_map(flat, how, where)
        parts = flat.split([tensors[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            out[i] = part.view(tensors[i].shape)
    return out

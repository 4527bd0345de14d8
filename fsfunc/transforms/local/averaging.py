"""Means over ranks that each have a copy of their own, and ``consensus``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import internal, label
from fsfunc.comm.comparison import compare, whole_values
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import here
from fsfunc.optim.coded_moments import decoded, encoded, is_coded
from fsfunc.optim.in_place import fused
from fsfunc.optim.leaves import local, map_flat
from fsfunc.optim.matching import Matched
from fsfunc.sharded.leaf import is_sharded
from fsfunc.transforms.local.local_copies import LocalState, Relabeled

__all__ = ["assign", "averages", "buckets", "consensus", "in_one", "written"]

_BUCKET = 1 << 22  # elements: what is smaller travels together


def averages(tree_: Any, where: RankGroup, weight: float = 1.0) -> Any:
    """The means over ranks of ``weight`` times the floating leaves; None for others."""

    def means(tensors: list[Tensor]) -> Sequence[Tensor]:
        sums = summed([x * weight for x in tensors] if weight != 1 else tensors, where)
        return [
            (total / where.size).to(x.dtype)
            for total, x in zip(sums, tensors, strict=True)
        ]

    return map_flat(means, tree_, rest=None)


def summed(tensors: Sequence[Tensor], where: RankGroup) -> list[Tensor]:
    """Sums over ranks, in float32 at least; small ones travel together."""
    wide = [torch.promote_types(x.dtype, torch.float32) for x in tensors]
    out: list[Any] = [x.to(dtype) for x, dtype in zip(tensors, wide, strict=True)]
    flights = []
    for positions in buckets(out):
        flat = in_one([out[i] for i in positions])
        if where.size > 1:
            flights.append((positions, where.start("psum", flat, what="averages")))
    for positions, work in flights:
        parts = work.wait().split([out[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            out[i] = part.view(out[i].shape)
    return out


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Positions of tensors of one dtype and device that travel together."""
    found: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(tensors):
        key, n = (x.dtype, x.device), x.numel()
        positions, held = open_.get(key, ([], _BUCKET))
        if held + n > _BUCKET:
            positions, held = [], 0
            found.append(positions)
        positions.append(i)
        open_[key] = positions, held + n
    return found


def in_one(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after another, 1-D; one alone as it lies, if it can."""
    rows = [x.detach().reshape(-1) for x in tensors]
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)


def written(kernel: Any, params: Any, means: Any, *moments: Any) -> list[Any]:
    """Parameters and moments into which ``kernel`` has written, in place if it may.

    Args:
        kernel: ``kernel(params, means, *moments)`` over lists of tensors.
    """
    matched = Matched.of(params, means, *moments)
    run = lambda *columns, weight_decay: kernel(*columns)  # noqa: E731
    return fused(matched, run, [0.0] * len(matched.active))()


def assign(params: Any, means: Any) -> None:
    """Writes means over parameters, as a kernel of :func:`written`."""
    torch._foreach_copy_(params, means)


def consensus(state: LocalState) -> Any:
    """The one state that the ranks along an axis agree on: the mean of their copies.

    Floating leaves, moments too, are averaged, those in 8 bits by what they stand for;
    of ``gossip`` by the ranks' weights, so that nothing is lost. What ``slowmo``
    remembers is left out. So is a model made that can be evaluated, and a state that
    others can begin from.

    Args:
        state: a `LocalState`.

    Raises:
        TypeError: another state.
        RanksDiffer: integer leaves, or numbers, that the ranks do not share.

    Cost: one all-reduce of the rank's floating leaves, in float32 at least.
    """
    if not isinstance(state, LocalState):
        raise TypeError(
            f"consensus of a {type(state).__name__}: it takes the LocalState that a "
            "step under local_sgd, slowmo or gossip returns"
        )
    at = here()
    where, relabeled = group(state.axis, at), Relabeled(at.mesh, state.axis)
    copies = relabeled.copy(state.copies, at.mesh.coordinates(at.rank))
    given, spec = tree.flatten(copies, is_leaf=_is_whole)
    mine = tree.unflatten(spec, [decoded(x) if is_coded(x) else x for x in given])
    paths, leaves, treedef = tree.flatten_with_paths(mine, is_leaf=is_sharded)
    weight = state.weights[where.index] if state.weights else 1.0
    with internal(), torch.no_grad(), label("", "consensus"):
        found = averages(mine, where, weight)
        means: list[Any] = treedef.flatten_up_to(found)
        if at.link.moves:
            pairs = zip(leaves, means, strict=True)
            rest = [None if mean is not None else local(x) for x, mean in pairs]
            said = whole_values(paths, rest, at.link.notes)
            advice = "such values have no mean: the ranks' steps must make them alike"
            title = "the ranks' copies differ in what is not averaged"
            compare([replace(said, title=title, advice=advice)], where)
    out = [x if mean is None else mean for x, mean in zip(leaves, means, strict=True)]
    made = spec.flatten_up_to(tree.unflatten(treedef, out))
    pairs = zip(given, made, strict=True)
    return tree.unflatten(spec, [encoded(x, y) if is_coded(x) else y for x, y in pairs])


def _is_whole(x: Any) -> bool:
    return is_sharded(x) or is_coded(x)

"""What a gradient call gives beside sharded gradients: means over the ranks."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.accounting import label
from fsfunc.autodiff import Outcome
from fsfunc.autodiff import averaged as is_averaged
from fsfunc.collectives import Group, Move, group, move
from fsfunc.sharded import is_sharded
from fsfunc.transforms.sessions import Session

__all__ = ["averaged"]

_MEAN = Move("psum", "M", "M")


def averaged(outcome: Outcome, session: Session, at: Any) -> Outcome:
    """Loss, weight, floating scalars of aux and plain gradients: means over ranks."""
    where = group(session.mean_axes, at)
    n = session.mean_size
    if n == 1:
        return outcome
    aux, spec = tree.flatten(outcome.aux)
    picked = [i for i, x in enumerate(aux) if is_averaged(x)]
    one = torch.ones_like(outcome.total) if outcome.weight is None else outcome.weight
    values = [outcome.total, *[aux[i] for i in picked], one]
    with label("", "loss"):
        # At least fp32: a weight may be a count that bfloat16 cannot tell.
        wide = functools.reduce(
            torch.promote_types, [v.dtype for v in values], torch.float32
        )
        means = list(move(torch.stack([v.to(wide) for v in values]), _MEAN, where))
    weight = means.pop()
    weight = None if outcome.weight is None else weight.to(outcome.weight.dtype)
    for i, value in zip(picked, means[1:], strict=True):
        aux[i] = value.to(aux[i].dtype)
    return replace(
        outcome,
        total=means[0].to(outcome.total.dtype),
        weight=weight,
        grads=_plain(outcome.grads, where),
        aux=tree.unflatten(spec, aux),
    )


def _plain(grads: Any, where: Group) -> Any:
    """The means of the gradients of whole leaves, one collective for each dtype."""
    leaves, treedef = tree.flatten(grads, is_leaf=is_sharded)
    plain: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            plain[x.dtype].append(i)
    for positions in plain.values():
        flat = torch.cat([leaves[i].reshape(-1) for i in positions])
        with label("", "plain gradients"):
            flat = move(flat, _MEAN, where)
        parts = flat.split([leaves[i].numel() for i in positions])
        for i, part in zip(positions, parts, strict=True):
            leaves[i] = part.view(leaves[i].shape)
    return tree.unflatten(treedef, leaves)

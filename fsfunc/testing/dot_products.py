"""Typed dot products: what is paired with what, over the ranks of one group.

A linear map f and its transpose pair alike, <f(x), g> = <x, f'(g)>, each side over the
ranks by its type: V varies (a sum over ranks), I is one value (counted once), P is in
parts and R equal with a cotangent in parts (the parts are summed first), M varies under
a mean over the ranks.

Source: reference tables of the types V, I, R, P in `fsfunc.comm.linear_maps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from fsfunc.comm.launch import PerRank
from fsfunc.comm.mesh import Axis, Mesh

__all__ = ["COTANGENT", "pairing", "typed"]

COTANGENT = {"V": "V", "I": "I", "R": "P", "P": "R", "M": "M"}
_UNIT = 840.0**2  # means of means over up to 8 ranks are exact too


def pairing(kind: str, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> Fraction:
    """<x, g> over the ranks of one group, where x is of this type and g of its dual.

    >>> import torch
    >>> one, two = torch.tensor([1.0]), torch.tensor([2.0])
    >>> int(pairing("V", [one, two], [one, two]))
    5
    >>> int(pairing("I", [two, two], [two, two]))
    4
    """
    each = [Fraction((x * g).sum().item()) for x, g in zip(xs, gs, strict=True)]
    if kind == "I":
        return each[0]
    if kind == "P":  # g is equal on all ranks, x in parts: <sum of parts, g>
        return Fraction((sum(xs) * gs[0]).sum().item())
    if kind == "R":
        return Fraction((xs[0] * sum(gs)).sum().item())
    return sum(each, Fraction(0)) / (len(each) if kind == "M" else 1)


def typed(
    alike: bool, shape: Sequence[int], mesh: Mesh, axis: Axis, draw: torch.Generator
) -> PerRank:
    """Integers in float64 for every rank; ``alike``: the same ones in a group."""
    keys = [mesh.members(axis, r) if alike else r for r in range(mesh.size)]
    made: dict[object, Tensor] = {}
    for key in keys:
        if key not in made:
            made[key] = _UNIT * torch.randint(-3, 4, tuple(shape), generator=draw)
    return PerRank([made[key].double() for key in keys])

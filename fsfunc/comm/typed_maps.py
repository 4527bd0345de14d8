"""Checked arguments of the collectives: dims, cuts, and types over an axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fsfunc.comm.groups import RankGroup
from fsfunc.comm.linear_maps import LinearMap, meanings

__all__ = ["check_cut", "check_types", "checked_dim", "typed"]


def checked_dim(x: Tensor, dim: int, name: str = "dim") -> int:
    """A dim of ``x``, not negative.

    Raises:
        ValueError: ``x`` has no such dim.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}={dim}: the tensor has shape {tuple(x.shape)}")
    return dim % x.ndim


def check_cut(x: Tensor, dim: int, where: RankGroup, op: str) -> int:
    """A dim that is cut in as many parts as there are ranks.

    Raises:
        ValueError: it is not a multiple of that.
    """
    dim = checked_dim(x, dim)
    if x.shape[dim] % where.size:
        raise ValueError(
            f"cannot {op} a tensor of shape {tuple(x.shape)} over axis "
            f"{where.name} of size {where.size} along dim {dim}: {x.shape[dim]} is "
            f"not a multiple of {where.size}; pad it"
        )
    return dim


def typed(where: RankGroup, op: str, of: str, to: str, **fields: Any) -> LinearMap:
    """The linear map between two types, as the axis takes them."""
    legal = meanings(op)
    if where.mean:  # a value is the rank's own, or one value that somebody asked for
        legal = [row for row in legal if set(row.split("->")) <= {"V", "I"}]
    check_types(where, op, f"{of}->{to}", legal)
    if where.mean:
        of, to = of.replace("V", "M"), to.replace("V", "M")
    return LinearMap(op, of, to, **fields)


def check_types(where: RankGroup, op: str, row: str, legal: Iterable[str]) -> None:
    """Raises where an op has no map between two types.

    Raises:
        ValueError: names those that it has.
    """
    if row not in legal:
        what = ", under shard a mean of losses," if where.mean else ""
        raise ValueError(
            f"{op} {row} over {where.name}{what} has no meaning; it has: "
            f"{', '.join(legal)}"
        )

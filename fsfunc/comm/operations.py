"""Collectives as backends move them, along dim 0 of a rank's tensor: a row each.

The ledger's bytes, shapes of results, sums and extremes, types, and the rounds of an
estimate are read off the row. A collective of one's own kind is a row here, the rows of
its transposes in ``linear_maps``, and its public function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fold:
    """One tensor of several ranks', element by element.

    Args:
        name: of torch's ``ReduceOp``.
        pair: of two tensors, with ``out=``.
        ordered: whether it picks one by order: it has no derivative here, and complex
            numbers have none.
    """

    name: str
    pair: Callable[..., Tensor]
    ordered: bool = False

    def of(self, xs: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """That of two tensors or more, in their order, which fixes the bits."""
        total = xs[0]
        for x in xs[1:]:  # of mapped tensors nothing is made in ``out``
            total = self.pair(total, x) if out is None else self.pair(total, x, out=out)
        return total


SUM = Fold("SUM", torch.add)
MAX = Fold("MAX", torch.maximum, ordered=True)
MIN = Fold("MIN", torch.minimum, ordered=True)


@dataclass(frozen=True)
class Operation:
    """One collective.

    Args:
        sends: of n ranks, the share of its input's bytes that a rank sends.
        rows: the power of n by which dim 0 grows: 1 joins the ranks', -1 cuts.
        fold: what becomes of the ranks' tensors; None: they stay apart.
        agrees: whether all ranks have one result.
    """

    sends: Callable[[int], Any]
    rows: int = 0
    fold: Fold | None = None
    agrees: bool = False

    @property
    def all_reduces(self) -> bool:
        """True if every rank has the whole reduction."""
        return self.fold is not None and not self.rows

    def result_shape(self, shape: Sequence[int], n: int) -> tuple[int, ...]:
        """The shape of a rank's result, where its parts are equal."""
        if not self.rows:
            return tuple(shape)
        return (shape[0] * n if self.rows > 0 else shape[0] // n, *shape[1:])


def _ring(n: int) -> Fraction:
    return Fraction(n - 1, n)


def _both_ways(n: int) -> Fraction:
    return 2 * _ring(n)


OPERATIONS = {
    "psum": Operation(_both_ways, fold=SUM, agrees=True),
    "pmax": Operation(_both_ways, fold=MAX, agrees=True),
    "pmin": Operation(_both_ways, fold=MIN, agrees=True),
    "all_gather": Operation(lambda n: n - 1, rows=1, agrees=True),
    "psum_scatter": Operation(_ring, rows=-1, fold=SUM),
    "all_to_all": Operation(_ring),
    "pbroadcast": Operation(_ring, agrees=True),
    "ppermute": Operation(lambda n: 1),  # by a source; by others nothing
}


def is_source(pairs: Sequence[tuple[int, int]] | None, index: int) -> bool:
    """True if a rank sends to another one: of pairs a source; without any, all do."""
    return pairs is None or any(s == index != d for s, d in pairs)

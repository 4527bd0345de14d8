"""A table of the collectives that backends run, along dim 0 of a rank's tensor.

A row gives the bytes in a ledger, the shape of the result, the reduction, and the
rounds of an estimate. To add a collective: a row here; its transpose in
``linear_maps.TRANSPOSES``; how it moves tensors in ``linear_maps.combine`` (the
reference, which simulated ranks run), ``backends.process_collectives`` and
``backends.abstract``, unless it is a reduction; and its function in ``collectives``.
One that is made of others needs none of this: see ``collective_pairs``.
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
    """An elementwise reduction over ranks.

    Args:
        name: that of torch's ``ReduceOp``.
        pair: the reduction of two tensors, a function that takes ``out=``.
        ordered: whether it compares elements, as a maximum does: then it has no
            derivative, and takes no complex numbers.
    """

    name: str
    pair: Callable[..., Tensor]
    ordered: bool = False

    def of(self, xs: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Reduces two tensors or more in rank order, which fixes the bits."""
        total = xs[0]
        for x in xs[1:]:  # of mapped tensors nothing is made in ``out``
            total = self.pair(total, x) if out is None else self.pair(total, x, out=out)
        return total


SUM = Fold("SUM", torch.add)
MAX = Fold("MAX", torch.maximum, ordered=True)
MIN = Fold("MIN", torch.minimum, ordered=True)


@dataclass(frozen=True)
class Operation:
    """The properties of one collective.

    Args:
        sends: the bytes that each of n ranks sends, over those of its input.
        rows: the power of n by which dim 0 grows: 1 concatenates, -1 splits.
        fold: the reduction; None where the ranks' tensors are not combined.
        agrees: whether the result is equal on all ranks.
    """

    sends: Callable[[int], Any]
    rows: int = 0
    fold: Fold | None = None
    agrees: bool = False

    @property
    def all_reduces(self) -> bool:
        """True if every rank receives the whole reduction."""
        return self.fold is not None and not self.rows

    def result_shape(self, shape: Sequence[int], n: int) -> tuple[int, ...]:
        """The shape of a rank's result, for parts of equal size."""
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
    "ppermute": Operation(lambda n: 1),  # of a source; other ranks send nothing
}


def is_source(pairs: Sequence[tuple[int, int]] | None, index: int) -> bool:
    """True if a rank sends to another: a source of ``pairs``, or any without pairs."""
    return pairs is None or any(s == index != d for s, d in pairs)

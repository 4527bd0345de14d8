"""The types of the values between units, under ``shard``, and what each operator makes.

===  =====================================================================  =========
K    a constant, born in the step: the same on every rank, nobody's          least
I    one value on all ranks: a parameter that is whole, or made of some
A    own values that happen to agree: what a psum, or ``unshard``, gives
V    a rank's own: data, what units return, what depends on the rank         most
S    this rank's part of a sharded leaf
P    a term: the sum over this rank's part, of a derivative
R    one number as a factor of parts (``tree_scale``)
===  =====================================================================  =========

Of the first four the result of any operator is the largest: K < I < A < V. Parts allow
elementwise work among themselves, and with numbers that are the same on every rank. All
else would give one result on this rank and another on the next, of what should be one
value.

The backward pass runs under the same rules, since cotangents have types too: a number
that multiplies parts has a derivative that is a term, and must have been spread over
them by ``tree_scale``, which takes terms back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from fsfunc.tracing.classes import OperatorClass

__all__ = ["PARTS", "Kind", "Operand", "Untyped", "agrees", "result"]

Kind = Enum("Kind", "K I A V S P R")

PARTS = frozenset({Kind.S, Kind.P, Kind.R})
_ORDER = {Kind.K: 0, Kind.I: 1, Kind.A: 2, Kind.V: 3}


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator is given: what is known of it.

    Args:
        number: whether all of its elements are one number.
        shape: its shape; of a part the last dim is this rank's.
    """

    kind: Kind
    number: bool
    shape: tuple[int, ...]


class Untyped(Exception):
    """What an operator makes has no type; the argument says why, as one word."""


def agrees(kind: Kind) -> bool:
    """Whether a value of this type is the same on every rank."""
    return kind in (Kind.K, Kind.I, Kind.A)


def joint(kinds: set[Kind]) -> Kind:
    """The type of what is made of whole values."""
    return max(kinds, key=_ORDER.__getitem__, default=Kind.K)


def result(
    op: OperatorClass, given: Sequence[Operand], out: Sequence[Tensor], backward: bool
) -> Kind:
    """The type of what an operator makes.

    Args:
        given: the tensors it reads, or writes into.
        out: what it made.
        backward: whether it is part of a derivative.

    Raises:
        Untyped: "random", "own", "term", "positions", "sums" or "mixes".
    """
    kinds = {x.kind for x in given}
    if not kinds & PARTS:
        return joint(kinds)
    if op.random:
        raise Untyped("random")
    if Kind.P in kinds:
        return _of_terms(op, given, kinds)
    if Kind.V in kinds:
        raise Untyped("own")
    if op.factory:  # x.new_zeros(...)
        return Kind.K
    if op.elementwise:
        if any(agrees(x.kind) and not x.number for x in given):
            raise Untyped("positions")
        return Kind.S if Kind.S in kinds else Kind.R
    if op.joins and not kinds & {Kind.I, Kind.A}:
        return Kind.S if Kind.S in kinds else Kind.R
    if op.sums and Kind.S not in kinds:
        return Kind.R
    if op.sums:
        ends = {x.shape[-1] for x in given if x.kind is Kind.S and x.shape}
        if all(y.ndim and y.shape[-1] in ends for y in out):
            return Kind.S
        if backward:
            return Kind.P
        raise Untyped("sums")
    raise Untyped("mixes")


def _of_terms(op: OperatorClass, given: Sequence[Operand], kinds: set[Kind]) -> Kind:
    """Terms may be added to each other, and scaled by what is the same everywhere."""
    terms = sum(x.kind is Kind.P for x in given)
    if kinds <= {Kind.P} and (op.adds or op.joins or op.sums or op.scales):
        return Kind.P
    if op.scales and terms == 1 and all(agrees(k) for k in kinds - {Kind.P}):
        return Kind.P
    raise Untyped("term")

"""The types of values between units under ``shard``, and of operators' results.

===  =====================================================================  =========
K    a constant that the step makes: equal on all ranks                      least
I    a replicated value: a whole parameter, or made of replicated values
A    own values that are equal on all ranks: of a psum, or ``unshard``
V    a rank's own: data, what units return, what depends on the rank         most
S    this rank's part of a sharded leaf
P    a term: the sum over this rank's part, of a derivative
R    one number as a factor of parts (``tree_scale``)
===  =====================================================================  =========

For the first four, the result of any operator has the largest type of its operands: K <
I < A < V. Parts allow elementwise operators among themselves, and with numbers that are
equal on all ranks. Anything else would give results that differ between ranks, of what
should be one value.

The backward pass runs under the same rules, since cotangents have types too: a number
that multiplies parts has a derivative that is a term, and must have been spread over
them by ``tree_scale``, which takes terms back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from fsfunc.comm.linear_maps import LinearMap
from fsfunc.tracing.operators import OperatorClass

Kind = Enum("Kind", "K I A V S P R")
Kind.__hash__ = object.__hash__  # that of an Enum is a function of Python

PARTS = frozenset({Kind.S, Kind.P, Kind.R})
_ORDER = {Kind.K: 0, Kind.I: 1, Kind.A: 2, Kind.V: 3}


class Operand(NamedTuple):
    """A tensor that an operator is given: what is known of it.

    Args:
        number: whether all of its elements are one number.
        shape: its shape; of a part the last dim is this rank's.
    """

    kind: Kind
    number: bool
    shape: tuple[int, ...]


class Untyped(Exception):
    """Raised where a result has no type; the argument is the reason, as one word."""


def agrees(kind: Kind) -> bool:
    """True if a value of this type is the same on every rank."""
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
    if Kind.P in kinds and backward and op.adds and not any(y.numel() for y in out):
        return Kind.S  # of an empty part, whose norm is a sum of nothing
    if Kind.P in kinds:
        return _of_terms(op, given, kinds)
    if Kind.V in kinds:
        raise Untyped("own")
    if op.factory:  # x.new_zeros(...)
        return Kind.K
    if op.picks:
        kept = all(y.ndim > 1 for y in out) and _ends(given) >= _lasts(out)
        if kept:  # along a dim that vmap brought
            return Kind.S
        raise Untyped("mixes")
    if op.elementwise:
        if any(agrees(x.kind) and not x.number for x in given):
            raise Untyped("positions")
        return Kind.S if Kind.S in kinds else Kind.R
    if op.joins and not kinds & {Kind.I, Kind.A}:
        return Kind.S if Kind.S in kinds else Kind.R
    if op.sums and Kind.S not in kinds:
        return Kind.R
    if op.sums:
        if all(y.ndim for y in out) and _ends(given) >= _lasts(out):
            return Kind.S
        if backward:
            return Kind.P
        raise Untyped("sums")
    raise Untyped("mixes")


def _ends(given: Sequence[Operand]) -> set[int]:
    """The lengths of parts: their last dims."""
    return {x.shape[-1] for x in given if x.kind is Kind.S and x.shape}


def _lasts(out: Sequence[Tensor]) -> set[int]:
    return {y.shape[-1] for y in out}


def _of_terms(op: OperatorClass, given: Sequence[Operand], kinds: set[Kind]) -> Kind:
    """Terms may be added to each other, and scaled by what is the same everywhere."""
    terms = sum(x.kind is Kind.P for x in given)
    if kinds <= {Kind.P, Kind.K} and op.joins:  # a row of terms, zeros for the others
        return Kind.P
    if kinds <= {Kind.P} and (op.adds or op.joins or op.sums or op.scales):
        return Kind.P
    if op.scales and terms == 1 and all(agrees(k) for k in kinds - {Kind.P}):
        return Kind.P
    raise Untyped("term")


def misused(how: LinearMap, kind: Kind) -> str:
    """The reason that a value of this type may not go that way; "" if it may."""
    if how.of == "I":
        return "" if agrees(kind) else "one value"
    if how.op in ("enter", "slice") or (how.op, how.of, how.to) == ("cast", "M", "R"):
        # Of parts that are repeated over further axes, each is one value there.
        return "disagrees" if kind is Kind.V else ""
    if how.of in ("M", "V") and kind is Kind.P:
        return "term"  # it would be taken for the rank's own
    if how.of == "P" and kind not in (Kind.P, Kind.S, Kind.K):
        return "no term"
    crosses = how.of in ("V", "R") and how.to == "M"
    if crosses and kind not in (Kind.S, Kind.R, Kind.K):
        return "no part"
    return ""


def moved_to(how: LinearMap, kind: Kind) -> Kind:
    """The type of what a move makes of a value of this type."""
    mean = how.power == -1 and how.op in ("psum", "enter")
    if mean and agrees(kind) and (kind is Kind.K or how.to != "R"):
        return kind if kind is Kind.K else Kind.A  # the mean of what is the same
    if kind in PARTS and how.of == how.to == "M":
        return kind
    if how.is_comparison:
        return Kind.A
    if how.to == "M":
        return Kind.A if how.same_on_all else Kind.V
    return {"I": Kind.I, "R": Kind.R, "P": Kind.P}.get(how.to, Kind.S)

"""The types of values between units under ``shard``, and of operators' results.

The type check gives each tensor of a step one of these, a `Kind`. They say how a value
differs between ranks, as ``jax.shard_map``'s varying and unvarying axes do.

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
I < A < V. Parts of leaves (S, P, R) allow elementwise operators among themselves, and
with numbers that are equal on all ranks. Anything else would give results that differ
between ranks, of what should be one value.

The backward pass runs under the same rules, since cotangents have types too. A number
that multiplies parts has a derivative that is a term (P): each rank's is the sum over
its part alone. Such a number must be spread over the parts by ``tree_scale`` (R), whose
transpose sums the terms over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from fsfunc.comm.linear_maps import LinearMap
from fsfunc.tracing.operators import OperatorClass


class Kind(Enum):
    """How a value of a step differs between ranks: see the table above."""

    K = 1  # a constant
    I = 2  # replicated  # noqa: E741
    A = 3  # own values, equal on all ranks
    V = 4  # a rank's own
    S = 5  # a part of a leaf
    P = 6  # a term: a sum over a part
    R = 7  # a factor of parts


# Sets of kinds are made for every operator, and an Enum's own hash is a function of
# Python.
Kind.__hash__ = object.__hash__

PARTS = frozenset({Kind.S, Kind.P, Kind.R})
_ORDER = {Kind.K: 0, Kind.I: 1, Kind.A: 2, Kind.V: 3}


class Operand(NamedTuple):
    """What is known of a tensor that an operator is given.

    Args:
        kind: its type.
        number: whether all of its elements are one number.
        shape: its shape; of a part the last dim is this rank's.
    """

    kind: Kind
    number: bool
    shape: tuple[int, ...]


class Untyped(Exception):
    """Raised where a result has no type; the argument is the case of a rule."""


def is_equal_on_ranks(kind: Kind) -> bool:
    """Returns whether a value of this type is the same on every rank."""
    return kind in (Kind.K, Kind.I, Kind.A)


def joint_kind(kinds: set[Kind]) -> Kind:
    """Returns the type of what is made of whole values of these types: the largest."""
    return max(kinds, key=_ORDER.__getitem__, default=Kind.K)


def result_kind(
    op: OperatorClass,
    operands: Sequence[Operand],
    out: Sequence[Tensor],
    backward: bool,
) -> Kind:
    """Returns the type of what an operator makes.

    Args:
        op: the operator's class.
        operands: the tensors that it reads, or writes into.
        out: the tensors that it made.
        backward: whether it is part of a derivative.

    Raises:
        Untyped: "random", "own", "term", "positions", "sums" or "mixes".
    """
    kinds = {x.kind for x in operands}
    if not kinds & PARTS:
        return joint_kind(kinds)
    if op.random:
        raise Untyped("random")
    if Kind.P in kinds and backward and op.adds and not any(y.numel() for y in out):
        return Kind.S  # the derivative by an empty part, by a norm of nothing
    if Kind.P in kinds:
        return _kind_of_terms(op, operands, kinds)
    if Kind.V in kinds:
        raise Untyped("own")
    if op.factory:  # x.new_zeros(...): no value of the part is in it
        return Kind.K
    # A part is 1-D: further dims come from vmap, along which parts may be chosen or
    # summed as long as the last dim, the part's own, stays whole.
    if op.picks:
        keeps_parts = all(y.ndim > 1 for y in out) and _part_lengths(
            operands
        ) >= _last_dims(out)
        if keeps_parts:
            return Kind.S
        raise Untyped("mixes")
    if op.elementwise:
        if any(is_equal_on_ranks(x.kind) and not x.number for x in operands):
            raise Untyped("positions")
        return Kind.S if Kind.S in kinds else Kind.R
    if op.joins and not kinds & {Kind.I, Kind.A}:
        return Kind.S if Kind.S in kinds else Kind.R
    if op.sums and Kind.S not in kinds:
        return Kind.R
    if op.sums:
        if all(y.ndim for y in out) and _part_lengths(operands) >= _last_dims(out):
            return Kind.S
        # The derivative by a number that multiplied parts: a term, unless it is refused
        # where it is used.
        if backward:
            return Kind.P
        raise Untyped("sums")
    raise Untyped("mixes")


def _part_lengths(operands: Sequence[Operand]) -> set[int]:
    """Returns the lengths of the parts among the operands: their last dims."""
    return {x.shape[-1] for x in operands if x.kind is Kind.S and x.shape}


def _last_dims(out: Sequence[Tensor]) -> set[int]:
    return {y.shape[-1] for y in out}


def _kind_of_terms(
    op: OperatorClass, operands: Sequence[Operand], kinds: set[Kind]
) -> Kind:
    """Returns the type of what is made of terms, which is a term.

    Terms may be added to each other, and scaled by what is equal on all ranks: their
    sum over the ranks is taken later, and must commute with the operator.
    """
    terms = sum(x.kind is Kind.P for x in operands)
    if kinds <= {Kind.P, Kind.K} and op.joins:  # terms, and zeros where there are none
        return Kind.P
    if kinds <= {Kind.P} and (op.adds or op.joins or op.sums or op.scales):
        return Kind.P
    if op.scales and terms == 1 and all(is_equal_on_ranks(k) for k in kinds - {Kind.P}):
        return Kind.P
    raise Untyped("term")


def misuse_case(linear_map: LinearMap, kind: Kind) -> str:
    """Returns the case of the rule that forbids a map of such a value; "" if none."""
    if linear_map.of == "I":
        return "" if is_equal_on_ranks(kind) else "one value"
    if linear_map.op in ("enter", "slice") or (
        linear_map.op,
        linear_map.of,
        linear_map.to,
    ) == ("cast", "M", "R"):
        # Of parts that are repeated over further axes, each is one value there.
        return "disagrees" if kind is Kind.V else ""
    if linear_map.of in ("M", "V") and kind is Kind.P:
        return "term"  # it would be taken for the rank's own
    if linear_map.of == "P" and kind not in (Kind.P, Kind.S, Kind.K):
        return "no term"
    crosses = linear_map.of in ("V", "R") and linear_map.to == "M"
    if crosses and kind not in (Kind.S, Kind.R, Kind.K):
        return "no part"
    return ""


def moved_kind(linear_map: LinearMap, kind: Kind) -> Kind:
    """Returns the type of what a linear map makes of a value of this type."""
    is_mean = linear_map.power == -1 and linear_map.op in ("psum", "enter")
    if is_mean and is_equal_on_ranks(kind) and (kind is Kind.K or linear_map.to != "R"):
        return kind if kind is Kind.K else Kind.A  # the mean of what is the same
    if kind in PARTS and linear_map.of == linear_map.to == "M":
        return kind
    if linear_map.is_comparison:
        return Kind.A
    if linear_map.to == "M":
        return Kind.A if linear_map.same_on_all else Kind.V
    return {"I": Kind.I, "R": Kind.R, "P": Kind.P}.get(linear_map.to, Kind.S)

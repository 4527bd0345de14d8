"""Values and provenance of results, from those of the operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsfunc.comm.attribution import is_internal, source_line
from fsfunc.tracing.knowledge import Known, number, shown
from fsfunc.tracing.operators import COPIES, OperatorClass
from fsfunc.tracing.provenance import (
    Provenance,
    Rows,
    joined,
    met,
    nonlinear,
    takes_rows,
)
from fsfunc.tracing.refusals import apart
from fsfunc.tracing.types import Kind

__all__ = ["made_of", "together", "value_of"]


def value_of(known: Known, op: OperatorClass, given: Sequence[Any]) -> int:
    """A hash of a result: of the operator and the values of its operands."""
    if op.name in COPIES:
        (*_, last) = (x for x in given if isinstance(x, Tensor))
        return known.value(last)
    of = (known.value(x) if isinstance(x, Tensor) else number(x) for x in given)
    return hash((op.name, *of))


def made_of(known: Known, op: OperatorClass, given: Sequence[Any]) -> Provenance:
    """Of what a result is made.

    Raises:
        LawError: of gradients that do not mean here what they would on one device.
    """
    tensors = [x for x in given if isinstance(x, Tensor)]
    if op.name in ("copy", "fill", "zero") and shown(given[0]) is None:
        tensors = tensors[1:]  # of the first nothing is left
    each = [known.made_of(x) for x in tensors]
    if takes_rows(op, given) and known.kind(given[0]) is Kind.V:
        each.append(_picked(known, *tensors))
    if not any(x.gradients for x in each):
        return joined(each)
    bends = nonlinear(op, given, [bool(x.gradients) for x in each])
    if bends is None:
        return joined(x._replace(gradients=frozenset()) for x in each)
    made_of = joined(each) if is_internal() else together(op.name, each)
    return made_of.changed(f"{op.name} at {source_line()}") if bends else made_of


def _picked(known: Known, x: Tensor, *where: Tensor) -> Provenance:
    """Some rows of an own tensor, copied."""
    known.own.picked(x)
    which = tuple(map(known.value, where))
    one = Rows(known.value(x), known.of(x).what, which)
    return Provenance(frozenset((one,)))


def together(name: str, given: Sequence[Provenance]) -> Provenance:
    """Of what a value is made that ``name`` makes of several.

    Raises:
        LawError: gradients have met that were taken of other rows.
    """
    if (found := met(given)) is not None:
        raise apart(name, *found)
    return joined(given)

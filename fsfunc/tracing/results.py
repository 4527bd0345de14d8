"""Facts about results, from those about the operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import is_internal, source_line
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.knowledge import Known, Origin, Seen
from fsfunc.tracing.operators import COPIES, OperatorClass, comparable, partial_view
from fsfunc.tracing.provenance import (
    NOTHING,
    UNKNOWN,
    Along,
    Gradient,
    Provenance,
    Rows,
    crossed,
    factors,
    joined,
    met,
    nonlinear,
    takes_rows,
)
from fsfunc.tracing.rules import rule_error
from fsfunc.tracing.types import PARTS, Kind, Operand


@dataclass(frozen=True)
class OperatorCall:
    """An operator that has run, and what is known of what it was given.

    Args:
        op: its class; ``given``: its arguments; ``made``: what it made, or wrote into.
        tensors: those among the arguments; ``sources``: the facts about each.
        operands: of those whose values it reads.
        node: the autograd node that runs it, if any; ``origin``: the operator of the
            forward pass that it is of.
        trusted: whether the library calls it.
    """

    op: OperatorClass
    given: Sequence[Any]
    made: Sequence[Tensor]
    tensors: Sequence[Tensor]
    sources: Sequence[Seen]
    operands: Sequence[Operand]
    node: Any
    origin: Origin | None
    trusted: bool

    @property
    def line(self) -> str:
        """The line that it is of."""
        if self.node is not None or self.origin is None:
            return source_line()
        return self.origin.where

    @property
    def facts(self) -> list[tuple[Tensor, Seen]]:
        return list(zip(self.tensors, self.sources, strict=True))


def seen_of(known: Known, call: OperatorCall, kind: Kind, digest: Any) -> Seen:
    """The facts about the first result of a call, which is of this kind.

    Raises:
        LawError: of gradients that do not mean here what they would on one device.
    """
    op, y, pairs = call.op, call.made[0], call.origin and call.origin.of_pairs
    # Each element is made of those at its place: what is one number stays one.
    elementwise = op.elementwise or op.name == "select_backward" and bool(pairs)
    uniform = elementwise and all([x.number for x in call.operands])
    found = next((x for x in call.sources if x.kind is kind), None)
    if kind in PARTS and found is None:  # a sum over parts, which is of the same leaf
        part = next((x for x in call.sources if x.kind in PARTS), None)
        found = part and part._replace(kind=kind)
    if found is None or kind is Kind.K:
        found = Seen(kind, f"what {op.name} made", call.line, digest)
    if kind is Kind.A:
        made = any(x.parameter or x.kind is Kind.I for x in call.sources)
        found = found._replace(parameter=True) if made else found
    found = found._replace(
        uniform=(uniform or op.factory or op.alike) and not op.random
    )
    if _torch.current_node() is not None:
        return found._replace(flat=False, made_of=NOTHING, value=0)
    # Elements of a row stay where they are.
    rows, lies = op.elementwise or call.trusted, y.ndim == 1
    lies = lies or y.ndim == 2 and known.is_paired(y)
    return found._replace(
        flat=rows and lies and any([x.flat for x in call.sources]),
        made_of=made_of(known, call),
        value=0 if op.random else value_of(known, call),
    )


def value_of(known: Known, call: OperatorCall) -> int:
    """A hash of a result: of the operator and the values of its operands."""
    if call.op.name in COPIES:
        return known.value(*call.facts[-1])
    each = iter(call.facts)
    of = [
        known.value(*next(each)) if isinstance(x, Tensor) else comparable(x)
        for x in call.given
    ]
    return hash((call.op.name, *of))


def made_of(known: Known, call: OperatorCall) -> Provenance:
    """Of what the results of a call are made.

    Raises:
        LawError: of gradients that do not mean here what they would on one device.
    """
    op, given, facts = call.op, call.given, call.facts
    if op.name in ("copy", "fill", "zero") and partial_view(given[0]) is None:
        facts = facts[1:]  # of the first nothing is left
    tensors, y = [x for x, _ in facts], call.made[0]
    each = [known.made_of(*x) for x in facts]
    chosen = _chosen(known, op, given, facts)
    if not any([x.gradients for x in each]):
        return joined([*each, *chosen])
    bends = nonlinear(op, given, [bool(x.gradients) for x in each])
    if bends is None:
        return joined([*(x._replace(gradients=frozenset()) for x in each), *chosen])
    if bends and not is_internal():
        if (found := crossed(each, known.own.cover, known.own.lone)) is not None:
            raise _apart(op.name, *found)
    if not bends:  # it adds terms, or sums over their dims
        terms = zip(tensors, each, factors(op, given, tensors), strict=True)
        each = [
            p.lying(partial(_lying, op, given, x, y)).scaled(by) for x, p, by in terms
        ]
    stacked = _along(y, _dim(given, tensors[0])) if op.joins else None
    made_of = joined([*each, *chosen], stacked)
    if not is_internal():
        together(op.name, each)
    return made_of.changed(f"{op.name} at {source_line()}") if bends else made_of


def _lying(
    op: OperatorClass, given: Sequence[Any], x: Tensor, made: Tensor, along: Along
) -> Along | None:
    """The dim of a result that has the rows of ``x``; None: they are summed.

    As views share memory with ``x``, the dim is found by its stride.
    """
    dims = [dim for dim in range(x.ndim) if _along(x, dim) == along]
    if len(dims) != 1:
        return UNKNOWN
    dim, same = dims[0], made.ndim == x.ndim
    if op.name in ("sum", "mean"):
        over = [n % x.ndim for n in given if type(n) is int] or range(x.ndim)
        if dim in over:
            return None
        return _along(made, dim if same else dim - sum(n < dim for n in over))
    if op.name == "stack":
        return _along(made, dim + (_dim(given, x) <= dim))
    if op.name in ("mm", "matmul") and x is given[0] and same and not dim:
        return _along(made, 0)
    keeps = op.elementwise or op.name in COPIES or op.name == "cat"
    kept = keeps and same and made.shape[dim] == x.shape[dim]
    return _along(made, dim) if kept else UNKNOWN


def _along(x: Tensor, dim: int) -> Along:
    return x.stride(dim), x.shape[dim]


def _dim(given: Sequence[Any], x: Tensor) -> int:
    """The dim along which tensors are put side by side."""
    return next((n % (x.ndim + 1) for n in given if type(n) is int), 0)


_PRODUCTS = {"mm", "mv", "bmm", "matmul", "dot"}


def _chosen(
    known: Known, op: OperatorClass, given: Sequence[Any], facts: Sequence[Any]
) -> list[Provenance]:
    """Rows of an own tensor that are copied, or that constants choose or weigh."""
    if takes_rows(op, given) and facts[0][1].kind is Kind.V:
        return [_picked(known, *(x for x, _ in facts))]
    own = next((x for x, seen in facts if seen.kind is Kind.V and x.ndim), None)
    if own is None or own.shape[0] < 2:
        return []
    found, product = [], op.name in _PRODUCTS
    for c, seen in facts:
        if seen.kind is Kind.K and not seen.uniform and c.ndim:
            along = c.shape[-1 if product else 0] == own.shape[0]
            if along and (product or op.elementwise and c.ndim == own.ndim):
                found.append(known.weighed(own, c))
    return found


def pulled_with(known: Known, of: Any) -> list[Provenance]:
    """The rows that constants choose by which derivatives are pulled back."""
    tensors = [x for x in known.tensors(of) if x.ndim]
    own = next((x for x in tensors if known.kind(x) is Kind.V), None)
    if own is None:
        return []
    seen = [(c, known.of(c)) for c in tensors if len(c) > 1]
    return [
        known.weighed(own, c)
        for c, about in seen
        if _torch.mapped_at(c) or about.kind is Kind.K and not about.uniform
    ]


def _picked(known: Known, x: Tensor, *where: Tensor) -> Provenance:
    """Some rows of an own tensor, copied."""
    known.own.picked(x)
    which = tuple(map(known.value, where))
    one = Rows(known.value(x), known.of(x).what, which)
    return Provenance(frozenset((one,)))


def together(name: str, given: Sequence[Provenance]) -> Provenance:
    """The rows and gradients of a value that operator ``name`` makes of several.

    Raises:
        LawError: gradients of different rows are combined.
    """
    if (found := met(given)) is not None:
        raise _apart(name, *found)
    return joined(given)


def _apart(op: str, one: Gradient, other: Gradient, rows: Rows) -> Exception:
    """The error for combining two changed gradients that are of different rows."""
    where = ", ".join(x.where for x in (one, other) if x.where)
    changed = f", each changed by what is not linear: {where}" if where else ""
    line = source_line()
    return rule_error("apart", op=op, line=line, rows=rows.name, changed=changed)


def placed(x: Sharded, kind: Kind, name: str) -> Seen:
    """The facts about a placed leaf's local tensor."""
    return Seen(kind, name, flat=kind is Kind.I and x.ndim > 1)


def pairs(by: Any, found: Any) -> list[tuple[Any, Any]]:
    """Each leaf that is differentiated, with its gradient."""
    leaves, treedef = tree.flatten(by, is_leaf=is_sharded)
    grads: list[Any] = treedef.flatten_up_to(found)  # type: ignore[arg-type]
    return list(zip(leaves, grads, strict=True))

"""Facts about results, from those about the operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import is_internal, source_line
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.knowledge import Known, Seen
from fsfunc.tracing.operators import COPIES, MOVES_ROWS, OperatorClass, number, shown
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
from fsfunc.tracing.rules import refused
from fsfunc.tracing.types import PARTS, Kind

Facts = Sequence[tuple[Tensor, Seen]]  # about the tensors that an operator is given


def seen_of(
    known: Known,
    op: OperatorClass,
    kind: Kind,
    given: Sequence[Any],
    facts: Facts,
    made: Tensor,
    digest: Any,
    line: str,
    *,
    uniform: bool,
    rows: bool,
) -> Seen:
    """The facts about a result of some kind, of which ``made`` is the first tensor.

    Args:
        facts: those about the tensors among ``given``.
        uniform: whether it is elementwise in what is one number each; ``rows``:
            whether elements of a row stay where they are.

    Raises:
        LawError: of gradients that do not mean here what they would on one device.
    """
    forward = _torch.current_node() is None
    told = forward and not op.random
    sources = [x for _, x in facts]
    lies = made.ndim == 1 or made.ndim == 2 and known.is_paired(made)
    return _seen(op, kind, sources, digest, line)._replace(
        uniform=(uniform or op.factory or op.alike) and not op.random,
        flat=forward and rows and lies and any([x.flat for x in sources]),
        made_of=made_of(known, op, given, facts, made) if forward else NOTHING,
        value=value_of(known, op, given, facts) if told else 0,
        root=_root(known, op, facts) if told else 0,
    )


def _seen(
    op: OperatorClass, kind: Kind, sources: Sequence[Seen], digest: Any, line: str
) -> Seen:
    found = next((x for x in sources if x.kind is kind), None)
    if kind in PARTS and found is None:  # a sum over parts, which is of the same leaf
        part = next((x for x in sources if x.kind in PARTS), None)
        found = part and part._replace(kind=kind)
    if found is None or kind is Kind.K:
        found = Seen(kind, f"what {op.name} made", line, digest)
    if kind is Kind.A and any(x.parameter or x.kind is Kind.I for x in sources):
        return found._replace(parameter=True)
    return found


def _root(known: Known, op: OperatorClass, facts: Facts) -> int:
    """The value of which a result has the rows in another order, if it has."""
    own = [(x, seen) for x, seen in facts if seen.kind is Kind.V]
    if op.name in MOVES_ROWS and own:
        return known.root(*own[0])
    return next((seen.root for _, seen in own if seen.root), 0)


def value_of(
    known: Known, op: OperatorClass, given: Sequence[Any], facts: Facts
) -> int:
    """A hash of a result: of the operator and the values of its operands."""
    if op.name in COPIES:
        return known.value(*facts[-1])
    each = iter(facts)
    of = [
        known.value(*next(each)) if isinstance(x, Tensor) else number(x) for x in given
    ]
    return hash((op.name, *of))


def made_of(
    known: Known, op: OperatorClass, given: Sequence[Any], facts: Facts, made: Tensor
) -> Provenance:
    """Of what a result is made, of which ``made`` is the first tensor.

    Raises:
        LawError: of gradients that do not mean here what they would on one device.
    """
    if op.name in ("copy", "fill", "zero") and shown(given[0]) is None:
        facts = facts[1:]  # of the first nothing is left
    tensors = [x for x, _ in facts]
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
    if not bends:
        each = _summed(op, given, tensors, each, made)
    stacked = _along(made, _dim(given, tensors[0])) if op.joins else None
    made_of = joined([*each, *chosen], stacked)
    if not is_internal():
        together(op.name, each)
    return made_of.changed(f"{op.name} at {source_line()}") if bends else made_of


def _summed(
    op: OperatorClass,
    given: Sequence[Any],
    tensors: Sequence[Tensor],
    each: Sequence[Provenance],
    made: Tensor,
) -> list[Provenance]:
    """Of what terms are made, as an operator adds them, or sums over their dims."""
    found = []
    factor = factors(op, given, tensors)
    for x, p, by in zip(tensors, each, factor, strict=True):
        found.append(p.lying(partial(_lying, op, given, x, made)).scaled(by))
    return found


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
    known: Known, op: OperatorClass, given: Sequence[Any], facts: Facts
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
    one = Rows(known.root(x), known.of(x).what, which)
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
    return refused("apart", op=op, line=line, rows=rows.name, changed=changed)


def placed(x: Sharded, kind: Kind, name: str) -> Seen:
    """The facts about a placed leaf's local tensor."""
    return Seen(kind, name, flat=kind is Kind.I and x.ndim > 1)


def pairs(by: Any, found: Any) -> list[tuple[Any, Any]]:
    """Each leaf that is differentiated, with its gradient."""
    leaves, treedef = tree.flatten(by, is_leaf=is_sharded)
    grads: list[Any] = treedef.flatten_up_to(found)  # type: ignore[arg-type]
    return list(zip(leaves, grads, strict=True))

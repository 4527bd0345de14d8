"""The facts about an operator's result, from the facts about its operands.

`typed_operators` calls `result_facts` for each operator between units, when it knows
the result's type. The other functions follow rows and gradients through operators,
for the rule "rows" (`provenance`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from fsfunc import _torch, tree
from fsfunc.comm.attribution import is_internal, source_line
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.knowledge import FactTable, Origin, TensorFacts
from fsfunc.tracing.operators import COPIES, OperatorClass, comparable, partial_view
from fsfunc.tracing.provenance import (
    NOTHING,
    UNKNOWN,
    DimKey,
    Gradient,
    Provenance,
    Rows,
    copies_rows,
    find_crossed,
    find_unlike,
    is_nonlinear,
    join,
    linear_factors,
)
from fsfunc.tracing.rules import rule_error
from fsfunc.tracing.types import PARTS, Kind, Operand
from fsfunc.tree import Leaf, PyTree


@dataclass(frozen=True)
class OperatorCall:
    """An operator that has run, and what is known of its arguments.

    Args:
        op: its class.
        arguments: its arguments.
        results: the tensors that it made, or wrote into.
        tensors: the tensors among the arguments.
        facts: the facts about each of these.
        operands: what `types.result_kind` asks of those whose values it reads.
        node: the autograd node whose backward runs it, if one does.
        origin: the operator of the forward pass that it belongs to.
        trusted: whether the library calls it, which knows what it does with parts.
    """

    op: OperatorClass
    arguments: Sequence[Any]
    results: Sequence[Tensor]
    tensors: Sequence[Tensor]
    facts: Sequence[TensorFacts]
    operands: Sequence[Operand]
    node: Node | None
    origin: Origin | None
    trusted: bool

    @property
    def line(self) -> str:
        """The line of the user's code that it belongs to."""
        if self.node is not None or self.origin is None:
            return source_line()
        return self.origin.line

    @property
    def pairs(self) -> list[tuple[Tensor, TensorFacts]]:
        """Each tensor among the arguments, with the facts about it."""
        return list(zip(self.tensors, self.facts, strict=True))


def result_facts(
    table: FactTable, call: OperatorCall, kind: Kind, digest: Hashable
) -> TensorFacts:
    """Returns the facts about the first result of a call.

    Args:
        table: the facts about tensors.
        call: the operator's call.
        kind: the type of its results.
        digest: a key of their value, if they are constants.

    Raises:
        LawError: it combines gradients that are means here, and are not on one device.
    """
    op, y, of_pairs = call.op, call.results[0], call.origin and call.origin.of_pairs
    # Each element is made of those at its place: what is one number stays one.
    elementwise = op.elementwise or op.name == "select_backward" and bool(of_pairs)
    uniform = elementwise and all([x.number for x in call.operands])
    # Messages name a result after an operand of its type: a part stays a part of its
    # leaf, and what differs between ranks has the name of what it came from.
    facts = next((x for x in call.facts if x.kind is kind), None)
    if kind in PARTS and facts is None:  # a sum over parts, which is of the same leaf
        part = next((x for x in call.facts if x.kind in PARTS), None)
        facts = part and part._replace(kind=kind)
    if facts is None or kind is Kind.K:
        facts = TensorFacts(kind, f"what {op.name} made", call.line, digest)
    if kind is Kind.A:
        has_parameters = any(x.from_parameters or x.kind is Kind.I for x in call.facts)
        facts = facts._replace(from_parameters=True) if has_parameters else facts
    facts = facts._replace(
        uniform=(uniform or op.factory or op.alike) and not op.random
    )
    # What a backward pass makes is followed by `checker`, which knows whose gradient it
    # is and of which rows.
    if _torch.current_node() is not None:
        return facts._replace(flat=False, provenance=NOTHING, value_key=0)
    # A result of a 1-D part is one too, if each element stays at its place.
    stays_in_place, is_row = op.elementwise or call.trusted, y.ndim == 1
    is_row = is_row or y.ndim == 2 and table.is_paired(y)
    return facts._replace(
        flat=stays_in_place and is_row and any([x.flat for x in call.facts]),
        provenance=result_provenance(table, call),
        value_key=0 if op.random else result_value_key(table, call),
    )


def result_value_key(table: FactTable, call: OperatorCall) -> int:
    """Returns a key of a result: of the operator and the values of its operands."""
    if call.op.name in COPIES:
        return table.value_key(*call.pairs[-1])
    pairs = iter(call.pairs)
    operand_keys = [
        table.value_key(*next(pairs)) if isinstance(x, Tensor) else comparable(x)
        for x in call.arguments
    ]
    return hash((call.op.name, *operand_keys))


def result_provenance(table: FactTable, call: OperatorCall) -> Provenance:
    """Returns of what the results of a call are made.

    Raises:
        LawError: it combines gradients that are means here, and are not on one device.
    """
    op, arguments, pairs = call.op, call.arguments, call.pairs
    if op.name in ("copy", "fill", "zero") and partial_view(arguments[0]) is None:
        pairs = pairs[1:]  # the first is overwritten, all of it
    tensors, y = [x for x, _ in pairs], call.results[0]
    provenances = [table.provenance(*x) for x in pairs]
    chosen_rows = _chosen_rows(table, op, arguments, pairs)
    if not any([x.gradients for x in provenances]):
        return join([*provenances, *chosen_rows])
    changes = is_nonlinear(op, arguments, [bool(x.gradients) for x in provenances])
    if changes is None:
        return join(
            [*(x._replace(gradients=frozenset()) for x in provenances), *chosen_rows]
        )
    if changes and not is_internal():
        if (
            crossed_rows := find_crossed(
                provenances, table.rank_local.is_of_all_rows, table.rank_local.is_single
            )
        ) is not None:
            raise _rows_error(op.name, *crossed_rows)
    if not changes:  # it adds terms, or sums over their dims
        terms = zip(
            tensors, provenances, linear_factors(op, arguments, tensors), strict=True
        )
        provenances = [
            provenance.rearranged(partial(_moved_dim, op, arguments, x, y)).scaled(
                factor
            )
            for x, provenance, factor in terms
        ]
    stacked = _dim_key(y, _joined_dim(arguments, tensors[0])) if op.joins else None
    joined = join([*provenances, *chosen_rows], stacked)
    if not is_internal():
        combine(op.name, provenances)
    return joined.changed_at(f"{op.name} at {source_line()}") if changes else joined


def _moved_dim(
    op: OperatorClass, arguments: Sequence[Any], x: Tensor, made: Tensor, along: DimKey
) -> DimKey | None:
    """Returns the dim of a result that has the rows of ``x``; None if they are summed.

    A dim is given by its stride and size, as facts are about a storage: a view of ``x``
    may have the dim at another place, with the same stride.

    Args:
        op: the operator's class.
        arguments: its arguments.
        x: one of these, in which gradients of several rows lie side by side.
        made: the result.
        along: the dim of ``x`` along which they lie.
    """
    dims = [dim for dim in range(x.ndim) if _dim_key(x, dim) == along]
    if len(dims) != 1:
        return UNKNOWN
    dim, same_ndim = dims[0], made.ndim == x.ndim
    if op.name in ("sum", "mean"):
        reduced_dims = [n % x.ndim for n in arguments if type(n) is int] or range(
            x.ndim
        )
        if dim in reduced_dims:
            return None
        return _dim_key(
            made, dim if same_ndim else dim - sum(n < dim for n in reduced_dims)
        )
    if op.name == "stack":
        return _dim_key(made, dim + (_joined_dim(arguments, x) <= dim))
    if op.name in ("mm", "matmul") and x is arguments[0] and same_ndim and not dim:
        return _dim_key(made, 0)
    keeps_places = op.elementwise or op.name in COPIES or op.name == "cat"
    is_kept = keeps_places and same_ndim and made.shape[dim] == x.shape[dim]
    return _dim_key(made, dim) if is_kept else UNKNOWN


def _dim_key(x: Tensor, dim: int) -> DimKey:
    """Returns the stride and size of a dim, by which views of a tensor find it."""
    return x.stride(dim), x.shape[dim]


def _joined_dim(arguments: Sequence[Any], x: Tensor) -> int:
    """Returns the dim along which ``cat`` or ``stack`` puts tensors side by side."""
    return next((n % (x.ndim + 1) for n in arguments if type(n) is int), 0)


_PRODUCTS = {"mm", "mv", "bmm", "matmul", "dot", "addmm", "addmv", "baddbmm", "addbmm"}


def _chosen_rows(
    table: FactTable,
    op: OperatorClass,
    arguments: Sequence[Any],
    pairs: Sequence[tuple[Tensor, TensorFacts]],
) -> list[Provenance]:
    """Returns the rows of an own tensor that are copied, or weighed by a constant."""
    if copies_rows(op, arguments) and pairs[0][1].kind is Kind.V:
        return [_picked_rows(table, *(x for x, _ in pairs))]
    own_rows = next((x for x, facts in pairs if facts.kind is Kind.V and x.ndim), None)
    if own_rows is None:
        return []
    if op.name in _PRODUCTS:
        weights = _weights_of_rows(own_rows, [x for x, _ in pairs])
    elif op.elementwise:
        weights = [
            x
            for x, _ in pairs
            if x.ndim == own_rows.ndim and x.shape[0] == own_rows.shape[0] > 1
        ]
    else:
        weights = []
    return [
        table.weighed_rows(own_rows, x)
        for x, facts in pairs
        if facts.kind is Kind.K and not facts.uniform and any(x is w for w in weights)
    ]


def _weights_of_rows(rows: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the factors of a product with which it sums over the rows of ``rows``.

    They come before it, ``weights @ rows``, where its last dim but one has the rows; or
    behind, ``rows.T @ weights``, where the last one has them, as the strides show.
    """
    place = next(i for i, x in enumerate(factors) if x is rows)
    before, after = factors[:place], factors[place + 1 :]
    count = rows.shape[-2 if rows.ndim > 1 else 0]
    weights = [x for x in before if x.ndim and x.shape[-1] == count > 1]
    if rows.ndim < 2:
        weights += [x for x in after if x.ndim and x.shape[-2:][0] == count > 1]
    elif rows.stride(-1) > rows.stride(-2):
        weights += [
            x for x in after if x.ndim and x.shape[-2:][0] == rows.shape[-1] > 1
        ]
    return weights


def rows_of_derivative(table: FactTable, outputs: PyTree) -> list[Provenance]:
    """Returns the rows that a derivative is of, as its cotangents choose them.

    A cotangent with a one among zeros chooses a row of the loss.

    Args:
        table: the facts about tensors.
        outputs: the differentiated values, and the cotangents.
    """
    tensors = [x for x in table.tensors_in(outputs) if x.ndim]
    own_rows = next((x for x in tensors if table.kind(x) is Kind.V), None)
    if own_rows is None:
        return []
    constants = [
        (constant, table.of(constant)) for constant in tensors if len(constant) > 1
    ]
    return [
        table.weighed_rows(own_rows, constant)
        for constant, facts in constants
        if _torch.vmap_levels_of(constant) or facts.kind is Kind.K and not facts.uniform
    ]


def _picked_rows(table: FactTable, x: Tensor, *index: Tensor) -> Provenance:
    """Returns the provenance of rows of an own tensor, copied by index tensors."""
    table.rank_local.note_slice(x)
    index_keys = tuple(map(table.value_key, index))
    rows = Rows(table.value_key(x), table.of(x).title, index_keys)
    return Provenance(frozenset((rows,)))


def combine(name: str, provenances: Sequence[Provenance]) -> Provenance:
    """Returns the provenance of a value that operator ``name`` makes of several.

    Raises:
        LawError: gradients of unlike rows are combined.
    """
    if (unlike := find_unlike(provenances)) is not None:
        raise _rows_error(name, *unlike)
    return join(provenances)


def _rows_error(op: str, first: Gradient, second: Gradient, rows: Rows) -> Exception:
    """Returns the error for combining two changed gradients that are of unlike rows."""
    changes = ", ".join(gradient.line for gradient in (first, second) if gradient.line)
    changed = f", each changed by what is not linear: {changes}" if changes else ""
    line = source_line()
    return rule_error("apart", op=op, line=line, rows=rows.name, changed=changed)


def placed_facts(x: Sharded, kind: Kind, name: str) -> TensorFacts:
    """Returns the facts about a placed leaf's local tensor."""
    return TensorFacts(kind, name, flat=kind is Kind.I and x.ndim > 1)


def gradient_pairs(arguments: PyTree, gradients: PyTree) -> list[tuple[Leaf, Leaf]]:
    """Returns each leaf that is differentiated, with its gradient."""
    leaves, treedef = tree.flatten(arguments, is_leaf=is_sharded)
    grads: list[Any] = treedef.flatten_up_to(gradients)  # type: ignore[arg-type]
    return list(zip(leaves, grads, strict=True))

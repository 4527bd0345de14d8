"""Provenance of values: of which rows, and of which averaged gradients they are made.

This is for the rule "rows". Under ``shard`` a gradient by parameters is the mean over
the ranks. In a loop over rows, the gradient of row i is the mean of those of row i of
every rank:

    one device, 4 rows      g0, g1, g2, g3                  sum(clip(g) for g in ...)
    2 ranks, 2 rows each    (g0 + g2) / 2, (g1 + g3) / 2    another number

What is linear in such gradients may be summed over the rows all the same. What is not
(a norm, a clipped gradient, the loss of a task's own step) is that of a mean here,
where on one device it is that of a row. It is refused where it meets that of other
rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from fsfunc.tracing.operators import COPIES, OperatorClass


class RowBlock(NamedTuple):
    """Rows that follow each other.

    Args:
        first: the position of the first one.
        count: their number.
    """

    first: int
    count: int


class Rows(NamedTuple):
    """Some, not all, rows of a rank's own tensor.

    Args:
        tensor: the key of the tensor's value.
        name: what to call the tensor.
        which: a block of them; (the first, how they lie) where a view skips some; or a
            key, of any length, where index tensors or a constant chose them.
    """

    tensor: int
    name: str
    which: RowChoice


@dataclass(frozen=True)
class Gradient:
    """A gradient that is the ranks' mean, as part of what a value is made of.

    Args:
        variable: the key of the value that it is by.
        rows: the rows of ranks' own tensors that it was taken of.
        shares: of a sum, how much of which rows is in it; None where that is unknown.
        stacked: the dim along which gradients of several rows lie side by side, if they
            do; `UNKNOWN` where that dim was lost.
        is_loss: whether it is the loss itself, which is a mean as its gradient is.
        is_changed: whether an operator that is not linear has changed it.
        line: that operator and its line.
    """

    variable: int
    rows: frozenset[Rows]
    shares: Shares | None = None
    stacked: DimKey | None = None
    is_loss: bool = False
    is_changed: bool = False
    line: str = field(default="", compare=False)

    def unlike_rows(self, other: Gradient) -> Rows | None:
        """Returns rows that one is of and the other is not, of a tensor of both.

        Also where both are of the same rows, but not of as much of each. None if they
        may be combined.
        """
        for rows in self.rows ^ other.rows:
            in_both = (
                any(others.tensor == rows.tensor for others in gradient.rows)
                for gradient in (self, other)
            )
            if all(in_both):
                return rows
        if self.shares is None or other.shares is None:
            # How much of which rows is in them is unknown. They are unlike even if they
            # are of rows of unlike tensors: one may have the rows of the other in
            # another order, as flipped or rolled.
            unlike = bool(other.rows) and self.rows != other.rows
        else:
            unlike = not _proportional(self.shares, other.shares)
        return min(self.rows, key=str) if self.rows and unlike else None


# A dim, by its stride and size: a view may move the dim, and keeps these.
DimKey: TypeAlias = tuple[int, int]
UNKNOWN: DimKey = (0, 0)
Shares: TypeAlias = frozenset[tuple[frozenset[Rows], float]]
RowChoice: TypeAlias = RowBlock | tuple[object, ...]


def _proportional(some: Shares, others: Shares) -> bool:
    """Returns whether one sum is a multiple of the other, as floats round."""
    first_shares, second_shares = dict(some), dict(others)
    if first_shares.keys() != second_shares.keys():
        return False
    largest = max(second_shares, key=lambda rows: abs(second_shares[rows]))
    ratio, tolerance = (
        first_shares[largest] / (second_shares[largest] or 1),
        1e-6 * max(map(abs, first_shares.values())),
    )
    return all(
        abs(first_shares[rows] - ratio * second_shares[rows]) <= tolerance
        for rows in first_shares
    )


class Provenance(NamedTuple):
    """The rows and the averaged gradients that a value depends on."""

    rows: frozenset[Rows] = frozenset()
    gradients: frozenset[Gradient] = frozenset()

    def scaled(self, factor: float | None) -> Provenance:
        """Returns the provenance of a multiple.

        Args:
            factor: how many times it is; None for another function, linear in it.
        """
        if factor == 1 or all(g.shares is None for g in self.gradients):
            return self
        gradients = (
            replace(g, shares=_scale_shares(g.shares, factor)) for g in self.gradients
        )
        return self._replace(gradients=frozenset(gradients))

    def rearranged(self, moved_dim: Callable[[DimKey], DimKey | None]) -> Provenance:
        """Returns the provenance of its elements in another order, or summed.

        Args:
            moved_dim: maps the dim along which several rows lie to where they lie then;
                to None where they are summed.
        """
        if all(g.stacked is None for g in self.gradients):
            return self
        gradients = (
            g if g.stacked is None else replace(g, stacked=moved_dim(g.stacked))
            for g in self.gradients
        )
        return self._replace(gradients=frozenset(gradients))

    def changed_at(self, where: str) -> Provenance:
        """Returns the provenance of a function that is not linear.

        Args:
            where: the function and its line, for messages.
        """
        if all(g.is_changed for g in self.gradients):
            return self
        bent = (
            g if g.is_changed else replace(g, is_changed=True, line=where)
            for g in self.gradients
        )
        return self._replace(gradients=frozenset(bent))


NOTHING = Provenance()


def _scale_shares(shares: Shares | None, factor: float | None) -> Shares | None:
    if shares is None or factor is None:
        return None
    return frozenset((rows, amount * factor) for rows, amount in shares)


def join(
    provenances: Iterable[Provenance], stacked: DimKey | None = None
) -> Provenance:
    """Returns the provenance of what is made of several values.

    Gradients by one value become one gradient, the sum of them.

    Args:
        provenances: the provenance of each.
        stacked: the dim along which they are put side by side, if they are.
    """
    contributing = [x for x in provenances if x is not NOTHING]
    if len(contributing) < 2:
        return contributing[0] if contributing else NOTHING
    rows = frozenset[Rows]().union(*(x.rows for x in contributing))
    gradients = frozenset[Gradient]().union(*(x.gradients for x in contributing))
    if len(gradients) < 2:
        return Provenance(rows, gradients)
    joined_gradients = {g for g in gradients if g.is_changed}
    for variable in {g.variable for g in gradients if not g.is_changed}:
        terms = [
            g
            for x in contributing
            for g in x.gradients
            if g.variable == variable and not g.is_changed
        ]
        joined_gradients.add(_sum(variable, terms, stacked))
    return Provenance(rows, frozenset(joined_gradients))


def _sum(variable: int, terms: Sequence[Gradient], stacked: DimKey | None) -> Gradient:
    """Returns several gradients by one value as one: their sum, or all side by side."""
    rows = frozenset[Rows]().union(*(g.rows for g in terms))
    stacked_before = next((g.stacked for g in terms if g.stacked is not None), None)
    is_loss = all(g.is_loss for g in terms)
    if stacked is not None and not is_loss:
        if any(terms[0].unlike_rows(g) for g in terms):
            stacked_before = stacked
    if stacked is not None or any(g.shares is None for g in terms):
        return Gradient(variable, rows, stacked=stacked_before, is_loss=is_loss)
    shares: dict[frozenset[Rows], float] = defaultdict(float)
    for g in terms:
        for part, amount in g.shares or ():
            shares[part] += amount
    return Gradient(variable, rows, frozenset(shares.items()), stacked_before, is_loss)


def find_unlike(
    provenances: Iterable[Provenance],
) -> tuple[Gradient, Gradient, Rows] | None:
    """Returns two gradients that may not be combined, and rows that only one is of.

    Both are by one value, of unlike rows, and went through an operator that is not
    linear.
    Gradients that one value is made of already are left out: they were combined before,
    and were refused then if they had to be.
    """
    each = {x.gradients for x in provenances if any(g.is_changed for g in x.gradients)}
    for some, others in combinations(each, 2):
        for first in some - others:
            for second in others - some:
                if (
                    first.is_changed
                    and second.is_changed
                    and first.variable == second.variable
                ):
                    if (rows := first.unlike_rows(second)) is not None:
                        return first, second, rows
    return None


def find_crossed(
    provenances: Sequence[Provenance],
    is_of_all_rows: Callable[[Gradient], bool],
    is_single: Callable[[Rows], bool],
) -> tuple[Gradient, Gradient, Rows] | None:
    """Returns two gradients of single rows that an operator may not take together.

    The operator is not linear in them. They are by one value, of unlike rows; or it is
    one gradient, twice, with several rows side by side. Gradients of halves of a batch,
    say, may meet: on each rank they are of that half of its rows.

    Args:
        provenances: the provenance of each operand.
        is_of_all_rows: returns whether a gradient is of all rows there are.
        is_single: returns whether rows are a single one of several, or chosen one by
            one.
    """
    for x in provenances:
        for g in x.gradients:
            if (
                g.stacked is not None
                and not g.is_changed
                and any(map(is_single, g.rows))
            ):
                return g, g, min(g.rows, key=str)
    for some, others in combinations(provenances, 2):
        for first in some.gradients - others.gradients:
            for second in others.gradients - some.gradients:
                rows = (
                    first.unlike_rows(second)
                    if first.variable == second.variable
                    else None
                )
                may_meet = (
                    is_of_all_rows(first)
                    or is_of_all_rows(second)
                    or (first.is_loss and second.is_loss)
                )
                if (
                    rows is not None
                    and not may_meet
                    and any(map(is_single, first.rows))
                ):
                    return first, second, rows
    return None


# By operator, which of its tensors it is linear in, if the others are constants; None:
# in all of them. Of lists it is told by what it does at each place.
_LINEAR_OPERANDS: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        [
            "add", "sub", "rsub", "neg", "clone", "copy", "_to_copy", "to", "detach",
            "alias", "lift_fresh", "contiguous", "type_as", "sum", "mean", "cumsum",
            "cat", "stack", "flip", "roll", "repeat", "index_put", "index_add",
            "scatter", "scatter_add", "select_scatter", "slice_scatter", "tril",
            "triu", "constant_pad_nd", "zero", "conj_physical",
        ]
    ),
    "div": (0,), "true_divide": (0,), "addcdiv": (0, 1), "lerp": (0, 1),
    "where": (1, 2), "masked_fill": (0, 2), "index": (0,), "index_select": (0,),
    "gather": (0,), "take": (0,),
}  # fmt: skip
# By operator, from which of its tensors on it is linear in each one by itself.
_FIRST_FACTOR = {
    **dict.fromkeys(["mul", "mm", "bmm", "mv", "dot", "vdot", "matmul"], 0),
    **dict.fromkeys(["addcmul", "addmm", "addmv", "addr", "baddbmm", "addbmm"], 1),
}


def is_nonlinear(
    op: OperatorClass, arguments: Sequence[Any], marked: Sequence[bool]
) -> bool | None:
    """Returns whether an operator is not jointly linear in its marked tensors.

    None where its result does not depend on their values, or only on whether they are
    finite: a mean is finite if all rows are.

    Args:
        op: the operator's class.
        arguments: its arguments.
        marked: by tensor among these, whether a gradient is in it.
    """
    name = op.name.removeprefix("_foreach_")
    if (
        op.alike
        or op.factory
        or name in _COMPARISONS
        and _compares_no_number(arguments)
    ):
        return None
    if name in _FIRST_FACTOR:
        return sum(marked[_FIRST_FACTOR[name] :]) > 1
    if op.picks:
        return False
    linear_positions = _LINEAR_OPERANDS.get(name, ())
    if linear_positions is None:
        return False
    return any(
        is_marked for i, is_marked in enumerate(marked) if i not in linear_positions
    )


def linear_factors(
    op: OperatorClass, arguments: Sequence[Any], tensors: Sequence[Tensor]
) -> list[float | None]:
    """Returns, by tensor, how many times an operator adds it; None where unknown."""
    name = op.name.removeprefix("_foreach_")
    numbers = [x for x in arguments if isinstance(x, int | float)]
    factors_by_name: dict[str, list[float | None]] = {}
    if len(tensors) == 2:
        factor = float(numbers[0]) if numbers else 1.0
        factors_by_name = {"add": [1.0, factor], "sub": [1.0, -factor]}
    elif len(tensors) == 1 and numbers:
        factor = float(numbers[0])
        factors_by_name = {"add": [1.0], "sub": [1.0], "rsub": [-1.0], "mul": [factor]}
        factors_by_name["div"] = [1 / factor if factor else None]
    elif len(tensors) == 1:
        factors_by_name = {"neg": [-1.0], "sum": [1.0], **dict.fromkeys(COPIES, [1.0])}
    return factors_by_name.get(name, [None] * len(tensors))


_COMPARISONS = {"eq", "ne", "isinf", "isnan", "isposinf", "isneginf"}


def _compares_no_number(arguments: Sequence[Any]) -> bool:
    """Returns whether a value is compared with itself, or with infinity: no numbers."""
    first, *others = arguments
    return all(x is first or isinstance(x, float) and math.isinf(x) for x in others)


def copies_rows(op: OperatorClass, arguments: Sequence[Any]) -> bool:
    """Returns whether an operator copies some of the rows of its first tensor."""
    if op.name in ("index_select", "gather"):
        return arguments[0].ndim > 0 and arguments[1] % arguments[0].ndim == 0
    if op.name == "index":
        return isinstance(arguments[1], Tensor)
    return op.name in ("take", "masked_select")

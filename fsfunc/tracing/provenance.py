"""Provenance of values: rows of own tensors, and gradients averaged over ranks.

Under ``shard`` a gradient by parameters is the mean over the ranks. One that is taken
of row i, in a loop over rows, is that of row i of every rank. What is linear in such
gradients may be summed over the rows all the same. What is not (a norm, a clipped
gradient, the loss of a task's own step) would be that of a mean, where on one device it
is that of a row; it may be, as long as nothing sums it up over the rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

from torch import Tensor

from fsfunc.tracing.operators import COPIES, OperatorClass


class Rows(NamedTuple):
    """Some, not all, rows of an own tensor.

    Args:
        of: which tensor, as a value; ``name``: what to call it; ``at``: which rows.
    """

    of: int
    name: str
    at: Any


@dataclass(frozen=True)
class Gradient:
    """A gradient that is the ranks' mean, as what was made of it remembers it.

    Args:
        by: which value it is by.
        rows: the rows of own tensors that it was taken of.
        shares: of a sum, how much of which rows there is; None where nobody knows.
        stacked: the stride and size of the dim along which those of several rows lie
            side by side, if they do; of no dim that is left, where it is not known.
        loss: whether it is the loss itself, a mean as its gradient is.
        bent: whether an operator has changed it that is not linear; ``where``: which.
    """

    by: int
    rows: frozenset[Rows]
    shares: Shares | None = None
    stacked: Along | None = None
    loss: bool = False
    bent: bool = False
    where: str = field(default="", compare=False)

    def other_rows(self, other: Gradient) -> Rows | None:
        """Some rows, where both are of one tensor, but not of the same rows of it.

        Or not of as much of each.
        """
        for rows in self.rows ^ other.rows:
            both = (any(r.of == rows.of for r in one.rows) for one in (self, other))
            if all(both):
                return rows
        if self.shares is None or other.shares is None:
            # Of a multiple that nobody knows: rows of tensors that may be the same ones
            # in another order, as flipped or rolled.
            unlike = bool(other.rows) and self.rows != other.rows
        else:
            unlike = not _proportional(self.shares, other.shares)
        return min(self.rows, key=str) if self.rows and unlike else None


Along = tuple[int, int]  # a dim by its stride and size: views move it, and keep these
UNKNOWN: Along = (0, 0)
Shares = frozenset[tuple[frozenset[Rows], float]]


def _proportional(some: Shares, others: Shares) -> bool:
    one, other = dict(some), dict(others)
    if one.keys() != other.keys():
        return False
    most = max(other, key=lambda k: abs(other[k]))
    ratio, near = one[most] / (other[most] or 1), 1e-6 * max(map(abs, one.values()))
    return all(abs(one[k] - ratio * other[k]) <= near for k in one)


class Provenance(NamedTuple):
    """The rows and the averaged gradients that a value depends on."""

    rows: frozenset[Rows] = frozenset()
    gradients: frozenset[Gradient] = frozenset()

    def scaled(self, factor: float | None) -> Provenance:
        """That of so many times it; None: of something else that is linear in it."""
        if factor == 1 or all(g.shares is None for g in self.gradients):
            return self
        found = (replace(g, shares=_times(g.shares, factor)) for g in self.gradients)
        return self._replace(gradients=frozenset(found))

    def lying(self, how: Callable[[Along], Along | None]) -> Provenance:
        """That of its elements in another order, or summed.

        Args:
            how: from where several rows lie to where they do then; None: to one sum.
        """
        if all(g.stacked is None for g in self.gradients):
            return self
        found = (
            g if g.stacked is None else replace(g, stacked=how(g.stacked))
            for g in self.gradients
        )
        return self._replace(gradients=frozenset(found))

    def changed(self, where: str) -> Provenance:
        """That of a function of it that is not linear."""
        if all(g.bent for g in self.gradients):
            return self
        bent = (
            g if g.bent else replace(g, bent=True, where=where) for g in self.gradients
        )
        return self._replace(gradients=frozenset(bent))


NOTHING = Provenance()


def _times(shares: Shares | None, factor: float | None) -> Shares | None:
    if shares is None or factor is None:
        return None
    return frozenset((rows, much * factor) for rows, much in shares)


def joined(given: Iterable[Provenance], stacked: Along | None = None) -> Provenance:
    """That of what is made of several values: sums of gradients are one gradient.

    Args:
        stacked: where they are put side by side, if they are.
    """
    some = [x for x in given if x is not NOTHING]
    if len(some) < 2:
        return some[0] if some else NOTHING
    rows = frozenset[Rows]().union(*(x.rows for x in some))
    gradients = frozenset[Gradient]().union(*(x.gradients for x in some))
    if len(gradients) < 2:
        return Provenance(rows, gradients)
    found = {g for g in gradients if g.bent}
    for by in {g.by for g in gradients if not g.bent}:
        terms = [g for x in some for g in x.gradients if g.by == by and not g.bent]
        found.add(_sum(by, terms, stacked))
    return Provenance(rows, frozenset(found))


def _sum(by: int, terms: Sequence[Gradient], stacked: Along | None) -> Gradient:
    """The gradient that a sum of several is, or that lie side by side."""
    rows = frozenset[Rows]().union(*(g.rows for g in terms))
    before = next((g.stacked for g in terms if g.stacked is not None), None)
    loss = all(g.loss for g in terms)
    if stacked is not None and not loss:
        if any(terms[0].other_rows(g) for g in terms):
            before = stacked
    if stacked is not None or any(g.shares is None for g in terms):
        return Gradient(by, rows, stacked=before, loss=loss)
    shares: dict[frozenset[Rows], float] = defaultdict(float)
    for g in terms:
        for part, much in g.shares or ():
            shares[part] += much
    return Gradient(by, rows, frozenset(shares.items()), before, loss)


def met(given: Iterable[Provenance]) -> tuple[Gradient, Gradient, Rows] | None:
    """Two gradients by one value, and rows that only one is of: neither is linear.

    Not those of which one value is made already: they have met before.
    """
    each = {x.gradients for x in given if any(g.bent for g in x.gradients)}
    for some, others in combinations(each, 2):
        for one in some - others:
            for other in others - some:
                if one.bent and other.bent and one.by == other.by:
                    if (rows := one.other_rows(other)) is not None:
                        return one, other, rows
    return None


def crossed(
    given: Sequence[Provenance],
    whole: Callable[[Gradient], bool],
    lone: Callable[[Rows], bool],
) -> tuple[Gradient, Gradient, Rows] | None:
    """Two gradients by one value, of single rows, that something not linear takes.

    Or several that lie side by side. Halves of a batch are halves on every rank.

    Args:
        whole: whether a gradient is of all rows there are.
        lone: whether rows are one alone, of several, or chosen one by one.
    """
    for x in given:
        for g in x.gradients:
            if g.stacked is not None and not g.bent and any(map(lone, g.rows)):
                return g, g, min(g.rows, key=str)
    for some, others in combinations(given, 2):
        for one in some.gradients - others.gradients:
            for other in others.gradients - some.gradients:
                rows = one.other_rows(other) if one.by == other.by else None
                known = whole(one) or whole(other) or (one.loss and other.loss)
                if rows is not None and not known and any(map(lone, one.rows)):
                    return one, other, rows
    return None


# By operator, which of its tensors it is linear in, if the others are constants; None:
# in all of them. Of lists it is told by what it does at each place.
_LINEAR: dict[str, tuple[int, ...] | None] = {
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
_FACTORS = {
    **dict.fromkeys(["mul", "mm", "bmm", "mv", "dot", "vdot", "matmul"], 0),
    **dict.fromkeys(["addcmul", "addmm", "addmv", "addr", "baddbmm", "addbmm"], 1),
}


def nonlinear(
    op: OperatorClass, given: Sequence[Any], marked: Sequence[bool]
) -> bool | None:
    """True unless an operator is jointly linear in the marked ones of its tensors.

    None: what it makes has nothing to do with their values, or tells of them only
    whether they are finite, as the mean does of each row.
    """
    name = op.name.removeprefix("_foreach_")
    if op.alike or op.factory or name in _EQUALS and _asks_for_no_number(given):
        return None
    if name in _FACTORS:
        return sum(marked[_FACTORS[name] :]) > 1
    if op.picks:
        return False
    places = _LINEAR.get(name, ())
    if places is None:
        return False
    return any(m for i, m in enumerate(marked) if i not in places)


def factors(
    op: OperatorClass, given: Sequence[Any], tensors: Sequence[Tensor]
) -> list[float | None]:
    """Multiples in which an operator adds each of its tensors; None if unknown."""
    name = op.name.removeprefix("_foreach_")
    numbers = [x for x in given if isinstance(x, int | float)]
    ways: dict[str, list[float | None]] = {}
    if len(tensors) == 2:
        by = float(numbers[0]) if numbers else 1.0
        ways = {"add": [1.0, by], "sub": [1.0, -by]}
    elif len(tensors) == 1 and numbers:
        by = float(numbers[0])
        ways = {"add": [1.0], "sub": [1.0], "rsub": [-1.0], "mul": [by]}
        ways["div"] = [1 / by if by else None]
    elif len(tensors) == 1:
        ways = {"neg": [-1.0], "sum": [1.0], **dict.fromkeys(COPIES, [1.0])}
    return ways.get(name, [None] * len(tensors))


_EQUALS = {"eq", "ne", "isinf", "isnan", "isposinf", "isneginf"}


def _asks_for_no_number(given: Sequence[Any]) -> bool:
    """True if a value is compared with itself, or with infinity."""
    first, *rest = given
    return all(x is first or isinstance(x, float) and math.isinf(x) for x in rest)


def takes_rows(op: OperatorClass, given: Sequence[Any]) -> bool:
    """True if an operator copies some of the rows of its first tensor."""
    if op.name in ("index_select", "gather"):
        return given[0].ndim > 0 and given[1] % given[0].ndim == 0
    if op.name == "index":
        return isinstance(given[1], Tensor)
    return op.name in ("take", "masked_select")

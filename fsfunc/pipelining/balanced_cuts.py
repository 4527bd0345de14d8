"""Balanced cuts of a chain of calls, by what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf, isfinite

Number = int | float


def balance(costs: Sequence[Number], n: int) -> list[int]:
    """Numbers of consecutive calls for ``n`` stages, the largest stage's cost least.

    Among the cuts whose most costly stage costs least, the most even one: least sum of
    squares of the stages' costs, then of their counts.

    ==========================  =================================================
    FairScale                   here
    ==========================  =================================================
    ``balance_by_time``         ``balance(times, n)``
    ``balance_by_size``         ``balance([c.activations + 2 * c.weights
                                for c in program(...).calls], n)``
    ``auto_shard``              ``balance([c.weights for c in ....calls], n)``
    ``pipeline``'s default      ``balance([c.flops for c in ....calls], n)``
    ==========================  =================================================

    Args:
        costs: of each call, in any unit; not negative.
        n: the number of stages; each gets at least one call.

    Raises:
        ValueError: fewer calls than stages, or a negative or infinite cost.

    Cost: O(n k^2) for k calls at most: stages that cost too much are not looked into.

    Source: Bárány and Grinberg, Block partitions of sequences (2015), the problem.

    >>> balance([1, 2, 3, 4, 5, 6], 3)
    [3, 2, 1]
    """
    if not 1 <= n <= len(costs) or not all(isfinite(x) and x >= 0 for x in costs):
        raise ValueError(
            f"balance({costs}, {n}): it takes finite costs, not below 0, of each call, "
            "and at least one call for each of at least one stage"
        )
    spent = [*accumulate(costs, initial=0)]
    (limit, _), _ = _best(spent, n, inf, _largest)
    return _best(spent, n, limit, _evenness)[1]


Value = tuple[Number, int]  # of a cut: what is to be least


def _largest(before: Value, cost: Number, count: int) -> Value:
    """The cost of the largest stage, with one more of this cost and count."""
    return max(before[0], cost), 0


def _evenness(before: Value, cost: Number, count: int) -> Value:
    """(sum of squared costs, sum of squared counts), with one more stage."""
    return before[0] + cost**2, before[1] + count**2


def _best(
    spent: list[Number],
    n: int,
    limit: Number,
    value: Callable[[Value, Number, int], Value],
) -> tuple[Value, list[int]]:
    """The least value of a cut whose stages keep to the limits, and that cut.

    ``best[i]`` is that of the first i calls in so many stages. The cost of the last
    stage grows as it begins earlier: no further than it alone outweighs the best.
    """
    k, nothing = len(spent) - 1, (0, 0)
    best: list[Value] = [nothing, *([(inf, 0)] * k)]
    begins: list[list[int]] = []
    for stage in range(1, n + 1):
        longer: list[Value] = [(inf, 0)] * (k + 1)
        begin = [0] * (k + 1)
        for i in range(stage, k + 1):
            for j in range(i - 1, stage - 2, -1):
                cost = spent[i] - spent[j]
                if cost > limit or value(nothing, cost, 0) >= longer[i]:
                    break
                found = value(best[j], cost, i - j)
                if found < longer[i]:
                    longer[i], begin[i] = found, j
        best = longer
        begins.append(begin)
    counts, end = [], k
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return best[k], counts[::-1]

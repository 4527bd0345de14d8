"""Fewer cases, and all of them under FSFUNC_LONG_TESTS=1.

Of a product each value comes up, or each pair of values, by a rule that looks at no
cost; of many examples the first half is drawn.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

LONG_TESTS = os.environ.get("FSFUNC_LONG_TESTS") == "1"


def examples(count: int) -> int:
    """Return how many of so many examples a property draws: half of them."""
    return count if LONG_TESTS else count // 2


def by_turns(
    rows: Iterable[Any], values: Sequence[Any], each: int = 1, every: bool = LONG_TESTS
) -> list[tuple]:
    """Return (row, value): every row with `each` of the values, which take turns."""
    rows, count = list(rows), len(values)
    if every:
        return list(itertools.product(rows, values))
    return [
        (row, values[(i + k * count // each) % count])
        for i, row in enumerate(rows)
        for k in range(each)
    ]


def pairs(*values: Sequence[Any], every: bool = LONG_TESTS) -> list[tuple]:
    """Return rows of one value each, in which any two values stand together once.

    Row by row it takes the one, of the whole product, with most pairs that are new.
    """
    product = list(itertools.product(*(range(len(of)) for of in values)))
    chosen = product
    if not every:
        left = {pair for row in product for pair in _pairs(row)}
        chosen = []
        while left:
            row = max(product, key=lambda row: len(left.intersection(_pairs(row))))
            left -= _pairs(row)
            chosen.append(row)
    return [tuple(of[i] for of, i in zip(values, row, strict=True)) for row in chosen]


def _pairs(row: Sequence[int]) -> set[tuple]:
    return set(itertools.combinations(enumerate(row), 2))

"""Names that differ in a number alone, said as one: ``blocks/0-999/up``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

__all__ = ["alike", "counted", "together"]

Row = TypeVar("Row")
_MOST = 3  # ranges of one number; more are said as *


def alike(
    rows: Iterable[tuple[str, Hashable, Row]],
) -> list[tuple[list[str], list[Row]]]:
    """Rows whose names differ in numbers alone and whose keys are equal, together.

    Args:
        rows: (name, key, row).

    Returns:
        the names and the rows of each group, in the order of first appearance.

    >>> rows = [("b/0/w", 4, "x"), ("b/0/v", 4, "y"), ("b/1/w", 4, "z")]
    >>> [(together(names), found) for names, found in alike(rows)]
    [('b/0-1/w', ['x', 'z']), ('b/0/v', ['y'])]
    """
    found: dict[Hashable, tuple[list[str], list[Row]]] = {}
    for name, key, row in rows:
        pattern = tuple("*" if c.isdecimal() else c for c in name.split("/"))
        names, group = found.setdefault((pattern, key), ([], []))
        names.append(name)
        group.append(row)
    return list(found.values())


def together(names: Sequence[str]) -> str:
    """One name for several that differ in numbers alone.

    >>> together(["blocks/0/up"]), together([f"blocks/{i}/up" for i in (0, 1, 2, 7)])
    ('blocks/0/up', 'blocks/0-2,7/up')
    >>> together(["a/0/b/1", "a/1/b/0"])
    'a/*/b/*'
    """
    columns = list(
        zip(*(name.split("/") for name in dict.fromkeys(names)), strict=True)
    )
    said, count = [], 1
    for column in columns:
        numbers = sorted({int(c) for c in column}) if column[0].isdecimal() else []
        count *= max(len(numbers), 1)
        said.append(_ranges(numbers) if numbers else column[0])
    if count != len(set(names)):  # not all pairs of their numbers are there
        varies = [len(set(column)) > 1 for column in columns]
        said = ["*" if v else s for s, v in zip(said, varies, strict=True)]
    return "/".join(said)


def counted(names: Sequence[str], nothing: str = "") -> str:
    """:func:`together` and how many they are; ``nothing`` where their name is "".

    >>> counted(["b/0", "b/1"]), counted(["b/0"]), counted([""], "(none)")
    ('b/0-1 ×2', 'b/0', '(none)')
    """
    times = f" ×{len(names)}" if len(names) > 1 else ""
    return f"{together(names) or nothing}{times}"


def _ranges(numbers: list[int]) -> str:
    """``0-2,7``."""
    found = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        ends = [number for _, number in run]
        found.append(str(ends[0]) if len(ends) == 1 else f"{ends[0]}-{ends[-1]}")
    return ",".join(found) if len(found) <= _MOST else "*"

"""Folding of lines and names that repeat with numbers counting up.

A program of 48 equal layers prints as one: its lines by `fold_repeats`, the leaves in
its tables by `group_alike` and `name_group` (``blocks/0-47/up ×48``).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

# Numbers of calls, of results outside units, of list items: all may count up.
_COUNTS = re.compile(r"((?<=[%/])\d+|(?<=\bg)\d+)\b")
_LEAST = 3  # repeats that are worth folding
_LONGEST = 32  # lines that are tried as one repeat

_Line = tuple[tuple[str, ...], tuple[int, ...]]  # the text around numbers; the numbers


def fold_repeats(lines: Sequence[str]) -> list[str]:
    """Returns lines, of blocks that repeat with numbers counting up the first alone.

    A number that counts from a to b is shown as ``a-b``, and at the end how often:

    >>> lines = [f"%{i + 1} = f(p/{i}, %{i})" for i in range(4)]
    >>> print("\\n".join(fold_repeats(lines)))
    %1-4 = f(p/0-3, %0-3)  x4

    A block of several lines is bracketed, with the count after its first:

    >>> lines = [s for i in range(3) for s in (f"  g{i} = neg(x)", f"%{i} = f(g{i})")]
    >>> print("\\n".join(fold_repeats(lines)))
    [ g0-2 = neg(x)  x3
    [%0-2 = f(g0-2)
    """
    parsed = [_parse(line) for line in lines]
    folded: list[str] = []
    i = 0
    while i < len(lines):
        period, times = _best_repeat(parsed, i)
        if times < _LEAST:
            folded.append(lines[i])
            i += 1
            continue
        last = i + period * (times - 1)
        for k in range(period):
            text = _join_ranges(parsed[i + k], parsed[last + k])
            if period > 1:
                text = "[" + (text[1:] if text.startswith(" ") else text)
            folded.append(text if k else f"{text}  x{times}")
        i += period * times
    return folded


def _parse(line: str) -> _Line:
    """Returns the text around the numbers of a line, and the numbers."""
    parts = _COUNTS.split(line)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _best_repeat(lines: Sequence[_Line], i: int) -> tuple[int, int]:
    """Returns (lines in a block, how often it comes from ``i`` on) that folds most."""
    best = 1, 1
    for period in range(1, min(_LONGEST, (len(lines) - i) // _LEAST) + 1):
        times = _count_repeats(lines, i, period)
        if times >= _LEAST and period * times > best[0] * best[1]:
            best = period, times
    return best


def _count_repeats(lines: Sequence[_Line], i: int, period: int) -> int:
    """Returns how often ``period`` lines repeat from ``i`` on, counting evenly."""
    times, first_steps = 1, None
    while i + period * (times + 1) <= len(lines):
        start = i + period * (times - 1)
        steps: list[tuple[int, ...]] = []  # by which the numbers of each line grow
        for k in range(start, start + period):
            (text, numbers), (other, later_numbers) = lines[k], lines[k + period]
            if text != other:
                return times
            steps.append(
                tuple(y - x for x, y in zip(numbers, later_numbers, strict=True))
            )
        if first_steps is None:
            first_steps = steps
        if steps != first_steps or any(step < 0 for row in steps for step in row):
            return times
        times += 1
    return times


def _join_ranges(first: _Line, last: _Line) -> str:
    """Returns a line with ``a-b`` for each number that counts from a to b."""
    text = first[0][0]
    for a, b, after in zip(first[1], last[1], first[0][1:], strict=True):
        text += (str(a) if a == b else f"{a}-{b}") + after
    return text


Row = TypeVar("Row")
_MOST = 3  # ranges of one number; for more stands a *
_STEPS = re.compile(r"([/.])")  # of a path in a tree, and of a module's name


def group_alike(
    rows: Iterable[tuple[str, Hashable, Row]],
) -> list[tuple[list[str], list[Row]]]:
    """Groups rows whose names differ in numbers alone and whose keys are equal.

    Args:
        rows: (name, key, row).

    Returns:
        the names and the rows of each group, in the order of first appearance.

    >>> rows = [("b/0/w", 4, "x"), ("b/0/v", 4, "y"), ("b/1/w", 4, "z")]
    >>> [(common_name(names), group) for names, group in group_alike(rows)]
    [('b/0-1/w', ['x', 'z']), ('b/0/v', ['y'])]
    """
    groups: dict[Hashable, tuple[list[str], list[Row]]] = {}
    for name, key, row in rows:
        pattern = tuple("*" if c.isdecimal() else c for c in _STEPS.split(name))
        names, group = groups.setdefault((pattern, key), ([], []))
        names.append(name)
        group.append(row)
    return list(groups.values())


def common_name(names: Sequence[str]) -> str:
    """Returns one name for several that differ in numbers alone.

    >>> common_name(["block/0/up"]), common_name([f"block/{i}/up" for i in (0, 1, 7)])
    ('block/0/up', 'block/0-1,7/up')
    >>> common_name([f"params/model.layers.{i}.up" for i in (0, 1, 2, 10)])
    'params/model.layers.0-2,10.up'
    >>> common_name(["a/0/b/1", "a/1/b/0"])
    'a/*/b/*'
    """
    columns = list(zip(*map(_STEPS.split, dict.fromkeys(names)), strict=True))
    steps, count = [], 1
    for column in columns:
        numbers = sorted({int(c) for c in column}) if column[0].isdecimal() else []
        count *= max(len(numbers), 1)
        steps.append(_ranges(numbers) if numbers else column[0])
    if count != len(set(names)):  # not all pairs of their numbers are there
        varies = [len(set(column)) > 1 for column in columns]
        steps = ["*" if v else s for s, v in zip(steps, varies, strict=True)]
    return "".join(steps)


def name_group(names: Sequence[str], nothing: str = "") -> str:
    """Returns the common name of several, and how many they are.

    Args:
        nothing: the name where theirs is "".

    >>> name_group(["b/0", "b/1"]), name_group(["b/0"]), name_group([""], "(none)")
    ('b/0-1 ×2', 'b/0', '(none)')
    """
    times = f" ×{len(names)}" if len(names) > 1 else ""
    return f"{common_name(names) or nothing}{times}"


def fold_programs(
    rows: Iterable[tuple[str, ...]], coordinates: int | None = None
) -> list[tuple[str, ...]]:
    """Returns rows of programs, (rank, ranks alike, ...), of equal ones one row.

    Args:
        coordinates: the column of a rank's coordinates on the mesh, if there is one.

    >>> fold_programs([("0", "4", "pipe=0", "1 GB"), ("1", "4", "pipe=1", "1 GB")], 2)
    [('0-1', '8', 'pipe=0-1', '1 GB')]
    """
    named = {0, 1, coordinates}
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        key = tuple(cell for i, cell in enumerate(row) if i not in named)
        groups.setdefault(key, []).append(row)
    folded: list[tuple[str, ...]] = []
    for group in groups.values():
        cells = list(group[0])
        ranks = sorted(int(row[0]) for row in group)
        text = _ranges(ranks)
        cells[0] = f"{ranks[0]} to {ranks[-1]}" if text == "*" else text
        cells[1] = str(sum(int(row[1]) for row in group))
        if coordinates is not None:
            axes = zip(*(row[coordinates].split() for row in group), strict=True)
            cells[coordinates] = " ".join(map(_join_coordinates, axes))
        folded.append(tuple(cells))
    return folded


def _join_coordinates(parts: Sequence[str]) -> str:
    """Returns ``axis=0-3`` for the coordinates of several ranks on one axis."""
    name = parts[0].partition("=")[0]
    return f"{name}={_ranges(sorted({int(part.partition('=')[2]) for part in parts}))}"


def _ranges(numbers: list[int]) -> str:
    """Returns sorted numbers as ranges, ``0-2,7``."""
    ranges = []
    # In a run of successive numbers, number minus position is one value.
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        ends = [number for _, number in run]
        ranges.append(str(ends[0]) if len(ends) == 1 else f"{ends[0]}-{ends[-1]}")
    return ",".join(ranges) if len(ranges) <= _MOST else "*"

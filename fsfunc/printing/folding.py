"""Folding of lines and names that repeat with numbers counting up."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

# Numbers of calls, of results outside units, of list items: all may count up.
_COUNTS = re.compile(r"((?<=[%/])\d+|(?<=\bg)\d+)\b")
_LEAST = 3  # repeats that are worth folding
_LONGEST = 32  # lines that are looked at as one repeat

_Line = tuple[tuple[str, ...], tuple[int, ...]]  # the text around numbers; the numbers


def folded(lines: Sequence[str]) -> list[str]:
    """``lines``, where blocks that repeat with numbers counting up are shown once.

    A number that counts from a to b is shown as ``a-b``, and at the end how often:

    >>> print("\\n".join(folded([f"%{i + 1} = f(p/{i}, %{i})" for i in range(4)])))
    %1-4 = f(p/0-3, %0-3)  x4

    A block of several lines is bracketed, with the count after its first:

    >>> lines = [s for i in range(3) for s in (f"  g{i} = neg(x)", f"%{i} = f(g{i})")]
    >>> print("\\n".join(folded(lines)))
    [ g0-2 = neg(x)  x3
    [%0-2 = f(g0-2)
    """
    parsed = [_parsed(line) for line in lines]
    out: list[str] = []
    i = 0
    while i < len(lines):
        period, times = _repeats(parsed, i)
        if times < _LEAST:
            out.append(lines[i])
            i += 1
            continue
        last = i + period * (times - 1)
        for k in range(period):
            text = _ranged(parsed[i + k], parsed[last + k])
            if period > 1:
                text = "[" + (text[1:] if text.startswith(" ") else text)
            out.append(text if k else f"{text}  x{times}")
        i += period * times
    return out


def _parsed(line: str) -> _Line:
    parts = _COUNTS.split(line)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _repeats(lines: Sequence[_Line], i: int) -> tuple[int, int]:
    """(lines in a block, how often it comes from line ``i`` on) that folds the most."""
    best = 1, 1
    for period in range(1, min(_LONGEST, (len(lines) - i) // _LEAST) + 1):
        times = _times(lines, i, period)
        if times >= _LEAST and period * times > best[0] * best[1]:
            best = period, times
    return best


def _times(lines: Sequence[_Line], i: int, period: int) -> int:
    """The number of repeats of ``period`` lines from ``i`` on, counting evenly."""
    times, steps = 1, None
    while i + period * (times + 1) <= len(lines):
        a = i + period * (times - 1)
        found: list[tuple[int, ...]] = []
        for k in range(a, a + period):
            (text, before), (other, after) = lines[k], lines[k + period]
            if text != other:
                return times
            found.append(tuple(y - x for x, y in zip(before, after, strict=True)))
        if steps is None:
            steps = found
        if found != steps or any(step < 0 for row in found for step in row):
            return times
        times += 1
    return times


def _ranged(first: _Line, last: _Line) -> str:
    """A line with ``a-b`` for each number that counts from a to b."""
    text = first[0][0]
    for a, b, after in zip(first[1], last[1], first[0][1:], strict=True):
        text += (str(a) if a == b else f"{a}-{b}") + after
    return text


Row = TypeVar("Row")
_MOST = 3  # ranges of one number; more are said as *
_STEPS = re.compile(r"([/.])")  # of a path in a tree, and of a module's name


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
        pattern = tuple("*" if c.isdecimal() else c for c in _STEPS.split(name))
        names, group = found.setdefault((pattern, key), ([], []))
        names.append(name)
        group.append(row)
    return list(found.values())


def together(names: Sequence[str]) -> str:
    """One name for several that differ in numbers alone.

    >>> together(["blocks/0/up"]), together([f"blocks/{i}/up" for i in (0, 1, 2, 7)])
    ('blocks/0/up', 'blocks/0-2,7/up')
    >>> together([f"params/model.layers.{i}.up" for i in (0, 1, 2, 10)])
    'params/model.layers.0-2,10.up'
    >>> together(["a/0/b/1", "a/1/b/0"])
    'a/*/b/*'
    """
    columns = list(zip(*map(_STEPS.split, dict.fromkeys(names)), strict=True))
    said, count = [], 1
    for column in columns:
        numbers = sorted({int(c) for c in column}) if column[0].isdecimal() else []
        count *= max(len(numbers), 1)
        said.append(_ranges(numbers) if numbers else column[0])
    if count != len(set(names)):  # not all pairs of their numbers are there
        varies = [len(set(column)) > 1 for column in columns]
        said = ["*" if v else s for s, v in zip(said, varies, strict=True)]
    return "".join(said)


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

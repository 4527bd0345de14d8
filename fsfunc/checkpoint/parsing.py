"""JSON that anybody may have written, of bounded size, read by type.

`headers` reads headers and manifests by it; that what they say makes sense together is
for `stored.proven` to check.
"""

from __future__ import annotations

import json
from typing import Any

LONGEST = 1 << 28  # bytes of JSON: the checksums of 32 TiB
MOST = (1 << 63) - 1  # what torch can count
_ITEMS = 1 << 23  # values in it: a gigabyte of Python's objects at the most


class Wrong(ValueError):
    """A table that is invalid."""


def table_of(text: bytes) -> Said:
    """A table from JSON.

    Raises:
        Wrong: it is no table, or larger or deeper than any that is written.
    """
    if len(text) > LONGEST or sum(map(text.count, (b",", b"[", b"{"))) > _ITEMS:
        raise Wrong(f"{len(text)} bytes are more than any checkpoint says")
    try:
        found = json.loads(text.decode(), object_pairs_hook=_once)
    except RecursionError:
        raise Wrong("it is nested too deeply") from None
    except Wrong:
        raise
    except ValueError as error:
        raise Wrong(f"it is no JSON: {error}") from None
    if type(found) is not dict:
        raise Wrong("it is no table")
    return Said(found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Wrong("a table says something twice")
    return found


class Said(dict[str, Any]):
    """A JSON table, whose values are read by type.

    Every method raises `Wrong` where it is of another.

    >>> said = Said(n=3, shape=[2, 3])
    >>> said.numbers("shape"), said.number("n")
    ((2, 3), 3)
    """

    def only(self, *names: str) -> Said:
        """Itself, where it says just this."""
        if set(names) != self.keys():
            raise Wrong(f"it says {str(sorted(self))[:99]}, and not {sorted(names)}")
        return self

    def number(self, name: str) -> int:
        """A number from 0 on."""
        return number_of(self.get(name), name)

    def numbers(self, name: str) -> tuple[int, ...]:
        return numbers_of(self.get(name), name)

    def text(self, name: str) -> str:
        return _of(self.get(name), str, name)

    def row(self, name: str) -> list[Any]:
        return _of(self.get(name), list, name)

    def table(self, name: str) -> Said:
        return Said(_of(self.get(name), dict, name))

    def optional(self, name: str) -> Said:
        """A table; empty where nothing is said of it."""
        return self.table(name) if name in self else Said()

    def texts(self, name: str) -> dict[str, str]:
        """Texts by name."""
        found = self.table(name)
        return {key: found.text(key) for key in found}


def _of(x: Any, kind: type, name: str) -> Any:
    if type(x) is not kind:  # a bool is no int here
        raise Wrong(f"{name[:99]!r} is {say(x)}, and no {kind.__name__}")
    return x


def number_of(x: Any, name: str) -> int:
    """``x``, a number from 0 on."""
    if type(x) is not int or not 0 <= x <= MOST:
        raise Wrong(f"{name[:99]!r} is {say(x)}, and no number from 0 on")
    return x


def numbers_of(x: Any, name: str) -> tuple[int, ...]:
    """``x``, a list of such numbers."""
    for n in _of(x, list, name):
        if type(n) is not int or not 0 <= n <= MOST:
            number_of(n, name)  # which raises
    return tuple(x)


def say(x: Any) -> str:
    """A value of JSON, in a few letters however large it is."""
    if isinstance(x, dict | list):
        return f"a {type(x).__name__} of {len(x)}"
    return repr(x)[:99]

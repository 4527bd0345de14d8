"""JSON that anybody may have written, of bounded size, read by type.

`headers` reads a file's header, the manifest and an index by it. A checkpoint may come
from anywhere, so its JSON is limited before it is parsed, and each entry is read with
the type that it must have. Whether the entries make sense together is for
`stored.validate` to check.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

_T = TypeVar("_T")

MAX_JSON_BYTES = 1 << 28  # the checksums of 32 TiB
MAX_INT = (1 << 63) - 1  # what torch can count
_MAX_ITEMS = 1 << 23  # values in a table: a gigabyte of Python's objects at the most


class InvalidTable(ValueError):
    """An error: a table does not say what it must, or says it in another type."""


def parse_table(text: bytes) -> JsonTable:
    """Parses a table from JSON.

    Raises:
        InvalidTable: it is no table, or larger or deeper than any that is written.
    """
    # Counted before parsing, as a short text can be millions of objects: the first item
    # of each table or list follows its bracket, and each other one a comma.
    if (
        len(text) > MAX_JSON_BYTES
        or sum(map(text.count, (b",", b"[", b"{"))) > _MAX_ITEMS
    ):
        raise InvalidTable(f"{len(text)} bytes are more than any checkpoint says")
    try:
        table = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    except RecursionError:
        raise InvalidTable("it is nested too deeply") from None
    except InvalidTable:
        raise  # itself a ValueError
    except ValueError as error:
        raise InvalidTable(f"it is no JSON: {error}") from None
    if type(table) is not dict:
        raise InvalidTable("it is no table")
    return JsonTable(table)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of a JSON object, in which no key occurs twice.

    Python takes the last of two, and another reader may take the first.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        raise InvalidTable("a table says something twice")
    return table


class JsonTable(dict[str, Any]):
    """A JSON table, whose values are read by type.

    Every method raises `InvalidTable` where the value is of another type, or missing.

    >>> table = JsonTable(n=3, shape=[2, 3])
    >>> table.numbers("shape"), table.number("n")
    ((2, 3), 3)
    """

    def with_keys(self, *names: str) -> JsonTable:
        """Returns the table itself; raises where it has other keys than these."""
        if set(names) != self.keys():
            raise InvalidTable(
                f"it says {str(sorted(self))[:99]}, and not {sorted(names)}"
            )
        return self

    def number(self, name: str) -> int:
        """Returns an integer from 0 on."""
        return checked_number(self.get(name), name)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Returns a list of integers from 0 on."""
        return checked_numbers(self.get(name), name)

    def text(self, name: str) -> str:
        return _check_type(self.get(name), str, name)

    def array(self, name: str) -> list[Any]:
        return _check_type(self.get(name), list, name)

    def table(self, name: str) -> JsonTable:
        return JsonTable(_check_type(self.get(name), dict, name))

    def optional_table(self, name: str) -> JsonTable:
        """Returns a table, which is empty where the key is missing."""
        return self.table(name) if name in self else JsonTable()

    def texts(self, name: str) -> dict[str, str]:
        """Returns a table whose values are all texts."""
        table = self.table(name)
        return {key: table.text(key) for key in table}


def _check_type(value: Any, expected: type[_T], name: str) -> _T:
    """Returns ``value``, which must be of the type ``expected``."""
    if type(value) is not expected:  # a bool is no int here
        raise InvalidTable(
            f"{name[:99]!r} is {abbreviate(value)}, and no {expected.__name__}"
        )
    return value


def checked_number(value: Any, name: str) -> int:
    """Returns ``value``, which must be an integer from 0 on."""
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise InvalidTable(
            f"{name[:99]!r} is {abbreviate(value)}, and no number from 0 on"
        )
    return value


def checked_numbers(value: Any, name: str) -> tuple[int, ...]:
    """Returns ``value``, which must be a list of integers from 0 on."""
    # Tested in line: a manifest has millions of numbers, and a call for each is slow.
    for n in _check_type(value, list, name):
        if type(n) is not int or not 0 <= n <= MAX_INT:
            checked_number(n, name)  # which raises
    return tuple(value)


def abbreviate(value: Any) -> str:
    """Describes a JSON value in a few letters, however large it is."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:99]

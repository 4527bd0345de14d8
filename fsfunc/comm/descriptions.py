"""Descriptions of values, equal in every process, to show and to compare.

Transforms and optimizers have a ``called`` and a ``configuration``, (name, value)
pairs. Tensors are described by their values, functions by their names, and everything
else by its repr.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from fsfunc.comm.comparison import Lines, checksums, has_values
from fsfunc.sharded.layout import describe

Ask = Callable[[str, Any], Lines]  # (name, function) -> lines of its results

_NUMBERS = (int, float, bool, type(None))
_FEW = 16  # elements of a tensor that are printed; else it is a checksum


def stated(value: Any) -> str:
    """A description of a value, without addresses and the like.

    >>> stated(len), stated(object()), stated({"lr": (0.1,)})
    ('<function len>', '<object object>', "{'lr': (0.1,)}")
    """
    if type(value) in _NUMBERS:
        return repr(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if type(value) in (list, tuple):
        inside = ", ".join(map(stated, value))
        if type(value) is list:
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{stated(k)}: {stated(v)}" for k, v in value.items())
        return f"{{{inside}}}"
    if (parts := _parts(value)) is not None:
        kind, items = parts
        return f"{kind}({', '.join(f'{k}={stated(v)}' for k, v in items)})"
    if name := getattr(value, "__qualname__", None):
        kind = "class" if isinstance(value, type) else "function"
        return f"<{kind} {name}>"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def told(name: str, value: Any, ask: Ask = lambda name, value: ()) -> Lines:
    """The same, a line for each part, by path.

    Args:
        ask: gives further lines for a function, by its name: results of calling it.

    >>> told("rates", {"first": 0.1, "others": (0.2,)})[1:]
    [('rates/first', '0.1'), ('rates/others', 'tuple of 1'), ('rates/others/0', '0.2')]
    """
    if type(value) in _NUMBERS:
        return [(name, repr(value))]
    kind, items = _parts(value) or ("", None)
    if items is None and isinstance(value, Mapping):
        items = [(str(key), value[key]) for key in sorted(value, key=str)]
    elif items is None and type(value) in (list, tuple):
        items = [(str(i), x) for i, x in enumerate(value)]
    if items is None:
        more = ask(name.rpartition("/")[2], value) if callable(value) else ()
        return [(name, stated(value)), *((f"{name} {k}", said) for k, said in more)]
    kind = kind or f"{type(value).__name__} of {len(items)}"
    below = [told(f"{name}/{key}", x, ask) for key, x in items]
    return [(name, kind), *chain.from_iterable(below)]


def _parts(value: Any) -> tuple[str, list[tuple[str, Any]]] | None:
    """The name and the parts of a value that has a ``configuration``, or None."""
    if isinstance(value, functools.partial):
        given = [(str(i), x) for i, x in enumerate(value.args)]
        return stated(value.func), [*given, *value.keywords.items()]
    made = getattr(value, "configuration", None)
    if isinstance(value, type) or not isinstance(made, tuple | list):
        return None
    return getattr(value, "called", "") or type(value).__name__, list(made)


def _tensor(x: Tensor) -> str:
    """A tensor by its values; by a checksum of many; by its shape without data."""
    kind = f"tensor {describe(x.shape, x.dtype)}"
    if not has_values(x):
        return kind
    if x.numel() <= _FEW:
        return f"{kind} {x.tolist()}"
    return f"{kind} of checksum {checksums([x])[0] % 2**64:016x}"

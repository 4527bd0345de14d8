"""Python's own state that functions read, as far as it can be seen from outside.

A plan takes rounds of a loop for equal only where nothing of this changed in one: a
count, a flag, an iterator or a list that a loss or a unit closes over.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pickle import dumps
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor

from fsfunc.core.units import Unit
from fsfunc.runtime.generators import other_states

_FOREIGN = {"torch", "fsfunc", "numpy", *sys.stdlib_module_names} - {"__main__"}
_SIMPLE = (int, float, complex, str, bytes, type(None))
_MOST = 4096  # values that are looked at
_LARGE = 1 << 16  # bytes of an array that is not


def hidden_state(functions: Iterable[Callable[..., Any]]) -> list[Any]:
    """The values that functions close over, and where Python's generators stand.

    Two that differ say that something changed; equal ones say so of what is in cells,
    globals, attributes, and lists, dicts and sets of these.

    >>> count = [0]
    >>> def f(x):
    ...     count[0] += 1
    ...     return x
    >>> before = hidden_state([f])
    >>> f(1), hidden_state([f]) == before
    (1, False)
    """
    seen, todo = dict[int, Any](), list[Any](functions)
    said: list[Any] = [dumps(state) for _, state in other_states()]
    while todo and len(seen) < _MOST:
        x = todo.pop()
        if isinstance(x, _SIMPLE):
            said.append(x)
        elif id(x) not in seen:
            seen[id(x)] = x
            fact, more = _facts(x)
            said.append((id(x), fact))
            todo += more
    return said


def _facts(x: Any) -> tuple[Any, list[Any]]:
    """The part of a value that changes, and the values within it."""
    if isinstance(x, Tensor):
        return None if x.is_inference() else x._version, []
    if isinstance(x, Unit):  # what it has learned of its calls is its own
        return None, [x.fn]
    if isinstance(x, FunctionType):
        return None, _within(x)
    of = type(x)  # what a value itself says it has may be computed
    if hasattr(of, "__self__"):  # a method, of any language
        return None, [x.__self__, getattr(x, "__func__", None)]
    if isinstance(x, functools.partial):
        return None, [x.func, x.args, x.keywords]
    if isinstance(x, dict):
        return len(x), [*x, *x.values()]
    if isinstance(x, list | tuple | set | frozenset | deque):
        return len(x), list(x)
    if hasattr(of, "__next__"):  # of others nothing shows how far they are
        return repr(x) if isinstance(x, itertools.count) else object(), []
    if isinstance(x, random.Random):
        return x.getstate(), []
    if hasattr(of, "bit_generator"):  # of numpy
        return dumps(x.bit_generator.state), []
    if hasattr(of, "tobytes"):
        return x.tobytes() if getattr(x, "nbytes", 0) < _LARGE else None, []
    if isinstance(x, ModuleType) or _root(of) == "fsfunc":
        return None, []
    if isinstance(x, type) and _root(x) in _FOREIGN:
        return None, []
    kept = dict(vars(x)) if isinstance(x, type) or of.__dictoffset__ else {}
    slots = [getattr(x, n, None) for n in getattr(of, "__slots__", ())]
    return len(kept), [of, *kept.values(), *slots]


def _within(fn: FunctionType) -> list[Any]:
    """The values that a function reads besides its arguments."""
    cells = [cell.cell_contents for cell in fn.__closure__ or () if _is_set(cell)]
    found = [*cells, getattr(fn, "__wrapped__", None), fn.__defaults__]
    found.append(fn.__kwdefaults__)
    if _root(fn) not in _FOREIGN:
        names, known = _names(fn.__code__), fn.__globals__
        named = [known[n] for n in names if n in known]
        modules = [vars(x) for x in named if isinstance(x, ModuleType)]
        found += [*named, *(m[n] for m in modules for n in names if n in m)]
    return found


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names of globals, and of attributes, in a function and those within it."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return tuple(sorted({*code.co_names, *(n for c in inner for n in _names(c))}))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # its name has no value yet
        return False


def _root(of: Any) -> str:
    """The package that a class, or a function, is of."""
    module = of.__module__
    return module.partition(".")[0] if isinstance(module, str) else "builtins"

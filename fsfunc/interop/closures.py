"""Functions that hold what a copy of their module would not: its own tensors."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fsfunc import _torch

__all__ = ["check_closures"]


def check_closures(module: nn.Module) -> None:
    """Looks at the functions kept in a module's attributes and hooks.

    A copy of a module shares its functions, and a function that has the module, or one
    of its tensors, in a cell would compute with those of the first.

    Raises:
        TypeError: one does.
    """
    names: dict[int, str] = {}
    for name, m in module.named_modules():
        names[id(m)] = name or type(module).__name__
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        names[id(x)] = name
    for name, m in module.named_modules():
        for attribute, x in _kept(m):
            held = next(_held(x, names, set(), 6, within=False), None)
            if held is not None:
                where = f"{name}.{attribute}" if name else attribute
                raise TypeError(
                    f"{where} is a function that holds {held!r} by closure, default or "
                    "global name: what is run is a copy of the module, and this would "
                    "compute with the original. Make it a method of the module's class "
                    "(or types.MethodType(function, module)), and take the module of a "
                    "hook from its first argument"
                )


def _kept(m: nn.Module) -> Iterator[tuple[str, Any]]:
    tables = [t for b in (True, False) for t in _torch.hook_tables(m, before=b)]
    for hook in (hook for table in tables for hook in table.values()):
        yield "its hook", hook
    seen = {id(table) for table in tables}
    for attribute, x in vars(m).items():
        ours = attribute in ("_parameters", "_buffers", "_modules")
        internal = attribute.endswith("_hooks") and attribute.startswith("_")
        if id(x) not in seen and not ours and not internal:
            yield attribute, x


def _held(
    x: Any, names: dict[int, str], seen: set[int], depth: int, *, within: bool
) -> Iterator[str]:
    """Names of what is held by the functions in ``x``; ``within`` one, all counts."""
    if id(x) in seen or not depth:
        return
    seen.add(id(x))
    if within and id(x) in names:
        yield names[id(x)]
        return
    inner: list[Any] = []
    if isinstance(x, types.FunctionType):
        within = True
        inner = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        inner += [c.cell_contents for c in x.__closure__ or () if not _is_empty(c)]
        for name in _globals(x.__code__):
            found = x.__globals__.get(name)
            if isinstance(found, nn.Module | Tensor) and id(found) in names:
                inner.append(found)
    elif isinstance(x, types.MethodType):  # what it is bound to is copied with it
        inner = [x.__self__] if within else []
        inner.append(x.__func__)
    elif isinstance(x, functools.partial):
        inner = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, Mapping):
        inner = list(x.values())
    elif isinstance(x, list | tuple | set | frozenset):
        inner = list(x)
    elif within and not isinstance(x, type | types.ModuleType | nn.Module | Tensor):
        inner = list(getattr(x, "__dict__", {}).values())
    for y in inner:
        yield from _held(y, names, seen, depth - 1, within=within)


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _globals(code: types.CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals(inner)

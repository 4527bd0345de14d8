"""Placeholders in a copied module: of tensors, and of units; what units are given.

A unit runs on a copy of its own. A hook that a forward hangs on modules within a unit
does not hang on that copy: what it would be given comes out of the unit, and it runs on
that.

A cache, of keys and values for one, fills as a module runs. With gradients it is left
out, as under a checkpoint: a unit that runs again would fill it twice. Without, and
where every unit runs here and once, it is handed through units as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsfunc import _torch, tree
from fsfunc.core.frames import frame
from fsfunc.sharded.leaf import is_sharded


class Absent:
    """Placeholder of a tensor; any use raises."""

    __slots__ = ("name", "shape", "dtype", "__weakref__")

    def __init__(self, name: str, shape: Any = None, dtype: Any = None):
        self.name, self.shape, self.dtype = name, shape, dtype

    def __repr__(self) -> str:
        return f"Absent({self.name!r})"

    def __copy__(self) -> Absent:
        return self

    def __deepcopy__(self, _: Any) -> Absent:
        return self

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self._refuse()

    def _refuse(self) -> Any:
        raise RuntimeError(
            f"{self.name!r} is read where it is not, such as a parameter that is kept "
            "in a list: read it as the attribute that registers it"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += [y for x in given if isinstance(x, list | tuple) for y in x]
        return next(x for x in given if isinstance(x, Absent))._refuse()


def _refusing(self: Absent, *_: Any) -> Any:
    return self._refuse()


for _name in (
    "add sub mul truediv matmul pow radd rsub rmul rtruediv rmatmul "
    "getitem setitem len iter neg bool float int"
).split():
    setattr(Absent, f"__{_name}__", _refusing)


class UnitStub:
    """A unit in the place of whose forward a unit is called."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass  # not for the base to know: this is no new kind of module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        call, outer = self.__dict__["_fsfunc"]
        return call(outer, self, args, keywords)


_STUBS: dict[type, type] = {}


def make_stub(m: nn.Module, call: Callable[..., Any], outer: Any) -> None:
    """Makes ``m``, a copy's module, call ``call`` in place of its forward.

    Its class becomes one of its own class's kind, so that ``isinstance`` goes on.
    """
    cls = type(m)
    if cls not in _STUBS:
        named = {k: getattr(cls, k) for k in ("__module__", "__qualname__", "__doc__")}
        make: Any = type(cls)
        _STUBS[cls] = make(cls.__name__, (UnitStub, cls), named)
    m.__class__ = _STUBS[cls]
    m.__dict__["_fsfunc"] = call, outer
    for hooks in _torch.hook_tables(m, before=True):
        hooks.clear()  # they run inside the unit: some compute its weights


Hook = Callable[[nn.Module, Any, Any], Any]
Seen = list[tuple[str, Any, Any]]  # which module, what it was given, what it returned


class LateHooks:
    """Forward hooks within a unit that were hung there as the module ran."""

    def __init__(self, unit: nn.Module):
        inner = [(path, hook_tables(m)) for path, m in unit.named_modules() if path]
        self._known = [(path, t, [set(x) for x in t]) for path, t in inner]
        self._tables = [table for _, tables in inner for table in tables]
        self._sizes = list(map(len, self._tables))

    def found(self) -> dict[str, list[Hook]]:
        """The hooks, by the path of the module on which they hang.

        Raises:
            RuntimeError: hooks of another kind, that the unit alone could run.
        """
        found: dict[str, list[Hook]] = {}
        if list(map(len, self._tables)) == self._sizes:
            return found
        for path, tables, known in self._known:
            after, *others = (
                [hook for key, hook in table.items() if key not in before]
                for table, before in zip(tables, known, strict=True)
            )
            if any(others):
                raise RuntimeError(
                    f"the module hangs a hook on {path!r} within a unit as it runs, "
                    "which the unit alone could run: hang it there before from_module, "
                    "or make a unit of what is around both"
                )
            if after:
                found[path] = after
        return found


def hook_tables(m: nn.Module) -> list[dict[Any, Any]]:
    """The tables of a module's hooks: that of plain forward hooks first."""
    return [x for b in (False, True) for x in _torch.hook_tables(m, before=b)]


def shown_by(m: nn.Module, paths: Sequence[str]) -> Seen:
    """A list that fills as the modules of these paths run."""
    seen: Seen = []
    for path in paths:

        def note(_: Any, given: Any, out: Any, path: str = path) -> None:
            seen.append((path, given, out))

        m.get_submodule(path).register_forward_hook(note)
    return seen


def run_late(m: nn.Module, hooks: Sequence[Hook], given: Any, out: Any) -> None:
    """Runs hooks on what a module was given and returned, somewhere else.

    Raises:
        RuntimeError: one changes what the module returned, which has gone on since.
    """
    for hook in hooks:
        if hook(m, given, out) is not None:
            raise RuntimeError(
                f"a hook that was hung on a {type(m).__name__} within a unit, as the "
                "module ran, changes what it returns: hang it there before from_module"
            )


def opened(values: Any, who: str) -> bool:
    """Looks for tensors that are held out of sight.

    Returns:
        whether there are objects that hold none as yet, and may.

    Raises:
        TypeError: an object holds tensors that no tree shows: a cache of keys and
            values, for one, which a second run of the unit would fill twice.
    """
    if type(values) is Tensor:
        return False
    parts = _PARTS if isinstance(values, tuple) and len(values) == 2 else ()
    try:
        found = tree.shown(values, who, "is given, or gives,", parts, is_sharded)
    except TypeError as error:
        raise TypeError(
            f"{error}. A cache that a model fills, of keys and values, works under "
            "torch.no_grad() alone: leave use_cache at its default, or False"
        ) from error
    return not tree.are_shown(found)


_PARTS = ("args", "keywords")


def are_filled() -> bool:
    """True if a cache may be filled: no unit that is called now will run again."""
    f = frame()
    noted = f.tracer is not None and not f.tracer.fills
    again = noted or f.staged or _torch.functorch_active()
    return not (again or torch.is_grad_enabled())


def without_caches(things: Iterable[Any]) -> None:
    """Turns the cache off in the settings of a module; a call may turn it on."""
    for x in things:
        settings = getattr(x, "__dict__", {})
        if settings.get("use_cache") is True:
            settings["use_cache"] = False


class _Handed:
    """An object that goes through a unit as it is, whatever it holds."""

    __slots__ = ("object",)

    def __init__(self, object: Any):
        self.object = object

    def __call__(self) -> Any:
        return self.object


def handed(values: Any) -> Any:
    """``values``, with objects that are no trees in a hand each."""
    leaves, treedef = tree.flatten(values, is_leaf=is_sharded)
    if tree.are_shown(leaves):
        return values
    leaves = [x if tree.are_shown([x]) else _Handed(x) for x in leaves]
    return tree.unflatten(treedef, leaves)


def taken(values: Any) -> Any:
    """Undoes :func:`handed`."""
    leaves, treedef = tree.flatten(values, is_leaf=is_sharded)
    if not any(type(x) is _Handed for x in leaves):
        return values
    leaves = [x() if type(x) is _Handed else x for x in leaves]
    return tree.unflatten(treedef, leaves)

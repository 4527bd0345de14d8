"""What a copy shows of the units in it, and what it remembers of its attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Set
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from fsfunc import _torch
from fsfunc.interop.absence import Absent

__all__ = ["Attribute", "Port", "Watch", "make_port", "watched"]

Attribute = tuple[str, str]  # the path of a module in a part, and the attribute's name


class Port:
    """A unit in the place of whose forward a unit is called."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass  # not for the base to know: this is no new kind of module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        call, outer = self.__dict__["_fsfunc"]
        return call(outer, self, args, keywords)


_PORTS: dict[type, type] = {}


def make_port(m: nn.Module, call: Callable[..., Any], outer: Any) -> None:
    cls = type(m)
    if cls not in _PORTS:
        named = {k: getattr(cls, k) for k in ("__module__", "__qualname__", "__doc__")}
        make: Any = type(cls)
        _PORTS[cls] = make(cls.__name__, (Port, cls), named)
    m.__class__ = _PORTS[cls]
    m.__dict__["_fsfunc"] = call, outer
    for hooks in _torch.hook_tables(m, before=True):
        hooks.clear()  # they run inside the unit: some compute its weights


_INTERNAL = frozenset(vars(nn.Module()))


class Watch:
    """The attributes of some modules, and what containers among them hold.

    Looked at after every call, and so by a few C functions where nothing has changed.

    Args:
        modules: each with its path, those within a unit in this part left out.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]):
        self.attributes = [(path, m, dict(vars(m))) for path, m in modules]
        self.containers: list[Any] = []
        self.empty: list[Any] = []
        for _, m in modules:
            before, after = (_torch.hook_tables(m, before=b) for b in (True, False))
            own = [
                x
                for name, x in vars(m).items()
                if name not in _INTERNAL and isinstance(x, dict | list | set)
            ]
            for x in (vars(m)["_modules"], *before, *after, *own):
                (self.containers if x else self.empty).append(x)
        self.saved = [copy.copy(x) for x in self.containers]
        self.tensors = [
            (f"{path}.{name}" if path else name, x, x._version)
            for path, m in modules
            for name, x in vars(m).items()
            if isinstance(x, torch.Tensor) and not x.is_inference()
        ]
        self._views = [
            x.values() if isinstance(x, dict) else x
            for x in [*(vars(m) for _, m in modules), *self.containers]
        ]
        self._sizes = list(map(len, self._views))
        self._values = list(chain.from_iterable(self._views))

    def is_kept(self) -> bool:
        """Whether all is as it was."""
        return (
            not any(self.empty)
            and list(map(len, self._views)) == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._values))
        )

    def written(self) -> str | None:
        """A tensor among the attributes that was written in place, if one was."""
        found = (name for name, x, version in self.tensors if x._version != version)
        return next(found, None)

    def restored(self) -> Set[Attribute]:
        """Puts all back as it was; the attributes that had been set."""
        for x in self.empty:
            x.clear()
        for x, before in zip(self.containers, self.saved, strict=True):
            x.clear()
            x.extend(before) if isinstance(x, list) else x.update(before)
        found: set[Attribute] = set()
        for path, m, saved in self.attributes:
            now = vars(m)
            for name, x in now.items():
                if x is not saved.get(name, self) and not isinstance(x, Absent):
                    found.add((path, name))
            now.clear()
            now.update(saved)
        return found


def watched(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules whose attributes a call may set: none within a unit in this part."""
    found: dict[int, tuple[str, nn.Module]] = {}
    todo = [("", module)]
    while todo:
        path, m = todo.pop()
        if id(m) not in found:
            found[id(m)] = path, m
            if not isinstance(m, Port):
                for part, child in m.named_children():
                    todo.append((f"{path}.{part}" if path else part, child))
    return list(found.values())

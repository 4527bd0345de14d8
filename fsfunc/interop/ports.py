"""What a copy shows of the units in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fsfunc import _torch

__all__ = ["Port", "make_port"]


class Port:
    """A unit in the place of whose forward a unit is called."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass  # not for the base to know: this is no new kind of module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        call, outer = self.__dict__["_fsfunc"]
        return call(outer, self, args, keywords)


_PORTS: dict[type, type] = {}


def make_port(m: nn.Module, call: Callable[..., Any], outer: Any) -> None:
    """Makes ``m``, a copy's module, call ``call`` in place of its forward.

    Its class becomes one of its own class's kind, so that ``isinstance`` goes on.
    """
    cls = type(m)
    if cls not in _PORTS:
        named = {k: getattr(cls, k) for k in ("__module__", "__qualname__", "__doc__")}
        make: Any = type(cls)
        _PORTS[cls] = make(cls.__name__, (Port, cls), named)
    m.__class__ = _PORTS[cls]
    m.__dict__["_fsfunc"] = call, outer
    for hooks in _torch.hook_tables(m, before=True):
        hooks.clear()  # they run inside the unit: some compute its weights

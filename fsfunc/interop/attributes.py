"""Attributes of a copied module, compared with what they were after each call."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fsfunc import _torch
from fsfunc.interop.stubs import Absent, hook_tables

_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))
_FIXED = (
    Absent, tuple, frozenset, range, slice, torch.device, functools.partial,
    types.MethodType,
)  # fmt: skip


class Attributes:
    """The attributes of a copy's modules, and all mutable things in them.

    Args:
        module: the copy, its tables and stubs in place.
        copied: all things that were copied with it.
        units: the paths of the units within it.
        who: what messages call it.
    """

    def __init__(
        self, module: nn.Module, copied: list[Any], units: Collection[str], who: str
    ):
        self._units, self._who = units, who
        #: Whether there are things in it that cannot be put back as they were.
        self.is_closed = False
        self._modules = [(p, m, dict(vars(m))) for p, m in module.named_modules()]
        ours, owned = {id(m) for _, m, _ in self._modules}, {id(x) for x in copied}
        self._tensors: list[tuple[str, Tensor, int]] = []
        found: dict[int, tuple[str, Any]] = {}
        # Those of units first: what they share with others has their names.
        around = lambda one: not self._is_in_unit(f"{one[0]}.")  # noqa: E731
        for path, _, saved in sorted(self._modules, key=around):
            for name, x in saved.items():
                if name not in _OWN:
                    self._collect(_said(path, name), x, found, ours, owned)
        self._in_units = [x for at, x in found.values() if self._is_in_unit(at)]
        for path, m, saved in self._modules:
            parts = saved["_modules"]
            found[id(parts)] = _said(path, "_modules"), parts
            found |= {id(table): ("", table) for table in hook_tables(m)}
        self._things = [(at, x, copy.copy(x)) for at, x in found.values()]
        dicts = [vars(m) for _, m, _ in self._modules]
        self._before_units = _Snapshot(self._in_units)
        self._all = _Snapshot([*dicts, *(x for _, x, _ in self._things)])

    def _collect(
        self, at: str, x: Any, found: dict[int, Any], ours: set[int], owned: set[int]
    ) -> None:
        """Finds the mutable things in an attribute that were copied with the module."""
        if id(x) in found or id(x) in ours or isinstance(x, Absent | type):
            return
        inner: list[Any] = []
        if isinstance(x, Tensor):
            if not x.is_inference():
                self._tensors.append((at, x, x._version))
        elif isinstance(x, Mapping | list | tuple | set | frozenset | deque):
            inner = list(x.values() if isinstance(x, Mapping) else x)
            if type(x) in _CONTAINERS:
                found[id(x)] = at, x
        elif id(x) in owned and _is_plain(x):
            inner = [vars(x)]
        elif id(x) in owned and not isinstance(x, _FIXED):
            self.is_closed = True
        for y in inner:
            self._collect(at, y, found, ours, owned)

    def enter(self) -> None:
        """A unit in it is called.

        Raises:
            RuntimeError: things that units have copies of have been changed.
        """
        if self._before_units.is_kept():
            return
        shared = {id(x) for x in self._in_units}
        for at, x, before in self._things:
            if id(x) in shared and not _same(x, before):
                raise RuntimeError(self._outside(at))

    def restored(self, mutable: bool) -> str | None:
        """Restores all attributes.

        Args:
            mutable: whether the call may leave changed attributes.

        Returns:
            the reason why a changed attribute is refused, if it is.
        """
        for at, x, version in self._tensors:
            if x._version != version:
                self.is_closed = True
                return (
                    f"{self._who} writes in place into {at!r}, which is no buffer: "
                    "register it as one, and apply(..., mutable=True) returns it"
                )
        if self._all.is_kept():
            return None
        return next(filter(None, [*self._changes(mutable)]), None)

    def _changes(self, mutable: bool) -> Iterator[str | None]:
        for at, x, before in self._things:
            if not _same(x, before):
                if at.endswith("_modules"):
                    yield self._outside(at) if self._is_in_unit(at) else None
                elif at and not (mutable or _holds_settings(x, before)):
                    yield self._left(at)
                x.clear()
                x.extend(before) if isinstance(x, list | deque) else x.update(before)
        for path, m, saved in self._modules:
            own, now = _torch.tensor_tables(m)[0], vars(m)
            for name, x in now.items():
                old = saved.get(name)
                if name in _OWN or x is old or _is_of_tensors(old):
                    continue
                at = _said(path, name)
                if self._is_in_unit(at):
                    yield self._outside(at)
                elif f"{name}_orig" in own or f"{name}_v" in own:
                    continue  # weights that hooks compute are set anew in every call
                elif not (mutable or _is_setting(x)):
                    yield self._left(at)
            now.clear()
            now.update(saved)

    def _is_in_unit(self, at: str) -> bool:
        return any(at.startswith(f"{unit}.") for unit in self._units)

    def _outside(self, at: str) -> str:
        return (
            f"{self._who} sets {at} on a unit from outside, which the unit does not "
            "see: pass it to the call, or make a unit of what is around both"
        )

    def _left(self, at: str) -> str:
        way = "" if self._who != "the module" else (
            "; with mutable=True it is dropped after the call"
        )  # fmt: skip
        return (
            f"{self._who} changes {at}, which is lost after the call: return it; or "
            "make it a buffer (register_buffer), and apply(..., mutable=True) returns "
            f"it{way}"
        )


class _Snapshot:
    """The values in some containers, compared by a few C functions."""

    def __init__(self, containers: list[Any]):
        self._views = [x.values() if isinstance(x, dict) else x for x in containers]
        self._sizes = list(map(len, self._views))
        self._values = list(chain.from_iterable(self._views))

    def is_kept(self) -> bool:
        return list(map(len, self._views)) == self._sizes and all(
            map(is_, chain.from_iterable(self._views), self._values)
        )


_OWN = frozenset((*vars(nn.Module()), "_fsfunc")) - {"training"}


def _is_setting(x: Any) -> bool:
    """True if a value says what to do, and does not count or keep anything."""
    return x is None or isinstance(x, bool | str)


def _holds_settings(x: Any, before: Any) -> bool:
    if not isinstance(x, dict):
        return False
    changed = [y for k, y in x.items() if k not in before or before[k] is not y]
    return all(map(_is_setting, changed))


def _is_of_tensors(x: Any) -> bool:
    """True if a value is made of the module's tensors, anew in each call."""
    if isinstance(x, list):
        return any(map(_is_of_tensors, x))
    return isinstance(x, Absent | weakref.ref)


def _said(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_plain(x: Any) -> bool:
    """True if an object is its ``__dict__``, and no more."""
    cls = type(x)
    return (
        hasattr(x, "__dict__")
        and cls.__reduce__ is object.__reduce__
        and cls.__reduce_ex__ is object.__reduce_ex__
        and not any(getattr(c, "__slots__", ()) for c in cls.__mro__)
    )


def _same(x: Any, before: Any) -> bool:
    if isinstance(x, dict):
        return list(x) == list(before) and all(map(is_, x.values(), before.values()))
    return len(x) == len(before) and all(map(is_, x, before))

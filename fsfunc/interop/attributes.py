"""What a copy remembers of its attributes, and of all that lies in them."""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Set
from itertools import accumulate, chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fsfunc import _torch
from fsfunc.interop.stubs import Absent, Hook, LateHooks, hook_tables

__all__ = ["Attribute", "AttributeWatch"]

Attribute = tuple[str, str]  # the path of a module in a part, and the attribute's name

_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))
_FIXED = (
    Absent, tuple, frozenset, range, slice, torch.device, functools.partial,
    types.MethodType,
)  # fmt: skip


class AttributeWatch:
    """The attributes of a copy's modules, and all mutable things in them.

    Looked at after every call, and so by a few C functions where nothing has changed.

    Args:
        module: the copy, its tables and stubs in place.
        things: what was copied with it.
        units: the paths of the units within it.
        who: what messages call it.
    """

    def __init__(
        self, module: nn.Module, things: list[Any], units: Collection[str], who: str
    ):
        self.units, self.who = units, who
        self.attributes = [
            (path, m, dict(vars(m))) for path, m in module.named_modules()
        ]
        ours = {id(m) for _, m, _ in self.attributes}
        tables = [t for m in module.modules() for t in _torch.tables(m)]
        ours.update(map(id, tables))
        containers: dict[int, Any] = {}
        tensors: dict[int, Tensor] = {}
        #: Whether there are things in it that cannot be put back as they were.
        self.is_closed = False
        for x in things:
            if id(x) in ours:
                continue
            if isinstance(x, Tensor):
                tensors[id(x)] = x
            elif type(x) in _CONTAINERS:
                containers[id(x)] = x
            elif _is_plain(x):
                containers[id(vars(x))] = vars(x)
            elif not isinstance(x, _FIXED):
                self.is_closed = True
        for _, m, saved in self.attributes:
            for x in [saved["_modules"], *hook_tables(m)]:
                containers[id(x)] = x
        self.containers = list(containers.values())
        self.saved = [copy.copy(x) for x in self.containers]
        self.tensors = [(x, x._version) for x in tensors.values() if _counts(x)]
        self._all = _Snapshot(
            [*(vars(m) for _, m, _ in self.attributes), *self.containers]
        )
        #: Containers that a unit shares with another one, or with what is around it.
        self.shared = self._found_twice(containers.keys())
        self._between = _Snapshot([containers[key] for key in self.shared])
        self._hooks = {id(m): LateHooks(m) for m in map(module.get_submodule, units)}

    def unit_of(self, path: str) -> str | None:
        """The unit of this part that a path is within."""
        names = accumulate(path.split("."), "{}.{}".format)
        return next((name for name in names if name in self.units), None)

    def _found_twice(self, containers: Set[int]) -> frozenset[int]:
        owners: dict[int, set[Any]] = {}
        known: dict[int, Set[int]] = {}
        for path, _, saved in self.attributes:
            for name, x in saved.items():
                if name not in _OWN and id(x) not in known:
                    known[id(x)] = containers & set(_inside(x, 6))
                for key in known.get(id(x), ()):
                    owners.setdefault(key, set()).add(self.unit_of(path))
        return frozenset(key for key, units in owners.items() if len(units) > 1)

    def enter(self) -> None:
        """A unit in it is called.

        Raises:
            RuntimeError: things that the unit has too were changed, which in the unit's
                own copy they are not.
        """
        if self._between.is_kept():
            return
        pairs = zip(self.containers, self.saved, strict=True)
        changed = {id(x) for x, before in pairs if not _same(x, before)}
        for path, name in self._holding(changed):
            if said := self._outside(path, name):
                raise RuntimeError(f"{self.who} {said}")

    def late_hooks(self, unit: nn.Module) -> dict[str, list[Hook]]:
        """Forward hooks that the call has hung within a unit, which runs elsewhere.

        Raises:
            RuntimeError: hooks of another kind, that only the unit itself could run.
        """
        return self._hooks[id(unit)].found()

    def leave(self, unit: str, where: str, filled: Any) -> None:
        """A unit in it has run, and filled one of its attributes.

        Raises:
            RuntimeError: that is shared with others, which see none of it.
        """
        if not self.shared.isdisjoint(_inside(filled, 6)):
            raise RuntimeError(
                f"unit {unit!r} fills {where}, which others have too, and see none of "
                "it: return what is new, or make a unit of what is around both"
            )

    @property
    def is_spoiled(self) -> bool:
        """Whether the next call on this copy might see what one before it did."""
        return self.is_closed or self._written() is not None

    def check(self, found: Mapping[Attribute, str | None]) -> None:
        """Raises where what a call set, or wrote into, would be missed.

        Args:
            found: of `restored`.

        Raises:
            RuntimeError: an attribute of a unit, set from outside; a count or a sum; a
                tensor that is no buffer, written in place.
        """
        if written := self._written():
            raise RuntimeError(
                f"{self.who} writes in place into {written!r}, which is no buffer: "
                "register it as one, and apply(..., mutable=True) returns it"
            )
        for refused in filter(None, found.values()):
            raise RuntimeError(f"{self.who} {refused}")

    def _written(self) -> str | None:
        """A tensor among the attributes that was written in place, if one was."""
        for x, version in self.tensors:
            if x._version != version:
                names = (_said(*at) for at in self._holding({id(x)}))
                return next(names, "a tensor of its attributes")
        return None

    def _holding(self, things: set[int]) -> Iterator[Attribute]:
        """The attributes in which one of these things is, by its id."""
        for path, _, saved in self.attributes:
            for name, x in saved.items():
                if name not in _OWN and _reaches(x, things, 6):
                    yield path, name

    def restored(self) -> tuple[dict[Attribute, str | None], set[Attribute]]:
        """Puts all back as it was.

        Returns:
            the attributes that had been set or filled; for each, why that is refused,
            if it is; and those that had been filled.
        """
        if self._all.is_kept():
            return {}, set()
        filled: set[Attribute] = set()
        changed: set[int] = set()
        for x, before in zip(self.containers, self.saved, strict=True):
            if not _same(x, before):
                changed.add(id(x))
                x.clear()
                x.extend(before) if isinstance(x, list | deque) else x.update(before)
        found: dict[Attribute, str | None] = {}
        for path, m, saved in self.attributes:
            now = vars(m)
            for name, x in now.items():
                old = saved.get(name)
                if isinstance(x, Absent) or name in _OWN:
                    continue
                if name not in saved or x is not old:
                    found[path, name] = self._lost(path, name, old, x, m)
                elif changed and _reaches(x, changed, 6):
                    found[path, name] = None  # by now every unit has run
                    filled.add((path, name))
            if id(saved["_modules"]) in changed and self.unit_of(path) is not None:
                found[path, "_modules"] = self._outside(path, "_modules")
            now.clear()
            now.update(saved)
        return found, filled

    def _outside(self, path: str, name: str) -> str | None:
        if self.unit_of(path) is None:
            return None
        return (
            f"sets {_said(path, name)} on a unit from outside, which the unit does not "
            "see: pass it to the call, or make a unit of what is around both"
        )

    def _lost(self, path: str, name: str, old: Any, x: Any, m: nn.Module) -> str | None:
        """Why it cannot be that a call set an attribute."""
        outside = self._outside(path, name)
        if outside or isinstance(x, bool) or isinstance(old, bool):
            return outside
        number = int | float | complex
        counts = isinstance(old, number) and isinstance(x, number) and old != x
        sums = isinstance(old, Tensor) and isinstance(x, Tensor)
        own, _ = _torch.tables(m)
        if not (counts or sums) or any(f"{name}_{s}" in own for s in ("orig", "v")):
            return None  # weights that hooks compute are set anew in every call
        return (
            f"changes {_said(path, name)}, which is lost after the call: make it a "
            "buffer (register_buffer), and apply(..., mutable=True) returns it; what "
            "is made anew in each call, set to None before from_module"
        )


class _Snapshot:
    """What lies in some containers, compared by a few C functions."""

    def __init__(self, containers: list[Any]):
        self._views = [x.values() if isinstance(x, dict) else x for x in containers]
        self._sizes = list(map(len, self._views))
        self._values = list(chain.from_iterable(self._views))

    def is_kept(self) -> bool:
        return list(map(len, self._views)) == self._sizes and all(
            map(is_, chain.from_iterable(self._views), self._values)
        )


_OWN = frozenset((*vars(nn.Module()), "_fsfunc")) - {"training"}


def _said(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _counts(x: Tensor) -> bool:
    return not x.is_inference()


def _is_plain(x: Any) -> bool:
    """Whether an object is its ``__dict__``, and no more."""
    cls = type(x)
    return (
        hasattr(x, "__dict__")
        and cls.__reduce__ is object.__reduce__
        and cls.__reduce_ex__ is object.__reduce_ex__
        and not any(getattr(c, "__slots__", ()) for c in cls.__mro__)
        and not isinstance(x, list | dict | set | deque | tuple)
    )


def _same(x: Any, before: Any) -> bool:
    if len(x) != len(before):
        return False
    if isinstance(x, dict):
        return list(x) == list(before) and all(map(is_, x.values(), before.values()))
    return x == before if isinstance(x, set) else all(map(is_, x, before))


def _reaches(x: Any, wanted: set[int], depth: int) -> bool:
    """Whether one of the things with these ids is in ``x``: not within modules."""
    return any(key in wanted for key in _inside(x, depth))


def _inside(x: Any, depth: int) -> Iterator[int]:
    """The ids of the things in ``x``, and its own: not of what modules hold."""
    yield id(x)
    if not depth or isinstance(x, nn.Module | Tensor | Absent | type):
        return
    if isinstance(x, Mapping):
        inner = list(x.values())
    elif isinstance(x, list | tuple | set | deque):
        inner = list(x)
    elif _is_plain(x):
        inner = [vars(x)]
    else:
        return
    for y in inner:
        yield from _inside(y, depth - 1)

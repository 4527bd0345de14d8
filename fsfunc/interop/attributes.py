"""Attributes of a copied module, compared after each call with what they were.

A copy is borrowed by one call after another, so nothing that a forward sets may stay:
`structures` restores the attributes after each call. Some changes are refused, as they
would be lost where the user counts on them: a counter, or what a unit's copy does not
see. Values of modules' dicts, and of lists and dicts that attributes hold, are
remembered; tensors by their version.
"""

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
from fsfunc.interop.stubs import AbsentTensor, all_hook_tables

_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))
_IMMUTABLE = (
    AbsentTensor, tuple, frozenset, range, slice, torch.device, functools.partial,
    types.MethodType,
)  # fmt: skip


class Attributes:
    """The attributes of a copy's modules, and all mutable things in them.

    Args:
        module: the copy, its tables and stubs in place.
        copied: all objects that were copied with it.
        units: the paths of the units within it.
        title: what messages call it.
    """

    def __init__(
        self, module: nn.Module, copied: list[Any], units: Collection[str], title: str
    ):
        self._units, self._title = units, title
        #: Whether something in it cannot be put back, so that nobody else may have it.
        self.is_closed: bool = False
        self._modules = [(p, m, dict(vars(m))) for p, m in module.named_modules()]
        # Both by id. What was not copied is shared by all copies, and left alone.
        module_ids, copied_ids = (
            {id(m) for _, m, _ in self._modules},
            {id(x) for x in copied},
        )
        self._tensors: list[tuple[str, Tensor, int]] = []  # path, tensor, version
        containers: dict[int, tuple[str, Any]] = {}  # by id: path, and container
        # Those of units first: what they share with others goes by their path.
        is_around = lambda entry: not self._is_in_unit(f"{entry[0]}.")  # noqa: E731
        for path, _, saved in sorted(self._modules, key=is_around):
            for name, x in saved.items():
                if name not in _MODULE_ATTRIBUTES:
                    attribute = _join_path(path, name)
                    self._collect(attribute, x, containers, module_ids, copied_ids)
        self._in_units = [
            x for path, x in containers.values() if self._is_in_unit(path)
        ]
        for path, m, saved in self._modules:
            children = saved["_modules"]
            containers[id(children)] = _join_path(path, "_modules"), children
            containers |= {id(table): ("", table) for table in all_hook_tables(m)}
        self._containers = [(path, x, copy.copy(x)) for path, x in containers.values()]
        dicts = [vars(m) for _, m, _ in self._modules]
        self._before_units = _Snapshot(self._in_units)
        self._all = _Snapshot([*dicts, *(x for _, x, _ in self._containers)])

    def _collect(
        self,
        path: str,
        x: Any,
        containers: dict[int, tuple[str, Any]],
        module_ids: set[int],
        copied_ids: set[int],
    ) -> None:
        """Finds the containers and tensors in an attribute."""
        if (
            id(x) in containers
            or id(x) in module_ids
            or isinstance(x, AbsentTensor | type)
        ):
            return
        inner: list[Any] = []
        if isinstance(x, Tensor):
            if not x.is_inference():
                self._tensors.append((path, x, x._version))
        elif isinstance(x, Mapping | list | tuple | set | frozenset | deque):
            inner = list(x.values() if isinstance(x, Mapping) else x)
            if type(x) in _CONTAINERS:
                containers[id(x)] = path, x
        elif id(x) in copied_ids and _is_plain(x):
            inner = [vars(x)]
        elif id(x) in copied_ids and not isinstance(x, _IMMUTABLE):
            self.is_closed = True  # a random generator, say, whose state is hidden
        for y in inner:
            self._collect(path, y, containers, module_ids, copied_ids)

    def enter(self) -> None:
        """Checks what a unit's own copy does not see, when the unit is called.

        Raises:
            RuntimeError: a list or dict of the unit was changed from outside.
        """
        if self._before_units.is_unchanged():
            return
        in_units = {id(x) for x in self._in_units}
        for path, x, before in self._containers:
            if id(x) in in_units and not _is_same(x, before):
                raise RuntimeError(self._outside_message(path))

    def restore(self, mutable: bool) -> str | None:
        """Restores all attributes after a call.

        Args:
            mutable: whether the call may leave changed attributes.

        Returns:
            the reason why a changed attribute is refused, if it is.
        """
        for path, x, version in self._tensors:
            if x._version != version:
                self.is_closed = True  # the old values are gone
                return (
                    f"{self._title} writes in place into {path!r}, which is no buffer: "
                    "register it as one, and apply(..., mutable=True) returns it"
                )
        if self._all.is_unchanged():
            return None
        # The list runs the iterator to its end: all is restored, whatever is refused.
        return next(filter(None, [*self._undo_changes(mutable)]), None)

    def _undo_changes(self, mutable: bool) -> Iterator[str | None]:
        """Undoes each change; yields why it is refused, or None."""
        for path, x, before in self._containers:
            if not _is_same(x, before):
                if path.endswith("_modules"):
                    yield (
                        self._outside_message(path) if self._is_in_unit(path) else None
                    )
                # Hook tables have no path: hooks that a forward adds are dropped.
                elif path and not (mutable or _holds_settings(x, before)):
                    yield self._lost_message(path)
                x.clear()
                x.extend(before) if isinstance(x, list | deque) else x.update(before)
        for module_path, m, saved in self._modules:
            params, current = _torch.tensor_tables(m)[0], vars(m)
            for name, x in current.items():
                old = saved.get(name)
                if name in _MODULE_ATTRIBUTES or x is old or _is_of_tensors(old):
                    continue
                path = _join_path(module_path, name)
                if self._is_in_unit(path):
                    yield self._outside_message(path)
                elif f"{name}_orig" in params or f"{name}_v" in params:
                    continue  # weights that hooks compute are set anew in every call
                elif not (mutable or _is_setting(x)):
                    yield self._lost_message(path)
            current.clear()
            current.update(saved)

    def _is_in_unit(self, path: str) -> bool:
        return any(path.startswith(f"{unit}.") for unit in self._units)

    def _outside_message(self, path: str) -> str:
        return (
            f"{self._title} sets {path} on a unit from outside, which the unit does "
            "not see: pass it to the call, or make a unit of what is around both"
        )

    def _lost_message(self, path: str) -> str:
        mutable_advice = "" if self._title != "the module" else (
            "; with mutable=True it is dropped after the call"
        )  # fmt: skip
        return (
            f"{self._title} changes {path}, which is lost after the call: return it; "
            "or make it a buffer (register_buffer), and apply(..., mutable=True) "
            f"returns it{mutable_advice}"
        )


class _Snapshot:
    """The values in some containers, by identity.

    They are compared in every call, so by a few C functions and not one by one.
    """

    def __init__(self, containers: list[Any]):
        self._views = [x.values() if isinstance(x, dict) else x for x in containers]
        self._sizes = list(map(len, self._views))
        self._values = list(chain.from_iterable(self._views))

    def is_unchanged(self) -> bool:
        return list(map(len, self._views)) == self._sizes and all(
            map(is_, chain.from_iterable(self._views), self._values)
        )


# Attributes that every module has: torch's, and a unit stub's.
_MODULE_ATTRIBUTES = frozenset((*vars(nn.Module()), "_fsfunc")) - {"training"}


def _is_setting(x: Any) -> bool:
    """Returns whether a value says what to do, and neither counts nor stores."""
    return x is None or isinstance(x, bool | str)


def _holds_settings(x: Any, before: Any) -> bool:
    """Returns whether only settings changed in a container."""
    if not isinstance(x, dict):
        return False
    changed = [y for k, y in x.items() if k not in before or before[k] is not y]
    return all(map(_is_setting, changed))


def _is_of_tensors(x: Any) -> bool:
    """Returns whether a value is made of the module's tensors, anew in each call."""
    if isinstance(x, list):
        return any(map(_is_of_tensors, x))
    return isinstance(x, AbsentTensor | weakref.ref)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_plain(x: Any) -> bool:
    """Returns whether an object is its ``__dict__`` and no more, as far as it shows."""
    cls = type(x)
    return (
        hasattr(x, "__dict__")
        and cls.__reduce__ is object.__reduce__
        and cls.__reduce_ex__ is object.__reduce_ex__
        and not any(getattr(c, "__slots__", ()) for c in cls.__mro__)
    )


def _is_same(x: Any, before: Any) -> bool:
    """Returns whether a container has the same objects, of a dict in the same order."""
    if isinstance(x, dict):
        return list(x) == list(before) and all(map(is_, x.values(), before.values()))
    return len(x) == len(before) and all(map(is_, x, before))

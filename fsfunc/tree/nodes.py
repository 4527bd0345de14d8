"""Registration of classes as tree nodes, by hand or at first sight.

A dataclass that holds a tensor, and a class that torch's pytree knows, become nodes as
soon as one of them is seen among the leaves of a tree. Of everything else only the
types of leaves are looked at, all in one set operation.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import optree
import torch.utils._pytree as torch_pytree
from optree.registry import __GLOBAL_NAMESPACE as EVERYWHERE

from fsfunc.tree.structure import (
    CONTAINERS,
    LEAVES,
    NAMESPACE,
    count_as_leaf,
    holds,
    is_node,
    is_open,
    slots_of,
)

_Flatten = Callable[[Any], tuple[Sequence[Any], Hashable]]
_Unflatten = Callable[[Any, Sequence[Any]], Any]

_LEARNED: dict[type, bool] = {}  # at first sight; whether torch knows it from us


def register_node(
    cls: type[Any],
    flatten: _Flatten,
    unflatten: _Unflatten,
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Return None, with `cls` known as a node to optree (everywhere) and to torch.

    Args:
        cls: the class; its subclasses stay leaves.
        flatten: value -> (children, static data); static data are compared by `==`.
        unflatten: (static data, children) -> value, for children of any kind.
        names: the attribute names of the children, for paths. Without them a single
            child adds nothing to a path, and several are numbered.

    A second registration of the same class changes nothing, so that a module may be
    run again; what was learned of it at first sight is forgotten.

    >>> class Celsius:
    ...     def __init__(self, degrees):
    ...         self.degrees = degrees
    >>> register_node(Celsius, lambda c: ([c.degrees], None), lambda _, c: Celsius(*c))
    >>> from fsfunc.tree import leaves, paths
    >>> leaves([Celsius(20), 1]), paths([Celsius(20), 1])
    ([20, 1], ['0', '1'])
    """

    def flatten_named(value: Any) -> tuple[tuple[Any, ...], Any, Any]:
        children, static = flatten(value)
        if names is not None:
            return tuple(children), static, tuple(names)
        # path_of leaves out a component that is None.
        return tuple(children), static, (None,) if len(children) == 1 else None

    def flatten_list(value: Any) -> tuple[list[Any], Any]:
        children, static = flatten(value)
        return list(children), static

    if cls in _LEARNED:
        optree.unregister_pytree_node(cls, namespace=NAMESPACE)
        if _LEARNED.pop(cls):
            torch_pytree._deregister_pytree_node(cls)
    if optree.register_pytree_node.get(cls) is None:
        optree.register_pytree_node(
            cls,
            flatten_named,
            lambda static, children: unflatten(static, tuple(children)),
            path_entry_type=optree.AutoEntry if names is None else optree.GetAttrEntry,
            namespace=EVERYWHERE,
        )
    if cls not in torch_pytree.SUPPORTED_NODES:
        torch_pytree.register_pytree_node(
            cls,
            flatten_list,
            lambda children, static: unflatten(static, tuple(children)),
        )
    count_as_leaf(cls)


def refuse(cls: type[Any], why: Callable[[Any], Any]) -> None:
    """Return None, with torch's own trees raising where one holds a `cls`.

    ``why(value)`` raises. To us a `cls` stays a leaf.
    """
    torch_pytree.register_pytree_node(
        cls, lambda value: (why(value), None), lambda children, static: None
    )
    count_as_leaf(cls)


# At first sight


def learned(leaves: Iterable[Any]) -> bool:
    """Return whether one of these leaves is of a class that has now become a node."""
    found = False
    for x in leaves:
        cls = type(x)
        if cls in LEAVES:
            continue
        if is_node(cls):
            count_as_leaf(cls)
        elif adopt(cls):
            found = True
        elif is_open(cls):
            count_as_leaf(cls)
        elif not _is_record(cls):
            LEAVES.add(cls)
        elif holds(x):
            _learn(cls)
            found = True
    return found


def adopt(cls: type[Any]) -> bool:
    """Return whether torch's pytree knows `cls`; fsfunc then knows it too.

    Of a mapping the children are its values, and their paths its keys.

    >>> adopt(dict), adopt(object)
    (True, False)
    """
    node = torch_pytree.SUPPORTED_NODES.get(cls)
    if node is None or is_node(cls):
        return node is not None
    keyed = node.flatten_with_keys_fn

    def flatten(value: Any) -> tuple[tuple[Any, ...], Any, Any]:
        children, context = node.flatten_fn(value)
        names = None
        if issubclass(cls, Mapping):
            names = tuple(value)
        elif keyed is not None:
            names = tuple(_name_of(key) for key, _ in keyed(value)[0])
        # torch's own of a dataclass leaves out fields that are None. So is what a tree
        # has in place of a leaf that is not differentiated: its structure is the same.
        pair = keyed is not None and type(context) is list and len(context) == 2
        if pair and context[0] == list(names or ()) and context[1]:
            value = copy.copy(value)
            for name in context[1]:
                object.__setattr__(value, name, _UNSET)
            children, *rest = flatten(value)
            return tuple(None if x is _UNSET else x for x in children), *rest
        return tuple(children), TorchContext(context), names

    def unflatten(context: Any, children: Any) -> Any:
        return node.unflatten_fn(list(children), context.value)

    optree.register_pytree_node(
        cls, flatten, unflatten, path_entry_type=optree.AutoEntry, namespace=NAMESPACE
    )
    _LEARNED[cls] = False
    count_as_leaf(cls)
    return True


def _name_of(key: Any) -> Any:
    """The attribute, key or position of one of torch's path entries."""
    named = dataclasses.is_dataclass(key)
    return getattr(key, dataclasses.fields(key)[0].name) if named else key


def _is_record(cls: type) -> bool:
    """True if a class is a dataclass, and no more than its attributes."""
    plain = cls.__new__ is object.__new__ and not issubclass(cls, CONTAINERS)
    return dataclasses.is_dataclass(cls) and plain


class TorchContext:
    """The context of torch's pytree for a node; it need not be hashable."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return type(other) is TorchContext and self.value == other.value

    def __hash__(self) -> int:
        return 0


def _learn(cls: type[Any]) -> None:
    """Makes a dataclass a node, whose children are its fields, in their order.

    It is rebuilt without its ``__init__`` and ``__post_init__``, which have run.
    """
    names = tuple(f.name for f in dataclasses.fields(cls))
    known = frozenset(names)
    rest = tuple(name for name in slots_of(cls) if name not in known)

    def flatten(value: Any) -> tuple[tuple[Any, ...], _Beside, tuple[str, ...]]:
        children = tuple([getattr(value, name, _UNSET) for name in names])
        beside = _NOTHING
        if rest or not known.issuperset(getattr(value, "__dict__", ())):
            beside = _Beside(_further(value, known, rest))
        return children, beside, names

    def unflatten(beside: Any, children: Any) -> Any:
        new = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            if child is not _UNSET:
                object.__setattr__(new, name, child)
        for name, x in beside.values.items():
            object.__setattr__(new, name, x)
        return new

    optree.register_pytree_node(
        cls, flatten, unflatten,
        path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE,
    )  # fmt: skip
    # As torch's own register_dataclass does, which may still come.
    torch_pytree._private_register_pytree_node(
        cls,
        lambda value: (list((parts := flatten(value))[0]), parts[1]),
        lambda children, beside: unflatten(beside, children),
    )
    _LEARNED[cls] = True
    count_as_leaf(cls)


class _Beside:
    """Attributes of a dataclass beside its fields: equal for any two trees."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __eq__(self, other: Any) -> bool:
        return type(other) is _Beside

    def __hash__(self) -> int:
        return 1


class _Unset:
    """In place of a field that was never set."""

    __slots__ = ()


_NOTHING, _UNSET = _Beside({}), _Unset()


def _further(value: Any, known: Set[str], rest: Sequence[str]) -> dict[str, Any]:
    """The attributes of a dataclass that are no fields."""
    cls = type(value)
    found = {k: x for k, x in getattr(value, "__dict__", {}).items() if k not in known}
    found |= {k: getattr(value, k) for k in rest if hasattr(value, k)}
    for name in list(found):
        if isinstance(getattr(cls, name, None), cached_property):
            del found[name]  # asked for again, it is computed of what is there then
        elif holds(found[name]):
            raise TypeError(
                f"a {cls.__name__} holds tensors in {name!r}, which is none of its "
                "fields: a transform that changes the fields would leave it as it was. "
                "Make it a field, dataclasses.field(init=False), or a "
                "functools.cached_property; or say what the class holds by "
                "fsfunc.tree.register_node"
            )
    return found

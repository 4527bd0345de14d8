"""Registration of classes as tree nodes, by hand or at first sight.

`register_node` makes a class a node, for optree and torch's pytree. A dataclass that
holds a tensor, and a class that torch's pytree knows, become nodes by themselves, as
soon as one of them is seen among the leaves of a tree (`learn_nodes`). Of everything
else only the types of leaves are looked at, all in one set operation.
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
    holds_tensor,
    is_node,
    is_open,
    slots_of,
)
from fsfunc.tree.types import Leaf

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
    """Registers `cls` as a node, with optree (in all namespaces) and with torch.

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

    def flatten_named(
        value: Any,
    ) -> tuple[tuple[Any, ...], Hashable, tuple[str | None, ...] | None]:
        children, static = flatten(value)
        if names is not None:
            return tuple(children), static, tuple(names)
        # `paths_of` leaves out a component that is None.
        return tuple(children), static, (None,) if len(children) == 1 else None

    def flatten_list(value: Any) -> tuple[list[Any], Hashable]:  # as torch wants it
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


def refuse(cls: type[Any], raise_error: Callable[[Any], Any]) -> None:
    """Makes torch's own trees raise where one holds a `cls`; to us it stays a leaf.

    Args:
        raise_error: is called with the value, and raises.
    """
    torch_pytree.register_pytree_node(
        cls, lambda value: (raise_error(value), None), lambda children, static: None
    )
    count_as_leaf(cls)


# At first sight


def learn_nodes(leaves: Iterable[Leaf]) -> bool:
    """Returns whether one of these leaves is of a class that has now become a node."""
    has_learned = False
    for x in leaves:
        cls = type(x)
        if cls in LEAVES:
            continue
        if is_node(cls):
            count_as_leaf(cls)
        elif adopt(cls):
            has_learned = True
        elif is_open(cls):
            count_as_leaf(cls)
        elif not _is_record(cls):
            LEAVES.add(cls)
        elif holds_tensor(x):
            _learn_dataclass(cls)
            has_learned = True
    return has_learned


def adopt(cls: type[Any]) -> bool:
    """Returns whether torch's pytree knows `cls`; fsfunc then knows it too.

    Of a mapping the children are its values, and their paths its keys.

    >>> adopt(dict), adopt(object)
    (True, False)
    """
    node = torch_pytree.SUPPORTED_NODES.get(cls)
    if node is None or is_node(cls):
        return node is not None
    flatten_with_keys = node.flatten_with_keys_fn

    def flatten(
        value: Any,
    ) -> tuple[tuple[Any, ...], TorchContext, tuple[Any, ...] | None]:
        children, context = node.flatten_fn(value)
        names = None
        if issubclass(cls, Mapping):
            names = tuple(value)
        elif flatten_with_keys is not None:
            names = tuple(_name_of(key) for key, _ in flatten_with_keys(value)[0])
        # torch's own flattening of a dataclass leaves out fields that are None, and
        # names them in its context. A gradient is None where a leaf is not
        # differentiated, and its tree must have the structure of the parameters: so
        # these fields are put back, as children that are None.
        is_pair = type(context) is list and len(context) == 2
        of_dataclass = flatten_with_keys is not None and is_pair
        if of_dataclass and context[0] == list(names or ()) and context[1]:
            value = copy.copy(value)
            for name in context[1]:
                object.__setattr__(value, name, _UNSET)
            children, context, names = flatten(value)
            return tuple(None if x is _UNSET else x for x in children), context, names
        return tuple(children), TorchContext(context), names

    def unflatten(context: Any, children: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(children), context.value)

    optree.register_pytree_node(
        cls, flatten, unflatten, path_entry_type=optree.AutoEntry, namespace=NAMESPACE
    )
    _LEARNED[cls] = False
    count_as_leaf(cls)
    return True


def _name_of(key: torch_pytree.KeyEntry) -> Any:
    """Returns the attribute, key or position of one of torch's path entries."""
    has_fields = dataclasses.is_dataclass(key)
    return getattr(key, dataclasses.fields(key)[0].name) if has_fields else key


def _is_record(cls: type) -> bool:
    """Returns whether a class is a dataclass, and no more than its attributes."""
    is_plain = cls.__new__ is object.__new__ and not issubclass(cls, CONTAINERS)
    return dataclasses.is_dataclass(cls) and is_plain


class TorchContext:
    """The context of torch's pytree for a node, as optree's static data.

    Those must be hashable, and torch's context need not be.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is TorchContext and self.value == other.value

    def __hash__(self) -> int:
        return 0  # equal contexts must have equal hashes, and nothing else is known


def _learn_dataclass(cls: type[Any]) -> None:
    """Makes a dataclass a node, whose children are its fields, in their order.

    It is rebuilt without its ``__init__`` and ``__post_init__``, which have run.
    """
    names = tuple(f.name for f in dataclasses.fields(cls))
    fields = frozenset(names)
    other_slots = tuple(name for name in slots_of(cls) if name not in fields)

    def flatten(
        value: Any,
    ) -> tuple[tuple[Any, ...], _OtherAttributes, tuple[str, ...]]:
        children = tuple([getattr(value, name, _UNSET) for name in names])
        others = _NO_OTHERS
        if other_slots or not fields.issuperset(getattr(value, "__dict__", ())):
            others = _OtherAttributes(_other_attributes(value, fields, other_slots))
        return children, others, names

    def unflatten(others: Any, children: Iterable[Any]) -> Any:
        new = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            if child is not _UNSET:
                object.__setattr__(new, name, child)
        for name, x in others.values.items():
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
        lambda children, others: unflatten(others, children),
    )
    _LEARNED[cls] = True
    count_as_leaf(cls)


class _OtherAttributes:
    """Attributes of a dataclass that are no fields; static data of its node.

    Any two are equal: trees that differ in them have one structure.
    """

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __eq__(self, other: object) -> bool:
        return type(other) is _OtherAttributes

    def __hash__(self) -> int:
        return 1


class _Unset:
    """The child that stands in place of a field that was never set."""

    __slots__ = ()


_NO_OTHERS, _UNSET = _OtherAttributes({}), _Unset()


def _other_attributes(
    value: Any, fields: Set[str], other_slots: Sequence[str]
) -> dict[str, Any]:
    """Returns the attributes of a dataclass that are no fields.

    Raises:
        TypeError: one holds a tensor, which no map over the tree would reach.
    """
    cls = type(value)
    others = {
        k: x for k, x in getattr(value, "__dict__", {}).items() if k not in fields
    }
    others |= {k: getattr(value, k) for k in other_slots if hasattr(value, k)}
    for name in list(others):
        if isinstance(getattr(cls, name, None), cached_property):
            del others[name]  # asked for again, it is computed of what is there then
        elif holds_tensor(others[name]):
            raise TypeError(
                f"a {cls.__name__} holds tensors in {name!r}, which is none of its "
                "fields: a transform that changes the fields would leave it as it was. "
                "Make it a field, dataclasses.field(init=False), or a "
                "functools.cached_property; or say what the class holds by "
                "fsfunc.tree.register_node"
            )
    return others

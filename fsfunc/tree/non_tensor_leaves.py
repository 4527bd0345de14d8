"""Leaves that are no tensors: their types, and tensors hidden in them.

Most are told by their types alone, all leaves of a tree in one set operation.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch

# Of what is learned at first sight: who registers a class with optree later may.
NAMESPACE = "fsfunc"

_TENSORS = {torch.Tensor, torch.nn.Parameter}
# Types that hold no tensor; those that hide none; those that are leaves where found.
_BARE: set[type] = {
    int, float, complex, bool, str, bytes, type, type(None), torch.dtype, torch.device,
    torch.Size, types.FunctionType,
}  # fmt: skip
SHOWN: set[type] = _BARE | _TENSORS
# Those that nobody can register as nodes' types later, or be mistaken in.
PLAIN = frozenset(_TENSORS | {int, float, complex, bool, str, bytes, torch.dtype})
LEAVES: set[type] = set(SHOWN)


def count_as_leaf(cls: type) -> None:
    """Registers a class as a leaf that hides no tensor."""
    LEAVES.add(cls)
    SHOWN.add(cls)


def is_node(cls: type) -> bool:
    """True if optree flattens values of the class."""
    registered = optree.register_pytree_node.get(cls, namespace=NAMESPACE)
    tuples = optree.is_namedtuple_class(cls) or optree.is_structseq_class(cls)
    return registered is not None or tuples


def is_open(cls: type) -> bool:
    """True if values of the class need no search for hidden tensors."""
    if issubclass(cls, (torch.Tensor, enum.Enum, Callable)):
        return True
    return not (issubclass(cls, CONTAINERS) or cls.__dictoffset__ or slots_of(cls))


CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)


def slots_of(cls: type) -> list[str]:
    """The attributes that a class keeps in slots, those of its bases too."""
    return [
        name
        for c in cls.__mro__
        if vars(c).get("__slots__")
        for name, x in vars(c).items()
        if type(x) is types.MemberDescriptorType
    ]


def hides(x: Any) -> bool:
    """Return whether a leaf, which is no tensor, holds one out of sight."""
    return type(x) not in SHOWN and holds(x)


def holds(x: Any, depth: int = 6) -> bool:
    """True if an object holds a tensor, not within functions or modules."""
    cls = type(x)
    if cls in _BARE:
        return False
    if isinstance(x, torch.Tensor):
        return True
    if is_open(cls):
        _BARE.add(cls)
        return False
    inner = _inside(x) if depth else ()
    if _BARE.issuperset(map(type, inner)):
        return False
    return any(holds(y, depth - 1) for y in inner)


def _inside(x: Any) -> Sequence[Any]:
    cls = type(x)
    if is_node(cls):
        return optree.tree_leaves(x, lambda y: y is not x, namespace=NAMESPACE)
    items = ()
    if isinstance(x, CONTAINERS):
        items = x.values() if isinstance(x, Mapping) else x
    slots = [getattr(x, name, None) for name in slots_of(cls)]
    return [*items, *getattr(x, "__dict__", {}).values(), *slots]

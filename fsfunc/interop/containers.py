"""Values that go in and out of modules: trees whose every tensor is seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.sharded import is_sharded

__all__ = ["opened"]

_CLOSED = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def opened(values: Any, who: str) -> bool:
    """Makes the classes known that a value is made of, so that its tensors are seen.

    Those that torch's pytree knows (the outputs of Hugging Face's models are), and
    dataclasses.

    Returns:
        whether there are other objects in it, which hold no tensor as yet.

    Raises:
        TypeError: an object holds tensors that no tree shows: a cache of keys and
            values, for one, which a second run of the unit would fill twice.
    """
    if type(values) is Tensor:
        return False
    todo = tree.leaves(values, is_leaf=is_sharded)
    others = False
    while todo:
        x = todo.pop()
        cls = type(x)
        if cls is Tensor or isinstance(x, (Tensor, *_CLOSED)) or is_sharded(x):
            continue
        if tree.adopt(cls) or _adopt_dataclass(x):
            todo += tree.leaves(x, is_leaf=is_sharded)
        elif _holds(x, 4):
            raise TypeError(
                f"{who} is given, or gives, a {cls.__name__} that holds tensors which "
                "no transform sees: pass and return trees of tensors (of a Hugging "
                "Face model: use_cache=False), or make the class known by "
                "fsfunc.tree.register_node"
            )
        else:
            others = True
    return others


def _adopt_dataclass(x: Any) -> bool:
    if not dataclasses.is_dataclass(x) or isinstance(x, type | Mapping):
        return False
    cls, fields = type(x), dataclasses.fields(x)
    names = tuple(f.name for f in fields)
    if not set(getattr(x, "__dict__", ())) <= set(names):
        return False  # what its __post_init__ set beside them would be lost
    if not all(f.init for f in fields):
        return False

    def made(_: Any, children: Any) -> Any:
        new = object.__new__(cls)  # __post_init__ has run
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)
        return new

    tree.register_node(
        cls,
        lambda value: ([getattr(value, n) for n in names], None),
        made,
        names=names,
    )
    return True


def _holds(x: Any, depth: int) -> bool:
    """Whether a tensor is found within an object."""
    if isinstance(x, Tensor):
        return True
    if not depth or isinstance(x, (*_CLOSED, type)) or callable(x):
        return False
    if isinstance(x, Mapping):
        inner = list(x.values())
    elif isinstance(x, list | tuple | set):
        inner = list(x)
    else:
        inner = list(getattr(x, "__dict__", {}).values())
    return any(_holds(y, depth - 1) for y in inner)

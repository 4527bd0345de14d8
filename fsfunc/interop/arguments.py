"""Arguments and results of modules: trees whose every tensor is seen, and caches.

A cache, of keys and values for one, fills as a module runs. With gradients it is left
out, as under a checkpoint: a unit that runs again would fill it twice. Without, and
where every unit runs here and once, it is handed through units as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.core.frames import frame
from fsfunc.sharded.leaf import is_sharded


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
    """Tells the settings of a module that no cache is asked for, unless by a call."""
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


class Signature(NamedTuple):
    """All that a forward can tell of what it is given, without its values.

    A cache, say, is left out of it.
    """

    treedef: Any
    leaves: tuple[Any, ...]
    key: Any

    @classmethod
    def of(cls, values: Any) -> Signature:
        leaves, treedef = tree.flatten(values, is_leaf=is_object)
        found = tuple(None if is_object(x) else GivenTensor.of(x) for x in leaves)
        # What is held in a cache has shapes of its own: they are looked at once.
        told = tuple(x if x.__hash__ else repr(x) for x in found)
        key = treedef if any(map(is_object, leaves)) else (treedef, told)
        return cls(treedef, found, key)


class GivenTensor(NamedTuple):
    """The shape and dtype of a tensor that a forward was given, without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return GivenTensor(x.shape, x.dtype, x.requires_grad)


def is_object(x: Any) -> bool:
    """True if a leaf is no tensor, and may hold some."""
    return hasattr(x, "__dict__") and not isinstance(x, Tensor | type)

"""Caches that a module fills as it runs, of keys and values for one.

With gradients they are left out, as under a checkpoint: a unit that runs again would
fill them twice. Without, and where every unit runs here and once, they are handed
through units as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fsfunc import _torch, tree
from fsfunc.frames import frame
from fsfunc.sharded import is_sharded

__all__ = ["are_filled", "handed", "taken", "without_caches"]


def are_filled() -> bool:
    """Whether a cache may be filled: no unit that is called now will run again."""
    f = frame()
    noted = f.tracer is not None or f.staged
    return not (noted or torch.is_grad_enabled() or _torch.functorch_active())


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

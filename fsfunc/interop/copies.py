"""The structure of a module without its tensors, copied for each call that runs it.

A module's forward reads its parameters and buffers as attributes, and may set others.
So each call borrows a copy of its own: two ranks, a recompute beside another call, and
a module that calls itself do not meet. A copy's tables of parameters and buffers look
up what the call was given; what a forward sets on its module is gone after the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fsfunc import _torch
from fsfunc.interop.arguments import without_caches
from fsfunc.interop.attributes import AttributeWatch
from fsfunc.interop.call_tensors import CallTensors, Knowledge
from fsfunc.interop.module_tensors import Tensors, check_closures, computed
from fsfunc.interop.stubs import Absent, make_stub

__all__ = ["Copy", "without_tensors"]


def without_tensors(module: nn.Module, tensors: Tensors) -> nn.Module:
    """A copy of ``module`` in which each of its tensors is :class:`Absent`.

    Raises:
        TypeError: something in it cannot be copied, or holds what is.
    """
    check_closures(module)
    memo: dict[int, Any] = {
        id(x): Absent(name, tuple(x.shape), x.dtype) for name, x in tensors.all.items()
    }
    for name, x in computed(module):
        memo.setdefault(id(x), Absent(name, tuple(x.shape), x.dtype))
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"the structure of {type(module).__name__} cannot be copied, and each call "
            f"needs a copy: {error}"
        ) from error


def copied(module: nn.Module) -> tuple[nn.Module, list[Any]]:
    """A copy of ``module``, and what was copied with it: not what it shares."""
    memo: dict[int, Any] = {}
    with _torch.outside_modes():  # a fake tensor would stay
        found = copy.deepcopy(module, memo)
    originals = memo.pop(id(memo), [])
    for x in originals:  # copies of their dicts that nobody keeps
        if hasattr(x, "__dict__"):
            memo.pop(id(vars(x)), None)
    return found, list(memo.values())


class Copy:
    """One copy of a part of a module, for one call at a time.

    Args:
        template: the module of which it is a copy, without tensors.
        stubs: the units in it, by name within it: what to run in their place.
        part: what is known of it.
        fills: whether it may fill a cache.
    """

    def __init__(
        self,
        template: nn.Module,
        stubs: Mapping[str, Callable[..., Any]],
        part: Knowledge,
        fills: bool,
    ):
        self.module, things = copied(template)
        self.fills = fills
        if not fills:
            without_caches(things)
        #: What the call that has the copy is given, and what it writes of that.
        self.tensors = CallTensors(part, self.module)
        for name, call in stubs.items():
            make_stub(self.module.get_submodule(name), call, self)
        if part.fetch is None and part.name:
            for hooks in _torch.hook_tables(self.module, before=False):
                hooks.clear()  # they run on the unit's output, outside it
        #: What the call sets, fills and hangs.
        self.watch = AttributeWatch(self.module, things, stubs.keys(), part.who)

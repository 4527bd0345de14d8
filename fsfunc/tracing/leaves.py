"""The leaf of a step under recording: a tensor to those who ask, with a memory.

`recorder` puts one in the place of each tensor of the step's first argument, so that a
unit call can tell which leaves it was given.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.core.frames import frame
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import OPERATORS, Sharded, is_sharded

__all__ = ["Recorded", "block", "local", "plain", "whole"]


class Recorded(Sharded):
    """A leaf of a step under recording: a tensor to those who ask, with a memory."""

    __slots__ = ()

    def __init__(self, local: Any, layout: Layout, packed: Any = None):
        super().__init__(local, layout)
        tracer = frame().tracer
        if tracer is not None and isinstance(local, Tensor):
            tracer.know(local, layout.name)

    def __reduce__(self) -> Any:  # as deepcopy asks
        return Recorded, (self.local.clone(), self.layout)

    def _refuse(self, what: str) -> Any:
        raise RuntimeError(what)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.local, name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree.map(plain, (args, kwargs or {}), is_leaf=is_sharded)
        return func(*args, **kwargs)


def plain(x: Any) -> Any:
    """The tensor that ``x`` passes for, or ``x`` itself."""
    return x.local if isinstance(x, Recorded) else x


def local(x: Any) -> Any:
    """The tensor that this rank holds of a leaf, or ``x`` itself."""
    return x.local if isinstance(x, Sharded) else x


def whole(x: Any) -> Any:
    """The stand-in that a unit is given for a leaf that is laid out already."""
    if not isinstance(x, Sharded):
        return x
    local, split = x.local.detach(), x.layout.in_units
    if split is None:
        return local.new_zeros(x.shape)
    first = split.local_shape(dict.fromkeys(split.axes, 0))
    return Sharded(local.new_zeros(first), split)


def block(x: Any, layout: Layout) -> Any:
    """The value that a unit is given for a recorded leaf: a tensor, or a rank's part.

    Args:
        layout: how it will be split; to all but units it passes for a whole tensor.
    """
    part, split = plain(x), layout.in_units
    if split is None:
        return part
    for cut in split.splits:  # by `split`, which the recorder takes for no reading
        part = part.split(part.shape[cut.dim] // cut.size, cut.dim)[0]
    return Sharded(part, split)


def _forward(name: str) -> Any:
    def method(self: Recorded, *args: Any) -> Any:
        return getattr(self.local, name)(*map(plain, args))

    return method


for _name in OPERATORS:
    setattr(Recorded, f"__{_name}__", _forward(f"__{_name}__"))

tree.register_node(
    Recorded,
    lambda leaf: ((leaf.local,), leaf.layout),
    lambda layout, children: Recorded(children[0], layout),
)

"""What a unit computes, call by call of torch, and computes again in a recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch
from fsfunc.comm.attribution import is_internal
from fsfunc.core.frames import frame
from fsfunc.testing.finite_field import is_exact


class Made(NamedTuple):
    """A value that a unit was given or computed.

    Args:
        name: what made it, or which argument it is.
        after: the number of calls of units within before it; -1 for an argument.
    """

    name: str
    after: int
    value: Tensor


class Computing(TorchFunctionMode):
    """Keeps the floats that a unit's own calls of torch give, in order.

    Args:
        numbers: those of the unit's call; within it others may run.
        keep: copies a value.
    """

    def __init__(self, numbers: tuple[int, ...], keep: Callable[[Tensor], Tensor]):
        super().__init__()
        self.numbers, self.keep = numbers, keep
        self.values: list[Made] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out, f = func(*args, **(kwargs or {})), frame()
        # Under torch.func tensors stand for several values.
        if is_internal() or f.numbers != self.numbers or _torch.functorch_active():
            return out
        given = {_torch.storage_key(x) for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple | list) else (out,):
            computed = isinstance(x, Tensor) and x.is_floating_point()
            if computed and _torch.storage_key(x) not in given:  # no view
                name = getattr(func, "__name__", str(func))
                self.values.append(Made(name, f.counter.count, self.keep(x)))
        return out


def first_unlike(forward: Sequence[Made], again: Sequence[Made]) -> Made | None:
    """Returns the first value of a recompute that its forward had otherwise.

    Its calls are among those of the forward: it ends with the last value that the
    backward needs, and a forward may have begun twice, where `remat` had to find out
    how a unit's values can be left out.
    """
    at = 0
    for made in again:
        kind = made.name, made.after, made.value.shape
        while at < len(forward):
            one, at = forward[at], at + 1
            if kind == (one.name, one.after, one.value.shape):
                break
        else:
            return made
        if not alike(one.value, made.value):
            return made
    return None


def alike(x: Tensor, y: Tensor) -> bool:
    """True if values are those that the same operations give once more."""
    exactly = is_exact() or not x.is_floating_point()
    with _torch.beneath_all_modes(), torch.no_grad():
        if exactly or torch.equal(x, y):
            return torch.equal(x, y)
        slack = torch.finfo(x.dtype).eps ** 0.75  # kernels may add in any order
        return torch.allclose(x, y, slack, slack, equal_nan=True)

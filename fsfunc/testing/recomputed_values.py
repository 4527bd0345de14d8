"""The values that a unit computes, call by call of torch, and again in a recompute.

``observed_runs.py`` runs each unit under ``UnitRecorder`` and, after a recompute, asks
``find_unlike`` whether it computed what the forward did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch
from fsfunc.comm.attribution import is_internal
from fsfunc.core.frames import frame
from fsfunc.testing.finite_field import is_exact


class UnitValue(NamedTuple):
    """An argument of a unit, or a value that it computed.

    Args:
        name: the function of torch that returned it, or which argument it is.
        units_before: how many units inside were called before; -1 for an argument.
    """

    name: str
    units_before: int
    value: Tensor


class UnitRecorder(TorchFunctionMode):
    """Records the floats that a unit's own calls of torch return, in order.

    Args:
        numbers: the numbers of the unit's call; calls of units inside have others, and
            are not recorded.
        copy_value: copies a value.
    """

    numbers: tuple[int, ...]
    copy_value: Callable[[Tensor], Tensor]

    def __init__(
        self, numbers: tuple[int, ...], copy_value: Callable[[Tensor], Tensor]
    ):
        super().__init__()
        self.numbers, self.copy_value = numbers, copy_value
        self.values: list[UnitValue] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out, f = func(*args, **(kwargs or {})), frame()
        # Under torch.func tensors stand for several values.
        if is_internal() or f.numbers != self.numbers or _torch.functorch_active():
            return out
        argument_storages = {
            _torch.storage_key(x) for x in args if isinstance(x, Tensor)
        }
        for x in out if isinstance(out, tuple | list) else (out,):
            is_float = isinstance(x, Tensor) and x.is_floating_point()
            # A view has its base's values: only what was computed is recorded.
            if is_float and _torch.storage_key(x) not in argument_storages:
                name = getattr(func, "__name__", str(func))
                self.values.append(UnitValue(name, f.counter.count, self.copy_value(x)))
        return out


def find_unlike(
    forward: Sequence[UnitValue], recompute: Sequence[UnitValue]
) -> UnitValue | None:
    """Returns the first value of a recompute that differs from its forward's, or None.

    Args:
        forward, recompute: the values of both, in order.
    """
    # The recompute's values are some of the forward's: it ends with the last that the
    # backward needs, and a forward may have begun twice, where `remat` had to find out
    # which values it can leave out. So each is sought from where the last was found.
    index = 0
    for value in recompute:
        signature = value.name, value.units_before, value.value.shape
        while index < len(forward):
            candidate, index = forward[index], index + 1
            if signature == (
                candidate.name,
                candidate.units_before,
                candidate.value.shape,
            ):
                break
        else:
            return value
        if not values_agree(candidate.value, value.value):
            return value
    return None


def values_agree(x: Tensor, y: Tensor) -> bool:
    """Returns whether two values may come from the same operations, run twice."""
    is_bitwise = is_exact() or not x.is_floating_point()
    with _torch.beneath_all_modes(), torch.no_grad():
        if is_bitwise or torch.equal(x, y):
            return torch.equal(x, y)
        tolerance = torch.finfo(x.dtype).eps ** 0.75  # kernels may add in any order
        return torch.allclose(x, y, tolerance, tolerance, equal_nan=True)

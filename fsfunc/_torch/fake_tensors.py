"""Facts about fake tensors, which have no data: the mode that is on, their devices."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@functools.cache
def ready_for_threads() -> None:
    """Enters a mode of fake tensors in the caller's thread, before other threads do.

    With CUDA built in and no card, torch 2.11 ends the process where a second thread
    enters one, unless the thread that outlives them all was the first.
    """
    with FakeTensorMode():
        pass


def fake_mode() -> FakeTensorMode | None:
    """Returns the fake tensor mode that is on in this thread, if one is."""
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()  # type: ignore[attr-defined]
    return next((m for m in reversed(stack) if isinstance(m, FakeTensorMode)), None)


def fake_active() -> bool:
    """Returns whether a fake tensor mode is on in this thread."""
    return fake_mode() is not None


def device_of(x: Tensor) -> torch.device:
    """Returns ``x.device``, without the operator that a fake tensor runs for it."""
    return x.fake_device if isinstance(x, FakeTensor) else x.device


def is_data_dependent(error: BaseException) -> bool:
    """Returns whether a fake tensor raised ``error`` as it was asked for a value."""
    return isinstance(
        error,
        (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
        ),
    )

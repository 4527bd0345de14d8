"""Kinds of memory: what makes a tensor tells its purpose to whatever counts."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from fsfunc.runtime.scoped import Scoped

__all__ = ["KINDS", "OFFLOADED", "count_as", "counting"]

KINDS = ("parameters", "gathered", "gradients", "moments", "activations", "buffers")
OFFLOADED = "offloaded"  # beside the device, whatever it is for: it does not count

_COUNTER: ContextVar[Any] = ContextVar("fsfunc_counter", default=None)


def count_as(kind: str, tensors: Iterable[Tensor | None]) -> None:
    """Tells a counter the kind of the memory of ``tensors``, if there is one."""
    counter = _COUNTER.get()
    if counter is not None:
        counter.count_as(kind, tensors)


def counting(counter: Any) -> Scoped:
    """Inside, ``counter.count_as(kind, tensors)`` hears what memory is for."""
    return Scoped(_COUNTER, counter)

"""Which rows of an own tensor a view of it shows, told by their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.tracing.provenance import Rows
from fsfunc.tracing.storages import StorageTable

__all__ = ["OwnTensors"]


@dataclass(frozen=True)
class _Own:
    """An own tensor in its memory: where it begins, and how its rows lie."""

    value: int
    name: str
    start: int
    stop: int
    rows: int
    step: int


class OwnTensors:
    """The own tensors of a step, by their memory: a view of one shows some rows of it.

    Rows are told by dim 0, along which a batch is cut among the ranks. ``were_picked``
    says whether the step took a part of one.
    """

    def __init__(self) -> None:
        self._own = StorageTable[list[_Own]]()
        self.were_picked = False

    def add(self, x: Tensor, value: int, name: str) -> None:
        """An own tensor that fills its memory, or a range of it."""
        if x.layout != torch.strided or not x.ndim or not x.numel():
            return
        start, stop = _span(x)
        new = _Own(value, name, start, stop, x.shape[0], x.stride(0))
        found = self._own.get(x) or []
        within = [own for own in found if own.start <= start and stop <= own.stop]
        if any((own.start, own.stop) != (start, stop) for own in within):
            return  # it is a part of one
        kept = [own for own in found if own.stop <= start or stop <= own.start]
        self._own[x] = [*kept, new]

    def rows(self, x: Tensor) -> Rows | None:
        """Which rows of an own tensor a view of its memory shows; None: all of them."""
        found = self._own.get(x)
        if not found or not x.numel():
            return None
        start, stop = _span(x)
        for own in found:
            if own.step and own.start <= start and stop <= own.stop:
                at = _rows(x, start - own.start, own)
                return None if at is None else Rows(own.value, own.name, at)
        return None

    def picked(self, x: Tensor) -> None:
        """Hears that the step took a part of a tensor, perhaps all of it."""
        self.were_picked |= bool(self._own.get(x))


def _span(x: Tensor) -> tuple[int, int]:
    """The range of memory, in elements, that a tensor's elements lie in."""
    start = int(x.storage_offset())
    reach = sum(
        (int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True)
    )
    return start, start + reach + 1


def _rows(x: Tensor, start: int, own: _Own) -> Any:
    """The first row and how many follow it, or how; None: they are all there."""
    steps, reach = [], 1
    for n, step in zip(x.shape, x.stride(), strict=True):
        if step % own.step == 0 and 0 < step // own.step < own.rows:
            steps.append((step // own.step, n))
        elif own.step > step and (n - 1) * step >= own.step:  # of several dims as one
            steps.append((1, -(-n * step // own.step)))
    for step, n in sorted(steps):
        if step > reach and n > 1:
            return start // own.step % own.rows, tuple(sorted(steps))
        reach += (n - 1) * step
    return None if reach >= own.rows else (start // own.step % own.rows, reach)

"""The rows of an own tensor that a view of it shows, told by their memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.runtime.memory import StorageTable
from fsfunc.tracing.provenance import Gradient, Rows

_SEVERAL = 4  # of fewer rows the halves are single rows too


@dataclass(frozen=True)
class _Own:
    """An own tensor in its memory: where it begins, and how its rows lie."""

    value: int
    root: int
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
        self._lengths: dict[int, int] = {}
        self.were_picked = False

    def add(self, x: Tensor, value: int, root: int, name: str) -> None:
        """An own tensor that fills its memory, or a range of it."""
        if x.layout != torch.strided or not x.ndim or not x.numel():
            return
        start, stop = _span(x)
        new = _Own(value, root, name, start, stop, x.shape[0], x.stride(0))
        found = self._own.get(x) or []
        within = [own for own in found if own.start <= start and stop <= own.stop]
        if any((own.start, own.stop) != (start, stop) for own in within):
            return  # it is a part of one
        kept = [own for own in found if own.stop <= start or stop <= own.start]
        self._own[x] = [*kept, new]

    def rows(self, x: Tensor) -> Rows | None:
        """The rows of an own tensor that a view of its memory shows; None: all."""
        found = self._own.get(x)
        if not found or not x.numel():
            return None
        start, stop = _span(x)
        for own in found:
            if own.step and own.start <= start and stop <= own.stop:
                at = _rows(x, start - own.start, own)
                if at is None:
                    return None
                self._lengths[own.root or own.value] = own.rows
                moved = (own.value, at) if own.root else at
                return Rows(own.root or own.value, own.name, moved)
        return None

    def cover(self, gradient: Gradient) -> bool:
        """True if a gradient is of all rows of each tensor that it was taken of."""
        seen: dict[int, int] = defaultdict(int)
        for rows in gradient.rows:
            block = isinstance(rows.at, tuple) and len(rows.at) == 2
            seen[rows.of] += rows.at[1] if block and type(rows.at[1]) is int else 1
        return all(n >= self._lengths.get(of, 0) for of, n in seen.items())

    def lone(self, rows: Rows) -> bool:
        """True if some rows are one alone, of several, or were chosen one by one."""
        at = rows.at
        if not (isinstance(at, tuple) and len(at) == 2 and type(at[1]) is int):
            return True
        few = self._lengths.get(rows.of, 0) < _SEVERAL
        self.were_picked |= few
        return at[1] == 1 and not few

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

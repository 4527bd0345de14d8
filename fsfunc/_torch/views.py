"""Views of memory as values: a `Place`, from which the same view can be made anew.

Shape, strides and offset are not all that tells views of one memory apart: a view may
be of another dtype, and may be conjugated or negated lazily, by a bit that no data
shows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a tensor lies in its memory, and how that memory is read.

    Attributes:
        dtype, shape, stride: the tensor's.
        start: the byte of its first element.
        conjugated, negated: its lazy bits.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    conjugated: bool
    negated: bool


def place_of(x: Tensor, base: int = 0) -> Place:
    """Returns the place of ``x``, counted from byte ``base`` of its storage."""
    start = int(x.storage_offset()) * x.element_size() - base
    return Place(x.dtype, x.shape, x.stride(), start, x.is_conj(), x.is_neg())


def view_at(memory: Tensor, place: Place) -> Tensor:
    """Returns the tensor at a place, counted from the start of ``memory``.

    It is a copy where the place is not aligned for its dtype.

    Args:
        memory: contiguous, of any dtype.
    """
    dtype, shape, stride, start, conjugated, negated = place
    count = 0
    if 0 not in shape:
        count = 1 + sum(
            (size - 1) * step for size, step in zip(shape, stride, strict=True)
        )
    view = memory.view(-1).view(torch.uint8)[start : start + count * dtype.itemsize]
    if view.storage_offset() % dtype.itemsize:
        view = view.clone()
    view = view.view(dtype)
    view = view.as_strided(shape, stride, view.storage_offset())
    view = view.conj() if conjugated else view
    return torch._neg_view(view) if negated else view

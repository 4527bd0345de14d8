"""Views: all that tells one of the same memory from another, and one made anew of it.

Shape, strides and offset are not all: a view may be of another dtype, and be conjugated
or negated lazily, by a bit that no data shows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a tensor lies in its memory, and how that is read.

    Attributes:
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
    """The place of ``x``, counted from byte ``base`` of its storage."""
    start = int(x.storage_offset()) * x.element_size() - base
    return Place(x.dtype, x.shape, x.stride(), start, x.is_conj(), x.is_neg())


def view_at(memory: Tensor, place: Place) -> Tensor:
    """The tensor at a place, counted from the start of ``memory``.

    Args:
        memory: contiguous; of any dtype. Where it does not lie so that the place's
            dtype may begin there, the tensor is a copy.
    """
    dtype, shape, stride, start, conjugated, negated = place
    count = 0
    if 0 not in shape:
        count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    found = memory.view(-1).view(torch.uint8)[start : start + count * dtype.itemsize]
    if found.storage_offset() % dtype.itemsize:
        found = found.clone()
    found = found.view(dtype)
    found = found.as_strided(shape, stride, found.storage_offset())
    found = found.conj() if conjugated else found
    return torch._neg_view(found) if negated else found

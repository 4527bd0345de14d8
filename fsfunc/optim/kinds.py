"""The properties that plain tensors of an update have in common."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.core.frames import composable
from fsfunc.optim.leaves import are_strided

_device, _dtype = attrgetter("device"), attrgetter("dtype")
_shape = attrgetter("shape")
_WHOLE = {Tensor, torch.nn.Parameter}


class Kind(NamedTuple):
    """The properties that plain tensors, none of them sparse, have in common."""

    device: torch.device
    dtype: torch.dtype
    dense: bool  # whether all are contiguous
    asks: bool  # whether some ask for a gradient


_KINDS: dict[tuple[int, int], tuple[Callable[..., bool], Kind]] = {}


def one_kind(columns: list[list[Any]]) -> Kind | None:
    """The kind of equally long columns of plain tensors that fit each other.

    None where they are of several kinds, or do not fit. Of tensors like those before it
    is known: each step asks anew.
    """
    every = list(chain.from_iterable(columns))
    if not _WHOLE.issuperset(map(type, every)):
        return None
    counts = len(columns), len(every)
    check, kind = _KINDS.get(counts, (None, None))
    if check is None or not check(*every):
        if (kind := _kind_of(columns, every)) is not None and not composable():
            if len(_KINDS) >= 64:
                _KINDS.clear()
            _KINDS[counts] = _torch.alike(every), kind
    return kind


def _kind_of(columns: list[list[Tensor]], every: list[Tensor]) -> Kind | None:
    devices, dtypes = set(map(_device, every)), set(map(_dtype, every))
    first, *others = (list(map(_shape, column)) for column in columns)
    if len(devices) != 1 or len(dtypes) != 1 or any(x != first for x in others):
        return None
    if not are_strided(every):
        return None
    dense = all(map(Tensor.is_contiguous, every))
    asks = any([x.requires_grad for x in every])
    return Kind(devices.pop(), dtypes.pop(), dense, asks)

"""Tensors of one step that lie in different memory: where they meet, and their results.

One rule: what is computed with each other is brought to the device, unless all of it
lies with the host, which computes then. What is made for a tensor that is offloaded
goes to where that lies, at once, so that the device never has it of all leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.memory_spaces import Offloaded, any_offloaded, space_of


def brought(row: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Tensors that are computed with each other: on the device, if only some are.

    Where all of them lie with the host, it is the host that computes.

    Args:
        dtype: of those that are brought; by default their own.
    """
    device = meeting(row)
    if device is None:
        return list(row)
    # Who writes them back does so by a copy in the same stream, and an update of the
    # host's waits for all copies first: nobody waits here.
    return [fetched(x, device, dtype) for x in row]


def some_offloaded(*columns: list[Tensor]) -> bool:
    """True if one of these tensors is; memory of others (activations) may be too."""
    if not any_offloaded():
        return False
    return any(space_of(x).offloaded for x in chain.from_iterable(columns))


def meeting(row: Sequence[Tensor]) -> torch.device | None:
    """The device to which tensors are brought; None: they meet where they lie."""
    if not any_offloaded():
        return None
    spaces = map(space_of, row)
    away = [space.device for space in spaces if isinstance(space, Offloaded)]
    if not away or len(away) == len(row):
        return None
    # What was computed on the host of what lies there is in no store.
    device = away[0]
    return device if any(_torch.device_of(x) == device for x in row) else None


def fetched(
    x: Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    waits: bool = False,
) -> Tensor:
    """``x`` on the device; a copy, in ``dtype``, of what is offloaded or on the host.

    Args:
        waits: whether Python may write ``x`` next.
    """
    if (space := space_of(x)).offloaded:
        return space.fetch(x, dtype, waits=waits)
    return x if _torch.device_of(x) == device else x.to(device, dtype)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """``x`` to be read on the device, where it may lie in a store already."""
    return x if _torch.device_of(x) == device else fetched(x, device)


def brought_with(row: Sequence[Tensor], decay: Any) -> list[Any]:
    """The arguments of a rule: a row that is brought, and its decay beside it."""
    row = brought(row)
    if isinstance(decay, Tensor) and any_offloaded():
        decay = decay.to(_torch.device_of(row[0]))
    return [*row, decay]


def returned(x: Tensor, to: Tensor, *, keeps: bool = False) -> Tensor:
    """``x``, which was computed for ``to``: in the memory space of that one.

    Args:
        keeps: whether it outlives the step; else it takes memory of a pool.
    """
    if not any_offloaded() or _torch.is_wrapped(x) or x.requires_grad:
        return x
    space = space_of(to)
    if not space.offloaded or space_of(x).offloaded:
        return x
    return space.copied(x) if keeps else space.put(x)


def room_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dense memory for what is made of ``x`` in a step, in its memory space."""
    if (space := space_of(x)).offloaded:
        return space.new_empty(x, x.shape, dtype)
    form = torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=form, requires_grad=False)

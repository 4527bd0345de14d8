"""Tensors of one step that lie in different memory: where they meet, and their results.

All that optimizers ask of offloading is asked here. One rule: what is computed with
each other is brought to the device, unless all of it lies with the host, which computes
then. What is made for a tensor that is offloaded goes to where that lies, at once, so
that the device never has it of all leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.host_copies import wait_for
from fsfunc.runtime.memory_spaces import (
    Offloaded,
    any_offloaded,
    moments_store,
    space_of,
)
from fsfunc.sharded.leaf import Sharded

# Which device computes


def computing_device(x: Tensor) -> torch.device:
    """The device that computes with ``x``, also where it lies with the host."""
    return _torch.device_of(space_of(x).on_device(x))


def device_with(leaf: Sharded | Tensor) -> torch.device:
    """The device that computes with a leaf; see `computing_device`."""
    if not any_offloaded():
        return leaf.device
    if not isinstance(leaf, Sharded):
        return computing_device(leaf)
    return computing_device(leaf.local if leaf.packed is None else leaf.packed.flat)


def can_meet(leaf: Sharded | Tensor, other: Sharded | Tensor) -> bool:
    """True if leaves of two devices are computed with on one.

    Some of a state may be offloaded, others not; and what was computed of an offloaded
    one, by the host, lies beside it and is no part of its store.
    """
    return any_offloaded() and device_with(leaf) == device_with(other)


def some_offloaded(*columns: Sequence[Tensor]) -> bool:
    """True if one of these tensors is; memory of others (activations) may be too."""
    if not any_offloaded():
        return False
    return any(space_of(x).offloaded for x in chain.from_iterable(columns))


def meeting_device(row: Sequence[Tensor]) -> torch.device | None:
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


# On the way there, and back


def bring_together(
    row: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Tensors that are computed with each other: on the device, if only some are.

    Where all of them lie with the host, it is the host that computes.

    Args:
        dtype: of those that are brought; by default their own.
    """
    device = meeting_device(row)
    if device is None:
        return list(row)
    # Who writes them back does so by a copy in the same stream, and an update of the
    # host's waits for all copies first: nobody waits here.
    return [fetch_to(x, device, dtype) for x in row]


def bring_with_decay(row: Sequence[Tensor], decay: Any) -> list[Any]:
    """The arguments of a rule: a row that is brought, and its decay beside it."""
    row = bring_together(row)
    if isinstance(decay, Tensor) and any_offloaded():
        decay = decay.to(_torch.device_of(row[0]))
    return [*row, decay]


def fetch_to(
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


def readable_on(x: Tensor, device: torch.device) -> Tensor:
    """``x`` to be read on the device, where it may lie in a store already."""
    return x if _torch.device_of(x) == device else fetch_to(x, device)


def copy_to(out: Tensor, x: Tensor) -> Tensor:
    """Copies ``x`` into ``out``, wherever they lie; returns that, to be read next."""
    space = space_of(out)
    if not space.offloaded and (source := space_of(x)).offloaded:
        return source.fetch(x, out=out)
    space.write(out, x)
    return wait_for(out)


def copy_all_to(outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Copies each of ``xs`` into one of ``outs``: a kernel for `in_place.fused`."""
    if meeting_device([*outs, *xs]) is None:
        torch._foreach_copy_(list(outs), list(xs))
    else:
        for out, x in zip(outs, xs, strict=True):
            copy_to(out, x)


def return_beside(x: Tensor, to: Tensor, *, keeps: bool = False) -> Tensor:
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


def run_rule(
    rule: Callable[..., Sequence[Tensor]],
    row: Sequence[Tensor],
    decay: Any,
    returns_params: bool,
) -> Sequence[Tensor]:
    """Runs a rule; each result lies where that lies of which it is the next.

    Args:
        rule: ``rule(param, grad, *moments, decay)``.
        returns_params: whether its first result is the next parameter, not an update.
    """
    made = rule(*bring_with_decay(row, decay))
    if not any_offloaded():
        return made
    param, grad, *moments = row
    first = return_beside(
        made[0], param if returns_params else grad, keeps=returns_params
    )
    rest = zip(made[1:], moments, strict=True)
    return [first, *(return_beside(x, m, keeps=True) for x, m in rest)]


# Memory


def step_memory_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Dense memory for what is made of ``x`` in a step, in its memory space."""
    if (space := space_of(x)).offloaded:
        return space.new_empty(x, x.shape, dtype)
    form = torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=form, requires_grad=False)


def state_memory_like(
    x: Tensor, dtype: torch.dtype | None = None, *, zeros: bool = False
) -> Tensor:
    """Memory like ``x``, on its device or where `init_state` wants moments to lie."""
    store, device = moments_store(), computing_device(x)
    if store is None:
        make = torch.zeros_like if zeros else torch.empty_like
        return make(x, dtype=dtype, device=device, requires_grad=False)
    room = store.empty(x.numel(), dtype or x.dtype, device).view(x.shape)
    return room.zero_() if zeros else room


def state_zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Zeros of a shape, in the same place."""
    if (store := moments_store()) is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return store.empty(math.prod(shape), dtype, device).view(shape).zero_()

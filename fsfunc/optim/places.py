"""Decides where an update computes when some of its tensors are offloaded.

Optimizers ask here where a row is computed; files that write their own memory
(`in_place`, `coded_moments`, `widening`) ask for a tensor's space themselves.

Tensors of one row (a parameter, its gradient and its moments) are fetched to the
device, unless all of them lie in host memory: then the host computes. A result that
belongs to an offloaded tensor goes to that one's memory at once, so the device never
has all results at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc._torch.fake_results import fakes_like
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
    """Returns the device that computes with ``x``, also if ``x`` is offloaded."""
    return _torch.device_of(space_of(x).on_device(x))


def device_with(leaf: Sharded | Tensor) -> torch.device:
    """Returns the device that computes with a leaf; see `computing_device`."""
    if not any_offloaded():
        return leaf.device
    if not isinstance(leaf, Sharded):
        return computing_device(leaf)
    return computing_device(leaf.local if leaf.packed is None else leaf.packed.flat)


def can_meet(leaf: Sharded | Tensor, other: Sharded | Tensor) -> bool:
    """Returns whether leaves on two devices are computed with on one.

    A part of a state may be offloaded, and the rest not. What the host computed of an
    offloaded leaf lies in host memory too, without being in its store.
    """
    return any_offloaded() and device_with(leaf) == device_with(other)


def some_offloaded(*columns: Sequence[Tensor]) -> bool:
    """Returns whether any of these tensors is offloaded."""
    if not any_offloaded():
        return False  # nothing in this process is; activations may be and not these
    return any(space_of(x).offloaded for x in chain.from_iterable(columns))


def meeting_device(row: Sequence[Tensor]) -> torch.device | None:
    """Returns the device to fetch tensors to; None if they need not be moved."""
    if not any_offloaded():
        return None
    spaces = map(space_of, row)
    devices = [space.device for space in spaces if isinstance(space, Offloaded)]
    if not devices or len(devices) == len(row):
        return None
    # A tensor outside of the stores may lie on the host all the same, as a result of
    # the host's: only one that is on the device makes all of them meet there.
    device = devices[0]
    return device if any(_torch.device_of(x) == device for x in row) else None


# To the device, and back


def bring_together(
    row: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Returns tensors that can be computed with each other.

    On the device if any of them lies there; where they are if all lie on the host.

    Args:
        dtype: of those that are fetched; by default their own.
    """
    device = meeting_device(row)
    if device is None:
        return list(row)
    # Nobody waits for these copies here: what is written back is copied in the same
    # stream, and an update that the host computes waits for all copies first.
    return [fetch_to(x, device, dtype) for x in row]


def bring_with_decay(row: Sequence[Tensor], decay: float | Tensor) -> list[Any]:
    """Returns the arguments of a rule: `bring_together`, and the decay beside them."""
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
    """Returns ``x`` on the device; a copy in ``dtype`` if it was elsewhere.

    Args:
        waits: whether Python may write ``x`` next.
    """
    if (space := space_of(x)).offloaded:
        return space.fetch(x, dtype, waits=waits)
    return x if _torch.device_of(x) == device else x.to(device, dtype)


def readable_on(x: Tensor, device: torch.device) -> Tensor:
    """Returns ``x`` to be read on the device; itself if it lies there.

    So may a tensor that is offloaded, where the device is a CPU: no copy is needed.
    """
    return x if _torch.device_of(x) == device else fetch_to(x, device)


def copy_to(out: Tensor, x: Tensor) -> Tensor:
    """Copies ``x`` into ``out``, wherever they lie; returns ``out``, ready to read."""
    space = space_of(out)
    if not space.offloaded and (source := space_of(x)).offloaded:
        return source.fetch(x, out=out)
    space.write(out, x)
    return wait_for(out)


def copy_all_to(outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Copies ``xs`` into ``outs``, one by one: a kernel for `in_place.run_kernel`."""
    if meeting_device([*outs, *xs]) is None:
        torch._foreach_copy_(list(outs), list(xs))
    else:
        for out, x in zip(outs, xs, strict=True):
            copy_to(out, x)


def return_beside(x: Tensor, to: Tensor, *, outlives_step: bool = False) -> Tensor:
    """Returns ``x``, which was computed for ``to``, in the memory space of ``to``.

    Args:
        outlives_step: whether ``x`` is part of the next state; otherwise it takes
            memory of a pool.
    """
    if not any_offloaded() or _torch.is_wrapped(x) or x.requires_grad:
        return x
    space = space_of(to)
    if not space.offloaded or space_of(x).offloaded:
        return x
    return space.copied(x) if outlives_step else space.put(x)


def run_rule(
    rule: Callable[..., Sequence[Tensor]],
    row: Sequence[Tensor],
    decay: float | Tensor,
    returns_params: bool,
) -> Sequence[Tensor]:
    """Runs a rule; each result lies where its old value lies.

    Args:
        rule: ``rule(param, grad, *moments, decay)``.
        returns_params: whether its first result is the next parameter, not an update.
    """
    results = rule(*bring_with_decay(row, decay))
    if not any_offloaded():
        return results
    param, grad, *moments = row
    old = param if returns_params else grad
    first = return_beside(results[0], old, outlives_step=returns_params)
    new_moments = [
        return_beside(x, moment, outlives_step=True)
        for x, moment in zip(results[1:], moments, strict=True)
    ]
    return [first, *new_moments]


# Memory


def step_memory_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns dense memory for what a step computes of ``x``, in its memory space."""
    if (space := space_of(x)).offloaded:
        return space.new_empty(x, x.shape, dtype)
    dense = torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=dense, requires_grad=False)


def state_memory_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns memory like ``x`` for a part of an optimizer's state.

    On the device of ``x``, or in the store that `init_state` was told for moments.
    """
    store, device = moments_store(), computing_device(x)
    if store is None:
        return torch.empty_like(x, dtype=dtype, device=device, requires_grad=False)
    return store.empty(x.numel(), dtype or x.dtype, device).view(x.shape)


def state_zeros_like(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]
) -> list[Tensor]:
    """Returns zeros like each of ``tensors``, in memory of `state_memory_like`."""
    pairs = list(zip(tensors, dtypes, strict=True))
    if moments_store() is not None:
        return [state_memory_like(x, dtype).zero_() for x, dtype in pairs]
    if (fakes := fakes_like(tensors, dtypes)) is not None:
        return fakes
    return [
        torch.zeros_like(
            x, dtype=dtype, device=computing_device(x), requires_grad=False
        )
        for x, dtype in pairs
    ]


def state_zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns zeros of any shape where `state_memory_like` makes memory."""
    if (store := moments_store()) is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return store.empty(math.prod(shape), dtype, device).view(shape).zero_()

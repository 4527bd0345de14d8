"""functorch's levels and wrappers, and forward mode, which has levels of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_current_level,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import (
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor


def functorch_active() -> bool:
    """True if a ``torch.func`` transform (grad, vjp, jvp, vmap) is running."""
    return torch._C._are_functorch_transforms_active()


def plainly(x: Tensor) -> bool:
    """True if autograd sees what is called here, and modes only if ``x`` is fake."""
    if torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled():
        return False
    return not torch._C._len_torch_dispatch_stack() or isinstance(x, FakeTensor)


@contextmanager
def beneath_functorch() -> Iterator[None]:
    """Inside, no ``torch.func`` transform sees what is called."""
    guard = torch._C._DisableFuncTorch()
    try:
        yield
    finally:
        del guard


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Inside, no ``torch.func`` transform is running; give it tensors by `one_row`."""
    with temporarily_clear_interpreter_stack():
        yield


def forward_ad_active() -> bool:
    """True if a dual level of ``torch.autograd.forward_ad`` is open."""
    return torch.autograd.forward_ad._current_level >= 0


def transforms_active() -> bool:
    """True if a ``torch.func`` transform runs, or a level of forward mode is open."""
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.autograd.forward_ad._current_level >= 0


def forward_ad_on() -> Any:
    """Inside, tangents go through plain operations.

    torch shuts them off within a Function's ``jvp``, also those of outer levels: a
    plain operation there makes a ``jvp`` of a ``jvp`` zero in silence.
    """
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)


def forward_ad_state() -> tuple[int, int]:
    """(the open dual level, how deep in ``jvp``): torch has one for the process."""
    return torch.autograd.forward_ad._current_level, eager_transforms.JVP_NESTING


def set_forward_ad_state(state: tuple[int, int]) -> None:
    """Puts back what :func:`forward_ad_state` returned."""
    torch.autograd.forward_ad._current_level, eager_transforms.JVP_NESTING = state


@contextmanager
def shared_forward_ad() -> Iterator[None]:
    """Inside, threads that take turns may each have a dual level open.

    torch has one for the process, and closing it ends everybody's tangents: here it
    stays open until the last has closed it. Who passes on the turn also passes
    :func:`forward_ad_state`.
    """
    ad = torch.autograd.forward_ad
    enter, leave, holders = ad.enter_dual_level, ad.exit_dual_level, 0

    def enter_shared() -> int:
        nonlocal holders
        if holders == 0 or ad._current_level >= 0:  # torch refuses to nest them
            enter()
        holders, ad._current_level = holders + 1, 0
        return 0

    def leave_shared(*, level: int | None = None) -> None:
        nonlocal holders
        holders -= 1
        if holders == 0:
            leave(level=level)
        ad._current_level = -1

    ad.enter_dual_level, ad.exit_dual_level = enter_shared, leave_shared
    try:
        yield
    finally:
        ad.enter_dual_level, ad.exit_dual_level = enter, leave


def current_level() -> int:
    """The functorch level that is running (0: none)."""
    return maybe_current_level() or 0


def unwrapped(x: Tensor) -> Tensor:
    """The plain tensor inside any functorch wrappers."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def one_row(x: Tensor) -> Tensor:
    """The plain tensor inside any functorch wrappers; of what is mapped, one row."""
    while is_functorch_wrapped_tensor(x):
        dim = maybe_get_bdim(x) if is_batchedtensor(x) else -1
        x = get_unwrapped(x)
        x = x if dim < 0 else x.select(dim, 0)
    return x


def is_wrapped(x: Tensor) -> bool:
    """True if a functorch level wraps ``x``."""
    return is_functorch_wrapped_tensor(x)


def _wrappers(x: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Each functorch wrapper around a tensor and its level, the outermost first."""
    while is_functorch_wrapped_tensor(x):
        yield x, maybe_get_level(x)
        x = get_unwrapped(x)


def differentiated_at(x: Tensor) -> int:
    """The innermost functorch level that differentiates ``x`` in reverse (0: none)."""
    levels = [
        n for y, n in _wrappers(x) if is_gradtrackingtensor(y) and y.requires_grad
    ]
    return max(levels, default=0)


def mapped_at(x: Tensor) -> list[int]:
    """The functorch levels that ``vmap`` over ``x``."""
    return [n for y, n in _wrappers(x) if is_batchedtensor(y)]


def mapped_dim(x: Tensor) -> tuple[int, int]:
    """The stride and size of the dim along which the innermost ``vmap`` maps ``x``."""
    for y, _ in _wrappers(x):
        if is_batchedtensor(y):
            dim, inner = maybe_get_bdim(y), get_unwrapped(y)
            return inner.stride(dim), inner.shape[dim]
    return 0, 0


def mapping_levels() -> list[int]:
    """The functorch levels of the ``vmap``s around, the outermost first."""
    stack = get_interpreter_stack() or []
    return [i.level() for i in stack if i.key() == TransformType.Vmap]


def tangents_of(x: Tensor) -> list[Tensor]:
    """The tangents of ``x`` at every level of forward mode, and those of these."""
    if not forward_ad_active() or not (x.is_floating_point() or x.is_complex()):
        return []
    stack = get_interpreter_stack()
    tangent = None
    if not stack or stack[-1].key() == TransformType.Jvp:
        tangent = torch.autograd.forward_ad.unpack_dual(x).tangent
    found = [] if tangent is None else [tangent]
    if not stack:
        return found
    level = stack[-1].level()
    below = [
        get_unwrapped(y) if maybe_get_level(y) == level else y for y in [x, *found]
    ]
    with retrieve_current_functorch_interpreter().lower():
        return found + [t for y in below for t in tangents_of(y)]

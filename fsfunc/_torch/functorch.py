"""torch.func's levels and wrappers, and forward mode, which has levels of its own.

Each ``grad``, ``vmap`` or ``jvp`` that runs is a level, from 1 on. A tensor that takes
part in one is a wrapper around the tensor of the level below; at the bottom lies the
plain tensor (`unwrapped`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

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
    """Returns whether a ``torch.func`` transform (grad, vjp, jvp, vmap) is running."""
    return torch._C._are_functorch_transforms_active()


def only_autograd_sees(x: Tensor) -> bool:
    """Returns whether autograd alone sees what is called here.

    Modes may see it too if ``x`` is fake.
    """
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
    """Inside, no ``torch.func`` transform is running: for tensors by `first_row`."""
    with temporarily_clear_interpreter_stack():
        yield


def forward_ad_active() -> bool:
    """Returns whether a dual level of ``torch.autograd.forward_ad`` is open."""
    return torch.autograd.forward_ad._current_level >= 0


def transforms_active() -> bool:
    """Returns whether a ``torch.func`` transform runs, or a dual level is open."""
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.autograd.forward_ad._current_level >= 0


def forward_ad_enabled() -> AbstractContextManager[None]:
    """Inside, plain operations take tangents along, also within a Function's ``jvp``.

    There torch shuts tangents off, and those of outer levels with them: a plain
    operation in it makes the ``jvp`` of a ``jvp`` zero without an error.
    """
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)


def forward_ad_state() -> tuple[int, int]:
    """Returns (the open dual level, how deep in ``jvp``): torch has one per process."""
    return torch.autograd.forward_ad._current_level, eager_transforms.JVP_NESTING


def set_forward_ad_state(state: tuple[int, int]) -> None:
    """Restores what :func:`forward_ad_state` returned."""
    torch.autograd.forward_ad._current_level, eager_transforms.JVP_NESTING = state


@contextmanager
def shared_forward_ad() -> Iterator[None]:
    """Inside, threads that run by turns may each have a dual level open.

    torch has one level for the process, and closing it ends the tangents of all
    threads: here it stays open until the last thread has closed it. With each turn
    :func:`forward_ad_state` must be restored for the thread that runs next.
    """
    ad = torch.autograd.forward_ad
    enter, leave, holders = ad.enter_dual_level, ad.exit_dual_level, 0

    def enter_shared() -> int:
        nonlocal holders
        # In the second case this thread has one open: torch refuses to nest them.
        if holders == 0 or ad._current_level >= 0:
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
    """Returns the level that is running (0: none)."""
    return maybe_current_level() or 0


def unwrapped(x: Tensor) -> Tensor:
    """Returns the plain tensor inside any wrappers."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def first_row(x: Tensor) -> Tensor:
    """Returns the plain tensor inside any wrappers; of a mapped one, its first row."""
    while is_functorch_wrapped_tensor(x):
        dim = maybe_get_bdim(x) if is_batchedtensor(x) else -1
        x = get_unwrapped(x)
        x = x if dim < 0 else x.select(dim, 0)
    return x


def is_wrapped(x: Tensor) -> bool:
    """Returns whether ``x`` is a wrapper of a level."""
    return is_functorch_wrapped_tensor(x)


def _wrappers(x: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yields each wrapper around a tensor and its level, the outermost first."""
    while is_functorch_wrapped_tensor(x):
        yield x, maybe_get_level(x)
        x = get_unwrapped(x)


def differentiation_level(x: Tensor) -> int:
    """Returns the innermost level that differentiates ``x`` in reverse (0: none)."""
    levels = [
        n for y, n in _wrappers(x) if is_gradtrackingtensor(y) and y.requires_grad
    ]
    return max(levels, default=0)


def vmap_levels_of(x: Tensor) -> list[int]:
    """Returns the levels that ``vmap`` over ``x``."""
    return [n for y, n in _wrappers(x) if is_batchedtensor(y)]


def vmap_dim(x: Tensor) -> tuple[int, int]:
    """Returns stride and size of the dim along which the innermost ``vmap`` maps."""
    for y, _ in _wrappers(x):
        if is_batchedtensor(y):
            dim, inner = maybe_get_bdim(y), get_unwrapped(y)
            return inner.stride(dim), inner.shape[dim]
    return 0, 0


def vmap_levels() -> list[int]:
    """Returns the levels of the ``vmap``s that run, the outermost first."""
    stack = get_interpreter_stack() or []
    return [i.level() for i in stack if i.key() == TransformType.Vmap]


def tangents_of(x: Tensor) -> list[Tensor]:
    """Returns the tangents of ``x`` at every level of forward mode, and theirs."""
    if not forward_ad_active() or not (x.is_floating_point() or x.is_complex()):
        return []
    stack = get_interpreter_stack()
    tangent = None
    if not stack or stack[-1].key() == TransformType.Jvp:
        tangent = torch.autograd.forward_ad.unpack_dual(x).tangent
    tangents = [] if tangent is None else [tangent]
    if not stack:
        return tangents
    # The level that runs has its own tangents only: the others are found below it.
    level = stack[-1].level()
    below = [
        get_unwrapped(y) if maybe_get_level(y) == level else y for y in [x, *tangents]
    ]
    with retrieve_current_functorch_interpreter().lower():
        return tangents + [t for y in below for t in tangents_of(y)]

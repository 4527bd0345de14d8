"""torch's fused and foreach operations: the private names that optimizers rest on.

Written against torch 2.13. None of them has a ``vmap`` rule, and the fused ones have
neither a derivative nor a guard: they read memory as if every tensor were dense, and
leave version counters as they were. `matching` sees to all of that.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsfunc import _torch


def fused_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    *,
    step: Tensor,
    learning_rate: float | Tensor,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Write one AdamW step into params, mu and nu, in one pass over memory.

    The tensors are dense, of one dtype and on one device; ``step`` is a 0-dim float32
    tensor there, 1 at the first step.
    """
    torch._fused_adamw_(
        list(params),
        list(grads),
        list(mu),
        list(nu),
        [],
        [step] * len(params),
        lr=learning_rate,  # pyright: ignore[reportArgumentType] one overload each
        beta1=b1,
        beta2=b2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def fused_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    learning_rate: float | Tensor,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
) -> None:
    """Write one SGD step into params and momenta, in one pass over memory.

    The tensors are dense, of one dtype and on one device; ``momenta`` is empty where
    ``momentum`` is 0; at the first step they need not hold anything.
    """
    torch._fused_sgd_(
        list(params),
        list(grads),
        list(momenta),
        lr=learning_rate,  # pyright: ignore[reportArgumentType] one overload each
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        maximize=False,
        is_first_step=first,
    )


def add(
    params: Sequence[Tensor], updates: Sequence[Tensor], *, weight_decay: float
) -> None:
    """Add the updates to params, in place; there is no decay in an addition."""
    torch._foreach_add_(list(params), list(updates))


def norms(tensors: Sequence[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The p-norm of each (non-empty) tensor, accumulated in ``dtype``: 0-dim."""
    if composable():
        return [torch.linalg.vector_norm(t, p, dtype=dtype) for t in tensors]
    return list(torch._foreach_norm(list(tensors), p, dtype=dtype)) if tensors else []


def scaled(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Each tensor times ``factor`` (a number or 0-dim tensor), in its own dtype."""
    if composable():
        return [t * factor for t in tensors]
    if isinstance(factor, Tensor) and len({t.device for t in tensors}) > 1:
        return [t * factor.to(t.device) for t in tensors]
    return list(torch._foreach_mul(list(tensors), factor)) if tensors else []


def differentiated(tensors: Sequence[Tensor]) -> bool:
    """Whether somebody may differentiate through what is done with ``tensors``."""
    if composable():
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def composable() -> bool:
    """Whether only operations with derivatives and ``vmap`` rules will do."""
    return _torch.functorch_active() or _torch.forward_ad_active()

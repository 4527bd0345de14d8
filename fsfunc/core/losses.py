"""What a loss may return, what its parts are, and where its backward starts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Weighted", "loss_parts", "tie"]


class Weighted(NamedTuple):
    """A loss as a sum and its weight: the value is sum of totals / sum of weights.

    Exact for batches of uneven size over ranks and microbatches: each returns the sum
    over its samples and their number (or its tokens and their number).

    Args:
        total: scalar, differentiated.
        weight: scalar tensor or number, not differentiated.
    """

    total: Tensor
    weight: Tensor | float


def loss_parts(out: Any, has_aux: bool) -> tuple[Tensor, Tensor | None, Any]:
    """(total, weight, aux) of what a loss returned, checked."""
    aux = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2 or isinstance(out, Weighted):
            raise TypeError("has_aux=True: the loss must return (loss, aux)")
        out, aux = out
    weight = None
    if isinstance(out, Weighted):
        out, weight = out
        if not isinstance(weight, Tensor):
            weight = torch.as_tensor(weight, dtype=out.dtype, device=out.device)
        weight = weight.detach().to(out.dtype)
    if not isinstance(out, Tensor):
        raise TypeError(f"the loss must be a scalar tensor, got {type(out).__name__}")
    if out.shape != () or not out.is_floating_point():
        raise ValueError(
            f"the loss must be a floating scalar, got shape {tuple(out.shape)} of "
            f"{out.dtype}: take its mean, or return ff.Weighted(total, weight)"
        )
    return out, weight, aux


def tie(loss: Tensor, token: Tensor) -> Tensor:
    """``loss``, whose backward reaches ``token`` with an exact zero."""
    return _Tie.apply(loss, token)


class _Tie(torch.autograd.Function):
    """The loss, tied to the thread: its gradient reaches the token as an exact zero.

    ``loss + 0 * token`` would not do: it turns an infinity into NaN.
    """

    @staticmethod
    def forward(ctx, loss, token):  # type: ignore[override]
        return loss.clone()

    @staticmethod
    def backward(ctx, g):  # type: ignore[override]
        return g, torch.zeros_like(g)

"""Where a backward pass starts: the loss, tied to the thread of units."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["tie"]


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

"""Where a backward pass starts: the loss, tied to the thread of units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsfunc.frames import Frame

__all__ = ["cotangent", "invariant_over", "tie"]


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


def cotangent(f: Frame, tied: Tensor, total: Tensor, seen: set[str]) -> Tensor:
    """The cotangent of the loss: 1, or n where the loss is one value over n ranks.

    Under the mean over ranks each rank's own loss has the cotangent 1. A loss that the
    user reduced over the axis is one value, which a cast I->V hands to the n ranks, so
    it must be taken n times for the mean to take it once.
    """
    one = torch.ones_like(tied)
    for _, session in f.sessions:
        for axis in session.mean_axes:
            if axis in seen and invariant_over(total, axis):
                one = one * session.handler.mesh.axis_size(axis)
    return one


def invariant_over(total: Tensor, axis: str) -> bool:
    """Whether every path from the loss passes a collective over ``axis`` to one value.

    Raises:
        ValueError: some paths do and others do not.
    """
    reduced = varying = False
    seen: set[Any] = set()
    todo: list[Any] = [total.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        move = getattr(node, "move", None)
        if move is not None and move.to == "I" and axis in node.where.axis:
            reduced = True
        elif hasattr(node, "variable") or getattr(node, "leaves_unit", False):
            varying = True
        else:
            todo.extend(n for n, _ in node.next_functions)
    if reduced and varying:
        raise ValueError(
            f"the loss adds a value reduced over {axis!r} to this rank's own: "
            "return the rank's own mean and let shard take the mean over the ranks, "
            "or reduce all of it"
        )
    return reduced

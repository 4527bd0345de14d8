"""How many FLOPs an operator takes: 2 for a multiplication and its addition."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from fsfunc import _torch

__all__ = ["FLOPS"]


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """q k^T and then (that) v, for each batch entry and head."""
    rows = q.shape[:-1].numel()
    return 2 * rows * k.shape[-2] * (k.shape[-1] + v.shape[-1])


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Each row, or each column, times those of its own group alone."""
    pairs = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * pairs * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _attention_backward(g: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The scores again, and the gradients of v, of the scores, of q and of k."""
    rows, keys = q.shape[:-1].numel(), k.shape[-2]
    return 2 * rows * keys * (3 * q.shape[-1] + 2 * v.shape[-1])


# torch counts nothing for the first three.
FLOPS: dict[Any, Any] = {
    _torch.CPU_ATTENTION: _attention,
    _torch.CPU_ATTENTION_BACKWARD: _attention_backward,
    _torch.GROUPED_PRODUCT: _grouped,
    **flop_registry,
}

"""Which tensors can travel between ranks, and as what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["check_kind", "dense", "strided"]

_MOVED = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
}  # fmt: skip


def check_kind(op: str, x: Tensor, where: Any) -> None:
    """Raises where a tensor is of a kind that does not travel between ranks.

    Raises:
        TypeError: names dtype or layout, and the way out.
    """
    if x.dtype not in _MOVED:
        raise TypeError(
            f"{op} over {where.name} of {x.dtype}: no backend sends or sums it. Send "
            "its bytes, x.view(torch.uint8), or sum it in a wider dtype"
        )
    if x.is_meta and where.link.moves:
        raise TypeError(f"{op} over {where.name} of a meta tensor: it has no values")
    if x.layout != torch.strided:
        raise TypeError(
            f"{op} over {where.name} of a tensor with layout {x.layout}: ranks "
            "exchange dense tensors; x.to_dense() is one"
        )


def dense(x: Tensor) -> Tensor:
    """``x`` as it lies in memory, element by element: neither lazy nor strided."""
    if x.is_complex() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous()


def strided(x: Tensor) -> Tensor:
    """A gradient with all its zeros: some ranks' may be sparse, and others' not."""
    return x if x.layout == torch.strided else x.to_dense()

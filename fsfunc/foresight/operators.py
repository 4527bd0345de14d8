"""What one operator does, as an :class:`~fsfunc.foresight.events.Op`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc.foresight.events import Op
from fsfunc.tracing.costs import FLOPS

__all__ = ["describe"]

aten: Any = torch.ops.aten


# Memory alone: nothing is computed or copied.
_EMPTY = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided,
}  # fmt: skip
# These read, of their first argument, only what they return; or write only that much.
_LOOKUPS = {aten.embedding, aten.index_select, aten.gather, aten.index}


def describe(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    read: Sequence[Tensor],
    made: Sequence[Tensor],
) -> Op | None:
    """The operator that ran, or None for one that only takes memory.

    Args:
        func: torch's operator; ``args``, ``kwargs``, ``out``: its call.
        read, made: the tensors among its arguments, and those that it returned.
    """
    packet = func.overloadpacket
    if packet in _EMPTY:
        return None
    count = FLOPS.get(packet)
    flops = int(count(*args, **kwargs, out_val=out)) if count is not None else 0
    if packet in _LOOKUPS:
        size = 2 * sum(map(_bytes, made)) + sum(map(_bytes, read[1:]))
    elif packet is aten.nll_loss_forward:
        size = 2 * _bytes(read[1])
    else:
        size = sum(map(_bytes, {id(x): x for x in (*read, *made)}.values()))
    floats = [x.dtype for x in (*read, *made) if x.is_floating_point()]
    dtype = floats[0] if floats else (*made, *read)[0].dtype
    dims = _dims(packet, read)
    return Op(str(packet), flops, size, dtype, dims, _causal(func, args, kwargs))


def _bytes(x: Tensor) -> int:
    """What lies under ``x``: a broadcast dim is there once."""
    count = 1
    for n, step in zip(x.shape, x.stride(), strict=True):
        if step:
            count *= n
    return int(count if x.numel() else 0) * x.element_size()


def _dims(packet: Any, read: Sequence[Tensor]) -> tuple[int, ...]:
    if packet in (aten.mm, aten.addmm):
        a, b = read[-2:]
        return (1, int(a.shape[0]), int(a.shape[1]), int(b.shape[1]))
    if packet in (aten.bmm, aten.baddbmm):
        a, b = read[-2:]
        return (*map(int, a.shape), int(b.shape[2]))
    if is_attention(packet):
        q, k = read[1:3] if "backward" in str(packet) else read[:2]
        heads = int(q.shape[:-2].numel())
        return (heads, int(q.shape[-2]), int(k.shape[-2]), int(q.shape[-1]))
    return ()


def is_attention(packet: Any) -> bool:
    """Whether an operator is a fused attention."""
    name = str(packet)
    return "_attention" in name and "scaled_dot_product" in name


def _causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if not is_attention(func.overloadpacket):
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return False
    at = names.index("is_causal")
    return bool(args[at] if at < len(args) else kwargs.get("is_causal", False))

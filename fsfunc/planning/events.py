"""The events of a step, in order, as data: a plan is a list of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.comm.ledgers import Record
from fsfunc.runtime.memory_spaces import any_offloaded, space_of
from fsfunc.tracing.operators import FLOPS

# "update" is all that lies outside a gradient call: the optimizer, and what comes in.
PHASES = ("forward", "recompute", "backward", "update")


class Op(NamedTuple):
    """One operator that computes or copies (views are not noted).

    Args:
        name: torch's, such as ``aten.mm``.
        flops: as ``torch.utils.flop_counter`` counts: 2 for a multiplication and its
            addition, an attention whole whatever its mask; 0 for what it has no
            formula for.
        bytes: of all tensors that it reads and writes, each once.
        dtype: of its first tensor of floats, or of its result.
        dims: (batch, m, k, n) of a product [batch, m, k] @ [batch, k, n]; of an
            attention (batch * heads, queries, keys, head dim); empty elsewhere.
        causal: whether a mask spares it half of its ``flops``.
        store: the kind of the ``Store`` beside the device, such as "host", that its
            tensors lie in; "" on the device.
        crosses: whether it copies between that and the device; ``bytes`` are then of
            what lies in the store.
    """

    name: str
    flops: int
    bytes: int
    dtype: torch.dtype
    dims: tuple[int, ...] = ()
    causal: bool = False
    store: str = ""
    crosses: bool = False


class Ran(NamedTuple):
    """An operator ran, in a unit (or "" outside every unit) and a phase."""

    op: Op
    unit: str
    phase: str


class Started(NamedTuple):
    """The rank did its part of a transfer; ``number`` tells it from others.

    Args:
        part: "issued" of a collective over ``ranks``; "sent" or "asked for" of a
            message from the first of them to the second. The n-th that is asked for is
            the n-th that is sent.
        record: what the ledger has of it, which has of a message the sender's.
    """

    number: int
    part: str
    ranks: tuple[int, ...]
    record: Record | None = None


class Waited(NamedTuple):
    """The rank waited until the collective or transfer ``number`` was over."""

    number: int


class Took(NamedTuple):
    """Memory was taken: a storage of ``bytes``, by ``op`` of a unit and phase.

    ``key`` tells it from all other storages of the rank. What the step was given has
    ``op`` ``""`` and comes before everything else. ``owner``: the unit whose buffer it
    is, where that is known: a prefetch is taken while another unit runs.
    """

    key: int
    bytes: int
    op: str
    unit: str
    phase: str
    owner: str = ""


class Gave(NamedTuple):
    """The memory ``key`` was given back."""

    key: int


Event = Ran | Started | Waited | Took | Gave


class Turn(NamedTuple):
    """The work on a microbatch begins.

    Args:
        at: the number of the event that comes next.
        name: "F", "B" and so on of a pipeline's schedule, "m" of ``accumulate``; ""
            where none is at work.
        stage: of a pipeline, where a rank has several.
    """

    at: int
    name: str
    microbatch: int
    stage: int | None = None

    @property
    def label(self) -> str:
        """``m3``, ``F3``, or ``F3@5`` of a rank with several stages."""
        stage = "" if self.stage is None else f"@{self.stage}"
        return self.name and f"{self.name}{self.microbatch}{stage}"


# Operators

_aten: Any = torch.ops.aten


# Memory alone: nothing is computed or copied.
_EMPTY = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty,
    _aten.new_empty_strided,
}  # fmt: skip
# These read, of their first argument, only what they return; or write only that much.
_LOOKUPS = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index}
_COPIES = {_aten.copy_, _aten._foreach_copy_, _aten._to_copy, _aten.clone}


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
        size = 2 * sum(map(size_of, made)) + sum(map(size_of, read[1:]))
    elif packet is _aten.nll_loss_forward:
        size = 2 * size_of(read[1])
    else:
        size = sum(map(size_of, _each((*read, *made))))
    floats = (x.dtype for x in (*read, *made) if x.dtype.is_floating_point)
    dtype = next(floats, None) or (*made, *read)[0].dtype
    dims = _dims(packet, read)
    op = Op(_name(packet), flops, size, dtype, dims, _causal(func, args, kwargs))
    return _beside(op, packet, _each((*read, *made))) if any_offloaded() else op


def _beside(op: Op, packet: Any, tensors: Sequence[Tensor]) -> Op:
    """``op``, and where its tensors lie."""
    kinds = [space_of(x).kind for x in tensors]
    store = min(filter(None, kinds), default="")
    if packet not in _COPIES or "" not in kinds:
        return op._replace(store=store)
    size = sum(size_of(x) for x, kind in zip(tensors, kinds, strict=True) if kind)
    return op._replace(bytes=size, store=store, crosses=True) if store else op


def _each(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())


_name = functools.cache(str)


def size_of(x: Tensor) -> int:
    """Bytes of the elements under ``x``: a broadcast dim is there once."""
    count, steps = x.numel(), x.stride()
    if count and 0 in steps:
        count = math.prod(n for n, step in zip(x.shape, steps, strict=True) if step)
    return int(count) * x.element_size()


def _dims(packet: Any, read: Sequence[Tensor]) -> tuple[int, ...]:
    if packet in (_aten.mm, _aten.addmm, _aten.addmm_):
        a, b = read[-2:]
        return (1, int(a.shape[0]), int(a.shape[1]), int(b.shape[1]))
    if packet in (_aten.bmm, _aten.baddbmm, _aten.baddbmm_):
        a, b = read[-2:]
        return (*map(int, a.shape), int(b.shape[2]))
    if is_attention(packet):
        q, k = read[1:3] if "backward" in str(packet) else read[:2]
        heads = int(q.shape[:-2].numel())
        return (heads, int(q.shape[-2]), int(k.shape[-2]), int(q.shape[-1]))
    return ()


@functools.cache
def is_attention(packet: Any) -> bool:
    """True if an operator is a fused attention."""
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

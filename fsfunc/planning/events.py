"""The events of a step as data: a plan of a rank is a list of them, in order.

An `observer.Observer` writes operators (`Ran`) and memory (`Allocated`, `Freed`), a
`planner.PlannedLink` transfers (`Started`, `Waited`). `simulation` plays a list in
time, `plans.RankPlan` sums it up. `describe` says of one operator how much it computes
and moves, as a cost model needs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.ledgers import Record
from fsfunc.runtime.memory_spaces import any_offloaded, space_of
from fsfunc.tracing.operators import FLOPS

# "update" is all that runs outside gradient calls: the optimizer, above all.
PHASES = ("forward", "recompute", "backward", "update")


class Op(NamedTuple):
    """One operator that computes or copies (views are not noted).

    Args:
        name: torch's, such as ``aten.mm``.
        flops: as ``torch.utils.flop_counter`` counts: 2 for a multiplication and its
            addition; an attention is counted whole, whatever its mask; 0 for what has
            no formula.
        bytes: the size of all tensors that it reads and writes, each once.
        dtype: that of its first floating tensor, or of its result.
        dims: (batch, m, k, n) of a product [batch, m, k] @ [batch, k, n]; (batch *
            heads, queries, keys, head dim) of an attention; empty for others.
        causal: whether a causal mask spares it half of its ``flops``.
        store: the kind of the ``Store`` beside the device, such as "host", that its
            tensors lie in; "" on the device.
        crosses: whether it copies between the store and the device; ``bytes`` then
            counts what lies in the store.
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
    """The rank did its part of a transfer.

    Args:
        number: identifies the transfer among those of the rank.
        part: "issued" for a collective over ``ranks``; "sent" or "asked for" for a
            message from the first of ``ranks`` to the second. The n-th message that is
            asked for is the n-th that is sent.
        record: the ledger's record, which a message has at its sender alone.
    """

    number: int
    part: str
    ranks: tuple[int, ...]
    record: Record | None = None


class Waited(NamedTuple):
    """The rank waited until the collective or transfer ``number`` was over."""

    number: int


class Allocated(NamedTuple):
    """Memory was allocated: a storage of ``bytes``, by ``op`` in a unit and phase.

    Args:
        storage: the number of the storage, unique on the rank.
        op: torch's name; "" for what the step was given, which comes first.
        owner: the unit whose buffer it is, if that is known: a prefetch allocates it
            while another unit runs.
    """

    storage: int
    bytes: int
    op: str
    unit: str
    phase: str
    owner: str = ""


class Freed(NamedTuple):
    """A storage was freed."""

    storage: int


class CallBegan(NamedTuple):
    """A call of a run of equal unit calls begins, or its backward does.

    It stands in the events until `call_copies` has put copies in the places of calls
    that were left out. A finished plan has none.

    Args:
        run: identifies the run.
        index: of the call in the run, from 0; ``count`` once the run is over. Its
            backward is over at some place in that of call 0.
        count: the number of calls in the run.
        is_backward: whether it is the backward that begins.
        buffers: the names of the packed buffers that the call reads.
    """

    run: int
    index: int
    count: int
    is_backward: bool
    buffers: tuple[str, ...] = ()


class Reserved(NamedTuple):
    """The storage ``storage``, in use, stands for one that a call would have made.

    Args:
        index: of that call in the run: the one that was left out, or a neighbour.
        place: which of the storages that the call makes it is, from 0.
    """

    storage: int
    index: int
    place: int


class ReservedTransfer(NamedTuple):
    """The transfer ``number`` stands for one that a call would have started.

    Its fields are those of `Reserved`.
    """

    number: int
    index: int
    place: int


Event = Ran | Started | Waited | Allocated | Freed
# Those that stand in a plan only until copies of calls are put in.
Provisional = CallBegan | Reserved | ReservedTransfer


class Turn(NamedTuple):
    """The work on a microbatch begins.

    Args:
        next_event: the number of the first event of that work.
        name: the kind of action of a pipeline's schedule, such as "F"; "m" for
            ``accumulate``; "" after the last microbatch.
        stage: the pipeline's stage, if the rank has several.
    """

    next_event: int
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


# They allocate memory, and compute or copy nothing.
_EMPTY = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty,
    _aten.new_empty_strided,
}  # fmt: skip
# Lookups read only so much of their first argument as they return.
_LOOKUPS = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index}
_COPIES = {_aten.copy_, _aten._foreach_copy_, _aten._to_copy, _aten.clone}


def describe(
    func: _torch.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    out: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Op | None:
    """Returns the operator that ran, or None for one that only allocates memory.

    Args:
        func: torch's operator.
        args, kwargs, out: its arguments and result.
        inputs, outputs: the tensors among the arguments, and in the result.
    """
    traits = _traits(func)
    if traits.is_empty:
        return None
    formula, flops = traits.flop_formula, 0
    if formula is not None:
        flops = int(formula(*args, **kwargs, out_val=out))
    if traits.reads == "entries":
        n_bytes = 2 * sum(map(size_of, outputs)) + sum(map(size_of, inputs[1:]))
    elif traits.reads == "rows":
        n_bytes = 2 * size_of(inputs[1])
    else:
        n_bytes = sum(map(size_of, _each((*inputs, *outputs))))
    floats = (x.dtype for x in (*inputs, *outputs) if x.dtype.is_floating_point)
    dtype = next(floats, None) or (*outputs, *inputs)[0].dtype
    dims = () if traits.dims is None else traits.dims(inputs)
    causal = traits.is_attention and _causal(func, args, kwargs)
    op = Op(traits.name, flops, n_bytes, dtype, dims, causal)
    if not any_offloaded():
        return op
    return _with_store(op, func.overloadpacket, _each((*inputs, *outputs)))


class _Traits(NamedTuple):
    """What is asked of each call of an operator, and is the same in all of them.

    Args:
        name: torch's.
        is_empty: whether it only allocates memory.
        flop_formula: of `FLOPS`, if there is one.
        reads: "entries" for a lookup, which reads so much of its first argument as it
            returns; "rows" for one that reads one entry of each row; "" for all.
        dims: returns those of `Op` for its tensors; None if it has none.
        is_attention: whether it may have a causal mask.
    """

    name: str
    is_empty: bool
    flop_formula: Callable[..., Any] | None
    reads: str
    dims: Callable[[Sequence[Tensor]], tuple[int, ...]] | None
    is_attention: bool


@functools.cache
def _traits(func: _torch.OpOverload) -> _Traits:
    packet = func.overloadpacket
    reads = "entries" if packet in _LOOKUPS else ""
    reads = "rows" if packet is _aten.nll_loss_forward else reads
    attends, dims = is_attention(packet), None
    if packet in (_aten.mm, _aten.addmm, _aten.addmm_):
        dims = _product_dims
    elif packet in (_aten.bmm, _aten.baddbmm, _aten.baddbmm_):
        dims = _batched_dims
    elif attends:
        is_backward = "backward" in str(packet)
        dims = functools.partial(_attention_dims, first=1 if is_backward else 0)
    formula = FLOPS.get(packet)
    return _Traits(str(packet), packet in _EMPTY, formula, reads, dims, attends)


def _with_store(
    op: Op, packet: _torch.OpOverloadPacket, tensors: Sequence[Tensor]
) -> Op:
    """Returns ``op`` with the store beside the device that its tensors lie in."""
    kinds = [space_of(x).kind for x in tensors]
    store = min(filter(None, kinds), default="")
    if packet not in _COPIES or "" not in kinds:
        return op._replace(store=store)
    n_bytes = sum(size_of(x) for x, kind in zip(tensors, kinds, strict=True) if kind)
    return op._replace(bytes=n_bytes, store=store, crosses=True) if store else op


def _each(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the distinct tensors."""
    return list({id(x): x for x in tensors}.values())


def size_of(x: Tensor) -> int:
    """Returns the bytes of ``x`` in memory; a broadcast dim (stride 0) counts once."""
    count, strides = x.numel(), x.stride()
    if count and 0 in strides:  # expanded: its elements share memory
        count = math.prod(n for n, step in zip(x.shape, strides, strict=True) if step)
    return int(count) * x.element_size()


def _product_dims(inputs: Sequence[Tensor]) -> tuple[int, ...]:
    left, right = inputs[-2:]
    return (1, int(left.shape[0]), int(left.shape[1]), int(right.shape[1]))


def _batched_dims(inputs: Sequence[Tensor]) -> tuple[int, ...]:
    left, right = inputs[-2:]
    return (*map(int, left.shape), int(right.shape[2]))


def _attention_dims(inputs: Sequence[Tensor], first: int) -> tuple[int, ...]:
    q, k = inputs[first : first + 2]
    heads = int(q.shape[:-2].numel())
    return (heads, int(q.shape[-2]), int(k.shape[-2]), int(q.shape[-1]))


@functools.cache
def is_attention(packet: _torch.OpOverloadPacket) -> bool:
    """Returns whether an operator is a fused attention."""
    name = str(packet)
    return "_attention" in name and "scaled_dot_product" in name


def _causal(
    func: _torch.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return False
    index = names.index("is_causal")
    return bool(args[index] if index < len(args) else kwargs.get("is_causal", False))

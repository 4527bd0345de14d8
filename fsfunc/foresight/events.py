"""What happens in a step, in order, as data: what a plan is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fsfunc.comm.ledgers import Record

__all__ = [
    "Asked",
    "Event",
    "Gave",
    "Op",
    "PHASES",
    "Ran",
    "Replayed",
    "Segment",
    "Sent",
    "Started",
    "Took",
    "Waited",
]

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
    """

    name: str
    flops: int
    bytes: int
    dtype: torch.dtype
    dims: tuple[int, ...] = ()
    causal: bool = False


class Ran(NamedTuple):
    """An operator ran."""

    op: Op
    unit: str
    phase: str


@dataclass(frozen=True, eq=False)
class Segment:
    """The body of a unit, forward or backward, seen once and repeated as a whole.

    Args:
        ops: in order.
        memory: (how many ops ran before, bytes taken or, negative, given back).
        peak: the most that ``memory`` adds up to on the way, at least 0.
        flops: of all ops.
    """

    ops: tuple[Op, ...]
    memory: tuple[tuple[int, int], ...]
    peak: int
    flops: int


class Replayed(NamedTuple):
    """A segment ran. What it leaves behind is taken and given by events after it."""

    segment: Segment
    unit: str
    phase: str


class Started(NamedTuple):
    """A collective was issued over ``ranks``; ``number`` tells it from others."""

    number: int
    record: Record
    ranks: tuple[int, ...]


class Sent(NamedTuple):
    """A message to rank ``to`` was put on its way; ``record`` is the sender's."""

    number: int
    record: Record
    to: int


class Asked(NamedTuple):
    """A message of ``bytes`` was asked for; the n-th from ``source`` is its n-th."""

    number: int
    bytes: int
    source: int


class Waited(NamedTuple):
    """The rank waited until the collective or transfer ``number`` was over."""

    number: int


class Took(NamedTuple):
    """Memory was taken: a storage of ``bytes``, by ``op`` of a unit and phase.

    ``key`` tells it from all other storages of the rank. What the step was given has
    ``op`` ``""`` and comes before everything else.
    """

    key: int
    bytes: int
    op: str
    unit: str
    phase: str


class Gave(NamedTuple):
    """The memory ``key`` was given back."""

    key: int


Event = Ran | Replayed | Started | Sent | Asked | Waited | Took | Gave

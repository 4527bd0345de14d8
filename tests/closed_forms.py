"""What a sharded step sends, in closed form: to hold a ledger or a plan against."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Buffer", "Traffic", "UnitBuffers", "sharded_step"]


@dataclass(frozen=True)
class Buffer:
    """The leaves of a unit that lie together.

    Args:
        name: tells buffers apart where a unit is called, or a leaf taken, twice.
        elements: of all leaves, without padding.
        gathered, reduced: bytes an element on the wire; ``reduced=0`` is frozen.
    """

    name: str
    elements: int
    gathered: int = 4
    reduced: int = 4

    def padded(self, size: int) -> int:
        """Elements of the whole buffer over ``size`` ranks."""
        return -(-self.elements // size) * size


@dataclass(frozen=True)
class UnitBuffers:
    """One unit call: what it takes, and whether its backward reads any of it."""

    buffers: tuple[Buffer, ...]
    reads: bool = True


@dataclass(frozen=True)
class Traffic:
    """``count`` collectives of one kind, and the bytes that a rank sends in them.

    ``over`` is ``"shard"``, ``"replicate"`` or ``"all"`` (both axes: the loss).
    """

    op: str
    over: str
    count: int
    bytes: Fraction


def sharded_step(
    calls: Sequence[UnitBuffers],
    size: int,
    *,
    zero: int = 3,
    replicas: int = 1,
    reshard_after_forward: bool = True,
    kept: Collection[str] = (),
    remat: bool = False,
    microbatches: int = 1,
    reduce_each: bool = False,
) -> list[Traffic]:
    """What one rank sends in one gradient call of updated parameters.

    With alpha = (W-1)/W, over W = ``size`` ranks a gather and a reduction of S bytes
    send alpha S each, an all-reduce 2 alpha S. zero=3 gathers a call's buffers for its
    forward and again for its backward, but for the last call, which keeps them, and
    for calls whose backward reads none (a recompute reads all).

    Args:
        calls: the unit calls of one forward pass, in order.
        kept: the names of buffers that are kept from the forward to the backward.
        size, replicas: ranks that share, and that repeat, the parameters.
        microbatches: forward passes in one gradient call.
        reduce_each: ``accumulate(shard(f))``: reduce each microbatch, and average each
            one's loss; else ``shard(accumulate(f))``.

    Source: ZeRO (Rajbhandari et al., 2020), section 7.

    >>> calls = [UnitBuffers((Buffer(name, 100),)) for name in "abc"]
    >>> for sent in sharded_step(calls, 4):
    ...     print(sent.op, sent.count, sent.bytes)
    all_gather 5 1500
    psum_scatter 3 900
    psum 1 12
    """
    alpha = Fraction(size - 1, size)
    every = [b for call in calls for b in call.buffers]
    if zero == 0:
        gathers = []
    elif zero in (1, 2):  # the whole of what the last update changed, and once
        gathers = list({b.name: b for b in every if b.reduced}.values())
    else:
        gathers = microbatches * every
        if reshard_after_forward:
            again = [c for c in calls[:-1] if c.reads or remat]
            gathers += microbatches * [
                b for c in again for b in c.buffers if b.name not in kept
            ]
    times = microbatches if reduce_each else 1
    reductions = times * [b for b in every if b.reduced]
    gathered = sum(b.padded(size) * b.gathered for b in gathers)
    parts = size if zero else 1  # zero=0 cuts nothing, and pads nothing
    reduced = sum(b.padded(parts) * b.reduced for b in reductions)
    op, share = ("psum_scatter", alpha) if zero else ("psum", 2 * alpha)
    ring = Fraction(replicas - 1, replicas)
    ranks = size * replicas
    loss = Fraction(2 * (ranks - 1), ranks) * 2 * 4
    found = [
        Traffic("all_gather", "shard", len(gathers), alpha * gathered),
        Traffic(op, "shard", len(reductions), share * reduced),
        Traffic("psum", "replicate", len(reductions), 2 * ring * reduced / parts),
        Traffic("psum", "all", times, times * loss),
    ]
    several = {"shard": size > 1, "replicate": replicas > 1, "all": ranks > 1}
    return [s for s in found if s.count and several[s.over]]

"""Bytes that a caching allocator reserves for what a plan takes and gives back.

``peak_bytes`` is what tensors hold at once. A device's allocator rounds each of them,
cuts them out of segments that it took from the driver, and keeps segments whose parts
are still held: what it reserves is what has to fit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fsfunc.planning.events import Allocated, Event, Freed
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan
from fsfunc.runtime.memory import OFFLOADED

# c10/cuda/CUDACachingAllocator: kMinBlockSize, kSmallSize, kSmallBuffer,
# kMinLargeAlloc, kLargeBuffer, kRoundLarge.
_BLOCK, _SMALL, _SMALL_SEGMENT = 512, 2**20, 2 * 2**20
_LARGE, _LARGE_SEGMENT, _ROUND = 10 * 2**20, 20 * 2**20, 2 * 2**20


@dataclass(eq=False)
class _Block:
    """A part of a segment, between its neighbours there; ``number`` orders blocks."""

    size: int
    number: int
    pool: tuple[str, bool]
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class Allocator:
    """Torch's caching allocator for CUDA, by its defaults, without a device.

    A request is rounded to 512 bytes and cut out of the smallest free block that holds
    it: up to 1 MiB out of segments of 2 MiB; up to 10 MiB of 20 MiB; larger ones out of
    segments of their own size, rounded to 2 MiB. Free neighbours are merged. What one
    stream has taken goes to no other: each has a pool of its own.

    Args:
        capacity: bytes of the device; where a segment would not fit, all that are free
            are given back first.

    Attributes:
        reserved, peak: bytes of all segments, now and at most.
    """

    def __init__(self, capacity: float = float("inf")) -> None:
        self.capacity = capacity
        self.reserved = self.peak = self._count = 0
        # By stream, and whether it is of small segments.
        self._free: dict[tuple[str, bool], list[tuple[int, int, _Block]]]
        self._free = defaultdict(list)

    def take(self, size: int, stream: str = "") -> _Block:
        """Takes a block for ``size`` bytes."""
        size = max(_BLOCK, -(-size // _BLOCK) * _BLOCK)
        small = size <= _SMALL
        free = self._free[stream, small]
        at = bisect_left(free, (size, 0))
        if at < len(free):
            block = free.pop(at)[2]
        else:
            block = self._segment(size, (stream, small))
        block.free = False
        left = block.size - size
        if left >= _BLOCK if small else left > _SMALL:
            rest = self._block(left, block.pool)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._keep(rest)
        return block

    def give(self, block: _Block) -> None:
        """Gives a block back, to be taken again."""
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            self._drop(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._keep(block)

    def _segment(self, size: int, pool: tuple[str, bool]) -> _Block:
        if pool[1]:
            size = _SMALL_SEGMENT
        elif size < _LARGE:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // _ROUND) * _ROUND
        if self.reserved + size > self.capacity:
            self._give_back()
        self.reserved += size
        self.peak = max(self.peak, self.reserved)
        return self._block(size, pool)

    def _give_back(self) -> None:
        """Returns to the driver each segment that is one free block."""
        for free in self._free.values():
            whole = [x for x in free if x[2].before is None and x[2].after is None]
            for item in whole:
                free.remove(item)
                self.reserved -= item[2].size

    def _block(self, size: int, pool: tuple[str, bool]) -> _Block:
        self._count += 1
        return _Block(size, self._count, pool)

    def _keep(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.number, block))

    def _drop(self, block: _Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect_left(free, (block.size, block.number)))


def reserved_bytes(
    events: Iterable[Event],
    kinds: Mapping[int, str] = {},
    capacity: float = float("inf"),
    stream: Callable[[Allocated], str] = lambda took: "",
) -> int:
    """The most bytes that a caching allocator reserves for these events.

    Args:
        events: of one rank's plan, in order.
        kinds: what each storage is for; what is offloaded lies elsewhere.
        capacity: bytes of the device. A result above it does not fit, whatever is
            given back.
        stream: names the stream that takes a storage; the library takes all on one.

    Cost: some microseconds a storage.

    >>> small, large = Allocated(0, 5, "", "", ""), Allocated(1, 3 * 2**20, "", "", "")
    >>> reserved_bytes([small, large])
    23068672
    """
    allocator, held = Allocator(capacity), {}
    for event in events:
        if isinstance(event, Allocated):
            if kinds.get(event.storage) != OFFLOADED and event.bytes:
                held[event.storage] = allocator.take(event.bytes, stream(event))
        elif isinstance(event, Freed) and event.storage in held:
            allocator.give(held.pop(event.storage))
    return allocator.peak


def fits(plan: Plan, hardware: Hardware) -> bool:
    """True if a plan has room, on the device and in the stores beside it.

    Stores have room where the hardware says nothing of them.
    """
    beside = sum(store[2] for store in hardware.stores.values()) or float("inf")
    held = plan.offloaded_bytes <= beside
    return held and needed_bytes(plan, hardware) <= hardware.memory


def needed_bytes(plan: Plan, hardware: Hardware) -> int:
    """The bytes that the fullest rank of a plan needs of the hardware's memory.

    What is reserved where a device has a caching allocator (``hardware.fresh`` is
    None), with what would be given back when memory runs out; else what is held: what
    is offloaded to the host too, where the device computes in the host's memory.
    """
    if hardware.fresh is not None:
        stores = {ran.op.store for r in plan.ranks for ran in r.ran} - {""}
        if stores == {"host"} and "host" not in hardware.stores:
            return max(r.resident_bytes for r in plan.ranks)
        return plan.peak_bytes
    size = hardware.memory
    return max(
        r.peak_bytes if r.peak_bytes > size else reserved_bytes(r.events, r.kinds, size)
        for r in plan.ranks
    )

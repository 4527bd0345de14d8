"""Bytes that a caching allocator reserves for what a plan allocates and frees.

A plan's ``peak_bytes`` is what tensors hold at once. Torch's allocator for CUDA rounds
each of them, cuts them out of segments that it got from the driver, and keeps a segment
while any part of it is in use. What it reserves is what has to fit on the device, so
`trials` and `show.estimates` ask `needed_bytes` and `fits` here::

    segment of 20 MiB:  | 12 MiB used | 3 MiB free | 5 MiB used |   reserved: 20 MiB
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
    """A part of a segment, between its neighbours there.

    Args:
        number: orders blocks of one size.
        pool: its stream, and whether it is of small segments.
    """

    size: int
    number: int
    pool: tuple[str, bool]
    previous: _Block | None = None
    next: _Block | None = None
    is_free: bool = False


class Allocator:
    """Torch's caching allocator for CUDA, by its defaults, without a device.

    A request is rounded to 512 bytes and cut out of the smallest free block that holds
    it: up to 1 MiB out of segments of 2 MiB; up to 10 MiB of 20 MiB; larger ones out of
    segments of their own size, rounded to 2 MiB. Free neighbours are merged. Each
    stream has pools of its own, as a block may only be reused in the stream's order.

    Args:
        capacity: bytes of the device. If a new segment would not fit, all free segments
            are released first.

    Attributes:
        reserved, peak: bytes of all segments, now and at most.
    """

    reserved: int
    peak: int

    def __init__(self, capacity: float = float("inf")) -> None:
        self.capacity = capacity
        self.reserved = self.peak = self._count = 0
        # By pool: (size, number, block) of free blocks, sorted, to find the best fit.
        self._free_blocks: dict[tuple[str, bool], list[tuple[int, int, _Block]]]
        self._free_blocks = defaultdict(list)

    def allocate(self, size: int, stream: str = "") -> _Block:
        """Returns a block for ``size`` bytes."""
        size = max(_BLOCK, -(-size // _BLOCK) * _BLOCK)
        is_small = size <= _SMALL
        free_blocks = self._free_blocks[stream, is_small]
        index = bisect_left(free_blocks, (size, 0))
        if index < len(free_blocks):
            block = free_blocks.pop(index)[2]
        else:
            block = self._new_segment(size, (stream, is_small))
        block.is_free = False
        # A large block is only split if more than 1 MiB remains, as torch does.
        remaining = block.size - size
        if remaining >= _BLOCK if is_small else remaining > _SMALL:
            remainder = self._new_block(remaining, block.pool)
            remainder.previous, remainder.next = block, block.next
            if block.next is not None:
                block.next.previous = remainder
            block.size, block.next = size, remainder
            self._insert_free(remainder)
        return block

    def release(self, block: _Block) -> None:
        """Frees a block, merged with its free neighbours."""
        for neighbour in (block.previous, block.next):
            if neighbour is None or not neighbour.is_free:
                continue
            self._remove_free(neighbour)
            first, second = (
                (neighbour, block)
                if neighbour is block.previous
                else (block, neighbour)
            )
            first.size += second.size
            first.next = second.next
            if second.next is not None:
                second.next.previous = first
            block = first
        self._insert_free(block)

    def _new_segment(self, size: int, pool: tuple[str, bool]) -> _Block:
        if pool[1]:
            size = _SMALL_SEGMENT
        elif size < _LARGE:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // _ROUND) * _ROUND
        if self.reserved + size > self.capacity:
            self._release_segments()
        self.reserved += size
        self.peak = max(self.peak, self.reserved)
        return self._new_block(size, pool)

    def _release_segments(self) -> None:
        """Releases to the driver each segment that is one free block."""
        for free_blocks in self._free_blocks.values():
            whole_segments = [
                x for x in free_blocks if x[2].previous is None and x[2].next is None
            ]
            for entry in whole_segments:
                free_blocks.remove(entry)
                self.reserved -= entry[2].size

    def _new_block(self, size: int, pool: tuple[str, bool]) -> _Block:
        self._count += 1
        return _Block(size, self._count, pool)

    def _insert_free(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free_blocks[block.pool], (block.size, block.number, block))

    def _remove_free(self, block: _Block) -> None:
        free_blocks = self._free_blocks[block.pool]
        free_blocks.pop(bisect_left(free_blocks, (block.size, block.number)))


def reserved_bytes(
    events: Iterable[Event],
    kinds: Mapping[int, str] = {},
    capacity: float = float("inf"),
    stream: Callable[[Allocated], str] = lambda took: "",
) -> int:
    """Returns the most bytes that a caching allocator reserves for these events.

    Args:
        events: of one rank's plan, in order.
        kinds: what each storage is for; what is offloaded lies elsewhere.
        capacity: bytes of the device. A result above it does not fit, whatever is
            released.
        stream: names the stream that allocates a storage; the library uses one for all.

    Cost: some microseconds a storage.

    >>> small, large = Allocated(0, 5, "", "", ""), Allocated(1, 3 * 2**20, "", "", "")
    >>> reserved_bytes([small, large])
    23068672
    """
    allocator, blocks = Allocator(capacity), {}
    for event in events:
        if isinstance(event, Allocated):
            if kinds.get(event.storage) != OFFLOADED and event.bytes:
                blocks[event.storage] = allocator.allocate(event.bytes, stream(event))
        elif isinstance(event, Freed) and event.storage in blocks:
            allocator.release(blocks.pop(event.storage))
    return allocator.peak


def fits(plan: Plan, hardware: Hardware) -> bool:
    """Returns whether a plan has room, on the device and in the stores beside it.

    Stores that the hardware does not describe have room for all.
    """
    store_bytes = sum(store[2] for store in hardware.stores.values()) or float("inf")
    stores_fit = plan.offloaded_bytes <= store_bytes
    return stores_fit and needed_bytes(plan, hardware) <= hardware.memory


def needed_bytes(plan: Plan, hardware: Hardware) -> int:
    """Returns the bytes that the fullest rank of a plan needs of the hardware's memory.

    If the device has a caching allocator (``hardware.fresh`` is None), that is what it
    reserves, after it released what it can. If not, it is what tensors hold. A device
    that computes in the host's memory also holds there what is offloaded to the host.
    """
    if hardware.fresh is not None:
        stores = {ran.op.store for r in plan.ranks for ran in r.ran} - {""}
        if stores == {"host"} and "host" not in hardware.stores:
            return max(r.resident_bytes for r in plan.ranks)
        return plan.peak_bytes
    capacity = hardware.memory
    # What tensors hold alone does not fit: no need to simulate the allocator.
    return max(
        r.peak_bytes
        if r.peak_bytes > capacity
        else reserved_bytes(r.events, r.kinds, capacity)
        for r in plan.ranks
    )

"""Whether a plan fits: what an allocator reserves for it, beside what there is.

A plan's ``peak_bytes`` is what tensors hold at once. Torch's allocator for CUDA rounds
each of them, cuts them out of segments that it got from the driver, and keeps a segment
while any part of it is in use. What it reserves is what has to fit on the device, with
some to spare: `fits`, which `trials` and `show.estimates` ask::

    segment of 20 MiB:  | 12 MiB used | 3 MiB free | 5 MiB used |   reserved: 20 MiB
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fsfunc.planning.events import Allocated, Event, Freed
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan, RankPlan
from fsfunc.printing.tables import of_bytes, of_share
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
        expandable: whether a pool is one segment that grows by 2 or 20 MiB, as by
            ``PYTORCH_ALLOC_CONF=expandable_segments:True``: free blocks at its end are
            made larger, and every remainder is split off.

    Attributes:
        reserved, peak: bytes of all segments, now and at most.
        releases: how often free segments were released for want of room.
    """

    reserved: int
    peak: int
    releases: int

    def __init__(
        self, capacity: float = float("inf"), expandable: bool = False
    ) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.reserved = self.peak = self.releases = self._count = 0
        # By pool: (size, number, block) of free blocks, sorted, to find the best fit.
        self._free_blocks: dict[tuple[str, bool], list[tuple[int, int, _Block]]]
        self._free_blocks = defaultdict(list)
        # By pool: the last block of a segment that grows.
        self._ends: dict[tuple[str, bool], _Block] = {}

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
        remaining, splits_all = block.size - size, is_small or self.expandable
        if remaining >= _BLOCK if splits_all else remaining > _SMALL:
            remainder = self._new_block(remaining, block.pool)
            remainder.previous, remainder.next = block, block.next
            if block.next is not None:
                block.next.previous = remainder
            block.size, block.next = size, remainder
            if self._ends.get(block.pool) is block:
                self._ends[block.pool] = remainder
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
            if self._ends.get(second.pool) is second:
                self._ends[second.pool] = first
            block = first
        self._insert_free(block)

    def _new_segment(self, size: int, pool: tuple[str, bool]) -> _Block:
        if self.expandable:
            return self._grow(size, pool)
        if pool[1]:
            size = _SMALL_SEGMENT
        elif size < _LARGE:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // _ROUND) * _ROUND
        self._reserve(size)
        return self._new_block(size, pool)

    def _reserve(self, size: int) -> None:
        if self.reserved + size > self.capacity:
            self._release_segments()
            self.releases += 1
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def _grow(self, size: int, pool: tuple[str, bool]) -> _Block:
        """Returns the end of a pool's segment, made large enough for ``size``."""
        last, step = self._ends.get(pool), _growth(pool)
        held = last.size if last is not None and last.is_free else 0
        added = -(-(size - held) // step) * step
        if held and last is not None:  # not to be released for its own sake
            self._remove_free(last)
        self._reserve(added)
        if held and last is not None:
            last.size += added
            return last
        block = self._ends[pool] = self._new_block(added, pool)
        block.previous = last
        if last is not None:
            last.next = block
        return block

    def _release_segments(self) -> None:
        """Releases to the driver each segment that is one free block.

        Of segments that grow, it releases what is free in them, in whole steps.
        """
        if self.expandable:
            return self._release_steps()
        for free_blocks in self._free_blocks.values():
            whole_segments = [
                x for x in free_blocks if x[2].previous is None and x[2].next is None
            ]
            for entry in whole_segments:
                free_blocks.remove(entry)
                self.reserved -= entry[2].size

    def _release_steps(self) -> None:
        for pool, free_blocks in self._free_blocks.items():
            step, kept = _growth(pool), []
            for size, number, block in free_blocks:
                self.reserved -= size // step * step
                block.size = size % step
                # A hole: what lies beside it is no neighbour any more.
                if size >= step and block.next is not None:
                    block.next.previous = block.next = None
                if block.size:
                    kept.append((block.size, number, block))
                elif block.previous is not None:
                    block.previous.next = None
                if not block.size and self._ends.get(pool) is block:
                    del self._ends[pool]
            self._free_blocks[pool] = sorted(kept, key=lambda entry: entry[:2])

    def _new_block(self, size: int, pool: tuple[str, bool]) -> _Block:
        self._count += 1
        return _Block(size, self._count, pool)

    def _insert_free(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free_blocks[block.pool], (block.size, block.number, block))

    def _remove_free(self, block: _Block) -> None:
        free_blocks = self._free_blocks[block.pool]
        free_blocks.pop(bisect_left(free_blocks, (block.size, block.number)))


def _growth(pool: tuple[str, bool]) -> int:
    """Returns the bytes by which a segment of a pool grows."""
    return _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT


def reserved_bytes(
    events: Iterable[Event],
    kinds: Mapping[int, str] = {},
    capacity: float = float("inf"),
    stream: Callable[[Allocated], str] | None = None,
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
    allocator = Allocator(capacity)
    _replay(allocator, events, kinds, stream or _only_stream)
    return allocator.peak


def _replay(
    allocator: Allocator,
    events: Iterable[Event],
    kinds: Mapping[int, str],
    stream: Callable[[Allocated], str],
) -> None:
    """Takes and frees what a rank's events say, but for what is offloaded."""
    blocks: dict[int, _Block] = {}
    for event in events:
        if isinstance(event, Allocated):
            if kinds.get(event.storage) != OFFLOADED and event.bytes:
                blocks[event.storage] = allocator.allocate(event.bytes, stream(event))
        elif isinstance(event, Freed) and event.storage in blocks:
            allocator.release(blocks.pop(event.storage))


@dataclass(frozen=True)
class Fit:
    """Whether a plan has room on a device and in the stores beside it: true if so.

    Args:
        hardware: its name.
        needed: the bytes that the fullest rank takes of ``memory``.
        held: the most bytes that its tensors hold at once, ``needed`` or less.
        memory: the bytes that a rank has for tensors.
        margin: the share of ``memory`` that is to stay free.
        retries: how often a step would run into the end of the memory and release what
            the allocator keeps for later; an estimate has no time for these.
        process: the bytes that a rank's process holds beside tensors.
        rank: the fullest rank.
        offloaded, beside: the bytes that a rank offloads, and those of its stores.
        is_cached: whether ``needed`` is what a caching allocator reserves.
    """

    hardware: str
    needed: int
    held: int
    memory: int
    margin: float
    retries: int = 0
    process: int = 0
    rank: int = 0
    offloaded: int = 0
    beside: float = float("inf")
    is_cached: bool = False

    @property
    def usable(self) -> int:
        """The bytes that a plan may need: ``memory`` without the margin."""
        return int(self.memory * (1 - self.margin))

    def __bool__(self) -> bool:
        return self.needed <= self.usable and self.offloaded <= self.beside

    def __str__(self) -> str:
        """Returns a line: whether it fits, what it needs, and what stays free."""
        size, kept = of_bytes(self.needed), f"{of_share(self.margin, 1)} is kept free"
        of_memory = f"of its {of_bytes(self.memory)}"
        if self.needed > self.memory:
            return (
                f"does not fit {self.hardware}: rank {self.rank} holds {size}, "
                f"{of_bytes(self.needed - self.memory)} more than its "
                f"{of_bytes(self.memory)}"
            )
        if self.needed > self.usable:
            return (
                f"does not fit {self.hardware}: rank {self.rank} holds {size} "
                f"{of_memory}, of which {kept}"
            )
        if self.offloaded > self.beside:
            return (
                f"does not fit beside {self.hardware}: a rank offloads "
                f"{of_bytes(self.offloaded)}, more than its part of the host's memory"
            )
        return ", ".join((self._line(), *self._notes(), *[kept] * bool(self.margin)))

    def _line(self) -> str:
        memory, share = of_bytes(self.memory), of_share(self.needed, self.memory)
        return f"fits {self.hardware}: {of_bytes(self.needed)} of {memory}, {share}"

    def _notes(self) -> list[str]:
        """Returns what ``needed`` is beside what tensors hold."""
        notes = []
        if self.needed > self.held and self.is_cached:
            notes.append(f"reserved for {of_bytes(self.held)}")
        elif self.needed > self.held:
            notes.append("with what is offloaded")
        if self.retries:
            notes.append(f"after {self.retries} releases of cached segments a step")
        if self.process:
            notes.append(f"beside {of_bytes(self.process)} of the process itself")
        return notes


STREAMS = ("one", "fsdp2")


def fits(
    plan: Plan,
    hardware: Hardware,
    *,
    streams: str = "one",
    expandable_segments: bool = False,
) -> Fit:
    """Returns whether a plan has room, on the device and in the stores beside it.

    It has if what it needs leaves the hardware's ``margin`` free. If the device has a
    caching allocator (``hardware.fresh`` is None), it needs what that reserves, after
    it released what it can. If not, it needs what tensors hold; a device that computes
    in the host's memory also holds there what is offloaded to the host.

    Args:
        plan: of ``ff.plan``, on the device's kernels (``device="cuda"`` for a GPU).
        hardware: whose ``memory``, ``margin`` and ``stores`` count. Stores that it does
            not describe have room for all.
        streams: whose memory is counted: "one" is this library's, which takes all
            buffers on the stream that computes; "fsdp2" is that of FSDP2 for the same
            step, which reduces gradients on a stream of its own, whose memory has no
            other use.
        expandable_segments: whether torch's allocator is told so, by
            ``PYTORCH_ALLOC_CONF=expandable_segments:True``.

    Returns:
        A ``Fit``, true or false; as text, a line with what is needed and what is free.

    Raises:
        ValueError: ``streams`` of no such name.

    Cost: some microseconds a storage of the plan.

    >>> import torch, fsfunc as ff
    >>> step = ff.value_and_grad(lambda w: (w * w).sum())
    >>> plan = ff.plan(step, torch.zeros(2**20), mesh=ff.make_mesh({"data": 1}))
    >>> print(ff.fits(plan, ff.hardware.replace(ff.hardware.H100, margin=0.02)))
    fits H100: 23.1 MB of 83.9 GB, <1 %, reserved for 16.8 MB, 2 % is kept free
    """
    if streams not in STREAMS:
        names = " or ".join(f'"{name}"' for name in STREAMS)
        raise ValueError(f"streams={streams!r} is {names}")
    needs = [
        _needed_by(own, hardware, streams, expandable_segments) for own in plan.ranks
    ]
    fullest = max(range(len(needs)), key=lambda i: needs[i][0])
    (needed, retries), own = needs[fullest], plan.ranks[fullest]
    beside = sum(store[2] for store in hardware.stores.values()) or float("inf")
    return Fit(
        hardware.name, needed, own.peak_bytes, hardware.memory, hardware.margin,
        retries, hardware.process, own.rank, plan.offloaded_bytes, beside,
        hardware.fresh is None,
    )  # fmt: skip


def needed_bytes(plan: Plan, hardware: Hardware) -> int:
    """Returns the bytes that the fullest rank needs of the memory, as `fits` has it."""
    return fits(plan, hardware).needed


def _needed_by(
    own: RankPlan, hardware: Hardware, streams: str, expandable: bool
) -> tuple[int, int]:
    """Returns the bytes that a rank needs, and how often its allocator must release."""
    if hardware.fresh is not None:
        stores = {ran.op.store for ran in own.ran} - {""}
        with_host = stores == {"host"} and "host" not in hardware.stores
        return own.resident_bytes if with_host else own.peak_bytes, 0
    if own.peak_bytes > hardware.usable:
        # What tensors hold alone does not fit: no need to simulate the allocator.
        return own.peak_bytes, 0
    name_stream = stream_of_fsdp2(own) if streams == "fsdp2" else _only_stream
    allocator = Allocator(hardware.memory, expandable)
    _replay(allocator, own.events, own.kinds, name_stream)
    if allocator.peak <= hardware.usable:
        return allocator.peak, allocator.releases
    # It would grow into the margin, which is for what plans do not count. Should that
    # be needed, the allocator releases what it can: the least that it runs in.
    tight = Allocator(hardware.usable, expandable)
    _replay(tight, own.events, own.kinds, name_stream)
    return tight.peak, allocator.releases


def stream_of_fsdp2(own: RankPlan) -> Callable[[Allocated], str]:
    """Returns what names the stream on which FSDP2 would allocate a storage.

    Packed gradients, on their way and reduced, are taken by its stream of reductions.
    """

    def name(took: Allocated) -> str:
        is_packed = own.kinds.get(took.storage) == "gradients" and "mm" not in took.op
        return "reductions" if is_packed else ""

    return name


def _only_stream(took: Allocated) -> str:
    return ""

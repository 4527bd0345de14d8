"""Memory that one process allocates and other processes of its host read.

It is a file without a name (``memfd_create``), as large as the machine's memory (256
GiB at most), whose pages come with the first write. Other processes are given its
descriptor and map it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from fsfunc.runtime.memory import BufferPool

PAGE = mmap.PAGESIZE
_MOST = 1 << 38  # bytes: a process maps those of every rank, and has 47 bits of address


class SharedMemory:
    """A mapping of a process's shared file.

    Args:
        descriptor: the file; it is closed here, as a mapping has its own.

    ``given_back``: the ranges that are free again. ``ended``: whether the process no
    longer sends from it, and others may still read it: its pages are kept.
    """

    ended = False

    def __init__(self, descriptor: int):
        self.pid = os.getpid()
        self.given_back: deque[tuple[int, int]] = deque()
        self.recent: dict[int, int] = {}  # sizes of the ranges that were read last
        try:
            self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self.bytes = memoryview(self.map)
        self.size = len(self.map)
        self.start = torch.frombuffer(self.bytes, dtype=torch.uint8).data_ptr()

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of what lies at ``offset``, in bytes."""
        count = 1
        for n in shape:
            count *= n
        flat = torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)

    def leave(self, offset: int, size: int, last: int = 0) -> None:
        """Takes pages that were read off this process's account; they stay as are.

        Args:
            last: of how many ranges, with this one, they are left on it: a buffer that
                is soon read again has its pages then.
        """
        self.recent[offset] = max(size, self.recent.pop(offset, 0))
        while len(self.recent) > last:
            first = next(iter(self.recent))
            start, end = first // PAGE * PAGE, first + self.recent.pop(first)
            self.map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def give_back(self, start: int, end: int) -> None:
        """Frees the pages of a range; any thread may, whenever a tensor is freed."""
        # A fork has the mapping, and not the say.
        if os.getpid() == self.pid and not self.ended:
            self.map.madvise(mmap.MADV_REMOVE, start, end - start)
            self.given_back.append((start, end))

    def offset(self, x: Tensor) -> int | None:
        """The offset of the first element of ``x`` in this memory, if it lies there."""
        at = x.data_ptr() - self.start
        return at if 0 <= at < self.size else None


def shared_file() -> int:
    """The descriptor of a new shared file; its pages are free until they are written.

    Raises:
        OSError: this system refuses one.
    """
    descriptor = os.memfd_create("fsfunc")
    os.ftruncate(descriptor, min(os.sysconf("SC_PHYS_PAGES") * PAGE, _MOST))
    return descriptor


class SharedPool(BufferPool):
    """A pool of buffers in shared memory; dropped ones give their pages back.

    A buffer is free when neither a tensor nor a message that another process has not
    read yet has a handle on it.

    Args:
        progress: takes note of messages that have been read.
    """

    def __init__(self, memory: SharedMemory, progress: Callable[[], None]):
        super().__init__()
        self.memory, self.progress = memory, progress
        self.taken: list[tuple[int, int]] = []  # (start, end) of storages, in order

    def get(self, count: int, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        if os.getpid() != self.memory.pid:  # a fork: this memory is its parent's
            return BufferPool().get(count, dtype, like)
        self.progress()
        return super().get(count, dtype, like)

    def allocate(self, size: int) -> torch.UntypedStorage:
        """A storage in the first gap that is large enough.

        Raises:
            MemoryError: there is none.
        """
        size = max(1, size)  # torch takes no empty memory
        while self.memory.given_back:
            self.taken.remove(self.memory.given_back.popleft())
        room, start = -(-size // PAGE) * PAGE, 0
        for begin, end in self.taken:
            if begin - start >= room:
                break
            start = end
        if start + room > self.memory.size:
            raise MemoryError(
                f"{size} bytes to send to processes of this host, beside "
                f"{sum(e - b for b, e in self.taken)} that are in use: more than the "
                "machine has"
            )
        self.taken = sorted([*self.taken, (start, start + room)])
        piece = self.memory.bytes[start : start + size]
        # Not a method of the pool's: it would live as long as its buffers.
        gone = weakref.finalize(piece, self.memory.give_back, start, start + room)
        gone.atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8).untyped_storage()

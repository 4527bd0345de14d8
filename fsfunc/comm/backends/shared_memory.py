"""Memory that one process allocates and other processes of its host read.

It is a file without a name (``memfd_create``), as large as the machine's memory (256
GiB at most), whose pages come with the first write. Other processes are given its
descriptor (``same_host``) and map it. ``neighbours`` sends tensors through it.
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
_MOST = 1 << 38  # bytes: a process maps every rank's file, and has 47 bits of address


class SharedMemory:
    """A mapping of a process's shared file.

    Args:
        descriptor: the file; it is closed here, as a mapping has its own.

    ``given_back``: the ranges that are free again. ``ended``: whether the process no
    longer sends from it; others may still read it, so its pages stay.
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
        """Returns the memory at ``offset``, in bytes, as a tensor."""
        count = 1
        for n in shape:
            count *= n
        flat = torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)

    def leave(self, offset: int, size: int, last: int = 0) -> None:
        """Unmaps pages of another process's memory that were read.

        They would count as this process's memory too. Their contents stay.

        Args:
            last: how many ranges, with this one, stay mapped: a buffer that is soon
                read again has its pages then.
        """
        # `pop` moves a range that is read again behind the others: the first in the
        # dict is the one whose last read is the oldest.
        self.recent[offset] = max(size, self.recent.pop(offset, 0))
        while len(self.recent) > last:
            oldest = next(iter(self.recent))
            start, end = oldest // PAGE * PAGE, oldest + self.recent.pop(oldest)
            self.map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def give_back(self, start: int, end: int) -> None:
        """Frees the pages of a range; any thread may, whenever a tensor is freed."""
        # A fork has the mapping too, and must not free its parent's pages.
        if os.getpid() == self.pid and not self.ended:
            self.map.madvise(mmap.MADV_REMOVE, start, end - start)
            self.given_back.append((start, end))

    def offset(self, x: Tensor) -> int | None:
        """Returns the offset of ``x`` in this memory; None if it lies elsewhere."""
        offset = x.data_ptr() - self.start
        return offset if 0 <= offset < self.size else None


def shared_file() -> int:
    """Makes a shared file and returns its descriptor; unwritten pages take no memory.

    Raises:
        OSError: this system refuses one.
    """
    descriptor = os.memfd_create("fsfunc")
    os.ftruncate(descriptor, min(os.sysconf("SC_PHYS_PAGES") * PAGE, _MOST))
    return descriptor


class SharedPool(BufferPool):
    """A pool of buffers in shared memory; dropped ones give their pages back.

    A buffer is free when neither a tensor nor a message that another process has not
    read yet refers to it.

    Args:
        progress: reads the other processes' answers, which free buffers.
    """

    def __init__(self, memory: SharedMemory, progress: Callable[[], None]):
        super().__init__()
        self.memory, self.progress = memory, progress
        self.taken: list[tuple[int, int]] = []  # (start, end) of storages, sorted

    def get(self, count: int, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        if os.getpid() != self.memory.pid:  # a fork: this memory is its parent's
            return BufferPool().get(count, dtype, like)
        self.progress()
        return super().get(count, dtype, like)

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Returns a storage in the first gap that is large enough.

        Raises:
            MemoryError: there is none.
        """
        size = max(1, size)  # torch takes no empty memory
        # `SharedMemory.give_back` may run in any thread, between any two lines: it only
        # appends, and the list changes here.
        while self.memory.given_back:
            self.taken.remove(self.memory.given_back.popleft())
        # Whole pages, as the kernel frees no part of one.
        whole_pages, start = -(-size // PAGE) * PAGE, 0
        for begin, end in self.taken:
            if begin - start >= whole_pages:
                break
            start = end
        if start + whole_pages > self.memory.size:
            raise MemoryError(
                f"{size} bytes to send to processes of this host, beside "
                f"{sum(e - b for b, e in self.taken)} that are in use: more than the "
                "machine has"
            )
        end = start + whole_pages
        self.taken = sorted([*self.taken, (start, end)])
        piece = self.memory.bytes[start : start + size]
        # Not a method of the pool's: it would live as long as its buffers.
        finalizer = weakref.finalize(piece, self.memory.give_back, start, end)
        finalizer.atexit = False  # others may still read the pages
        return torch.frombuffer(piece, dtype=torch.uint8).untyped_storage()

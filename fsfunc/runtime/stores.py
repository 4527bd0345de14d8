"""Stores that ``offload`` has: the host's memory, and mapped files of a folder.

``offload(step, params="host")`` makes a `HostMemory`, a path a `Folder`. A user's own
derives from `memory_spaces.Store` as these do.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.runtime import host_copies
from fsfunc.runtime.memory_spaces import Store, over_storage

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14


@functools.cache
def _madvise() -> Any:
    try:
        return ctypes.CDLL(None).madvise if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None


def populate(x: Tensor) -> None:
    """Allocates the pages of ``x``, which will be written next, at once.

    A fault for each page of 4 KiB is a third of the time in which new memory is filled
    with random numbers; one call for all of them makes that a fifth shorter. Does
    nothing on other systems than Linux, and off the CPU.
    """
    advise(x, _POPULATE_WRITE)


def advise(x: Tensor, advice: int) -> None:
    """Tells the system how the pages that ``x`` fills will be used, by ``madvise``."""
    madvise = _madvise()
    if madvise is None or x.device.type != "cpu" or not x.is_contiguous():
        return
    first_address = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (x.data_ptr() + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first_address
    if size > 0:
        madvise(ctypes.c_void_p(first_address), ctypes.c_size_t(size), advice)


class HostMemory(Store):
    """The host's memory, pinned where the device is a GPU."""

    kind = "host"

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size, pinned = count * dtype.itemsize, device.type == "cuda"
        # torch's allocator of pinned memory rounds up to a power of two, so 1.1 GB
        # would take 2. Where that wastes more than a little, memory is pinned here.
        if pinned and (1 << (size - 1).bit_length()) - size > _WASTE:
            if (lease := _PINNED.get(size, device)) is not None:
                return torch.frombuffer(lease, dtype=dtype, count=count)
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=pinned)


_WASTE = 1 << 24  # bytes


@dataclass(frozen=True, eq=False)
class _PinnedMap:
    """A mapping of pinned memory, which is unmapped when it is dropped.

    It is a shared mapping. After a fork, such as a data loader's worker, a private one
    would be copied on write: this process would write new pages, and the GPU read the
    old ones.
    """

    memory: mmap.mmap
    device: torch.device

    def lease(self, size: int) -> Any:
        """Returns its first bytes as a buffer; the map is free when that is dropped."""
        return (ctypes.c_char * size).from_buffer(self.memory)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.lease(1))


class _Pinned:
    """Pinned memory of any size.

    A map is free when the storage over it is freed. It is used again for tensors that
    are at most an eighth smaller: to pin takes longer than to copy, and a step that
    does not donate makes a new state each time. No more bytes stay free than are in
    use.

    There is no lock: a storage may be freed at any time, also while a method here runs.
    Each change is one operation on a list or a dict.
    """

    def __init__(self) -> None:
        self.free: list[_PinnedMap] = []  # the one that has been free for longest first
        self.used: dict[int, _PinnedMap] = {}  # by id

    def get(self, size: int, device: torch.device) -> Any:
        """Returns a buffer of ``size`` bytes, for one storage; None without one."""
        if (pinned := self._take_free(size, device)) is None:
            try:
                pinned = _PinnedMap(mmap.mmap(-1, size), device)
            except OSError:
                return None
            if not host_copies.GPU.pin(pinned.address, size, device):
                return None
        lease = pinned.lease(size)
        self.used[id(pinned)] = pinned
        weakref.finalize(lease, self._give_back, pinned).atexit = False
        return lease

    def _take_free(self, size: int, device: torch.device) -> _PinnedMap | None:
        """Returns the smallest free map that is large enough, and not too large."""
        for pinned in sorted(self.free, key=lambda x: len(x.memory)):
            nbytes = len(pinned.memory)
            if pinned.device == device and size <= nbytes <= size + size // 8:
                try:
                    self.free.remove(pinned)
                except ValueError:  # another thread has it
                    continue
                # Copies of the tensor that had it before may be under way.
                host_copies.GPU.synchronize(device)
                return pinned
        return None

    def _give_back(self, pinned: _PinnedMap) -> None:
        del self.used[id(pinned)]
        self.free.append(pinned)
        while _bytes(self.free) > _bytes(self.used.values()):
            try:
                oldest = self.free.pop(0)
            except IndexError:  # another thread had it
                return
            host_copies.GPU.unpin(oldest.address, oldest.device)


def _bytes(maps: Iterable[_PinnedMap]) -> int:
    return sum(len(x.memory) for x in list(maps))


_PINNED = _Pinned()


class Folder(Store):
    """Mapped files on the disk of a folder.

    Each tensor has a file of its own. Its blocks are allocated at once, as a write into
    mapped memory would kill the process if the disk were full. The file is unlinked
    when it has been mapped: so ranks and runs with the same folder share nothing, a
    killed run leaves nothing behind, and a state outlives its folder.

    Args:
        path: the folder, which is made if it does not exist.
    """

    kind = "disk"

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.path.abspath(os.fspath(path))

    def __str__(self) -> str:
        return self.path

    def check(self) -> None:
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise self._failure(error, "keeps memory in this folder") from error
        self._map_file(mmap.PAGESIZE)

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return over_storage(self._map_file(count * dtype.itemsize), count, dtype)

    def read_ahead(self, x: Tensor) -> None:
        advise(x, mmap.MADV_WILLNEED)

    def _map_file(self, size: int) -> torch.UntypedStorage:
        """Returns the storage of a new file of ``size`` bytes, all zero."""
        path = None
        try:
            file, path = tempfile.mkstemp(prefix="offload-", dir=self.path)
            try:
                os.posix_fallocate(file, 0, size)
            finally:
                os.close(file)
            from_file = torch.UntypedStorage.from_file
            return from_file(path, shared=True, nbytes=size)  # pyright: ignore
        except (OSError, RuntimeError) as error:
            raise self._failure(error, f"takes {size} bytes of its disk") from error
        finally:
            if path is not None:
                os.unlink(path)

    def _failure(self, error: Exception, action: str) -> OSError:
        """Makes the error to raise; ``action`` is what this store was about to do."""
        return OSError(
            getattr(error, "errno", None) or 0,
            f"offload to {self.path!r} {action}, and cannot: "
            f"{getattr(error, 'strerror', None) or error}. Make room there and go on "
            "from the state that the step was given, or save that and give offload "
            'a folder on another disk, or "host"',
        )

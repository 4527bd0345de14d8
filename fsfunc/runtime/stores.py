"""Stores: the host's memory, and files of a folder that are mapped."""

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


def advise(x: Tensor, how: int) -> None:
    """Tells the system ``how`` the pages that ``x`` fills will be used."""
    madvise = _madvise()
    if madvise is None or x.device.type != "cpu" or not x.is_contiguous():
        return
    first = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (x.data_ptr() + x.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), how)


class HostMemory(Store):
    """The host's memory, pinned where the device is a GPU.

    torch's allocator of pinned memory rounds up to a power of two, so 1.1 GB would take
    2. Where that costs more than a little, memory is pinned here.
    """

    kind = "host"

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size, pinned = count * dtype.itemsize, device.type == "cuda"
        if pinned and (1 << (size - 1).bit_length()) - size > _WASTE:
            if (lease := _PINNED.get(size, device)) is not None:
                return torch.frombuffer(lease, dtype=dtype, count=count)
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=pinned)


_WASTE = 1 << 24  # bytes


@dataclass(frozen=True, eq=False)
class _PinnedMap:
    """A map of pinned memory, which is unmapped when it is let go of.

    It is a shared one: of a private one a fork, such as a worker of a data loader,
    would leave this process new pages to write to, and the GPU the old ones.
    """

    memory: mmap.mmap
    device: torch.device

    def lease(self, size: int) -> Any:
        """Its first bytes, as a buffer; it is free when that is gone."""
        return (ctypes.c_char * size).from_buffer(self.memory)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.lease(1))


class _Pinned:
    """Pinned memory of any size.

    A map is free when the storage over it is. It is used again for what is at most an
    eighth smaller, as to pin takes longer than to copy, and a step that does not donate
    makes its state anew; no more bytes are kept free than are in use.

    There is no lock: a storage may go at any time, also in here. Each change is one of
    a list or a dict.
    """

    def __init__(self) -> None:
        self.free: list[_PinnedMap] = []  # the one that has been free for longest first
        self.used: dict[int, _PinnedMap] = {}  # by identity

    def get(self, size: int, device: torch.device) -> Any:
        """A buffer of ``size`` bytes, for one storage; None: it cannot be pinned."""
        if (found := self._again(size, device)) is None:
            try:
                found = _PinnedMap(mmap.mmap(-1, size), device)
            except OSError:
                return None
            if not host_copies.GPU.pin(found.address, size, device):
                return None
        lease = found.lease(size)
        self.used[id(found)] = found
        weakref.finalize(lease, self._is_free, found).atexit = False
        return lease

    def _again(self, size: int, device: torch.device) -> _PinnedMap | None:
        """The smallest free map that is large enough, and not too large."""
        for one in sorted(self.free, key=lambda x: len(x.memory)):
            if one.device == device and size <= len(one.memory) <= size + size // 8:
                try:
                    self.free.remove(one)
                except ValueError:  # another thread has it
                    continue
                host_copies.GPU.finish(device)  # copies of whoever had it before
                return one
        return None

    def _is_free(self, one: _PinnedMap) -> None:
        del self.used[id(one)]
        self.free.append(one)
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
    when it has been mapped: so ranks and runs that are given one folder share nothing,
    a killed run leaves nothing behind, and a state outlives its folder.

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
        self._mapped(mmap.PAGESIZE)

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return over_storage(self._mapped(count * dtype.itemsize), count, dtype)

    def read_ahead(self, x: Tensor) -> None:
        advise(x, mmap.MADV_WILLNEED)

    def _mapped(self, size: int) -> torch.UntypedStorage:
        """The storage of a new file of ``size`` bytes, all zero."""
        path = None
        try:
            file, path = tempfile.mkstemp(prefix="offload-", dir=self.path)
            try:
                os.posix_fallocate(file, 0, size)
            finally:
                os.close(file)
            made = torch.UntypedStorage.from_file
            return made(path, shared=True, nbytes=size)  # pyright: ignore
        except (OSError, RuntimeError) as error:
            raise self._failure(error, f"takes {size} bytes of its disk") from error
        finally:
            if path is not None:
                os.unlink(path)

    def _failure(self, error: Exception, what: str) -> OSError:
        return OSError(
            getattr(error, "errno", None) or 0,
            f"offload to {self.path!r} {what}, and cannot: "
            f"{getattr(error, 'strerror', None) or error}. Make room there and go on "
            "from the state that the step was given, or save that and give offload "
            'a folder on another disk, or "host"',
        )

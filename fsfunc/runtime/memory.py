"""Memory: its purposes, its pages, facts about it, what is saved, buffers in turn."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.scopes import Scoped

KINDS = ("parameters", "gathered", "gradients", "moments", "activations", "buffers")
OFFLOADED = "offloaded"  # beside the device, whatever it is for: it does not count
NO_MEMORY = "no memory"  # of stand-ins: what is computed of them costs nothing either

_COUNTER: ContextVar[Any] = ContextVar("fsfunc_counter", default=None)


def count_as(kind: str, tensors: Iterable[Tensor | None]) -> None:
    """Tells a counter the kind of the memory of ``tensors``, if there is one."""
    counter = _COUNTER.get()
    if counter is not None:
        counter.count_as(kind, tensors)


def has_no_memory(x: Tensor) -> bool:
    """True if a counter was told so of ``x``, or of what it was computed from."""
    counter = _COUNTER.get()
    return counter is not None and counter.has_no_memory(x)


def counting(counter: Any) -> Scoped:
    """Inside, ``counter.count_as(kind, tensors)`` hears what memory is for."""
    return Scoped(_COUNTER, counter)


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14


@functools.cache
def _madvise() -> Any:
    try:
        return ctypes.CDLL(None).madvise if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None


def populate(x: Tensor) -> None:
    """Takes the pages of ``x``, which will be written next, at once.

    A fault for each page of 4 KiB is a third of the time in which fresh memory is
    filled with random numbers; taken together they cost a fifth less. Nothing happens
    where the system does not know how, or ``x`` is not on the CPU.
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


_held: Counter[int] = Counter()
_lock = Lock()


def hold(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Holds the memory of ``tensors`` until the function returned is called.

    A donated step leaves held memory as it is and makes a new state, as the pure step
    does. The caller keeps the tensors alive.
    """
    keys = {_torch.storage_key(x) for x in tensors}
    with _lock:
        _held.update(keys)

    def release() -> None:
        with _lock:
            _held.subtract(keys)
            for key in keys:
                if not _held[key]:
                    del _held[key]
            keys.clear()

    return release


def is_held(tensors: Iterable[Tensor]) -> bool:
    """True if any of ``tensors`` lies in held memory."""
    return bool(_held) and any(_torch.storage_key(x) in _held for x in tensors)


Fact = TypeVar("Fact")


class StorageTable(Generic[Fact]):
    """Facts by storage: views share one, and it goes when the storage is freed.

    An address may be another storage's afterwards, which begins without a fact.

    Args:
        freed: is called with the fact of each storage that is freed.
    """

    def __init__(self, freed: Callable[[Fact], Any] = lambda fact: None):
        self.freed = freed
        self.facts: dict[int, Fact] = {}  # by the storage's address
        self._alive: dict[int, weakref.ref] = {}

    def get(self, x: Tensor) -> Fact | None:
        """The fact of a tensor's storage, if there is one."""
        return self.facts.get(_torch.storage_key(_torch.unwrapped(x)))

    def __setitem__(self, x: Tensor, fact: Fact) -> None:
        base = _torch.unwrapped(x)
        key = _torch.storage_key(base)
        if key not in self.facts:
            forget = functools.partial(self._forget, key)
            self._alive[key] = weakref.ref(_torch.storage(base), forget)
        self.facts[key] = fact

    def _forget(self, key: int, gone: Any) -> None:
        if self._alive.get(key) is gone:  # else its address is another one's by now
            del self._alive[key]
            self.freed(self.facts.pop(key))


class BufferPool:
    """Buffers that are handed out again once nothing else holds them (CPU only).

    A fresh buffer costs page faults, at each gather and reduction anew. A buffer is
    free when the pool's own handle is the last one on its storage, so nobody has to
    give anything back, and nothing is taken away from a tensor that still lives. CUDA's
    allocator does the like by itself.

    With ``poison`` a buffer that is handed out, or let go of, is filled with NaN, for
    tests.
    """

    poison = False
    fresh = 0  # depth of `fresh_buffers` blocks: reuse is off while positive

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._lock = Lock()  # to find a free one and to take it is one thing

    def get(self, count: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        """``[count]`` elements of ``dtype``, uninitialised."""
        if isinstance(like, _torch.FakeTensor) or self.fresh:
            return torch.empty(count, dtype=dtype, device=_torch.device_of(like))
        if like.device.type != "cpu":
            return torch.empty(count, dtype=dtype, device=like.device)
        size = count * dtype.itemsize
        # What lasts longer than an inference_mode around is read by autograd then.
        with self._lock, torch.inference_mode(False):
            best, spare = None, []
            for i, storage in enumerate(self.storages):
                room = storage.nbytes()
                if (best is None or room < self.storages[best].nbytes()) and (
                    _torch.uses_of(storage._cdata) == 1
                ):
                    if room < size:
                        spare.append(i)
                    else:
                        best = i
            if best is None:
                for i in reversed(spare):  # outgrown
                    del self.storages[i]
                storage = torch.UntypedStorage(size)
                self.storages.append(storage)
            else:
                storage = self.storages[best]
            # A tensor of its own has a version counter of its own.
            empty = torch.empty(0, dtype=dtype)
            found = empty.set_(storage, 0, (count,))  # type: ignore[call-overload]
        if self.poison:
            found.view(torch.uint8).fill_(255)
        return found

    def trim(self, keep: int) -> None:
        """Lets go of free buffers, but for the ``keep`` largest."""
        with self._lock:
            if len(self.storages) <= keep:
                return
            free, kept = [], []
            for s in self.storages:
                (free if _torch.uses_of(s._cdata) == 1 else kept).append(s)
            free.sort(key=torch.UntypedStorage.nbytes, reverse=True)
            self.storages = [*kept, *free[:keep]]

    def spoil(self, buffer: Tensor) -> None:
        """Fills ``buffer`` with NaN under ``poison``, unless it is still held."""
        if self.poison and _torch.storage_uses(buffer) <= 2:
            buffer.view(torch.uint8).fill_(255)


@contextmanager
def fresh_buffers() -> Iterator[None]:
    """Inside, each buffer is made anew: for who tells values apart by their memory."""
    BufferPool.fresh += 1
    try:
        yield
    finally:
        BufferPool.fresh -= 1


_POOLS: WeakKeyDictionary[Any, dict[int, BufferPool]] = WeakKeyDictionary()


def pool_of(mesh: Any, rank: int) -> BufferPool:
    """The memory of one rank of a mesh, for as long as the mesh is there."""
    return _POOLS.setdefault(mesh, {}).setdefault(rank, BufferPool())

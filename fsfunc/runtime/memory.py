"""Memory: its purposes, its pages taken in time, facts about it, and what is saved."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from threading import Lock
from typing import Any, Generic, TypeVar

from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.scopes import Scoped

KINDS = ("parameters", "gathered", "gradients", "moments", "activations", "buffers")
OFFLOADED = "offloaded"  # beside the device, whatever it is for: it does not count

_COUNTER: ContextVar[Any] = ContextVar("fsfunc_counter", default=None)


def count_as(kind: str, tensors: Iterable[Tensor | None]) -> None:
    """Tells a counter the kind of the memory of ``tensors``, if there is one."""
    counter = _COUNTER.get()
    if counter is not None:
        counter.count_as(kind, tensors)


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

"""Memory: pools of buffers, tables by storage, and kinds of memory for counters."""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_left
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
OFFLOADED = "offloaded"  # not on the device, so it is not counted
NO_MEMORY = "no memory"  # of placeholders, and of what is computed from them

_COUNTER: ContextVar[Any] = ContextVar("fsfunc_counter", default=None)


def count_as(kind: str, tensors: Iterable[Tensor | None], buffer: str = "") -> None:
    """Tells the counter in force, if any, the kind of the memory of ``tensors``.

    Args:
        buffer: whose it is, where another unit may run by then, as in a prefetch.
    """
    if (counter := _COUNTER.get()) is not None:
        counter.count_as(kind, tensors, buffer)


def has_no_memory(x: Tensor) -> bool:
    """True if the counter in force takes ``x`` for a placeholder."""
    return (counter := _COUNTER.get()) is not None and counter.has_no_memory(x)


def counting(counter: Any) -> Scoped:
    """Inside, ``count_as`` of a counter is told the kinds of memory."""
    return Scoped(_COUNTER, counter)


Fact = TypeVar("Fact")


class StorageTable(Generic[Fact]):
    """A table by storage: views share an entry, which goes when the storage is freed.

    Args:
        freed: is called with the entry of each storage that is freed.
    """

    def __init__(self, freed: Callable[[Fact], Any] = lambda fact: None):
        self.freed = freed
        self.facts: dict[int, Fact] = {}  # by the storage's address
        self._alive: dict[int, weakref.ref] = {}
        # Weak, so that who drops a table lets go of its facts at once: no cycle.
        self._weak = weakref.ref(self)

    def get(self, x: Tensor) -> Fact | None:
        """The entry of a tensor's storage, or None."""
        return self.facts.get(_torch.storage_key(_torch.unwrapped(x)))

    def __setitem__(self, x: Tensor, fact: Fact) -> None:
        base = _torch.unwrapped(x)
        key = _torch.storage_key(base)
        if key not in self.facts:
            forget = functools.partial(_forget, self._weak, key)
            self._alive[key] = weakref.ref(_torch.storage(base), forget)
        self.facts[key] = fact


def _forget(weak: weakref.ref[Any], key: int, gone: Any) -> None:
    table = weak()
    # Else the address is another storage's by now.
    if table is not None and table._alive.get(key) is gone:
        del table._alive[key]
        table.freed(table.facts.pop(key))


class BufferPool:
    """A pool of buffers for gathers and reductions (CPU only).

    A new buffer costs page faults. A buffer of the pool is free when the pool has the
    last handle on its storage: so nothing has to be returned, and no tensor that lives
    loses its memory. On CUDA torch's caching allocator does this.

    With ``poison``, for tests, a buffer is filled with NaN when it is handed out and
    when it is dropped.
    """

    poison = False
    allocate: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage
    fresh = 0  # depth of `fresh_buffers` blocks: reuse is off while positive

    def __init__(self) -> None:
        # By size: (bytes, key, storage).
        self.storages: list[tuple[int, int, torch.UntypedStorage]] = []
        self._lock = Lock()  # to find a free one and to take it is one thing

    def get(self, count: int, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """``[count]`` elements of ``dtype``, uninitialised.

        Where ``like`` is; None: of the pool, also where reuse is off.
        """
        if like is not None:
            if self.fresh or isinstance(like, _torch.FakeTensor):
                return torch.empty(count, dtype=dtype, device=_torch.device_of(like))
            if like.device.type != "cpu":
                return torch.empty(count, dtype=dtype, device=like.device)
        if torch.is_inference_mode_enabled():
            # Autograd may read a buffer after an inference_mode around this has ended.
            with torch.inference_mode(False):
                return self.get(count, dtype, like)
        size = count * dtype.itemsize
        with self._lock:
            large = bisect_left(self.storages, (size,))
            for _, key, storage in self.storages[large:]:  # noqa: B007  the smallest
                if _torch.storage_uses_by_key(key) == 1:
                    break
            else:
                storage = self._grown(size, large)
            # A tensor of its own has a version counter of its own.
            empty = torch.empty(0, dtype=dtype, device="cpu")
            found = empty.set_(storage, 0, (count,))  # type: ignore[call-overload]
        if self.poison:
            found.view(torch.uint8).fill_(255)
        return found

    def _grown(self, size: int, large: int) -> torch.UntypedStorage:
        """A new storage, in place of the first ``large`` ones that are free."""
        small = [
            s for s in self.storages[:large] if _torch.storage_uses_by_key(s[1]) > 1
        ]
        storage = self.allocate(size)
        self.storages[:large] = [*small, (size, storage._cdata, storage)]
        return storage

    def trim(self, keep: int) -> None:
        """Frees unused buffers, but for the ``keep`` largest."""
        with self._lock:
            free = [s for s in self.storages if _torch.storage_uses_by_key(s[1]) == 1]
            for outgrown in free[: max(0, len(free) - keep)]:
                self.storages.remove(outgrown)

    def spoil(self, buffer: Tensor) -> None:
        """Fills ``buffer`` with NaN under ``poison``, unless it has other uses."""
        if self.poison and _torch.storage_uses(buffer) <= 2:
            buffer.view(torch.uint8).fill_(255)


@contextmanager
def fresh_buffers() -> Iterator[None]:
    """Inside, no buffer is used again: for recorders, which know values by storage."""
    BufferPool.fresh += 1
    try:
        yield
    finally:
        BufferPool.fresh -= 1


_POOLS: WeakKeyDictionary[Any, dict[int, BufferPool]] = WeakKeyDictionary()


def pool_of(mesh: Any, rank: int) -> BufferPool:
    """The pool of one rank of a mesh, which lives as long as the mesh."""
    pools = _POOLS.setdefault(mesh, {})
    return mesh.link.pool if mesh.link else pools.setdefault(rank, BufferPool())

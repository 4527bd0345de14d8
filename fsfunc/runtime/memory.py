"""Memory: pools of buffers, tables by storage, and kinds of memory for counters.

Gathers and reductions take their buffers from a `BufferPool`. A `StorageTable` has what
is known of memory, whichever views of it are asked. A plan's counter is told by
`count_as` which tensors are parameters, moments, ..., for its table of memory.
"""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.scopes import Scoped

KINDS = ("parameters", "gathered", "gradients", "moments", "activations", "buffers")
OFFLOADED = "offloaded"  # not on the device, so it is not counted
NO_MEMORY = "no memory"  # of placeholders, and of what is computed from them


class MemoryCounter(Protocol):
    """What counts memory by kind while it is in force: a plan's observer."""

    def count_as(
        self, kind: str, tensors: Iterable[Tensor | None], buffer: str
    ) -> None: ...

    def has_no_memory(self, x: Tensor) -> bool: ...


class HasLink(Protocol):
    """A mesh, as the floor below it sees it."""

    @property
    def link(self) -> Any: ...


_COUNTER: ContextVar[MemoryCounter | None] = ContextVar("fsfunc_counter", default=None)


def count_as(kind: str, tensors: Iterable[Tensor | None], buffer: str = "") -> None:
    """Tells the counter in force, if any, the kind of the memory of ``tensors``.

    Args:
        buffer: the name of their buffer; another unit may run then, as in a prefetch.
    """
    if (counter := _COUNTER.get()) is not None:
        counter.count_as(kind, tensors, buffer)


def has_no_memory(x: Tensor) -> bool:
    """Returns whether the counter in force takes ``x`` for a placeholder."""
    return (counter := _COUNTER.get()) is not None and counter.has_no_memory(x)


def counting(counter: MemoryCounter) -> Scoped:
    """Inside, :func:`count_as` calls that of ``counter``."""
    return Scoped(_COUNTER, counter)


Fact = TypeVar("Fact")


class StorageTable(Generic[Fact]):
    """A table by storage: views share an entry, which is dropped with the storage.

    Args:
        freed: is called with the entry of each storage that is freed.
    """

    def __init__(self, freed: Callable[[Fact], Any] = lambda fact: None):
        self.freed = freed
        self.facts: dict[int, Fact] = {}  # by the storage's address
        self._alive: dict[int, weakref.ref] = {}
        # Callbacks refer to the table weakly: with a cycle its facts would live on,
        # when it is dropped, until the collector runs.
        self._weak = weakref.ref(self)

    def get(self, x: Tensor) -> Fact | None:
        """Returns the entry of a tensor's storage, or None."""
        return self.facts.get(_torch.storage_key(_torch.unwrapped(x)))

    def __setitem__(self, x: Tensor, fact: Fact) -> None:
        base = _torch.unwrapped(x)
        key = _torch.storage_key(base)
        if key not in self.facts:
            forget = functools.partial(_forget, self._weak, key)
            self._alive[key] = weakref.ref(_torch.storage(base), forget)
        self.facts[key] = fact


def _forget(weak_table: weakref.ref[Any], key: int, storage: weakref.ref[Any]) -> None:
    """Drops the entry of a freed storage; the callback of its weak reference."""
    table = weak_table()
    # The address may be another storage's by now, which has an entry of its own.
    if table is not None and table._alive.get(key) is storage:
        del table._alive[key]
        table.freed(table.facts.pop(key))


class BufferPool:
    """A pool of buffers for gathers and reductions (CPU only).

    A new buffer costs page faults. A buffer of the pool is free when only the pool
    refers to its storage: so nothing has to be returned, and no tensor in use loses its
    memory. On CUDA torch's caching allocator does this.

    With ``poison``, for tests, a buffer is filled with NaN when it is handed out and
    when it is dropped.
    """

    poison = False
    allocate: Callable[[int], torch.UntypedStorage] = torch.UntypedStorage
    fresh = 0  # depth of `fresh_buffers` blocks: reuse is off while positive

    def __init__(self) -> None:
        # (bytes, address, storage), sorted by bytes.
        self.storages: list[tuple[int, int, torch.UntypedStorage]] = []
        self._lock = Lock()  # two threads must not find the same free one

    def get(self, count: int, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """Returns ``[count]`` elements of ``dtype``, uninitialised.

        Args:
            like: on the device of this tensor, and new memory where reuse is off; None:
                always of the pool.
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
            first_fit = bisect_left(self.storages, (size,))
            # The smallest free one that is large enough.
            for _, key, storage in self.storages[first_fit:]:  # noqa: B007
                if _torch.storage_uses_by_key(key) == 1:
                    break
            else:
                storage = self._allocate_in_place(size, first_fit)
            # Not a view of an earlier tensor, whose version counter it would share.
            empty = torch.empty(0, dtype=dtype, device="cpu")
            buffer = empty.set_(storage, 0, (count,))  # type: ignore[call-overload]
        if self.poison:
            buffer.view(torch.uint8).fill_(255)
        return buffer

    def _allocate_in_place(self, size: int, first_fit: int) -> torch.UntypedStorage:
        """Allocates a storage, in place of the free ones that are too small."""
        in_use = [
            s for s in self.storages[:first_fit] if _torch.storage_uses_by_key(s[1]) > 1
        ]
        storage = self.allocate(size)
        self.storages[:first_fit] = [*in_use, (size, storage._cdata, storage)]
        return storage

    def trim(self, n_left: int) -> None:
        """Frees unused buffers, but for the ``n_left`` largest."""
        with self._lock:
            free = [s for s in self.storages if _torch.storage_uses_by_key(s[1]) == 1]
            for outgrown in free[: max(0, len(free) - n_left)]:
                self.storages.remove(outgrown)

    def spoil(self, buffer: Tensor) -> None:
        """Fills ``buffer`` with NaN under ``poison``, unless it has other uses."""
        if self.poison and _torch.storage_uses(buffer) <= 2:
            buffer.view(torch.uint8).fill_(255)


@contextmanager
def fresh_buffers() -> Iterator[None]:
    """Inside, no buffer is used twice: for recorders, which know values by storage."""
    BufferPool.fresh += 1
    try:
        yield
    finally:
        BufferPool.fresh -= 1


_POOLS: WeakKeyDictionary[HasLink, dict[int, BufferPool]] = WeakKeyDictionary()


def pool_of(mesh: HasLink, rank: int) -> BufferPool:
    """Returns the pool of one rank of a mesh, which lives as long as the mesh."""
    pools = _POOLS.setdefault(mesh, {})
    return mesh.link.pool if mesh.link else pools.setdefault(rank, BufferPool())

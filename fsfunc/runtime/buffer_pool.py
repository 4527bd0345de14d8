"""A pool of buffers for gathers and reductions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsfunc import _torch


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

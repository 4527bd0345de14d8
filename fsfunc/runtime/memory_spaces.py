"""Memory spaces: the device's own memory, and stores that tensors are offloaded to.

The space of a tensor is a property of its storage, also of a fake one: see
:func:`space_of`. Its ``fetch`` copies a buffer to the device before it is computed
with, and its ``put`` copies the result back. In the space of the device itself both
return what they are given, so code that moves buffers need not ask where these are.

To offload to something else, derive from :class:`Store`; `stores` has two.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime import host_copies
from fsfunc.runtime.host_copies import crosses, send, send_all, wait_for
from fsfunc.runtime.memory import OFFLOADED, StorageTable, count_as
from fsfunc.runtime.scopes import Scoped


class Store:
    """Memory outside the device that computes: an argument of ``offload``.

    To define one, derive from this class and implement ``allocate``, which must store
    no reference to what it returns, or that is never freed. An optimizer may compute in
    that memory, so it is of plain tensors. ``kind`` names it, equally on all ranks.

    What a step copies between the store and the device goes by ``copy`` and
    ``copy_all``: by default as between any two tensors, and between the host's memory
    and a GPU while Python goes on (`host_copies`). A store whose memory is reached in
    another way overrides both, and sets ``copies_ahead`` to False.

    >>> import torch, fsfunc as ff
    >>> class Shared(ff.Store):
    ...     kind = "shared memory"
    ...     def allocate(self, count, dtype, device):
    ...         return torch.empty(count, dtype=dtype).share_memory_()
    >>> step = ff.offload(lambda state, x: state, params=Shared())
    """

    kind = ""
    copies_ahead = True
    """Whether `host_copies.send_ahead` may copy from it beside what a GPU computes."""

    # The pool of `scratch`: (device, bytes, storage), the one used last at the end.
    _pool: list[tuple[torch.device, int, torch.UntypedStorage]]
    _most_in_use: int  # bytes of the pool that were in use at once
    _twin: Store | None  # a copy of this store, without its pool
    _lock: Lock

    # Not in ``__init__``, which a subclass may define without calling this one's.
    def __new__(cls, *_: Any, **__: Any) -> Store:
        self = super().__new__(cls)
        self._make_pool()
        return self

    def _make_pool(self) -> None:
        self._pool, self._most_in_use, self._twin, self._lock = [], 0, None, Lock()

    def __str__(self) -> str:
        return self.kind or type(self).__name__

    def check(self) -> None:
        """Raises if nothing can be stored here.

        Raises:
            OSError: names the place, and the way out.
        """

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a new tensor ``[count]`` in this store, at offset 0 of a new storage.

        Args:
            device: the device that computes with it.

        Raises:
            OSError: there is no room.
        """
        raise NotImplementedError(f"{type(self).__name__} is a Store without allocate")

    def read_ahead(self, x: Tensor) -> None:
        """Called some time before ``x``, a tensor of this store, is read."""

    def copy(self, out: Tensor, x: Tensor, *, private: bool = False) -> Tensor:
        """Copies ``x`` into ``out``; returns ``out``. One of them, or both, lie here.

        Dtypes may differ. An override returns when the copy is over.

        Args:
            private: Python never reads the one in the store, and writes it only when
                this copy is over: see `host_copies.send`.
        """
        if crosses(out, x):
            return send(out, x, private=private)
        return wait_for(out).copy_(wait_for(x))

    def copy_all(self, outs: list[Tensor], xs: list[Tensor], whole: Tensor) -> None:
        """Copies tensors of the device into parts of ``whole``, which lies here."""
        if crosses(whole, xs[0]):
            send_all(outs, xs, whole)
        else:
            wait_for(whole)
            torch._foreach_copy_(outs, xs)

    def empty(
        self, count: int, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Returns a new tensor ``[count]`` in this store, for ``device`` to use."""
        device = torch.device(device)
        if _torch.fake_active() or device.type == "meta" or not count:
            stand_in = "meta" if device.type == "meta" else "cpu"
            x = torch.empty(count, dtype=dtype, device=stand_in)
        else:
            x = self.allocate(count, dtype, device)
            self._check_new(x, count, dtype)
        return Offloaded(self, device).mark(x)

    def _check_new(self, x: Any, count: int, dtype: torch.dtype) -> None:
        """Raises if a user's ``allocate`` returned something else than new memory."""
        returned, expected = _describe(x), f"{dtype}[{count}]"
        if isinstance(x, Tensor) and x.dtype == dtype and x.shape == (count,):
            is_odd = x.requires_grad or x.is_inference() or not x.is_contiguous()
            if _SPACES.get(x) is None and not (x.storage_offset() or is_odd):
                return
            returned = f"{returned} that is a part of other memory, or in use"
        raise TypeError(
            f"allocate of {type(self).__name__} is asked for {expected}, in memory of "
            f"their own from its start, and returned {returned}"
        )

    def scratch(
        self, count: int, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Returns a tensor ``[count]`` in a pool of this store's memory.

        An earlier copy from or to that memory may still be under way. A copy into it
        waits for that by itself (`host_copies.send`); Python calls
        `host_copies.wait_for` before it reads or writes.
        """
        if _torch.fake_active() or torch.device(device).type == "meta":
            return self.empty(count, dtype, device)
        device, size = torch.device(device), count * dtype.itemsize
        with self._lock:
            # The smallest free one. Sizes vary, as lengths of sequences do: so it may
            # be up to twice as large as asked for.
            best, best_size = None, 2 * size + 1
            for i, (storage_device, nbytes, storage) in enumerate(self._pool):
                # Of one device: its mark names it, and it may be pinned for that.
                if size <= nbytes < best_size and storage_device == device:
                    if _torch.storage_uses_by_key(storage._cdata) == 1:
                        best, best_size = i, nbytes
                        if nbytes == size:
                            break
            if best is not None:
                self._pool.append(entry := self._pool.pop(best))
                return over_storage(entry[2], count, dtype)
            # Of a twin: a mark that refers to this store would keep its pool alive.
            if self._twin is None:
                self._twin = copy.copy(self)
                self._twin._make_pool()
            self._make_room(size)
            x = self._twin.empty(count, dtype, device)
            if size:
                self._pool.append((device, size, x.untyped_storage()))
            return x

    def _make_room(self, size: int) -> None:
        """Frees what was not used for longest, if ``size`` more were too much.

        It has never more than twice what was in use at once: one half of a step may use
        other sizes than the other half.
        """
        free = {
            i
            for i, entry in enumerate(self._pool)
            if _torch.storage_uses_by_key(entry[2]._cdata) == 1
        }
        total = sum(entry[1] for entry in self._pool) + size
        in_use = total - sum(self._pool[i][1] for i in free)
        self._most_in_use = max(self._most_in_use, in_use)
        dropped = set()
        for i in sorted(free):  # the one used last is at the end
            if total <= 2 * self._most_in_use:
                break
            dropped.add(i)
            total -= self._pool[i][1]
        self._pool = [entry for i, entry in enumerate(self._pool) if i not in dropped]


def _describe(x: Any) -> str:
    """Returns a tensor's dtype and shape, or the name of a type."""
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


class MemorySpace:
    """The memory of the device that computes: the space of tensors by default."""

    offloaded = False
    kind = ""  # that of its store

    def on_device(self, x: Tensor) -> Tensor:
        """Returns ``x``, or an empty tensor of its dtype, on the device."""
        return x

    def fetch(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        *,
        waits: bool = True,
    ) -> Tensor:
        """Returns ``x`` on the device, in ``dtype``; a copy in ``out``, if given.

        Args:
            waits: whether Python may write ``x`` next, and so waits for the copy; else
                see `host_copies`.
        """
        return x if dtype is None else x.to(dtype)

    def put(
        self, x: Tensor, dtype: torch.dtype | None = None, *, waits: bool = True
    ) -> Tensor:
        """Returns ``x`` in this space, in ``dtype``; a copy lies in memory of a pool.

        Args:
            waits: whether Python may read the result next, and so waits for the copy;
                else see `host_copies`.
        """
        return x if dtype is None else x.to(dtype)

    def new_empty(
        self, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns an uninitialized tensor of a pool here; ``dtype``: that of ``x``."""
        return x.new_empty(shape, dtype=dtype)

    def empty_like(self, x: Tensor, scratch: bool = False) -> Tensor:
        """Returns an uninitialized tensor like ``x`` here; of a pool if ``scratch``."""
        return torch.empty_like(x)

    def zeros(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns zeros here, of the dtype of ``x``."""
        return x.new_zeros(shape)

    def copied(self, x: Tensor) -> Tensor:
        """Returns a copy of ``x`` here."""
        return x.clone()

    def copy_all(self, outs: list[Tensor], xs: list[Tensor], whole: Tensor) -> None:
        """Copies tensors of the device into parts of ``whole``, which lies here."""
        torch._foreach_copy_(outs, xs)

    def write(self, x: Tensor, source: Tensor) -> None:
        """Writes the values of ``source`` into ``x``, which lies here.

        The copy may go on: `host_copies.wait_for_copies` waits for it.
        """
        x.copy_(source)

    def comes_beside(self, x: Tensor) -> bool:
        """Returns whether a fetch of ``x`` can run beside what the device computes."""
        return False

    def read_ahead(self, x: Tensor) -> None:
        """Announces that ``x`` will be read soon, so that files can be read ahead."""

    def mark(self, x: Tensor) -> Tensor:
        """Records that the storage of ``x`` is in this space; returns ``x``."""
        return x


_DEVICE = MemorySpace()


@dataclass(frozen=True, eq=False)
class Offloaded(MemorySpace):
    """The space of tensors in a store, together with the device that computes."""

    store: Store
    device: torch.device

    offloaded = True

    @property
    def kind(self) -> str:
        return self.store.kind or type(self.store).__name__

    def on_device(self, x: Tensor) -> Tensor:
        same = x.device == self.device
        return x if same else x.new_empty(0, device=self.device)

    def fetch(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
        *,
        waits: bool = True,
    ) -> Tensor:
        if out is None:
            out = x.new_empty(x.shape, dtype=dtype or x.dtype, device=self.device)
        self.store.copy(out, x, private=waits)
        if waits:
            wait_for(x)
        return out

    def put(
        self, x: Tensor, dtype: torch.dtype | None = None, *, waits: bool = True
    ) -> Tensor:
        dtype = x.dtype if dtype is None else dtype
        if x.dtype == dtype and space_of(x).offloaded:
            return wait_for(x) if waits else x
        out = self.store.scratch(x.numel(), dtype, self.device).view(x.shape)
        self.store.copy(out, x, private=waits)
        return wait_for(out) if waits else out

    def new_empty(
        self, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        count = torch.Size(shape).numel()
        flat = self.store.scratch(count, dtype or x.dtype, self.device)
        return wait_for(flat).view(shape)

    def empty_like(self, x: Tensor, scratch: bool = False) -> Tensor:
        make = self.store.scratch if scratch else self.store.empty
        return wait_for(make(x.numel(), x.dtype, self.device)).view(x.shape)

    def zeros(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        count = torch.Size(shape).numel()
        return self.store.empty(count, x.dtype, self.device).view(shape).zero_()

    def copied(self, x: Tensor) -> Tensor:
        out = self.empty_like(x)
        return wait_for(self.store.copy(out, x.detach(), private=True))

    def copy_all(self, outs: list[Tensor], xs: list[Tensor], whole: Tensor) -> None:
        self.store.copy_all(outs, xs, whole)

    def write(self, x: Tensor, source: Tensor) -> None:
        self.store.copy(x, source)

    def comes_beside(self, x: Tensor) -> bool:
        there = self.on_device(x)
        return self.store.copies_ahead and host_copies.can_copy_beside(x, there)

    def read_ahead(self, x: Tensor) -> None:
        if not _torch.fake_active():
            self.store.read_ahead(x)

    def mark(self, x: Tensor) -> Tensor:
        _SPACES[x] = self
        count_as(OFFLOADED, [x])
        return x


_SPACES = StorageTable[Offloaded]()
OFFLOADED_STORAGES = _SPACES.facts
"""By storage, what is offloaded now: empty, and false, in most programs."""
_MOMENTS: ContextVar[Store | None] = ContextVar("fsfunc_moments", default=None)


def over_storage(
    storage: torch.UntypedStorage, count: int, dtype: torch.dtype
) -> Tensor:
    """Returns the first ``count`` elements of a storage, as a 1-D tensor."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, 0, (count,))  # type: ignore[call-overload]


def any_offloaded() -> bool:
    """Returns whether any memory of this process is offloaded."""
    return bool(_SPACES.facts)


def space_of(x: Tensor) -> MemorySpace:
    """Returns the memory space of a tensor."""
    # In most programs nothing is offloaded: then one look at a dict tells.
    if not _SPACES.facts or _torch.is_wrapped(x) or x.layout != torch.strided:
        return _DEVICE
    return _SPACES.get(x) or _DEVICE


def moments_go_to(store: Store | None) -> Scoped:
    """Inside, an optimizer makes its moments in ``store``."""
    return Scoped(_MOMENTS, store)


def moments_store() -> Store | None:
    """Returns the store for the moments that an optimizer makes; None: the device."""
    return _MOMENTS.get()


def memory_like(
    x: Tensor, device: torch.device | str | None = None, *, in_store: bool = True
) -> Tensor:
    """Returns zeros like ``x``, which may have no data, in the same space.

    Zeros, as padding in packed buffers is. They cost nothing: the system gives zero
    pages anyway.

    Args:
        device: the device that is to compute with it; by default that of ``x``, or the
            CPU where ``x`` has no data.
        in_store: False gives memory of the device also where ``x`` is offloaded.
    """
    space = space_of(x)
    if isinstance(space, Offloaded) and in_store:
        device = device or _real_device(space.device)
        return space.store.empty(x.numel(), x.dtype, device).view(x.shape).zero_()
    is_abstract = x.device.type == "meta" or isinstance(x, _torch.FakeTensor)
    device = device or ("cpu" if is_abstract else x.device)
    return torch.zeros(x.shape, dtype=x.dtype, device=device)


def _real_device(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device

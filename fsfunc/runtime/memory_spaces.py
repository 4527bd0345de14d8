"""Memory spaces: the device's own memory, the host's, and mapped files.

The space of a tensor is a property of its storage, fake ones too: :func:`space_of`
tells it. Where a buffer is computed with its space fetches it, ``fetch``; what takes
its place is put back, ``put``. To the device's own space both are nothing, so code that
moves buffers need not ask where they are.
"""

from __future__ import annotations

import copy
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.memory import OFFLOADED, StorageTable, advise, count_as
from fsfunc.runtime.scopes import Scoped


class Store:
    """Memory beside the device that computes; ``offload`` takes one in any place.

    The host's and a folder's disk are two. One of your own derives from this and says
    ``allocate``, and holds nothing of what that gave, or nobody frees it; what is
    fetched and put back is copied as between any two tensors.
    ``kind`` names it alike on all ranks.

    >>> import torch, fsfunc as ff
    >>> class Shared(ff.Store):
    ...     kind = "shared memory"
    ...     def allocate(self, count, dtype, device):
    ...         return torch.empty(count, dtype=dtype).share_memory_()
    >>> step = ff.offload(lambda state, x: state, params=Shared())
    """

    kind = ""

    _spare: list[tuple[int, torch.UntypedStorage]]  # by the bytes that were asked for
    _twin: Store | None
    _lock: Any

    def __new__(cls, *_: Any, **__: Any) -> Store:
        self = super().__new__(cls)
        self._begin()
        return self

    def _begin(self) -> None:
        self._spare, self._twin, self._lock = [], None, Lock()

    def __str__(self) -> str:
        return self.kind or type(self).__name__

    def check(self) -> None:
        """Raises where nothing can be kept here.

        Raises:
            OSError: names the place, and the way out.
        """

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[count]`` elements here, at the start of memory of their own.

        Args:
            device: computes with what is kept in them.

        Raises:
            OSError: there is no room.
        """
        raise NotImplementedError(f"{type(self).__name__} is a Store without allocate")

    def read_ahead(self, x: Tensor) -> None:
        """Hears that ``x``, which is here, will be read soon."""

    def empty(self, count: int, dtype: torch.dtype, device: Any) -> Tensor:
        """``[count]`` elements that lie here and are computed with on ``device``."""
        device = torch.device(device)
        if _torch.fake_active() or device.type == "meta" or not count:
            on = "meta" if device.type == "meta" else "cpu"
            found = torch.empty(count, dtype=dtype, device=on)
        else:
            found = self.allocate(count, dtype, device)
            self._check_new(found, count, dtype)
        return Offloaded(self, device).mark(found)

    def _check_new(self, x: Any, count: int, dtype: torch.dtype) -> None:
        """Raises where ``allocate`` gave something else than new memory."""
        said, asked = _described(x), f"{dtype}[{count}]"
        if isinstance(x, Tensor) and x.dtype == dtype and x.shape == (count,):
            strange = x.requires_grad or x.is_inference() or not x.is_contiguous()
            if _SPACES.get(x) is None and not (x.storage_offset() or strange):
                return
            said = f"{said} that is a part of other memory, or in use"
        raise TypeError(
            f"allocate of {type(self).__name__} is asked for {asked}, in memory of "
            f"their own from its start, and returned {said}"
        )

    def scratch(self, count: int, dtype: torch.dtype, device: Any) -> Tensor:
        """The same, in memory that is handed out again once it is free."""
        if _torch.fake_active() or torch.device(device).type == "meta":
            return self.empty(count, dtype, device)
        size = count * dtype.itemsize
        with self._lock:
            for asked, storage in self._spare:
                if asked == size and _torch.uses_of(storage._cdata) == 1:
                    return _over(storage, count, dtype)
            # Marked as another one's: a mark that led here would keep all of it alive.
            if self._twin is None:
                self._twin = copy.copy(self)
                self._twin._begin()
            found = self._twin.empty(count, dtype, device)
            if size:
                self._spare.append((size, found.untyped_storage()))
            return found


def _described(x: Any) -> str:
    """A tensor's dtype and shape, or what else something is."""
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


class HostMemory(Store):
    """The host's memory, pinned where the device is a GPU."""

    kind = "host"

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")


class Folder(Store):
    """A folder's disk.

    Memory is a file of its own that is mapped, whose blocks are taken at once (or a
    write into memory would find the disk full, and kill the process), and which has no
    name any more: no two ranks, processes or runs can meet in it, whatever they call
    their folder, nothing is left behind by a run that is killed, and whoever deletes
    the folder takes nothing away from a state.

    Args:
        path: it is made where it is not there.
    """

    kind = "disk"

    def __init__(self, path: str | os.PathLike):
        self.path = os.path.abspath(os.fspath(path))

    def __str__(self) -> str:
        return self.path

    def check(self) -> None:
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise self._said(error, "keeps memory in this folder") from error
        self._mapped(mmap.PAGESIZE)

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return _over(self._mapped(count * dtype.itemsize), count, dtype)

    def read_ahead(self, x: Tensor) -> None:
        advise(x, mmap.MADV_WILLNEED)

    def _mapped(self, size: int) -> torch.UntypedStorage:
        """A file's ``size`` bytes, all zero."""
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
            raise self._said(error, f"takes {size} bytes of its disk") from error
        finally:
            if path is not None:
                os.unlink(path)

    def _said(self, error: Exception, what: str) -> OSError:
        return OSError(
            getattr(error, "errno", None) or 0,
            f"offload to {self.path!r} {what}, and cannot: "
            f"{getattr(error, 'strerror', None) or error}. Make room there and go on "
            "from the state that the step was given, or save that and give offload "
            'a folder on another disk, or "host"',
        )


class MemorySpace:
    """The memory of the device that computes: where tensors are unless offloaded."""

    offloaded = False
    kind = ""  # what a store calls itself

    def on_device(self, x: Tensor) -> Tensor:
        """``x``, or an empty tensor like it, on the device that computes with it."""
        return x

    def fetch(
        self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        """``x`` on the device, in ``dtype``: in ``out`` or new memory if it moves."""
        return x if dtype is None else x.to(dtype)

    def put(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``x`` in this space, in ``dtype``; if it moves, in memory from a pool."""
        return x if dtype is None else x.to(dtype)

    def new_empty(
        self, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Uninitialized pooled memory here, by default of the dtype of ``x``."""
        return x.new_empty(shape, dtype=dtype)

    def empty_like(self, x: Tensor, scratch: bool = False) -> Tensor:
        """Memory like ``x`` here; ``scratch`` is handed out again later."""
        return torch.empty_like(x)

    def zeros(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Zeros here, of the dtype of ``x``."""
        return x.new_zeros(shape)

    def copied(self, x: Tensor) -> Tensor:
        """A copy of ``x`` here."""
        return x.clone()

    def read_ahead(self, x: Tensor) -> None:
        """Says that ``x`` will be read soon: the system reads files meanwhile."""

    def mark(self, x: Tensor) -> Tensor:
        """``x``, of which it is noted that it is here."""
        return x


_DEVICE = MemorySpace()


@dataclass(frozen=True, eq=False)
class Offloaded(MemorySpace):
    """A store beside the device on which its tensors are computed with."""

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
        self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = x.new_empty(x.shape, dtype=dtype or x.dtype, device=self.device)
        return out.copy_(x)

    def put(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = x.dtype if dtype is None else dtype
        if x.dtype == dtype and space_of(x).offloaded:
            return x
        room = self.store.scratch(x.numel(), dtype, self.device)
        return room.view(x.shape).copy_(x)

    def new_empty(
        self, x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        count = torch.Size(shape).numel()
        return self.store.scratch(count, dtype or x.dtype, self.device).view(shape)

    def empty_like(self, x: Tensor, scratch: bool = False) -> Tensor:
        make = self.store.scratch if scratch else self.store.empty
        return make(x.numel(), x.dtype, self.device).view(x.shape)

    def zeros(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        count = torch.Size(shape).numel()
        return self.store.empty(count, x.dtype, self.device).view(shape).zero_()

    def copied(self, x: Tensor) -> Tensor:
        return self.empty_like(x).copy_(x.detach())

    def read_ahead(self, x: Tensor) -> None:
        if not _torch.fake_active():
            self.store.read_ahead(x)

    def mark(self, x: Tensor) -> Tensor:
        _SPACES[x] = self
        count_as(OFFLOADED, [x])
        return x


_SPACES = StorageTable[Offloaded]()
_MOMENTS: ContextVar[Store | None] = ContextVar("fsfunc_moments", default=None)


def _over(storage: torch.UntypedStorage, count: int, dtype: torch.dtype) -> Tensor:
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(storage, 0, (count,))  # type: ignore[call-overload]


def any_offloaded() -> bool:
    """True if any memory of this process is offloaded."""
    return bool(_SPACES.facts)


def space_of(x: Tensor) -> MemorySpace:
    """The space in which ``x`` is."""
    if not _SPACES.facts or _torch.is_wrapped(x) or x.layout != torch.strided:
        return _DEVICE
    return _SPACES.get(x) or _DEVICE


def moments_go_to(store: Store | None) -> Scoped:
    """Puts into ``store`` the moments that an optimizer makes inside."""
    return Scoped(_MOMENTS, store)


def moments_store() -> Store | None:
    """The store of what an optimizer makes now, if that is not the device."""
    return _MOMENTS.get()

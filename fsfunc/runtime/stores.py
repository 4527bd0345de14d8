"""Memory beside the device: of the host, or of files that are mapped.

Where a tensor lies is a property of its storage, fake ones too: :func:`lies` tells it.
Whoever computes with such a tensor on the device brings a copy (:func:`brought`);
whoever makes another one in its place makes it there (:func:`empty_beside`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.memory_kinds import OFFLOADED, count_as
from fsfunc.runtime.prefault import advise
from fsfunc.runtime.scoped import Scoped

__all__ = [
    "LIES",
    "Lies",
    "Store",
    "ahead",
    "beside",
    "brought",
    "copied",
    "copied_to",
    "empty_beside",
    "lies",
    "like_device",
    "mark_like",
    "moments_go_to",
    "moments_store",
    "added_beside",
    "divided_beside",
    "zeros_beside",
]


class Store:
    """The host's memory (pinned where the device is a GPU), or a folder's disk.

    On disk, memory is a file of its own that is mapped, whose blocks are taken at once
    (or a write into memory would find the disk full, and kill the process), and which
    has no name any more: no two ranks, processes or runs can meet in it, whatever they
    call their folder, nothing is left behind by a run that is killed, and whoever
    deletes the folder takes nothing away from a state.

    Args:
        where: "host", or a folder; it is made where it is not there.
    """

    def __init__(self, where: str | os.PathLike):
        self.folder = None if where == "host" else os.path.abspath(os.fspath(where))
        self._spare: list[torch.UntypedStorage] = []
        self._twin: Store | None = None
        self._lock = Lock()

    def __str__(self) -> str:
        return "host" if self.folder is None else self.folder

    def check(self) -> None:
        """Raises where nothing can be kept here.

        Raises:
            OSError: names the folder, and the way out.
        """
        if self.folder is not None:
            try:
                os.makedirs(self.folder, exist_ok=True)
            except OSError as error:
                raise self._said(error, "keeps memory in this folder") from error
            self._mapped(mmap.PAGESIZE)

    def empty(self, count: int, dtype: torch.dtype, device: Any) -> Tensor:
        """``[count]`` elements that lie here and are computed with on ``device``."""
        size, device = count * dtype.itemsize, torch.device(device)
        if _torch.fake_active() or device.type == "meta" or not size:
            on = "meta" if device.type == "meta" else "cpu"
            found = torch.empty(count, dtype=dtype, device=on)
        elif self.folder is None:
            found = torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")
        else:
            found = _over(self._mapped(size), count, dtype)
        return _marked(found, Lies(self, device))

    def scratch(self, count: int, dtype: torch.dtype, device: Any) -> Tensor:
        """The same, in memory that is handed out again once nobody holds it."""
        if _torch.fake_active() or torch.device(device).type == "meta":
            return self.empty(count, dtype, device)
        size = count * dtype.itemsize
        with self._lock:
            for storage in self._spare:
                if storage.nbytes() == size and _torch.uses_of(storage._cdata) == 1:
                    return _over(storage, count, dtype)
            # Marked as another one's: a mark that led here would keep all of it alive.
            if self._twin is None:
                self._twin = Store("host" if self.folder is None else self.folder)
            found = self._twin.empty(count, dtype, device)
            if size:
                self._spare.append(found.untyped_storage())
            return found

    def _mapped(self, size: int) -> torch.UntypedStorage:
        """A file's ``size`` bytes, all zero."""
        path = None
        try:
            file, path = tempfile.mkstemp(prefix="offload-", dir=self.folder)
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
            f"offload to {self.folder!r} {what}, and cannot: "
            f"{getattr(error, 'strerror', None) or error}. Make room there and go on "
            "from the state that the step was given, or save that and give offload "
            'a folder on another disk, or "host"',
        )


class Lies(NamedTuple):
    """Where a tensor lies, and on which device it is computed with."""

    store: Store
    device: torch.device


# By the address of a storage; the reference takes the entry away when that dies.
LIES: dict[int, tuple[weakref.ref, Lies]] = {}
_MOMENTS: ContextVar[Store | None] = ContextVar("fsfunc_moments", default=None)


def _over(storage: torch.UntypedStorage, count: int, dtype: torch.dtype) -> Tensor:
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(storage, 0, (count,))  # type: ignore[call-overload]


def _marked(x: Tensor, where: Lies) -> Tensor:
    storage = x.untyped_storage()
    key = storage._cdata

    def gone(reference: Any, known: Any = LIES) -> None:  # at exit, too
        if key in known and known[key][0] is reference:
            del known[key]

    LIES[key] = weakref.ref(storage, gone), where
    count_as(OFFLOADED, [x])
    return x


def lies(x: Tensor) -> Lies | None:
    """Where ``x`` lies, if that is not the memory of its device."""
    if not LIES or _torch.is_wrapped(x) or x.layout != torch.strided:
        return None
    found = LIES.get(_torch.storage_key(x))
    return None if found is None else found[1]


def mark_like(x: Tensor, other: Tensor) -> None:
    """``x``, in place of ``other`` where nothing has values, lies as it does."""
    if (where := lies(other)) is not None:
        _marked(x, where)


def like_device(x: Tensor) -> Tensor:
    """A tensor on the device where ``x`` is computed with."""
    where = lies(x)
    if where is None or where.device == x.device:
        return x
    return x.new_empty(0, device=where.device)


def brought(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of ``x`` on the device where it is computed with."""
    dtype = x.dtype if dtype is None else dtype
    return like_device(x).new_empty(x.shape, dtype=dtype).copy_(x)


def empty_beside(
    x: Tensor, dtype: torch.dtype | None = None, scratch: bool = False
) -> Tensor:
    """Memory of the shape of ``x`` where ``x`` lies."""
    dtype, where = x.dtype if dtype is None else dtype, lies(x)
    if where is None:
        return torch.empty_like(x, dtype=dtype)
    make = where.store.scratch if scratch else where.store.empty
    return make(x.numel(), dtype, where.device).view(x.shape)


def zeros_beside(x: Tensor, count: int) -> Tensor:
    """``[count]`` zeros where ``x`` lies, in its dtype."""
    if (where := lies(x)) is None:
        return x.new_zeros(count)
    return where.store.empty(count, x.dtype, where.device).zero_()


def divided_beside(x: Tensor, by: Any) -> Tensor:
    """``x / by``, where ``x`` lies."""
    if lies(x) is None:
        return x / by
    by = by.to(x.device) if isinstance(by, Tensor) else by
    return torch.div(x, by, out=empty_beside(x, scratch=True))


def added_beside(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, where ``x`` lies."""
    if lies(x) is None:
        return x + y
    return torch.add(x, y.to(x.device), out=empty_beside(x, scratch=True))


def copied(x: Tensor) -> Tensor:
    """A copy of ``x`` where ``x`` lies."""
    return x.clone() if lies(x) is None else empty_beside(x).copy_(x)


def copied_to(where: Lies, x: Tensor) -> Tensor:
    """A copy of ``x`` that lies there."""
    there = where.store.empty(x.numel(), x.dtype, where.device)
    return there.view(x.shape).copy_(x.detach())


def beside(x: Tensor, values: Tensor) -> Tensor:
    """A copy of ``values`` where ``x`` lies, in memory that is used again."""
    if (where := lies(x)) is None:
        return values.clone()
    room = where.store.scratch(values.numel(), values.dtype, where.device)
    return room.view(values.shape).copy_(values)


def ahead(x: Tensor) -> None:
    """Says that ``x`` will be read soon: the system reads files meanwhile."""
    where = lies(x)
    if where is not None and where.store.folder and not _torch.fake_active():
        advise(x, mmap.MADV_WILLNEED)


@contextmanager
def moments_go_to(store: Store | None) -> Iterator[None]:
    """What an optimizer makes inside lies in ``store``."""
    with Scoped(_MOMENTS, store):
        yield


def moments_store() -> Store | None:
    """Where what an optimizer makes now is to lie, if not on the device."""
    return _MOMENTS.get()

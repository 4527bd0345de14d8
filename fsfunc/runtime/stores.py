"""Stores: the host's memory, and files of a folder that are mapped."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

from fsfunc.runtime.memory_spaces import Store, over_storage
from fsfunc.runtime.pages import advise


class HostMemory(Store):
    """The host's memory, pinned where the device is a GPU."""

    kind = "host"

    def allocate(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")


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

    def __init__(self, path: str | os.PathLike):
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

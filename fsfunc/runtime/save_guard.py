"""Memory that is read in the background, and must not be written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from threading import Lock

from torch import Tensor

from fsfunc import _torch

__all__ = ["hold", "is_held"]

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

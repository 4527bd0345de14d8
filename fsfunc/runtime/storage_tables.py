"""Facts about storages, which go when those are freed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from fsfunc import _torch

__all__ = ["StorageTable"]

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

"""What tests watch with: the bytes that live, and the calls of an op."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsfunc import tree
from fsfunc._torch import FakeTensor


class LiveBytes(TorchDispatchMode):
    """The bytes that storages made inside hold: ``live`` now, ``peak`` at most.

    ``known`` tensors were there before and do not count: a view of one is not new.
    Storages are told apart by identity, since fake ones all have the address 0; without
    ``fakes`` they do not count. With ``size`` only those of so many bytes do.
    """

    def __init__(self, *known: Any, fakes: bool = True, size: int | None = None):
        super().__init__()
        self.kinds, self.size = () if fakes else (FakeTensor,), size
        self.live = self.peak = 0
        self.seen: dict[int, int] = {}
        for x in tree.leaves(known):
            if isinstance(x, Tensor):
                self.seen[x.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and not isinstance(x, self.kinds):
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or self.size not in (None, size):
            return
        self.seen[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.live -= self.seen.pop(key)


class Watch(TorchDispatchMode):
    """What ``look(func)`` says of each operator that runs: ``seen``, in order."""

    def __init__(self, look: Callable[[Any], Any] = lambda func: func.overloadpacket):
        super().__init__()
        self.look, self.seen = look, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.look(func))
        return func(*args, **(kwargs or {}))


class Calls(Watch):
    """How often the ops whose names start with ``names`` ran."""

    def __init__(self, *names: str):
        super().__init__(lambda func: func.__name__.startswith(names))

    @property
    def count(self) -> int:
        return sum(self.seen)

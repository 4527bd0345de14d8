"""Donation: which memory of a state a step may write into, and memory that is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.sharded.leaf import Sharded
from fsfunc.sharded.spent import spend_all

_key = attrgetter("_cdata")
_FAKE = _torch.FakeTensor  # a plan's: nobody has a view of it

OVERWRITTEN = (
    "this is an old value, and the optimizer wrote the new one over it, since the step "
    "is donated: read it before the update, or keep a copy (x.clone()) made before it; "
    "a step that is not donated keeps both"
)


class Donation:
    """The memory that a donated step may write into: storages without other users.

    A view, a detached tensor or an autograd graph that the caller keeps is another use
    of a storage. A storage that has uses beside the known ones is not written: the new
    value gets memory of its own, as without donation.

    Args:
        tensors: the known tensors in the memory of the state.
        leaves: the arguments of the step; their tensors are known too.
        keys: the storage key of each of ``tensors``, where these are known.
        storages: handles of what the first of ``tensors`` lie in, one each; or none.
        why: the error of a leaf that was overwritten.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        leaves: Iterable[Any] = (),
        keys: Iterable[int] | None = None,
        storages: Sequence[torch.UntypedStorage] = (),
        *,
        why: str = OVERWRITTEN,
    ):
        self.why = why
        # Kept alive: of one that is freed meanwhile the count would still include it.
        self.known = list(tensors)
        found = map(_torch.storage_key, self.known) if keys is None else keys
        self.keys = list(found)
        self.storages = storages  # each has one handle, and gets no other
        self.lazy = list(leaves)  # counted when something is to be written

    def add(self, leaves: Iterable[Any]) -> None:
        """Adds leaves to what is known, with the tensors that they will make."""
        leaves = list(leaves)
        later = [x for x in leaves if type(x) is Sharded and x._part is None]
        self.lazy += later  # that have not made their tensor yet
        if len(later) == len(leaves):
            return
        parts = [x._part if isinstance(x, Sharded) else x for x in leaves]
        made = [x for x in parts if isinstance(x, Tensor)]
        self.known += made
        self.keys += map(_torch.storage_key, made)

    def look(self) -> None:
        """Adds the tensors that leaves have made by now."""
        if self.lazy:
            leaves, self.lazy = self.lazy, []
            self.add(leaves)

    def are_alone(self, tensors: Sequence[Tensor]) -> bool:
        """True if each of ``tensors`` is known, and alone in its memory.

        So nothing overlaps one of them. False also where that is not known.
        """
        if len(at := set(map(id, tensors))) < len(tensors):
            return False
        # By a tensor and its handle; by less where the tensor was moved.
        uses = set(map(_torch.storage_uses_by_key, map(_key, self.storages)))
        return uses == {2} and at.issubset(map(id, self.known[: len(self.storages)]))

    def may_write(self, tensors: Iterable[Tensor]) -> list[bool]:
        """For each tensor, whether its storage has known uses alone."""
        # By id, as what is known twice uses its storage once.
        uses = Counter(dict(zip(map(id, self.known), self.keys, strict=True)).values())
        asked = [(x, x.untyped_storage()) for x in tensors]  # each with a handle
        return [
            (key := storage._cdata) in uses
            and (
                _torch.storage_uses_by_key(key) <= uses[key] + 1 or isinstance(x, _FAKE)
            )
            for x, storage in asked
        ]

    def take(self, old: Iterable[Any], new: Iterable[Any]) -> None:
        """Marks overwritten leaves as spent, and adds those in their place."""
        spend_all(old, self.why)
        self.lazy += new


class Everything(Donation):
    """The donation of a step that is recorded on fake tensors: nothing is copied."""

    def __init__(self) -> None:
        super().__init__(())

    def may_write(self, tensors: Iterable[Tensor]) -> list[bool]:
        return [True for _ in tensors]


def overlaps(x: Tensor, others: list[tuple[int, int]]) -> bool:
    """True if ``x`` overlaps one of ``others``, to which it is added.

    Args:
        others: of the same storage, (first, last + 1) byte of each.
    """
    first, stop = _reach(x)
    meets = any(first < end and start < stop for start, end in others)
    others.append((first, stop))
    return meets


def _reach(x: Tensor) -> tuple[int, int]:
    """(first, last + 1) byte of its storage that ``x`` holds."""
    size, start = x.element_size(), int(x.storage_offset())
    steps = zip(x.shape, x.stride(), strict=True)
    last = start + sum((n - 1) * step for n, step in steps)
    stop = int(last + 1) if x.numel() else start
    return start * size, stop * size


_held: Counter[int] = Counter()


_lock = Lock()


def hold(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Keeps donated steps from writing ``tensors``, until what it returns is called.

    A donated step then makes a new state, as the pure step does. The caller keeps the
    tensors alive.
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
    """True if any of ``tensors`` lies in memory that `hold` protects."""
    return bool(_held) and any(_torch.storage_key(x) in _held for x in tensors)

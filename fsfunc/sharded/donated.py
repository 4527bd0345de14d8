"""Donation: which memory of a state a step may write into, and memory that is locked.

Under ``donate`` an optimizer writes the new state over the old one, as XLA does with
donated buffers. In Python others may still use the old memory: a view, a graph, an
autograd node. A :class:`Donation` counts the uses of each storage; one that has more
than those it knows is not written. `lock` keeps all donated steps off some memory, as
while a checkpoint is written from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from threading import Lock

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.sharded.leaf import Sharded
from fsfunc.sharded.spent import spend_all
from fsfunc.tree.types import Leaf

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
        leaves: Iterable[Leaf] = (),
        keys: Iterable[int] | None = None,
        storages: Sequence[torch.UntypedStorage] = (),
        *,
        why: str = OVERWRITTEN,
    ):
        self.why = why
        # Strong references: the count of a storage still includes a known tensor, so
        # that none may be freed meanwhile.
        self.known: list[Tensor] = list(tensors)
        keys = map(_torch.storage_key, self.known) if keys is None else keys
        self.keys: list[int] = list(keys)
        self.storages = storages  # each has one handle, and gets no other
        # Leaves whose tensors are looked up only when something is to be written: a
        # packed leaf may make its part until then.
        self.uncounted: list[Leaf] = list(leaves)

    def add(self, leaves: Iterable[Leaf]) -> None:
        """Adds leaves to what is known, with the tensors that they will make."""
        leaves = list(leaves)
        without_part = [x for x in leaves if type(x) is Sharded and x._part is None]
        self.uncounted += without_part
        # The usual case: no tensor has to be counted, nor its storage looked up.
        if len(without_part) == len(leaves):
            return
        parts = [x._part if isinstance(x, Sharded) else x for x in leaves]
        tensors = [x for x in parts if isinstance(x, Tensor)]
        self.known += tensors
        self.keys += map(_torch.storage_key, tensors)

    def add_made(self) -> None:
        """Adds the tensors that leaves have made by now."""
        # `add` puts those back that have made none yet.
        if self.uncounted:
            leaves, self.uncounted = self.uncounted, []
            self.add(leaves)

    def are_alone(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether each of ``tensors`` is known, and alone in its memory.

        So nothing overlaps one of them. False also where that is not known. It asks
        less of each tensor than `may_write` does.
        """
        if len(ids := set(map(id, tensors))) < len(tensors):
            return False
        # Two uses: the tensor, and the handle here. Other counts where it was moved.
        uses = set(map(_torch.storage_uses_by_key, map(_key, self.storages)))
        return uses == {2} and ids.issubset(map(id, self.known[: len(self.storages)]))

    def may_write(self, tensors: Iterable[Tensor]) -> list[bool]:
        """Returns for each tensor whether its storage has known uses alone."""
        # By id, as what is known twice uses its storage once.
        uses = Counter(dict(zip(map(id, self.known), self.keys, strict=True)).values())
        # Each with a handle, which is one use more of its storage.
        handles = [(x, x.untyped_storage()) for x in tensors]
        return [
            (key := storage._cdata) in uses
            and (
                _torch.storage_uses_by_key(key) <= uses[key] + 1 or isinstance(x, _FAKE)
            )
            for x, storage in handles
        ]

    def mark_written(self, old: Iterable[Leaf], new: Iterable[Leaf]) -> None:
        """Marks overwritten leaves as spent, and adds the new ones in their place."""
        spend_all(old, self.why)
        self.uncounted += new


class Everything(Donation):
    """The donation of a step that is recorded on fake tensors: nothing is copied."""

    def __init__(self) -> None:
        super().__init__(())

    def may_write(self, tensors: Iterable[Tensor]) -> list[bool]:
        return [True for _ in tensors]


def overlaps(x: Tensor, others: list[tuple[int, int]]) -> bool:
    """Returns whether ``x`` overlaps one of ``others``, and adds its range to them.

    Args:
        others: of the same storage, (first, last + 1) byte of each.
    """
    first, stop = _byte_range(x)
    does_overlap = any(first < end and start < stop for start, end in others)
    others.append((first, stop))
    return does_overlap


def _byte_range(x: Tensor) -> tuple[int, int]:
    """Returns (first, last + 1) byte of its storage that ``x`` holds."""
    size, start = x.element_size(), int(x.storage_offset())
    strides = zip(x.shape, x.stride(), strict=True)
    last = start + sum((n - 1) * stride for n, stride in strides)
    stop = int(last + 1) if x.numel() else start
    return start * size, stop * size


_locked: Counter[int] = Counter()  # by storage key, how many locks are on it


_mutex = Lock()  # simulated ranks, and a checkpoint's writer, are threads


def lock(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Keeps donated steps from writing ``tensors``, and returns what unlocks them.

    Until that is called a donated step makes a new state, as the pure step does. The
    caller keeps the tensors alive.
    """
    keys = {_torch.storage_key(x) for x in tensors}
    with _mutex:
        _locked.update(keys)

    def release() -> None:
        with _mutex:
            _locked.subtract(keys)
            # None stays with a count of 0: `are_locked` asks first if there are any.
            for key in keys:
                if not _locked[key]:
                    del _locked[key]
            keys.clear()  # a second call does nothing

    return release


def are_locked(tensors: Iterable[Tensor]) -> bool:
    """Returns whether any of ``tensors`` lies in memory that `lock` protects."""
    return bool(_locked) and any(_torch.storage_key(x) in _locked for x in tensors)

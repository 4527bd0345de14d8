"""Memory that a donated step writes into, and leaves that it has taken.

A leaf whose memory was given away is *spent*: whatever is done with it raises, and says
why. A `Sharded` leaf looks at its mark; a plain tensor, which has no place for one, is
made one of a class of its own, as torch does with its uninitialized parameters. That
costs nothing before, and a tenth of a microsecond then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fsfunc import _torch, tree
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.placements import describe
from fsfunc.tree import nodes

_OVERWRITTEN = (
    "this is an old value, and the optimizer wrote the new one over it, since the step "
    "is donated: read it before the update, or keep a copy (x.clone()) made before it; "
    "a step that is not donated keeps both"
)


class Donation:
    """The memory that a donated step may write into: what nobody else holds.

    A view, a detached tensor or a graph that somebody keeps is another tensor over the
    same storage. Where there is one, beside those that are known, the memory stays as
    it is and the new value gets its own, as without donation.

    Args:
        tensors: those over the memory of the state that was given.
        leaves: what the step was given; their tensors are known too.
        keys: of ``tensors``, each once, what tells their storages apart, if somebody
            has asked.
        twins: tensors over the same memory, one a storage, and these ``storages``.
        why: what a leaf says of itself, once it is written over.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        leaves: Iterable[Any] = (),
        keys: Iterable[int] | None = None,
        twins: Sequence[Tensor] = (),
        storages: Sequence[torch.UntypedStorage] = (),
        *,
        why: str = _OVERWRITTEN,
    ):
        self.why = why
        # Held to the end: one that went meanwhile would be taken for somebody's view.
        self.known = list({id(x): x for x in tensors}.values()) if tensors else []
        found = map(_torch.storage_key, self.known) if keys is None else keys
        self.uses = Counter(found)
        self.seen: dict[int, int] = {}  # by the id of a twin: its key
        self.storages = storages  # so that each has one handle, and no more is made
        if twins:
            its = [storage._cdata for storage in storages]
            self.seen = dict(zip(map(id, twins), its, strict=True))
            self.known += twins
            self.uses.update(its)
        self.lazy = list(leaves)  # which are looked at when somebody would write

    def add(self, leaves: Iterable[Any]) -> None:
        """Knows of leaves over the memory, and of the tensors that they will make."""
        found = []
        for leaf in leaves:
            if isinstance(leaf, Sharded):
                if leaf._part is None:
                    self.lazy.append(leaf)  # it has not made its tensor yet
                    continue
                leaf = leaf._part
            if isinstance(leaf, Tensor):
                found.append(leaf)
        self.known += found
        self.uses.update(map(_torch.storage_key, found))

    def look(self) -> None:
        """Learns of the tensors of leaves, as far as they are made."""
        if self.lazy:
            leaves, self.lazy = self.lazy, []
            self.add(leaves)

    def may_write(self, tensors: Iterable[Tensor]) -> list[bool]:
        """Of each, whether nobody would see what is written into it."""
        tensors = list(tensors)
        # What is seen is among ``known``, so that no other tensor has its id.
        keys = [k for x in tensors if (k := self.seen.get(id(x))) is not None]
        if len(keys) < len(tensors):
            return list(map(self._is_ours, tensors))
        return [_torch.uses_of(key) <= self.uses[key] + 1 for key in keys]

    def _is_ours(self, x: Tensor) -> bool:
        storage = x.untyped_storage()
        uses = self.uses.get(storage._cdata)
        if uses is None or isinstance(x, _torch.FakeTensor):  # a plan's: nobody's view
            return uses is not None
        return _torch.held(storage) <= uses + 1  # the handle that asks

    def take(self, old: Iterable[Any], new: Iterable[Any]) -> None:
        """Marks leaves that were written over; those in their place are known."""
        spend_all(old, self.why)
        self.lazy += new


class Everything(Donation):
    """For a step that is recorded on fake tensors: nothing is written, nor copied."""

    def __init__(self) -> None:
        super().__init__(())


class Spent:
    """A tensor whose memory was given away: mixed into the class that it was of."""

    why: str
    was: type

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for x in tree.leaves((args, kwargs)):
            if isinstance(x, Spent):
                x.refuse()
        raise RuntimeError(cls.why)

    def refuse(self) -> None:
        with _torch.plain_tensors():
            said = describe(self.shape, self.dtype)  # type: ignore[attr-defined]
        raise RuntimeError(f"{said}: {self.why}")

    def __repr__(self) -> str:
        return f"a spent {self.was.__name__}: {self.why}"


@lru_cache(maxsize=64)
def _spent(was: type, why: str) -> type:
    kind = type(f"Spent{was.__name__}", (Spent, was), {"was": was, "why": why})
    # torch.func wraps tensors out of our sight; but first it flattens what it is given.
    nodes.refuse(kind, lambda x: x.refuse())
    return kind


def spend(leaf: Any, why: str) -> None:
    """Marks a leaf as given away: using it raises ``why``."""
    if isinstance(leaf, Sharded):
        leaf.spent, leaf = why, leaf._part
    if isinstance(leaf, Tensor):
        was = leaf.was if isinstance(leaf, Spent) else type(leaf)
        leaf.__class__ = _spent(was, why)


def spend_all(leaves: Iterable[Any], why: str) -> None:
    """Marks each of ``leaves``, of which most are of one class."""
    kinds: dict[type, type] = {}
    for leaf in leaves:
        was = type(leaf)
        kind = kinds.get(was)
        if kind is not None:
            leaf.__class__ = kind
            continue
        spend(leaf, why)
        if was in (Tensor, Parameter):
            kinds[was] = type(leaf)


def any_spent(leaves: Sequence[Any]) -> bool:
    """True if one of ``leaves`` was donated."""
    kinds = set(map(type, leaves))
    if not any(issubclass(kind, Spent | Sharded) for kind in kinds):
        return False
    return any(map(why_spent, leaves))


def unspend(leaf: Any) -> None:
    """Takes the mark off again."""
    if isinstance(leaf, Sharded):
        leaf.spent, leaf = "", leaf._part
    if isinstance(leaf, Spent):
        leaf.__class__ = leaf.was


def why_spent(leaf: Any) -> str:
    """The reason why a leaf is spent; empty where it is not."""
    if isinstance(leaf, Sharded):
        return leaf.spent
    return leaf.why if isinstance(leaf, Spent) else ""


def refuse_spent(t: Any) -> None:
    """Raises where a leaf of ``t`` was donated.

    Raises:
        RuntimeError: names the first such leaf, and what became of it.
    """
    paths, leaves, _ = tree.flatten_with_paths(t, is_leaf=is_sharded)
    for path, x in zip(paths, leaves, strict=True):
        if why := why_spent(x):
            raise RuntimeError(f"{path!r}: {why}")


def overlaps(x: Tensor, others: list[tuple[int, int]]) -> bool:
    """True if ``x`` overlaps one of ``others``, to which it is added.

    Args:
        others: of the same storage, (first, last + 1) element of each.
    """
    first, stop = _reach(x)
    meets = any(first < end and start < stop for start, end in others)
    others.append((first, stop))
    return meets


def _reach(x: Tensor) -> tuple[int, int]:
    """(first, last + 1) element of its storage that ``x`` holds."""
    start = int(x.storage_offset())
    steps = zip(x.shape, x.stride(), strict=True)
    last = start + sum((n - 1) * step for n, step in steps)
    return (start, int(last + 1)) if x.numel() else (start, start)

"""One unit call's hold on a packed buffer: between a leaf and its gradient."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fsfunc.sharded.leaf import FlatShard, View

Micro = tuple[tuple[int, int], ...]


class GatheredCall:
    """The gathered buffer of one unit call, and how its gradient is reduced.

    Autograd nodes reference the runtime, and the runtime references these objects. To
    avoid a reference cycle (which would keep gradients alive until garbage collection)
    they reference no autograd graph: the FlatShard, which may have one, by weakref.

    Args:
        name, key, micro: of the unit call: its name, which call it was of each body
            around it, and its microbatches.
        shard: the buffer; ``views``: how the leaves that the call reads lie in it.
        dtype: in which it is gathered; ``reduce``: in which its gradient is reduced;
            ``given``: in which that is kept.
        keeps: whether the runtime keeps the gradient, past autograd.

    Attributes:
        full: the whole buffer in ``dtype``, until it is dropped.
        lasts: whether ``full`` belongs to the state: it is neither freed nor reused.
        shared: whether the call before it held the same one: neighbours share it.
        forgets: whether saved views of ``full`` were dropped: backward gathers again.
        grad: the gradient so far, of the calls after it that share the buffer.
    """

    __slots__ = (
        "name", "key", "micro", "views", "dtype", "reduce", "given", "keeps", "full",
        "lasts", "shared", "forgets", "grad", "_shard", "_version",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        key: tuple[int, ...],
        micro: Micro,
        shard: FlatShard,
        views: list[View],
        dtype: torch.dtype,
        reduce: torch.dtype | None = None,
        keeps: bool = False,
        given: torch.dtype | None = None,
    ):
        self.name, self.key, self.micro, self.views = name, key, micro, views
        self.dtype, self.reduce, self.keeps = dtype, reduce or dtype, keeps
        self.given = given
        self._shard, self._version = weakref.ref(shard), shard.version
        self.full: Tensor | None = None
        self.lasts = self.shared = self.forgets = False
        self.grad: Tensor | None = None

    @property
    def shard(self) -> FlatShard | None:
        """The buffer, while it is referenced elsewhere."""
        return self._shard()

    def shows(self, shard: FlatShard, dtype: torch.dtype) -> bool:
        """True if it holds what ``shard`` is now, in ``dtype``."""
        same = self.full is not None and self._shard() is shard
        return same and self.dtype == dtype and self._version == shard.version

    def take_over(self, other: GatheredCall) -> None:
        """Holds what ``other`` does, if that is what this one was given."""
        same = self._shard() is other._shard() and self.dtype == other.dtype
        if self.full is None and same and self._version == other._version:
            self.full, self.lasts = other.full, other.lasts

    def check(self, shard: FlatShard) -> None:
        """Raises where the weights were written over since they were gathered."""
        if self._version != shard.version:
            raise RuntimeError(
                f"{shard.members[0].name!r} and what lies beside it was written over "
                "since a unit used it, by a donated step or a load, and the backward "
                "of that unit would gather the new values: take the gradients before "
                "the update"
            )

    def parameters(self) -> list[Tensor]:
        """The leaves, as views of the whole buffer."""
        if (full := self.full) is None:
            raise RuntimeError(f"unit {self.name!r} reads what is not gathered")
        start, found = full.storage_offset(), []
        for shape, steps, offset in self.views:
            found.append(full.as_strided(shape, steps, start + offset))
        return found


# The calls of one unit call: one for each buffer that it reads, nearly always one.
Calls = list[GatheredCall]

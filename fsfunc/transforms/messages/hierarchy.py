"""Gathers and sums of two levels: across nodes few bytes, within a node the rest.

For axes ``node=2, data=2`` each rank (node, data) has one of four ranges of a buffer::

    gather      across: ranks (0, 0) and (1, 0) get 0 and 2; (0, 1) and (1, 1) 1 and 3
                within: each gets the other two of the rank beside it
    reduction   within first, then across

A level is a `RankGroup` along one axis. What arrives level by level lies in the order
of the levels; where that is not the order of the ranks, the last step permutes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.runtime.memory import count_as
from fsfunc.transforms.messages.wire import Gather, KeptGather, Reduction


class HierarchicalGather(Gather):
    """Parameters gathered across nodes first, then within each.

    Args:
        across: the mesh axis between nodes, one of those that ``shard`` cuts over.
        of: how each level travels, such as ``ff.QuantizedGather()``: it is encoded
            once, and decoded once.
        keep: whether a rank keeps, from forward to backward, what it has of a unit
            after the first level, so that the backward gathers within its node only.

    Cost, for P bytes over N nodes of D ranks: an all-gather across, (N-1) P / (N D)
    bytes, in flight while the unit before computes; then one within, (D-1) P / D, which
    is waited for. With ``keep`` each rank holds P / D bytes till the gradients are
    there, and a backward sends the second alone, also in flight; so do all microbatches
    of an ``accumulate`` within but the first. One copy of the whole, unless ``across``
    is the last axis::

        ff.shard(step, mesh, ("data", "node"), gather=ff.HierarchicalGather("node"))

    Raises:
        ValueError: ``shard`` does not cut over ``across``, or over nothing else.

    Source: Wang et al., ZeRO++, 2023, section 3.2 (hpZ: ``keep``).

    >>> HierarchicalGather("node", keep=True)
    HierarchicalGather(across='node', keeps=True, of=Gather())
    """

    across: str
    of: Gather

    def __init__(self, across: str, of: Gather | None = None, *, keep: bool = False):
        self.across, self.of = across, Gather() if of is None else of
        self.keeps = keep

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.of.exact

    def check(self, axes: tuple[str, ...]) -> None:
        _check(self, self.across, axes)

    def encode(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        return self.of.encode(part, dtype)

    def move(self, sent: Tensor, where: RankGroup, out: Tensor, what: str) -> Handle:
        levels = _levels_inwards(where, self.across)
        if len(levels) < 2:
            return self.of.move(sent, where, out, what)
        first = levels[0].start("all_gather", sent, name=what)
        if self.keeps:
            return _PartialLevels(first, where, levels, out, what)
        return _LevelGather(first, levels[1:], *_find_target(where, levels, out), what)

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int) -> Tensor:
        return self.of.decode(arrived, dtype, count)


class HierarchicalReduction(Reduction):
    """Gradients summed within each node first, then across nodes.

    Args:
        across: the mesh axis between nodes, one of those that ``shard`` cuts over.
        of: the message of each level, such as ``ff.QuantizedReduction()``: what is sent
            across is encoded again. `error_feedback` adds the error of the first level.

    Cost, for P bytes over N nodes of D ranks: a reduce-scatter within, (D-1) P / D
    bytes, which is waited for, then one across, (N-1) P / (N D), in flight beside the
    backward. At zero=0 the across one is an all-reduce of P / D, and an all-gather
    within follows, (D-1) P / D. One copy of the gradient, unless ``across`` is the last
    axis.

    Raises:
        ValueError: ``shard`` does not cut over ``across``, or over nothing else.

    Source: Wang et al., ZeRO++, 2023, section 3.3 (qgZ: of ``ff.QuantizedReduction``).

    >>> HierarchicalReduction("node").exact
    True
    """

    across: str
    of: Reduction

    def __init__(self, across: str, of: Reduction | None = None):
        self.across, self.of = across, Reduction() if of is None else of

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return self.of.exact

    def check(self, axes: tuple[str, ...], zero: int) -> None:
        _check(self, self.across, axes)
        self.of.check(axes, zero)
        if zero == 0 and not self.exact:
            raise ValueError(f"{self!r} at zero=0: use zero=1, 2 or 3")

    def encode(self, buffer: Tensor, ranks: int) -> Tensor:
        return self.of.encode(buffer, ranks)

    def sent(self, encoded: Tensor, count: int) -> Tensor:
        return self.of.sent(encoded, count)

    def move(self, sent: Tensor, where: RankGroup, whole: bool, what: str) -> Handle:
        levels = _levels_inwards(where, self.across)[::-1]
        if len(levels) < 2:
            return self.of.move(sent, where, whole, what)
        if whole:
            return _start_whole_sum(sent, levels, what)
        # The ranges of ranks in the order of the levels: the first one scatters between
        # blocks of ranges that lie together.
        rows = sent.view(*(level.size for level in where.levels), -1)
        rows = rows.permute(*_level_order(where, levels), rows.ndim - 1)
        x = rows.reshape(sent.shape)
        for i, level in enumerate(levels):
            # Each level waits for the one before; the last is left under way.
            if i:
                # The sums of the level before, encoded again for fewer ranks.
                x = self.of.decode(handle.wait(), torch.float32, None)  # noqa: F821
                x = self.of.encode(x, math.prod(n.size for n in levels[i:]))
            # An encoding for all-to-all has a row for each of all ranks: those of the
            # ranks that one of this level stands for go together.
            x = x if x.ndim == 1 else x.reshape(level.size, -1)
            handle = self.of.move(x, level, False, what)
        return handle

    def decode(self, arrived: Tensor, dtype: torch.dtype, count: int | None) -> Tensor:
        return self.of.decode(arrived, dtype, count)


class _LevelGather(Handle):
    """An all-gather after another: each level's, once the one before is there.

    Args:
        first: under way; ``remaining``: the levels after it.
        target: where the last one arrives, or None.
        finish: makes the result of what arrived there.
        name: the buffer, for the ledger.
    """

    def __init__(
        self,
        first: Handle,
        remaining: Sequence[RankGroup],
        target: Tensor | None,
        finish: Callable[[Tensor], Tensor],
        name: str,
    ):
        self.first: Handle | None = first
        self.remaining, self.target = remaining, target
        self.finish, self.name = finish, name

    def done(self) -> bool:
        return self.first is None

    def wait(self) -> Tensor:
        if self.first is not None:
            x, self.first = self.first.wait(), None
            for i, level in enumerate(self.remaining):
                # Only the last level brings as much as the target holds.
                out = self.target if i == len(self.remaining) - 1 else None
                x = level.start("all_gather", x, out=out, name=self.name).wait()
            self.gathered = self.finish(x)
            self.target = None
        return self.gathered


class _PartialLevels(KeptGather):
    """A gather that keeps what the first level brings, and no more.

    Attributes:
        of_nodes: what the first level brought: this rank's ranges of all nodes.
    """

    def __init__(
        self,
        first: Handle,
        where: RankGroup,
        levels: Sequence[RankGroup],
        out: Tensor,
        name: str,
    ):
        self.first: Handle | None = first
        self.where, self.levels, self.name = where, levels, name
        self.out: Tensor | None = out

    def done(self) -> bool:
        return self.out is None

    def wait(self) -> Tensor:
        if (out := self.out) is None:
            raise RuntimeError(f"the gather of {self.name} was waited for already")
        self.out = None
        return self.again(out).wait()

    def again(self, out: Tensor) -> Handle:
        # The first level is gathered once; each call after it starts from what it
        # brought, which counts as gathered memory of the unit.
        if self.first is not None:
            self.of_nodes = self.first.wait()
            self.first = None
            count_as("gathered", [self.of_nodes], self.name.partition("(")[0])
        level, *remaining = self.levels[1:]
        target, finish = _find_target(self.where, self.levels, out)
        # Only the last level arrives in the target.
        direct = None if remaining else target
        handle = level.start("all_gather", self.of_nodes, out=direct, name=self.name)
        return _LevelGather(handle, remaining, target, finish, self.name)


def _start_whole_sum(sent: Tensor, levels: Sequence[RankGroup], name: str) -> Handle:
    """Starts a sum of which each rank receives all, as at zero=0."""
    # A scatter cuts evenly: padded for that, and cut off at the end.
    *within, across = levels
    padding = -len(sent) % math.prod(level.size for level in within)
    x = torch.nn.functional.pad(sent, (0, padding))
    for level in within:
        x = level.start("psum_scatter", x, name=name).wait()
    first = across.start("psum", x, name=name)
    count = len(sent)
    return _LevelGather(first, within[::-1], None, lambda x: x[:count], name)


def _levels_inwards(where: RankGroup, across: str) -> list[RankGroup]:
    """Returns the levels of a gather, that of ``across`` first; none without it."""
    levels = [level for level in where.levels if level.size > 1]
    first = [level for level in levels if level.axis == (across,)]
    # The others from the last axis to the first: what is gathered last lies outermost.
    # So where ``across`` is the last axis, nothing has to be permuted (`_find_target`).
    return first and first + [x for x in reversed(levels) if x is not first[0]]


def _level_order(where: RankGroup, levels: Sequence[RankGroup]) -> list[int]:
    """Returns the positions of ``levels`` in ``where.levels``, then the others."""
    order = [where.levels.index(level) for level in levels]
    return order + [i for i in range(len(where.levels)) if i not in order]


def _find_target(
    where: RankGroup, levels: Sequence[RankGroup], out: Tensor
) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
    """Returns where a gather level by level arrives, and what makes ``out`` of it.

    Gathered last is outermost in memory. If that is the order of ``where``, it arrives
    in ``out``; else (None) it is permuted into it.
    """
    order = _level_order(where, levels[::-1])
    if order == sorted(order):
        return out, lambda x: x
    sizes = [where.levels[i].size for i in order]
    inverse = [order.index(i) for i in range(len(order))]

    def finish(x: Tensor) -> Tensor:
        x = x.view(*sizes, -1).permute(*inverse, len(order))
        return out.view(x.shape).copy_(x).flatten()

    return None, finish


def _check(
    message: HierarchicalGather | HierarchicalReduction,
    across: str,
    axes: tuple[str, ...],
) -> None:
    if across not in axes or len(axes) < 2:
        raise ValueError(
            f"{message!r} has levels across and within {across!r}, and shard cuts over "
            f"{axes}: give it both axes, such as shard(f, mesh, ('data', {across!r}))"
        )

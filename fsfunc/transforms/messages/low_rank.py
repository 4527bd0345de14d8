"""Gradients of matrices summed by their strongest directions: PowerSGD."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc.comm.attribution import label
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.optim.optimizer import (
    Optimizer,
    State,
    optimizer_factory,
)
from fsfunc.sharded.leaf import FlatShard, Sharded
from fsfunc.transforms.messages.residuals import Feedback, WithFeedback
from fsfunc.transforms.messages.wire import Reduction


class PowerSGDState(NamedTuple):
    """Residuals and factors of each buffer, and the state of the optimizer within.

    ``residuals``: by buffer, float32 [ranks, elements of its matrices], of which each
    rank has its row: the error to send later. ``factors``: float32 [ranks, sum of n r],
    equal rows: the right factors Q, orthonormal, from which the next step starts.
    """

    residuals: dict[str, Sharded]
    factors: dict[str, Sharded]
    inner: State


@optimizer_factory
def powersgd(optimizer: Optimizer, rank: int, min_rate: float = 2.0) -> Optimizer:
    """``optimizer``, whose steps sum gradients of matrices in ``rank`` directions.

    For each matrix, with G this rank's gradient [m, n], and Q [n, r]::

        M = G + residual
        P = orthonormal(sum of M Q)        over the ranks
        Q = sum of M' P                    over the ranks
        gradient = P Q'                    in place of the sum of G
        residual = M - P Q' / ranks

    P Q' is the ranks' sum of M, projected on the directions P: a step of the power
    method, from the Q of the step before. What is left is sent later.

    Args:
        rank: r, the number of directions; min(m, n) at most.
        min_rate: a matrix goes as it is where (m + n) r numbers are not less than m n
            by this factor; so do vectors, numbers and padding.

    A leaf of more dims is a matrix of its first one, [d0, d1 d2 ...]; one that is split
    over an axis outside ``shard``'s, a matrix of this rank's block.

    Returns:
        the optimizer; its state is a `PowerSGDState`. It makes its train step itself,
        ``powersgd(...)(grad_fn)``; ``shard`` keeps its own ``reduction``. Put
        `loss_scale` around it, not within.

    Raises:
        ValueError: ``rank`` below 1; a lossy ``reduction=`` besides.
        RuntimeError: a state that was not made of placed parameters; gradients that
            were not taken by its train step.

    Cost: of a unit with matrices [m, n], and e elements beside them, two all-reduces,
    of 4 (sum of m r + e) and 4 (sum of n r) bytes, at any ``zero``, in place of a
    reduce-scatter of all. Under ``replicate`` the parts are then summed as they are.
    The second begins when the first is over, and is waited for at once. float32 memory
    of the matrices' whole gradients on each rank, and 6 m n r FLOPs.

    Source: Vogels, Karimireddy, Jaggi, PowerSGD, 2019, algorithms 1 and 2; residuals as
    in torch's ``powerSGD_hook``.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda w, x: x[0] @ w @ x[1])
    >>> optimizer = powersgd(ff.sgd(1.0), rank=1)
    >>> def main():
    ...     step = optimizer(ff.value_and_grad(lambda w, x: unit(w, x)))
    ...     step, x = ff.shard(step, mesh, "data"), torch.ones(2, 8)
    ...     state = ff.init_state(step, torch.zeros(8, 8), optimizer, x)
    ...     with ff.ledger() as log:
    ...         state, _ = step(state, x)
    ...     return ff.unshard(state.params)[0].sum().round(), log.bytes(op="psum")
    >>> ff.spmd(main, mesh)()[0]  # 4 (8 + 8) bytes, and 8 of the loss
    (tensor(-8.), 72)
    """
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank={rank!r}: it is a whole number of 1 or more")

    def begin(shard: FlatShard) -> tuple[Tensor, Tensor]:
        cut = _Cut.of(shard, rank, min_rate)
        device, starts = shard.flat.device, []
        for m in cut.matrices:  # by their names: whatever lies beside them
            draw = torch.Generator().manual_seed(zlib.crc32(m.name.encode()))
            size = m.columns, m.rank
            starts.append(torch.randn(size, generator=draw, device="cpu").to(device))
        owed = torch.zeros(cut.size, dtype=torch.float32, device=device)
        return owed, _joined(_orthonormal(starts), owed)

    feed = partial(_LowRank, rank=rank, min_rate=min_rate)
    return WithFeedback(optimizer, PowerSGDState, begin, feed).functions()


class _Matrix(NamedTuple):
    start: int  # in the buffer
    rows: int
    columns: int
    rank: int
    name: str


class _Cut(NamedTuple):
    """A buffer's matrices that are sent in few directions, and the ranges beside."""

    matrices: list[_Matrix]
    beside: list[tuple[int, int]]

    @classmethod
    def of(cls, shard: FlatShard, rank: int, min_rate: float) -> _Cut:
        matrices, beside, at = [], [], 0
        for member in shard.members:  # in the order of their offsets
            shape, _, start = member.view
            rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            r = min(rank, rows, columns)
            if len(shape) > 1 and (rows + columns) * r * min_rate < rows * columns:
                if start > at:
                    beside.append((at, start))
                matrices.append(_Matrix(start, rows, columns, r, member.name))
                at = start + rows * columns
        if (end := shard.place.size * shard.place.chunk) > at:
            beside.append((at, end))
        return cls(matrices, beside)

    @property
    def size(self) -> int:
        """Elements of the matrices."""
        return sum(m.rows * m.columns for m in self.matrices)

    @property
    def width(self) -> int:
        """Elements of their right factors."""
        return sum(m.columns * m.rank for m in self.matrices)

    def rights(self, flat: Tensor) -> list[Tensor]:
        """The right factors Q, [n, r] each."""
        return _views(flat, [(m.columns, m.rank) for m in self.matrices])

    def lefts(self, flat: Tensor) -> list[Tensor]:
        """The left factors P, [m, r] each."""
        return _views(flat, [(m.rows, m.rank) for m in self.matrices])

    def within(self, flat: Tensor) -> list[Tensor]:
        """The matrices, of a tensor that has them one after another."""
        return _views(flat, [(m.rows, m.columns) for m in self.matrices])

    def of_buffer(self, buffer: Tensor) -> list[Tensor]:
        """The matrices, of the buffer."""
        found = []
        for start, rows, columns, *_ in self.matrices:
            found.append(buffer[start : start + rows * columns].view(rows, columns))
        return found


class _LowRank(Feedback):
    called = "powersgd"

    def __init__(self, kept, rank: int, min_rate: float):
        super().__init__(kept)
        self.rank, self.min_rate = rank, min_rate
        self.under_way: dict[str, _Sum] = {}

    def check(self, how: Reduction) -> None:
        if not how.exact:
            raise ValueError(
                f"powersgd sums gradients its own way, and {how!r} would not be used: "
                "leave reduction= out, or keep it with ff.error_feedback"
            )

    def send(
        self,
        how: Reduction,
        buffer: Tensor,
        shard: FlatShard,
        where: RankGroup,
        whole: bool,
    ) -> Handle:
        cut = _Cut.of(shard, self.rank, self.min_rate)
        if not cut.matrices:
            return how.send(buffer, shard, where, whole)
        if (before := self.under_way.pop(shard.buffer, None)) is not None:
            before.wait()  # of another call, which leaves what this one starts from
        found = self.remembered(shard)
        owed = buffer.new_zeros(cut.size, dtype=torch.float32)
        if found is None:
            q = torch.ones(cut.width, dtype=torch.float32, device=buffer.device)
        else:
            owed, q = owed.add_(found[0], alpha=self.scale), found[1]
        matrices = cut.within(owed)
        torch._foreach_add_(matrices, [m.float() for m in cut.of_buffer(buffer)])
        parts = [m @ f for m, f in zip(matrices, cut.rights(q), strict=True)]
        beside = [buffer[a:b].float() for a, b in cut.beside]
        sent = torch.cat([x.flatten() for x in (*parts, *beside)])
        first = where.start("psum", sent, name=shard.name)
        work = _Sum(
            cut=cut,
            buffer=shard.buffer,
            name=shard.name,
            count=shard.place.size * shard.place.chunk,
            where=where,
            whole=whole,
            first=first,
            owed=owed,
            start=q,
            scale=self.scale,
            new=self.new,
        )
        self.under_way[shard.buffer] = work
        return work


@dataclass(eq=False)
class _Sum(Handle):
    """The sum of one buffer's gradients under way: P first, then Q.

    Args:
        cut: the buffer's matrices; ``count``: its elements.
        buffer, name: those of the shard, for messages.
        where: the ranks that sum; ``whole``: whether each receives all of the sum.
        first: the sum of P, under way.
        owed: the gradient with the error of the last reduction.
        start: the Q of before.
        scale: by what gradients are larger than those of the loss.
        new: where it leaves what is remembered of the buffer. (Not who keeps this: that
            would be a circle.)
    """

    cut: _Cut
    buffer: str
    name: str
    count: int
    where: RankGroup
    whole: bool
    first: Handle
    owed: Tensor
    start: Tensor
    scale: float
    new: dict[str, tuple[Tensor, ...]]
    result: Tensor | None = None

    def done(self) -> bool:
        return self.result is not None

    def wait(self) -> Tensor:
        if self.result is None:
            with label(self.buffer.partition(":")[0], "backward"):
                self.result = self._finished()
        return self.result

    def _finished(self) -> Tensor:
        cut, ranks, matrices = self.cut, self.where.size, self.cut.within(self.owed)
        arrived = self.first.wait()
        beside = arrived[sum(m.rows * m.rank for m in cut.matrices) :]
        lefts = _orthonormal(cut.lefts(arrived))
        parts = [m.mT @ p for m, p in zip(matrices, lefts, strict=True)]
        q = torch.cat([x.flatten() for x in parts])
        q = self.where.start("psum", q, name=self.name).wait()
        total = self.owed.new_empty(self.count)
        approximate, rights = cut.of_buffer(total), cut.rights(q)
        for y, p, f in zip(approximate, lefts, rights, strict=True):
            y.copy_(p @ f.mT)
        for a, b in cut.beside:
            total[a:b] = beside[: b - a]
            beside = beside[b - a :]
        torch._foreach_add_(matrices, approximate, alpha=-1 / ranks)
        # Of what overflowed nothing is owed, and nothing is learned.
        finite = q.isfinite().all()
        owed = torch.where(finite, self.owed, 0.0).div_(self.scale)
        sound = torch.where(finite, q, self.start)
        q = _joined(_orthonormal(cut.rights(sound)), q)
        self.new[self.buffer] = owed, q
        if self.whole:
            return total
        return total.view(ranks, -1)[self.where.index].clone()


def _views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    found, at = [], 0
    for rows, columns in shapes:
        found.append(flat[at : at + rows * columns].view(rows, columns))
        at += rows * columns
    return found


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([x.flatten() for x in parts]) if parts else like


def _orthonormal(tall: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal columns that span those of each [n, r], the alike ones as one.

    By Householder's reflections: columns of zeros, or that depend on others, come out
    as some that are orthonormal to the rest.
    """
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, x in enumerate(tall):
        alike[tuple(x.shape)].append(i)
    found = list(tall)
    for places in alike.values():
        columns = torch.linalg.qr(torch.stack([tall[i] for i in places])).Q
        for i, x in zip(places, columns.unbind(), strict=True):
            found[i] = x
    return found

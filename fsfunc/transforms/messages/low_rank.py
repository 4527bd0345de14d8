"""Gradients of matrices summed by their strongest directions: PowerSGD.

For each matrix M [m, n] two thin factors are summed over the ranks in its place::

    sum of M  ~  P Q'      P [m, r], Q [n, r], r directions

It is the feedback of an optimizer (`residuals.WithFeedback`): ``shard`` asks `_LowRank`
to send the gradients of a buffer, whose sum is a `_LowRankSum` under way.
"""

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
from fsfunc.optim.optimizer import Optimizer, State, optimizer_factory
from fsfunc.sharded.leaf import FlatShard, Sharded
from fsfunc.transforms.messages.residuals import Feedback, Rows, WithFeedback
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
    """Makes steps of ``optimizer`` sum gradients of matrices in ``rank`` directions.

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
        parts = _BufferParts.of(shard, rank, min_rate)
        device, starts = shard.flat.device, []
        # Drawn by the matrices' names: equal on all ranks, and on any mesh.
        for m in parts.matrices:
            draw = torch.Generator().manual_seed(zlib.crc32(m.name.encode()))
            size = m.columns, m.rank
            starts.append(torch.randn(size, generator=draw, device="cpu").to(device))
        residual = torch.zeros(parts.size, dtype=torch.float32, device=device)
        return residual, _flatten_all(_orthonormalize(starts), residual)

    make_feedback = partial(_LowRank, rank=rank, min_rate=min_rate)
    return WithFeedback(optimizer, PowerSGDState, begin, make_feedback).functions()


class _Matrix(NamedTuple):
    """A matrix of a buffer: ``offset`` there, ``rank``: its number of directions."""

    offset: int
    rows: int
    columns: int
    rank: int
    name: str


class _BufferParts(NamedTuple):
    """A buffer's matrices that are sent in few directions, and its other ranges.

    Args:
        matrices: in the order of their offsets.
        others: (start, stop) of what is sent as it is.
    """

    matrices: list[_Matrix]
    others: list[tuple[int, int]]

    @classmethod
    def of(cls, shard: FlatShard, rank: int, min_rate: float) -> _BufferParts:
        """Returns the parts of a buffer."""
        matrices, others, end = [], [], 0
        for member in shard.members:  # in the order of their offsets
            shape, _, offset = member.view
            rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            r = min(rank, rows, columns)
            if len(shape) > 1 and (rows + columns) * r * min_rate < rows * columns:
                if offset > end:
                    others.append((end, offset))
                matrices.append(_Matrix(offset, rows, columns, r, member.name))
                end = offset + rows * columns
        if (length := shard.place.size * shard.place.chunk) > end:
            others.append((end, length))
        return cls(matrices, others)

    @property
    def size(self) -> int:
        """The number of elements of the matrices."""
        return sum(m.rows * m.columns for m in self.matrices)

    @property
    def rights_size(self) -> int:
        """The number of elements of their right factors."""
        return sum(m.columns * m.rank for m in self.matrices)

    def rights(self, flat: Tensor) -> list[Tensor]:
        """Returns the right factors Q, [n, r] each."""
        return _split(flat, [(m.columns, m.rank) for m in self.matrices])

    def lefts(self, flat: Tensor) -> list[Tensor]:
        """Returns the left factors P, [m, r] each."""
        return _split(flat, [(m.rows, m.rank) for m in self.matrices])

    def split_matrices(self, flat: Tensor) -> list[Tensor]:
        """Returns the matrices, of a tensor that has them one after another."""
        return _split(flat, [(m.rows, m.columns) for m in self.matrices])

    def of_buffer(self, buffer: Tensor) -> list[Tensor]:
        """Returns the matrices, as views of the buffer."""
        views = []
        for offset, rows, columns, *_ in self.matrices:
            views.append(buffer[offset : offset + rows * columns].view(rows, columns))
        return views


class _LowRank(Feedback):
    """The feedback of ``powersgd``: rows are the residuals, and the right factors."""

    called = "powersgd"

    def __init__(self, rows: Rows, rank: int, min_rate: float):
        super().__init__(rows)
        self.rank, self.min_rate = rank, min_rate
        self.in_flight: dict[str, _LowRankSum] = {}

    def check(self, reduction: Reduction) -> None:
        if not reduction.exact:
            raise ValueError(
                f"powersgd sums gradients its own way, and {reduction!r} would not be "
                "used: leave reduction= out, or keep it with ff.error_feedback"
            )

    def send(
        self,
        reduction: Reduction,
        buffer: Tensor,
        shard: FlatShard,
        where: RankGroup,
        whole: bool,
    ) -> Handle:
        parts = _BufferParts.of(shard, self.rank, self.min_rate)
        if not parts.matrices:
            return reduction.send(buffer, shard, where, whole)
        # A buffer of a unit that is called twice is reduced twice. The sum before is
        # finished first: it leaves the rows that this one starts from.
        if (earlier := self.in_flight.pop(shard.buffer, None)) is not None:
            earlier.wait()
        rows = self.find_rows(shard)
        residual = buffer.new_zeros(parts.size, dtype=torch.float32)
        if rows is None:  # the step is only tried: shapes are all that counts
            q = torch.ones(parts.rights_size, dtype=torch.float32, device=buffer.device)
        else:
            residual, q = residual.add_(rows[0], alpha=self.scale), rows[1]
        matrices = parts.split_matrices(residual)
        torch._foreach_add_(matrices, [m.float() for m in parts.of_buffer(buffer)])
        lefts = [m @ f for m, f in zip(matrices, parts.rights(q), strict=True)]
        others = [buffer[a:b].float() for a, b in parts.others]
        sent = torch.cat([x.flatten() for x in (*lefts, *others)])
        handle = _LowRankSum(
            parts=parts,
            buffer=shard.buffer,
            name=shard.name,
            count=shard.place.size * shard.place.chunk,
            where=where,
            whole=whole,
            left_sum=where.start("psum", sent, name=shard.name),
            gradient=residual,
            previous_q=q,
            scale=self.scale,
            new_rows=self.new_rows,
        )
        self.in_flight[shard.buffer] = handle
        return handle


@dataclass(eq=False)
class _LowRankSum(Handle):
    """The sum of one buffer's gradients under way: P first, then Q.

    Args:
        parts: the buffer's matrices and other ranges; ``count``: its elements.
        buffer, name: those of the shard, for messages.
        where: the ranks that sum; ``whole``: whether each receives all of the sum.
        left_sum: the sum of P, and of other ranges, under way.
        gradient: M: the gradient of the matrices with the residual of the last
            reduction.
        previous_q: the Q of before.
        scale: the loss scale, by which gradients are larger than those of the loss.
        new_rows: that of the feedback, where it leaves what is remembered of the
            buffer. (Not the feedback, which has a reference to this.)
    """

    parts: _BufferParts
    buffer: str
    name: str
    count: int
    where: RankGroup
    whole: bool
    left_sum: Handle
    gradient: Tensor
    previous_q: Tensor
    scale: float
    new_rows: dict[str, tuple[Tensor, ...]]
    sum: Tensor | None = None

    def done(self) -> bool:
        return self.sum is not None

    def wait(self) -> Tensor:
        if self.sum is None:
            # The second collective starts in the wait, and counts in the ledger as one
            # of the unit's backward, whoever waits.
            with label(self.buffer.partition(":")[0], "backward"):
                self.sum = self._finish()
        return self.sum

    def _finish(self) -> Tensor:
        """Sums Q, and returns P Q'; remembers what that leaves out."""
        parts, ranks = self.parts, self.where.size
        matrices = parts.split_matrices(self.gradient)
        arrived = self.left_sum.wait()
        others = arrived[sum(m.rows * m.rank for m in parts.matrices) :]
        lefts = _orthonormalize(parts.lefts(arrived))
        products = [m.mT @ p for m, p in zip(matrices, lefts, strict=True)]
        q = torch.cat([x.flatten() for x in products])
        q = self.where.start("psum", q, name=self.name).wait()
        total = self.gradient.new_empty(self.count)
        approximate, rights = parts.of_buffer(total), parts.rights(q)
        # Into views of the whole buffer, in which each matrix and range has its place.
        for y, p, f in zip(approximate, lefts, rights, strict=True):
            y.copy_(p @ f.mT)
        for a, b in parts.others:
            total[a:b] = others[: b - a]
            others = others[b - a :]
        # The residual of this rank: its matrices without its share of the sum.
        torch._foreach_add_(matrices, approximate, alpha=-1 / ranks)
        # Of a step that overflowed nothing is remembered: the next starts from before.
        finite = q.isfinite().all()
        residual = torch.where(finite, self.gradient, 0.0).div_(self.scale)
        finite_q = torch.where(finite, q, self.previous_q)
        q = _flatten_all(_orthonormalize(parts.rights(finite_q)), q)
        self.new_rows[self.buffer] = residual, q
        if self.whole:
            return total
        # Copied, so that the whole is freed.
        return total.view(ranks, -1)[self.where.index].clone()


def _split(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns views of these shapes, one after another."""
    views, offset = [], 0
    for rows, columns in shapes:
        views.append(flat[offset : offset + rows * columns].view(rows, columns))
        offset += rows * columns
    return views


def _flatten_all(tensors: Sequence[Tensor], empty: Tensor) -> Tensor:
    """Returns tensors one after another in one; ``empty`` if there are none."""
    return torch.cat([x.flatten() for x in tensors]) if tensors else empty


def _orthonormalize(tall: Sequence[Tensor]) -> list[Tensor]:
    """Returns orthonormal columns that span those of each [n, r].

    By Householder's reflections: columns of zeros, or that depend on others, come out
    as some that are orthonormal to the rest.
    """
    # Those of one shape in one call, as a batch: equal layers have equal matrices.
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, x in enumerate(tall):
        by_shape[tuple(x.shape)].append(i)
    orthonormal = list(tall)
    for positions in by_shape.values():
        columns = torch.linalg.qr(torch.stack([tall[i] for i in positions])).Q
        for i, x in zip(positions, columns.unbind(), strict=True):
            orthonormal[i] = x
    return orthonormal

"""Collectives between processes: torch's own, or on the CPU pair by pair.

torch's own are what is right on NCCL. Pair by pair they are exchanges straight from and
into the caller's buffers: the same bytes as a ring, without gloo's staging copies. Sums
run in rank order, so their bits are those of the simulated ranks.

Between hosts more of these bytes go: of a gather of P bytes over N hosts of D ranks
D (N-1)/N P leave each host, a ring's (ND-1)/(ND) P, and (N-1)/N P in two levels, as
``HierarchicalGather`` has them (``benchmarks/hosts.py`` counts what the kernel sent).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc._torch.versions import reduce_scatter_single
from fsfunc.comm.backends.channels import Channel, Loan, Work
from fsfunc.comm.backends.exchange import (
    DATA,
    Exchange,
    Headers,
    settle,
    tag,
)
from fsfunc.comm.backends.link import Handle, digest
from fsfunc.comm.operations import OPERATIONS, SUM, Fold, Operation
from fsfunc.comm.watch.watchdog import FlightRecord
from fsfunc.runtime.memory import BufferPool

_KNOWN = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip


def issue(
    op: str,
    x: Tensor,
    group: Any,
    out: Tensor | None,
    process_group: Any,
    **kwargs: Any,
) -> tuple[list[Any], Callable[[], Tensor]]:
    """The works of ``op`` on ``x``, and what then gives its result.

    Other dtypes than NCCL's travel as bytes, or are reduced as what holds them: complex
    numbers as two real ones, short integers as longer ones.
    """
    dtype, operation = x.dtype, OPERATIONS[op]
    shape = operation.result_shape(x.shape, group.size, group.index, **kwargs)
    # Of unequal parts one rank's may be empty alone, unless all rows are.
    if not x.numel() and not (kwargs.get("sizes") and math.prod(x.shape[1:])):
        y = x.new_empty(shape) if out is None else out
        return [], lambda: y
    if dtype in _KNOWN:
        works, y = _issue(operation, x, group, out, process_group, **kwargs)
        return works, lambda: y
    if dtype.is_complex and operation.fold not in (None, SUM):
        raise TypeError(
            f"{op} over {group.name} of {dtype}: torch's own take real numbers, "
            "and only of a sum are both parts those of the parts"
        )
    if operation.fold is None:  # of as many rows
        x = x.view(*x.shape[:1], math.prod(x.shape[1:])).view(torch.uint8)
    else:
        x = torch.view_as_real(x) if dtype.is_complex else x.to(torch.int32)
    works, found = _issue(operation, x, group, None, process_group, **kwargs)

    def finish() -> Tensor:
        if operation.fold is None:
            y = found.view(dtype).view(shape)
        else:
            y = torch.view_as_complex(found) if dtype.is_complex else found.to(dtype)
        return y if out is None else out.copy_(y)

    return works, finish


def _issue(
    operation: Operation,
    x: Tensor,
    group: Any,
    out: Tensor | None,
    process_group: Any,
    **kwargs,
) -> tuple[list[Any], Tensor]:
    """The works of a collective of ``x``, and where its result will be."""
    if (fold := operation.fold) is not None and operation.all_reduces:
        y = x.clone() if out is None else out.copy_(x)
        kind = getattr(dist.ReduceOp, fold.name)
        return [dist.all_reduce(y, kind, group=process_group, async_op=True)], y
    n, i = group.size, group.index
    shape = operation.result_shape(x.shape, n, i, **kwargs)
    y = x.new_empty(shape) if out is None else out
    if operation.fold is not None:
        kind = getattr(dist.ReduceOp, operation.fold.name)
        return [
            reduce_scatter_single(y, x, op=kind, group=process_group, async_op=True)
        ], y
    if operation.native is not None:
        return [operation.native(y, x, group, process_group, **kwargs)], y
    route = operation.route(x, y, n, i, **kwargs)
    calls = [
        dist.P2POp(start, t, group.ranks[r], process_group)
        for start, by_index in ((dist.isend, route.sent), (dist.irecv, route.received))
        for r, t in by_index.items()
        if r != i and t.numel()
    ]
    # One batch: single sends and receives would wait for each other on NCCL.
    return (dist.batch_isend_irecv(calls) if calls else []), y


class Pairs:
    """One collective, as exchanges between each two of its ranks.

    Args:
        record: its record, which gives the tag.
        compared: whether the ranks have compared their programs, and need no header.
        spent: whether nobody writes what is sent again, not even after the wait.
    """

    def __init__(
        self,
        record: FlightRecord,
        group: Any,
        channel: Channel,
        pool: BufferPool,
        compared: bool,
        spent: bool,
    ):
        self.group = group
        self.n, self.me, self.ranks = group.size, group.index, group.ranks
        self.record, self.channel, self.pool = record, channel, pool
        self.digest, self.spent = digest(record.said), spent
        self.others = [r for r in range(self.n) if r != self.me]
        self.headers: Headers | None = None
        if not compared:
            self.headers = Headers(record, group, self.digest, self.others, channel)

    def _exchange(
        self, works: Sequence[Work], finish: Callable[[], Tensor], held: Any
    ) -> Exchange:
        return Exchange(works, finish, held, self.record, self.group, self.headers)

    def _each(self, *parts: Tensor) -> dict[int, Tensor]:
        """By index, the others' parts (or the same one for each)."""
        return {r: parts[r % len(parts)] for r in self.others}

    def _tag(self, hop: int = 0) -> int:
        return tag(DATA, self.record.number, self.digest, hop)

    def _send(
        self, sent: Mapping[int, Tensor], hop: int = 0, answered: bool = False
    ) -> list[Work]:
        """Sends tensors by index along the axis; empty ones stay at home.

        Before receives are posted: by gloo the later one of two ranks writes its data
        within the send, under a lock that gloo's thread spins for, should the other's
        data come meanwhile.
        """
        me = self.me
        found = {self.ranks[r]: x for r, x in sent.items() if x.numel() and r != me}
        spent = self.spent and not hop
        return self.channel.send_all(found, self._tag(hop), spent, answered)

    def _swap(
        self,
        sent: Mapping[int, Tensor],
        got: Mapping[int, Tensor],
        hop: int = 0,
        answered: bool = False,
    ) -> list[Work]:
        """Sends and receives by index along the axis; empty tensors stay at home."""
        works, under = self._send(sent, hop, answered), self._tag(hop)
        got = {r: y for r, y in got.items() if y.numel() and r != self.me}
        receive, ranks = self.channel.receive, self.ranks
        return [receive(y, ranks[r], under) for r, y in got.items()] + works

    def _room(self, x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """A buffer like ``x``, by default of its shape."""
        shape = x.shape if shape is None else shape
        return self.pool.get(math.prod(shape), x.dtype, x).view(shape)

    def _borrow(
        self, sent: Mapping[int, Tensor], like: Tensor
    ) -> tuple[list[Work], dict[int, Loan]]:
        """Sends parts by index, and has those of the others come, shaped ``like``."""
        works, got, under = self._send(sent), {}, self._tag()
        for r in self.others if like.numel() else ():
            got[r] = self.channel.borrow(like, self.ranks[r], under, self.pool)
        return [loan.work for loan in got.values()] + works, got

    def _reduce(
        self, by: Fold, mine: Tensor, got: Mapping[int, Loan], out: Tensor | None
    ) -> Tensor:
        """The reduction of the ranks' parts in rank order, as on simulated ranks.

        It is made in the first part that was received by gloo: that memory is warm.
        """
        if not got:
            return self._room(mine) if out is None else out
        me, first = self.me, got[1 if self.me == 0 else 0]
        parts = [mine if r == me else got[r].read() for r in range(self.n)]
        total = first.room if out is None else out
        total = by.of(parts, self._room(mine) if total is None else total)
        for loan in got.values():
            loan.end()
        return total

    def start(self, op: str, x: Tensor, out: Tensor | None, **kwargs: Any) -> Handle:
        """Begins a collective of a rank's ``x``; of "end", nothing but its headers."""
        if op == "end":
            return self._exchange([], lambda: x, x)
        operation = OPERATIONS[op]
        if operation.fold is None:
            return self.move(operation, x, out, **kwargs)
        if operation.out_rows is not None:
            return self.reduce_scatter(operation.fold, x, out)
        return self.all_reduce(operation.fold, x, out, **kwargs)

    def move(
        self, operation: Operation, x: Tensor, out: Tensor | None, **kwargs: Any
    ) -> Handle:
        """What is sent along the route of a collective that reduces nothing."""
        shape = operation.result_shape(x.shape, self.n, self.me, **kwargs)
        y = self._room(x, shape) if out is None else out
        route = operation.route(x, y, self.n, self.me, **kwargs)
        works = self._swap(route.sent, route.received, answered=operation.one_way)
        return self._exchange(works, lambda: y, x)

    def reduce_scatter(self, by: Fold, x: Tensor, out: Tensor | None) -> Handle:
        parts = x.tensor_split(self.n)
        mine = parts[self.me]
        works, got = self._borrow(self._each(*parts), mine)
        return self._exchange(works, lambda: self._reduce(by, mine, got, out), x)

    def all_reduce(
        self, by: Fold, x: Tensor, out: Tensor | None, hops: int = 1
    ) -> Handle:
        """In one hop: for two ranks, the bytes of a ring."""
        if hops == 2:
            return self._reduce_in_two(by, x, out)
        works, got = self._borrow(self._each(x), x)
        return self._exchange(works, lambda: self._reduce(by, x, got, out), x)

    def _reduce_in_two(self, by: Fold, x: Tensor, out: Tensor | None) -> Handle:
        """A scatter, and in its wait a gather: all ranks must come to that wait."""
        n, me = self.n, self.me
        total = self._room(x) if out is None else out
        cuts, sums = x.view(-1).tensor_split(n), total.view(-1).tensor_split(n)
        works, got = self._borrow(self._each(*cuts), cuts[me])

        def finish() -> Tensor:
            self._reduce(by, cuts[me], got, sums[me])
            works = self._swap(self._each(sums[me]), self._each(*sums), hop=1)
            settle(works, self.record)
            return total

        return self._exchange(works, finish, x)

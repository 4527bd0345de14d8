"""Collectives between processes: torch's own, or on the CPU pair by pair.

NCCL uses torch's own; `issue` starts one. Pair by pair (`Pairs`) a
collective is messages between each two of its ranks, straight from and into the
caller's buffers: the same bytes as a ring, without gloo's staging copies. Sums run in
rank order, so their bits are those of the simulated ranks. ``ProcessLink`` chooses.

Between hosts they send more. A gather of P bytes over N hosts of D ranks sends from
each host D (N-1)/N P here, (ND-1)/(ND) P by a ring, and (N-1)/N P in two levels, as by
``HierarchicalGather`` (``benchmarks/hosts.py`` counts what the kernel sent).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

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
from fsfunc.comm.backends.link import GroupOfRanks, Handle, digest
from fsfunc.comm.operations import OPERATIONS, SUM, Fold, Operation
from fsfunc.comm.watch.watchdog import FlightRecord
from fsfunc.runtime.memory import BufferPool

_Received = TypeVar("_Received")
# The dtypes that NCCL takes as they are.
_NATIVE_DTYPES = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip


def issue(
    op: str,
    x: Tensor,
    group: GroupOfRanks,
    out: Tensor | None,
    process_group: dist.ProcessGroup | None,
    **kwargs: Any,
) -> tuple[list[dist.Work], Callable[[], Tensor]]:
    """Starts torch's own collective ``op`` on ``x``.

    Returns:
        its works, and a function that returns the result when these are over.
    """
    dtype, operation = x.dtype, OPERATIONS[op]
    shape = operation.result_shape(x.shape, group.size, group.index, **kwargs)
    # Nothing is sent if all inputs are empty. Of unequal parts this rank's may be the
    # only empty one, unless the rows themselves are empty.
    if not x.numel() and not (kwargs.get("sizes") and math.prod(x.shape[1:])):
        y = x.new_empty(shape) if out is None else out
        return [], lambda: y
    if dtype in _NATIVE_DTYPES:
        works, y = _issue(operation, x, group, out, process_group, **kwargs)
        return works, lambda: y
    if dtype.is_complex and operation.fold not in (None, SUM):
        raise TypeError(
            f"{op} over {group.name} of {dtype}: torch's own take real numbers, "
            "and only of a sum are both parts those of the parts"
        )
    # Other dtypes move as bytes (of as many rows: routes cut rows), or are reduced as
    # another dtype: complex numbers as two real ones, short integers as longer ones.
    if operation.fold is None:
        x = x.view(*x.shape[:1], math.prod(x.shape[1:])).view(torch.uint8)
    else:
        x = torch.view_as_real(x) if dtype.is_complex else x.to(torch.int32)
    works, raw = _issue(operation, x, group, None, process_group, **kwargs)

    def finish() -> Tensor:
        if operation.fold is None:
            y = raw.view(dtype).view(shape)
        else:
            y = torch.view_as_complex(raw) if dtype.is_complex else raw.to(dtype)
        return y if out is None else out.copy_(y)

    return works, finish


def _issue(
    operation: Operation,
    x: Tensor,
    group: GroupOfRanks,
    out: Tensor | None,
    process_group: dist.ProcessGroup | None,
    **kwargs: Any,
) -> tuple[list[dist.Work], Tensor]:
    """Starts a collective; returns its works, and the tensor that its result fills."""
    work: Any  # a Work, as the calls are asynchronous: torch's types have None too
    if (fold := operation.fold) is not None and operation.all_reduces:
        y = x.clone() if out is None else out.copy_(x)  # torch reduces in place
        reduce_op = getattr(dist.ReduceOp, fold.name)
        work = dist.all_reduce(y, reduce_op, group=process_group, async_op=True)
        return [work], y
    n, i = group.size, group.index
    shape = operation.result_shape(x.shape, n, i, **kwargs)
    y = x.new_empty(shape) if out is None else out
    if operation.fold is not None:
        reduce_op = getattr(dist.ReduceOp, operation.fold.name)
        work = reduce_scatter_single(
            y, x, op=reduce_op, group=process_group, async_op=True
        )
        return [work], y
    if operation.native is not None:
        work = operation.native(y, x, group, process_group, **kwargs)
        return [work], y
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
    """One collective, as messages between each two of its ranks.

    Methods take and return parts by index along the axis, without this rank's.

    Args:
        record: its record, which gives the tag.
        channel: the messages of its group.
        pool: buffers for results.
        compared: whether the ranks have compared their programs, and need no header.
        read_only: whether nobody writes what is sent again, not even after the wait.
    """

    def __init__(
        self,
        record: FlightRecord,
        group: GroupOfRanks,
        channel: Channel,
        pool: BufferPool,
        compared: bool,
        read_only: bool,
    ):
        self.group = group
        self.n, self.me, self.ranks = group.size, group.index, group.ranks
        self.record, self.channel, self.pool = record, channel, pool
        self.digest, self.read_only = digest(record.signature), read_only
        self.others = [r for r in range(self.n) if r != self.me]
        self.headers: Headers | None = None
        if not compared:
            self.headers = Headers(record, group, self.digest, self.others, channel)

    def _exchange(
        self, works: Sequence[Work], finish: Callable[[], Tensor], alive: Tensor
    ) -> Exchange:
        return Exchange(works, finish, alive, self.record, self.group, self.headers)

    def _for_others(self, *parts: Tensor) -> dict[int, Tensor]:
        """Returns, by index, the others' parts (or the one part for each)."""
        return {r: parts[r % len(parts)] for r in self.others}

    def _tag(self, hop: int = 0) -> int:
        return tag(DATA, self.record.number, self.digest, hop)

    def _send(
        self, sent: Mapping[int, Tensor], hop: int = 0, answered: bool = False
    ) -> list[Work]:
        """Sends tensors by index along the axis; empty ones are not sent.

        Args:
            hop: 1 for the second half of a collective, whose tag is another one.
            answered: see `Channel.send`.
        """
        me = self.me
        by_rank = {self.ranks[r]: x for r, x in sent.items() if x.numel() and r != me}
        read_only = self.read_only and not hop
        return self.channel.send_all(by_rank, self._tag(hop), read_only, answered)

    def _exchange_with(
        self,
        send: Callable[[], list[Work]],
        sources: Collection[int],
        receive: Callable[[int], _Received],
    ) -> tuple[list[Work], dict[int, _Received]]:
        """Sends, and receives from indices: by gloo first, on this host last.

        Gloo sends data once a notice says that they are to be received. Behind this
        rank's own data, on their connection, the notice would come late, and until then
        the other direction of a slow link would be idle. On this host a receive may
        copy what has come already, for which the others need not wait.
        """
        by_gloo = [r for r in sources if self.ranks[r] not in self.channel.by_rank]
        received = {r: receive(r) for r in by_gloo}
        works = send()
        received |= {r: receive(r) for r in sources if r not in received}
        return works, received

    def _swap(
        self,
        sent: Mapping[int, Tensor],
        got: Mapping[int, Tensor],
        hop: int = 0,
        answered: bool = False,
    ) -> list[Work]:
        """Sends and receives by index along the axis; empty tensors are not sent."""
        channel, message_tag = self.channel, self._tag(hop)
        works, received = self._exchange_with(
            lambda: self._send(sent, hop, answered),
            [r for r, y in got.items() if y.numel() and r != self.me],
            lambda r: channel.receive(got[r], self.ranks[r], message_tag),
        )
        return [*received.values(), *works]

    def _buffer(self, x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Returns a buffer like ``x``, by default of its shape."""
        shape = x.shape if shape is None else shape
        return self.pool.get(math.prod(shape), x.dtype, x).view(shape)

    def _borrow(
        self, sent: Mapping[int, Tensor], like: Tensor
    ) -> tuple[list[Work], dict[int, Loan]]:
        """Sends parts by index, and borrows those of the others, shaped ``like``."""
        channel, message_tag = self.channel, self._tag()
        works, loans = self._exchange_with(
            lambda: self._send(sent),
            # Empty parts are not sent, so none is to be waited for.
            self.others if like.numel() else (),
            lambda r: channel.borrow(like, self.ranks[r], message_tag, self.pool),
        )
        return [loan.work for loan in loans.values()] + works, loans

    def _reduce(
        self,
        fold: Fold,
        local_part: Tensor,
        loans: Mapping[int, Loan],
        out: Tensor | None,
    ) -> Tensor:
        """Reduces the ranks' parts in rank order, as on simulated ranks."""
        if not loans:  # the parts are empty
            return self._buffer(local_part) if out is None else out
        me, first = self.me, loans[1 if self.me == 0 else 0]
        parts = [local_part if r == me else loans[r].read() for r in range(self.n)]
        # Into the first part that was received by gloo: that memory is warm.
        total = first.buffer if out is None else out
        total = fold.reduce(parts, self._buffer(local_part) if total is None else total)
        for loan in loans.values():
            loan.end()
        return total

    def start(self, op: str, x: Tensor, out: Tensor | None, **kwargs: Any) -> Handle:
        """Starts a collective of a rank's ``x``; of "end" only its headers."""
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
        """Sends along the route of a collective that reduces nothing."""
        shape = operation.result_shape(x.shape, self.n, self.me, **kwargs)
        y = self._buffer(x, shape) if out is None else out
        route = operation.route(x, y, self.n, self.me, **kwargs)
        works = self._swap(route.sent, route.received, answered=operation.one_way)
        return self._exchange(works, lambda: y, x)

    def reduce_scatter(self, fold: Fold, x: Tensor, out: Tensor | None) -> Handle:
        parts = x.tensor_split(self.n)
        local_part = parts[self.me]
        works, loans = self._borrow(self._for_others(*parts), local_part)
        finish = lambda: self._reduce(fold, local_part, loans, out)  # noqa: E731
        return self._exchange(works, finish, x)

    def all_reduce(
        self, fold: Fold, x: Tensor, out: Tensor | None, hops: int = 1
    ) -> Handle:
        """Reduces on all ranks, in one hop: each sends all of ``x`` to each.

        For two ranks these are the bytes of a ring; for more, a ring's go in two hops.
        """
        if hops == 2:
            return self._reduce_in_two(fold, x, out)
        works, loans = self._borrow(self._for_others(x), x)
        finish = lambda: self._reduce(fold, x, loans, out)  # noqa: E731
        return self._exchange(works, finish, x)

    def _reduce_in_two(self, fold: Fold, x: Tensor, out: Tensor | None) -> Handle:
        """Scatters, and in the wait gathers: so all ranks must come to that wait."""
        n, me = self.n, self.me
        total = self._buffer(x) if out is None else out
        parts, sums = x.view(-1).tensor_split(n), total.view(-1).tensor_split(n)
        works, loans = self._borrow(self._for_others(*parts), parts[me])

        def finish() -> Tensor:
            self._reduce(fold, parts[me], loans, sums[me])
            works = self._swap(
                self._for_others(sums[me]), self._for_others(*sums), hop=1
            )
            settle(works, self.record)
            return total

        return self._exchange(works, finish, x)

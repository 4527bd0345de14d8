"""The messages of a group: through shared memory on one host, by gloo between hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsfunc.comm.backends.neighbours import (
    Borrowed,
    Disconnected,
    Neighbours,
    Received,
    Sent,
)
from fsfunc.comm.backends.process_groups import is_torn
from fsfunc.runtime.memory import BufferPool

Work = tuple[int | None, Any]  # the other rank, if it is one, and what to wait for


def by_gloo(
    issue: Callable[..., Any], x: Tensor, rank: int, process_group: Any, under: int
) -> Any:
    """``dist.isend`` or ``dist.irecv``, whose error names the rank.

    Raises:
        Disconnected: the connection to it is closed.
    """
    try:
        return issue(x, rank, process_group, under)
    except RuntimeError as error:
        if is_torn(error):
            raise Disconnected(rank, str(error)) from error
        raise


class Channel:
    """The messages between this rank and the others of a group.

    Args:
        group: the group of torch's.
        ranks: the ranks in it.
        near: the processes of this host, if they are connected.
    """

    def __init__(
        self, process_group: Any, ranks: Sequence[int], near: Neighbours | None
    ):
        self.process_group, self.ranks, self.near = process_group, ranks, near
        self.by_rank = {} if near is None else near.by_rank
        self.number = hash(tuple(ranks))  # of integers: the same one in every process

    def send(
        self,
        x: Tensor,
        rank: int,
        under: int,
        spent: bool = False,
        answered: bool = False,
    ) -> Work:
        """Puts ``x`` on its way to a rank, ``under`` a tag.

        Args:
            spent: nobody writes ``x`` again, not even when the work is over.
            answered: the work is over when the other has called ``receive``; without
                that it may be earlier, and ``x`` may be written then.
        """
        if (other := self.by_rank.get(rank)) is None:
            return rank, by_gloo(dist.isend, x, rank, self.process_group, under)
        with other.host.lock:
            number = other.send((self.number, under), x, spent, answered)
            return rank, Sent(other, self.ranks, number)

    def send_all(
        self, xs: Mapping[int, Tensor], under: int, spent: bool, answered: bool
    ) -> list[Work]:
        """Sends tensors by rank; one for several of this host is copied once."""
        copies: dict[int, Tensor] = {}
        works = []
        for rank, x in xs.items():
            whole = len(xs) > 1 and not spent and rank in self.by_rank
            if whole and self.near is not None:
                if id(x) not in copies:
                    copies[id(x)] = self.near.copy(x)
                x = copies[id(x)]
            works.append(self.send(x, rank, under, spent or whole, answered))
        return works

    def receive(self, into: Tensor, rank: int, under: int) -> Work:
        """Has what a rank sends ``under`` a tag written into ``into``."""
        if (other := self.by_rank.get(rank)) is None:
            return rank, by_gloo(dist.irecv, into, rank, self.process_group, under)
        work = Received(other, self.ranks, into)
        with other.host.lock:
            other.expect((self.number, under), work)
        return rank, work

    def borrow(self, like: Tensor, rank: int, under: int, pool: BufferPool) -> Loan:
        """Receives a tensor of the shape and dtype of ``like``, to read it once."""
        if (other := self.by_rank.get(rank)) is None:
            room = pool.get(like.numel(), like.dtype, like).view(like.shape)
            work = by_gloo(dist.irecv, room, rank, self.process_group, under)
            return Loan(rank, work, room)
        work = Borrowed(other, self.ranks, like)
        with other.host.lock:
            other.expect((self.number, under), work)
        return Loan(rank, work)


class Loan:
    """A tensor that is received to be read once.

    Args:
        room: memory of this process that it is received in, if it is.
    """

    def __init__(self, rank: int, work: Any, room: Tensor | None = None):
        self.work: Work = rank, work
        self.room = room

    def read(self) -> Tensor:
        """The tensor, once the work is over; it is not to be written."""
        return self.work[1].data if self.room is None else self.room

    def end(self) -> None:
        """It has been read."""
        if self.room is None:
            self.work[1].give_back()

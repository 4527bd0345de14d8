"""The messages of a group: through shared memory on one host, by gloo between hosts.

Collectives (``process_collectives``) and transfers (``point_to_point``) send and
receive here, by rank and tag, and do not know which way a message takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from fsfunc.comm.backends.neighbours import (
    Borrowed,
    Delivery,
    Disconnected,
    Neighbours,
    Received,
    Sent,
)
from fsfunc.comm.backends.process_groups import is_torn
from fsfunc.runtime.memory import BufferPool

# The other rank, if it is one, and what to wait for.
Work = tuple[int | None, Delivery | dist.Work]


def by_gloo(
    issue: Callable[..., dist.Work | None],
    x: Tensor,
    rank: int,
    process_group: dist.ProcessGroup | None,
    tag: int,
) -> dist.Work:
    """Calls ``dist.isend`` or ``dist.irecv``; an error of the connection has the rank.

    gloo's own text names no rank, and the report of the error is to name one.

    Raises:
        Disconnected: the connection to it is closed.
    """
    try:
        return issue(x, rank, process_group, tag)  # type: ignore[return-value]
    except RuntimeError as error:
        if is_torn(error):
            raise Disconnected(rank, str(error)) from error
        raise


class Channel:
    """The messages between this rank and the others of a group.

    Args:
        process_group: torch's.
        ranks: the ranks in it.
        neighbours: the processes of this host, if they are connected.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        neighbours: Neighbours | None,
    ):
        self.process_group, self.ranks, self.neighbours = (
            process_group,
            ranks,
            neighbours,
        )
        self.by_rank = {} if neighbours is None else neighbours.by_rank
        # Python hashes integers alike in every process: it tells groups apart.
        self.number = hash(tuple(ranks))

    def send(
        self,
        x: Tensor,
        rank: int,
        tag: int,
        read_only: bool = False,
        answered: bool = False,
    ) -> Work:
        """Puts ``x`` on its way to a rank under a tag.

        Args:
            read_only: nobody writes ``x`` again, not even when the work is over.
            answered: the work is over when the other has called ``receive``; without
                that it may be earlier, and ``x`` may be written then.
        """
        if (other := self.by_rank.get(rank)) is None:
            return rank, by_gloo(dist.isend, x, rank, self.process_group, tag)
        # Both under the lock: `Sent` notes how many bytes are queued up to its record's
        # end, and another thread that waits sends and reads on the same socket.
        with other.host.lock:
            number = other.send((self.number, tag), x, read_only, answered)
            return rank, Sent(other, self.ranks, number)

    def send_all(
        self, by_rank: Mapping[int, Tensor], tag: int, read_only: bool, answered: bool
    ) -> list[Work]:
        """Sends tensors by rank; one for several of this host is copied once."""
        copies: dict[int, Tensor] = {}  # by the id of a tensor
        works = []
        for rank, x in by_rank.items():
            # `send` copies what may be written again; here one copy serves all, which
            # nobody writes. Of a single message, `send` decides.
            copied = len(by_rank) > 1 and not read_only and rank in self.by_rank
            if copied and self.neighbours is not None:
                if id(x) not in copies:
                    copies[id(x)] = self.neighbours.copy(x)
                x = copies[id(x)]
            works.append(self.send(x, rank, tag, read_only or copied, answered))
        return works

    def receive(self, into: Tensor, rank: int, tag: int) -> Work:
        """Has what a rank sends under a tag written into ``into``."""
        if (other := self.by_rank.get(rank)) is None:
            return rank, by_gloo(dist.irecv, into, rank, self.process_group, tag)
        work = Received(other, self.ranks, into)
        with other.host.lock:
            other.expect((self.number, tag), work)
        return rank, work

    def borrow(self, like: Tensor, rank: int, tag: int, pool: BufferPool) -> Loan:
        """Receives a tensor of the shape and dtype of ``like``, to read it once.

        From a process of this host it is read in that one's memory, without a copy.
        """
        if (other := self.by_rank.get(rank)) is None:
            buffer = pool.get(like.numel(), like.dtype, like).view(like.shape)
            work = by_gloo(dist.irecv, buffer, rank, self.process_group, tag)
            return Loan(rank, work, buffer)
        work = Borrowed(other, self.ranks, like)
        with other.host.lock:
            other.expect((self.number, tag), work)
        return Loan(rank, work)


class Loan:
    """A tensor that is received to be read once.

    Args:
        work: what to wait for; a `Borrowed` if there is no buffer.
        buffer: memory of this process that it is received in, if it is.
    """

    def __init__(
        self, rank: int, work: Borrowed | dist.Work, buffer: Tensor | None = None
    ):
        self.work: Work = rank, work
        self.buffer = buffer

    def read(self) -> Tensor:
        """Returns the tensor, once the work is over; it is not to be written."""
        return self.work[1].data if self.buffer is None else self.buffer  # type: ignore[union-attr]

    def end(self) -> None:
        """Gives the memory back to its process: the tensor has been read."""
        if self.buffer is None:
            self.work[1].give_back()  # type: ignore[union-attr]

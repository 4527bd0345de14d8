"""Messages of other processes of this host, as works to wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Message = tuple[int, Any, int]  # number, offset (or the data themselves), bytes


class Disconnected(RuntimeError):
    """A message to or from another process does not get there; ``rank`` is which."""

    def __init__(self, rank: int, why: str):
        super().__init__(why)
        self.rank = rank


class Delivery:
    """A message that is sent or received; ``wait`` as that of torch.distributed.

    Args:
        other: the `Neighbour` that it goes to, or comes from.
        ranks: those of its group.
    """

    def __init__(self, other: Any, ranks: Sequence[int]):
        self.other, self.ranks = other, ranks

    def over(self) -> bool:
        raise NotImplementedError

    def is_completed(self) -> bool:
        """True if ``wait`` returns, or raises, at once."""
        self.other.host.progress()
        return self.over() or not self.other.open

    def wait(self) -> None:
        """Waits until it is over.

        Raises:
            Disconnected: the other process ends, or does not come in time; then the
                connections to all ``ranks`` of the group are closed.
        """
        if not self.over():
            self.other.host.until(self)


class Sent(Delivery):
    """A message that is sent.

    Args:
        number: that of an answered one, which is over when the other has its data.
    """

    def __init__(self, other: Any, ranks: Sequence[int], number: int):
        super().__init__(other, ranks)
        self.number, self.end = number, other.queued

    def over(self) -> bool:
        return self.number not in self.other.lent and self.other.pushed >= self.end


class Received(Delivery):
    """A message that is copied to ``into`` when it comes."""

    message: Message | None = None

    def __init__(self, other: Any, ranks: Sequence[int], into: Tensor):
        super().__init__(other, ranks)
        self.into = into

    def take(self, message: Message) -> None:
        number, at, size = message
        if fits := size == self.into.nbytes:  # else `wait` raises
            source = self.other.memory.start + at if number else at
            ctypes.memmove(self.into.data_ptr(), source, size)
        self.message = message  # now, as the thread that waits may be another one
        if fits:
            self.other.read_out(message)

    def over(self) -> bool:
        return self.message is not None

    def wait(self) -> None:
        super().wait()
        if self.message and (size := self.message[2]) != self.into.nbytes:
            rank = self.other.rank
            why = f"rank {rank} sent {size} bytes, not {self.into.nbytes}"
            raise Disconnected(rank, why)


class Borrowed(Received):
    """A message that is read in the sender's memory, until ``give_back``.

    ``into`` has its shape and dtype, and is not written.
    """

    def take(self, message: Message) -> None:
        self.message = message

    @property
    def data(self) -> Tensor:
        assert self.message is not None, "its wait is not over"
        number, at, _ = self.message
        shape, dtype = self.into.shape, self.into.dtype
        if number:
            return self.other.memory.view(at, shape, dtype)
        return torch.frombuffer(bytearray(at), dtype=dtype).view(shape)

    def give_back(self) -> None:
        assert self.message is not None, "its wait is not over"
        with self.other.host.lock:
            self.other.read_out(self.message, last=2)

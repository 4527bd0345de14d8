"""Point-to-point transfers between processes, beside the collectives of their group.

Gloo matches by tag: a transfer's is its number among those of its pair and direction,
above all tags of collectives. It says that a send is over to nobody but who waits for
it, so the receiver answers each one with a byte that the sender can look at.

NCCL has no tags and matches what two ranks issue by its order, so that each direction
needs a group of its own; and it can be asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc.backends.base import Done, Work
from fsfunc.backends.groups import Groups

__all__ = ["Transfers"]

_TAGS = 2**20  # more than can be in flight at once
_FIRST = 2**21  # the tags of collectives are below
_ANSWERS = _FIRST + _TAGS


class _Sent(Work):
    """A send under way; it holds what it sends for no longer than it must."""

    def __init__(self, work: Any, x: Tensor, received: Callable[[], bool]):
        self.received = received
        self.way: tuple[Any, Tensor] | None = (work, x)

    def wait(self) -> Tensor:
        if self.way is not None:
            self.way[0].wait()
            self.way = None
        return torch.empty(0)

    def done(self) -> bool:
        if self.way is not None and self.received():
            self.wait()
        return self.way is None


class _Received(Work):
    """A receive under way, into memory of its own; ``answer`` follows it."""

    def __init__(self, work: Any, into: Tensor, answer: Callable[[], None]):
        self.work, self.into, self.answer = work, into, answer

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
            self.answer()
        return self.into

    def done(self) -> bool:
        return self.work is None or self.work.is_completed()


class _Answer:
    """The byte that says that a send has been received."""

    def __init__(self, source: int, group: Any, tag: int):
        self.byte = torch.zeros(1, dtype=torch.uint8)
        self.work: Any = dist.irecv(self.byte, source, group, tag)

    def __call__(self) -> bool:
        if self.work is not None and self.byte.item():
            self.work.wait()
            self.work = None
        return self.work is None


class Transfers:
    """The transfers of one process; the n-th send of a pair meets the n-th receive.

    Args:
        groups: those of the collectives.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.down = Groups()  # for sends to lower indices
        self.numbers: Counter[tuple[Any, ...]] = Counter()
        self.open: list[_Sent] = []  # not answered yet
        self.said: dict[tuple[Any, ...], Any] = {}  # the last answer to each
        self.yes = torch.ones(1, dtype=torch.uint8)

    def connect(self, every: Sequence[tuple[int, ...]]) -> None:
        """Makes what transfers need beside ``groups``; all processes call this alike.

        On NCCL, to send from low to high indices and back by one group would be one
        order for both: two ranks that send to each other would never meet.
        """
        for ranks in every if dist.get_backend() == "nccl" else ():
            if len(ranks) > 1:
                self.down.make(ranks)

    def _way(self, where: Any, source: int, to: int) -> tuple[Any, int]:
        """The c10d group, and the number, of the next transfer between two indices."""
        group = self.groups.get(where.ranks)
        if to < source:
            group = self.down.get(where.ranks) or group
        key = (where.ranks, source, to)
        number = self.numbers[key] % _TAGS
        self.numbers[key] += 1
        return group, number

    def send(self, x: Tensor, where: Any, to: int) -> Work:
        """Sends ``x`` to index ``to`` of ``where``; empty tensors stay at home."""
        if not x.numel():
            return Done(x)
        group, number = self._way(where, where.index, to)
        target = where.ranks[to]
        if dist.get_backend(group) != "gloo":
            work: Any = dist.isend(x, target, group)
            return _Sent(work, x, work.is_completed)
        self.open = [sent for sent in self.open if not _answered(sent)]
        answer = _Answer(target, group, _ANSWERS + number)
        sent = _Sent(dist.isend(x, target, group, _FIRST + number), x, answer)
        self.open.append(sent)
        return sent

    def receive(self, into: Tensor, where: Any, source: int) -> Work:
        """Receives into ``into`` from index ``source`` of ``where``."""
        if not into.numel():
            return Done(into)
        group, number = self._way(where, source, where.index)
        origin = where.ranks[source]
        if dist.get_backend(group) != "gloo":
            return _Received(dist.irecv(into, origin, group), into, lambda: None)

        def answer() -> None:
            # The sender asked for it before it sent, so this does not wait for long.
            if (last := self.said.get((where.ranks, origin))) is not None:
                last.wait()
            tag = _ANSWERS + number
            self.said[where.ranks, origin] = dist.isend(self.yes, origin, group, tag)

        work = dist.irecv(into, origin, group, _FIRST + number)
        return _Received(work, into, answer)


def _answered(sent: _Sent) -> bool:
    return sent.received() and sent.done()

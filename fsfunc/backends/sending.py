"""Point-to-point transfers between processes, beside the collectives of their group.

Gloo matches by tag: a transfer's holds its number among those of its pair and
direction, its shape and its dtype. Gloo says that a send is over to nobody but who
waits for it, so the receiver answers each one with a byte that the sender can look at.

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

from fsfunc.accounting import current_label
from fsfunc.backends.base import Work
from fsfunc.backends.calls import Call, digest, signature
from fsfunc.backends.groups import Groups
from fsfunc.backends.headers import Headers, settle
from fsfunc.backends.tags import ANSWER, TRANSFER, tag

__all__ = ["Transfers"]


class _About:
    """What one transfer is, for the other rank and for who has to be told."""

    def __init__(self, op: str, x: Tensor, where: Any, what: str):
        self.where, self.label = where, current_label()
        self.said = signature(op, {}, where.axis, x, what)
        self.digest = digest(("transfer", *self.said[1:]))
        self.headers: Headers | None = None

    def compare(self, other: int, group: Any, number: int) -> None:
        """Puts this rank's header on its way to the index ``other``."""
        ways = (1, 2) if self.said[0] == "send" else (2, 1)
        self.headers = Headers(
            Call.now(self.said), self.digest, self.where, [other], group, number, ways
        )

    def settle(self, work: Any, x: Tensor) -> None:
        """Waits for the transfer, and before it for the other rank's header."""
        if self.headers is not None:
            self.headers.check(held=(work, x))
        if work is not None:
            settle([work], lambda: Call(self.said, *self.label), self.where)


class _Sent(Work):
    """A send under way; it holds what it sends for no longer than it must."""

    def __init__(
        self, work: Any, x: Tensor, received: Callable[[], bool], about: _About
    ):
        self.received = received
        self.way: tuple[Any, Tensor, _About] | None = (work, x, about)

    def wait(self) -> Tensor:
        if self.way is not None:
            work, x, about = self.way
            about.settle(work, x)
            self.way = None
        return torch.empty(0)

    def done(self) -> bool:
        if self.way is not None and self.received():
            self.wait()
        return self.way is None


class _Received(Work):
    """A receive under way, into memory of its own; ``answer`` follows it."""

    def __init__(
        self, work: Any, into: Tensor, answer: Callable[[], None] | None, about: _About
    ):
        self.work, self.into, self.answer = work, into, answer
        self.about: _About | None = about

    def wait(self) -> Tensor:
        if self.about is not None:
            self.about.settle(self.work, self.into)
            self.work = self.about = None
            if self.answer is not None:
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
        checks: whether every transfer is compared, also within a compared program.
    """

    def __init__(self, groups: Groups, checks: bool) -> None:
        self.groups, self.checks = groups, checks
        self.down = Groups(groups.timeout)  # for sends to lower indices
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
        self.numbers[key] += 1
        return group, self.numbers[key]

    def _about(
        self,
        op: str,
        x: Tensor,
        where: Any,
        other: int,
        what: str,
        group: Any,
        number: int,
    ) -> _About:
        about = _About(op, x, where, what)
        if dist.get_backend(group) == "gloo" and (self.checks or not where.compared):
            about.compare(other, group, number)
        return about

    def send(self, x: Tensor, where: Any, to: int, what: str) -> Work:
        """Sends ``x`` to index ``to`` of ``where``; empty tensors stay at home."""
        group, number = self._way(where, where.index, to)
        about = self._about("send", x, where, to, what, group, number)
        target = where.ranks[to]
        if not x.numel():
            return _Sent(None, x, lambda: True, about)
        if dist.get_backend(group) != "gloo":
            work: Any = dist.isend(x, target, group)
            return _Sent(work, x, work.is_completed, about)
        self.open = [sent for sent in self.open if not _answered(sent)]
        answer = _Answer(target, group, tag(ANSWER, number, about.digest))
        under = tag(TRANSFER, number, about.digest)
        sent = _Sent(dist.isend(x, target, group, under), x, answer, about)
        self.open.append(sent)
        return sent

    def receive(self, into: Tensor, where: Any, source: int, what: str) -> Work:
        """Receives into ``into`` from index ``source`` of ``where``."""
        group, number = self._way(where, source, where.index)
        about = self._about("receive", into, where, source, what, group, number)
        origin = where.ranks[source]
        if not into.numel():
            return _Received(None, into, None, about)
        if dist.get_backend(group) != "gloo":
            return _Received(dist.irecv(into, origin, group), into, None, about)

        def answer() -> None:
            # The sender asked for it before it sent, so this does not wait for long.
            if (last := self.said.get((where.ranks, origin))) is not None:
                last.wait()
            under = tag(ANSWER, number, about.digest)
            self.said[where.ranks, origin] = dist.isend(self.yes, origin, group, under)

        under = tag(TRANSFER, number, about.digest)
        work = dist.irecv(into, origin, group, under)
        return _Received(work, into, answer, about)


def _answered(sent: _Sent) -> bool:
    return sent.received() and sent.done()

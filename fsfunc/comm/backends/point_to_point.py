"""Point-to-point transfers between processes, independent of their collectives.

A transfer's tag has its number for the pair and direction, its shape and its dtype. To
know without waiting that a send by gloo is over, the receiver answers each one with a
byte, which the sender tests for; between processes of one host all sends are answered.

NCCL has no tags, and matches what two ranks issue by order: so each direction has a
group of its own. NCCL itself tells whether a send is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc.comm.backends.channels import Channel, Work, by_gloo
from fsfunc.comm.backends.exchange import (
    ANSWER,
    TRANSFER,
    Exchange,
    Headers,
    tag,
)
from fsfunc.comm.backends.link import Handle, Signature, call_signature, digest
from fsfunc.comm.backends.neighbours import Neighbours
from fsfunc.comm.backends.process_groups import Groups
from fsfunc.comm.watch.watchdog import FlightRecord, FlightRecorder


class Transfers:
    """The transfers of a process; the n-th send of a pair matches the n-th receive.

    Args:
        groups: those of the collectives.
        checks: whether every transfer is compared, also within a compared program.
        flight: where each is recorded.
    """

    def __init__(self, groups: Groups, checks: bool, flight: FlightRecorder) -> None:
        self.groups, self.checks, self.flight = groups, checks, flight
        self.near: Neighbours | None = None
        self.down = Groups(groups.timeout)  # for sends to lower indices
        self.numbers: Counter[tuple[Any, ...]] = Counter()
        self.open: list[_Sending] = []  # not answered yet
        self.said: dict[tuple[Any, ...], Any] = {}  # the last answer to each
        self.yes = torch.ones(1, dtype=torch.uint8, device="cpu")

    def connect(self, every: Sequence[tuple[int, ...]]) -> None:
        """Makes the groups of transfers on NCCL; all processes must call it alike.

        One group would have one order for both directions: two ranks that send to each
        other would wait for ever.
        """
        for ranks in every if dist.get_backend() == "nccl" else ():
            if len(ranks) > 1:
                self.down.make(ranks)

    def _way(self, group: Any, source: int, to: int) -> tuple[Channel, int]:
        """The channel, and the number, of the next transfer between two indices."""
        process_group = self.groups.get(group.ranks)
        if to < source:
            process_group = self.down.get(group.ranks) or process_group
        key = (group.ranks, source, to)
        self.numbers[key] += 1
        return Channel(process_group, group.ranks, self.near), self.numbers[key]

    def _headers(
        self,
        record: FlightRecord,
        group: Any,
        other: int,
        channel: Channel,
        ways: tuple[int, int],
    ) -> Headers | None:
        """This rank's header on its way to the index ``other``, where they compare."""
        compared = group.compared and not self.checks
        if dist.get_backend(channel.process_group) != "gloo" or compared:
            return None
        return Headers(record, group, _digest(record.said), [other], channel, ways)

    def send(self, x: Tensor, group: Any, to: int, what: str) -> Handle:
        """Sends ``x`` to index ``to`` of ``group``; empty tensors stay at home."""
        channel, number = self._way(group, group.index, to)
        said = call_signature("send", {}, group.axis, x, what)
        record = self.flight.begin(said, group, number)
        headers = self._headers(record, group, to, channel, (1, 2))
        target, process_group = group.ranks[to], channel.process_group
        works: list[Work] = []
        received: Callable[[], bool] = lambda: True  # noqa: E731
        answers = False
        if x.numel() and dist.get_backend(process_group) == "gloo":
            digest = _digest(said)
            self.open = [sent for sent in self.open if not _answered(sent)]
            if answers := target not in channel.by_rank:
                received = _Answer(target, process_group, tag(ANSWER, number, digest))
            under = tag(TRANSFER, number, digest)
            works = [channel.send(x, target, under, answered=True)]
        elif x.numel():
            works = [channel.send(x, target, 0)]
        if works and not answers:
            received = works[0][1].is_completed
        nothing: Callable[[], Tensor] = lambda: torch.empty(0, device="cpu")  # noqa: E731
        sent = _Sending(works, nothing, x, record, group, headers)
        sent.received = received
        if answers:
            self.open.append(sent)
        return sent

    def receive(self, into: Tensor, group: Any, source: int, what: str) -> Handle:
        """Receives into ``into`` from index ``source`` of ``group``."""
        channel, number = self._way(group, source, group.index)
        said = call_signature("receive", {}, group.axis, into, what)
        record = self.flight.begin(said, group, number)
        headers = self._headers(record, group, source, channel, (2, 1))
        origin, digest, process_group = (
            group.ranks[source],
            _digest(said),
            channel.process_group,
        )

        def answered() -> Tensor:
            # The sender posted the receive before it sent, so this waits only shortly.
            if (last := self.said.get((group.ranks, origin))) is not None:
                last.wait()
            under = tag(ANSWER, number, digest)
            answer = by_gloo(dist.isend, self.yes, origin, process_group, under)
            self.said[group.ranks, origin] = answer
            return into

        works: list[Work] = []
        finish: Callable[[], Tensor] = lambda: into  # noqa: E731
        if into.numel() and dist.get_backend(process_group) == "gloo":
            works = [channel.receive(into, origin, tag(TRANSFER, number, digest))]
            finish = finish if origin in channel.by_rank else answered
        elif into.numel():
            works = [channel.receive(into, origin, 0)]
        return Exchange(works, finish, into, record, group, headers)


class _Sending(Exchange):
    """A send in flight; ``received`` tests whether it arrived."""

    received: Callable[[], bool]

    def done(self) -> bool:
        if self.result is None and self.received():
            self.wait()
        return self.result is not None


class _Answer:
    """The byte that says that a send has been received."""

    def __init__(self, source: int, process_group: Any, tag: int):
        self.byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self.work: Any = by_gloo(dist.irecv, self.byte, source, process_group, tag)

    def __call__(self) -> bool:
        if self.work is not None and self.byte.item():
            self.work.wait()
            self.work = None
        return self.work is None


def _answered(sent: _Sending) -> bool:
    return sent.received() and sent.done()


def _digest(said: Signature) -> bytes:
    """The same one for a send and for its receive."""
    return digest(("transfer", *said[1:]))

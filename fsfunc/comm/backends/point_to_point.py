"""Point-to-point transfers between processes, independent of their collectives.

A pipeline sends activations from stage to stage by `RankGroup.send` and ``receive``,
which end here (`Transfers`). A transfer's tag has its number for the pair and
direction, its shape and its dtype. To know without waiting that a send by gloo is over,
the receiver answers each one with a byte, which the sender tests for; between processes
of one host all sends are answered.

NCCL has no tags, and matches what two ranks issue by order: so each direction has a
group of its own. NCCL itself tells whether a send is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

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
from fsfunc.comm.backends.link import (
    GroupOfRanks,
    Handle,
    Signature,
    call_signature,
    digest,
)
from fsfunc.comm.backends.neighbours import Neighbours
from fsfunc.comm.backends.process_groups import Groups
from fsfunc.comm.watch.watchdog import FlightRecord, FlightRecorder


class Transfers:
    """The transfers of a process; the n-th send of a pair matches the n-th receive.

    Args:
        groups: those of the collectives.
        checks: whether every transfer is compared, also within a compared program.
        flight: where each is recorded, for error reports.
    """

    def __init__(self, groups: Groups, checks: bool, flight: FlightRecorder) -> None:
        self.groups, self.checks, self.flight = groups, checks, flight
        self.neighbours: Neighbours | None = None
        self.down = Groups(groups.timeout)  # for sends to lower indices
        # By ranks, source and target: transfers so far.
        self.numbers: Counter[tuple[tuple[int, ...], int, int]] = Counter()
        self.unanswered: list[_Sending] = []
        # By ranks and sender: the last answer to it. Stored, as gloo reads its memory.
        self.answers: dict[tuple[tuple[int, ...], int], dist.Work] = {}
        self.received_byte = torch.ones(1, dtype=torch.uint8, device="cpu")

    def connect(self, rank_tuples: Sequence[tuple[int, ...]]) -> None:
        """Makes the groups of transfers on NCCL; all processes must call it alike.

        One group would have one order for both directions: two ranks that send to each
        other would wait for ever.
        """
        for ranks in rank_tuples if dist.get_backend() == "nccl" else ():
            if len(ranks) > 1:
                self.down.make(ranks)

    def _next_transfer(
        self, group: GroupOfRanks, source: int, to: int
    ) -> tuple[Channel, int]:
        """Returns the channel and the number of the next transfer of two indices."""
        process_group = self.groups.get(group.ranks)
        if to < source:
            process_group = self.down.get(group.ranks) or process_group
        key = (group.ranks, source, to)
        self.numbers[key] += 1
        return Channel(process_group, group.ranks, self.neighbours), self.numbers[key]

    def _headers(
        self,
        record: FlightRecord,
        group: GroupOfRanks,
        other: int,
        channel: Channel,
        directions: tuple[int, int],
    ) -> Headers | None:
        """Sends this rank's header to index ``other``, if transfers are compared."""
        # Headers need tags, which NCCL has not.
        compared = group.compared and not self.checks
        if dist.get_backend(channel.process_group) != "gloo" or compared:
            return None
        transfer_digest = _digest(record.signature)
        return Headers(record, group, transfer_digest, [other], channel, directions)

    def send(self, x: Tensor, group: GroupOfRanks, to: int, name: str) -> Handle:
        """Sends ``x`` to index ``to`` of ``group``; of an empty tensor nothing."""
        channel, number = self._next_transfer(group, group.index, to)
        signature = call_signature("send", {}, group.axis, x, name)
        record = self.flight.begin(signature, group, number)
        headers = self._headers(record, group, to, channel, (1, 2))
        target, process_group = group.ranks[to], channel.process_group
        works: list[Work] = []
        received: Callable[[], bool] = lambda: True  # noqa: E731
        by_byte = False  # whether the receiver answers by a byte
        if x.numel() and dist.get_backend(process_group) == "gloo":
            digest = _digest(signature)
            # Those that have arrived meanwhile end here, and let go of their tensors.
            self.unanswered = [s for s in self.unanswered if not _is_answered(s)]
            # Posted before the send: the receiver may answer at once.
            if by_byte := target not in channel.by_rank:
                received = _Answer(target, process_group, tag(ANSWER, number, digest))
            data_tag = tag(TRANSFER, number, digest)
            works = [channel.send(x, target, data_tag, answered=True)]
        elif x.numel():
            works = [channel.send(x, target, 0)]  # NCCL has no tags
        if works and not by_byte:
            received = works[0][1].is_completed
        nothing: Callable[[], Tensor] = lambda: torch.empty(0, device="cpu")  # noqa: E731
        sending = _Sending(works, nothing, x, record, group, headers)
        sending.received = received
        # Stored until the answer comes, even if the caller drops it: gloo writes the
        # answer into its memory.
        if by_byte:
            self.unanswered.append(sending)
        return sending

    def receive(
        self, into: Tensor, group: GroupOfRanks, source: int, name: str
    ) -> Handle:
        """Receives into ``into`` from index ``source`` of ``group``."""
        channel, number = self._next_transfer(group, source, group.index)
        signature = call_signature("receive", {}, group.axis, into, name)
        record = self.flight.begin(signature, group, number)
        headers = self._headers(record, group, source, channel, (2, 1))
        sender, digest, process_group = (
            group.ranks[source],
            _digest(signature),
            channel.process_group,
        )

        def answer_by_byte() -> Tensor:
            # The work is replaced below, and gloo must be done with it. The sender
            # posted its receive before it sent, so this waits only shortly.
            if (last_answer := self.answers.get((group.ranks, sender))) is not None:
                last_answer.wait()
            answer_tag = tag(ANSWER, number, digest)
            answer = by_gloo(
                dist.isend, self.received_byte, sender, process_group, answer_tag
            )
            self.answers[group.ranks, sender] = answer
            return into

        works: list[Work] = []
        finish: Callable[[], Tensor] = lambda: into  # noqa: E731
        if into.numel() and dist.get_backend(process_group) == "gloo":
            works = [channel.receive(into, sender, tag(TRANSFER, number, digest))]
            finish = finish if sender in channel.by_rank else answer_by_byte
        elif into.numel():
            works = [channel.receive(into, sender, 0)]
        return Exchange(works, finish, into, record, group, headers)


class _Sending(Exchange):
    """A send in flight; ``received`` tests whether it arrived."""

    received: Callable[[], bool]

    def done(self) -> bool:
        if self.result is None and self.received():
            self.wait()
        return self.result is not None


class _Answer:
    """The byte that tells that a send has been received; called, whether it has."""

    def __init__(
        self, source: int, process_group: dist.ProcessGroup | None, answer_tag: int
    ):
        self.byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self.work: dist.Work | None = by_gloo(
            dist.irecv, self.byte, source, process_group, answer_tag
        )

    def __call__(self) -> bool:
        # The byte itself is read: gloo's work does not tell without a wait.
        if self.work is not None and self.byte.item():
            self.work.wait()
            self.work = None
        return self.work is None


def _is_answered(sending: _Sending) -> bool:
    return sending.received() and sending.done()


def _digest(signature: Signature) -> bytes:
    """Returns a digest that is the same for a send and for its receive."""
    return digest(("transfer", *signature[1:]))

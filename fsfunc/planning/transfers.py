"""Transfers of a simulated plan: where ranks meet, and in which order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsfunc.comm.backends.link import CollectiveMismatch


class Party(NamedTuple):
    """A rank's side of a transfer."""

    rank: int
    did: str  # "issued", "sent" or "asked for"


@dataclass(eq=False)
class Rendezvous:
    """One collective, or one message, from its first mention to its end."""

    stream: Stream
    number: int
    what: str
    arrived: dict[Party, Any] = field(default_factory=dict)  # spans without times
    met: float = 0.0  # when the last party came
    length: float = 0.0
    start: float = 0.0
    end: float | None = None


class Stream:
    """A stream between parties that meet in order: the n-th call of each is one."""

    def __init__(self, parties: frozenset[Party], label: str, is_message: bool):
        self.parties, self.label, self.is_message = parties, label, is_message
        self.transfers: list[Rendezvous] = []
        self.counts: dict[Party, int] = defaultdict(int)
        self.free = 0.0

    def come(
        self,
        party: Party,
        what: str,
        time: float,
        length: float,
        span: Any,
    ) -> Rendezvous:
        """The next one of ``party``, which issues it now."""
        number = self.counts[party]
        self.counts[party] += 1
        if number == len(self.transfers):
            self.transfers.append(Rendezvous(self, number, what))
        transfer = self.transfers[number]
        if transfer.what != what:
            others = ", ".join(str(p.rank) for p in transfer.arrived)
            raise CollectiveMismatch(
                f"call {number} {self.label} is a {what} of rank {party.rank} but a "
                f"{transfer.what} of rank {others}: all ranks of a group issue their "
                "collectives in one order"
            )
        transfer.arrived[party] = span
        transfer.met = max(transfer.met, time)
        transfer.length = max(transfer.length, length)
        if len(transfer.arrived) == len(self.parties):
            transfer.start = max(transfer.met, self.free)
            transfer.end = self.free = transfer.start + transfer.length
        return transfer

"""Notes in open ledgers: what a rank sends, counted as a ring would send it.

`groups.RankGroup.start` notes each collective here, on every backend, so a plan and a
real run count the same. The public ``ff.ledger()`` is in ``traffic``.

For ``b`` bytes of a rank's input and ``n`` ranks, a rank sends

==================  ==================
psum, pmax, pmin    2 (n-1)/n b
all_gather          (n-1) b
psum_scatter        (n-1)/n b
all_to_all          (n-1)/n b
pbroadcast          (n-1)/n b
ppermute            b, if it is a source
==================  ==================

An all_to_all of unequal parts sends b, without the part that stays.

These are the usual closed forms of the ring algorithms (Patarasuk and Yuan, 2009),
whatever the backend does underneath. An axis of size 1 sends, and counts, nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fsfunc.comm.attribution import current_label, source_line
from fsfunc.comm.operations import OPERATIONS
from fsfunc.runtime.scopes import Scoped

if TYPE_CHECKING:
    from fsfunc.comm.backends.link import GroupOfRanks


@dataclass(frozen=True)
class Record:
    """One collective of one rank.

    Args:
        bytes: what the rank sends, by the table above.
        unit, phase: its label, as `attribution.label` has it.
        where: the user's source line.
        what: the name of its buffer: the unit and its leaves, ``unit(leaves)``.
    """

    op: str
    axis: tuple[str, ...]
    bytes: Fraction
    dtype: torch.dtype
    unit: str = ""
    phase: str = ""
    rank: int = 0
    where: str = ""
    what: str = ""

    @property
    def owner(self) -> str:
        """The unit whose buffer it moves; a prefetch is issued as another unit runs."""
        unit, leaves, _ = self.what.partition("(")
        return unit if leaves else self.unit


class OpenLedger(Protocol):
    """What records collectives and ranks: a `traffic.Ledger`."""

    records: list[Record]
    ranks: set[int]
    names: dict[str, tuple[str, ...]]


LEDGERS: ContextVar[tuple[OpenLedger, ...]] = ContextVar("fsfunc_ledgers", default=())


def note(
    op: str,
    x: torch.Tensor,
    group: GroupOfRanks,
    kwargs: Mapping[str, Any],
    name: str = "",
) -> None:
    """Records one collective of the rank of ``group`` in every open ledger.

    Args:
        kwargs: the collective's arguments.
        name: that of the buffer in ``x``, or "".
    """
    ledgers = LEDGERS.get()
    if not ledgers:  # a source line takes a walk up the stack
        return
    ratio = OPERATIONS[op].sent_ratio(group.size, group.index, **kwargs)
    sent = Fraction(x.numel() * x.element_size() * ratio)
    unit, phase = current_label()
    record = Record(
        op, group.axis, sent, x.dtype, unit, phase, group.rank, source_line(), name
    )
    for ledger in ledgers:
        ledger.records.append(record)
        if group.names:
            ledger.names.update(group.names)


def note_ranks(ranks: Iterable[int]) -> None:
    """Records the ranks that run in every open ledger."""
    for ledger in LEDGERS.get():
        ledger.ranks.update(ranks)


def silence() -> Scoped:
    """Inside, no ledger records anything."""
    return Scoped(LEDGERS, ())


def is_silent() -> bool:
    """Returns whether nothing is recorded: outside of ledgers, or within `silence`."""
    return not LEDGERS.get()


def only(ledger: OpenLedger) -> Scoped:
    """Inside, only this ledger records."""
    return Scoped(LEDGERS, (ledger,))

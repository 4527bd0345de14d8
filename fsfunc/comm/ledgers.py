"""Notes in open ledgers: what a rank sends, counted as a ring would send it.

For ``b`` bytes of a rank's own input and ``n`` ranks, a rank sends

==================  ==================
psum, pmax, pmin    2 (n-1)/n b
all_gather          (n-1) b
psum_scatter        (n-1)/n b
all_to_all          (n-1)/n b
pbroadcast          (n-1)/n b
ppermute            b, if it is a source
==================  ==================

(an all_to_all of unequal parts: b, but for what stays)

which are the usual closed forms of the ring algorithms (Patarasuk and Yuan, 2009),
whatever the backend does underneath. An axis of size 1 sends, and counts, nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from fsfunc.comm.attribution import current_label, source_line
from fsfunc.comm.operations import OPERATIONS
from fsfunc.runtime.scopes import Scoped

# The open ones, each with ``records`` and ``ranks``: see `traffic.Ledger`.
LEDGERS: ContextVar[tuple[Any, ...]] = ContextVar("fsfunc_ledgers", default=())


@dataclass(frozen=True)
class Record:
    """One collective of one rank; ``what``: the name of its buffer."""

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
        """The unit whose buffer it moves: a prefetch is issued as another unit runs."""
        unit, leaves, _ = self.what.partition("(")
        return unit if leaves else self.unit


def note(
    op: str, x: torch.Tensor, group: Any, kwargs: Mapping[str, Any], what: str = ""
) -> None:
    """Records one collective of the rank of ``group`` in every open ledger.

    ``kwargs``: its arguments.
    """
    logs = LEDGERS.get()
    if not logs:
        return
    share = OPERATIONS[op].sent_ratio(group.size, group.index, **kwargs)
    sent = Fraction(x.numel() * x.element_size() * share)
    unit, phase = current_label()
    record = Record(
        op, group.axis, sent, x.dtype, unit, phase, group.rank, source_line(), what
    )
    for log in logs:
        log.records.append(record)


def note_ranks(ranks: Iterable[int]) -> None:
    """Records the ranks that run in every open ledger."""
    for log in LEDGERS.get():
        log.ranks.update(ranks)


def silence() -> Scoped:
    """Inside, no ledger records anything."""
    return Scoped(LEDGERS, ())


def is_silent() -> bool:
    """True if nothing is recorded: no ledger is open, or within :func:`silence`."""
    return not LEDGERS.get()


def only(log: Any) -> Scoped:
    """Inside, only ``log`` records."""
    return Scoped(LEDGERS, (log,))

"""The ledger: what a rank sends, counted as a ring would send it.

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

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from fsfunc.comm.attribution import current_label, source_line
from fsfunc.comm.mesh import Axis, axis_names
from fsfunc.comm.operations import OPERATIONS
from fsfunc.runtime.scopes import Scoped, in_one_thread

_LEDGERS: ContextVar[tuple[Ledger, ...]] = ContextVar("fsfunc_ledgers", default=())


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


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


@dataclass
class Ledger:
    """The collectives of every rank that ran inside ``with ledger() as log``.

    ``ranks``: those that ``spmd`` ran inside, whether they sent anything or not.
    ``count`` and ``bytes`` are those of one rank: ``rank=``, or the lowest that sent
    anything (a process records only its own rank).
    """

    records: list[Record] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)

    def of(self, rank: int | None = None) -> list[Record]:
        """One rank's records, in the order of issue."""
        if rank is None:
            rank = min((r.rank for r in self.records), default=0)
        return [r for r in self.records if r.rank == rank]

    def _select(self, op: str | None, axis: Axis | None, rank: int | None):
        names = None if axis is None else axis_names(axis)
        return [
            r
            for r in self.of(rank)
            if (op is None or r.op == op) and (names is None or r.axis == names)
        ]

    def count(
        self, op: str | None = None, axis: Axis | None = None, rank: int | None = None
    ) -> int:
        """The number of collectives that one rank issued."""
        return len(self._select(op, axis, rank))

    def bytes(
        self, axis: Axis | None = None, op: str | None = None, rank: int | None = None
    ) -> int | float:
        """The bytes that one rank sent, by the table of this module."""
        chosen = self._select(op, axis, rank)
        return _number(sum((r.bytes for r in chosen), Fraction(0)))

    def table(self, rank: int | None = None) -> list[tuple[str, str, int, int | float]]:
        """Rows of (op, axis, count, bytes), in the order of first issue."""
        rows: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for r in self.of(rank):
            rows[r.op, ", ".join(r.axis)].append(r)
        return [
            (op, axis, len(rs), _number(sum((r.bytes for r in rs), Fraction(0))))
            for (op, axis), rs in rows.items()
        ]


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Records every collective issued inside, by every rank hosted here.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> with ff.ledger() as log:
    ...     total = ff.spmd(lambda: ff.psum(torch.ones(3), "data"), mesh)()
    >>> log.count("psum", axis="data"), log.bytes("data")
    (1, 12)
    """
    log = Ledger()
    with in_one_thread(), Scoped(_LEDGERS, (*_LEDGERS.get(), log)):
        yield log


def note(
    op: str,
    axis: tuple[str, ...],
    size: int,
    x: torch.Tensor,
    rank: int,
    sends: bool,
    what: str = "",
    stays: int | None = None,
) -> None:
    """Records one collective over ``size`` ranks in every open ledger.

    ``stays``: for unequal parts, the elements of ``x`` that stay on this rank.
    """
    logs = _LEDGERS.get()
    if not logs:
        return
    b = x.numel() * x.element_size()
    sent = Fraction(b * OPERATIONS[op].sends(size) if sends else 0)
    if stays is not None:
        sent = Fraction(b - stays * x.element_size())
    unit, phase = current_label()
    record = Record(op, axis, sent, x.dtype, unit, phase, rank, source_line(), what)
    for log in logs:
        log.records.append(record)


def note_ranks(ranks: Iterable[int]) -> None:
    """Records the ranks that run in every open ledger."""
    for log in _LEDGERS.get():
        log.ranks.update(ranks)


def silence() -> Scoped:
    """Inside, no ledger records anything."""
    return Scoped(_LEDGERS, ())


def is_silent() -> bool:
    """True if nothing is recorded: no ledger is open, or within :func:`silence`."""
    return not _LEDGERS.get()


def only(log: Ledger) -> Scoped:
    """Inside, only ``log`` records."""
    return Scoped(_LEDGERS, (log,))

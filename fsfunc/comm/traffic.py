"""``ledger``, and the ``Ledger`` that it fills: collectives counted, and as a table.

Tests of a step's cost, plans and a user's ``with ff.ledger() as log`` read one. The
records are made in ``ledgers``, which ``groups`` can import: that is beneath this file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from fsfunc.comm.ledgers import LEDGERS, Record
from fsfunc.comm.mesh import Axis, axis_names
from fsfunc.printing.tables import Printed, Table, of_bytes
from fsfunc.runtime.scopes import Scoped, in_one_thread


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _sum(records: list[Record]) -> Fraction:
    return sum((r.bytes for r in records), Fraction(0))


def _by(
    key: Callable[[Record], tuple[str, ...]], records: list[Record]
) -> dict[tuple[str, ...], list[Record]]:
    """Groups records by a key, in the order of first issue."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for r in records:
        groups[key(r)].append(r)
    return groups


_MOST_ROWS = 12  # of a printed ledger


@dataclass(repr=False)
class Ledger(Printed):
    """The collectives of every rank that ran inside ``with ledger() as log``.

    It prints as a table of what one rank sent. ``ranks``: those that ``spmd`` ran
    inside, whether they sent anything or not. ``count`` and ``bytes`` are those of one
    rank: ``rank=``, or the lowest that sent anything (a process records only its own
    rank). ``names``: those of the mesh for several axes, which stand for them.
    """

    records: list[Record] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, rank: int | None = None) -> list[Record]:
        """Returns one rank's records, in the order of issue."""
        if rank is None:
            rank = min((r.rank for r in self.records), default=0)
        return [r for r in self.records if r.rank == rank]

    def _select(
        self, op: str | None, axis: Axis | None, rank: int | None
    ) -> list[Record]:
        axes: tuple[str, ...] | None = None
        if axis is not None:
            axes = tuple(a for n in axis_names(axis) for a in self.names.get(n, (n,)))
        return [
            r
            for r in self.of(rank)
            if (op is None or r.op == op) and (axes is None or r.axis == axes)
        ]

    def count(
        self, op: str | None = None, axis: Axis | None = None, rank: int | None = None
    ) -> int:
        """Counts the collectives that one rank issued."""
        return len(self._select(op, axis, rank))

    def bytes(
        self, axis: Axis | None = None, op: str | None = None, rank: int | None = None
    ) -> int | float:
        """Returns the bytes that one rank sent, by the table of `comm.ledgers`."""
        return _number(_sum(self._select(op, axis, rank)))

    def table(self, rank: int | None = None) -> list[tuple[str, str, int, int | float]]:
        """Returns rows of (op, axis, count, bytes), in the order of first issue."""
        rows = _by(lambda r: (r.op, ", ".join(r.axis)), self.of(rank))
        return [
            (op, axis, len(records), _number(_sum(records)))
            for (op, axis), records in rows.items()
        ]

    def pieces(self, width: int | None) -> Iterator[Table | str]:
        """Prints what the lowest rank sent, by collective, axis and phase; then sums.

        A phase is "forward" or "backward" of units, "loss" for the mean of losses, or
        the library's function that asked; it is empty for a user's own collectives.
        """
        shown = self.of()
        if not shown:
            by = f" by {_ranks(self.ranks)}" if self.ranks else ""
            yield f"nothing was sent{by}"
            return
        rows = [
            (op, axis, phase, f"{len(records)}", of_bytes(_sum(records)))
            for (op, axis, phase), records in _by(
                lambda r: (r.op, ", ".join(r.axis), r.phase), shown
            ).items()
        ]
        head = "<collective", "<axis", "<phase", ">calls", ">sent"
        yield Table(
            f"rank {shown[0].rank} sent {_total(shown)}", head, rows, most=_MOST_ROWS
        )
        by_axis = _by(lambda r: (", ".join(r.axis),), shown)
        if len(by_axis) > 1:
            largest = sorted(by_axis.items(), key=lambda entry: -_sum(entry[1]))[:3]
            yield "; ".join(f"over {axis}: {_total(rs)}" for (axis,), rs in largest)
        # Most ranks send alike: a line for all that have the same total.
        ranks_by_total = defaultdict[str, set[int]](set)
        for rank in (self.ranks | {r.rank for r in self.records}) - {shown[0].rank}:
            ranks_by_total[_total(self.of(rank))].add(rank)
        others = sorted(ranks_by_total.items(), key=lambda entry: min(entry[1]))
        for total, ranks in others[:2]:
            yield f"{_ranks(ranks)} sent {total}"
        if left_out := set[int]().union(*(ranks for _, ranks in others[2:])):
            yield f"... and {len(left_out)} more ranks"


def _total(records: list[Record]) -> str:
    calls = "collective" if len(records) == 1 else "collectives"
    return f"{of_bytes(_sum(records))} in {len(records)} {calls}"


def _ranks(ranks: set[int]) -> str:
    """Names ranks: ``rank 1``, ``ranks 1 to 3``, ``ranks 0, 2``, ``9 ranks``."""
    first, last, n = min(ranks), max(ranks), len(ranks)
    if n == 1:
        return f"rank {first}"
    if last - first == n - 1:
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, sorted(ranks)))}" if n < 9 else f"{n} ranks"


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Records every collective issued inside, by every rank hosted here.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> with ff.ledger() as log:
    ...     total = ff.spmd(lambda: ff.psum(torch.ones(3), "data"), mesh)()
    >>> log.count("psum", axis="data"), log.bytes("data")
    (1, 12)
    >>> log
    rank 0 sent 12 B in 1 collective
    collective  axis  phase  calls  sent
    psum        data             1  12 B
    rank 1 sent 12 B in 1 collective
    """
    log = Ledger()
    # In one thread: autograd's own threads would not see the context variable.
    with in_one_thread(), Scoped(LEDGERS, (*LEDGERS.get(), log)):
        yield log

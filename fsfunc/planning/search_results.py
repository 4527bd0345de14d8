"""``Search``: all that a search of stacks found, and the best of it.

`stack_search.search` returns it. It is a sequence of the Pareto front's choices, and
prints as their table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

from fsfunc.planning.stacks import Choice, Skipped, StackKind
from fsfunc.printing.tables import Printed, Table, of_bytes, of_seconds


@dataclass(frozen=True, repr=False)
class Search(Printed, Sequence[Choice]):
    """The Pareto front of step time and memory, fastest first; and all that was tried.

    Args:
        front: the choices that fit and are best; of two, the slower one holds less.
        tried: all choices that were planned, in the order of trial.
        skipped: all stacks that were not planned, and why.
        memory: the bytes that a rank may need.
        kept: what is kept free of the hardware's memory, in words; "" if nothing is.
    """

    front: tuple[Choice, ...]
    tried: tuple[Choice, ...]
    skipped: tuple[Skipped, ...]
    memory: float
    kept: str = ""

    def __len__(self) -> int:
        return len(self.front)

    @overload
    def __getitem__(self, index: int) -> Choice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Choice, ...]: ...
    def __getitem__(self, index: int | slice) -> Choice | tuple[Choice, ...]:
        return self.front[index]

    @property
    def best(self) -> Choice:
        """The fastest choice that fits; if some ran, the fastest of those."""
        # The estimate is only trusted among choices that did not run.
        ran = [c for c in self.tried if c.measured is not None]
        return min(ran, key=lambda c: c.measured or 0.0) if ran else self.front[0]

    def with_times(self, times: Mapping[Choice, float]) -> Search:
        """Returns the same search with the measured seconds of some choices."""

        def with_time(c: Choice) -> Choice:
            return replace(c, measured=times.get(c))

        return replace(
            self,
            front=tuple(map(with_time, self.front)),
            tried=tuple(map(with_time, self.tried)),
        )

    @property
    def ranked(self) -> list[Choice]:
        """All choices that fit, fastest first; of equally fast ones, the smallest."""
        return sorted((c for c in self.tried if c.fits), key=_order)

    @property
    def by_kind(self) -> list[Choice]:
        """The fastest choice that fits of each kind of stack, fastest first.

        What makes two stacks of one kind says :class:`.stacks.StackKind`.
        """
        fastest = dict[StackKind, Choice]()
        for choice in self.ranked:
            fastest.setdefault(choice.stack.kind, choice)
        return list(fastest.values())

    @property
    def outlined_by_kind(self) -> list[Skipped]:
        """Of kinds that were not planned, what fits and is fastest by an outline."""
        planned = {choice.stack.kind for choice in self.tried}
        fastest = dict[StackKind, Skipped]()
        for one in sorted(self.skipped, key=lambda s: s.seconds):
            may_fit = 0 < one.outlined_bytes <= self.memory
            if may_fit and one.stack.kind not in planned:
                fastest.setdefault(one.stack.kind, one)
        return list(fastest.values())

    @property
    def ties(self) -> list[Choice]:
        """Choices that fit and are slower than the best by less than its band."""
        fastest = self.front[0]
        bound = fastest.seconds * math.exp(fastest.width)
        return [c for c in self.ranked if c != fastest and c.seconds <= bound]

    def rows(self) -> list[tuple[str, ...]]:
        """Returns rows of the front: time, exposed, bubble, peak, mesh, transforms."""
        return list(map(_row, self.front))

    def table(self) -> str:
        """Returns the fastest of each kind, and the front; then what was skipped."""
        return self.text()

    def pieces(self, width: int | None) -> list[Table | str]:
        kinds, front = self.by_kind, list(self.front)
        pieces: list[Table | str] = []
        if len(kinds) > 1 and kinds != front:  # else the front says it
            rows = list(map(_row, kinds))
            pieces += [Table("The fastest of each kind", HEAD, rows, most=MOST_KINDS)]
            pieces += [
                "",
                Table("Less memory in more time", HEAD, self.rows(), len(self)),
            ]
        else:
            pieces += [Table("", HEAD, self.rows(), most=len(self))]
        if outlined := self.outlined_by_kind:
            rows = list(map(_outlined_row, outlined))
            title = "Kinds of which none was planned, by an outline"
            pieces += ["", Table(title, HEAD, rows, most=MOST_KINDS), ""]
        return [*pieces, *self._notes()]

    def _notes(self) -> list[str]:
        n_fit = sum(c.fits for c in self.tried)
        lines = [
            f"{len(self.tried)} stacks planned, of which {n_fit} fit in "
            f"{of_bytes(self.memory)}{self.kept}; {len(self.skipped)} skipped"
        ]
        if self.kept:
            lines.append(f"the fastest needs {of_bytes(self.front[0].needed_bytes)}")
        if ties := self.ties:
            fastest = self.front[0]
            slower_by = max(c.seconds for c in ties) / fastest.seconds - 1
            lines.append(
                f"{len(ties)} more tie with the fastest: they are slower by at most "
                f"{slower_by:.1%}, and the estimate may be off by "
                f"{math.expm1(fastest.width):.0%}"
            )
        for c in sorted(self.tried, key=lambda c: c.measured or 0.0):
            if c.measured is not None:
                times = f"{of_seconds(c.measured)} measured, {of_seconds(c.seconds)}"
                lines.append(f"{times} estimated: {c.stack}")
        reasons = Counter(HEAVY if s.least_bytes else s.reason for s in self.skipped)
        lines += [f"  {n}: {reason}" for reason, n in reasons.most_common()]
        return lines

    def __repr__(self) -> str:
        return (
            f"Search({len(self.front)} of {len(self.tried)} stacks; best {self.best})"
        )


HEAD = (">step", ">exposed", ">bubble", ">peak", "<mesh", "<transforms")
MOST_KINDS = 10  # that are shown
HEAVY = "parameters and moments alone are too large"  # one line for all of them


def _row(choice: Choice) -> tuple[str, ...]:
    mesh, _, transforms = str(choice.stack).partition(": ")
    times = map(of_seconds, (choice.seconds, choice.exposed, choice.bubble))
    return (*times, of_bytes(choice.peak_bytes), mesh, transforms)


def _outlined_row(one: Skipped) -> tuple[str, ...]:
    mesh, _, transforms = str(one.stack).partition(": ")
    seconds, n_bytes = of_seconds(one.seconds), of_bytes(one.outlined_bytes)
    return f"~{seconds}", "", "", f"~{n_bytes}", mesh, transforms


def front_of(choices: Iterable[Choice]) -> list[Choice]:
    """Returns the Pareto front: by time, each smaller than all that are faster."""
    front: list[Choice] = []
    for choice in sorted(choices, key=_order):
        if not front or choice.peak_bytes < front[-1].peak_bytes:
            front.append(choice)
    return front


def _order(choice: Choice) -> tuple[float, int]:
    return choice.seconds, choice.peak_bytes

"""``Search``: all that a search of stacks found, and the best of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsfunc.planning.stacks import Choice, Skipped
from fsfunc.printing.tables import Printed, Table, of_bytes, of_seconds


@dataclass(frozen=True, repr=False)
class Search(Printed, Sequence[Choice]):
    """The Pareto front of step time and memory, fastest first; and all there was.

    Args:
        front: of two, the slower one holds less; all fit.
        tried: all that were planned, in the order of trial.
        skipped: all that were not, and why.
        memory: the bytes that a rank may hold.
    """

    front: tuple[Choice, ...]
    tried: tuple[Choice, ...]
    skipped: tuple[Skipped, ...]
    memory: float

    def __len__(self) -> int:
        return len(self.front)

    def __getitem__(self, index: Any) -> Any:
        return self.front[index]

    @property
    def best(self) -> Choice:
        """The fastest that fits: of those that ran, if any did."""
        ran = [c for c in self.tried if c.measured is not None]
        return min(ran, key=lambda c: c.measured or 0.0) if ran else self.front[0]

    def with_times(self, times: Mapping[Choice, float]) -> Search:
        """The same, with the measured seconds of a step of some choices."""

        def one(c: Choice) -> Choice:
            return replace(c, measured=times.get(c))

        return replace(
            self, front=tuple(map(one, self.front)), tried=tuple(map(one, self.tried))
        )

    @property
    def ranked(self) -> list[Choice]:
        """All that fit, fastest first; of equal ones, the smallest."""
        return sorted((c for c in self.tried if c.fits), key=_order)

    @property
    def ties(self) -> list[Choice]:
        """Those that fit and are slower than the best by less than its band is wide."""
        first = self.front[0]
        bound = first.seconds * math.exp(first.width)
        return [c for c in self.ranked if c != first and c.seconds <= bound]

    def rows(self) -> list[tuple[str, ...]]:
        """Of the front: step time, of it exposed and bubble, peak, mesh, transforms."""
        found = []
        for c in self.front:
            mesh, _, transforms = str(c.stack).partition(": ")
            times = map(of_seconds, (c.seconds, c.exposed, c.bubble))
            found.append((*times, of_bytes(c.peak_bytes), mesh, transforms))
        return found

    def table(self) -> str:
        """The front as text, and below it what was tried and skipped."""
        return self.text()

    def pieces(self, width: int | None) -> list[Table | str]:
        return [Table("", HEAD, self.rows(), most=len(self)), *self._notes()]

    def _notes(self) -> list[str]:
        fit = sum(c.fits for c in self.tried)
        lines = [
            f"{len(self.tried)} stacks planned, of which {fit} fit in "
            f"{of_bytes(self.memory)}; {len(self.skipped)} skipped"
        ]
        if ties := self.ties:
            first = self.front[0]
            apart = max(c.seconds for c in ties) / first.seconds - 1
            lines.append(
                f"{len(ties)} more tie with the fastest: they are slower by at most "
                f"{apart:.1%}, and the estimate may be off by "
                f"{math.expm1(first.width):.0%}"
            )
        for c in sorted(self.tried, key=lambda c: c.measured or 0.0):
            if c.measured is not None:
                said = f"{of_seconds(c.measured)} measured, {of_seconds(c.seconds)}"
                lines.append(f"{said} estimated: {c.stack}")
        whys = Counter(HEAVY if s.least else s.why for s in self.skipped)
        lines += [f"  {n}: {why}" for why, n in whys.most_common()]
        return lines

    def __repr__(self) -> str:
        return (
            f"Search({len(self.front)} of {len(self.tried)} stacks; best {self.best})"
        )


HEAD = (">step", ">exposed", ">bubble", ">peak", "<mesh", "<transforms")
HEAVY = "parameters and moments alone are too large"


def front_of(choices: Iterable[Choice]) -> list[Choice]:
    """The Pareto front: sorted by time, each smaller than all that are faster."""
    front: list[Choice] = []
    for choice in sorted(choices, key=_order):
        if not front or choice.peak_bytes < front[-1].peak_bytes:
            front.append(choice)
    return front


def _order(choice: Choice) -> tuple[float, int]:
    return choice.seconds, choice.peak_bytes

"""Results of a search: choices with their figures, and the Pareto front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsfunc.comm.mesh import Mesh
from fsfunc.planning.stacks import Stack
from fsfunc.printing.tables import Printed, Table, of_bytes, of_seconds


@dataclass(frozen=True)
class Choice:
    """A stack of transforms, and what it is estimated to take.

    Args:
        stack: the transforms, as data.
        seconds: of a step; ``compute``, ``exposed`` and ``bubble`` add up to it, as in
            an ``Estimate``.
        peak_bytes: the most that a rank holds, as the plan counts it.
        fits: whether what an allocator reserves for that is within the memory asked
            for.
    """

    stack: Stack
    seconds: float
    peak_bytes: int
    fits: bool
    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0

    @property
    def axes(self) -> dict[str, int]:
        """Of the mesh, by name."""
        return dict(self.stack.axes)

    @property
    def code(self) -> str:
        """Python that makes ``mesh`` and ``step`` of ``train_step``."""
        return self.stack.code

    def build(self, train_step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
        """``train_step``, transformed: what ``code`` makes, on a mesh of one's own.

        Raises:
            ValueError: a mesh of other axes.
        """
        return self.stack.apply(train_step, mesh)

    def __str__(self) -> str:
        return f"{of_seconds(self.seconds)}, {of_bytes(self.peak_bytes)}: {self.stack}"


class Skipped(NamedTuple):
    """A stack that was not planned, or could not be; ``least``: bytes it needs."""

    stack: Stack
    why: str
    least: int = 0


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
        """The fastest that fits."""
        return self.front[0]

    @property
    def ranked(self) -> list[Choice]:
        """All that fit, fastest first; of equal ones, the smallest."""
        return sorted((c for c in self.tried if c.fits), key=_order)

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
        whys = Counter(
            why if not s.least else HEAVY for s in self.skipped for why in [s.why]
        )
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

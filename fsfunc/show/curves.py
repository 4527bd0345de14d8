"""Memory over a step, as data: what text and picture both draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fsfunc.foresight.events import Ran, Replayed, Took
from fsfunc.foresight.plans import RankPlan
from fsfunc.memory_kinds import KINDS

__all__ = ["Curve", "Turn", "curve_of"]

Held = tuple[int, ...]  # bytes of each of KINDS


class Turn(NamedTuple):
    """A run of operators of one unit and phase: those from ``start`` to ``end``."""

    start: int
    end: int
    unit: str
    phase: str


@dataclass(frozen=True)
class Curve:
    """What a rank holds while its operators run.

    Args:
        points: (operators that ran before, bytes of each of ``KINDS`` from then on).
        turns: what ran when.
        length: operators in all.
        peak: the point at which most is held.
        given: what is held before the step begins.
    """

    points: tuple[tuple[int, Held], ...]
    turns: tuple[Turn, ...]
    length: int
    peak: tuple[int, Held]
    given: Held

    @cached_property
    def most(self) -> Held:
        """The most bytes of each kind at any time."""
        held = [held for _, held in self.points] or [self.given]
        return tuple(map(max, zip(*held, strict=True)))

    def columns(self, count: int) -> list[Held]:
        """What is held when most is, in each of ``count`` equal parts of the step."""
        tops: list[Held] = [(0,) * len(KINDS)] * count
        for (at, held), until in self._spans():
            size = sum(held)
            for column in range(self._column(at, count), self._last(at, until, count)):
                if size > sum(tops[column]):
                    tops[column] = held
        return tops

    def phases(self, count: int) -> list[str]:
        """The phase of most operators in each of ``count`` equal parts of the step."""
        sums: list[dict[str, float]] = [{} for _ in range(count)]
        width = max(self.length, 1) / count
        for turn in self.turns:
            for column in range(
                self._column(turn.start, count), self._last(turn.start, turn.end, count)
            ):
                low, high = column * width, (column + 1) * width
                share = min(turn.end, high) - max(turn.start, low)
                sums[column][turn.phase] = sums[column].get(turn.phase, 0) + share
        return [max(s, key=lambda phase: s[phase]) if s else "" for s in sums]

    def peak_column(self, count: int) -> int:
        """The column in which the peak lies."""
        return self._column(self.peak[0], count)

    def _spans(self) -> Iterator[tuple[tuple[int, Held], int]]:
        """Yield each point and where the next one is."""
        yield from ((here, after[0]) for here, after in pairwise(self.points))
        if self.points:
            yield self.points[-1], self.length

    def _column(self, at: int, count: int) -> int:
        return min(at * count // max(self.length, 1), count - 1)

    def _last(self, at: int, until: int, count: int) -> int:
        """One past the last column that [at, until) reaches, its first at least."""
        if not self.length:  # nothing runs, and what is held is held all along
            return count
        reached = -(-until * count // self.length)
        return min(max(reached, self._column(at, count) + 1), count)


def curve_of(own: RankPlan) -> Curve:
    """The curve of a rank's plan."""
    aside, rows = KINDS.index("activations"), iter(own.memory)
    row = next(rows, None)
    points: list[tuple[int, Held]] = []
    turns: list[Turn] = []
    ran, held = 0, (0,) * len(KINDS)
    peak, given = (0, held), held

    def put(at: int, what: Held) -> None:
        nonlocal peak
        points.append((at, what))
        if sum(what) > sum(peak[1]):
            peak = (at, what)

    for number, event in enumerate(own.events):
        before = ran
        if isinstance(event, Ran):
            ran += 1
        elif isinstance(event, Replayed):
            ran += len(event.segment.ops)
            inside = 0
            for after, change in event.segment.memory:
                inside += change
                bytes_of = list(held)
                bytes_of[aside] += inside
                put(before + after, tuple(bytes_of))
            put(ran, held)
        if row is not None and row[0] == number:
            if not isinstance(event, Replayed):
                held = row[1]
                put(ran, held)
                given = held if isinstance(event, Took) and not event.op else given
            row = next(rows, None)
        if isinstance(event, Ran | Replayed) and ran > before:
            what = (event.unit, event.phase)
            if turns and turns[-1][2:] == what:
                before = turns.pop().start
            turns.append(Turn(before, ran, *what))
    return Curve(tuple(points), tuple(turns), ran, peak, given)

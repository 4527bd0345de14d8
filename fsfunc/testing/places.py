"""A place in a step where values differ, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsfunc.printing.tables import Printed
from fsfunc.testing.observed_runs import Slot, UnitRun


@dataclass(frozen=True, repr=False)
class FirstDifference(Printed):
    """Where two steps part; it prints as a sentence.

    Attributes:
        call: the call of the step, from 0.
        phase: forward, recompute, backward, reduction (of a gradient call's loss and
            gradients) or update (all that the step makes of them).
        unit, numbers: the unit, as ``outer/inner``, and its call's number in each unit
            around it; None and () outside of units.
        value: what of it differs.
        leaf: its path.
        rank: where it differs; None on all ranks, or where it is not known.
        microbatch: (index, count) of the rank's own; None as above.
        compared: how many values before it agree; ``uncompared``: how many could not
            be compared, as how they lie on the ranks is not known.
        seen: whether any unit or gradient call was.
        segment: 1, 3, ... in the gradient calls of the step's call, of which there are
            ``gradient_calls``; 0, 2, ... between them; None outside of units and of
            gradient calls.
        unmatched: the first unit call of one step alone: what comes after may be
            compared with what another call has.
    """

    call: int
    phase: str
    unit: str | None
    numbers: tuple[int, ...]
    value: str
    leaf: str
    rank: int | None = None
    microbatch: tuple[int, int] | None = None
    compared: int = 0
    uncompared: int = 0
    seen: bool = False
    segment: int | None = None
    gradient_calls: int = 0
    unmatched: str = ""

    def pieces(self, width: int | None) -> list[str]:
        places = [f"in call {self.call + 1} of the step"] if self.call else []
        places += [said] if (said := self._among_gradient_calls()) else []
        where = ", ".join(places) + ": " if places else ""
        if self.unit is not None:
            where += unit_call([self.unit], self.numbers) + ", "
        said = f"{where}{self.phase}, {self.value}"
        if self.rank is not None:
            said += f", rank {self.rank}"
        if self.microbatch is not None:
            said += ", microbatch {} of {}".format(*self.microbatch)
        if not self.seen:
            said += "; neither units nor gradient calls were seen"
        if self.unmatched:
            said += f"; {self.unmatched}"
        return [said]

    def _among_gradient_calls(self) -> str:
        """Which gradient call it is in, if there are several; or before, or after."""
        segment, count = self.segment, self.gradient_calls
        if segment is None or not count or count == segment == 1:
            return ""
        number = (segment + 1) // 2
        if segment % 2:
            return f"in gradient call {number} of {count}"
        return f"after gradient call {number}" if number else "before gradient calls"


def _value(slot: Slot, name: str) -> str:
    """What a value is, of a unit of this name."""
    leaf, kind = f" {slot.leaf!r}" if slot.leaf else "", slot.kind
    if slot.backward:
        given = ", as given" if kind == "output" else ""
        return f"the cotangent of {name} {kind}{leaf}{given}"
    if kind in ("parameter", "input"):
        return f"{name} {kind}{leaf}, as given"
    if kind == "returned":
        return f"{name} output{leaf}, by the transforms around it"
    return "the loss" if kind == "loss" else f"{name} output{leaf}"


def place_of_slot(slot: Slot) -> FirstDifference:
    """Names the unit whose code makes a value; within another one, that one."""
    run, phase = slot.run, "backward" if slot.backward else "forward"
    outer = len(run.path) > 1 and slot.kind == ("output" if slot.backward else "input")
    if not outer:
        return place_in_unit(run, phase, _value(slot, "its"), slot.leaf)
    inner = unit_call(run.path, run.numbers)
    run = run._replace(path=run.path[:-1], numbers=run.numbers[:-1])
    return place_in_unit(run, phase, _value(slot, f"{inner}'s"), slot.leaf)


def unit_call(path: Sequence[str], numbers: Sequence[int]) -> str:
    """A unit's call, by its name and its numbers."""
    return f"unit {'/'.join(path)!r} call {'/'.join(map(str, numbers))}"


def place_in_unit(run: UnitRun, phase: str, value: str, leaf: str) -> FirstDifference:
    """The place of a value in a run of a unit."""
    unit = "/".join(run.path) or None
    return FirstDifference(
        run.call, phase, unit, run.numbers, value, leaf, segment=run.segment
    )

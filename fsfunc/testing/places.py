"""``FirstDifference``: a place in a step where values differ, which prints in words.

``first_difference`` returns it; ``observed_differences.py`` makes it of the key of an
observed value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsfunc.printing.tables import Printed
from fsfunc.testing.observed_runs import UnitRun, ValueKey


@dataclass(frozen=True, repr=False)
class FirstDifference(Printed):
    """Where two steps part; it prints as a sentence.

    Attributes:
        call: the number of the step's call, from 0.
        phase: forward, recompute, backward, reduction (of a gradient call's loss and
            gradients) or update (all that the step makes of them).
        unit: the unit, as ``outer/inner``; None outside of units.
        numbers: its call's number in each unit around it; () outside of units.
        value: which value of it differs, in words.
        leaf: the path of the leaf.
        rank: the rank on which it differs; None: on all ranks, or not known.
        microbatch: (index, count) of the rank's microbatch; None as above.
        compared: how many values before it agree.
        uncompared: how many before it could not be compared, since it is not known how
            the ranks' values make one.
        seen: whether any unit or gradient call was observed.
        segment: 1, 3, ... in the gradient calls of the step's call, of which there are
            ``gradient_calls``; 0, 2, ... between them; None outside of units and of
            gradient calls.
        unmatched: a sentence on the first unit call that only one of the steps makes:
            later calls may have been compared with the wrong ones.
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
        places += [sentence] if (sentence := self._describe_gradient_call()) else []
        prefix = ", ".join(places) + ": " if places else ""
        if self.unit is not None:
            prefix += describe_unit_call([self.unit], self.numbers) + ", "
        sentence = f"{prefix}{self.phase}, {self.value}"
        if self.rank is not None:
            sentence += f", rank {self.rank}"
        if self.microbatch is not None:
            sentence += ", microbatch {} of {}".format(*self.microbatch)
        if not self.seen:
            sentence += "; neither units nor gradient calls were seen"
        if self.unmatched:
            sentence += f"; {self.unmatched}"
        return [sentence]

    def _describe_gradient_call(self) -> str:
        """Returns which gradient call it is in or after, if there are several."""
        segment, count = self.segment, self.gradient_calls
        if segment is None or not count or count == segment == 1:
            return ""
        number = (segment + 1) // 2
        if segment % 2:
            return f"in gradient call {number} of {count}"
        return f"after gradient call {number}" if number else "before gradient calls"


def _describe_value(key: ValueKey, owner: str) -> str:
    """Names a value of a unit; ``owner`` is "its", or the unit's name and "'s"."""
    leaf, kind = f" {key.leaf!r}" if key.leaf else "", key.kind
    if key.is_cotangent:
        as_given = ", as given" if kind == "output" else ""
        return f"the cotangent of {owner} {kind}{leaf}{as_given}"
    if kind in ("parameter", "input"):
        return f"{owner} {kind}{leaf}, as given"
    if kind == "returned":
        return f"{owner} output{leaf}, by the transforms around it"
    return "the loss" if kind == "loss" else f"{owner} output{leaf}"


def place_of_value(key: ValueKey) -> FirstDifference:
    """Returns the place of a value, by the unit whose code makes it.

    An inner unit's input is made by the unit around it, and so is the cotangent of its
    output.
    """
    run, phase = key.run, "backward" if key.is_cotangent else "forward"
    made_outside = len(run.path) > 1 and key.kind == (
        "output" if key.is_cotangent else "input"
    )
    if not made_outside:
        return place_in_unit(run, phase, _describe_value(key, "its"), key.leaf)
    inner_call = describe_unit_call(run.path, run.numbers)
    run = run._replace(path=run.path[:-1], numbers=run.numbers[:-1])
    return place_in_unit(run, phase, _describe_value(key, f"{inner_call}'s"), key.leaf)


def describe_unit_call(path: Sequence[str], numbers: Sequence[int]) -> str:
    """Returns a unit's call by its name and its numbers."""
    return f"unit {'/'.join(path)!r} call {'/'.join(map(str, numbers))}"


def place_in_unit(run: UnitRun, phase: str, value: str, leaf: str) -> FirstDifference:
    """Returns the place of a value in a run of a unit."""
    unit = "/".join(run.path) or None
    return FirstDifference(
        run.call, phase, unit, run.numbers, value, leaf, segment=run.segment
    )

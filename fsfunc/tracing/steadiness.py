"""Detecting steps that do something else each time that they are run.

A step is run a few times before its first real call: to be recorded, to be checked. If
Python state that it changes (a counter, an object's attribute) decides what it does, it
is that much ahead then: seen here by the numbers that torch's functions are given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsfunc import _torch
from fsfunc.comm.attribution import source_line

__all__ = ["NumbersGiven", "Unsteady", "check_steady", "said"]


class Unsteady(RuntimeError):
    """A step does another thing each time that it is run."""


class NumbersGiven(NamedTuple):
    """Numbers that a function of torch was given, and the line of the call."""

    name: str
    numbers: tuple[Any, ...]
    where: str


_INNER = str(Path(_torch.__file__).parent)  # where what is fake is made


def said(func: Any, args: Any, kwargs: dict[str, Any] | None) -> NumbersGiven | None:
    """The numbers among the arguments of a call of torch's, if there are any.

    For modes: of the function that called them.
    """
    if sys._getframe(2).f_code.co_filename.startswith(_INNER):
        return None
    found = _numbers((*args, *kwargs.values())) if kwargs else _numbers(args)
    if not found:
        return None
    return NumbersGiven(getattr(func, "__name__", "?"), tuple(found), source_line())


def _numbers(values: Sequence[Any]) -> list[Any]:
    found = []
    for x in values:
        if isinstance(x, (int, float, complex)):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            found += _numbers(x)
    return found


def check_steady(first: Sequence[NumbersGiven], second: Sequence[NumbersGiven]) -> None:
    """Raises where two runs of one step gave a function other numbers.

    Where they do not call the same functions (of what is made once, and kept), there is
    nothing to compare.

    Raises:
        Unsteady: names the function, the line and the numbers.
    """
    places = [[(x.name, x.where) for x in each] for each in (first, second)]
    if places[0] != places[1]:
        return
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.numbers, other.numbers, strict=False):
            if a != b and a == a:  # no nan
                raise Unsteady(
                    f"{one.name} at {one.where} is given {a} when the step is run "
                    f"once, and {b} when it is run again: Python state that the step "
                    "changes may be why (a counter, an attribute). It is run on "
                    "tensors without data before its first call, to be recorded and "
                    "checked, and would be ahead by as many runs. Let what goes on "
                    "from step to step be part of the state (state.step counts), or "
                    "change it only where ff.recording() is False"
                )

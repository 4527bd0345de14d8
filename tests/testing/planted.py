"""A table of planted bugs: the kit passes what is right, and names what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsfunc as ff
from fsfunc.testing import assert_equals_one_device

TWO = ff.make_mesh({"data": 2}, "simulated")
MODEL = ff.make_mesh({"model": 2}, "simulated")


@dataclass(frozen=True)
class Bug:
    """A mistake as a user makes it.

    Args:
        check: raises for what is wrong, and for nothing else.
        right, wrong: what is given to it; ``right=None`` where the check is all.
        said: what the message says, a regular expression that names the cause.
    """

    check: Callable[[Any], Any]
    right: Any
    wrong: Any
    said: str


def law(step, mesh, state, *batch, **how):
    """The check by law 1, of what ranks run."""
    return lambda ranks: assert_equals_one_device(
        step, ranks, mesh, state, *batch, **{"calls": 1, **how}
    )

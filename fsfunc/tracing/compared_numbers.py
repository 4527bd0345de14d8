"""Numbers and words among a step's arguments, whose comparisons are heard.

A branch that a step takes by its count of steps (``if state.step % 10 == 0``), or by a
word, is not taken in the call that is checked. So where the step itself compares one,
outside units, the check learns of it and answers both ways. A schedule is given the
plain number (`rate_at`): of its comparisons there is a rate alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.attribution import called_by_user
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tree.structure import count_as_leaf

Answered = Callable[[bool], "bool | Tensor"]


def asked_numbers(values: Any, answered: Answered) -> Any:
    """A tree, of whose numbers and words ``answered`` hears how they compare.

    Args:
        answered: is given the answer to a comparison that a user's code makes, and
            returns the one that the code gets.
    """
    return tree.map(lambda x: _asked(x, answered), values, is_leaf=is_sharded)


def _asked(x: Any, answered: Answered) -> Any:
    if (kind := _KINDS.get(type(x))) is None:
        return x
    found = kind(x)
    found.answered = answered
    return found


def _kind(kind: type, made: Iterable[str] = ()) -> type:
    """The class of heard numbers, or words.

    Args:
        made: the methods whose results are heard too.
    """

    def comparing(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def compare(self: Any, *other: Any) -> Any:
            found = plain(self, *other)
            heard = isinstance(found, bool) and called_by_user(sys._getframe(1))
            return self.answered(found) if heard else found

        return compare

    def making(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)
        return lambda self, *other: _asked(plain(self, *other), self.answered)

    own: dict[str, Any] = {
        "__class__": kind,  # to whoever asks it is what it stands for
        "__hash__": kind.__hash__,
        "__reduce__": lambda self: (kind, (kind(self),)),  # a copy is plain
    }
    names = ("lt", "le", "eq", "ne", "gt", "ge", *(["bool"] * (kind is not str)))
    own |= {f"__{name}__": comparing(f"__{name}__") for name in names}
    own |= {name: making(name) for name in made if hasattr(kind, name)}
    heard = type(f"Heard{kind.__name__}", (kind,), own)
    count_as_leaf(heard)
    return heard


_BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")
_MADE = ["__neg__", *(f"__{side}{name}__" for name in _BINARY for side in ("", "r"))]
_KINDS = {int: _kind(int, _MADE), float: _kind(float, _MADE), str: _kind(str)}

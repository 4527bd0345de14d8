"""Placeholders for values of fake tensors; and a check that a step repeats itself.

A step is run a few times before its first real call, to be recorded and checked. If it
depends on Python state that it changes (a counter, an object's attribute), these runs
would change its results: that shows in the numbers that torch's functions are given,
which are compared between runs.

A value that a step reads from a fake tensor is replaced by a number. The number differs
from run to run, so that more than one branch is seen; and for a rank's own value it
differs between neighbouring ranks, so that results that depend on it are found. Of a
number or a word among its arguments, such as the count of steps (``if state.step % 10
== 0``), the branch of this call is no more than one of those to come: where the step
itself compares one, outside units, the check learns of it and answers both ways. A
schedule is given the plain number (`rate_at`): of its comparisons there is a rate.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch, tree
from fsfunc.comm.attribution import (
    called_by_fsfunc,
    called_by_user,
    is_internal,
    source_line,
)
from fsfunc.core.frames import frame
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.rules import refused
from fsfunc.tree.structure import count_as_leaf

_COUNTS, _NUMBERS = (1, 2, 0), (1.0, 2.0**20, -(2.0**20))
_PATIENCE = 32  # a loop until something holds asks for it at one line


class StandIns:
    """Numbers in place of the values of fake tensors.

    Args:
        rank: the rank that reads; ``odd``: whether it is the second of two neighbours;
            None keeps counts, which may be places and lengths, as they are.
        turn: selects the numbers; ``turns`` is how many there are, by what was read.
    """

    def __init__(self, rank: int, odd: bool | None, turn: int = 0):
        self.rank, self.odd, self.turn, self.turns = rank, odd, turn, 1
        self._count: Counter[str] = Counter()

    def of(self, x: Tensor, own: bool) -> Tensor:
        """A placeholder for the value of ``x``; ``own``: if it is each rank's own."""
        with _torch.beneath_all_modes(), torch.no_grad():
            value = _torch.value_of(x)
            if x.dtype == torch.bool:
                value = self.truth(False if value is None else value, own)
                return torch.as_tensor(value, device="cpu").expand(x.shape)
            real = x.is_floating_point() or x.is_complex()
            turn, choices = self._turn(3), _NUMBERS if real else _COUNTS
            if value is None or turn and real:
                value = torch.full(
                    tuple(x.shape), choices[turn], dtype=x.dtype, device="cpu"
                )
            if own and real:
                value = value + (value.abs() + 1) * (self.rank / 64)
            elif own and self.odd is not None:
                value = value + (value + self.odd) % 2
            return value

    def answered(self, found: bool) -> bool | Tensor:
        """The answer to a comparison of an argument, outside units."""
        return found if is_internal() or frame().path else self.truth(found, False)

    def truth(self, found: Tensor | bool, own: bool) -> Tensor | bool:
        """The same of answers that are yes or no."""
        turn = bool(self._turn(2))
        return bool(self.odd) ^ turn if own else found ^ turn

    def _turn(self, most: int) -> int:
        line = source_line()
        self._count[line] += 1
        self.turns = max(self.turns, most)
        return (self.turn + max(0, self._count[line] - _PATIENCE)) % most


# Numbers and words of the arguments, whose comparisons are heard

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


# The numbers that a run gives torch, which the next one gives it too


class NumbersGiven(NamedTuple):
    """Numbers that a function of torch was given, and the line of the call.

    Args:
        inner: whether a transform called it, or a backward pass; ``own``: or anything
            else of the library's.
    """

    name: str
    numbers: tuple[Any, ...]
    where: str
    inner: bool
    own: bool


_INNER = str(Path(_torch.__file__).parent)  # where what is fake is made


def said(func: Any, values: Sequence[Any]) -> NumbersGiven | None:
    """The numbers among the arguments of a call of torch's, if there are any.

    For modes: of the function that called them.

    Args:
        values: the arguments, those in lists and tuples too.
    """
    found = [x for x in values if type(x) not in _TENSORS and isinstance(x, _NUMERIC)]
    if not found:
        return None
    name = getattr(func, "__name__", "?")
    inner = sys._getframe(2).f_code.co_filename.startswith(_INNER)
    if inner or name in _SWITCHES:  # by a unit's first call alone, say
        return None
    inner = is_internal() or _torch.current_node() is not None
    # Plain ones: one whose comparisons are heard holds who hears of them.
    plain = tuple([cast(Any, x.__class__)(x) for x in found])
    return NumbersGiven(name, plain, source_line(), inner, called_by_fsfunc())


_SWITCHES = {"_set_grad_enabled", "_set_multithreading_enabled"}
_TENSORS, _NUMERIC = {Tensor, _torch.FakeTensor}, (int, float, complex)


class Steadiness:
    """The check that a step gives torch's functions the same numbers in every run.

    The type check is another run to compare the first one with. Where there is none, or
    it says something else, the step is run again.

    Args:
        said: the numbers of its first run.
        again: runs it once more, for its numbers; None where it need not be.
        lines: those of its calls that transforms have a part in.
    """

    def __init__(
        self,
        said: Sequence[NumbersGiven] = (),
        again: Callable[[], Sequence[NumbersGiven]] | None = None,
        lines: Iterable[str] = (),
    ):
        self.said, self.again, self.lines = said, again, lines

    def as_on_rank(self, other: Steadiness, one: bool) -> None:
        """Compares with the record of another rank, which is still to check itself.

        Args:
            one: whether both ran one function: then neither needs another run.
        """
        if self.said != other.said:
            self.check()  # before a count makes it look as if ranks were unlike
        self.again = None
        if one and self.said == other.said:
            other.again = None

    def checked(self, said: Sequence[NumbersGiven]) -> None:
        """Compares with a run in which transforms do their work, and say more."""
        mine, more = iter(self.said), []
        wanted = next(mine, None)
        for x in said:
            if wanted is not None and x[:3] == wanted[:3]:
                wanted = next(mine, None)
            elif not x.inner:
                more.append(x)
        places = set(_places(self.said))
        known = {source_line(), *self.lines, *(where for _, where in places)}
        adds = all(x.own and x.where in known for x in more)
        if wanted is None and adds and places.isdisjoint(_places(more)):
            self.again = None

    def check(self) -> None:
        """Runs the step again, unless another run has said the same.

        Raises:
            Unsteady: names the function, the line and the numbers.
        """
        again, self.again = self.again, None
        if again is not None:
            check_steady(self.said, again)


def check_steady(
    first: Sequence[NumbersGiven], again: Callable[[], Sequence[NumbersGiven]]
) -> None:
    """Raises where two runs of one step gave a function other numbers.

    Args:
        again: runs it once more. Where that does not call the same functions, of what
            is made once, and kept, a third run is held against the second.

    Raises:
        Unsteady: names the function, the line and the numbers.
    """
    second = again()
    if _places(first) != _places(second):
        first, second = second, again()
        if _places(first) != _places(second):
            return  # there is nothing to compare
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.numbers, other.numbers, strict=False):
            if a != b and a == a:  # no nan
                raise refused("count", op=one.name, line=one.where, first=a, second=b)


def _places(given: Sequence[NumbersGiven]) -> list[tuple[str, str]]:
    return [(x.name, x.where) for x in given]


class Outside(TorchFunctionMode):
    """Restores, at its end, tensors that a step writes into and did not make.

    They are of a closure, or of an object: a run without data leaves them as they were.

    Raises:
        RuntimeError: a function runs Python on each element of a tensor without any.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[Tensor, Tensor, int]] = {}

    def __exit__(self, *failed: Any) -> Any:
        done = super().__exit__(*failed)
        self._restore()
        return done

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a tensor, most often its shape
            return func(*args)
        if name in _EACH and args and isinstance(args[0], _torch.FakeTensor):
            raise refused("python", op=name, line=source_line())
        if name == "tensor_split":
            args, kwargs = _without_tensors(args, kwargs)
        writes = name.endswith("_") and not name.endswith("__") or name in _WRITES
        given = args[:1] if writes else kwargs.get("out")
        if given is not None:
            for x in tree.leaves(given):
                self._hold(x)
        return func(*args, **kwargs)

    def _hold(self, x: Any) -> None:
        real = isinstance(x, Tensor) and not isinstance(x, _torch.FakeTensor)
        if real and not _torch.is_wrapped(x) and id(x) not in self._held:
            with _torch.beneath_all_modes(), torch.no_grad():
                self._held[id(x)] = x, x.detach().clone(), _version(x)

    def _restore(self) -> None:
        with _torch.beneath_all_modes(), torch.no_grad():
            # The last first: of memory that two views share, the first copy is older.
            for x, value, version in reversed(self._held.values()):
                if _version(x) == version != -1:
                    continue  # not written; a graph may hold it
                with torch.inference_mode(x.is_inference()):
                    x.detach().copy_(value)


def _without_tensors(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of ``tensor_split``, with numbers in place of a tensor of places.

    torch reads such a tensor's memory where no mode hears of it.
    """
    names = ("input", "tensor_indices_or_sections")
    given = dict(zip(names, args, strict=False)) | kwargs
    places = given.get(names[1])
    if not isinstance(places, _torch.FakeTensor):
        return args, kwargs
    found = [int(x) for x in places.unbind()] if places.ndim else int(places)
    x, rest = given.pop(names[0]), args[2:]
    del given[names[1]]
    return (x, found, *rest), given


def _version(x: Tensor) -> int:
    """The number of writes into ``x``; -1 where it is not counted."""
    return -1 if x.is_inference() else x._version


def check_data(out: Any) -> None:
    """Raises where a real call returns tensors without data.

    Raises:
        Unsteady: names the leaf.
    """
    leaves = tree.leaves(out, is_leaf=is_sharded)
    for i, x in enumerate(leaves):
        if is_sharded(x):  # its part of a buffer is not made for it
            x = x._local if x.packed is None else x.packed.flat
        if isinstance(x, _torch.FakeTensor):
            path = tree.paths(out, is_leaf=is_sharded)[i]
            raise refused("kept", path=path)


_EACH = {"apply_", "map_", "map2_"}
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}

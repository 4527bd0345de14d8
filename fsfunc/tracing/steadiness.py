"""Placeholders for values of fake tensors, and the check that a step repeats itself.

`StandIns`: a value that a step reads from a fake tensor (``loss.item()``, ``if x > 0``)
is replaced by a number. The number differs from run to run, so that more than one
branch is seen. For a rank's own value it also differs between neighbouring ranks, so
that what depends on it is found.

`observe_numbers`: a number or a word among the step's arguments, such as the count of
steps in ``if state.step % 10 == 0``, has a value, but this call takes only one of the
branches to come. Numbers and words of subclasses that observe comparisons stand in
their place: where the step compares one, outside units, the check answers both ways.
A schedule is given the plain number (`rate_at`): its comparisons decide a rate, and
no branch of the step.

`Steadiness`: a step is run a few times before its first real call, to be recorded and
checked. If it depends on Python state that it changes (a counter, an object's
attribute), these runs would change its results. That shows in the numbers that the step
gives torch's functions, which are compared between runs.

`RestoresOutside`: what a run without data writes into real tensors is undone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

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
from fsfunc.tracing.rules import rule_error
from fsfunc.tree import Leaf, PyTree
from fsfunc.tree.structure import count_as_leaf

Number: TypeAlias = int | float | complex

# By variant: counts may be lengths or indices, and must be small and not negative. For
# real numbers an ordinary one, and one on either side of any threshold.
_COUNTS, _NUMBERS = (1, 2, 0), (1.0, 2.0**20, -(2.0**20))
# ``while not converged`` asks for one answer at one line: after so many the answer
# changes, or the run would never end.
_LOOP_PATIENCE = 32


class StandIns:
    """Numbers in place of the values of fake tensors, in one run of a step.

    Args:
        rank: the rank that reads them.
        odd: whether it is the second of two neighbours, which then get other numbers;
            None leaves a rank's own counts as they are, as they may be lengths.
        variant: selects the numbers of this run.

    Attributes:
        variants: how many variants there are, by what was read so far.
    """

    rank: int
    odd: bool | None
    variant: int
    variants: int

    def __init__(self, rank: int, odd: bool | None, variant: int = 0):
        self.rank, self.odd, self.variant, self.variants = rank, odd, variant, 1
        self._count: Counter[str] = Counter()  # of the values read at each line

    def placeholder_for(self, x: Tensor, rank_local: bool) -> Tensor:
        """Returns a placeholder for the value of ``x``.

        Args:
            rank_local: whether it is each rank's own value.
        """
        with _torch.beneath_all_modes(), torch.no_grad():
            value = _torch.value_of(x)
            if x.dtype == torch.bool:
                value = self.answer_for(False if value is None else value, rank_local)
                return torch.as_tensor(value, device="cpu").expand(x.shape)
            real = x.is_floating_point() or x.is_complex()
            variant, choices = self._next_variant(3), _NUMBERS if real else _COUNTS
            if value is None or variant and real:
                value = torch.full(
                    tuple(x.shape), choices[variant], dtype=x.dtype, device="cpu"
                )
            if rank_local and real:
                value = value + (value.abs() + 1) * (self.rank / 64)
            elif rank_local and self.odd is not None:
                value = value + (value + self.odd) % 2
            return value

    def answer(self, compared: bool) -> bool | Tensor:
        """Returns the answer to a comparison of an argument; in units, the true one.

        Units compute with each rank's own values, so that any branch is right there.
        """
        return (
            compared
            if is_internal() or frame().path
            else self.answer_for(compared, False)
        )

    def answer_for(self, answer: Tensor | bool, rank_local: bool) -> Tensor | bool:
        """Returns an answer in place of a true or false one, which may be inverted.

        Args:
            rank_local: whether it is each rank's own: neighbours get unlike answers.
        """
        inverts = bool(self._next_variant(2))
        return bool(self.odd) ^ inverts if rank_local else answer ^ inverts

    def _next_variant(self, count: int) -> int:
        line = source_line()
        self._count[line] += 1
        self.variants = max(self.variants, count)
        return (self.variant + max(0, self._count[line] - _LOOP_PATIENCE)) % count


# Numbers and words of the arguments, whose comparisons are observed

AnswerComparison: TypeAlias = "Callable[[bool], bool | Tensor]"


def observe_numbers(arguments: PyTree, answer: AnswerComparison) -> PyTree:
    """Returns a tree in which numbers and words observe how they are compared.

    Args:
        answer: is called with the result of each comparison that a user's code makes,
            and returns the result that the code gets.
    """
    return tree.map(lambda x: _observed(x, answer), arguments, is_leaf=is_sharded)


def _observed(x: Leaf, answer: AnswerComparison) -> Leaf:
    if (observing := _OBSERVING.get(type(x))) is None:
        return x
    observed = observing(x)
    observed.answer = answer
    return observed


def _observing_class(base: type, producing: Iterable[str] = ()) -> type:
    """Returns a subclass of ``int``, ``float`` or ``str`` that observes comparisons.

    Args:
        base: the class that it derives from.
        producing: the methods whose results observe theirs too: of ``step % 10`` the
            remainder is what a step compares.
    """

    def comparing(name: str) -> Callable[..., Any]:
        plain = getattr(base, name)

        def compare(self: Any, *other: object) -> object:
            compared = plain(self, *other)
            # torch and this library compare numbers too: those decide no branch of the
            # step's.
            by_user = isinstance(compared, bool) and called_by_user(sys._getframe(1))
            return self.answer(compared) if by_user else compared

        return compare

    def making(name: str) -> Callable[..., Any]:
        plain = getattr(base, name)
        return lambda self, *other: _observed(plain(self, *other), self.answer)

    namespace: dict[str, Any] = {
        "__class__": base,  # ``isinstance`` and signatures see the plain class
        "__hash__": base.__hash__,
        "__reduce__": lambda self: (base, (base(self),)),  # a copy is plain
    }
    names = ("lt", "le", "eq", "ne", "gt", "ge", *(["bool"] * (base is not str)))
    namespace |= {f"__{name}__": comparing(f"__{name}__") for name in names}
    namespace |= {name: making(name) for name in producing if hasattr(base, name)}
    observing = type(f"Observed{base.__name__}", (base,), namespace)
    count_as_leaf(observing)
    return observing


_BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")
_PRODUCING = [
    "__neg__",
    *(f"__{side}{name}__" for name in _BINARY for side in ("", "r")),
]
_OBSERVING = {
    int: _observing_class(int, _PRODUCING),
    float: _observing_class(float, _PRODUCING),
    str: _observing_class(str),
}


# The numbers that a run gives torch, which the next one gives it too


class NumbersGiven(NamedTuple):
    """Numbers that a function of torch was given, and the line of the call.

    Args:
        name: the function's.
        numbers: the numbers among its arguments.
        where: ``file:line`` in the user's code.
        by_transform: whether a transform, or a backward pass, called it.
        by_library: whether any code of this library called it.
    """

    name: str
    numbers: tuple[Number, ...]
    where: str
    by_transform: bool
    by_library: bool

    @property
    def has_flags(self) -> bool:
        """Whether they are truth values alone."""
        return all(type(x) is bool for x in self.numbers)


_FAKES_FOLDER = str(Path(_torch.__file__).parent)  # where what is fake is made


def numbers_given(
    func: _torch.TorchFunction, values: Sequence[Any]
) -> NumbersGiven | None:
    """Returns the numbers among the arguments of a call of torch's; None without any.

    A function mode calls it from ``__torch_function__``: the frame above that is of the
    code that called ``func``.

    Args:
        func: the function that was called.
        values: the arguments, with those in lists and tuples.
    """
    numbers = [
        x
        for x in values
        if type(x) not in _TENSOR_CLASSES and isinstance(x, _NUMBER_CLASSES)
    ]
    if not numbers:
        return None
    name = getattr(func, "__name__", "?")
    in_torch = sys._getframe(2).f_code.co_filename.startswith(_FAKES_FOLDER)
    # Not comparable between runs: a unit's first call alone does some of these, and
    # results of fake tensors are remembered.
    if in_torch or name in _SWITCHES:
        return None
    by_transform = is_internal() or _torch.current_node() is not None
    # Copied to plain numbers: one that observes its comparisons refers to the checker,
    # which would live on in the record.
    plain = tuple([cast(Any, x.__class__)(x) for x in numbers])
    return NumbersGiven(name, plain, source_line(), by_transform, called_by_fsfunc())


_SWITCHES = {"_set_grad_enabled", "_set_multithreading_enabled"}
_TENSOR_CLASSES, _NUMBER_CLASSES = {Tensor, _torch.FakeTensor}, (int, float, complex)


class Steadiness:
    """The check that a step gives torch's functions the same numbers in every run.

    The type check is another run to compare the first one with. Where there is none, or
    its numbers differ, the step is run again.

    Args:
        numbers: the numbers of its first run.
        rerun: runs the step once more, and returns its numbers; None if it need not be
            run.
        lines: those of the user's calls that transforms run code for.
    """

    numbers: Sequence[NumbersGiven]
    lines: Iterable[str]

    def __init__(
        self,
        numbers: Sequence[NumbersGiven] = (),
        rerun: Callable[[], Sequence[NumbersGiven]] | None = None,
        lines: Iterable[str] = (),
    ):
        self.numbers, self.rerun, self.lines = numbers, rerun, lines

    def compare_with_rank(self, other: Steadiness, same_function: bool) -> None:
        """Compares with the record of another simulated rank, not checked yet itself.

        Args:
            same_function: whether both ranks run one function object. Two runs of it
                with the same numbers are enough then, and neither rank needs another.
        """
        # A counter that the ranks share makes them look unlike: that the step does not
        # repeat itself must be said first.
        if self.numbers != other.numbers:
            self.check()
        self.rerun = None
        if same_function and self.numbers == other.numbers:
            other.rerun = None

    def compare_with_check(self, numbers: Sequence[NumbersGiven]) -> None:
        """Compares with the numbers of a type check, which may have more of them.

        Transforms do their work there, which a recording leaves out. The first run's
        numbers must come in the same order. Others may come between, if transforms
        gave them, or code of this library at a line that is known; then no other run
        is needed.
        """
        remaining, added = iter(self.numbers), []
        expected = next(remaining, None)
        for record in numbers:
            if expected is not None and record[:3] == expected[:3]:
                expected = next(remaining, None)
            elif not record.by_transform:
                added.append(record)
        places = set(_places(self.numbers))
        known_lines = {source_line(), *self.lines, *(where for _, where in places)}
        added_by_library = all(
            record.by_library and record.where in known_lines for record in added
        )
        if expected is None and added_by_library and places.isdisjoint(_places(added)):
            self.rerun = None

    def check(self) -> None:
        """Runs the step again and compares, unless another run had the same numbers.

        Raises:
            Unsteady: names the function, the line and the numbers.
        """
        rerun, self.rerun = self.rerun, None
        if rerun is not None:
            check_steady(self.numbers, rerun)


def check_steady(
    first: Sequence[NumbersGiven], rerun: Callable[[], Sequence[NumbersGiven]]
) -> None:
    """Raises where two runs of one step gave a function unlike numbers.

    Args:
        first: the numbers of the first run.
        rerun: runs the step once more, and returns its numbers.

    Raises:
        Unsteady: names the function, the line and the numbers.
    """
    second = rerun()
    # A step that makes something at its first run, and keeps it, calls other functions
    # in the second: then a third run is compared with the second.
    if _places(first) != _places(second):
        first, second = second, rerun()
        if _places(first) != _places(second):
            return  # there is nothing to compare
    for before, after in zip(first, second, strict=True):
        for a, b in zip(before.numbers, after.numbers, strict=False):
            if a != b and a == a:  # no nan
                raise rule_error(
                    "count", op=before.name, line=before.where, first=a, second=b
                )


def _places(records: Sequence[NumbersGiven]) -> list[tuple[str, str]]:
    """Returns the function and the line of each record."""
    return [(x.name, x.where) for x in records]


class RestoresOutside(TorchFunctionMode):
    """A mode that restores, when it ends, real tensors that a step has written into.

    Such tensors come from a closure or an object (a cache, a buffer): after a run
    without data they must be as they were.

    Raises:
        RuntimeError: a function runs Python on each element of a tensor without data.
    """

    def __init__(self) -> None:
        super().__init__()
        # By id: the tensor, a copy of its values, and its version before the write.
        self._saved: dict[int, tuple[Tensor, Tensor, int]] = {}

    def __exit__(self, *failed: Any) -> bool | None:
        is_suppressed = super().__exit__(*failed)
        self._restore()
        return is_suppressed

    def __torch_function__(
        self,
        func: _torch.TorchFunction,
        types: Sequence[type],
        args: _torch.Args = (),
        kwargs: _torch.Kwargs | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute of a tensor, most often its shape
            return func(*args)
        if name in _RUN_PYTHON and args and isinstance(args[0], _torch.FakeTensor):
            raise rule_error("python", op=name, line=source_line())
        if name == "tensor_split":
            args, kwargs = _with_int_sections(args, kwargs)
        writes = (
            name.endswith("_") and not name.endswith("__") or name in _WRITING_METHODS
        )
        targets = args[:1] if writes else kwargs.get("out")
        if targets is not None:
            for x in tree.leaves(targets):
                self._save(x)
        return func(*args, **kwargs)

    def _save(self, x: Leaf) -> None:
        """Copies a tensor that is written for the first time, if it has data."""
        real = isinstance(x, Tensor) and not isinstance(x, _torch.FakeTensor)
        if real and not _torch.is_wrapped(x) and id(x) not in self._saved:
            with _torch.beneath_all_modes(), torch.no_grad():
                self._saved[id(x)] = x, x.detach().clone(), _version(x)

    def _restore(self) -> None:
        with _torch.beneath_all_modes(), torch.no_grad():
            # The last copy first: of memory that two views share, the first copy is the
            # older one.
            for x, value, version in reversed(self._saved.values()):
                # Not written after all: to write it now would invalidate a graph that
                # has saved it.
                if _version(x) == version != -1:
                    continue
                with torch.inference_mode(x.is_inference()):
                    x.detach().copy_(value)


def _with_int_sections(
    args: _torch.Args, kwargs: _torch.Kwargs
) -> tuple[_torch.Args, _torch.Kwargs]:
    """Returns the arguments of ``tensor_split``, with numbers in place of a tensor.

    It may be given its sections, or the indices to split at, as a tensor: torch reads
    the memory of that where no mode sees it.
    """
    names = ("input", "tensor_indices_or_sections")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    sections = arguments.get(names[1])
    if not isinstance(sections, _torch.FakeTensor):
        return args, kwargs
    numbers = [int(x) for x in sections.unbind()] if sections.ndim else int(sections)
    x, remaining = arguments.pop(names[0]), args[2:]
    del arguments[names[1]]
    return (x, numbers, *remaining), arguments


def _version(x: Tensor) -> int:
    """Returns the number of writes into ``x``; -1 where torch does not count them."""
    return -1 if x.is_inference() else x._version


def refuse_fakes(out: PyTree) -> None:
    """Raises where a real call returns a tensor without data, which a dry run left.

    Raises:
        Unsteady: names the leaf.
    """
    leaves = tree.leaves(out, is_leaf=is_sharded)
    for i, x in enumerate(leaves):
        # A leaf's part is a view, made when it is first read: its buffer will do.
        if is_sharded(x):
            x = x._local if x.packed is None else x.packed.flat
        if isinstance(x, _torch.FakeTensor):
            path = tree.paths(out, is_leaf=is_sharded)[i]
            raise rule_error("kept", path=path)


_RUN_PYTHON = {"apply_", "map_", "map2_"}
_WRITING_METHODS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}

"""Watching a run below autograd: its operators, and the memory that they take.

An :class:`Observer` is a dispatch mode. It sees every operator of a rank's thread, of
the backward pass too, and each storage that one makes, until the last tensor over it
is gone. It works alike on fake tensors, which is how a plan is made, and on real ones,
which is how a plan is held against the truth.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import current_label
from fsfunc.comm.ledgers import is_silent
from fsfunc.core.execution_context import running
from fsfunc.core.frames import frame
from fsfunc.planning.events import Event, Gave, Ran, Took, describe
from fsfunc.runtime.memory_kinds import OFFLOADED
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.tracing.operators import OperatorMode

__all__ = ["Book", "Observer"]


class _Watched(weakref.ref):
    """A storage under watch: its place in the book, for the moment when it dies."""

    __slots__ = ("key", "number")

    key: int
    number: int


class Book:
    """What has happened so far, in order, and what memory is held now."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.kinds: dict[int, str] = {}
        self.sizes: list[int] = []  # of each storage, by number
        self.held: dict[int, _Watched] = {}  # by the storage's address
        self.open = True

    def take(
        self, x: Tensor, op: str, unit: str, phase: str, size: int | None = None
    ) -> None:
        """Notes the storage of ``x``, if it is a new one (as of ``size`` bytes)."""
        if x.layout != torch.strided:
            raise RuntimeError(
                f"a plan counts dense memory, but {op}{unit and f' of unit {unit!r}'} "
                f"makes a tensor with layout {x.layout}, as large as its values: plan "
                "the step with sparse=False; it runs either way"
            )
        storage = x.untyped_storage()
        size = storage.nbytes() if size is None else size
        key = storage._cdata
        if key in self.held:
            return
        watched = _Watched(storage, self._gone)
        watched.key, watched.number = key, len(self.sizes)
        self.held[key] = watched
        self.events.append(Took(watched.number, size, op, unit, phase))
        if space_of(x).offloaded:
            self.kinds[watched.number] = OFFLOADED
        self.sizes.append(size)

    def _gone(self, watched: _Watched) -> None:
        if self.open:
            del self.held[watched.key]
            self.events.append(Gave(watched.number))

    def number(self, x: Tensor) -> int | None:
        """The number of the storage of ``x``, where it is known."""
        found = self.held.get(_torch.storage_key(x))
        return None if found is None else found.number

    def close(self) -> None:
        """Nothing that happens from now on is noted."""
        self.open = False


class Observer(OperatorMode):
    """Writes what a rank's thread does into ``book``, while it is on.

    Args:
        strangers: whether memory counts that no operator seen here has made, such as
            what other ranks sent.
        units: (name, phase) of the unit bodies that run now, the innermost last.
        roots: storages of the running body's parameters; ``pure``: of what was computed
            from them alone.
        reads: storages that any operator read.
        before_backward: is called once, when a backward begins.
        said: who takes memory now, in place of the operator that does.
    """

    def __init__(self, strangers: bool = False) -> None:
        super().__init__()
        self.strangers = strangers
        self.always = strangers
        self.paused = False
        self.book = Book()
        self.units: list[tuple[str, str]] = []
        self.said = ""
        self.before_backward: Any = None
        self.roots: set[int] = set()
        self.pure: set[int] = set()
        self.reads: set[int] = set()
        # Whose the autograd nodes are, from which number on.
        self._turns: list[int] = []
        self._names: list[str] = []

    # What runs

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self.run(func, args, kwargs)
        if not self.paused and (self.always or not is_silent()):
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        read, made = list(_tensors((args, kwargs.values()))), list(_tensors((out,)))
        known = {_torch.storage_key(x) for x in read}
        if self.strangers:
            for x in read:
                self.book.take(x, "", "", "")
        fresh = [x for x in made if _torch.storage_key(x) not in known]
        if not fresh and not func._schema.is_mutable:
            return  # a view
        unit, phase = self.where()
        if phase == "backward" and self.before_backward is not None:
            look, self.before_backward = self.before_backward, None
            look()
        op = describe(func, args, kwargs, out, read, made)
        if op is not None:
            self.book.events.append(Ran(op, unit, phase))
        self.reads |= known
        made_of = known and known <= self.roots | self.pure
        for x in fresh:
            self.book.take(x, self.said or str(func), unit, phase)
            key = _torch.storage_key(x)
            self.roots.discard(key)  # of a storage that is gone
            (self.pure.add if made_of else self.pure.discard)(key)

    def begin_body(self, params: Iterable[Tensor]) -> None:
        """A body starts that is given these parameters."""
        self.roots = {_torch.storage_key(x) for x in params}
        self.pure = set()

    def derived(self, outs: Iterable[Any]) -> list[int]:
        """The storages, by number, that hold what was computed from parameters alone.

        Outputs are not among them: they are somebody else's to keep.
        """
        given = map(_torch.unwrapped, _tensors(outs))
        keys = self.pure - {_torch.storage_key(x) for x in given}
        held = self.book.held
        return [held[k].number for k in keys if k in held]

    # On whose behalf

    def where(self) -> tuple[str, str]:
        """The unit and the phase of what runs now."""
        if self.units:
            return self.units[-1]
        unit, phase = current_label()
        node = _torch.current_node()
        # The node that recomputes, and not one of those that it then runs.
        again = running().recompute and hasattr(node, "pull_recomputed")
        if unit:
            return unit, "recompute" if again else phase
        if node is not None:
            unit = self._unit_of(_torch.sequence_number(node))
            return unit, "recompute" if again else "backward"
        return "", "forward" if frame().in_loss else "update"

    def _unit_of(self, number: int) -> str:
        """The unit whose body made the autograd node of this number."""
        at = bisect_right(self._turns, number) - 1
        return self._names[at] if at >= 0 else ""

    def _turn(self, name: str) -> None:
        """Nodes made from now on are those of ``name``."""
        self._turns.append(_torch.next_sequence_number())
        self._names.append(name)

    @contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """What runs inside is the body of a unit, and so is its backward."""
        phase = "recompute" if running().recompute else "forward"
        self._turn(name)
        self.units.append((name, phase))
        try:
            yield
        finally:
            self.units.pop()
            self._turn(self.units[-1][0] if self.units else "")

    @contextmanager
    def standing_for(self, name: str, phase: str, what: str) -> Iterator[None]:
        """Memory that is taken inside is a unit's, as if ``what`` had taken it."""
        self.units.append((name, phase))
        before, self.said = self.said, what
        try:
            yield
        finally:
            self.units.pop()
            self.said = before

    # What memory is for

    def given(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Notes what is there before the run starts, and what it is for."""
        tensors = list(tensors)
        for x in tensors:
            self.book.take(x, "", "", "")
        self.count_as(kind, tensors)

    def count_as(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Says what the memory of ``tensors`` is for."""
        for x in tensors:
            if x is not None:
                number = self.book.number(_torch.unwrapped(x))
                if number is not None and self.book.kinds.get(number) != OFFLOADED:
                    self.book.kinds[number] = kind

    @contextmanager
    def apart(self) -> Iterator[Book]:
        """What happens inside goes into a book of its own."""
        before = self.book, self.units, self.roots, self.pure, self.reads, self.always
        self.book, self.units, self.reads = Book(), [], set()
        self.begin_body([])
        self.always = True
        try:
            yield self.book
        finally:
            self.book.close()
            self.book, self.units, self.roots, self.pure, self.reads, self.always = (
                before
            )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments: single ones, or lists of them."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)) or type(x).__name__ == "dict_values":
            yield from _tensors(x)

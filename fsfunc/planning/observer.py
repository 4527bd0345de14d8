"""Recording a run below autograd: its operators, and the memory that they take.

An :class:`Observer` is a dispatch mode. It sees every operator of a rank's thread, of
the backward pass too, and the storages that they make, until the last tensor over each
is freed. It works on fake tensors, to make a plan, and on real ones, to check a plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.attribution import current_label
from fsfunc.comm.ledgers import is_silent
from fsfunc.core.execution_context import running
from fsfunc.core.frames import frame
from fsfunc.core.tracers import Tracer
from fsfunc.core.units import Call
from fsfunc.planning.device_kernels import FusedChains, fuses, read_again
from fsfunc.planning.events import Event, Gave, Op, Ran, Took, Turn, describe, size_of
from fsfunc.planning.parted_units import PartedUnits
from fsfunc.planning.rounds import Rounds
from fsfunc.runtime.memory import NO_MEMORY, OFFLOADED, StorageTable
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.operators import OperatorMode


class Book:
    """The events so far, in order, and the memory that is held now."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.turns: list[Turn] = []
        self.kinds: dict[int, str] = {}
        self.sizes: list[int] = []  # of each storage, by number
        self.held = StorageTable[int](self._gone)  # the number of each storage
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
        if self.held.get(x) is not None:
            return
        size = x.untyped_storage().nbytes() if size is None else size
        self.held[x] = number = len(self.sizes)
        self.events.append(Took(number, size, op, unit, phase))
        if space_of(x).offloaded:
            self.kinds[number] = OFFLOADED
        self.sizes.append(size)

    def is_of(self, number: int, owner: str) -> None:
        """Says whose buffer a storage is, most often the last that was taken."""
        for at in reversed(range(len(self.events))):
            event = self.events[at]
            if isinstance(event, Took) and event.key == number:
                self.events[at] = event._replace(owner=owner)
                return

    def _gone(self, number: int) -> None:
        if self.open:
            self.events.append(Gave(number))

    def close(self) -> None:
        """Nothing that happens from now on is noted."""
        self.open = False


_CONSTANT = torch.ops.aten.lift_fresh.default  # of a number: with data, for a moment


class Observer(Tracer, OperatorMode):
    """Records what a rank's thread does into ``book``, while it is entered.

    As the frame's tracer it also runs the bodies of units, so that each operator of
    the forward and the backward pass is recorded under its unit.

    Args:
        strangers: whether memory counts that no operator seen here has made, such as
            what other ranks sent.

        kernels: makes the context in which functions of torch run those of a device.
        every: whether each microbatch runs, and none is noted in its place.

    Attributes:
        link: that of the rank, where the run is a plan; None where tensors have data.
        calls: how often each unit's body ran, by (unit, phase).
        derived: bytes that a unit keeps for its backward and computed from its
            parameters alone, by unit.
    """

    complete = True

    def __init__(
        self,
        strangers: bool = False,
        kernels: Callable[[], AbstractContextManager[Any]] = nullcontext,
        every: bool = False,
    ) -> None:
        super().__init__()
        self.kernels, self.every = kernels, every
        self.link: Any = None
        self.strangers = strangers
        self.always = strangers
        self.paused = False
        self.book = Book()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.derived: dict[str, int] = {}
        self._closed = StorageTable[Tensor]()  # the fake one of each with data
        self._units: list[tuple[str, str]] = []  # (name, phase), the innermost last
        self._params: set[int] = set()  # storages of the running body's parameters
        self._copies: set[int] = set()  # storages computed from those alone
        self._kept: list[tuple[str, list[int]]] = []  # copies of bodies that ran
        self._stand_ins = StorageTable[None]()
        self.compiled: set[str] = set()  # names of units
        self.chains, self.parted = FusedChains(), PartedUnits(kernels)
        # The unit that made the autograd nodes, from which sequence number on.
        self._turns: list[int] = []
        self._names: list[str] = []

    # Operators

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        read = _torch.tensors_in((*args, *kwargs.values()) if kwargs else args)
        if not (self.strangers or self.paused or func is _CONSTANT):
            for x in read:
                if not isinstance(x, _torch.FakeTensor):
                    self._close_over(x)
        out = fake_modes.run_operator_below(func, args, kwargs)
        if not self.paused and (self.always or not is_silent()):
            if self.strangers or not _torch.is_view(func, args):
                self._note(func, args, kwargs, out, read)
        return out

    def _note(
        self, func: Any, args: Any, kwargs: Any, out: Any, read: list[Tensor]
    ) -> None:
        made = _torch.tensors_in((out,))
        if self._closed.facts:
            read = [x if (fake := self._closed.get(x)) is None else fake for x in read]
        known = set(map(_torch.storage_key, read))
        fresh = [x for x in made if _torch.storage_key(x) not in known]
        if not known.isdisjoint(self._stand_ins.facts):
            return self.count_as(NO_MEMORY, fresh)
        if self.strangers:
            for x in read:
                self.book.take(x, "", "", "")
        if not fresh and not func._schema.is_mutable:
            return  # a view
        unit, phase = self.where()
        if phase == "backward":
            self.measure_copies()
        op = describe(func, args, kwargs, out, read, made)
        if op is not None and (again := read_again(self.kernels, func, made)):
            op = op._replace(bytes=op.bytes + sum(map(size_of, read[:again])))
        copy = known and known <= self._params | self._copies
        at = len(self.book.events)
        for x in fresh:
            self.book.take(x, str(func), unit, phase)
            key = _torch.storage_key(x)
            self._params.discard(key)  # of a storage that is gone
            (self._copies.add if copy else self._copies.discard)(key)
        if op is not None and self.compiled:
            op = self._fused(func, op, (unit, phase), read, made)
        if op is not None:
            self.book.events.insert(at, Ran(op, unit, phase))

    def _fused(
        self,
        func: Any,
        op: Op,
        where: tuple[str, str],
        read: list[Tensor],
        made: list[Tensor],
    ) -> Op | None:
        """The operator, or the kernel that a compiler makes of it; None: of the last.

        What the library does under a unit's name, such as a cast, is not compiled.
        """
        own, node, call = bool(self._units), _torch.current_node(), len(self._turns)
        if node is not None and not own:
            call = bisect_right(self._turns, _torch.sequence_number(node))
        own = own or not current_label()[0]
        fused = own and where[0] in self.compiled and fuses(func, op)
        read_sizes, made_sizes = self._sizes(read), self._sizes(made)
        return self.chains.add(op, (*where, call), read_sizes, made_sizes, fused)

    def _sizes(self, tensors: list[Tensor]) -> dict[int, int]:
        """The bytes of tensors, by the number of their storage."""
        held = self.book.held
        found = [(held.get(x), size_of(x)) for x in tensors]
        return {number: size for number, size in found if number is not None}

    def _close_over(self, x: Tensor) -> None:
        """Counts a tensor with data, which the step closes over, by its fake one."""
        mode = _torch.fake_mode()
        if mode is not None and self._closed.get(x) is None:
            self._closed[x] = fake = fake_modes.fake_of(mode, x)
            self.book.take(fake, "", "", "")

    # Bodies of units

    def body(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        self.measure_copies()
        before = self._params, self._copies
        given = _torch.tensors_in(tree.leaves(params, is_leaf=is_sharded))
        self._params = {
            _torch.storage_key(x) for x in given if not _torch.is_wrapped(x)
        }
        self._copies = set()
        if (compiler := call.frame.compiler) is not None and compiler.means(call):
            self.compiled.add(call.name)
        try:
            with self._unit(call.name), self.kernels():
                out = super().body(call, params, inputs, keywords)
            if not running().recompute and not is_silent():
                self._keep_copies(call.name, out)
            return out
        finally:  # a recompute ends with the last value that the backward reads
            self._params, self._copies = before

    def function(self, call: Call, params: Any, inputs: Any, keywords: Any) -> Any:
        if self.strangers:
            return call.unit.fn
        return self.parted.of(call, params, inputs, keywords)

    def _keep_copies(self, name: str, out: Any) -> None:
        """Notes the copies that a body made; outputs are somebody else's to keep."""
        given = map(_torch.unwrapped, _torch.tensors_in(tree.leaves(out)))
        keys = self._copies - {_torch.storage_key(x) for x in given}
        held = self.book.held.facts
        numbers = [held[key] for key in keys if key in held]
        if numbers:
            self._kept.append((name, numbers))

    def measure_copies(self) -> None:
        """Adds to ``derived`` the copies of parameters that are still held."""
        if not self._kept or is_silent():
            return
        held = set(self.book.held.facts.values())
        for name, numbers in self._kept:
            size = sum(self.book.sizes[n] for n in numbers if n in held)
            if size:
                self.derived[name] = max(size, self.derived.get(name, 0))
        self._kept.clear()

    @property
    def keeps_copies(self) -> bool:
        """True between a body that made copies and the backward that finds them."""
        return bool(self._kept)

    def turn(self, name: str, microbatch: int, stage: int | None = None) -> None:
        if not is_silent():
            turn = Turn(len(self.book.events), name, microbatch, stage)
            self.book.turns.append(turn)

    def rounds(self, named: str = "") -> Rounds | None:
        every = self.every or self.link is None
        return None if every else Rounds(self, self.link, named)

    # Units and phases

    def where(self) -> tuple[str, str]:
        """The unit and the phase of what runs now."""
        if self._units:
            return self._units[-1]
        unit, phase = current_label()
        node = _torch.current_node()
        again = running().recompute
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
    def _unit(self, name: str) -> Iterator[None]:
        """Inside, the body of a unit runs; its backward is known by its nodes."""
        phase = "recompute" if running().recompute else "forward"
        if not is_silent():
            self.calls[name, phase] += 1
        self._turn(name)
        self._units.append((name, phase))
        try:
            yield
        finally:
            self._units.pop()
            self._turn(self._units[-1][0] if self._units else "")

    # What memory is for

    def given(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Notes what is there before the run starts, and what it is for."""
        tensors = list(tensors)
        for x in tensors:
            self.book.take(x, "", "", "")
        self.count_as(kind, tensors)

    def has_no_memory(self, x: Tensor) -> bool:
        """True of a stand-in, and of what was computed from one."""
        return _torch.storage_key(x) in self._stand_ins.facts

    def count_as(
        self, kind: str, tensors: Iterable[Tensor | None], buffer: str = ""
    ) -> None:
        """Says what the memory of ``tensors`` is for, and whose buffer it is."""
        for x in tensors:
            if x is not None and kind == NO_MEMORY:
                self._stand_ins[x] = None
            elif x is not None:
                number = self.book.held.get(x)
                if number is not None and self.book.kinds.get(number) != OFFLOADED:
                    self.book.kinds[number] = kind
                    if buffer:
                        self.book.is_of(number, buffer.partition(":")[0])

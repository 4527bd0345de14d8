"""Recording a run below autograd: its operators, and the memory that they allocate.

An :class:`Observer` is a dispatch mode: it sees every operator of a rank's thread, also
in the backward pass, and every storage from its first tensor until its last one is
freed. It writes `events` into its `Book`. As the tracer of the frame it also learns
which unit and microbatch runs, so that each event has a unit and a phase.

`planner.plan` enters it around a step on fake tensors. `testing.costs` enters it around
a real run, to hold a plan against it, and `calibration` around one measured call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc._torch.fake_results import view_below
from fsfunc.comm.attribution import current_label
from fsfunc.comm.ledgers import is_silent
from fsfunc.core.execution_context import running
from fsfunc.core.frames import frame
from fsfunc.core.tracers import Tracer
from fsfunc.core.units import Call
from fsfunc.planning.device_kernels import FusedChains, Kernels, fuses, read_again
from fsfunc.planning.events import (
    Allocated,
    Event,
    Freed,
    Op,
    Ran,
    Turn,
    describe,
    size_of,
)
from fsfunc.planning.left_out_calls import LeftOutCalls
from fsfunc.planning.parted_units import PartedUnits
from fsfunc.planning.rounds import Rounds, RoundsLink
from fsfunc.runtime.memory import NO_MEMORY, OFFLOADED, StorageTable
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import is_sharded
from fsfunc.tracing.groups import EqualRun
from fsfunc.tracing.operators import OperatorMode
from fsfunc.tree.types import PyTree


class Book:
    """The events so far, in order, and the storages that are alive.

    Attributes:
        kinds: by storage number, what its memory is for.
        sizes: bytes of each storage, by number.
        storage_numbers: the numbers of the storages that are alive.
        is_open: whether frees are still recorded.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.turns: list[Turn] = []
        self.kinds: dict[int, str] = {}
        self.sizes: list[int] = []
        self.storage_numbers: StorageTable[int] = StorageTable(self._record_freed)
        self.is_open: bool = True

    def record_storage(
        self, x: Tensor, op: str, unit: str, phase: str, size: int | None = None
    ) -> None:
        """Records the storage of ``x``, if it is a new one (as of ``size`` bytes)."""
        if x.layout != torch.strided:
            raise RuntimeError(
                f"a plan counts dense memory, but {op}{unit and f' of unit {unit!r}'} "
                f"makes a tensor with layout {x.layout}, as large as its values: plan "
                "the step with sparse=False; it runs either way"
            )
        if self.storage_numbers.get(x) is not None:
            return
        size = x.untyped_storage().nbytes() if size is None else size
        self.storage_numbers[x] = number = len(self.sizes)
        self.events.append(Allocated(number, size, op, unit, phase))
        if space_of(x).offloaded:
            self.kinds[number] = OFFLOADED
        self.sizes.append(size)

    def set_owner(self, number: int, owner: str) -> None:
        """Records whose buffer a storage is."""
        # From the end: it is most often the last that was allocated.
        for index in reversed(range(len(self.events))):
            event = self.events[index]
            if isinstance(event, Allocated) and event.storage == number:
                self.events[index] = event._replace(owner=owner)
                return

    def _record_freed(self, number: int) -> None:
        if self.is_open:
            self.events.append(Freed(number))

    def close(self) -> None:
        """Ends the records: what is freed from now on is no part of the run."""
        self.is_open = False


# It makes a tensor with data of a number in the step's code, which is no captured one.
_CONSTANT = torch.ops.aten.lift_fresh.default


class Observer(Tracer, OperatorMode):
    """Records what a rank's thread does into ``book``, while it is entered.

    As the frame's tracer it also runs the bodies of units, so that each operator of
    the forward and the backward pass is recorded under its unit.

    Args:
        counts_unseen: whether storages count that no operator seen here has made, such
            as what other ranks sent: in a real run.
        kernels: makes contexts in which torch's functions run the kernels of a device.
        every_microbatch: whether each microbatch runs, and no equal round is noted.
        equal_runs: the runs of equal unit calls, of which some are left out.

    Attributes:
        link: the rank's `planner.PlannedLink`; None in a real run.
        ignores_silence: whether operators count while the ledgers are silent.
        is_paused: whether nothing is recorded for the moment.
        calls: how often each unit's body ran, by (unit, phase).
        derived: by unit, bytes that it saves for its backward and computed from its
            parameters alone.
        compiled: names of the units that `jit` compiles.
    """

    complete = True

    kernels: Kernels
    every_microbatch: bool
    chains: FusedChains
    parted: PartedUnits

    def __init__(
        self,
        counts_unseen: bool = False,
        kernels: Kernels = nullcontext,
        every_microbatch: bool = False,
        equal_runs: Sequence[EqualRun] = (),
    ) -> None:
        super().__init__()
        self.left_out_calls = LeftOutCalls(self, equal_runs)
        self.left_out = self.left_out_calls.buffers
        self.kernels, self.every_microbatch = kernels, every_microbatch
        self.link: RoundsLink | None = None
        self.counts_unseen = counts_unseen
        self.ignores_silence = counts_unseen
        self.is_paused = False
        self.book: Book = Book()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.derived: dict[str, int] = {}
        # By tensor with data that the step captures: its fake one.
        self._fake_constants = StorageTable[Tensor]()
        self._units: list[tuple[str, str]] = []  # (name, phase), the innermost last
        # Keys of storages: the running body's parameters, and what it computed from
        # parameters alone; then (unit, storage numbers) of bodies that ran.
        self._params: set[int] = set()
        self._param_copies: set[int] = set()
        self._saved_copies: list[tuple[str, list[int]]] = []
        self._stand_ins = StorageTable[None]()  # a pipeline's placeholders
        self.compiled: set[str] = set()
        self.chains, self.parted = FusedChains(), PartedUnits(kernels)
        # Autograd numbers its nodes as they are made. From node _first_nodes[i] on they
        # were made in the unit _units_of_nodes[i]: so a backward finds its unit.
        self._first_nodes: list[int] = []
        self._units_of_nodes: list[str] = []

    # Operators

    def operator(
        self, func: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A view computes nothing and takes no memory: a plan has no event of it.
        if not (self.counts_unseen or kwargs):
            out = view_below(func, args)
            if out is not NotImplemented:
                return out
        inputs = _torch.tensors_in((*args, *kwargs.values()) if kwargs else args)
        if not (self.counts_unseen or self.is_paused or func is _CONSTANT):
            for x in inputs:
                if not isinstance(x, _torch.FakeTensor):
                    self._count_captured(x)
        out = fake_modes.run_operator_below(func, args, kwargs)
        # Silent is what the library does beside the step, such as its own checks.
        if not self.is_paused and (self.ignores_silence or not is_silent()):
            if self.counts_unseen or not _torch.is_view(func, args):
                self._record(func, args, kwargs, out, inputs)
        return out

    def _record(
        self,
        func: _torch.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[Tensor],
    ) -> None:
        """Records an operator that ran, and the storages that it made."""
        outputs = _torch.tensors_in((out,))
        if self._fake_constants.facts:
            inputs = [
                x if (fake := self._fake_constants.get(x)) is None else fake
                for x in inputs
            ]
        input_keys = set(map(_torch.storage_key, inputs))
        new = [x for x in outputs if _torch.storage_key(x) not in input_keys]
        # What is computed from a pipeline's placeholder is one too: no rank has it.
        if not input_keys.isdisjoint(self._stand_ins.facts):
            return self.count_as(NO_MEMORY, new)
        if self.counts_unseen:
            for x in inputs:
                self.book.record_storage(x, "", "", "")
        if not new and not func._schema.is_mutable:
            return  # a view
        unit, phase = self.where()
        if phase == "backward":
            self.measure_copies()
        op = describe(func, args, kwargs, out, inputs, outputs)
        if op is not None and (n_twice := read_again(self.kernels, func, outputs)):
            op = op._replace(bytes=op.bytes + sum(map(size_of, inputs[:n_twice])))
        is_param_copy = input_keys and input_keys <= self._params | self._param_copies
        event_index = len(self.book.events)
        for x in new:
            self.book.record_storage(x, str(func), unit, phase)
            key = _torch.storage_key(x)
            self._params.discard(key)  # a key is used again once its storage is freed
            copies = self._param_copies
            (copies.add if is_param_copy else copies.discard)(key)
        if op is not None and self.compiled:
            op = self._fuse(func, op, (unit, phase), inputs, outputs)
        if op is not None:  # before the storages that it made
            self.book.events.insert(event_index, Ran(op, unit, phase))

    def _fuse(
        self,
        func: _torch.OpOverload,
        op: Op,
        where: tuple[str, str],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> Op | None:
        """Returns the operator to record, which may be a compiler's kernel.

        None for an operator that is a part of the kernel recorded last. What the
        library does under a unit's name, such as a cast, is not compiled.
        """
        in_unit, node = bool(self._units), _torch.current_node()
        # Neighbours are fused within one unit call; its backward counts as one too.
        # Calls are told apart by the range of autograd nodes that they made: one range
        # begins where a unit is entered, and the next where it is left.
        node_range = len(self._first_nodes)
        if node is not None and not in_unit:
            node_range = bisect_right(self._first_nodes, _torch.sequence_number(node))
        in_unit = in_unit or not current_label()[0]
        can_fuse = in_unit and where[0] in self.compiled and fuses(func, op)
        reads, writes = self._sizes_by_storage(inputs), self._sizes_by_storage(outputs)
        return self.chains.add(op, (*where, node_range), reads, writes, can_fuse)

    def _sizes_by_storage(self, tensors: list[Tensor]) -> dict[int, int]:
        """Returns the bytes of tensors, by the number of their storage."""
        numbers = self.book.storage_numbers
        pairs = [(numbers.get(x), size_of(x)) for x in tensors]
        return {number: size for number, size in pairs if number is not None}

    def _count_captured(self, x: Tensor) -> None:
        """Counts a tensor with data, which the step captured, by a fake one."""
        mode = _torch.fake_mode()
        if mode is not None and self._fake_constants.get(x) is None:
            self._fake_constants[x] = fake = fake_modes.fake_of(mode, x)
            self.book.record_storage(fake, "", "", "")

    # Bodies of units

    def run_body(
        self,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> PyTree:
        self.measure_copies()
        outer_sets = self._params, self._param_copies
        param_tensors = _torch.tensors_in(tree.leaves(params, is_leaf=is_sharded))
        self._params = {
            _torch.storage_key(x) for x in param_tensors if not _torch.is_wrapped(x)
        }
        self._param_copies = set()
        if (compiler := call.frame.compiler) is not None and compiler.compiles(call):
            self.compiled.add(call.name)
        try:
            with self._unit(call.name), self.kernels():
                outputs = super().run_body(call, params, inputs, keywords)
            if not running().recompute and not is_silent():
                self._save_copies(call.name, outputs)
            return outputs
        finally:  # a recompute is left, by an exception, at the last value it needs
            self._params, self._param_copies = outer_sets

    def wrap_call(
        self, call: Call, run: Callable[..., PyTree]
    ) -> Callable[..., PyTree]:
        return self.left_out_calls.wrap_call(call, run)

    def function_of(
        self,
        call: Call,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        keywords: dict[str, PyTree],
    ) -> Callable[..., PyTree]:
        if self.counts_unseen:
            return call.unit.fn
        return self.parted.function_for(call, params, inputs, keywords)

    def _save_copies(self, name: str, out: PyTree) -> None:
        """Notes the copies of parameters that a body made, but for its outputs.

        Those that are alive when the next body or backward begins are saved for it.
        """
        outputs = map(_torch.unwrapped, _torch.tensors_in(tree.leaves(out)))
        keys = self._param_copies - {_torch.storage_key(x) for x in outputs}
        numbers_by_key = self.book.storage_numbers.facts
        numbers = [numbers_by_key[key] for key in keys if key in numbers_by_key]
        if numbers:
            self._saved_copies.append((name, numbers))

    def measure_copies(self) -> None:
        """Adds to ``derived`` the copies of parameters that are still alive."""
        if not self._saved_copies or is_silent():
            return
        alive = set(self.book.storage_numbers.facts.values())
        for name, numbers in self._saved_copies:
            size = sum(self.book.sizes[n] for n in numbers if n in alive)
            if size:
                self.derived[name] = max(size, self.derived.get(name, 0))
        self._saved_copies.clear()

    @property
    def has_pending_copies(self) -> bool:
        """Whether a body made copies that `measure_copies` has not measured yet."""
        return bool(self._saved_copies)

    def begin_turn(self, name: str, microbatch: int, stage: int | None = None) -> None:
        if not is_silent():
            turn = Turn(len(self.book.events), name, microbatch, stage)
            self.book.turns.append(turn)

    def observe_rounds(self, named: str = "") -> Rounds | None:
        runs_every = self.every_microbatch or self.link is None
        return None if runs_every else Rounds(self, self.link, named)  # type: ignore

    # Units and phases

    def where(self) -> tuple[str, str]:
        """Returns the unit and the phase of what runs now."""
        if self._units:
            return self._units[-1]
        unit, phase = current_label()
        node = _torch.current_node()
        recomputes = running().recompute
        if unit:
            return unit, "recompute" if recomputes else phase
        if node is not None:
            unit = self._unit_of_node(_torch.sequence_number(node))
            return unit, "recompute" if recomputes else "backward"
        return "", "forward" if frame().in_loss else "update"

    def _unit_of_node(self, number: int) -> str:
        """Returns the unit whose body made the autograd node of this number."""
        index = bisect_right(self._first_nodes, number) - 1
        return self._units_of_nodes[index] if index >= 0 else ""

    def _start_unit_nodes(self, name: str) -> None:
        """Records that autograd nodes made from now on are those of a unit."""
        self._first_nodes.append(_torch.next_sequence_number())
        self._units_of_nodes.append(name)

    @contextmanager
    def _unit(self, name: str) -> Iterator[None]:
        """Surrounds the body of a unit; its backward is recognised by its nodes."""
        phase = "recompute" if running().recompute else "forward"
        if not is_silent():
            self.calls[name, phase] += 1
        self._start_unit_nodes(name)
        self._units.append((name, phase))
        try:
            yield
        finally:
            self._units.pop()
            self._start_unit_nodes(self._units[-1][0] if self._units else "")

    # What memory is for

    def record_given(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Records what is there before the run starts, and what it is for."""
        tensors = list(tensors)
        for x in tensors:
            self.book.record_storage(x, "", "", "")
        self.count_as(kind, tensors)

    def has_no_memory(self, x: Tensor) -> bool:
        """Returns whether ``x`` is a placeholder, or was computed from one."""
        return _torch.storage_key(x) in self._stand_ins.facts

    def count_as(
        self, kind: str, tensors: Iterable[Tensor | None], buffer: str = ""
    ) -> None:
        """Records what the memory of ``tensors`` is for, and whose buffer it is."""
        for x in tensors:
            if x is not None and kind == NO_MEMORY:
                self._stand_ins[x] = None
            elif x is not None:
                number = self.book.storage_numbers.get(x)
                if number is not None and self.book.kinds.get(number) != OFFLOADED:
                    self.book.kinds[number] = kind
                    if buffer:
                        self.book.set_owner(number, buffer.partition(":")[0])

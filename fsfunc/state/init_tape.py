"""An init function recorded on tensors without data, and run again for a rank's part.

The function runs on fake tensors, and :class:`InitTape` notes each operator that makes
memory or writes into it, with its operands: a number for their storage, and their place
in it. Views need no record: aliases, chunks and ``.data`` are right by themselves.

:class:`Replay` gives the values. A rank computes its own range of a leaf alone, block
by block, if every operator behind the leaf is a draw, a constant, a copy or
elementwise, and each element that they write depends only on the elements at the same
place. That is so for what ``torch.nn.init`` fills (but for ``orthogonal_``, ``eye_``
and ``sparse_``), for a row or a range filled apart, for casts, and for leaves that are
chunks of one tensor. Any other leaf is computed whole on each rank, with all that it
depends on, and the rank's part is copied: the same values, for more memory while that
leaf is made. So is a number that the function asks for, as ``trunc_normal_`` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc._torch import fake_modes
from fsfunc.comm.attribution import source_line
from fsfunc.comm.descriptions import checksums, describe_value
from fsfunc.runtime.random_blocks import (
    Stream,
    Streams,
    block_size,
    draw,
    draw_seeded,
    find_fill,
)
from fsfunc.runtime.stores import populate

# torch computes the end of a range by other instructions than its middle, and cuts what
# is longer than this for its threads: so pieces are cut alike, whoever asks for them.
# (A GPU computes each element alike; there a block is one piece.)
PIECE = 1 << 15

_aten: Any = torch.ops.aten
_SEEDED, _POINTWISE = torch.Tag.nondeterministic_seeded, torch.Tag.pointwise
_METADATA = torch.Tag.inplace_view
_RESIZING = {_aten.resize_, _aten.resize_as_}
_EMPTY = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty,
    _aten.new_empty_strided,
}  # fmt: skip
_ZEROS = {_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.zero_}
_ONES = {_aten.ones, _aten.ones_like, _aten.new_ones}
_FULL = {
    _aten.full: "fill_value", _aten.full_like: "fill_value", _aten.fill_: "value",
    _aten.new_full: "fill_value", _aten.scalar_tensor: "s",
}  # fmt: skip
_COPIES = {_aten.clone: "self", _aten._to_copy: "self", _aten.copy_: "src"}


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the tape: its storage, and its place there.

    Args:
        storage: the number of the storage.
        place: the tensor's shape, strides, offset and dtype.
        span: the range of the storage's elements that it is, in order; None if it is
            none, or reads them otherwise (as another dtype, conjugated, negated).
    """

    storage: int
    place: _torch.Place
    span: tuple[int, int] | None


@dataclass
class Storage:
    """Memory that operators of the tape made, or that was there before.

    Args:
        dtype, device, numel: of its elements.
        keep_alive: the storage: it is known by its address, which no other may get.
        real: the tensor that was there before, flat and over all of the storage; None
            of memory that the tape made.
        writers: the numbers of the operators that wrote into it, in order.
    """

    dtype: torch.dtype
    device: torch.device
    numel: int
    keep_alive: torch.UntypedStorage
    real: Tensor | None = None
    writers: list[int] = field(default_factory=list)


@dataclass
class TapedOp:
    """An operator that made memory or wrote into it.

    Args:
        func: the operator.
        args, kwargs: its arguments, a `Ref` in place of each tensor.
        kind: what it does to element i of its target: nothing (``"empty"``), fill it
            with ``value``, ``"draw"`` it as ``value`` says, ``"copy"`` it, or compute
            it from elements i (``"math"``); or anything at all (``"plain"``).
        value: the number or the `Fill` of these kinds.
        reads: the tensors that it reads.
        writes: the tensors that it writes into.
        makes: by result, the memory that is new; None: none.
        span: the range of its target, where it can be run for a part of it.
        overwrites: whether no older value of what it writes is read again.
        stream: the numbers that it draws.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: str
    value: Any
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    makes: tuple[Ref | None, ...]
    span: tuple[int, int] | None = None
    overwrites: bool = False
    stream: Stream | None = None

    @property
    def results(self) -> list[Ref]:
        """The tensors that it wrote into, and those that it made."""
        return [*self.writes, *(r for r in self.makes if r is not None)]

    @property
    def target(self) -> Ref:
        """The first of these: the only one of an operator that runs in parts."""
        return self.results[0]


class InitTape(_torch.OperatorMode):
    """The dispatch mode that records operators, above the mode of fake tensors.

    What is computed from real tensors alone is computed at once: a function that reads
    a file, or ``torch.tensor(...)``, has its values. A fake value that is written into
    a real tensor is written into a copy of it, when that is made. A number that the
    function reads (``if mask.any()``) is computed by a replay of what was recorded.

    Args:
        fake: the mode that makes fake tensors.
        draws: whether generators are drawn from.
    """

    def __init__(self, fake: fake_modes.FakeTensorMode, draws: bool = True):
        super().__init__()
        self.fake = fake
        self.ops: list[TapedOp] = []
        self.storages: list[Storage] = []
        self._numbers: dict[int, int] = {}  # of storages, by their key
        # Fake tensors that stand for the storages of real ones, by their key.
        self._shadows: dict[int, Tensor] = {}
        self._streams = Streams(draws)

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten.lift_fresh.default and not _is_fake(args[0]):
            return args[0]  # torch.tensor(...): it has values
        arguments = _torch.arguments_of(func, args, kwargs)
        kind, value = _classify(func, arguments)
        is_random = _SEEDED in func.tags
        operands = _torch.tensors_in((args, kwargs))
        if operands and not is_random and kind in ("copy", "math", "plain"):
            if not any(map(self._is_computed, operands)):
                return self._run_now(func, args, kwargs)

        if not all(map(_is_fake, operands)):
            args, kwargs = _exchange((args, kwargs), Tensor, self._as_fake)
        if func is _aten._local_scalar_dense.default:  # a number that Python reads
            with _torch.beneath_all_modes():
                return Replay(self).view(self.ref(args[0])).item()
        # Before it runs: `x.t_()` and `x.resize_()` change places.
        refs = _exchange((args, kwargs), Tensor, self.ref)
        writes = tuple(map(self.ref, _torch.tensors_written(func, args, kwargs)))
        out = func(*args, **kwargs)
        fake_modes.forget_fakes(self.fake)
        if _METADATA in func.tags:
            if func.overloadpacket in _RESIZING:
                self._check_size(args[0])
            return out

        makes = tuple(map(self._new_ref, _results(out)))
        if not writes and not any(makes):  # a view
            return out
        reads: tuple[Ref, ...] = ()
        if kind == "copy":
            # What is written is not read; of a copy of itself nothing would change.
            reads = (_torch.arguments_of(func, *refs)["src" if writes else "self"],)
        elif kind in ("math", "plain"):
            reads = tuple(_refs_in(refs))
        args_taped, kwargs_taped = refs
        op = TapedOp(func, args_taped, kwargs_taped, kind, value, reads, writes, makes)
        target = self.storages[op.target.storage]
        if is_random:
            generator = arguments.get("generator")
            op.stream = self._streams.next(generator, target.device)
        # It runs in parts where element i of the target comes of elements i alone.
        spans = {op.target.span, *(r.span for r in reads if not self._is_number(r))}
        if kind != "plain" and len(op.results) == 1 == len(spans):
            op.span = op.target.span
        covers_all = op.target.span == (0, target.numel)
        op.overwrites = covers_all and kind in ("fill", "draw", "copy")
        for number in {r.storage for r in op.results}:
            self.storages[number].writers.append(len(self.ops))
        self.ops.append(op)
        return out

    def ops_behind(self, storage: int) -> list[TapedOp]:
        """Returns the operators on which a storage's last values depend, in order."""
        needed: set[int] = set()
        todo = [(storage, len(self.ops))]
        while todo:
            number, before_op = todo.pop()
            writers = self.storages[number].writers
            i = bisect_left(writers, before_op)
            if i and (k := writers[i - 1]) not in needed:
                needed.add(k)
                op = self.ops[k]
                earlier = () if op.overwrites else op.writes
                todo += [(r.storage, k) for r in (*op.reads, *earlier)]
        return [self.ops[k] for k in sorted(needed)]

    def lines(self) -> list[tuple[str, str]]:
        """Returns a description that equal init functions share: (subject, text)."""
        keys = sorted({op.stream[0] for op in self.ops if op.stream is not None})
        read = sorted({r.storage for op in self.ops for r in op.reads})
        real = [x for x in (self.storages[i].real for i in read) if x is not None]
        with _torch.beneath_all_modes():
            sums = checksums(real)
        return [
            ("the numbers of their generators", str(keys)),
            *[(f"given tensor {i}", f"checksum {n}") for i, n in enumerate(sums)],
            *[
                (f"operator {i}", describe_value((str(op.func), op.args, op.kwargs)))
                for i, op in enumerate(self.ops)
            ],
        ]

    # The places of tensors

    def ref(self, x: Tensor) -> Ref:
        """Returns the storage and the place of a fake tensor of the function."""
        number = self._numbers.get(_torch.storage_key(x))
        if number is None:
            raise RuntimeError(
                f"a tensor of shape {list(x.shape)} without values, made outside the "
                f"init function, is used in it at {source_line()}: make it inside"
            )
        place, start = _torch.place_of(x), int(x.storage_offset())
        is_range = x.is_contiguous() and x.dtype == self.storages[number].dtype
        is_range = is_range and not (place.conjugated or place.negated)
        return Ref(number, place, (start, start + x.numel()) if is_range else None)

    def ref_of_result(self, x: Tensor) -> Ref | None:
        """Returns the `Ref` of a result of the function; None if it is real."""
        return self.ref(self._as_fake(x)) if self._is_computed(x) else None

    def _is_computed(self, x: Tensor) -> bool:
        """Returns whether the values of ``x`` are computed by the tape."""
        if _is_fake(x):
            return True
        shadow = self._shadows.get(_torch.storage_key(x))
        if shadow is None:
            return False
        return bool(self.storages[self._numbers[_torch.storage_key(shadow)]].writers)

    def _is_number(self, r: Ref) -> bool:
        """Returns whether it is a real tensor without dims: one for all elements."""
        return not (r.place.shape or self.storages[r.storage].writers)

    def _add_storage(self, x: Tensor, real: Tensor | None = None) -> None:
        self._numbers[_torch.storage_key(x)] = len(self.storages)
        storage, device = x.untyped_storage(), _torch.device_of(x)
        size = storage.nbytes() // x.element_size()
        self.storages.append(Storage(x.dtype, device, size, storage, real))

    def _new_ref(self, x: Any) -> Ref | None:
        """Notes the storage of a result, if it is new, and returns its `Ref`."""
        if not isinstance(x, Tensor) or _torch.storage_key(x) in self._numbers:
            return None
        self._add_storage(x)
        return self.ref(x)

    def _as_fake(self, x: Tensor) -> Tensor:
        """Returns a tensor without its values, lying as it does in its storage."""
        if _is_fake(x):
            return x
        key = _torch.storage_key(x)
        if key not in self._shadows:
            # All of the storage, as other tensors may be views of it.
            size = x.untyped_storage().nbytes() // x.element_size()
            with _torch.beneath_all_modes():
                whole = torch.empty(0, dtype=x.dtype, device=x.device)
                whole.set_(x.untyped_storage(), 0, (size,))  # type: ignore[call-overload]
            self._shadows[key] = fake_modes.fake_of(self.fake, whole)
            self._add_storage(self._shadows[key], whole)
        with torch.no_grad():
            return _torch.view_at(self._shadows[key], _torch.place_of(x))

    def _check_size(self, x: Tensor) -> None:
        """Raises where a resize has made a storage longer."""
        storage = self.storages[self._numbers[_torch.storage_key(x)]]
        if x.untyped_storage().nbytes() > storage.numel * storage.dtype.itemsize:
            raise RuntimeError(
                f"the init function makes a tensor longer in place at {source_line()}: "
                "make a new one, or give the parameters whole: init_fn() in place of "
                "init_fn"
            )

    def _run_now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator on real tensors."""
        # Operators of the tape that have read a tensor are replayed later, on what they
        # have read: on a copy. A later reader finds what is written now.
        for x in _torch.tensors_written(func, args, kwargs):
            shadow = self._shadows.pop(_torch.storage_key(x), None)
            if shadow is not None:
                storage = self.storages[self._numbers[_torch.storage_key(shadow)]]
                real = storage.real
                assert real is not None, "only real tensors have a shadow"
                with _torch.beneath_all_modes():
                    storage.real = real.clone()
        with _torch.beneath_all_modes():
            return func(*args, **kwargs)


def _classify(func: Any, arguments: dict[str, Any]) -> tuple[str, Any]:
    """Returns an operator's kind, and the value that it fills in: see `TapedOp`."""
    packet = func.overloadpacket
    if "out" in arguments:
        return "plain", None
    if packet in _EMPTY:
        return "empty", None
    if packet in _ZEROS:
        return "fill", 0
    if packet in _ONES:
        return "fill", 1
    if packet in _FULL and not isinstance(arguments[_FULL[packet]], Tensor):
        return "fill", arguments[_FULL[packet]]
    if _SEEDED in func.tags:
        fill = find_fill(func, arguments)
        return ("plain" if fill is None else "draw"), fill
    if packet in _COPIES:
        return "copy", None
    return ("math" if _POINTWISE in func.tags else "plain"), None


class Replay:
    """The values of a tape's storages after its last operator."""

    def __init__(self, tape: InitTape):
        self.tape = tape
        # What chunks of one tensor have in common: the last storage's operators, and
        # its values where they had to be computed whole.
        self._ops: tuple[int, list[TapedOp]] | None = None
        self._values: tuple[int, Tensor] | None = None

    def write(self, r: Ref, start: int, stop: int, out: Tensor) -> None:
        """Writes the elements [start, stop) of a tensor's flattening to flat ``out``.

        Cost: a block of each operand beside what is written, where the leaf can be made
        in parts; else the whole leaf and what it is computed from.
        """
        if start == stop or out.device.type == "meta":
            return
        ops = self._ops_behind(r.storage)
        if r.span is None or not _run_in_parts(ops):
            out.copy_(self.view(r).reshape(-1)[start:stop])
            return
        self.release()
        self._write(ops, r.storage, r.span[0] + start, r.span[0] + stop, out)

    def view(self, r: Ref) -> Tensor:
        """Returns the tensor itself, in memory that others may read too."""
        if self._values is None or self._values[0] != r.storage:
            self.release()
            self._values = r.storage, self._whole(r.storage)
        return _torch.view_at(self._values[1], r.place)

    def release(self) -> None:
        """Frees the values of the last storage."""
        self._values = None

    def _ops_behind(self, storage: int) -> list[TapedOp]:
        if self._ops is None or self._ops[0] != storage:
            self._ops = storage, self.tape.ops_behind(storage)
        return self._ops[1]

    def _write(
        self, ops: list[TapedOp], storage: int, low: int, high: int, out: Tensor
    ) -> None:
        """Writes a range of a storage that can be made in parts, block by block.

        Blocks are computed whole and cut alike, so that no bit depends on who asks.
        """
        target = self.tape.storages[storage]
        block = block_size(target.device)
        populate(out)
        for first in range(low // block * block, high, block):
            end = min(first + block, target.numel)
            start, stop = max(first, low), min(end, high)
            part = out[start - low : stop - low]
            memory = _Memory(self.tape, ops, first, end)
            # A whole block is computed in `out` itself. Not of an offloaded leaf, whose
            # bits too are the device's; nor of a real tensor, as elements of it that
            # nobody writes have their values elsewhere.
            is_like_target = (
                part.dtype == target.dtype and part.device.type == target.device.type
            )
            if is_like_target and target.real is None and (start, stop) == (first, end):
                memory.values[storage] = part
            for op in ops:
                if op.span is not None:
                    _run_range(memory, op, max(first, op.span[0]), min(end, op.span[1]))
            if memory.values.get(storage) is not part:
                part.copy_(memory.range(storage, start, stop))

    def _whole(self, storage: int) -> Tensor:
        """Returns all elements of a storage, flat."""
        ops, target = self._ops_behind(storage), self.tape.storages[storage]
        if _run_in_parts(ops):
            full = torch.empty(target.numel, dtype=target.dtype, device=target.device)
            self._write(ops, storage, 0, target.numel, full)
            return full
        last_use = {
            r.storage: k for k, op in enumerate(ops) for r in (*op.reads, *op.results)
        }
        memory = _Memory(self.tape, ops)
        for k, op in enumerate(ops):
            if op.span is not None:
                _run_range(memory, op, *op.span)
            elif op.kind != "empty":
                _run_whole(memory, op)
            for r in (*op.reads, *op.results):  # free what no other operator needs
                if last_use[r.storage] == k and r.storage != storage:
                    memory.values.pop(r.storage, None)
        return memory.of(storage)


def _run_in_parts(ops: Iterable[TapedOp]) -> bool:
    """Returns whether all of the operators can be run for a range of elements."""
    return all(op.span is not None for op in ops)


class _Memory:
    """The memory of a replay, by storage: its elements from ``first`` to ``end``."""

    def __init__(
        self,
        tape: InitTape,
        ops: Iterable[TapedOp],
        first: int = 0,
        end: int | None = None,
    ):
        self.tape, self.first, self.end = tape, first, end
        self.written = {r.storage for op in ops for r in op.writes}
        self.values: dict[int, Tensor] = {}

    def of(self, number: int) -> Tensor:
        """Returns the memory of a storage, made when it is first asked for."""
        if number not in self.values:
            storage = self.tape.storages[number]
            stop = storage.numel if self.end is None else min(self.end, storage.numel)
            if storage.real is None:
                size = max(0, stop - self.first)
                x = torch.empty(size, dtype=storage.dtype, device=storage.device)
            else:
                x = storage.real[self.first : stop]
                x = x.clone() if number in self.written else x  # the user's, as it was
            self.values[number] = x
        return self.values[number]

    def range(self, number: int, start: int, stop: int) -> Tensor:
        """Returns the elements [start, stop) of a storage."""
        return self.of(number)[start - self.first : stop - self.first]

    def view(self, r: Ref) -> Tensor:
        """Returns a tensor, where the memory of storages is whole."""
        return _torch.view_at(self.of(r.storage), r.place)


def _run_range(memory: _Memory, op: TapedOp, start: int, stop: int) -> None:
    """Runs an operator for the elements [start, stop) of its storages."""
    if start >= stop or op.kind == "empty":
        return
    target = memory.range(op.target.storage, start, stop)
    if op.kind == "fill":
        target.fill_(op.value)
        return
    if op.kind == "draw":
        assert op.span is not None and op.stream is not None, "a draw has a stream"
        first, end = op.span
        draw(op.value, op.stream, target, start - first, end - first)
        return
    device = memory.tape.storages[op.target.storage].device
    piece = PIECE if device.type == "cpu" else max(PIECE, block_size(device))
    for first in range(start, stop, piece):
        end = min(first + piece, stop)

        def operand(r: Ref, first: int = first, end: int = end) -> Tensor:
            if r.span == op.span:
                x = memory.range(r.storage, first, end)
                return x if r.place.shape else x[0]  # without dims no dtype is widened
            real = memory.tape.storages[r.storage].real
            assert real is not None, "what has another place is a number"
            return _torch.view_at(real, r.place)

        result = memory.range(op.target.storage, first, end)
        if op.kind == "copy":
            result.copy_(operand(op.reads[0]))
            continue
        args, kwargs = _exchange((op.args, op.kwargs), Ref, operand)
        computed = op.func(*args, **kwargs)
        if not op.writes:
            result.copy_(computed)


def _run_whole(memory: _Memory, op: TapedOp) -> None:
    """Runs an operator as it was run, and stores the memory that it made."""
    if op.kind == "draw":
        assert op.stream is not None, "a draw has a stream"
        target = memory.view(op.target)
        flat = torch.empty(target.numel(), dtype=target.dtype, device=target.device)
        draw(op.value, op.stream, flat, 0, flat.numel())
        target.copy_(flat.view(target.shape))
        return
    args, kwargs = _exchange((op.args, op.kwargs), Ref, memory.view)
    if op.stream is None:
        out = op.func(*args, **kwargs)
    else:
        out = draw_seeded(op.func, op.stream, args, kwargs)
    # A result is stored as it is where it is a whole storage of its own, as it was on
    # fake tensors; else its elements are copied to where they were there.
    read = {_torch.storage_key(memory.of(r.storage)) for r in op.reads}
    for r, x in zip(op.makes, _results(out), strict=True):
        if r is None:
            continue
        storage = memory.tape.storages[r.storage]
        is_full = x.untyped_storage().nbytes() == storage.numel * storage.dtype.itemsize
        is_same = is_full and x.dtype == storage.dtype and _torch.place_of(x) == r.place
        if is_same and not r.place.start and _torch.storage_key(x) not in read:
            memory.values[r.storage] = x.as_strided((storage.numel,), (1,))
        else:
            memory.view(r).copy_(x)


def _refs_in(values: Any) -> list[Ref]:
    refs: list[Ref] = []
    _exchange(values, Ref, refs.append)
    return refs


def _exchange(values: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns the arguments of an operator, with all values of one class changed.

    As ``tree.map``, which takes five times as long.
    """
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, (tuple, list)):
        return type(values)([_exchange(x, kind, change) for x in values])
    if isinstance(values, dict):
        return {k: _exchange(x, kind, change) for k, x in values.items()}
    return values


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, _torch.FakeTensor)


def _results(out: Any) -> tuple[Any, ...]:
    """Returns what an operator returned as a tuple."""
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)

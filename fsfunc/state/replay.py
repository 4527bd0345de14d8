"""Running a tape again: the values of one leaf, or of a range of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.random_blocks import block_on, draw, seeded
from fsfunc.runtime.stores import populate
from fsfunc.state.init_tape import InitTape
from fsfunc.state.taped_ops import Ref, TapedOp, exchange

# torch computes the end of a range by other instructions than its middle, and cuts what
# is longer than this for its threads: so pieces are cut alike, whoever asks for them.
# (A GPU computes each element alike; there a block is one piece.)
PIECE = 1 << 15
STRIDE = 1 << 20  # for which memory is taken at once: a multiple of any block
_SMALL = 1 << 10  # operators on so little are run again for every block

_Span = tuple[int, int]


class Replay:
    """The values of a tape's storages after its last operator.

    A storage whose elements each depend on the same element of others is computed
    block by block, where it is wanted. Any other is computed whole; the last of these
    is kept, as the next leaf is often another part of it.
    """

    def __init__(self, tape: InitTape):
        self.tape = tape
        self._slices: dict[int, tuple[list[TapedOp], bool]] = {}
        self._kept: tuple[int, Tensor] | None = None

    def write(self, r: Ref, start: int, stop: int, out: Tensor) -> None:
        """Writes the elements [start, stop) of a tensor's flattening to flat ``out``.

        Cost: a block beside what is written, for a leaf of draws and pointwise
        operators; else the whole leaf and what it was computed from.
        """
        if start == stop or out.device.type == "meta":
            return
        ops, is_flat = self._slice(r.storage)
        if not (r.is_flat and is_flat):
            out.copy_(self.view(r).reshape(-1)[start:stop])
            return
        self._kept = None
        low, high = r.offset + start, r.offset + stop
        device = self.tape.storages[r.storage].device
        stride = max(STRIDE, block_on(device))
        for first in range(low // stride * stride, high, stride):
            a, b = max(first, low), min(first + stride, high)
            part = made = out[a - low : b - low]
            # Of an offloaded leaf too it is the device's bits.
            if out.device.type != device.type:
                made = torch.empty_like(part, device=device)
            populate(part)
            self._write(ops, r.storage, a, b, made)
            if made is not part:
                part.copy_(made)

    def _write(
        self, ops: Sequence[TapedOp], storage: int, low: int, high: int, out: Tensor
    ) -> None:
        """Writes the elements [low, high) of a storage, block by block."""
        only = ops[0]
        if len(ops) == 1 and only.how == "draw" and only.is_flat:
            at, size = low - only.target.offset, only.target.numel
            draw(only.fill, only.stream, out, at, size)  # type: ignore[arg-type]
            return
        about = self.tape.storages[storage]
        numel, block = about.numel, block_on(about.device)
        for first in range(low // block * block, high, block):
            end = min(first + block, numel)
            a, b = max(first, low), min(end, high)
            self._block(ops, storage, (first, end), (a, b), out[a - low : b - low])

    def view(self, r: Ref) -> Tensor:
        """The tensor itself, in memory that others may read too."""
        if self._kept is None or self._kept[0] != r.storage:
            self._kept = None
            self._kept = r.storage, self._whole(r.storage)
        return _seen(self._kept[1], r)

    def value(self, r: Ref) -> Any:
        """The one number that a tensor is."""
        self._slices, self._kept = {}, None  # the tape has gone on
        return self.view(r).item()

    def release(self) -> None:
        """Lets go of what was kept."""
        self._kept = None

    def _slice(self, storage: int) -> tuple[list[TapedOp], bool]:
        if storage not in self._slices:
            ops = [self.tape.ops[k] for k in self.tape.slice(storage)]
            flat = all(op.is_flat or self._is_small(op) for op in ops)
            self._slices = {storage: (ops, flat)}  # chunks of it come next
        return self._slices[storage]

    def _is_small(self, op: TapedOp) -> bool:
        return all(
            self.tape.storages[r.storage].numel <= _SMALL
            for r in (*op.reads, *op.results)
        )

    def _whole(self, storage: int) -> Tensor:
        """All elements of a storage, flat."""
        about = self.tape.storages[storage]
        ops, is_flat = self._slice(storage)
        if is_flat:
            full = torch.empty(about.numel, dtype=about.dtype, device=about.device)
            all_of = Ref(storage, about.dtype, (), (), 0, about.numel, True)
            self.write(all_of, 0, about.numel, full)
            return full
        last = {
            r.storage: k for k, op in enumerate(ops) for r in (*op.reads, *op.results)
        }
        done: dict[int, list[int]] = {}
        for number, k in last.items():
            done.setdefault(k, []).append(number)
        memory = _ReplayMemory(self.tape, _written(ops))
        for k, op in enumerate(ops):
            _run(memory, op, 0, op.target.numel)
            for number in done.get(k, ()):
                if number != storage:
                    memory.drop(number)
        return memory.of(storage)[0]

    def _block(
        self,
        ops: Sequence[TapedOp],
        storage: int,
        block: _Span,
        part: _Span,
        out: Tensor,
    ) -> None:
        """Computes one block of a storage, and writes a part of it to ``out``."""
        todo, spans = self._needed(ops, storage, block)
        memory = _ReplayMemory(self.tape, _written([op for op, *_ in todo]), spans)
        for op, start, stop in todo:
            _run(memory, op, start, stop)
        found, base = memory.of(storage)
        out.copy_(found[part[0] - base : part[1] - base])

    def _needed(
        self, ops: Sequence[TapedOp], storage: int, block: _Span
    ) -> tuple[list[tuple[TapedOp, int, int]], dict[int, _Span]]:
        """The operators to run for one block, with ranges, and the ranges of memory."""
        need, spans = {storage: block}, {storage: block}

        def widen(number: int, start: int, stop: int) -> None:
            for known in (need, spans):
                a, b = known.get(number, (start, stop))
                known[number] = min(a, start), max(b, stop)

        todo: list[tuple[TapedOp, int, int]] = []
        for op in reversed(ops):
            if not op.is_flat:  # small
                touched = {r.storage for r in op.results}
                if touched & need.keys():
                    todo.append((op, 0, op.target.numel))
                    for number in (*touched, *(r.storage for r in op.reads)):
                        widen(number, 0, self.tape.storages[number].numel)
                continue
            r = op.target
            wanted = need.get(r.storage)
            if wanted is None:
                continue
            start, stop = max(wanted[0], r.offset), min(wanted[1], r.offset + r.numel)
            reads_target = any(x.storage == r.storage for x in op.reads)
            if not op.writes or (start, stop) == wanted and not reads_target:
                del need[r.storage]  # older values there are not needed
            if start >= stop or op.how == "empty":
                continue
            start, stop = start - r.offset, stop - r.offset
            todo.append((op, start, stop))
            for x in op.reads:
                if x.shape:
                    widen(x.storage, x.offset + start, x.offset + stop)
                else:
                    widen(x.storage, x.offset, x.offset + 1)
        return todo[::-1], spans


class _ReplayMemory:
    """The memory of a replay, by storage: a flat range of it, and its beginning."""

    def __init__(
        self, tape: InitTape, written: set[int], spans: dict[int, _Span] | None = None
    ):
        self.tape, self.written, self.spans = tape, written, spans
        self.held: dict[int, tuple[Tensor, int]] = {}

    def bind(self, number: int, x: Tensor, base: int) -> None:
        self.held[number] = x, base

    def drop(self, number: int) -> None:
        self.held.pop(number, None)

    def of(self, number: int) -> tuple[Tensor, int]:
        if number not in self.held:
            about = self.tape.storages[number]
            start, stop = self.spans[number] if self.spans else (0, about.numel)
            if about.given is None:
                x = torch.empty(stop - start, dtype=about.dtype, device=about.device)
            else:
                x = about.given[start:stop]
                x = x.clone() if number in self.written else x
            self.held[number] = x, start
        return self.held[number]

    def piece(self, r: Ref, start: int, stop: int) -> Tensor:
        """Elements of a flat tensor; of one without dims, itself."""
        x, base = self.of(r.storage)
        at = r.offset - base
        return x[at + start : at + stop] if r.shape else x[at]

    def view(self, r: Ref) -> Tensor:
        return _seen(self.of(r.storage)[0], r)


def _seen(x: Tensor, r: Ref) -> Tensor:
    """The tensor at a place of a storage, whose elements are all in ``x``."""
    bare = torch.empty(0, dtype=r.dtype, device=x.device)
    memory = x.untyped_storage()
    seen = bare.set_(memory, r.offset, r.shape, r.stride)  # type: ignore[call-overload]
    seen = seen.conj() if r.conj else seen
    return torch.neg(seen) if r.neg else seen


def _written(ops: Sequence[TapedOp]) -> set[int]:
    return {r.storage for op in ops for r in op.writes}


def _run(memory: _ReplayMemory, op: TapedOp, start: int, stop: int) -> None:
    """Runs an operator, for the elements [start, stop) of its target."""
    r = op.target
    if op.how == "draw" and not op.is_flat:
        flat = torch.empty(
            r.numel, dtype=r.dtype, device=memory.of(r.storage)[0].device
        )
        draw(op.fill, op.stream, flat, 0, r.numel)  # type: ignore[arg-type]
        memory.view(r).copy_(flat.view(r.shape))
    elif not op.is_flat or op.how == "math" and not r.shape:
        _run_whole(memory, op)
    elif op.how == "fill":
        memory.piece(r, start, stop).fill_(op.value)
    elif op.how == "draw":
        piece = memory.piece(r, start, stop).view(-1)
        draw(op.fill, op.stream, piece, start, r.numel)  # type: ignore[arg-type]
    elif op.how == "copy":
        memory.piece(r, start, stop).copy_(memory.piece(op.reads[0], start, stop))
    elif op.how == "math":
        device = memory.tape.storages[r.storage].device
        piece = PIECE if device.type == "cpu" else max(PIECE, block_on(device))
        for first in range(start, stop, piece):
            _compute(memory, op, first, min(first + piece, stop))


def _compute(memory: _ReplayMemory, op: TapedOp, start: int, stop: int) -> None:
    given = exchange((op.args, op.kwargs), Ref, lambda r: memory.piece(r, start, stop))
    found = op.func(*given[0], **given[1])
    if not op.writes:
        memory.piece(op.target, start, stop).copy_(found)


def _run_whole(memory: _ReplayMemory, op: TapedOp) -> None:
    """Runs an operator as it was run, and keeps the memory that it made."""
    if op.how == "empty":
        return
    args, kwargs = exchange((op.args, op.kwargs), Ref, memory.view)
    if op.stream is None:
        out = op.func(*args, **kwargs)
    else:
        out = seeded(op.func, op.stream, args, kwargs)
    results = out if isinstance(out, (tuple, list)) else (out,)
    for r, x in zip(op.makes, results, strict=True):
        if r is None:
            continue
        about = memory.tape.storages[r.storage]
        read = {_torch.storage_key(memory.of(ref.storage)[0]) for ref in op.reads}
        lies = x.dtype, x.stride(), x.storage_offset()
        size = x.untyped_storage().nbytes()
        if (
            lies == (about.dtype, r.stride, r.offset)
            and r.offset == 0
            and size == about.numel * about.dtype.itemsize
            and _torch.storage_key(x) not in read
        ):
            memory.bind(r.storage, x.as_strided((about.numel,), (1,)), 0)
        else:
            memory.view(r).copy_(x)

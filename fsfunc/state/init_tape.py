"""Recording of an init function on fake tensors, to be replayed in part.

The function runs on fake tensors, and each operator that makes or writes memory is
recorded with its operands: a number for their storage, and their place in it. Views
need no record, and aliases, chunks and ``.data`` are right by themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc._torch import fake_modes
from fsfunc.comm.attribution import source_line
from fsfunc.comm.descriptions import checksums, stated
from fsfunc.runtime.random_blocks import Streams
from fsfunc.state.taped_ops import Ref, Storage, TapedOp, exchange, how_of

_aten: Any = torch.ops.aten
_RESIZING = {_aten.resize_, _aten.resize_as_}
_SEEDED = torch.Tag.nondeterministic_seeded
_METADATA = torch.Tag.inplace_view


def _all(values: Any, kind: Any) -> list[Any]:
    found: list[Any] = []
    exchange(values, kind, found.append)
    return found


class InitTape(_torch.DispatchMode):
    """The dispatch mode that records operators, above the mode of fake tensors.

    What is computed from real tensors alone is computed at once: a function that reads
    a file, or ``torch.tensor(...)``, has its values. A fake value that is written into
    a real tensor is written into a copy of it, when that is made. A number that the
    function reads (``if mask.any()``) is computed by ``value``.
    """

    def __init__(self, fake: Any, draws: bool = True):
        super().__init__()
        self.fake = fake
        self.value: Callable[[Ref], Any] | None = None
        self.ops: list[TapedOp] = []
        self.storages: list[Storage] = []
        self._numbers: dict[int, int] = {}
        self._shadows: dict[int, Tensor] = {}  # of given tensors, by storage
        self._streams = Streams(draws)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _aten.lift_fresh.default and not _is_fake(args[0]):
            return args[0]  # torch.tensor(...): it has values
        tensors = _all((args, kwargs), Tensor)
        arguments = _torch.arguments_of(func, args, kwargs)
        how, value = how_of(func, arguments)
        if tensors and how in ("copy", "math", "plain") and _SEEDED not in func.tags:
            if not any(map(self._is_of_the_run, tensors)):
                return self._at_once(func, args, kwargs)
        args, kwargs = exchange((args, kwargs), Tensor, self._shown)
        if func is _aten._local_scalar_dense.default and self.value is not None:
            with _torch.beneath_all_modes():
                return self.value(self.ref(args[0]))
        before = exchange((args, kwargs), Tensor, self.ref)  # their places before it
        wrote = _torch.written(func, *before)
        out = func(*args, **kwargs)
        fake_modes.forget_fakes(self.fake)
        if _METADATA in func.tags:
            if func.overloadpacket in _RESIZING:
                self._check_size(args[0])
            return out
        makes = tuple(self._made(x) for x in _results(out))
        writes = tuple(_all(wrote, Ref))
        if not writes and not any(makes):
            return out
        reads = _read(func, how, before, copied="src" if writes else "self")
        op = TapedOp(func, before[0], before[1], reads, writes, makes, how)
        if how == "fill":
            op.value = value
        elif how == "draw" or _SEEDED in func.tags:
            op.fill = value
            device = self.storages[op.target.storage].device
            op.stream = self._streams.next(arguments.get("generator"), device)
        for number in {r.storage for r in op.results}:
            self.storages[number].writers.append(len(self.ops))
        self.ops.append(op)
        return out

    # The places of tensors

    def ref(self, x: Tensor) -> Ref:
        """The storage and strides of a fake tensor of the run."""
        number = self._numbers.get(_torch.storage_key(x))
        if number is None:
            raise RuntimeError(
                f"a tensor of shape {list(x.shape)} without values, made outside the "
                f"init function, is used in it at {source_line()}: make it inside"
            )
        shape = tuple(x.shape)
        return Ref(
            number, x.dtype, shape, x.stride(), int(x.storage_offset()), x.numel(),
            x.is_contiguous() and x.dtype == self.storages[number].dtype
            and not (x.is_conj() or x.is_neg()), x.is_conj(), x.is_neg(),
        )  # fmt: skip

    def found(self, x: Tensor) -> Ref | None:
        """The same of a tensor that the function returned; None where it was given."""
        if not self._is_of_the_run(x):
            return None
        return self.ref(self._shown(x))

    def _is_of_the_run(self, x: Tensor) -> bool:
        """True where the values of ``x`` are computed by the tape."""
        if _is_fake(x):
            return True
        shadow = self._shadows.get(_torch.storage_key(x))
        if shadow is None:
            return False
        return bool(self.storages[self._numbers[_torch.storage_key(shadow)]].writers)

    def _know(self, x: Tensor, given: Tensor | None = None) -> int:
        size = x.untyped_storage().nbytes() // x.element_size()
        self._numbers[_torch.storage_key(x)] = number = len(self.storages)
        device = _torch.device_of(x)
        storage = Storage(x.dtype, device, size, given, alive=x.untyped_storage())
        self.storages.append(storage)
        return number

    def _made(self, x: Any) -> Ref | None:
        """The storage of a result, if it is a new one."""
        if not isinstance(x, Tensor) or _torch.storage_key(x) in self._numbers:
            return None
        self._know(x)
        return self.ref(x)

    def _shown(self, x: Tensor) -> Tensor:
        """A given tensor without its values, lying as it does in its storage."""
        if _is_fake(x):
            return x
        key = _torch.storage_key(x)
        if key not in self._shadows:
            size = x.untyped_storage().nbytes() // x.element_size()
            with _torch.beneath_all_modes():
                whole = torch.empty(0, dtype=x.dtype, device=x.device)
                whole.set_(x.untyped_storage(), 0, (size,))  # type: ignore[call-overload]
            self._shadows[key] = fake_modes.fake_of(self.fake, whole)
            self._know(self._shadows[key], whole)
        with torch.no_grad():
            return _torch.view_at(self._shadows[key], _torch.place_of(x))

    def _check_size(self, x: Tensor) -> None:
        storage = self.storages[self._numbers[_torch.storage_key(x)]]
        if x.untyped_storage().nbytes() > storage.numel * storage.dtype.itemsize:
            raise RuntimeError(
                f"the init function makes a tensor longer in place at {source_line()}: "
                "make a new one, or give the parameters whole: init_fn() in place of "
                "init_fn"
            )

    def _at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on given tensors; what the tape knows of them stays."""
        for x in _all(_torch.written(func, args, kwargs), Tensor):
            shadow = self._shadows.pop(_torch.storage_key(x), None)
            if shadow is not None:  # a later reader finds what is written now
                storage = self.storages[self._numbers[_torch.storage_key(shadow)]]
                given = storage.given
                assert given is not None, "only given tensors have a shadow"
                with _torch.beneath_all_modes():
                    storage.given = given.clone()
        with _torch.beneath_all_modes():
            return func(*args, **kwargs)

    def lines(self) -> list[tuple[str, str]]:
        """A description that equal init functions share: (subject, text)."""
        keys = sorted({op.stream[0] for op in self.ops if op.stream is not None})
        read = sorted({r.storage for op in self.ops for r in op.reads})
        given = [x for x in (self.storages[i].given for i in read) if x is not None]
        with _torch.beneath_all_modes():
            sums = checksums(given)
        return [
            ("the numbers of their generators", str(keys)),
            *[(f"given tensor {i}", f"checksum {n}") for i, n in enumerate(sums)],
            *[
                (f"operator {i}", stated((str(op.func), op.args, op.kwargs)))
                for i, op in enumerate(self.ops)
            ],
        ]

    # What must be run again

    def slice(self, storage: int) -> list[int]:
        """The operators on which a storage's values depend at the end, in order."""
        heap: list[int] = []
        seen: set[int] = set()

        def need(number: int, before: int) -> None:
            writers = self.storages[number].writers
            i = bisect_left(writers, before)
            if i and writers[i - 1] not in seen:
                seen.add(writers[i - 1])
                heappush(heap, -writers[i - 1])

        need(storage, len(self.ops))
        while heap:
            k = -heappop(heap)
            op = self.ops[k]
            for r in op.writes:
                if not (op.how in ("fill", "draw", "copy") and self._covers(r)):
                    need(r.storage, k)
            for r in op.reads:
                need(r.storage, k)
        return sorted(seen)

    def _covers(self, r: Ref) -> bool:
        return r.is_flat and r.numel == self.storages[r.storage].numel


def _read(func: Any, how: str, given: Any, copied: str) -> tuple[Ref, ...]:
    """The tensors whose values an operator reads."""
    if how in ("empty", "fill", "draw"):
        return ()
    if how == "copy":
        # What is written is not read; of a copy of itself nothing would change.
        return (_torch.arguments_of(func, *given)[copied],)
    return tuple(_all(given, Ref))


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, _torch.FakeTensor)


def _results(out: Any) -> Iterator[Any]:
    yield from out if isinstance(out, (tuple, list)) else (out,)

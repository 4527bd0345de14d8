"""The end of a recompute that its backward does not read, which is not computed.

What a unit computes after the last value that autograd saves, such as a block's last
product and the sum with its residual, only makes the unit's output, which the backward
has no use for. The first run of a call notes where that tail begins; a recompute gives
memory that nobody has written for what its operators would give. What was given so must
be held by nothing but the call's output: else the call is run once more as a whole.

Source: torch.utils.checkpoint, whose recompute stops there; here it goes on, since the
output's graph is differentiated.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsfunc import _torch
from fsfunc._torch import UnheardMode
from fsfunc.comm.attribution import is_internal
from fsfunc.core.execution_context import run_as, running
from fsfunc.runtime.memory import StorageTable


class TailOp(NamedTuple):
    """An operator of a tail: its arguments, and what it gave.

    Args:
        signature: of the arguments: shapes, strides and dtypes, and what is no tensor.
        outs: (size, stride, dtype, device) of each; None: views of an argument, which
            are made as ever.
    """

    func: Any
    signature: Any
    outs: tuple[Any, ...] | None


class Tail(NamedTuple):
    """The number of a unit call's first operator in its tail; and the tail, if any.

    ``inner``: whether the call computes gradients itself, which read what it saves.
    """

    start: int
    ops: tuple[TailOp, ...]
    inner: bool = False


NO_TAIL = Tail(0, ())


class _Numbering(UnheardMode):
    """Numbers the operators of a unit's function."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.made = 0, StorageTable[int]()

    def __call__(self, fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        with run_as(replace(running(), around=None)), _Reading(self), self:
            return fn(*args, **keywords)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Asking for a device; and autograd's own, of an output that it saves.
        if func.namespace == "prim" or func is torch.ops.aten.detach.default:
            return func(*args, **kwargs)
        if is_internal():
            self.meet()
            return func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        return self.run(number, func, args, kwargs)

    def meet(self) -> None:
        """The library is at work within the function, as in a collective."""

    def run(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def is_unheld(self, outs: Sequence[Any], first: int = 0) -> bool:
        """True if nothing but ``outs`` holds what operators from ``first`` on made."""
        at: dict[int, set[int]] = {}
        times = Counter(map(id, outs))
        for i in range(len(outs)):
            if isinstance(outs[i], Tensor):
                at.setdefault(_torch.storage_key(outs[i]), set()).add(i)
        for key, by in self.made.facts.items():
            if by < first:
                continue
            here = at.get(key, ())
            tensors = len({id(outs[i]) for i in here})
            if _torch.uses_of(key) != tensors + 1:  # and its handle
                return False
            for i in here:
                others = sys.getrefcount(outs[i]) - times[id(outs[i])] - 1
                if others or not _torch.is_held_once(outs[i]):
                    return False
        return True


# They give Python the values of a tensor, and no operator tells.
_READERS = {
    *(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__),
    *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage),
    Tensor.__cuda_array_interface__.__get__,  # type: ignore[attr-defined]
    *(Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__),
    *(Tensor.apply_, Tensor.map_, Tensor.map2_),
}


class _Reading(TorchFunctionMode):
    """Tells where values are read that no operator reads."""

    def __init__(self, numbering: _Numbering):
        super().__init__()
        self.numbering = numbering

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # A compiler gives readers no place in a graph, and cannot look into this set.
        if not torch.compiler.is_compiling() and func in _READERS:
            self.numbering.meet()
        return func(*args, **(kwargs or {}))


class TailNotes(_Numbering):
    """Notes the tail of a unit call, as its first run goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.inner = 0, False
        self.begun = _torch.next_sequence_number()
        # With the number that the next node of autograd's graph will have.
        self.ops: list[tuple[int, TailOp]] = []

    def meet(self) -> None:
        self.start = self.count
        if self.ops:
            self.ops, self.made = [], StorageTable()

    def run(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        at = _torch.next_sequence_number()
        self.inner = self.inner or _torch.current_node() is not None
        out = func(*args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        # Without gradients runs a function of somebody's, which may read anything.
        waits = _may_wait(func) and torch.is_grad_enabled()
        if not waits or not all(isinstance(x, Tensor) for x in outs):
            self.meet()
        elif _shares(outs, (args, kwargs)):
            self.ops.append((at, TailOp(func, None, None)))
        else:
            metas = tuple((x.size(), x.stride(), x.dtype, x.device) for x in outs)
            for x in outs:
                self.made[x] = len(self.ops)
            self.ops.append((at, TailOp(func, _signature((args, kwargs)), metas)))
        return out

    def tail(self, outs: Sequence[Any]) -> Tail:
        """The tail of the call, which gave ``outs`` and is over."""
        roots = [x.grad_fn for x in outs if isinstance(x, Tensor)]
        last, saved = _torch.last_saving(roots, self.begun)
        first = sum(at <= last for at, _ in self.ops)
        for x in saved:
            first = max(first, self.made.facts.get(_torch.storage_key(x), -1) + 1)
        ops = tuple(op for _, op in self.ops[first:])
        works = any(op.outs is not None for op in ops) and self.is_unheld(outs, first)
        return Tail(self.start + first, ops if works else (), self.inner)


class TailSkipped(Exception):
    """An operator would read memory that was not computed."""


class TailSkipping(_Numbering):
    """A recompute without its tail."""

    def __init__(self, tail: Tail):
        super().__init__()
        self.tail, self.skips, self.has_skipped = tail, True, False

    def meet(self) -> None:
        self.skips = False
        if self.has_skipped:
            raise TailSkipped

    def run(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        at = number - self.tail.start
        if at < 0 or not self.skips:
            return func(*args, **kwargs)
        op = self.tail.ops[at] if at < len(self.tail.ops) else None
        if op is None or op.func is not func:
            self.meet()
        elif op.outs is not None:
            if op.signature == _signature((args, kwargs)):
                return self._unwritten(func, op.outs)
            self.meet()
        return func(*args, **kwargs)

    def _unwritten(self, func: Any, metas: Sequence[Any]) -> Any:
        self.has_skipped = True
        outs = [unwritten(*meta) for meta in metas]
        for x in outs:
            self.made[x] = 0
        one = len(func._schema.returns) == 1
        one = one and isinstance(func._schema.returns[0].type, torch.TensorType)
        return outs[0] if one else tuple(outs)


def unwritten(size: Any, stride: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """A tensor of any values."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@functools.cache
def _may_wait(func: Any) -> bool:
    """True if an operator does nothing but compute new tensors."""
    if func.namespace != "aten" or func._schema.is_mutable:
        return False
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return not draws and not _torch.tells_places(func)


def _shares(outs: Sequence[Any], given: Any) -> bool:
    """True if all outputs lie in memory that was given."""
    keys = {_torch.storage_key(x) for x in _tensors(given)}
    return all(isinstance(x, Tensor) and _torch.storage_key(x) in keys for x in outs)


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (tuple, list)):
        return []
    return [x for one in given for x in _tensors(one)]


def _signature(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.size(), given.stride(), given.dtype, given.device
    if isinstance(given, dict):
        return tuple((key, _signature(x)) for key, x in given.items())
    if isinstance(given, (tuple, list)):
        return tuple(map(_signature, given))
    return given

"""Recorded operators: the storages of their operands, and a kind of operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsfunc.runtime.random_blocks import Fill, Stream, fill_of

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor's storage on the tape, and its strides and offset there."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int
    is_flat: bool  # one range of its storage, in order
    conj: bool = False
    neg: bool = False


@dataclass
class Storage:
    """Memory that operators of the tape made, or that they were given.

    Args:
        given: the tensor that is there already, flat and over all of the storage.
        writers: the numbers of the operators that wrote into it, in order.
    """

    dtype: torch.dtype
    device: torch.device
    numel: int
    given: Tensor | None = None
    writers: list[int] = field(default_factory=list)
    alive: Any = None  # its key is the address, which must not be taken again


@dataclass
class TapedOp:
    """One operator that made memory or wrote into it.

    ``how`` is what it does to element i of its target: nothing (``"empty"``), fill it
    with ``value``, draw it, copy or compute it from the elements i of its operands
    (``"copy"``, ``"math"``); or anything at all (``"plain"``).
    """

    func: Any
    args: Any
    kwargs: Any
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    makes: tuple[Ref | None, ...]  # by result; None: not new
    how: str
    value: Any = None
    fill: Fill | None = None
    stream: Stream | None = None

    @property
    def results(self) -> tuple[Ref, ...]:
        """The tensors that it wrote into, and those that it made."""
        return (*self.writes, *(r for r in self.makes if r is not None))

    @property
    def target(self) -> Ref:
        return self.results[0]

    @property
    def is_flat(self) -> bool:
        """True where element i depends on element i of each operand, all contiguous."""
        shape = self.target.shape
        if len(self.results) > 1:
            return False
        return self.how != "plain" and all(
            r.is_flat and r.shape == shape or not r.shape
            for r in (self.target, *self.reads)
        )


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
_SEEDED, _POINTWISE = torch.Tag.nondeterministic_seeded, torch.Tag.pointwise


def exchange(values: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """``values``, a nest of tuples, lists and dicts, with all of one kind changed."""
    if isinstance(values, kind):
        return change(values)
    if isinstance(values, (tuple, list)):
        return type(values)(exchange(v, kind, change) for v in values)
    if isinstance(values, dict):
        return {k: exchange(v, kind, change) for k, v in values.items()}
    return values


def how_of(func: Any, arguments: dict[str, Any]) -> tuple[str, Any]:
    """The kind of an operator, see ``TapedOp.how``, and the value that it fills in."""
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
        fill = fill_of(func, arguments)
        return ("plain" if fill is None else "draw"), fill
    if packet in _COPIES:
        return "copy", None
    return ("math" if _POINTWISE in func.tags else "plain"), None

"""Chains of operators that a compiler runs as one kernel, as a plan counts them.

In the units that ``jit`` compiles, neighbouring operators that work on elements, copy
them or reduce them are one. It reads what comes from elsewhere, and writes what
somebody elsewhere reads; what lies between stays in registers.

Source: TorchInductor's fusion of pointwise operators and reductions (Ansel et al.,
2024, section 4.4).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any

import torch

from fsfunc.planning.events import Event, Op, Ran

_aten: Any = torch.ops.aten
# Written as such operators by the compiler's decompositions, or fused as they are.
_COMPOSED = {
    _aten._to_copy, _aten.cat, _aten.native_dropout, _aten.native_dropout_backward,
    _aten.native_layer_norm, _aten.native_layer_norm_backward, _aten._softmax,
    _aten._softmax_backward_data, _aten._log_softmax, _aten.constant_pad_nd,
    _aten._log_softmax_backward_data, _aten.slice_backward, _aten.fill, _aten.full,
    _aten.zeros, _aten.ones, _aten.zeros_like, _aten.ones_like, _aten.full_like,
}  # fmt: skip


@functools.cache
def _fuses(func: Any) -> bool:
    """True if a compiler makes an operator a part of its neighbours' kernel."""
    tags = {torch.Tag.pointwise, torch.Tag.reduction}
    named = func.overloadpacket in _COMPOSED or "rms_norm" in str(func)
    return named or bool(tags.intersection(func.tags))


class _Fused:
    """One kernel: what it reads, and of what it made, what is read elsewhere."""

    def __init__(self, op: Op, at: Hashable):
        self.op, self.at = op, at
        self.read: dict[int, int] = {}  # bytes of each storage
        self.made: dict[int, int] = {}
        self.leaves: set[int] = set()

    def whole(self) -> Op:
        """It as one operator."""
        written = sum(self.made[number] for number in self.leaves)
        return self.op._replace(bytes=sum(self.read.values()) + written)


class FusedChains:
    """The chains of one plan."""

    def __init__(self) -> None:
        self.open: _Fused | None = None
        self.chains: dict[int, _Fused] = {}  # by the identity of their operators
        self.makers: dict[int, _Fused] = {}  # of storages

    def add(
        self,
        func: Any,
        op: Op,
        at: Hashable,
        read: dict[int, int],
        made: dict[int, int],
        compiled: bool,
    ) -> Op | None:
        """The operator to note for one that ran; None for a part of the last one.

        Args:
            at: its unit call and phase; ``read``, ``made``: bytes by storage.
        """
        chain = self.open
        if not compiled or op.flops or not _fuses(func):
            self.open = chain = None
        elif chain is None or chain.at != at:
            op = op._replace(name="fused")
            self.open = chain = self.chains[id(op)] = _Fused(op, at)
        for number, size in read.items():
            maker = self.makers.get(number)
            if maker is not None and maker is chain:
                continue
            if maker is not None:
                maker.leaves.add(number)
            if chain is not None:
                chain.read[number] = max(size, chain.read.get(number, 0))
        for number, size in made.items():
            if chain is not None and number not in chain.read:
                chain.made[number] = size
                self.makers[number] = chain
            else:
                self.makers.pop(number, None)
        return op if chain is None or chain.op is op else None

    def whole(self, events: Iterable[Event]) -> list[Event]:
        """The events of a plan that is over, each chain with all its bytes."""
        ops = {key: chain.whole() for key, chain in self.chains.items()}
        return [
            e._replace(op=ops[id(e.op)]) if type(e) is Ran and id(e.op) in ops else e
            for e in events
        ]

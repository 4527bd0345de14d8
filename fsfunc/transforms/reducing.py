"""Gradients on their way to the ports: summed over microbatches, then over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.attribution import label
from fsfunc.comm.groups import RankGroup, strided
from fsfunc.memory_kinds import count_as
from fsfunc.transforms.gathering import (
    Arena,
    Box,
    Passage,
    Use,
    strides,
    whole_shape,
)
from fsfunc.transforms.ports import Port

__all__ = ["Reductions"]


@dataclass
class _Reduction:
    port: Port
    work: Any
    buffer: Tensor


@dataclass
class _Held:
    """The gradient of one call, summed over ``count`` microbatches so far."""

    port: Port
    buffer: Tensor
    name: str
    count: int


class Reductions:
    """What one gradient call has to reduce, one reduction in flight at a time.

    Args:
        zero: at 1 all is reduced when the backward ends.
        where, replicas: the groups over which parts are cut, and repeated.
        depth: how many microbatch loops are around the call; what is inside them is
            summed before it is reduced.
    """

    def __init__(
        self,
        zero: int,
        where: RankGroup,
        replicas: RankGroup | None,
        arena: Arena,
        depth: int,
    ):
        self.zero, self.where, self.replicas = zero, where, replicas
        self.arena, self.depth = arena, depth
        self.in_flight: list[_Reduction] = []
        self.held: dict[Any, _Held] = {}

    def collect(
        self, passage: Passage, use: Use, box: Box, grads: Sequence[Tensor | None]
    ) -> Tensor:
        """The gradients in one buffer, in the dtype of the reduction."""
        while self.in_flight:  # its buffer is what this one may lie in
            self._finish(self.in_flight.pop(0))
        place, dtype = use.home.place, passage.reduce or box.dtype
        count = place.size * place.chunk
        if self.where.size > 1:
            buffer = self.arena.get(count, dtype, use.home.flat)
        else:  # the port keeps it: no larger memory than that
            buffer = use.home.flat.new_empty(count, dtype=dtype)
        count_as("gradients", [buffer, *grads])
        targets, sources, at = [], [], 0
        start = buffer.storage_offset()
        for layout, g in zip(use.layouts, grads, strict=True):
            offset = layout.flat.offset if layout.flat else 0
            if g is None:
                continue
            if offset > at:
                buffer[at:offset].zero_()
            at = offset + math.prod(whole_shape(layout))
            targets.append(buffer.as_strided(g.shape, strides(g.shape), start + offset))
            sources.append(strided(g))
        if at < count:
            buffer[at:].zero_()
        if targets:
            torch._foreach_copy_(targets, sources)
        return buffer

    def add(self, port: Port, buffer: Tensor, passage: Passage) -> None:
        """Takes the gradient of one call, which it reduces when all are there."""
        # Counted, not numbered: microbatches may come back in any order.
        due = math.prod(n for _, n in passage.micro[self.depth :])
        key, count = (id(port.home), passage.gathered.key), 1
        if key in self.held:
            held = self.held.pop(key)
            buffer, count = held.buffer.add_(buffer), held.count + 1
        if count < due or self.zero == 1:
            self.held[key] = _Held(port, buffer, passage.name, count)
        else:
            self._reduce(port, buffer)

    def _reduce(self, port: Port, buffer: Tensor) -> None:
        """Puts a reduction in flight, and waits for the one before."""
        place, name = port.home.place, port.home.name
        work: Any = None
        if self.where.size == 1:
            pass
        elif place.size == 1:
            work = self.where.start("psum", buffer, what=name)
        else:
            work = self.where.start("psum_scatter", buffer, what=name)
        self.in_flight.append(_Reduction(port, work, buffer))
        if len(self.in_flight) > 1:
            self._finish(self.in_flight.pop(0))

    def _finish(self, reduction: _Reduction) -> None:
        grad = reduction.buffer
        if reduction.work is not None:
            grad = reduction.work.wait()
        if self.replicas is not None and self.replicas.size > 1:
            name = reduction.port.home.name
            grad = self.replicas.start("psum", grad, what=name).wait()
        count_as("gradients", [grad])
        reduction.port.add(grad)
        if reduction.work is not None and grad is not reduction.buffer:
            self.arena.spoil(reduction.buffer)

    def finish(self) -> None:
        """Waits for all that is due; the ports then hold the gradients."""
        for held in self.held.values():
            with label(held.name, "backward"):
                self._reduce(held.port, held.buffer)
        self.held.clear()
        while self.in_flight:
            self._finish(self.in_flight.pop(0))

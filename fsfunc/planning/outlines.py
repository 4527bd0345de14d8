"""Outlines of stacks: their time and memory in closed form, before any is planned.

Of one recording of the loss: what each unit computes, keeps and weighs. An outline is
within some tens of percent of a plan. It says which of many stacks are worth one, and
which cannot fit by far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import torch

from fsfunc.comm.ledgers import Record
from fsfunc.planning.candidates import lowered, stages_of, whole_gradients
from fsfunc.planning.cost_model import collective_seconds
from fsfunc.planning.machines import Hardware
from fsfunc.planning.stacks import NODE, PIPE, Stack
from fsfunc.state.layout_rules import axes_of
from fsfunc.tracing.programs import Program, Spec

_USUAL = 0.4  # of the peak, where the hardware does not say what is usual
_BESIDE = 0.3  # of the shorter of computing and sending: what does not overlap
_OPERATORS = 60  # of a unit, forward and backward: a transformer's layer has as many
_SPLIT = 1 / 3  # of a bubble: what is left where weight gradients fill it


class Outline(NamedTuple):
    """Seconds of a step, and the bytes that a rank holds."""

    seconds: float
    bytes: int


class Outlines:
    """Outlines of stacks on one loss, batch and hardware.

    Args:
        program: of the loss, recorded on the whole batch of ``rows`` rows.
        params, moments: bytes of all of them.
    """

    def __init__(
        self,
        program: Program,
        rows: int,
        params: int,
        moments: int,
        hardware: Hardware,
    ):
        self.calls, self.rows = program.calls, rows
        self.params, self.moments, self.hardware = params, moments, hardware
        self.flops = sum(call.flops for call in self.calls)
        self.kept = sum(call.activations for call in self.calls)
        self.fullest = max((call.activations for call in self.calls), default=0)
        self.outputs = sum(
            x.nbytes
            for call in self.calls
            for x in call.outputs.leaves
            if isinstance(x, Spec)
        )

    def of(self, stack: Stack) -> Outline:
        """The outline of a stack."""
        cut = math.prod(stack.parts_by_dim.values())
        share = cut * stack.parts_of(axes_of(stack.layouts))  # of a rank, one part
        deep = stack.parts_of((PIPE,))
        again = 1 if stack.remat in (None, "never") else 4 / 3
        name = str(stack.compute or torch.float32).removeprefix("torch.")
        peak = self.hardware.peak.get(name) or max(self.hardware.peak.values())
        rate = peak * (self.hardware.utilisation or _USUAL)
        compute = 3 * again * self.flops / share / deep / rate
        passes = stack.accumulate * stack.microbatches
        host = _OPERATORS * again * len(self.calls) / deep * self.hardware.overhead
        compute = max(compute, host * passes)
        sent = self._sending(stack)
        seconds = max(compute, sent) + _BESIDE * min(compute, sent)
        if deep > 1:
            chunks = stages_of(stack) // deep
            idle = _SPLIT if "zb" in str(stack.schedule) else 1.0
            seconds += idle * compute * (deep - 1) / (stack.microbatches * chunks)
        seconds += self._offloading(stack)
        return Outline(seconds, self._held(stack, share, deep, again > 1))

    def _held(self, stack: Stack, share: int, deep: int, again: bool) -> int:
        size = 1.0 if stack.compute is None else stack.compute.itemsize / 4
        parts = share * stack.accumulate * stack.microbatches
        under_way = min(deep, stack.microbatches)
        kept = self.outputs if again else self.kept
        most = under_way * kept / deep + (self.fullest if again else 0)
        owned = self.params // stack.parts_of({PIPE, *axes_of(stack.layouts)})
        gradients = int(size * owned) if stack.zero == 1 else owned
        if stack.zero in (2, 3):
            over = stack.parts_of(a for a in stack.means if a != NODE)
            gradients = whole_gradients(stack, self.params) or owned // over
        least = lowered(stack, self.params, self.moments)
        return int(least + gradients + size * most / parts)

    def _offloading(self, stack: Stack) -> float:
        """Seconds of what goes to the host and back, which is beside nothing."""
        if (host := self.hardware.stores.get("host")) is None:
            return 0.0
        there = lowered(replace(stack, offload=()), self.params, self.moments)
        moved = 2 * (there - lowered(stack, self.params, self.moments))
        if "activations" in stack.offload:
            moved += 2 * self.kept // math.prod(stack.parts_by_dim.values())
        return moved / host[0]

    def _sending(self, stack: Stack) -> float:
        """Seconds of the transfers of parameters and gradients, one after another."""
        over = [(a, n) for a, n in stack.axes if a in stack.means and a != NODE]
        count = math.prod(n for _, n in over)
        if stack.zero is None or count == 1 or not self.hardware.levels:
            return 0.0
        parts = stack.accumulate * stack.microbatches if stack.zero == 3 else 1
        parts = stack.accumulate if stack.schedule is None else parts
        gathers = 2 * parts if stack.zero == 3 else 1
        reductions = parts if stack.each else 1
        size = 1.0 if stack.compute is None else stack.compute.itemsize / 4
        owned = self.params / stack.parts_of({PIPE, *axes_of(stack.layouts)})
        units = max(1, len(self.calls) // stack.parts_of((PIPE,)))
        whole = size * owned / units

        def each(op: str, axes: list[str], size: float) -> float:
            ranks = _ranks(stack, axes)
            sent = Fraction(int(size * (len(ranks) - 1) / len(ranks)))
            record = Record(op, tuple(axes), sent, torch.float32)
            return collective_seconds(record, ranks, self.hardware) * units

        found = each("psum_scatter", [a for a, _ in over], whole)
        found *= gathers + reductions
        if NODE in stack.means:
            found += each("psum", [NODE], 2 * whole / (count if stack.zero else 1))
        return found


def _ranks(stack: Stack, axes: Sequence[str]) -> list[int]:
    """The ranks of the first group along these axes, in row-major order."""
    step, spans = 1, []
    for name, size in reversed(stack.axes):
        spans.insert(0, range(0, size * step, step) if name in axes else (0,))
        step *= size
    return [sum(place) for place in itertools.product(*spans)]

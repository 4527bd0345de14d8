"""Outlines of stacks: their time and memory in closed form, before any is planned.

Of one recording of the loss: what each unit computes, keeps and weighs. An outline is
within some tens of percent of a plan. It says which of many stacks are worth one, and
which cannot fit by far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import torch

from fsfunc.comm.ledgers import Record
from fsfunc.planning.candidates import lowered, size_in, stages_of
from fsfunc.planning.cost_model import collective_seconds
from fsfunc.planning.machines import Hardware
from fsfunc.planning.stacks import DATA, NODE, PIPE, Stack
from fsfunc.state.layout_rules import axes_of
from fsfunc.tracing.programs import Program, Spec

_USUAL = 0.4  # of the peak, where the hardware does not say what is usual
_BESIDE = 0.3  # of the shorter of computing and sending: what does not overlap
_OPERATORS = 60  # of a unit, forward and backward: a transformer's layer has as many
_ALIKE = 0.1  # of two outlines, which tell no smaller difference
_ROUNDS = 4  # of a loop of equal parts, those that a plan runs
_SPLIT = 1 / 3  # of a bubble: what is left where weight gradients fill it


# Sizes of axes, and the collectives of a forward over them with their counts.
Sent = tuple[Mapping[str, int], Mapping[Record, int]]


class Outline(NamedTuple):
    """Seconds of a step, the bytes that a rank holds, and unit calls of a plan."""

    seconds: float
    bytes: int
    calls: int

    @property
    def order(self) -> tuple[int, int, float]:
        """A key: of two that are as fast, as far as it can tell, the easier to plan."""
        about = round(math.log(max(self.seconds, 1e-9)) / math.log1p(_ALIKE))
        return about, self.calls, self.seconds


class Outlines:
    """Outlines of stacks on one loss, batch and hardware.

    Args:
        program: of the loss, recorded on the whole batch of ``rows`` rows.
        params, moments: bytes of all of them.
        sent: by axes of layouts, what a forward of all rows sent over them.
    """

    def __init__(
        self,
        program: Program,
        rows: int,
        params: int,
        moments: int,
        hardware: Hardware,
        sent: Mapping[frozenset[str], Sent] = {},
    ):
        self.sent = sent
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
        stages = stages_of(stack)
        if len(self.calls) > stages > 1:  # the longest stage is waited for
            compute *= math.ceil(len(self.calls) / stages) * stages / len(self.calls)
        seconds = max(compute, sent) + _BESIDE * min(compute, sent)
        if deep > 1:
            chunks = stages // deep
            idle = _SPLIT if "zb" in str(stack.schedule) else 1.0
            seconds += idle * compute * (deep - 1) / (stack.microbatches * chunks)
        seconds += self._offloading(stack) + self._within(stack, again > 1) / deep
        held = self._held(stack, share, deep, again > 1)
        rounds = min(stack.accumulate, _ROUNDS) * stack.microbatches
        return Outline(seconds, held, rounds * len(self.calls))

    def _held(self, stack: Stack, share: int, deep: int, again: bool) -> int:
        filled = "zb" in str(stack.schedule)  # weight gradients come later, and wait
        size, parts = size_in(stack.compute), stack.accumulate * stack.microbatches
        under_way = min(deep, stack.microbatches)
        owned = self.params / stack.parts_of({PIPE, *axes_of(stack.layouts)})
        unit = owned * deep / max(1, len(self.calls))
        least = lowered(stack, self.params, self.moments)
        kept = self.outputs if again and not filled else self.kept
        most = under_way * kept / deep + (self.fullest if again else 0)
        most *= size / share / parts
        if stack.zero == 3 or size < 1 and not stack.zero:  # gathered, or cast
            waits = filled or stack.zero != 3 and not again
            most += size * (under_way * owned if waits else 2 * unit)
        sums = self._gradients(stack, owned)
        beside = unit * (size + size_in(stack.reduce or stack.compute))
        before = sums if parts > 1 else 0
        return int(least + max(most + before, sums) + beside)

    def _gradients(self, stack: Stack, owned: float) -> float:
        """Bytes of gradients at the end of a backward: of means, or of their parts."""
        several = stack.accumulate * stack.microbatches > 1
        over = stack.parts_of(a for a in stack.means if a != NODE)
        if stack.each and stack.zero != 1:  # summed as they come
            return owned / (over if stack.zero else 1)
        size = size_in(stack.reduce or stack.compute)
        if stack.zero in (2, 3) and not several:
            return owned / over
        return size * owned

    def _offloading(self, stack: Stack) -> float:
        """Seconds of what goes to the host and back, which is beside nothing."""
        if (host := self.hardware.stores.get("host")) is None:
            return 0.0
        there = lowered(replace(stack, offload=()), self.params, self.moments)
        moved = 2 * (there - lowered(stack, self.params, self.moments))
        if "activations" in stack.offload:
            moved += 2 * self.kept // math.prod(stack.parts_by_dim.values())
        return moved / host[0]

    def _within(self, stack: Stack, again: bool) -> float:
        """Seconds of what units send over axes of layouts, which is waited for.

        A backward sends as much as a forward does.
        """
        over = dict(stack.split_over)
        sizes, sent = self.sent.get(frozenset(over), ({}, {}))
        rows = stack.parts_of((DATA, NODE))
        passes = stack.accumulate * stack.microbatches
        part, seconds = size_in(stack.compute) / (rows * passes), 0.0
        for record, count in sent.items():
            ranks = _ranks(stack, record.axis)
            then = math.prod(sizes[a] for a in record.axis)
            now = (1 - 1 / len(ranks)) / (1 - 1 / then)  # of a ring
            size = Fraction(int(record.bytes * part * now))
            each = replace(record, bytes=size)
            each = collective_seconds(each, ranks, self.hardware)
            seconds += each * count * passes
        return seconds * (3 if again else 2)

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
        size = size_in(stack.compute)
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

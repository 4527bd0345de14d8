"""Outlines of stacks: their time and memory in closed form, before any is planned.

A plan costs some 0.1 s or 1 s, an outline 0.1 ms. So `trials` asks the outlines of all
stacks which are worth a plan, and which cannot fit by far. An outline knows of each
unit what one recording of the loss says: FLOPs, bytes that it saves, its parameters.
It is within some tens of percent of a plan::

    seconds = max(compute, transfers) + 0.3 min(compute, transfers) + bubble + ...
    bytes   = state + max(activations + sums of gradients, gradients) + what is in use
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
from fsfunc.planning.candidates import (
    ScheduleFacts,
    least_state_bytes,
    schedule_facts,
    size_in,
    stages_of,
)
from fsfunc.planning.cost_model import collective_seconds
from fsfunc.planning.machines import Hardware
from fsfunc.planning.stacks import DATA, NODE, PIPE, Stack
from fsfunc.state.layout_rules import axes_of
from fsfunc.tracing.programs import Program, Spec, TracedCall

_USUAL = 0.4  # the share of the peak, if the hardware does not say what is usual
_BESIDE = 0.3  # the share of the shorter of computing and sending that does not overlap
_OPERATORS = 60  # of a unit, forward and backward: a transformer's layer has as many
_ALIKE = 0.1  # two outlines that differ by less are equal
_ROUNDS = 4  # how many of a loop's equal parts a plan runs
_SPLIT = 1 / 3  # the share of a bubble that is left if weight gradients fill it


# (sizes of axes, counts of the collectives that a recorded forward makes over them)
Sent = tuple[Mapping[str, int], Mapping[Record, int]]


class Outline(NamedTuple):
    """Seconds of a step, bytes that a rank holds, and unit calls that a plan runs."""

    seconds: float
    bytes: int
    calls: int

    @property
    def order(self) -> tuple[int, int, float]:
        """A sort key: by time and, of about equal ones, by how long a plan takes."""
        about = round(math.log(max(self.seconds, 1e-9)) / math.log1p(_ALIKE))
        return about, self.calls, self.seconds


class Outlines:
    """Outlines of stacks on one loss, batch and hardware.

    Args:
        program: the loss's, recorded on the whole batch of ``rows`` rows.
        params, moments: bytes of all of them.
        sent: by axes of layouts, what a forward of all rows sent over them.

    Attributes:
        saved, largest_saved: bytes that all units save for their backward, and the unit
            that saves most.
        outputs: bytes of all units' outputs.
    """

    calls: tuple[TracedCall, ...]
    rows: int
    params: int
    moments: int
    hardware: Hardware

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
        self.flops: int = sum(call.flops for call in self.calls)
        self.saved: int = sum(call.activations for call in self.calls)
        self.largest_saved: int = max(
            (call.activations for call in self.calls), default=0
        )
        self.outputs: int = sum(
            x.nbytes
            for call in self.calls
            for x in call.outputs.leaves
            if isinstance(x, Spec)
        )

    def outline(self, stack: Stack) -> Outline:
        """Returns the outline of a stack."""
        parts = math.prod(stack.parts_by_dim.values())
        share = parts * stack.parts_of(axes_of(stack.layouts))  # 1 / a rank's part
        n_stage_ranks = stack.parts_of((PIPE,))
        recompute_factor = 1 if stack.remat in (None, "never") else 4 / 3
        name = str(stack.compute or torch.float32).removeprefix("torch.")
        peak = self.hardware.peak.get(name) or max(self.hardware.peak.values())
        rate = peak * (self.hardware.utilisation or _USUAL)
        # A backward computes twice what a forward does; a recompute one forward more.
        compute = 3 * recompute_factor * self.flops / share / n_stage_ranks / rate
        passes = stack.accumulate * stack.microbatches
        # Small units are bound by the host, which launches each operator.
        launch_seconds = (
            _OPERATORS
            * recompute_factor
            * len(self.calls)
            / n_stage_ranks
            * self.hardware.overhead
        )
        compute = max(compute, launch_seconds * passes)
        transfer_seconds = self._transfer_seconds(stack)
        stages, facts = stages_of(stack), _facts_of(stack)
        if len(self.calls) > stages > 1:  # all wait for the longest stage
            compute *= math.ceil(len(self.calls) / stages) * stages / len(self.calls)
        seconds = max(compute, transfer_seconds) + _BESIDE * min(
            compute, transfer_seconds
        )
        # (P - 1) / (M · v) of the computing, as the schedules' docstrings have it.
        if n_stage_ranks > 1:
            chunks = stages // n_stage_ranks
            bubble_share = _SPLIT if facts.splits_backward else 1.0
            seconds += (
                bubble_share
                * compute
                * (n_stage_ranks - 1)
                / (stack.microbatches * chunks)
            )
        seconds += (
            self._offload_seconds(stack)
            + self._layout_seconds(stack, recompute_factor > 1) / n_stage_ranks
        )
        peak_bytes = self._peak_bytes(stack, share, n_stage_ranks, recompute_factor > 1)
        rounds = min(stack.accumulate, _ROUNDS) * stack.microbatches
        return Outline(seconds, peak_bytes, rounds * len(self.calls))

    def _peak_bytes(
        self, stack: Stack, share: int, n_stage_ranks: int, recomputes: bool
    ) -> int:
        """Returns the bytes that the fullest rank holds.

        Args:
            share: into how many parts activations are cut, beside stages and passes.
            n_stage_ranks: the ranks along "pipe".
            recomputes: whether units are recomputed.
        """
        # A split backward holds a unit's activations until its weight gradients.
        facts = _facts_of(stack)
        fills_bubbles = facts.splits_backward
        size, parts = size_in(stack.compute), stack.accumulate * stack.microbatches
        under_way = facts.held
        stage_params = self.params / stack.parts_of({PIPE, *axes_of(stack.layouts)})
        unit_params = stage_params * n_stage_ranks / max(1, len(self.calls))
        state_bytes = least_state_bytes(stack, self.params, self.moments)
        saved = self.outputs if recomputes and not fills_bubbles else self.saved
        activations = under_way * saved / n_stage_ranks + (
            self.largest_saved if recomputes else 0
        )
        activations *= size / share / parts
        # Parameters are gathered (zero=3), or cast, for a unit's run. They stay until
        # its backward if that comes later, without a recompute.
        if stack.zero == 3 or size < 1 and not stack.zero:
            keeps_whole = fills_bubbles or stack.zero != 3 and not recomputes
            activations += size * (
                under_way * stage_params if keeps_whole else 2 * unit_params
            )
        gradient_sums = self._gradient_bytes(stack, stage_params)
        in_use = unit_params * (size + size_in(stack.reduce or stack.compute))
        earlier_sums = gradient_sums if parts > 1 else 0
        return int(
            state_bytes + max(activations + earlier_sums, gradient_sums) + in_use
        )

    def _gradient_bytes(self, stack: Stack, stage_params: float) -> float:
        """Returns the bytes of gradients at the end of a backward.

        They are whole, or this rank's shards if reduced as they come.
        """
        accumulates = stack.accumulate * stack.microbatches > 1
        n_shards = stack.parts_of(a for a in stack.batch_axes if a != NODE)
        if stack.reduces_each and stack.zero != 1:  # summed as they come
            return stage_params / (n_shards if stack.zero else 1)
        size = size_in(stack.reduce or stack.compute)
        if stack.zero in (2, 3) and not accumulates:
            return stage_params / n_shards
        return size * stage_params

    def _offload_seconds(self, stack: Stack) -> float:
        """Returns the seconds of copies to the host and back, which overlap nothing."""
        if (host := self.hardware.stores.get("host")) is None:
            return 0.0
        all_on_device = least_state_bytes(
            replace(stack, offload=()), self.params, self.moments
        )
        moved = 2 * (
            all_on_device - least_state_bytes(stack, self.params, self.moments)
        )
        if "activations" in stack.offload:
            moved += 2 * self.saved // math.prod(stack.parts_by_dim.values())
        return moved / host[0]

    def _layout_seconds(self, stack: Stack, recomputes: bool) -> float:
        """Returns the seconds of units' own collectives, over axes of layouts.

        They are waited for at once. A backward sends as much as a forward does.
        """
        layout_axes = dict(stack.split_over)
        recorded_sizes, sent = self.sent.get(frozenset(layout_axes), ({}, {}))
        rows = stack.parts_of((DATA, NODE))
        passes = stack.accumulate * stack.microbatches
        share, seconds = size_in(stack.compute) / (rows * passes), 0.0
        for record, count in sent.items():
            ranks = _ranks(stack, record.axis)
            n_recorded = math.prod(recorded_sizes[a] for a in record.axis)
            ring_scale = (1 - 1 / len(ranks)) / (1 - 1 / n_recorded)  # of a ring
            size = Fraction(int(record.bytes * share * ring_scale))
            scaled = replace(record, bytes=size)
            seconds_each = collective_seconds(scaled, ranks, self.hardware)
            seconds += seconds_each * count * passes
        return seconds * (3 if recomputes else 2)

    def _transfer_seconds(self, stack: Stack) -> float:
        """Returns the seconds of gathers and reductions by ``shard``, one by one."""
        shard_axes = [
            (a, n) for a, n in stack.axes if a in stack.batch_axes and a != NODE
        ]
        n_shards = math.prod(n for _, n in shard_axes)
        if stack.zero is None or n_shards == 1 or not self.hardware.levels:
            return 0.0
        n_parts = stack.accumulate * stack.microbatches if stack.zero == 3 else 1
        n_parts = stack.accumulate if stack.schedule is None else n_parts
        gathers = 2 * n_parts if stack.zero == 3 else 1
        reductions = n_parts if stack.reduces_each else 1
        size = size_in(stack.compute)
        stage_params = self.params / stack.parts_of({PIPE, *axes_of(stack.layouts)})
        units = max(1, len(self.calls) // stack.parts_of((PIPE,)))
        unit_bytes = size * stage_params / units

        def seconds_of_all(op: str, axes: list[str], size: float) -> float:
            ranks = _ranks(stack, axes)
            sent_bytes = Fraction(int(size * (len(ranks) - 1) / len(ranks)))
            record = Record(op, tuple(axes), sent_bytes, torch.float32)
            return collective_seconds(record, ranks, self.hardware) * units

        seconds = seconds_of_all("psum_scatter", [a for a, _ in shard_axes], unit_bytes)
        seconds *= gathers + reductions
        if NODE in stack.batch_axes:
            seconds += seconds_of_all(
                "psum", [NODE], 2 * unit_bytes / (n_shards if stack.zero else 1)
            )
        return seconds


def _facts_of(stack: Stack) -> ScheduleFacts:
    """Returns what a stack's schedule says; without one a rank has one part at once."""
    if stack.schedule is None:
        return ScheduleFacts(splits_backward=False, held=1)
    return schedule_facts(stack.schedule, stages_of(stack), stack.microbatches)


def _ranks(stack: Stack, axes: Sequence[str]) -> list[int]:
    """Returns the ranks of the first group along these axes, in row-major order."""
    stride, offsets = 1, []
    for name, size in reversed(stack.axes):
        offsets.insert(0, range(0, size * stride, stride) if name in axes else (0,))
        stride *= size
    return [sum(coordinates) for coordinates in itertools.product(*offsets)]

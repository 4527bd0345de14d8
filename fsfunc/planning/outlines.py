"""Outlines of stacks: their time and memory in closed form, before any is planned.

A plan costs some 0.1 s or 1 s, an outline 0.1 ms. So `trials` asks the outlines of all
stacks which are worth a plan, and which cannot fit by far. An outline knows of each
unit what one recording of the loss says: FLOPs, bytes that it saves, its parameters;
of a pipeline, what the schedule's actions say, and where the loss will be cut. It is
within some tens of percent of a plan::

    seconds = max(compute, transfers) + 0.3 min(compute, transfers) + bubble + ...
    bytes   = state + max(activations + sums of gradients, gradients) + what is in use
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import torch

from fsfunc.comm.ledgers import Record
from fsfunc.pipelining.stage_plans import balance
from fsfunc.planning.candidates import (
    ScheduleFacts,
    least_state_bytes,
    schedule_facts,
    size_in,
    stages_of,
)
from fsfunc.planning.cost_model import collective_seconds
from fsfunc.planning.left_out_calls import KEPT
from fsfunc.planning.machines import Hardware
from fsfunc.planning.stacks import DATA, NODE, PIPE, Stack
from fsfunc.state.layout_rules import axes_of
from fsfunc.tracing.programs import Program, Spec, TracedCall

_USUAL = 0.4  # the share of the peak, if the hardware does not say what is usual
_BESIDE = 0.3  # the share of the shorter of computing and sending that does not overlap
# Of a unit beside its operators, which a forward runs once, and a backward about twice:
# two gathers and a reduction.
_TRANSFERS = 3
# Computing with remat over that without: a forward more would be 4/3, but of a unit's
# last product no backward reads a value, so that it is not made again.
_RECOMPUTED = 1.25
_ALIKE = 0.1  # two outlines that differ by less are equal
_ROUNDS = 4  # how many of a loop's equal parts a plan runs
_SPLIT = 1 / 3  # the share of a bubble that is left if weight gradients fill it


# (sizes of axes, counts of the collectives that a recorded forward makes over them)
Sent = tuple[Mapping[str, int], Mapping[Record, int]]


class Outline(NamedTuple):
    """What a stack takes.

    Args:
        seconds: of a step.
        bytes: that a rank holds.
        calls: the unit calls that a plan runs.
        device_seconds: of a step whose operators cost the host nothing: of this an
            outline knows least.
    """

    seconds: float
    bytes: int
    calls: int
    device_seconds: float

    @property
    def order(self) -> tuple[int, int, float]:
        """A sort key: by time and, of about equal ones, by how long a plan takes."""
        about = round(math.log(max(self.seconds, 1e-9)) / math.log1p(_ALIKE))
        return about, self.calls, self.seconds


class _Share(NamedTuple):
    """What a rank of a pipeline, or each rank without one, has of the loss.

    Args:
        calls: the number of its unit calls.
        flops: of their forwards, on the whole batch.
        operators: of their forwards.
        params: the share of all parameters that they take.
        saved, largest_saved: bytes that they save for their backward, and the largest
            of them alone.
        outputs: bytes of their outputs.
    """

    calls: int
    flops: int
    operators: int
    params: float
    saved: int
    largest_saved: int
    outputs: int

    @classmethod
    def of(cls, calls: Sequence[TracedCall], all_weights: int) -> _Share:
        """Returns the share that these calls are.

        Args:
            all_weights: bytes of the parameters of all calls.
        """
        saved = [call.activations for call in calls]
        specs = (x for call in calls for x in call.outputs.leaves)
        return cls(
            len(calls),
            sum(call.flops for call in calls),
            sum(call.operators for call in calls),
            sum(call.weights for call in calls) / all_weights if all_weights else 1.0,
            sum(saved),
            max(saved, default=0),
            sum(x.nbytes for x in specs if isinstance(x, Spec)),
        )


class Outlines:
    """Outlines of stacks on one loss, batch and hardware.

    Args:
        program: the loss's, recorded on the whole batch of ``rows`` rows.
        params, moments: bytes of all of them.
        sent: by axes of layouts, what a forward of all rows sent over them.

    Attributes:
        saved: bytes that all units save for their backward.
        planned_calls: the unit calls that a plan of one pass runs.
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
        self.saved: int = sum(call.activations for call in self.calls)
        # Of equal layers in a row a plan without a pipeline runs the outermost alone.
        kinds = Counter((c.name, c.flops, c.weights) for c in self.calls)
        self.planned_calls: int = sum(min(n, 2 * KEPT) for n in kinds.values())
        self._shares_by_owners: dict[tuple[int, ...], list[_Share]] = {}
        self._outlines: dict[Stack, Outline] = {}

    def outline(self, stack: Stack) -> Outline:
        """Returns the outline of a stack."""
        if stack not in self._outlines:
            self._outlines[stack] = self._make_outline(stack)
        return self._outlines[stack]

    def _make_outline(self, stack: Stack) -> Outline:
        parts = math.prod(stack.parts_by_dim.values())
        share = parts * stack.parts_of(axes_of(stack.layouts))  # 1 / a rank's part
        n_stage_ranks = stack.parts_of((PIPE,))
        recompute_factor = 1 if stack.remat in (None, "never") else _RECOMPUTED
        facts = _facts_of(stack)
        ranks = self._shares(facts.owners)
        name = str(stack.compute or torch.float32).removeprefix("torch.")
        peak = self.hardware.peak.get(name) or max(self.hardware.peak.values())
        rate = peak * (self.hardware.utilisation or _USUAL)
        # A backward computes twice what a forward does. All ranks of a pipeline wait
        # for the one that has most to do.
        flops = [rank.flops for rank in ranks]
        compute = 3 * recompute_factor * max(flops) / share / rate
        # Small units are bound by the host, which launches each operator and transfer.
        launches = max(
            3 * recompute_factor * rank.operators + _TRANSFERS * rank.calls
            for rank in ranks
        )
        passes = stack.accumulate * stack.microbatches
        host = max(compute, launches * self.hardware.overhead * passes)
        # As the pipeline fills and drains, the busiest rank waits for one microbatch on
        # one stage of each other rank: (P - 1) / (M · v) of the computing, if ranks
        # have equal parts of it.
        bubble_share = 0.0
        if n_stage_ranks > 1:
            chunks = len(facts.owners) // n_stage_ranks
            others = (sum(flops) / max(flops) - 1) if max(flops) else n_stage_ranks - 1
            bubble_share = _SPLIT if facts.splits_backward else 1.0
            bubble_share *= others / (stack.microbatches * chunks)
        transfers = self._transfer_seconds(stack)
        seconds, device_seconds = (
            max(busy, transfers) + _BESIDE * min(busy, transfers) + bubble_share * busy
            for busy in (host, compute)
        )
        beside = (
            self._offload_seconds(stack)
            + self._layout_seconds(stack, recompute_factor > 1) / n_stage_ranks
            + self._update_seconds(stack)
        )
        held = zip(ranks, facts.held, facts.halved, strict=True)
        peak_bytes = max(
            self._peak_bytes(stack, rank, share, recompute_factor > 1, *counts)
            for rank, *counts in held
        )
        calls = min(stack.accumulate, _ROUNDS) * self.planned_calls
        if n_stage_ranks > 1:  # those that are like the one before are not run
            rounds = min(stack.microbatches, 2 * n_stage_ranks + _ROUNDS)
            calls = rounds * len(self.calls)
        return Outline(seconds + beside, peak_bytes, calls, device_seconds + beside)

    def shares_of(self, stack: Stack) -> list[float]:
        """Returns the share of all parameters that each rank of a pipeline has."""
        return [rank.params for rank in self._shares(_facts_of(stack).owners)]

    def _shares(self, owners: tuple[int, ...]) -> list[_Share]:
        """Returns what each rank of a pipeline has of the loss, cut as it will be.

        Args:
            owners: the rank of each stage.
        """
        if owners not in self._shares_by_owners:
            flops, n_stages = [call.flops for call in self.calls], len(owners)
            counts = balance(flops, n_stages) if n_stages > 1 else [len(flops)]
            begins = [*itertools.accumulate(counts, initial=0)]
            calls_of: dict[int, list[TracedCall]] = defaultdict(list)
            for rank, ends in zip(owners, itertools.pairwise(begins), strict=True):
                calls_of[rank] += self.calls[slice(*ends)]
            whole = sum(call.weights for call in self.calls)
            self._shares_by_owners[owners] = [
                _Share.of(calls_of[rank], whole) for rank in sorted(calls_of)
            ]
        return self._shares_by_owners[owners]

    def _peak_bytes(
        self,
        stack: Stack,
        rank: _Share,
        share: int,
        recomputes: bool,
        held: float,
        halved: float,
    ) -> int:
        """Returns the bytes that a rank holds.

        Args:
            rank: what it has of the loss.
            share: into how many parts activations are cut, beside stages and passes.
            recomputes: whether units are recomputed.
            held, halved: of microbatches, see `ScheduleFacts`.
        """
        size, parts = size_in(stack.compute), stack.accumulate * stack.microbatches
        stage_params = (
            self.params * rank.params / stack.parts_of(axes_of(stack.layouts))
        )
        unit_params = stage_params / max(1, rank.calls)
        # A rank of a pipeline has more or less than its part of an even cut.
        uneven = rank.params * stack.parts_of((PIPE,))
        state_bytes = uneven * least_state_bytes(stack, self.params, self.moments)
        # What a unit saves is there from its forward on or, if it is computed again,
        # from then on: until its weight gradients, of a split backward.
        activations = held * (rank.outputs if recomputes else rank.saved)
        if recomputes:
            activations += halved * rank.saved + rank.largest_saved
        activations *= size / share / parts
        # Parameters are gathered (zero=3) for a microbatch, or cast for all of them.
        # They stay until a backward that comes later, without a recompute.
        if stack.zero == 3 or size < 1 and not stack.zero:
            keeps_whole = halved or stack.zero != 3 and not recomputes
            copies = held if stack.zero == 3 else 1
            activations += size * (
                copies * stage_params if keeps_whole else 2 * unit_params
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

    def _update_seconds(self, stack: Stack) -> float:
        """Returns the seconds in which gradients are summed, and the state updated.

        Memory bounds both: a sum reads two values and writes one, an update reads and
        writes the state.
        """
        state_bytes = least_state_bytes(stack, self.params, self.moments)
        stage_params = self.params / stack.parts_of({PIPE, *axes_of(stack.layouts)})
        sums = stack.accumulate * stack.microbatches - 1
        sum_bytes = 3 * sums * self._gradient_bytes(stack, stage_params)
        return (2 * state_bytes + sum_bytes) / self.hardware.bandwidth

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
        return ScheduleFacts()
    return schedule_facts(stack.schedule, stages_of(stack), stack.microbatches)


def _ranks(stack: Stack, axes: Sequence[str]) -> list[int]:
    """Returns the ranks of the first group along these axes, in row-major order."""
    stride, offsets = 1, []
    for name, size in reversed(stack.axes):
        offsets.insert(0, range(0, size * stride, stride) if name in axes else (0,))
        stride *= size
    return [sum(coordinates) for coordinates in itertools.product(*offsets)]

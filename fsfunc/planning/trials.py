"""Stacks tried on one loss and one batch: planned and estimated, or skipped.

`stack_search` decides the order of trials. `Trials.try_stack` asks first what is cheap
to know, and plans only what may fit: the bytes of the state, those of gradients and of
activations by earlier plans (`foreseen_bytes`), an outline in closed form; then `plan`,
`estimate` and `fits`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.launch import spmd
from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.core.autodiff import value_and_grad
from fsfunc.optim.optimizer import Optimizer
from fsfunc.planning.allocation import fits
from fsfunc.planning.candidates import (
    Axes,
    Space,
    least_state_bytes,
    stages_of,
    whole_gradient_bytes,
)
from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import replace
from fsfunc.planning.machines import Hardware
from fsfunc.planning.outlines import Outlines, Sent
from fsfunc.planning.planner import plan
from fsfunc.planning.plans import Plan, RankPlan
from fsfunc.planning.stacks import DATA, NODE, PIPE, Choice, Skipped, Stack, StackKind
from fsfunc.printing.tables import of_bytes
from fsfunc.runtime.memory import KINDS
from fsfunc.state.layout_rules import splits_of
from fsfunc.state.shared_records import Records, sharing_records
from fsfunc.state.train_state import TrainState
from fsfunc.tracing.tracer import program
from fsfunc.tree.types import Leaf, PyTree

_T = TypeVar("_T")

# By these factors the outline of a stack may be above its plan. Once a stack of its
# kind was planned, an outline is scaled to that, and is then nearer.
BYTES_OFF, SECONDS_OFF, OFF_IN_KIND = 1.6, 1.4, 1.15
_HEAVY = "too large with whole gradients, or activations as in another plan"
CLOSEST = 3  # plans at least, of the smallest stacks, where none has fit


@dataclass(frozen=True, eq=False)
class Training:
    """What a stack is to train.

    Args:
        loss_fn: ``loss_fn(params, batch)``.
        optimizer: what updates the parameters.
        params: the whole parameters, or a function that returns them.
        batch: that of all ranks together, or a function that returns it.
    """

    loss_fn: Callable[..., PyTree]
    optimizer: Optimizer
    params: PyTree
    batch: PyTree


class TooLarge(NamedTuple):
    """The bytes of a stack that was skipped as too large: at least, by an outline."""

    least: int
    outlined: int


class Trials:
    """The stacks tried so far, on one loss and one batch.

    Attributes:
        memory: the bytes that a rank may hold.
        bounded: the hardware, with this memory.
        lone_mesh: a mesh of one rank, with the axes that the loss requires.
        rows: of the batch.
        params, moments: bytes of all of them, whole.
        activations: by what decides them beside rows (`_computes`), pairs (rows of a
            part, bytes of each planned rank's activations) of each plan.
        too_large: the sizes of stacks that were skipped as too large.
        tried, skipped: the results.
        sent_over: by axes of layouts, what a forward sends over them.
        split_errors: by sizes of these axes, why the loss cannot run over them, or "".
        errors: what plans raised.
        records: what plans recorded, by the stacks that are recorded alike.
    """

    space: Space
    optimizer: Optimizer
    hardware: Hardware
    memory: float
    bounded: Hardware
    loss_fn: Callable[..., PyTree]
    lone_mesh: Mesh
    batch: PyTree
    init: Callable[[], PyTree]
    rows: int
    step: Callable[..., tuple[TrainState, dict[str, Tensor]]]
    params: int
    moments: int

    def __init__(
        self, training: Training, hardware: Hardware, memory: float, space: Space
    ):
        loss_fn, params, batch = training.loss_fn, training.params, training.batch
        self.space, self.optimizer = space, training.optimizer
        self.hardware, self.memory = hardware, memory
        self.bounded = replace(hardware, memory=memory, margin=0.0)
        self.loss_fn = loss_fn
        self.lone_mesh = Mesh(dict.fromkeys(space.required_axes, 1), "abstract")
        # Functions that make parameters or a batch run on fake tensors here, so that
        # nothing of their size is allocated.
        self.batch = batch = self._run_fake(batch) if callable(batch) else batch
        self.init = params if callable(params) else lambda: _alike(params)
        self.rows = _rows(batch)
        for axis, dim in space.dims.items():
            if not self._dim_sizes(dim):
                raise ValueError(f'dims: "{axis}" cuts dim {dim}, which no batch has')
        self.step = _train_step(loss_fn, self.optimizer)
        self.params, self.moments = self._run_fake(self._state_bytes)
        self.activations: dict[Hashable, list[tuple[int, tuple[int, ...]]]] = {}
        self.too_large: dict[Stack, TooLarge] = {}
        self.tried: list[Choice] = []
        self.skipped: list[Skipped] = []
        self.sent_over: dict[frozenset[str], Sent] = {}
        self.split_errors: dict[Axes, str] = {}
        self.errors: list[Exception] = []
        self.records: dict[Stack, Records] = {}

    def skip(self, stacks: Sequence[Stack], reason: str) -> None:
        """Records stacks that are not planned, and why."""
        self.skipped.extend(Skipped(stack, reason) for stack in stacks)

    def lies_on(self, axes: Axes) -> bool:
        """Returns whether the batch can be cut for a mesh; if not, skips the mesh."""
        stack = self.space.base_stack(axes)
        for dim, parts in stack.parts_by_dim.items():
            uncut = [n for n in self._dim_sizes(dim) if n % parts]
            if uncut:
                size = f"{uncut[0]} rows" if dim == 0 else f"{uncut[0]} in dim {dim}"
                reason = f"the batch of {size} cannot be cut into {parts} parts"
                self.skip([stack], reason)
                return False
        layout_axes = frozenset(axis for axis, _ in stack.split_over)
        if (
            layout_axes
            and layout_axes not in self.sent_over
            and (reason := self._why_unsplit(stack))
        ):
            self.skip([stack], reason)
            return False
        return True

    def _why_unsplit(self, stack: Stack) -> str:
        """Returns why the loss does not run over the axes of its layouts, or ""."""
        sizes = stack.split_over
        if sizes and sizes not in self.split_errors:
            self.split_errors[sizes] = self._plan_forward(self.space.base_stack(sizes))
        return self.split_errors.get(sizes, "")

    def _plan_forward(self, stack: Stack) -> str:
        """Records what a forward sends over a stack's axes; returns an error, or ""."""

        def forward(state: TrainState, batch: PyTree) -> PyTree:
            return self.loss_fn(state.params, batch)

        plan_args = (
            forward,
            self.init,
            self.optimizer,
            self._local_batch(stack.parts_by_dim),
        )
        try:
            mesh = Mesh(dict(stack.axes), "abstract")
            records = plan(*plan_args, mesh=mesh, layouts=stack.layouts).records()
        except (ValueError, RuntimeError) as error:
            self.errors.append(error)
            return str(error)
        counts = Counter(Record(r.op, r.axis, r.bytes, r.dtype) for r in records)
        self.sent_over[frozenset(mesh.axes)] = dict(mesh.axes), counts
        return ""

    def least_bytes(self, stack: Stack) -> int:
        """Returns the bytes of parameters and moments, which a stack holds at least."""
        return least_state_bytes(stack, self.params, self.moments)

    def foreseen_bytes(self, stack: Stack) -> int:
        """Returns the bytes that a stack will hold at least, by earlier plans.

        That is parameters and moments, with whole gradients or with activations. A
        rank's activations grow with the rows of a part, and do not depend on ``zero``:
        a plan with fewer rows is a lower bound.
        """
        rows, planned = self._rows_of(stack), self.activations.get(_computes(stack), ())
        least_bytes = self.least_bytes(stack)
        sizes = [least_bytes + whole_gradient_bytes(stack, self.params)]
        for planned_rows, activations in planned:
            if planned_rows <= rows:
                # A rank of a pipeline has its own part of the state beside them.
                shares = self.outlines.shares_of(stack)
                if len(shares) != len(activations):  # programs differ for other reasons
                    shares = [min(shares)] * len(activations)
                pairs = zip(shares, activations, strict=True)
                n_ranks = stack.parts_of((PIPE,))
                sizes += [int(s * n_ranks * least_bytes) + a for s, a in pairs]
        return max(sizes)

    def _rows_of(self, stack: Stack) -> int:
        return self.rows // stack.parts // stack.accumulate

    def _why_too_large(self, stack: Stack) -> str:
        """Returns why a stack is foreseen not to fit, or ""; records its bytes."""
        reason = _HEAVY
        outline_bytes = self.outlines.outline(stack).bytes
        if (n_bytes := self.foreseen_bytes(stack)) <= self.memory:
            n_bytes = int(outline_bytes / BYTES_OFF)
            reason = "an outline of it does not fit by far"
        if n_bytes <= self.memory:
            return ""
        self.too_large[stack] = TooLarge(n_bytes, outline_bytes)
        return reason

    def _is_impossible(self, stack: Stack) -> bool:
        """Returns whether a stack has no plan, or cannot fit; skips it if so."""
        stages, units = stages_of(stack), len(self.outlines.calls)
        if stages > max(1, units):
            self.skip([stack], f"{stages} stages are more than {units} unit calls")
        elif reason := self.split_errors.get(stack.split_over):
            self.skip([stack], reason)
        elif (least_bytes := self.least_bytes(stack)) > self.memory:
            reason = f"parameters and moments alone are {of_bytes(least_bytes)}"
            self.skipped.append(Skipped(stack, reason, least_bytes))
        else:
            return False
        return True

    def try_stack(self, stack: Stack, anyway: bool = False) -> Choice | None:
        """Plans and estimates a stack; returns None and records why if it cannot.

        Args:
            anyway: whether it is planned even if it is foreseen not to fit.
        """
        # From the cheapest test to a plan.
        if self._is_impossible(stack):
            return None
        if not anyway and (reason := self._why_too_large(stack)):
            self.skip([stack], reason)
            return None
        planned = self._plan_stack(stack)
        if planned is None:
            return None
        activations = self.activations.setdefault(_computes(stack), [])
        activations.append(
            (self._rows_of(stack), tuple(map(_activations, planned.ranks)))
        )
        estimated = estimate(planned, self.hardware)
        fit = fits(planned, self.bounded)
        choice = Choice(
            stack=stack,
            seconds=estimated.seconds,
            peak_bytes=planned.peak_bytes,
            fits=bool(fit),
            compute=estimated.compute,
            exposed=estimated.exposed,
            bubble=estimated.bubble,
            width=estimated.width,
            needed_bytes=fit.needed,
        )
        self.tried.append(choice)
        return choice

    def _plan_stack(self, stack: Stack) -> Plan | None:
        """Returns the stack's plan; None, with the reason recorded, if it has none."""
        mesh = Mesh(dict(stack.axes), "abstract")
        try:
            step = stack.apply(self.step, mesh)
            plan_args = (
                step,
                self.init,
                self.optimizer,
                self._local_batch(stack.parts_by_dim),
            )
            options = {"layouts": stack.layouts, "device": self.hardware.device}
            with sharing_records(self.records.setdefault(_recorded(stack), {})):
                return plan(*plan_args, mesh=mesh, **options)
        except (ValueError, RuntimeError) as error:
            reason = self._why_unsplit(stack)
            # A loss that reads a value fails under every stack, and is to be mended.
            # Under a pipeline another error may be of this cut into stages alone.
            if (
                not reason
                and isinstance(error, RuntimeError)
                and stack.schedule is None
            ):
                raise
            self.errors.append(error)
            self.skip([stack], reason or str(error))
            return None

    def try_promising(
        self, stacks: Sequence[Stack], plans: int, unit_calls: float = float("inf")
    ) -> None:
        """Tries the stacks with the best outlines, until so many are planned.

        The fastest of each kind come first, as outlines compare stacks of one kind
        best. If none of them fits, it tries as many more, three at least, the smallest.

        Args:
            stacks: those to choose from.
            plans: how many are planned.
            unit_calls: how many unit calls their plans run at most, once one fits.
        """
        possible = [stack for stack in stacks if not self._is_impossible(stack)]
        light = [s for s in possible if self.foreseen_bytes(s) <= self.memory]
        if light:  # else all have outlines, to find the smallest
            heavy = set(possible).difference(light)
            self.skip([s for s in possible if s in heavy], _HEAVY)
            possible = light
        outlines = {stack: self.outlines.outline(stack) for stack in possible}
        may_fit = [s for s in possible if self.least_needed(s) <= self.memory]
        # What fits by its outline comes before what fits if the outline is off.
        ordered = sorted(
            may_fit,
            key=lambda s: (outlines[s].bytes > self.memory, *outlines[s].order),
        )
        first_of_kind: dict[StackKind, Stack] = {}
        for stack in ordered:
            first_of_kind.setdefault(stack.kind, stack)
        # Kinds have half of the plans at most.
        queue = dict.fromkeys([*first_of_kind.values()][: (plans + 1) // 2])
        others, costly = dict.fromkeys(possible), set[Stack]()
        for stack in [*queue, *(s for s in ordered if s not in queue)]:
            if len(self.tried) == plans:
                break
            if self._is_behind(stack) or self._is_larger(stack):
                continue
            if outlines[stack].calls > unit_calls and self._any_fits():
                costly.add(stack)
                continue
            unit_calls -= outlines[stack].calls
            del others[stack]
            self.try_stack(stack)
        n_more = max(plans, CLOSEST)
        for stack in sorted(others, key=lambda s: outlines[s].bytes):
            if self._any_fits() or not n_more:
                break
            # The smallest is planned in any case, to say by how much it misses.
            if not self.tried or not self._is_larger(stack):
                n_more -= 1
                del others[stack]
                self.try_stack(stack, anyway=not self.tried)
        ratios = [
            choice.seconds / outlines[choice.stack].seconds for choice in self.tried
        ]
        scale = statistics.median(ratios) if ratios else 1.0
        for stack in others:
            seconds, n_bytes = outlines[stack][:2]
            reason = "by an outline others are faster, which were planned"
            if stack in costly and not self._is_behind(stack):
                reason = (
                    "long to plan, and by an outline not faster for sure: see plans="
                )
            elif n_bytes > self.memory:
                reason = "an outline of it does not fit"
            self.skipped.append(Skipped(stack, reason, 0, seconds * scale, n_bytes))

    def _any_fits(self) -> bool:
        return any(choice.fits for choice in self.tried)

    def _is_behind(self, stack: Stack) -> bool:
        """Returns whether a planned stack is faster, as far as outlines may be off."""
        fitting = [choice.seconds for choice in self.tried if choice.fits]
        return bool(fitting) and self.least_seconds(stack) > min(fitting)

    def _is_larger(self, stack: Stack) -> bool:
        """Returns whether a stack does not fit, as far as its outline may be off."""
        return self.least_needed(stack) > self.memory

    def least_seconds(self, stack: Stack) -> float:
        """Returns the least time that a plan of a stack may find, by its outline.

        Outlines are off by much the same factor for all stacks of one loss, and more so
        for those of one kind. The least factor so far makes of an outline the least
        time. Without any plan it is 0.
        """
        choices, is_kind = self._tried_like(stack)
        ratios = [c.seconds / self.outlines.outline(c.stack).seconds for c in choices]
        off = OFF_IN_KIND if is_kind else SECONDS_OFF
        least_seconds = self.outlines.outline(stack).device_seconds
        return least_seconds * min(ratios, default=0.0) / off

    def least_needed(self, stack: Stack) -> float:
        """Returns the least memory that a plan of a stack may need, by its outline.

        As :meth:`least_seconds`; without any plan, the outline less its error.
        """
        choices, is_kind = self._tried_like(stack)
        outline_of = self.outlines.outline
        ratios = [c.needed_bytes / outline_of(c.stack).bytes for c in choices]
        off = OFF_IN_KIND if is_kind else BYTES_OFF
        return outline_of(stack).bytes * min(ratios, default=1.0) / off

    def _tried_like(self, stack: Stack) -> tuple[list[Choice], bool]:
        """Returns what was tried of a stack's kind; or all, and False."""
        alike = [c for c in self.tried if c.stack.kind == stack.kind]
        return alike or self.tried, bool(alike)

    def find_closest(self) -> None:
        """Plans skipped stacks, until all others are foreseen to be larger.

        So an error can say by how much the closest stack misses.
        """
        by_size = sorted(self.too_large.items(), key=lambda pair: pair[1].outlined)
        for stack, sizes in by_size:
            closest = min((c.peak_bytes for c in self.tried), default=None)
            if closest is not None and sizes.least >= closest:
                continue
            self.skipped = [s for s in self.skipped if s.stack != stack]
            self.try_stack(stack, anyway=True)

    # Everything below runs on fake tensors.

    def _run_fake(self, run: Callable[[], _T]) -> _T:
        return spmd(run, self.lone_mesh)()[0]

    def _state_bytes(self) -> tuple[int, int]:
        params = self.init()
        paths, leaves, _ = tree.flatten_with_paths(params)
        leaf_by_path = dict(zip(paths, leaves, strict=True))
        splits_of(self.space.layouts, leaf_by_path, self.lone_mesh, (PIPE,))
        return _bytes(params), _bytes(self.optimizer.init(params))

    @cached_property
    def outlines(self) -> Outlines:
        """The outlines of stacks, from one recording of the loss."""
        recorded = self._run_fake(
            lambda: program(self.loss_fn, _alike(self.init()), self._local_batch({})())
        )
        sizes = self.rows, self.params, self.moments
        return Outlines(recorded, *sizes, self.hardware, self.sent_over)

    def _dim_sizes(self, dim: int) -> list[int]:
        """Returns the sizes of the batch's tensors in a dim."""
        leaves = [x for x in tree.leaves(self.batch) if isinstance(x, Tensor)]
        return [x.shape[dim] for x in leaves if x.ndim > dim]

    def _local_batch(self, parts: Mapping[int, int]) -> Callable[[], PyTree]:
        """Returns a function that makes a rank's batch, fake inside a plan."""
        return lambda: _alike(self.batch, parts)


def _recorded(stack: Stack) -> Stack:
    """Returns the first of the stacks whose steps `sharing_records` may share.

    A recording computes each unit once, and gathers and reduces nothing.
    """
    zero = None if stack.zero is None else 0
    return dataclasses.replace(stack, zero=zero, remat=None)


def _computes(stack: Stack) -> Hashable:
    """Returns the settings that a part's activations depend on, beside its rows."""
    other_axes = tuple((a, n) for a, n in stack.axes if a not in (DATA, NODE))
    settings = stack.compute, "activations" in stack.offload
    return other_axes, stack.remat, stack.schedule, stack.microbatches, *settings


def _activations(rank_plan: RankPlan) -> int:
    """Returns the most bytes of activations that a rank holds at once."""
    index = KINDS.index("activations")
    return max((row[index] for _, row in rank_plan.memory), default=0)


def _train_step(
    loss_fn: Callable[..., PyTree], optimizer: Optimizer
) -> Callable[..., tuple[TrainState, dict[str, Tensor]]]:
    def train_step(
        state: TrainState, batch: PyTree
    ) -> tuple[TrainState, dict[str, Tensor]]:
        loss, grads = value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads, optimizer), {"loss": loss}

    return train_step


def _rows(batch: PyTree) -> int:
    """Returns the rows of a batch: dim 0, in which all its tensors agree."""
    paths, leaves, _ = tree.flatten_with_paths(batch)
    sizes = {
        path: tuple(x.shape)
        for path, x in zip(paths, leaves, strict=True)
        if isinstance(x, Tensor)
    }
    rows = {shape[0] if shape else None for shape in sizes.values()}
    if len(rows) != 1 or None in rows:
        raise ValueError(
            "the batch is cut along dim 0, in which all its tensors agree; it has the "
            f"shapes {sizes}"
        )
    return rows.pop() or 0


def _alike(values: PyTree, parts: Mapping[int, int] = {}) -> PyTree:
    """Returns a tree of empty tensors of the same shapes, cut into parts by dim.

    A tensor that is twice in the tree, as a tied weight, is one tensor again.
    """
    copies: dict[int, Tensor] = {}

    def copy(x: Leaf) -> Leaf:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in copies:
            shape = [n // parts.get(dim, 1) for dim, n in enumerate(x.shape)]
            is_here = x.device.type == "cuda" and torch.cuda.is_available()
            device = x.device if is_here else "cpu"
            copies[id(x)] = torch.empty(shape, dtype=x.dtype, device=device)
        return copies[id(x)]

    return tree.map(copy, values)


def _bytes(values: PyTree) -> int:
    """Returns the bytes of the tensors in a tree, each once."""
    sizes = {id(x): x.nbytes for x in tree.leaves(values) if isinstance(x, Tensor)}
    return sum(sizes.values())

"""Stacks tried on one loss and one batch: planned, estimated, and what failed noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.launch import spmd
from fsfunc.comm.ledgers import Record
from fsfunc.comm.mesh import Mesh
from fsfunc.core.autodiff import value_and_grad
from fsfunc.planning.allocation import fits, needed_bytes
from fsfunc.planning.candidates import (
    Axes,
    Space,
    lowered,
    stages_of,
    whole_gradients,
)
from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import replace
from fsfunc.planning.machines import Hardware
from fsfunc.planning.outlines import Outline, Outlines, Sent
from fsfunc.planning.planner import plan
from fsfunc.planning.plans import Plan, RankPlan
from fsfunc.planning.stacks import DATA, NODE, PIPE, Choice, Skipped, Stack
from fsfunc.printing.tables import of_bytes
from fsfunc.runtime.memory import KINDS
from fsfunc.state.layout_rules import splits_of
from fsfunc.tracing.tracer import program

# Of an outline's bytes over what may be held: too large surely, and maybe not.
SURE, NEAR = 1.5, 1.1
OFF = 1.3  # of an outline's time, against that of the fastest plan


@dataclass(frozen=True, eq=False)
class Training:
    """What is to be trained by some stack.

    Args:
        loss_fn: ``loss_fn(params, batch)``; ``optimizer``: updates the parameters.
        params: the whole parameters; ``batch``: of all ranks together. Or functions
            that return them.
    """

    loss_fn: Callable[..., Any]
    optimizer: Any
    params: Any
    batch: Any


class Trials:
    """Stacks tried so far, on one loss and one batch."""

    def __init__(
        self, training: Training, hardware: Hardware, memory: float, space: Space
    ):
        loss_fn, params, batch = training.loss_fn, training.params, training.batch
        self.space, self.optimizer = space, training.optimizer
        self.hardware, self.memory = hardware, memory
        self.bounded = replace(hardware, memory=memory)
        self.loss_fn = loss_fn
        self.alone = Mesh(dict.fromkeys(space.named, 1), "abstract")
        self.batch = batch = self._once(batch) if callable(batch) else batch
        self.init = params if callable(params) else lambda: _alike(params)
        self.rows = _rows(batch)
        for axis, dim in space.dims.items():
            if not self._lengths(dim):
                raise ValueError(f'dims: "{axis}" cuts dim {dim}, which no batch has')
        self.step = _train_step(loss_fn, self.optimizer)
        self.params, self.moments = self._once(self._sizes)
        # By what decides them: (rows of a part, bytes of activations) of each plan.
        self.activations: dict[Any, list[tuple[int, int]]] = {}
        self.large: list[tuple[int, Stack]] = []  # foreseen bytes of what is skipped
        self.tried: list[Choice] = []
        self.skipped: list[Skipped] = []
        # By axes of layouts: sizes, and what a forward sends; by sizes, why it cannot.
        self.sent: dict[frozenset[str], Sent] = {}
        self.unsplit: dict[Axes, str] = {}
        self.errors: list[Exception] = []

    def skip(self, stacks: Sequence[Stack], why: str) -> None:
        """Notes stacks that are not planned."""
        self.skipped.extend(Skipped(stack, why) for stack in stacks)

    def lies_on(self, axes: Axes) -> bool:
        """True if the batch can be cut for a mesh; else the mesh is skipped."""
        stack = self.space.on(axes)
        for dim, parts in stack.parts_by_dim.items():
            odd = [n for n in self._lengths(dim) if n % parts]
            if odd:
                what = f"{odd[0]} rows" if dim == 0 else f"{odd[0]} in dim {dim}"
                why = f"the batch of {what} cannot be cut into {parts} parts"
                self.skip([stack], why)
                return False
        over = frozenset(axis for axis, _ in stack.split_over)
        if over and over not in self.sent and (why := self._unsplit(stack)):
            self.skip([stack], why)
            return False
        return True

    def _unsplit(self, stack: Stack) -> str:
        """The reason why the loss does not run over the axes of its layouts, if any."""
        sizes = stack.split_over
        if sizes and sizes not in self.unsplit:
            self.unsplit[sizes] = self._forward(self.space.on(sizes))
        return self.unsplit.get(sizes, "")

    def _forward(self, stack: Stack) -> str:
        """Notes what a forward sends over these axes alone; or why it cannot be."""

        def forward(state: Any, batch: Any) -> Any:
            return self.loss_fn(state.params, batch)

        given = forward, self.init, self.optimizer, self._local(stack.parts_by_dim)
        try:
            mesh = Mesh(dict(stack.axes), "abstract")
            found = plan(*given, mesh=mesh, layouts=stack.layouts).records()
        except (ValueError, RuntimeError) as error:
            self.errors.append(error)
            return str(error)
        sent = Counter(Record(r.op, r.axis, r.bytes, r.dtype) for r in found)
        self.sent[frozenset(mesh.axes)] = dict(mesh.axes), sent
        return ""

    def least(self, stack: Stack) -> int:
        """Bytes of parameters and moments, below which the stack cannot stay."""
        return lowered(stack, self.params, self.moments)

    def foreseen(self, stack: Stack) -> int:
        """Bytes that the stack will hold at least, by those that were planned.

        Whole gradients or activations, beside parameters and moments. A rank's
        activations grow with the rows of a part, and depend on no ``zero``.
        """
        rows, planned = self._rows_of(stack), self.activations.get(_computes(stack), ())
        most = max((a for n, a in planned if n <= rows), default=0)
        return self.least(stack) + max(most, whole_gradients(stack, self.params))

    def _rows_of(self, stack: Stack) -> int:
        return self.rows // stack.parts // stack.accumulate

    def _large(self, stack: Stack) -> str:
        """The reason why a stack is foreseen not to fit, which is noted; "" if not."""
        why = "too large with whole gradients, or activations as in another plan"
        if (foreseen := self.foreseen(stack)) <= self.memory:
            foreseen = int(self.outlines.of(stack).bytes / SURE)
            why = "an outline of it does not fit by far"
        if foreseen <= self.memory:
            return ""
        self.large.append((foreseen, stack))
        return why

    def try_one(self, stack: Stack, anyway: bool = False) -> Choice | None:
        """The stack's figures; None, and the reason noted, where it cannot be.

        Args:
            anyway: whether it is planned though it is foreseen not to fit.
        """
        stages = stages_of(stack)
        if stages > 1 and stages > (units := len(self.outlines.calls)):
            self.skip([stack], f"{stages} stages are more than {units} unit calls")
            return None
        if why := self.unsplit.get(stack.split_over):
            self.skip([stack], why)
            return None
        least = self.least(stack)
        if least > self.memory:
            why = f"parameters and moments alone are {of_bytes(least)}"
            self.skipped.append(Skipped(stack, why, least))
            return None
        if not anyway and (why := self._large(stack)):
            self.skip([stack], why)
            return None
        found = self._planned(stack)
        if found is None:
            return None
        held = self.activations.setdefault(_computes(stack), [])
        held.append((self._rows_of(stack), max(map(_activations, found.ranks))))
        timed = estimate(found, self.hardware)
        needed = needed_bytes(found, self.bounded)
        choice = Choice(
            stack=stack,
            seconds=timed.seconds,
            peak_bytes=found.peak_bytes,
            fits=fits(found, self.bounded),
            compute=timed.compute,
            exposed=timed.exposed,
            bubble=timed.bubble,
            width=timed.width,
            needed_bytes=needed,
        )
        self.tried.append(choice)
        return choice

    def _planned(self, stack: Stack) -> Plan | None:
        """The stack's plan; None, and the reason noted, where it cannot be."""
        mesh = Mesh(dict(stack.axes), "abstract")
        try:
            step = stack.apply(self.step, mesh)
            given = step, self.init, self.optimizer, self._local(stack.parts_by_dim)
            how = {"layouts": stack.layouts, "device": self.hardware.device}
            return plan(*given, mesh=mesh, **how)
        except (ValueError, RuntimeError) as error:
            why = self._unsplit(stack)
            if not why and isinstance(error, RuntimeError) and stack.schedule is None:
                raise
            self.errors.append(error)
            self.skip([stack], why or str(error))
            return None

    def try_promising(self, stacks: Sequence[Stack], plans: int) -> None:
        """Tries those whose outlines are best, until so many are planned.

        And as many more, three at least, the smallest, where none of them fits.
        """
        outlines = {stack: self.outlines.of(stack) for stack in stacks}
        sizes = {stack: outline.bytes for stack, outline in outlines.items()}
        rest = [stack for stack in stacks if sizes[stack] > NEAR * self.memory]
        large = set(rest)
        for stack in sorted(outlines.keys() - large, key=lambda s: outlines[s].order):
            if len(self.tried) < plans and not self._is_slower(outlines[stack]):
                self.try_one(stack)
            else:
                rest.append(stack)
        for stack in sorted(rest, key=sizes.__getitem__)[: max(plans, 3)]:
            if not any(choice.fits for choice in self.tried):
                rest.remove(stack)
                self.try_one(stack)
        for stack in rest:
            if stack in large:
                self.skip([stack], "an outline of it does not fit")
            else:
                why = "by an outline others are faster, which were planned"
                self.skip([stack], why)

    def _is_slower(self, outline: Outline) -> bool:
        """True where a stack that was planned is faster, as far as outlines are off."""
        fits = [choice for choice in self.tried if choice.fits]
        if not fits:
            return False
        least = min(c.seconds / self.outlines.of(c.stack).seconds for c in fits)
        return outline.seconds * least > OFF * min(c.seconds for c in fits)

    def find_closest(self) -> None:
        """Plans what was skipped, until all others are foreseen to be larger."""
        for foreseen, stack in sorted(self.large, key=lambda pair: pair[0]):
            closest = min((c.peak_bytes for c in self.tried), default=None)
            if closest is not None and foreseen >= closest:
                return
            self.skipped = [s for s in self.skipped if s.stack != stack]
            self.try_one(stack, anyway=True)

    # Everything below runs on fake tensors.

    def _once(self, run: Callable[[], Any]) -> Any:
        return spmd(run, self.alone)()[0]

    def _sizes(self) -> tuple[int, int]:
        params = self.init()
        paths, leaves, _ = tree.flatten_with_paths(params)
        found = dict(zip(paths, leaves, strict=True))
        splits_of(self.space.layouts, found, self.alone, (PIPE,))
        return _bytes(params), _bytes(self.optimizer.init(params))

    @cached_property
    def outlines(self) -> Outlines:
        """The outlines of stacks, of the loss recorded once."""
        found = self._once(
            lambda: program(self.loss_fn, _alike(self.init()), self._local({})())
        )
        sizes = self.rows, self.params, self.moments
        return Outlines(found, *sizes, self.hardware, self.sent)

    def _lengths(self, dim: int) -> list[int]:
        """Of the batch's tensors, in that dim."""
        leaves = [x for x in tree.leaves(self.batch) if isinstance(x, Tensor)]
        return [x.shape[dim] for x in leaves if x.ndim > dim]

    def _local(self, parts: Mapping[int, int]) -> Callable[[], Any]:
        """Makes a rank's batch: a fake one, where it is called."""
        return lambda: _alike(self.batch, parts)


def _computes(stack: Stack) -> Any:
    """The settings that a part's activations depend on, beside its rows."""
    others = tuple((a, n) for a, n in stack.axes if a not in (DATA, NODE))
    kept = stack.compute, "activations" in stack.offload
    return others, stack.remat, stack.schedule, stack.microbatches, *kept


def _activations(own: RankPlan) -> int:
    """The most bytes of activations that a rank holds at once."""
    at = KINDS.index("activations")
    return max((row[at] for _, row in own.memory), default=0)


def _train_step(loss_fn: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    def train_step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        loss, grads = value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads, optimizer), {"loss": loss}

    return train_step


def _rows(batch: Any) -> int:
    """Dim 0 of all leaves of the batch."""
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


def _alike(t: Any, parts: Mapping[int, int] = {}) -> Any:
    """Tensors like those in a tree, cut into parts by dim; equal ones stay equal."""
    made: dict[int, Tensor] = {}

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            shape = [n // parts.get(dim, 1) for dim, n in enumerate(x.shape)]
            runs = x.device.type == "cuda" and torch.cuda.is_available()
            device = x.device if runs else "cpu"
            made[id(x)] = torch.empty(shape, dtype=x.dtype, device=device)
        return made[id(x)]

    return tree.map(one, t)


def _bytes(t: Any) -> int:
    """Of the tensors in a tree, each once."""
    found = {id(x): x.nbytes for x in tree.leaves(t) if isinstance(x, Tensor)}
    return sum(found.values())

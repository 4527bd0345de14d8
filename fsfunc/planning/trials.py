"""Stacks tried on one loss and one batch: planned, estimated, and what failed noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.launch import spmd
from fsfunc.comm.mesh import Mesh
from fsfunc.core.autodiff import value_and_grad
from fsfunc.planning.allocation import needed_bytes
from fsfunc.planning.candidates import Axes, Space, lowered, stages_of
from fsfunc.planning.choices import Choice, Search, Skipped, front_of
from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import replace
from fsfunc.planning.machines import Hardware
from fsfunc.planning.planner import plan
from fsfunc.planning.stacks import PIPE, Stack
from fsfunc.printing.amounts import of_bytes
from fsfunc.state.layout_rules import splits_of
from fsfunc.tracing.tracer import program

__all__ = ["Trials"]


class Trials:
    """Stacks tried so far, on one loss and one batch."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        params: Any,
        batch: Any,
        hardware: Hardware,
        memory: float,
        space: Space,
    ):
        self.space, self.optimizer = space, optimizer
        self.hardware, self.memory = hardware, memory
        self.bounded = replace(hardware, memory=memory)
        self.loss_fn, self.batch = loss_fn, batch
        self.init = params if callable(params) else lambda: _alike(params)
        self.rows = _rows(batch)
        for axis, dim in space.dims.items():
            if not self._lengths(dim):
                raise ValueError(f'dims: "{axis}" cuts dim {dim}, which no batch has')
        self.alone = Mesh(dict.fromkeys(space.named, 1), "abstract")
        self.step = _train_step(loss_fn, optimizer)
        self.params, self.moments = self._once(self._sizes)
        self.units: int | None = None
        self.tried: list[Choice] = []
        self.skipped: list[Skipped] = []
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
        return True

    def least(self, stack: Stack) -> int:
        """Bytes below which the stack cannot stay."""
        return lowered(stack, self.params, self.moments)

    def try_one(self, stack: Stack) -> Choice | None:
        """The stack's figures; None, and the reason noted, where it cannot be."""
        stages = stages_of(stack)
        if stages > 1 and self.units is None:
            self.units = self._once(self._units)
        if self.units is not None and stages > self.units:
            self.skip([stack], f"{stages} stages are more than {self.units} unit calls")
            return None
        least = self.least(stack)
        if least > self.memory:
            why = f"parameters and moments alone are {of_bytes(least)}"
            self.skipped.append(Skipped(stack, why, least))
            return None
        mesh = Mesh(dict(stack.axes), "abstract")
        part, layouts = self._local(stack.parts_by_dim), stack.layouts
        try:
            step = stack.apply(self.step, mesh)
            given = step, self.init, self.optimizer, part
            found = plan(*given, mesh=mesh, layouts=layouts)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and stack.schedule is None:
                raise
            self.errors.append(error)
            self.skip([stack], str(error))
            return None
        timed = estimate(found, self.hardware)
        choice = Choice(
            stack=stack,
            seconds=timed.seconds,
            peak_bytes=found.peak_bytes,
            fits=needed_bytes(found, self.bounded) <= self.memory,
            compute=timed.compute,
            exposed=timed.exposed,
            bubble=timed.bubble,
        )
        self.tried.append(choice)
        return choice

    def result(self) -> Search:
        """All that was found.

        Raises:
            ValueError: nothing fits, or nothing could be tried.
        """
        fitting = [choice for choice in self.tried if choice.fits]
        if not fitting:
            cause = self.errors[0] if self.errors and not self.tried else None
            raise ValueError(self._nothing()) from cause
        front = tuple(front_of(fitting))
        return Search(front, tuple(self.tried), tuple(self.skipped), self.memory)

    def _nothing(self) -> str:
        """Why there is no stack to give."""
        limit = f"the {of_bytes(self.memory)} that a rank may hold"
        total = len(self.tried) + len(self.skipped)
        if self.tried:
            closest = min(self.tried, key=lambda c: c.peak_bytes)
            peak = closest.peak_bytes
            return (
                f"none of {total} stacks fits in {limit}: the closest needs "
                f"{of_bytes(peak)}, {of_bytes(peak - self.memory)} too much "
                f"({peak / self.memory:.3g} times it): {closest.stack}"
            )
        heavy = [s for s in self.skipped if s.least]
        if heavy:
            best = min(heavy, key=lambda s: s.least)
            return (
                f"none of {total} stacks fits in {limit}: of the closest, {best.why}, "
                f"{of_bytes(best.least - self.memory)} too much: {best.stack}"
            )
        whys = Counter(s.why for s in self.skipped)
        listed = "; ".join(f"{why} ({n} stacks)" for why, n in whys.most_common())
        return f"no stack could be tried: {listed or 'there is none in the space'}"

    # Everything below runs on fake tensors.

    def _once(self, run: Callable[[], Any]) -> Any:
        return spmd(run, self.alone)()[0]

    def _sizes(self) -> tuple[int, int]:
        params = self.init()
        paths, leaves, _ = tree.flatten_with_paths(params)
        found = dict(zip(paths, leaves, strict=True))
        splits_of(self.space.layouts, found, self.alone, (PIPE,))
        return _bytes(params), _bytes(self.optimizer.init(params))

    def _units(self) -> int:
        return len(program(self.loss_fn, self.init(), self._local({})()).calls)

    def _lengths(self, dim: int) -> list[int]:
        """Of the batch's tensors, in that dim."""
        leaves = [x for x in tree.leaves(self.batch) if isinstance(x, Tensor)]
        return [x.shape[dim] for x in leaves if x.ndim > dim]

    def _local(self, parts: Mapping[int, int]) -> Callable[[], Any]:
        """Makes a rank's batch: a fake one, where it is called."""
        return lambda: _alike(self.batch, parts)


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

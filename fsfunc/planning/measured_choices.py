"""Measurement of the choices of a search, on the processes that there are."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collectives import pmax
from fsfunc.comm.descriptions import has_values
from fsfunc.comm.groups import axis_index, group
from fsfunc.comm.launch import local_batch, make_mesh, spmd
from fsfunc.comm.mesh import Mesh
from fsfunc.planning.candidates import Axes
from fsfunc.planning.stacks import Choice, Stack
from fsfunc.state.initialization import init_state

_TURNS, _STEPS = 2, 4  # of each choice; in each turn one step comes before these


def check_runs(sizes: Sequence[Axes], params: Any, batch: Any) -> None:
    """Raises where stacks on these meshes cannot be run here.

    Raises:
        ValueError: a mesh of another number of ranks than there are processes;
            parameters or a batch without values.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    world = dist.get_world_size() if dist.is_initialized() else world
    for axes in sizes:
        if (ranks := Stack(axes).ranks) != world:
            raise ValueError(
                f"run= measures steps here, where there are {world} processes, and "
                f"mesh_sizes has {dict(axes)}: search by torchrun --nproc-per-node "
                f"{ranks}, or without run="
            )
    for name, given in (("params", params), ("batch", batch)):
        leaves = [] if callable(given) else tree.leaves(given)
        if any(isinstance(x, Tensor) and not has_values(x) for x in leaves):
            raise ValueError(
                f"run= measures steps here, and {name} has a tensor without values: "
                "give one with values, or a function that returns it"
            )


def measure_choices(
    choices: Sequence[Choice],
    train_step: Callable[..., Any],
    params: Any,
    optimizer: Any,
    batch: Any,
) -> dict[Choice, float]:
    """The seconds of a step of each choice, of the slowest rank.

    Every rank calls it with the same choices. They take turns, one state at a time:
    the median of eight steps, in two turns.

    Args:
        params: whole, or a function that returns them; ``batch``: of all ranks
            together, or a function that returns it.
    """
    found: dict[Choice, list[float]] = {choice: [] for choice in choices}
    for _ in range(_TURNS):
        for choice, times in found.items():
            mesh = make_mesh(choice.axes)
            step = choice.build(train_step, mesh)

            def main(choice=choice, step=step, mesh=mesh) -> list[float]:
                whole = batch() if callable(batch) else batch
                mine = _part(whole, choice.stack, mesh)
                layouts = choice.stack.layouts
                state = init_state(step, params, optimizer, mine, layouts=layouts)
                return _seconds(step, state, mine, tuple(choice.axes))

            times += spmd(main, mesh)()[0]
    return {choice: statistics.median(times) for choice, times in found.items()}


def _part(batch: Any, stack: Stack, mesh: Mesh) -> Any:
    """This rank's part of the batch."""
    batch = local_batch(batch, mesh, stack.cuts) if stack.cuts else batch
    for axis in stack.means:
        if dim := stack.dims.get(axis, 0):
            count, at = mesh.axes[axis], axis_index(axis)
            batch = tree.map(lambda x, n=count, i=at, d=dim: x.chunk(n, d)[i], batch)
    return batch


def _seconds(step: Any, state: Any, batch: Any, axes: tuple[str, ...]) -> list[float]:
    """The seconds of some steps, of the slowest rank each."""
    found, device = [], group(axes).link.device
    for _ in range(1 + _STEPS):
        pmax(torch.zeros((), device=device), axes)  # all begin together
        began = time.perf_counter()
        state, _ = step(state, batch)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
        took = torch.tensor(seconds, dtype=torch.float64, device=device)
        found.append(float(pmax(took, axes)))
    return found[1:]

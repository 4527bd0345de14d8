"""``pipeline``: a loss in stages, its microbatches run by a schedule that is data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fsfunc.mesh import Mesh
from fsfunc.pipelining.actions import Action, Schedule, ScheduleError, parse
from fsfunc.pipelining.cutting import Stages
from fsfunc.pipelining.piping import Pipelining
from fsfunc.pipelining.schedules import one_f_one_b
from fsfunc.pipelining.verification import verify
from fsfunc.transforms.transforming import transformed

__all__ = ["pipeline"]

MakeSchedule = Callable[..., Schedule]
Rows = Sequence[Iterable[Action | str] | str]


def pipeline(
    f: Callable[..., Any],
    mesh: Mesh,
    axis: str,
    *,
    n_microbatches: int,
    schedule: MakeSchedule | Rows = one_f_one_b,
    stages: Stages = None,
) -> Callable[..., Any]:
    """``f`` with the unit calls of its loss in stages, one or several on each rank.

    A gradient call is cut into microbatches along dim 0, which go through the stages
    as the schedule says. Each rank runs the loss itself, of which only its own units'
    calls do something: outputs of units are all that travels. Value and metrics reach
    every rank of the axis; a rank holds the parameters of its own stages.

    Args:
        f: a train step; or a loss ``(params, *batch)``: the forward pass alone.
        axis: the mesh axis along which the stages lie. Every rank of it is given the
            same batch.
        n_microbatches: M; the rows of a batch need not be a multiple of it.
        schedule: ``(n_stages, n_microbatches, ...) -> Schedule``, such as those of
            ``ff.schedules``; with a keyword ``chunks`` of default v, each rank has v
            stages. Or the schedule itself: a list of actions for each rank.
        stages: how many unit calls each stage has, or the name of the unit at which
            each begins; by default balanced by FLOPs.

    Raises:
        ScheduleError: a schedule that cannot run; says why, before anything is sent.
        ValueError: more stages than unit calls, a cut that names no unit, fewer rows
            than microbatches, random numbers drawn outside units for two stages.
        RuntimeError: a loss whose course depends on a tensor's value, or which is
            differentiated by ``torch.func``.

    Cost, a step: one message each way for each microbatch and each two stages of
    different ranks that depend on each other, of the bytes of what they share; a
    broadcast of loss and metrics; a psum of the gradients of leaves that stages of
    several ranks use. The first call for each shape of microbatch runs the loss once
    on fake tensors.

    Source: GPipe (Huang et al., 2019); PipeDream-flush, or 1F1B (Narayanan et al.,
    2021); FairScale's Pipe.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"pipe": 2}, "simulated")
    >>> layer = ff.unit(lambda p, x: x * p)
    >>> def loss(params, x):
    ...     return layer(params[1], layer(params[0], x)).mean()
    >>> def main():
    ...     grad = ff.pipeline(
    ...         ff.value_and_grad(loss), mesh, "pipe", n_microbatches=2)
    ...     params = [torch.tensor(2.0), torch.tensor(3.0)]
    ...     value, grads = grad(params, torch.arange(4.0))
    ...     return value.item(), [g.item() for g in grads]
    >>> ff.spmd(main, mesh)()
    [(9.0, [4.5, 3.0]), (9.0, [4.5, 3.0])]
    """
    names = mesh.check(axis)
    if len(names) != 1:
        raise ValueError(f"a pipeline lies along one axis, got {names}")
    if not isinstance(n_microbatches, int) or n_microbatches < 1:
        raise ValueError(f"n_microbatches={n_microbatches!r}: there is at least one")
    size = mesh.axes[names[0]]
    if callable(schedule):
        count = size * _chunks(schedule) if stages is None else len(stages)
        made = _made(schedule, count, n_microbatches, size)
    else:
        made = parse(schedule)
    if len(made) != size:
        raise ScheduleError(
            f"the schedule is for {len(made)} ranks, but axis {names[0]!r} has {size}"
        )
    if all(action.is_compute for row in made for action in row):
        verify(made, n_microbatches=n_microbatches)
    if stages is not None:
        stages = list(stages)  # type: ignore[assignment]
    handler = Pipelining(mesh, names[0], n_microbatches, made, stages)
    return transformed(f, handler, handler.call)


def _chunks(schedule: MakeSchedule) -> int:
    """How many stages a schedule gives each rank."""
    known = inspect.signature(schedule).parameters.get("chunks")
    return known.default if known and isinstance(known.default, int) else 1


def _made(schedule: MakeSchedule, count: int, m: int, ranks: int) -> Schedule:
    known = inspect.signature(schedule).parameters.get("chunks")
    if known is None:
        return parse(schedule(count, m))
    if count % ranks:
        raise ScheduleError(f"{count} stages do not part evenly over {ranks} ranks")
    return parse(schedule(count, m, chunks=count // ranks))

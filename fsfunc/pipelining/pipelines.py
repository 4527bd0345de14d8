"""``pipeline``: a loss in stages, its microbatches run by a schedule that is data.

The public entry of this folder. It checks its arguments, makes and proves the schedule,
and puts an interpretation around the user's step: `handler.Pipelining`, or for
schedules with updates `stage_updates.Updating`. Nothing of the loss is known before its
first call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, overload

from fsfunc.comm.mesh import Mesh, check_mesh
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.frames import transformed
from fsfunc.core.outcomes import Argnums, batch_arguments
from fsfunc.optim.optimizer import Optimizer, Trainable
from fsfunc.pipelining.actions import (
    Action,
    Schedule,
    ScheduleError,
    is_asynchronous,
    parse,
)
from fsfunc.pipelining.handler import Pipelining
from fsfunc.pipelining.schedules import one_f_one_b
from fsfunc.pipelining.stage_plans import Stages
from fsfunc.pipelining.stage_updates import Predict, Updating
from fsfunc.pipelining.verification import verify

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Params = TypeVar("_Params", bound=Any)
_Trained = TypeVar("_Trained", bound=Trainable)

MakeSchedule: TypeAlias = Callable[..., Schedule]
Rows: TypeAlias = Sequence[Iterable[Action | str] | str]
_MOST_MICROBATCHES = 10_000  # half a second to make and prove


@overload
def pipeline(
    f: Callable[_P, _R],
    mesh: Mesh,
    axis: str,
    *,
    n_microbatches: int,
    schedule: MakeSchedule | Rows = one_f_one_b,
    stages: Stages = None,
    batch_argnums: Argnums | None = None,
    update: None = None,
    predict: None = None,
) -> Callable[_P, _R]: ...
@overload
def pipeline(
    f: Callable[Concatenate[_Params, _P], Any],
    mesh: Mesh,
    axis: str,
    *,
    n_microbatches: int,
    schedule: MakeSchedule | Rows,
    stages: Stages = None,
    batch_argnums: Argnums | None = None,
    update: Optimizer,
    predict: Predict | None = None,
) -> Callable[Concatenate[_Trained, _P], tuple[_Trained, dict[str, Any]]]: ...
@api_boundary
def pipeline(
    f: Callable[..., Any],
    mesh: Mesh,
    axis: str,
    *,
    n_microbatches: int,
    schedule: MakeSchedule | Rows = one_f_one_b,
    stages: Stages = None,
    batch_argnums: Argnums | None = None,
    update: Optimizer | None = None,
    predict: Predict | None = None,
) -> Callable[..., Any]:
    """Runs the unit calls of ``f``'s loss in stages, one or several on each rank.

    The batch of a gradient call is cut into microbatches along dim 0, which go through
    the stages in the order of the schedule. In ``f(params, batch)`` the tensors of the
    second argument are the batch; with more arguments ``batch_argnums`` names it. Each
    rank calls the loss function, in which only the unit calls of its own stages compute
    anything; only outputs of units are sent. Value and metrics are returned on every
    rank of the axis. A rank has the parameters of its own stages alone.

    A loss has to be a mean over rows: its value, metrics and gradients are the means of
    the microbatches', weighted by their rows. A loss with weights of its own returns
    ``ff.Weighted``; a metric that is a sum is ``ff.Summed``, a largest one
    ``ff.Max``.

    Args:
        f: a train step; or a loss ``(params, *batch)``: the forward pass alone.
        axis: the mesh axis of the stages. All its ranks are given the same batch.
        n_microbatches: M; the rows of a batch need not be a multiple of it.
        schedule: ``(n_stages, n_microbatches, ...) -> Schedule``, such as those of
            ``ff.schedules``; with a keyword ``chunks`` of default v, each rank has v
            stages. Or the schedule itself: a list of actions for each rank.
        stages: how many unit calls each stage has, or the name of the unit at which
            each begins; by default balanced by FLOPs.
        batch_argnums: the arguments of gradient calls that are the batch, by position
            or keyword, unless ``ff.value_and_grad(loss, batch_argnums=)`` names its
            own. Arguments that are differentiated are not cut.
        update: for a schedule with updates, such as ``ff.schedules.asynchronous``: the
            optimizer that a rank applies to its own leaves at each of them. ``f`` is
            a loss, and what comes back a train step.
        predict: with ``update``: ``(params, opt_state, updates) -> params``: a forward
            whose gradient will be some updates late uses parameters predicted so many
            updates ahead, by the momentum in ``opt_state`` say.

    With ``update`` the result is ``step(state, *batch) -> (state, {"loss": loss})``;
    ``state.step`` counts calls, the optimizer's own count its updates. An update
    applies the mean of the gradients, over the rows of the microbatches since the last
    one, to the newest parameters. Each gradient is taken at the parameters that the
    stages had at the microbatch's forward: w[k+1] = w[k] - l g(w[k-s]) for ``sgd``, s
    being ``ff.schedules.staleness``, which differs from stage to stage. This equals a
    synchronous step only where s is 0 (one rank: SGD on the microbatches; an interval
    of M or more: the step of 1F1B). The loss is the mean of the microbatches', each at
    the parameters that it was computed with. Nothing is in flight between two calls.

    Raises:
        ScheduleError: a schedule that cannot run, and why, before any message.
            With updates: no ``update``, or several stages on a rank.
        ValueError: more stages than unit calls, a cut that names no unit, fewer rows
            than microbatches, random numbers drawn outside units for two stages, a
            batch that is differentiated.
            With updates: a leaf of stages on several ranks, an optimizer that
            communicates, a ``Weighted`` loss, ``shard`` or ``accumulate`` around.
        RuntimeError: a loss whose control flow depends on a tensor's value, or which is
            differentiated by ``torch.func``.

    Cost, a step: one message each way for each microbatch and each two stages of
    different ranks that depend on each other, of the bytes of what they share; a
    broadcast of loss and metrics; a psum of the gradients of leaves that stages of
    several ranks use. The first call for each shape of microbatch runs the loss once
    on fake tensors.

    With updates, also the parameters of each microbatch in flight that differ.

    Source: GPipe (Huang et al., 2019); PipeDream-flush, or 1F1B (Narayanan et al.,
    2021); FairScale's Pipe. Updates: AMPNet (Gaunt et al., 2017); PipeDream (Narayanan
    et al., 2019), whose weight stashing this is; SpecTrain (Chen et al., 2018).

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
    axes = check_mesh(mesh, "pipeline").check(axis)
    if len(axes) != 1:
        raise ValueError(f"a pipeline is over one axis, got {axes}")
    _check_numbers(n_microbatches, stages)
    size = mesh.axes[axes[0]]
    if callable(schedule):
        rows = _make_schedule(schedule, stages, n_microbatches, size)
    else:
        rows = parse(schedule)
    if len(rows) != size:
        raise ScheduleError(
            f"the schedule is for {len(rows)} ranks, but axis {axes[0]!r} has {size}"
        )
    # One with transfers names its edges, which are known when the loss is traced: then
    # it is proven (`handler._explicit`).
    if all(action.is_compute for row in rows for action in row):
        verify(rows, n_microbatches=n_microbatches)
    if stages is not None:
        stages = list(stages)  # type: ignore[assignment]
    batch = batch_arguments(batch_argnums)
    if update is None:
        _check_synchronous(rows, predict)
        handler = Pipelining(mesh, axes[0], n_microbatches, rows, stages, batch)
        return transformed(f, handler)
    if not is_asynchronous(rows):
        raise ScheduleError(
            "update= is for a schedule with updates (U3), such as "
            "ff.schedules.asynchronous: with another one apply the optimizer to what "
            "the gradient call returns, as update(ff.value_and_grad(loss)) does"
        )
    updating = Updating(
        mesh, axes[0], n_microbatches, rows, stages, batch, update, predict
    )
    return transformed(updating.step(f), updating)


def _check_numbers(n_microbatches: int, stages: Stages) -> None:
    if not isinstance(n_microbatches, int) or n_microbatches < 1:
        raise ValueError(f"n_microbatches={n_microbatches!r}: there is at least one")
    if n_microbatches > _MOST_MICROBATCHES:
        raise ValueError(
            f"n_microbatches={n_microbatches}: a schedule is made and proved action by "
            f"action, for {_MOST_MICROBATCHES} microbatches at most; accumulate around "
            "the pipeline for more"
        )
    if isinstance(stages, str) or not isinstance(stages, Sequence | None):
        raise ValueError(
            f"stages={stages!r}: give a list, with the number of unit calls of each "
            "stage, or the name of the unit at which it begins; by default there are "
            "as many stages as the schedule has"
        )


def _check_synchronous(schedule: Schedule, predict: Predict | None) -> None:
    if is_asynchronous(schedule):
        raise ScheduleError(
            "the schedule has updates (U3), but there is no update=: give the loss and "
            "its optimizer, pipeline(loss, ..., update=optimizer), and evaluate by "
            "another schedule"
        )
    if predict is not None:
        raise ScheduleError("predict= goes with update= and a schedule with updates")


def _make_schedule(
    schedule: MakeSchedule, stages: Stages, n_microbatches: int, ranks: int
) -> Schedule:
    """Returns the schedule for the given stages, or for its own number of stages.

    A function with a keyword ``chunks`` of an integer default lays out so many stages
    on each rank.
    """
    chunks_parameter = inspect.signature(schedule).parameters.get("chunks")
    chunks = (
        chunks_parameter.default
        if chunks_parameter and isinstance(chunks_parameter.default, int)
        else 1
    )
    n_stages = ranks * chunks if stages is None else len(stages)
    if chunks_parameter is None:
        return parse(schedule(n_stages, n_microbatches))
    if n_stages % ranks:
        raise ScheduleError(f"{n_stages} stages do not part evenly over {ranks} ranks")
    return parse(schedule(n_stages, n_microbatches, chunks=n_stages // ranks))

"""``search``: stacks of transforms tried on the cost model, and the best of them."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc import tree
from fsfunc.comm.collectives import pmax
from fsfunc.comm.descriptions import has_values
from fsfunc.comm.groups import axis_index, get_group
from fsfunc.comm.launch import local_batch, make_mesh, spmd
from fsfunc.comm.mesh import Mesh
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.core.losses import Loss
from fsfunc.optim.optimizer import Optimizer
from fsfunc.planning.candidates import Axes, Space, meshes
from fsfunc.planning.machines import Hardware
from fsfunc.planning.search_results import Search, front_of
from fsfunc.planning.stacks import PIPE, Choice, Stack
from fsfunc.planning.trials import Training, Trials
from fsfunc.printing.tables import of_bytes
from fsfunc.state.initialization import init_state
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.transforms.policies import Mode, Policy

_Params = TypeVar("_Params", bound=Any)
_Batch = TypeVar("_Batch", bound=Any)
Offloadable: TypeAlias = Literal["params", "moments", "activations"]
ScheduleName: TypeAlias = Literal[
    "gpipe", "one_f_one_b", "looped_bfs", "interleaved_1f1b", "zb_h1", "zb_v"
]

SAVES = 0.02  # of the peak: what a step of the ladder of `accumulate` must be worth
MANY, FEW = 200, 12  # of more stacks than that, few are planned


@api_boundary
def search(
    loss_fn: Callable[[_Params, _Batch], Loss],
    optimizer: Optimizer,
    params: _Params | Callable[[], _Params],
    batch: _Batch | Callable[[], _Batch],
    mesh_sizes: int | Mapping[str, int] | Sequence[Mapping[str, int]],
    hardware: Hardware,
    memory: float | None = None,
    *,
    zero: Sequence[Literal[0, 1, 2, 3]] = (0, 1, 2, 3),
    remat: Sequence[Policy | Mode | None] = (None, "always"),
    accumulate: Sequence[int] | None = None,
    schedules: Sequence[ScheduleName] = (
        "one_f_one_b",
        "interleaved_1f1b",
        "zb_h1",
        "zb_v",
    ),
    microbatches: Sequence[int] | None = None,
    compute: torch.dtype | Sequence[torch.dtype | None] | None = None,
    reduce: torch.dtype | None = None,
    offload: Sequence[Sequence[Offloadable]] = ((),),
    donate: bool = True,
    layouts: LayoutRules | None = None,
    dims: Mapping[str, int] | None = None,
    plans: int | None = None,
    run: int = 0,
) -> Search:
    """The stacks of transforms that are best in step time and memory, fastest first.

    Each stack is planned on an abstract mesh and its plan estimated on ``hardware``:
    nothing is computed, sent or allocated. What comes back is the Pareto front of those
    that fit: of two, the slower one holds less. A choice has its ``code``, and
    ``build(train_step, mesh)`` makes the same step.

    What is not planned is named with the reason in ``skipped``: a stack whose
    parameters and moments alone are too large, or whole gradients beside them, or the
    activations that another plan had with no more rows; one whose outline in closed
    form is half as large again as what fits; a mesh that the batch or the units cannot
    be cut for; more accumulation where it saves less than 2% of the peak.
    With a pipeline, schedule, microbatches and remat are chosen at one ``zero``, and
    those on the front there are tried with the others: that is a shortcut, all else is
    not.

    Args:
        loss_fn: ``loss_fn(params, batch)``, whose layers are units.
        optimizer: what will update the parameters.
        params: the whole parameters, or a function that returns them.
        batch: of all ranks together, cut along dim 0, or a function that returns it;
            only shapes and dtypes are read.
        mesh_sizes: a number of ranks, whose every factorisation is tried: data x pipe
            and, where the hardware has nodes and there are several, node x data x pipe;
            or the axes of one mesh, or of several. "data" cuts the batch, parameters
            are repeated along "node", stages lie along "pipe"; times what ``layouts``
            and ``dims`` name.
        hardware: on what.
        memory: bytes that a rank may hold; by default the hardware's.
        zero, remat: what to try, such as ``remat=(None, ff.SaveOnly("attention"))``.
        accumulate: numbers of parts; by default powers of two that divide the rows of
            a rank. Where gradients are sharded, reduced once a step and with each
            part. Not together with a pipeline, whose microbatches do the same.
        schedules: names in ``ff.schedules``.
        microbatches: by default 1, 2 and 4 for each rank of the pipeline.
        compute, reduce: of ``ff.precision`` around every stack; by default none is. Of
            several dtypes each is tried: what is named is taken for good enough.
        offload: what to try to offload to the host, such as ``((), ("moments",),
            ("params", "moments"))``, each as ``ff.offload`` takes it.
        donate: whether steps are donated.
        layouts: how leaves can be split, as ``init_state`` takes it, such as
            ``{"blocks/*/up": ff.Split(0, "model")}``: its axes are tried at every
            size, and where one has a single rank, no leaf is split over it.
        dims: further axes along which ranks have other parts of the batch, each with
            the dim that it cuts: ``{"context": 1}`` cuts sequences, ``{"expert": 0}``
            rows. Every mesh has the axes named here and in ``layouts``, if need be
            with one rank, so that the loss may name them.
        plans: how many stacks are planned at most, those that an outline in closed form
            finds fastest of those that it finds to fit, until the others are slower by
            more than it can be off; and as many more, the smallest, where none fits.
            None: all of up to 200 stacks, 12 of more.
        run: how many of the fastest are run here, a few steps each, on the processes
            that there are (one, or those of torchrun), with the parameters and the
            batch that are given; ``best`` is then the fastest that was measured.

    Returns:
        a :class:`Search`: the front as a sequence; ``best`` is the fastest, ``ranked``
        all that fit, ``tried`` all that were planned. ``print`` it for a table.

    Raises:
        ValueError: nothing fits: by how much the closest misses. Every stack is
            impossible: why. A mesh of other axes, a batch without rows in common. With
            ``run``, meshes of another number of ranks than there are processes, or
            parameters or a batch without values.
        RuntimeError: the loss reads a tensor's value; names the line.

    Cost: a plan and an estimate for each stack: about 0.1 s without, 1 s with a
    pipeline for ten units, growing with units, microbatches and distinct ranks. An
    outline costs some 0.1 ms.

    >>> import torch, fsfunc as ff
    >>> from fsfunc.planning.hardware import CPU
    >>> layer = ff.unit(lambda p, x: torch.tanh(x @ p))
    >>> def loss(params, x):
    ...     for p in params:
    ...         x = layer(p, x)
    ...     return x.square().mean()
    >>> init = lambda: [torch.zeros(512, 512) for _ in range(8)]
    >>> found = search(
    ...     loss, ff.sharded_adam(1e-3), init, torch.zeros(64, 512), {"data": 2}, CPU,
    ...     memory=21e6, zero=(2, 3), accumulate=(1,), remat=(None,))
    >>> print(found.best.code)
    mesh = ff.make_mesh({"data": 2})
    step = ff.shard(train_step, mesh, "data", zero=3)
    step = ff.donate(step)
    # a rank's batch: ff.local_batch(batch, mesh, "data")
    """
    space = Space(
        zero=tuple(zero),
        remat=tuple(remat),
        accumulate=None if accumulate is None else tuple(accumulate),
        schedules=tuple(schedules),
        microbatches=None if microbatches is None else tuple(microbatches),
        compute=tuple(compute) if isinstance(compute, Sequence) else (compute,),
        reduce=reduce,
        offload=tuple(tuple(x) if not isinstance(x, str) else x for x in offload),  # pyright: ignore
        donate=donate,
        dims=dims or {},
        layouts=layouts or {},
    )
    bound = hardware.memory if memory is None else memory
    if not bound > 0:
        raise ValueError(f"memory={memory!r}: a rank may hold some bytes")
    if plans is not None and plans < 1:
        raise ValueError(f"plans={plans!r}: at least one stack is planned")
    sizes = meshes(mesh_sizes, hardware, space.named)
    training = Training(loss_fn, optimizer, params, batch)
    if run:
        check_runs(sizes, training)
    at = Trials(training, hardware, bound, space)
    sizes = [axes for axes in sizes if at.lies_on(axes)]
    every = [stack for axes in sizes for stack in _stacks(at, space, axes)]
    if plans is None and len(every) > MANY:
        plans = FEW
    if plans is not None:
        at.try_promising(every, plans)
        sizes = []
    for axes in sizes:
        if dict(axes).get(PIPE, 1) > 1:
            _pipelined(at, space, axes)
        else:
            for ladder in space.flat(axes, at.rows):
                _climb(at, ladder)
    found = _found(at)
    if not run:
        return found
    return found.with_times(measure_choices(found.ranked[:run], at.step, training))


def _stacks(at: Trials, space: Space, axes: Axes) -> list[Stack]:
    """All stacks on a mesh."""
    if dict(axes).get(PIPE, 1) == 1:
        return [stack for some in space.flat(axes, at.rows) for stack in some]
    first = space.pipelined(axes, at.rows)
    return [each for s in first for each in (s, *space.other_zeros(s))]


def _climb(at: Trials, ladder: Sequence[Stack]) -> None:
    """Tries more and more accumulation, for as long as it pays."""
    last: Choice | None = None
    for i, stack in enumerate(ladder):
        choice = at.try_one(stack)
        # From one part to two, the sum of gradients is new: it may only pay later.
        if choice and last and last.stack.accumulate > 1:
            saved = 1 - choice.peak_bytes / last.peak_bytes
            if saved < SAVES and choice.seconds >= last.seconds:
                why = f"accumulate={stack.accumulate} already saves no memory"
                at.skip(ladder[i + 1 :], why)
                return
        last = choice or last


def _pipelined(at: Trials, space: Space, axes: Axes) -> None:
    """Tries schedules at one ``zero``, and the best of them at the others."""
    first: list[Choice] = []
    for stack in space.pipelined(axes, at.rows):
        # The first `zero` whose state could fit at all.
        options = [stack, *space.other_zeros(stack)]
        stack = next((s for s in options if at.least(s) <= at.memory), stack)
        choice = at.try_one(stack)
        if choice:
            first.append(choice)
    best = front_of(first)
    others = [s for c in first for s in space.other_zeros(c.stack)]
    chosen = [s for c in best for s in space.other_zeros(c.stack)]
    for stack in chosen:
        at.try_one(stack)
    rest = [s for s in others if s not in chosen]
    at.skip(rest, "its schedule, microbatches and remat are worse at another zero")


def _found(at: Trials) -> Search:
    """All that was found.

    Raises:
        ValueError: nothing fits, or nothing could be tried.
    """
    if not any(choice.fits for choice in at.tried):
        at.find_closest()
    fitting = [choice for choice in at.tried if choice.fits]
    if not fitting:
        cause = at.errors[0] if at.errors and not at.tried else None
        raise ValueError(_nothing(at)) from cause
    front = tuple(front_of(fitting))
    return Search(front, tuple(at.tried), tuple(at.skipped), at.memory)


def _nothing(at: Trials) -> str:
    """The reason why there is no stack to give."""
    limit = f"the {of_bytes(at.memory)} that a rank may hold"
    total = len(at.tried) + len(at.skipped)
    if at.tried:
        closest = min(at.tried, key=lambda c: c.needed_bytes)
        needed = closest.needed_bytes
        return (
            f"none of {total} stacks fits in {limit}: the closest needs "
            f"{of_bytes(needed)}, {of_bytes(needed - at.memory)} too much "
            f"({needed / at.memory:.3g} times it): {closest.stack}"
        )
    heavy = [s for s in at.skipped if s.least]
    if heavy:
        best = min(heavy, key=lambda s: s.least)
        return (
            f"none of {total} stacks fits in {limit}: of the closest, {best.why}, "
            f"{of_bytes(best.least - at.memory)} too much: {best.stack}"
        )
    whys = Counter(s.why for s in at.skipped)
    listed = "; ".join(f"{why} ({n} stacks)" for why, n in whys.most_common())
    return f"no stack could be tried: {listed or 'there is none in the space'}"


_TURNS, _STEPS = 2, 4  # of each choice; in each turn one step comes before these


def check_runs(sizes: Sequence[Axes], training: Training) -> None:
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
    for name, given in (("params", training.params), ("batch", training.batch)):
        leaves = [] if callable(given) else tree.leaves(given)
        if any(isinstance(x, Tensor) and not has_values(x) for x in leaves):
            raise ValueError(
                f"run= measures steps here, and {name} has a tensor without values: "
                "give one with values, or a function that returns it"
            )


def measure_choices(
    choices: Sequence[Choice], train_step: Callable[..., Any], training: Training
) -> dict[Choice, float]:
    """The seconds of a step of each choice, of the slowest rank.

    Every rank calls it with the same choices. They take turns, one state at a time:
    the median of eight steps, in two turns.
    """
    found: dict[Choice, list[float]] = {choice: [] for choice in choices}
    for _ in range(_TURNS):
        for choice, times in found.items():
            mesh = make_mesh(choice.axes)
            step = choice.build(train_step, mesh)

            def main(choice=choice, step=step, mesh=mesh) -> list[float]:
                batch = training.batch
                whole = batch() if callable(batch) else batch
                mine = _part(whole, choice.stack, mesh)
                layouts = choice.stack.layouts
                made = training.params, training.optimizer, mine
                state = init_state(step, *made, layouts=layouts)
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
    found, device = [], get_group(axes).link.device
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

"""``search``: stacks of transforms tried on the cost model, and the best of them.

`candidates` lists meshes and stacks, `trials` plans and estimates one, and
`search_results` is what comes back. Here is the order of trials: all stacks of a small
space; of a large one those whose outlines are best, of each kind first; accumulation
step by step, for as long as it saves memory; a pipeline's schedules at one ``zero``
first. With ``run=`` the fastest are run on the processes at hand, and timed.
"""

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
from fsfunc.pipelining.schedules import ScheduleName
from fsfunc.planning.candidates import SCHEDULES, Axes, Space, meshes
from fsfunc.planning.machines import Hardware
from fsfunc.planning.search_results import Search, front_of
from fsfunc.planning.stacks import PIPE, Choice, Stack
from fsfunc.planning.trials import Training, Trials
from fsfunc.printing.tables import of_bytes, of_share
from fsfunc.state.initialization import init_state
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.transforms.policies import Mode, Policy
from fsfunc.tree.types import PyTree

_Params = TypeVar("_Params", bound=Any)
_Batch = TypeVar("_Batch", bound=Any)
Offloadable: TypeAlias = Literal["params", "moments", "activations"]

# The share of the peak that twice the accumulation must save, to try four times it.
SAVES = 0.02
MANY, FEW = 200, 12  # of more than MANY stacks FEW are planned,
MOST_CALLS = 700  # of as many unit calls in all


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
    schedules: Sequence[ScheduleName] = SCHEDULES,
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
    """Finds the stacks of transforms that are best in step time and memory.

    Each stack is planned on an abstract mesh and its plan estimated on ``hardware``:
    nothing is computed, sent or allocated. The result is the Pareto front of those that
    fit, fastest first: of two, the slower one holds less. ``by_kind`` has the fastest
    of each kind: of stacks with several ranks along the same axes, the same ``zero``
    and schedule, and the same values on the host. A choice has its ``code``, and
    ``build(train_step, mesh)`` makes the same step.

    Stacks that are not planned are in ``skipped``, with the reason: parameters and
    moments alone are too large, or with whole gradients, or with the activations that
    another plan had with no more rows; an outline in closed form is by more than its
    error larger than what fits; the batch or the units cannot be cut for the mesh; more
    accumulation saves less than 2% of the peak. With a pipeline, schedule, microbatches
    and remat are chosen at the first ``zero`` with which they fit, and only the best
    are tried with the others: that is a shortcut, all else is not.

    Args:
        loss_fn: ``loss_fn(params, batch)``, whose layers are units.
        optimizer: what will update the parameters.
        params: the whole parameters, or a function that returns them.
        batch: of all ranks together, cut along dim 0, or a function that returns it;
            only shapes and dtypes are read.
        mesh_sizes: a number of ranks, of which every factorisation is tried: data x
            pipe and, if the hardware has nodes and there are several, node x data x
            pipe, times the axes that ``layouts`` and ``dims`` name; or the axes of one
            mesh, or of several. "data" cuts the batch, parameters are repeated along
            "node", stages lie along "pipe".
        hardware: the machine to estimate the time on.
        memory: bytes that a rank may need; by default the hardware's, of which its
            ``margin`` is kept free.
        zero, remat: what to try, such as ``remat=(None, ff.SaveOnly("attention"))``.
        accumulate: numbers of parts; by default powers of two that divide the rows of
            a rank. If gradients are sharded, they are reduced once a step, and in other
            stacks with each part. Not combined with a pipeline, whose microbatches do
            the same.
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
        plans: how many stacks are planned at most: those that fit by an outline in
            closed form, the fastest of each kind first, until the others are slower by
            more than an outline can be off. If none of them fits, as many more, three
            at least, the smallest that may fit by their outlines. None: all of up to
            200 stacks; 12 of more, and fewer if that would be 3,000 unit calls.
        run: how many of the fastest are run here, a few steps each, on the processes
            that there are (one, or those of torchrun), with the parameters and the
            batch that are given; ``best`` is then the fastest that was measured.

    Returns:
        a :class:`Search`: the front as a sequence; ``best`` is the fastest, ``by_kind``
        the fastest of each kind, ``ranked`` all that fit, ``tried`` all that were
        planned. ``print`` it for a table.

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
    >>> result = search(
    ...     loss, ff.sharded_adam(1e-3), init, torch.zeros(64, 512), {"data": 2}, CPU,
    ...     memory=21e6, zero=(2, 3), accumulate=(1,), remat=(None,))
    >>> print(result.best.code)
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
    bound = hardware.usable if memory is None else memory
    if not bound > 0:
        raise ValueError(f"memory={memory!r}: a rank may hold some bytes")
    if plans is not None and plans < 1:
        raise ValueError(f"plans={plans!r}: at least one stack is planned")
    sizes = meshes(mesh_sizes, hardware, space.required_axes)
    training = Training(loss_fn, optimizer, params, batch)
    if run:
        check_runs(sizes, training)
    trials = Trials(training, hardware, bound, space)
    sizes = [axes for axes in sizes if trials.lies_on(axes)]
    all_stacks = [stack for axes in sizes for stack in _stacks(trials, space, axes)]
    # A plan takes 0.1 to 1 s, an outline 0.1 ms.
    is_small = plans is None and len(all_stacks) <= MANY
    if plans is not None:
        trials.try_promising(all_stacks, plans)
    elif not is_small:
        trials.try_promising(all_stacks, FEW, MOST_CALLS)
    # Of a large space nothing is left to try mesh by mesh.
    sizes = sizes if is_small else []
    for axes in sizes:
        if dict(axes).get(PIPE, 1) > 1:
            _pipelined(trials, space, axes)
        else:
            for ladder in space.without_pipeline(axes, trials.rows):
                _climb(trials, ladder)
    if is_small and not any(choice.fits for choice in trials.tried):
        trials.find_closest()
    searched = _make_result(trials)
    if not run:
        return searched
    times = measure_choices(searched.ranked[:run], trials.step, training)
    return searched.with_times(times)


def _stacks(trials: Trials, space: Space, axes: Axes) -> list[Stack]:
    """Returns all stacks on a mesh."""
    if dict(axes).get(PIPE, 1) == 1:
        return [
            stack
            for stacks in space.without_pipeline(axes, trials.rows)
            for stack in stacks
        ]
    with_first_zero = space.pipelined(axes, trials.rows)
    return [
        stack
        for first in with_first_zero
        for stack in (first, *space.other_zeros(first))
    ]


def _climb(trials: Trials, ladder: Sequence[Stack]) -> None:
    """Tries more and more accumulation, for as long as it pays."""
    last_choice: Choice | None = None
    for i, stack in enumerate(ladder):
        choice = trials.try_stack(stack)
        # From one part to two, the sum of gradients is new: it may only pay later.
        if choice and last_choice and last_choice.stack.accumulate > 1:
            saved_share = 1 - choice.peak_bytes / last_choice.peak_bytes
            if saved_share < SAVES and choice.seconds >= last_choice.seconds:
                reason = f"accumulate={stack.accumulate} already saves no memory"
                trials.skip(ladder[i + 1 :], reason)
                return
        last_choice = choice or last_choice


def _pipelined(trials: Trials, space: Space, axes: Axes) -> None:
    """Tries schedules at one ``zero``, and the best of them at the others."""
    choices: list[Choice] = []
    for first in space.pipelined(axes, trials.rows):
        # The first `zero` with which it fits: what is too large at one may not be so at
        # the next.
        options = [first, *space.other_zeros(first)]
        state_fits = [s for s in options if trials.least_bytes(s) <= trials.memory]
        for stack in state_fits or options[:1]:
            choice = trials.try_stack(stack)
            if choice is not None:
                choices.append(choice)
            elif stack not in trials.too_large:
                break  # it has no plan, whatever its `zero`
            if choice is not None and choice.fits:
                break
    best = front_of(choice for choice in choices if choice.fits)
    tried = [c.stack for c in choices]
    others = dict.fromkeys(s for c in choices for s in space.other_zeros(c.stack))
    others = [stack for stack in others if stack not in tried]
    stacks_of_best = dict.fromkeys(s for c in best for s in space.other_zeros(c.stack))
    for stack in stacks_of_best:
        if stack in others:
            trials.try_stack(stack)
    not_tried = [s for s in others if s not in stacks_of_best]
    trials.skip(
        not_tried, "its schedule, microbatches and remat are worse at another zero"
    )


def _make_result(trials: Trials) -> Search:
    """Returns all that was found.

    Raises:
        ValueError: nothing fits, or nothing could be tried.
    """
    fitting = [choice for choice in trials.tried if choice.fits]
    if not fitting:
        cause = trials.errors[0] if trials.errors and not trials.tried else None
        raise ValueError(_explain_nothing(trials)) from cause
    front = tuple(front_of(fitting))
    tried, skipped = tuple(trials.tried), tuple(trials.skipped)
    return Search(front, tried, skipped, trials.memory, _describe_margin(trials))


def _describe_margin(trials: Trials) -> str:
    """Returns what a search keeps free; "" if its memory was given to it."""
    hardware = trials.hardware
    if trials.memory != hardware.usable or not hardware.margin:
        return ""
    share = of_share(hardware.margin, 1)
    return f" ({share} of {of_bytes(hardware.memory)} is kept free)"


def _explain_nothing(trials: Trials) -> str:
    """Returns why there is no stack to give."""
    kept = _describe_margin(trials)
    limit = f"the {of_bytes(trials.memory)} that a rank may hold{kept}"
    total = len(trials.tried) + len(trials.skipped)
    if trials.tried:
        closest = min(trials.tried, key=lambda c: c.needed_bytes)
        needed = closest.needed_bytes
        return (
            f"none of {total} stacks fits in {limit} ({len(trials.tried)} planned, the "
            "others larger by a bound or an outline): the closest needs "
            f"{of_bytes(needed)}, {of_bytes(needed - trials.memory)} too much "
            f"({needed / trials.memory:.3g} times it): {closest.stack}"
        )
    too_large = [s for s in trials.skipped if s.least_bytes]
    if too_large:
        closest = min(too_large, key=lambda s: s.least_bytes)
        return (
            f"none of {total} stacks fits in {limit}: of the closest, "
            f"{closest.reason}, "
            f"{of_bytes(closest.least_bytes - trials.memory)} too much: "
            f"{closest.stack}"
        )
    reasons = Counter(s.reason for s in trials.skipped)
    listed = "; ".join(f"{reason} ({n} stacks)" for reason, n in reasons.most_common())
    return f"no stack could be tried: {listed or 'there is none in the space'}"


# Each choice is timed in so many turns of so many steps, after one that warms up.
_TURNS, _STEPS = 2, 4


def check_runs(sizes: Sequence[Axes], training: Training) -> None:
    """Raises if stacks on these meshes cannot be run here.

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
    for name, values in (("params", training.params), ("batch", training.batch)):
        leaves = [] if callable(values) else tree.leaves(values)
        if any(isinstance(x, Tensor) and not has_values(x) for x in leaves):
            raise ValueError(
                f"run= measures steps here, and {name} has a tensor without values: "
                "give one with values, or a function that returns it"
            )


def measure_choices(
    choices: Sequence[Choice],
    train_step: Callable[..., tuple[PyTree, PyTree]],
    training: Training,
) -> dict[Choice, float]:
    """Returns the seconds of a step of each choice, on the slowest rank.

    Every rank calls it with the same choices. It is the median of eight steps, in two
    turns: so what disturbs the machine for a while does not hit one choice alone. One
    state at a time is in memory.
    """
    times_of: dict[Choice, list[float]] = {choice: [] for choice in choices}
    for _ in range(_TURNS):
        for choice, times in times_of.items():
            # The state of the last choice is gone with its `main`: one at a time.
            mesh = make_mesh(choice.axes)
            step = choice.build(train_step, mesh)

            def main(choice=choice, step=step, mesh=mesh) -> list[float]:
                batch = training.batch
                whole_batch = batch() if callable(batch) else batch
                rank_batch = _part(whole_batch, choice.stack, mesh)
                layouts = choice.stack.layouts
                init_args = training.params, training.optimizer, rank_batch
                state = init_state(step, *init_args, layouts=layouts)
                return _seconds(step, state, rank_batch, tuple(choice.axes))

            times += spmd(main, mesh)()[0]
    return {choice: statistics.median(times) for choice, times in times_of.items()}


def _part(batch: PyTree, stack: Stack, mesh: Mesh) -> PyTree:
    """Returns this rank's part of the batch."""
    batch = local_batch(batch, mesh, stack.row_axes) if stack.row_axes else batch
    for axis in stack.batch_axes:
        if dim := stack.dims.get(axis, 0):
            n_parts, index = mesh.axes[axis], axis_index(axis)
            batch = tree.map(
                lambda x, n=n_parts, i=index, d=dim: x.chunk(n, d)[i], batch
            )
    return batch


def _seconds(
    step: Callable[..., tuple[PyTree, PyTree]],
    state: PyTree,
    batch: PyTree,
    axes: tuple[str, ...],
) -> list[float]:
    """Returns the seconds of some steps, each of the slowest rank."""
    slowest, device = [], get_group(axes).link.device
    for _ in range(1 + _STEPS):  # the first one records, checks and allocates
        pmax(torch.zeros((), device=device), axes)  # all begin together
        start = time.perf_counter()
        state, _ = step(state, batch)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - start
        elapsed = torch.tensor(seconds, dtype=torch.float64, device=device)
        slowest.append(float(pmax(elapsed, axes)))
    return slowest[1:]

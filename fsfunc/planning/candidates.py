"""The meshes and stacks that a search tries, in order; and bounds that need no plan.

`stack_search.search` takes its arguments together as a `Space`, asks `meshes` for the
meshes and the `Space` for the stacks on each. `least_state_bytes` and
`whole_gradient_bytes` are lower bounds in closed form: a stack whose bounds exceed the
memory is never planned.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple, get_args

import torch

from fsfunc.pipelining import actions, schedules
from fsfunc.pipelining.schedules import ScheduleName
from fsfunc.pipelining.verification import peak_microbatches
from fsfunc.planning.machines import Hardware
from fsfunc.planning.stacks import DATA, NODE, PIPE, Stack
from fsfunc.sharded.placements import Own, Split
from fsfunc.state.layout_rules import LayoutRules, axes_of
from fsfunc.transforms.offloading import Stores
from fsfunc.transforms.policies import MODES, Policy

Axes = tuple[tuple[str, int], ...]
# Those that are tried by default: none of the others is faster in as much memory.
SCHEDULES: tuple[ScheduleName, ...] = (
    "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v",
)  # fmt: skip


@dataclass(frozen=True)
class Space:
    """The options of a search, as the arguments of ``search`` name them."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    remat: tuple[Policy | str | None, ...] = (None, "always")
    accumulate: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = SCHEDULES
    microbatches: tuple[int, ...] | None = None
    compute: tuple[torch.dtype | None, ...] = (None,)
    reduce: torch.dtype | None = None
    offload: tuple[tuple[str, ...], ...] = ((),)
    donate: bool = True
    dims: Mapping[str, int] = field(default_factory=dict)
    layouts: LayoutRules = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("zero", "remat", "schedules", "compute", "offload"):
            if not getattr(self, name):
                raise ValueError(f"{name}=(): there is nothing to try")
        for zero in self.zero:
            if zero not in (0, 1, 2, 3):
                raise ValueError(f"zero={self.zero!r}: each is 0, 1, 2 or 3")
        for policy in self.remat:
            if not (policy is None or isinstance(policy, Policy) or policy in MODES):
                raise ValueError(
                    f"remat has {policy!r}: each is None, SaveOnly(names), SaveAllBut("
                    f"names), or one of {', '.join(map(repr, MODES))}"
                )
        for kinds in self.offload:
            if isinstance(kinds, str) or not set(kinds) <= set(Stores._fields):
                raise ValueError(
                    f"offload has {kinds!r}: each is a tuple of what is offloaded, of "
                    f"{', '.join(map(repr, Stores._fields))}"
                )
        for name in self.schedules:
            if name not in get_args(ScheduleName):
                raise ValueError(
                    f"schedules has {name!r}: each is the name of a schedule in "
                    f"ff.schedules, one of {', '.join(get_args(ScheduleName))}"
                )
        for name in ("accumulate", "microbatches"):
            for n in getattr(self, name) or ():
                if not isinstance(n, int) or n < 1:
                    raise ValueError(f"{name} has {n!r}: each is a whole number >= 1")
        for axis, dim in self.dims.items():
            if axis in _KNOWN or not isinstance(dim, int) or dim < 0:
                raise ValueError(
                    f"dims has {axis!r}: {dim!r}: it names further axes, each with the "
                    'dim of the batch that it cuts, such as {"context": 1}; "data" and '
                    '"node" cut dim 0'
                )

    @property
    def required_axes(self) -> tuple[str, ...]:
        """The axes that the loss may name: every mesh has them, innermost last."""
        return tuple(dict.fromkeys((*self.dims, *axes_of(self.layouts))))

    def without_pipeline(self, axes: Axes, rows: int) -> Iterator[list[Stack]]:
        """Yields the stacks without a pipeline, in lists.

        Those of a list differ in ``accumulate`` alone. If gradients are sharded, a
        second list has the stacks that reduce them with each part.
        """
        rows //= self.base_stack(axes).parts
        ladder = sorted(self.accumulate or _halved(rows))
        several = [n for n in ladder if n > 1]
        for zero in self._zeros(axes):
            for variant in self._base_variants(axes, zero):
                yield [replace(variant, accumulate=n) for n in ladder]
                if zero in (2, 3) and several:
                    yield [
                        replace(variant, accumulate=n, reduces_each=True)
                        for n in several
                    ]

    def pipelined(self, axes: Axes, rows: int) -> list[Stack]:
        """Returns the stacks with a pipeline, with the first ``zero`` there is."""
        rows //= self.base_stack(axes).parts
        ranks = dict(axes)[PIPE]
        counts = [n * ranks for n in (1, 2, 4) if n * ranks <= rows] or [rows]
        # One `zero` here; `stack_search` tries the others with the best of these.
        zero = next(iter(self._zeros(axes)))
        return [
            replace(variant, schedule=schedule, microbatches=n)
            for schedule in self.schedules
            for variant in self._base_variants(axes, zero)
            for n in self.microbatches or counts
        ]

    def other_zeros(self, stack: Stack) -> list[Stack]:
        """Returns the same stack with each other ``zero``."""
        zeros = self._zeros(stack.axes)
        return [replace(stack, zero=z) for z in zeros if z != stack.zero]

    def _zeros(self, axes: Axes) -> Sequence[int | None]:
        stack = self.base_stack(axes)
        return self.zero if stack.parts_of(stack.batch_axes) > 1 else (None,)

    def base_stack(self, axes: Axes) -> Stack:
        """Returns the stack that all stacks on a mesh are variants of.

        A leaf is split only over axes along which there are several ranks.
        """
        sizes, layouts = dict(axes), {}
        for pattern, rule in self.layouts.items():
            if isinstance(rule, Own):
                layouts[pattern] = rule
                continue
            splits = (rule,) if isinstance(rule, Split) else rule
            if splits_there := tuple(s for s in splits if sizes.get(s.axis, 1) > 1):
                layouts[pattern] = splits_there
        return Stack(
            axes,
            reduce=self.reduce,
            donate=self.donate,
            dims=self.dims,
            layouts=layouts,
        )

    def _base_variants(self, axes: Axes, zero: int | None) -> Iterator[Stack]:
        """Yields the stacks that neither accumulate nor pipeline."""
        base = replace(self.base_stack(axes), zero=zero)
        for compute, offloaded in itertools.product(self.compute, self.offload):
            # Parameters can only be offloaded if a `shard` lays them out.
            offloaded = tuple(k for k in offloaded if k != "params" or zero is not None)
            for policy in self.remat:
                yield replace(base, remat=policy, compute=compute, offload=offloaded)


class ScheduleFacts(NamedTuple):
    """What a schedule's actions say of the memory and time of its ranks.

    Args:
        owners: the rank of each stage.
        splits_backward: whether gradients of parameters are actions of their own.
        held: for each rank, the most microbatches whose activations it holds at once:
            in one of its v stages a microbatch counts 1/v.
        halved: as ``held``, of microbatches after their I and before their W.
    """

    owners: tuple[int, ...] = (0,)
    splits_backward: bool = False
    held: tuple[float, ...] = (1,)
    halved: tuple[float, ...] = (0,)


@cache
def schedule_facts(name: str, n_stages: int, n_microbatches: int) -> ScheduleFacts:
    """Returns what the actions of a named schedule say.

    Cost: some microseconds an action, of which there are two or three for each stage
    and microbatch.

    >>> schedule_facts("zb_h1", 2, 4).halved
    (1.0, 2.0)
    """
    schedule = getattr(schedules, name)(n_stages, n_microbatches)
    owners, splits = actions.owners(schedule), actions.splits_backward(schedule)
    halved: list[float] = []
    for row in schedule if splits else ():
        changes = (("I" in a.traits.parts) - ("W" in a.traits.parts) for a in row)
        n_stages_here = len(actions.stages_of(row))
        halved.append(max(itertools.accumulate(changes, initial=0)) / n_stages_here)
    held = peak_microbatches(schedule)
    return ScheduleFacts(owners, splits, held, tuple(halved) or (0.0,) * len(held))


def stages_of(stack: Stack) -> int:
    """Returns the number of stages of the stack's pipeline; 1 without one."""
    if stack.schedule is None:
        return 1
    make_schedule = getattr(schedules, stack.schedule)
    chunks = inspect.signature(make_schedule).parameters.get("chunks")  # of each rank
    return dict(stack.axes)[PIPE] * (chunks.default if chunks else 1)


def least_state_bytes(stack: Stack, params: int, moments: int) -> int:
    """Returns the bytes of a rank's part of parameters and moments.

    A device holds at least these. At zero 1 and 2 it has the parameters whole too, in
    ``compute`` if they are cast.

    Args:
        params, moments: bytes of all of them, whole.

    >>> least_state_bytes(Stack((("data", 4),), zero=1), params=400, moments=800)
    600
    >>> stack = Stack((("data", 4),), zero=1, compute=torch.bfloat16)
    >>> least_state_bytes(stack, params=400, moments=800)
    500
    """
    # Of a pipeline the fullest rank holds the mean at least.
    whole_axes = {PIPE, *axes_of(stack.layouts)}
    part_axes = {*whole_axes, *(a for a in stack.batch_axes if a != NODE)}
    params_bytes = params // stack.parts_of(part_axes if stack.zero else whole_axes)
    if stack.zero in (1, 2):
        cast_bytes = 0 if stack.compute is None else params_bytes
        params_bytes = cast_bytes + int(
            params * size_in(stack.compute)
        ) // stack.parts_of(whole_axes)
    moments //= stack.parts_of(part_axes if stack.zero else whole_axes)
    # What is offloaded is in the host's memory, but for a unit's own at a time.
    params_bytes = 0 if "params" in stack.offload else params_bytes
    return params_bytes + (0 if "moments" in stack.offload else moments)


def whole_gradient_bytes(stack: Stack, params: int) -> int:
    """Returns bytes of gradients that a rank holds beside :func:`least_state_bytes`.

    Parts that are summed before one reduction, and microbatches of a pipeline, keep
    gradients whole, in ``compute`` if parameters are cast.

    >>> axes = (("data", 4),)
    >>> whole_gradient_bytes(Stack(axes, zero=3, accumulate=8), 400)
    400
    >>> whole_gradient_bytes(Stack(axes, zero=3, accumulate=8, reduces_each=True), 400)
    0
    """
    sums_whole = stack.accumulate * stack.microbatches > 1 and not stack.reduces_each
    if not sums_whole or stack.zero not in (2, 3):
        return 0
    params //= stack.parts_of({PIPE, *axes_of(stack.layouts)})
    return int(params * size_in(stack.compute))


def size_in(dtype: torch.dtype | None) -> float:
    """Returns the size of a value in ``dtype``, over that in float32."""
    return 1.0 if dtype is None else dtype.itemsize / 4


def _halved(rows: int) -> list[int]:
    """Returns the powers of two that divide the rows of a rank's batch, from 1 on."""
    counts = [1]
    while rows % (2 * counts[-1]) == 0 and counts[-1] < rows:
        counts.append(2 * counts[-1])
    return counts


# Meshes


def meshes(
    sizes: int | Mapping[str, int] | Sequence[Mapping[str, int]],
    hardware: Hardware,
    named: Sequence[str] = (),
) -> list[Axes]:
    """Returns the meshes that ``mesh_sizes`` asks for, with all axes of these names.

    >>> from fsfunc.planning.hardware import H100
    >>> for axes in meshes(4, H100):
    ...     print(dict(axes))
    {'data': 4}
    {'data': 2, 'pipe': 2}
    {'pipe': 4}
    """
    if isinstance(sizes, Mapping):
        return [_checked(sizes, named)]
    if isinstance(sizes, int) and not isinstance(sizes, bool):
        if sizes < 1:
            raise ValueError(f"mesh_sizes={sizes}: there is at least one rank")
        factored = _factored(sizes, _node(sizes, hardware), named)
        return list(dict.fromkeys(_checked(dict(axes), named) for axes in factored))
    if isinstance(sizes, Sequence) and not isinstance(sizes, str) and sizes:
        if all(isinstance(axes, Mapping) for axes in sizes):
            return list(dict.fromkeys(_checked(axes, named) for axes in sizes))
    raise ValueError(
        f"mesh_sizes={sizes!r}: give a number of ranks, the axes of a mesh such as "
        '{"data": 4, "pipe": 2}, or a list of such'
    )


_KNOWN = (DATA, PIPE, NODE)


def _checked(axes: Mapping[str, int], named: Sequence[str]) -> Axes:
    for name, size in axes.items():
        if name not in (*_KNOWN, *named):
            raise ValueError(
                f'mesh_sizes has an axis "{name}": search cuts the batch along "data", '
                'repeats parameters along "node" and lays stages along "pipe"; what '
                "others are for, layouts= or dims= says"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f'mesh_sizes: axis "{name}" has a size >= 1, got {size!r}')
    if NODE in axes and DATA not in axes:
        raise ValueError('mesh_sizes: "node" repeats the parts that lie along "data"')
    return (*axes.items(), *((name, 1) for name in named if name not in axes))


def _node(ranks: int, hardware: Hardware) -> int:
    """Returns the ranks of a node, if the ranks fill several whole nodes; else 0."""
    width = hardware.levels[0].ranks if hardware.levels else 0
    return width if 0 < width < ranks and ranks % width == 0 else 0


def _factored(ranks: int, node: int, named: Sequence[str]) -> Iterator[Axes]:
    """Yields every mesh of so many ranks; ``node`` of them lie within a node (0: all).

    Ranks along the last axis are neighbours, with the fastest links between them: so
    the axes that the loss names, along which units communicate, come last.
    """
    if other_names := [name for name in named if name not in _KNOWN]:
        *outer_names, last_name = other_names
        for size in range(1, ranks + 1):
            if ranks % size == 0:
                inner_node = node // size if node % size == 0 else 0
                for axes in _factored(ranks // size, inner_node, outer_names):
                    yield (*axes, (last_name, size))
        return
    for pipe in range(1, ranks + 1):
        if ranks % pipe:
            continue
        data = ranks // pipe
        stages = ((PIPE, pipe),) if pipe > 1 else ()
        if data == 1 and pipe > 1:
            yield stages
            continue
        yield ((DATA, data), *stages)
        if not node:
            continue
        if pipe > 1:  # the stages on nodes of their own
            yield (*stages, (DATA, data))
        nodes = ranks // node
        if data % nodes == 0 and data > nodes:
            yield ((NODE, nodes), (DATA, data // nodes), *stages)

"""The meshes and stacks that a search tries, in order."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fsfunc.pipelining import schedules
from fsfunc.planning.machines import Hardware
from fsfunc.planning.stacks import DATA, NODE, PIPE, Stack
from fsfunc.sharded.placements import Own, Split
from fsfunc.state.layout_rules import LayoutRules, axes_of
from fsfunc.transforms.offloading import Stores
from fsfunc.transforms.policies import MODES, Policy

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Space:
    """The options of a search; ``search`` has the same arguments."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    remat: tuple[Policy | str | None, ...] = (None, "always")
    accumulate: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = ("one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v")
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
            if not callable(getattr(schedules, str(name), None)):
                raise ValueError(
                    f"schedules has {name!r}: each is the name of a schedule in "
                    "ff.schedules, such as 'one_f_one_b'"
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
    def named(self) -> tuple[str, ...]:
        """Axes that the loss may name, so that every mesh has them; innermost last."""
        return tuple(dict.fromkeys((*self.dims, *axes_of(self.layouts))))

    def flat(self, axes: Axes, rows: int) -> Iterator[list[Stack]]:
        """The stacks without a pipeline: lists that differ in ``accumulate`` alone.

        Where gradients are sharded, a second list has those that are reduced with each
        part.
        """
        rows //= self.on(axes).parts
        ladder = sorted(self.accumulate or _halved(rows))
        more = [n for n in ladder if n > 1]
        for zero in self._zeros(axes):
            for plain in self._plain(axes, zero):
                yield [replace(plain, accumulate=n) for n in ladder]
                if zero in (2, 3) and more:
                    yield [replace(plain, accumulate=n, each=True) for n in more]

    def pipelined(self, axes: Axes, rows: int) -> list[Stack]:
        """The stacks with a pipeline, with the first ``zero`` there is."""
        rows //= self.on(axes).parts
        ranks = dict(axes)[PIPE]
        most = [n * ranks for n in (1, 2, 4) if n * ranks <= rows] or [rows]
        zero = next(iter(self._zeros(axes)))
        return [
            replace(plain, schedule=schedule, microbatches=n)
            for schedule in self.schedules
            for plain in self._plain(axes, zero)
            for n in self.microbatches or most
        ]

    def other_zeros(self, stack: Stack) -> list[Stack]:
        """The same stack with each other ``zero``."""
        zeros = self._zeros(stack.axes)
        return [replace(stack, zero=z) for z in zeros if z != stack.zero]

    def _zeros(self, axes: Axes) -> Sequence[int | None]:
        stack = self.on(axes)
        return self.zero if stack.parts_of(stack.means) > 1 else (None,)

    def on(self, axes: Axes) -> Stack:
        """The stack that all stacks on a mesh are variants of.

        A leaf is split over the axes along which there are several ranks.
        """
        sizes, layouts = dict(axes), {}
        for pattern, rule in self.layouts.items():
            if isinstance(rule, Own):
                layouts[pattern] = rule
                continue
            splits = (rule,) if isinstance(rule, Split) else rule
            if kept := tuple(s for s in splits if sizes.get(s.axis, 1) > 1):
                layouts[pattern] = kept
        return Stack(
            axes,
            reduce=self.reduce,
            donate=self.donate,
            dims=self.dims,
            layouts=layouts,
        )

    def _plain(self, axes: Axes, zero: int | None) -> Iterator[Stack]:
        """The stacks that take the batch as it comes."""
        base = replace(self.on(axes), zero=zero)
        for compute, kinds in itertools.product(self.compute, self.offload):
            # Parameters are offloaded where a `shard` lays them out.
            kinds = tuple(k for k in kinds if k != "params" or zero is not None)
            for policy in self.remat:
                yield replace(base, remat=policy, compute=compute, offload=kinds)


def stages_of(stack: Stack) -> int:
    """The number of stages of the stack's pipeline; 1 without one."""
    if stack.schedule is None:
        return 1
    made = getattr(schedules, stack.schedule)
    chunks = inspect.signature(made).parameters.get("chunks")  # of each rank
    return dict(stack.axes)[PIPE] * (chunks.default if chunks else 1)


def lowered(stack: Stack, params: int, moments: int) -> int:
    """Bytes that a device holds at least: a rank's part of parameters and moments.

    At zero 1 and 2 parameters that are cast are whole in ``compute`` alone.

    >>> lowered(Stack((("data", 4),), zero=1), params=400, moments=800)
    600
    >>> stack = Stack((("data", 4),), zero=1, compute=torch.bfloat16)
    >>> lowered(stack, params=400, moments=800)
    500
    """
    # Of a pipeline the fullest rank holds the mean at least.
    whole = {PIPE, *axes_of(stack.layouts)}
    parts = {*whole, *(a for a in stack.means if a != NODE)}
    mine = params // stack.parts_of(parts if stack.zero else whole)
    if stack.zero in (1, 2):
        cast = 0 if stack.compute is None else mine
        mine = cast + int(params * size_in(stack.compute)) // stack.parts_of(whole)
    moments //= stack.parts_of(parts if stack.zero else whole)
    mine = 0 if "params" in stack.offload else mine
    return mine + (0 if "moments" in stack.offload else moments)


def whole_gradients(stack: Stack, params: int) -> int:
    """Bytes of gradients that a rank holds beside :func:`lowered`, at least.

    Parts that are summed before one reduction, and microbatches of a pipeline, leave
    them whole, in ``compute`` at least where parameters are cast.

    >>> axes = (("data", 4),)
    >>> whole_gradients(Stack(axes, zero=3, accumulate=8), 400)
    400
    >>> whole_gradients(Stack(axes, zero=3, accumulate=8, each=True), 400)
    0
    """
    summed = stack.accumulate * stack.microbatches > 1 and not stack.each
    if not summed or stack.zero not in (2, 3):
        return 0
    params //= stack.parts_of({PIPE, *axes_of(stack.layouts)})
    return int(params * size_in(stack.compute))


def size_in(dtype: torch.dtype | None) -> float:
    """The size of a value in ``dtype``, of that in float32."""
    return 1.0 if dtype is None else dtype.itemsize / 4


def _halved(rows: int) -> list[int]:
    """Powers of two that divide the rows of a rank's batch, from 1 on."""
    found = [1]
    while rows % (2 * found[-1]) == 0 and found[-1] < rows:
        found.append(2 * found[-1])
    return found


# Meshes


def meshes(sizes: Any, hardware: Hardware, named: Sequence[str] = ()) -> list[Axes]:
    """The meshes that ``mesh_sizes`` asks for, with all axes of these names.

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
        found = _factored(sizes, _node(sizes, hardware), named)
        return list(dict.fromkeys(_checked(dict(axes), named) for axes in found))
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
    """The number of ranks of a node, if there are several whole ones; else 0."""
    width = hardware.levels[0].ranks if hardware.levels else 0
    return width if 0 < width < ranks and ranks % width == 0 else 0


def _factored(ranks: int, node: int, named: Sequence[str]) -> Iterator[Axes]:
    """Every mesh of so many ranks; ``node`` of them lie within a node (0: all).

    Neighbours, which have the fastest links, are those along the last name.
    """
    if others := [name for name in named if name not in _KNOWN]:
        *before, last = others
        for size in range(1, ranks + 1):
            if ranks % size == 0:
                within = node // size if node % size == 0 else 0
                for axes in _factored(ranks // size, within, before):
                    yield (*axes, (last, size))
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

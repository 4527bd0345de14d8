"""Which meshes and stacks a search tries, and in which order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsfunc.pipelining import schedules
from fsfunc.planning.machines import Hardware
from fsfunc.planning.stacks import DATA, NODE, PIPE, Stack
from fsfunc.transforms.policies import MODES, Policy

__all__ = ["Axes", "Space", "lowered", "meshes", "stages_of"]

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Space:
    """What may be chosen; see ``search``, which has the same arguments."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    remat: tuple[Policy | str | None, ...] = (None, "always")
    accumulate: tuple[int, ...] | None = None
    schedules: tuple[str, ...] = ("one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v")
    microbatches: tuple[int, ...] | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    donate: bool = True

    def __post_init__(self) -> None:
        for name in ("zero", "remat", "schedules"):
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

    def flat(self, axes: Axes, rows: int) -> Iterator[list[Stack]]:
        """The stacks without a pipeline: lists that differ in ``accumulate`` alone."""
        rows //= Stack(axes).parts
        for zero in self._zeros(axes):
            for policy in self.remat:
                plain = self._plain(axes, zero, policy)
                ladder = self.accumulate or _halved(rows)
                yield [replace(plain, accumulate=n) for n in sorted(ladder)]

    def pipelined(self, axes: Axes, rows: int) -> list[Stack]:
        """The stacks with a pipeline, with the first ``zero`` there is."""
        rows //= Stack(axes).parts
        ranks = dict(axes)[PIPE]
        most = [n * ranks for n in (1, 2, 4) if n * ranks <= rows] or [rows]
        zero = next(iter(self._zeros(axes)))
        return [
            replace(
                self._plain(axes, zero, policy),
                schedule=schedule,
                microbatches=n,
            )
            for schedule in self.schedules
            for policy in self.remat
            for n in self.microbatches or most
        ]

    def other_zeros(self, stack: Stack) -> list[Stack]:
        """The same stack with each other ``zero``."""
        zeros = self._zeros(stack.axes)
        return [replace(stack, zero=z) for z in zeros if z != stack.zero]

    def _zeros(self, axes: Axes) -> Sequence[int | None]:
        data = dict(axes).get(DATA, 1) * dict(axes).get(NODE, 1)
        return self.zero if data > 1 else (None,)

    def _plain(self, axes: Axes, zero: int | None, policy: Policy | str | None):
        return Stack(
            axes,
            zero=zero,
            remat=policy,
            compute=self.compute,
            reduce=self.reduce,
            donate=self.donate,
        )


def stages_of(stack: Stack) -> int:
    """How many stages the stack's pipeline has; 1 without one."""
    if stack.schedule is None:
        return 1
    made = getattr(schedules, stack.schedule)
    chunks = inspect.signature(made).parameters.get("chunks")  # of each rank
    return dict(stack.axes)[PIPE] * (chunks.default if chunks else 1)


def lowered(stack: Stack, params: int, moments: int) -> int:
    """Bytes that a rank holds at least: its part of parameters and moments.

    >>> lowered(Stack((("data", 4),), zero=1), params=400, moments=800)
    600
    """
    sizes = dict(stack.axes)
    n = sizes.get(DATA, 1)
    params_over = n if stack.zero == 3 else 1
    moments_over = n if stack.zero else 1
    pipe = sizes.get(PIPE, 1)  # the fullest rank holds the mean at least
    return params // (params_over * pipe) + moments // (moments_over * pipe)


def _halved(rows: int) -> list[int]:
    """Powers of two that divide the rows of a rank's batch, from 1 on."""
    found = [1]
    while rows % (2 * found[-1]) == 0 and found[-1] < rows:
        found.append(2 * found[-1])
    return found


# Meshes


def meshes(sizes: Any, hardware: Hardware) -> list[Axes]:
    """The meshes that ``mesh_sizes`` asks for.

    >>> from fsfunc.planning.hardware import H100
    >>> for axes in meshes(4, H100):
    ...     print(dict(axes))
    {'data': 4}
    {'data': 2, 'pipe': 2}
    {'pipe': 4}
    """
    if isinstance(sizes, Mapping):
        return [_checked(sizes)]
    if isinstance(sizes, int) and not isinstance(sizes, bool):
        if sizes < 1:
            raise ValueError(f"mesh_sizes={sizes}: there is at least one rank")
        return list(dict.fromkeys(_factored(sizes, _node(sizes, hardware))))
    if isinstance(sizes, Sequence) and not isinstance(sizes, str) and sizes:
        if all(isinstance(axes, Mapping) for axes in sizes):
            return list(dict.fromkeys(map(_checked, sizes)))
    raise ValueError(
        f"mesh_sizes={sizes!r}: give a number of ranks, the axes of a mesh such as "
        '{"data": 4, "pipe": 2}, or a list of such'
    )


def _checked(axes: Mapping[str, int]) -> Axes:
    known = (DATA, PIPE, NODE)
    for name, size in axes.items():
        if name not in known:
            raise ValueError(
                f'mesh_sizes has an axis "{name}": search cuts the batch along "data", '
                'repeats parameters along "node" and lays stages along "pipe"'
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f'mesh_sizes: axis "{name}" has a size >= 1, got {size!r}')
    if NODE in axes and DATA not in axes:
        raise ValueError('mesh_sizes: "node" repeats the parts that lie along "data"')
    return tuple(axes.items())


def _node(ranks: int, hardware: Hardware) -> int:
    """How many ranks a node has, where there are several whole ones; else 0."""
    width = hardware.levels[0].ranks if hardware.levels else 0
    return width if 0 < width < ranks and ranks % width == 0 else 0


def _factored(ranks: int, node: int) -> Iterator[Axes]:
    """Every mesh of so many ranks; ``node`` of them lie within a node (0: all)."""
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

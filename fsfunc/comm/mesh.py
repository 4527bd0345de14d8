"""Meshes: named axes over ranks; and the rank that runs.

A :class:`Mesh` has the coordinates of ranks and the name of its backend. The rank that
runs is a :class:`Here` in a context variable, which ``spmd`` sets for every rank of
this process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from fsfunc.runtime.scopes import Scoped
from fsfunc.sharded.placements import row_major
from fsfunc.tree.structure import did_you_mean

Axis = str | tuple[str, ...]


class NoMesh(RuntimeError):
    """A mesh is needed, and no transform or ``spmd`` around the call gives one."""


def axis_names(axis: Axis) -> tuple[str, ...]:
    """The names in ``axis``, as a tuple.

    >>> axis_names("data"), axis_names(("data", "node"))
    (('data',), ('data', 'node'))
    """
    return (axis,) if isinstance(axis, str) else tuple(axis)


class Mesh:
    """Ranks ``0 .. size-1`` in row-major order over named axes.

    Args:
        axes: name to size, the first axis varying slowest.
        backend: ``"processes"``, ``"simulated"``, ``"abstract"`` or ``"vmap"``.
        link: this process's connection to the others (only for ``"processes"``).

    >>> mesh = Mesh({"data": 2, "pipe": 3}, "simulated")
    >>> mesh.size, mesh.members("pipe", rank=4), mesh.coordinate("data", rank=4)
    (6, (3, 4, 5), 1)
    """

    def __init__(self, axes: Mapping[str, int], backend: str, link: Any = None):
        for name, size in axes.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"an axis needs a name, got {name!r}")
            if not isinstance(size, int) or size < 1:
                raise ValueError(f'axis "{name}" needs a size of at least 1: {size!r}')
        self.axes = dict(axes)
        self.backend = backend
        self.size = math.prod(self.axes.values())
        self.link = link
        # Gradients still to compare, by rank, loss and axis: see `gradient_checks`.
        self.uncompared: dict[Any, set[str]] = {}
        self._members: dict[tuple[tuple[str, ...], int], tuple[int, ...]] = {}

    @property
    def rank(self) -> int:
        """The rank that runs."""
        asks(self.axes)
        return here(self).rank

    def check(self, axis: Axis) -> tuple[str, ...]:
        """The names in ``axis``, checked: axes of this mesh, each named once."""
        if not isinstance(axis, (str, tuple, list)):
            raise TypeError(
                f"axis={axis!r}: an axis of a mesh is a name, or a tuple of names, "
                f"such as {next(iter(self.axes), 'data')!r}; this is {self}"
            )
        names = axis_names(axis)
        for name in names:
            if name not in self.axes:
                near = did_you_mean(str(name), self.axes)
                raise ValueError(f'unknown axis "{name}"{near}: this is {self}')
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"each axis is named once, and at least one: got {axis!r}")
        return names

    def axis_size(self, axis: Axis) -> int:
        """The number of ranks along ``axis`` (the product over several names)."""
        return math.prod(self.axes[name] for name in self.check(axis))

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The coordinate of ``rank`` (default: the one that runs) on every axis."""
        rest, found = self.rank if rank is None else rank, {}
        for name, size in reversed(self.axes.items()):
            rest, found[name] = divmod(rest, size)
        return {name: found[name] for name in self.axes}

    def coordinate(self, axis: Axis, rank: int | None = None) -> int:
        """The index of ``rank`` along ``axis``, the first name varying slowest."""
        names = self.check(axis)
        if rank is None:
            asks(names)
            rank = here(self).rank
        at = self.coordinates(rank)
        return row_major((at[name], self.axes[name]) for name in names)

    def members(self, axis: Axis, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axis``, in axis order."""
        names, rank = self.check(axis), self.rank if rank is None else rank
        if (names, rank) not in self._members:
            there, along = self.coordinates(rank), [range(self.axes[n]) for n in names]
            found = tuple(
                self.rank_at({**there, **dict(zip(names, index, strict=True))})
                for index in itertools.product(*along)
            )
            self._members.update(dict.fromkeys([(names, r) for r in found], found))
        return self._members[names, rank]

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates, one for every axis."""
        return row_major((coordinates[name], n) for name, n in self.axes.items())

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, {self.backend!r})"


@dataclass(frozen=True)
class Here:
    """The rank that runs: its mesh, and its connection to the other ranks.

    Args:
        mean: the axes of ``shard``, over which the loss is a mean of the ranks' losses;
            over others it is one value.
        compared: whether the ranks have compared their programs.
        apart: the axes along which ranks train copies of their own (``local_sgd``):
            collectives over them are refused.

    ``groups`` caches the results of `groups.group`, by axis.
    """

    mesh: Mesh
    rank: int
    link: Any
    mean: tuple[str, ...] = ()
    compared: bool = False
    apart: tuple[str, ...] = ()
    groups: dict[Axis, Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )


_ASKED: ContextVar[set[str] | None] = ContextVar("fsfunc_asked", default=None)


def asks(axes: Iterable[str]) -> None:
    """Records that the program depends on the rank's coordinates along these axes.

    Ranks of an abstract mesh with equal coordinates along them run the same program,
    and only one of these is run.
    """
    if (seen := _ASKED.get()) is not None:
        seen.update(axes)


def asking(seen: set[str] | None) -> Scoped:
    """Inside, :func:`asks` adds its axes to ``seen`` (None: they are ignored)."""
    return Scoped(_ASKED, seen)


def check_mesh(mesh: Any, who: str) -> Mesh:
    """``mesh``, the argument of ``who``, if it is a mesh.

    Raises:
        TypeError: it is none; says how to make one.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{who} needs a mesh, got {mesh!r}: ff.make_mesh({{'data': 4}}) makes one "
            "of 4 ranks, which differ along the axis 'data'"
        )
    return mesh


_PROCESSES: list[Mesh] = []  # under processes the calling process is its rank
HERE: ContextVar[Here | None] = ContextVar("fsfunc_here", default=None)


def here(mesh: Mesh | None = None) -> Here:
    """The rank that runs, on ``mesh`` or on the mesh of the enclosing ``spmd``.

    Raises:
        NoMesh: no mesh is given (simulated, vmap and abstract ones need ``spmd``).
        ValueError: ``mesh`` has another number of ranks than are running.
    """
    found = HERE.get()
    if found is None:
        mesh = mesh or (_PROCESSES[-1] if _PROCESSES else None)
        if mesh is None:
            raise NoMesh(
                "no mesh in sight: call this inside a transform that names one, such "
                "as shard(step, mesh, 'data'), or inside spmd(fn, mesh)"
            )
        if mesh.link is None:
            raise NoMesh(
                f"{mesh} hosts several ranks, and this call is on none of them: run it "
                "inside spmd(fn, mesh)()"
            )
        return Here(mesh, mesh.link.rank, mesh.link)
    if mesh is None or mesh is found.mesh:
        return found
    if mesh.size != found.mesh.size:
        raise ValueError(
            f"{mesh} has {mesh.size} ranks, but {found.mesh.size} are running "
            f"({found.mesh}): pass spmd the mesh that the transforms name"
        )
    return replace(found, mesh=mesh, link=found.link.on(mesh))


def maybe_here() -> Here | None:
    """The rank that runs; None without a mesh."""
    try:
        return here()
    except NoMesh:
        return None


def averaged_axes() -> tuple[str, ...]:
    """The axes of the enclosing ``shard``, over which the loss is a mean."""
    at = maybe_here()
    return () if at is None else at.mean


def remember(mesh: Mesh) -> Mesh:
    """Makes ``mesh`` the mesh of calls in this process outside ``spmd``; returns it."""
    _PROCESSES[:] = [mesh]
    return mesh


def place_here(value: Here) -> Scoped:
    """Inside, :func:`here` returns ``value``."""
    return Scoped(HERE, value)

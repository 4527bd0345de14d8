"""Meshes: named axes over ranks; and the rank that runs.

A :class:`Mesh` has the coordinates of ranks and the name of its backend:

    Mesh({"data": 2, "pipe": 3})          pipe 0   pipe 1   pipe 2
                                 data 0   rank 0   rank 1   rank 2
                                 data 1   rank 3   rank 4   rank 5

The rank that runs is a :class:`Here` in a context variable, which ``spmd`` sets for
every rank of this process; collectives and transforms ask :func:`here` for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from fsfunc.runtime.scopes import Scoped
from fsfunc.sharded.placements import row_major
from fsfunc.tree.structure import did_you_mean

if TYPE_CHECKING:
    from fsfunc.comm.backends.link import Link

Axis: TypeAlias = str | tuple[str, ...]


class NoMesh(RuntimeError):
    """A mesh is needed, and no transform or ``spmd`` around the call gives one."""


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Returns the names in ``axis`` as a tuple.

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
        names: names for several of the axes at once (see `folding`): each stands for
            them wherever an axis is named.

    >>> mesh = Mesh({"data": 2, "pipe": 3}, "simulated")
    >>> mesh.size, mesh.members("pipe", rank=4), mesh.coordinate("data", rank=4)
    (6, (3, 4, 5), 1)
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        backend: str,
        link: Link | None = None,
        names: Mapping[str, tuple[str, ...]] | None = None,
    ):
        for name, size in axes.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"an axis needs a name, got {name!r}")
            if not isinstance(size, int) or size < 1:
                raise ValueError(f'axis "{name}" needs a size of at least 1: {size!r}')
        self.axes: dict[str, int] = dict(axes)
        self.names: dict[str, tuple[str, ...]] = dict(names or {})
        self.backend = backend
        self.size: int = math.prod(self.axes.values())
        self.link = link
        # Gradients still to compare, by rank, loss and axis: see `gradient_checks`. The
        # mesh stores them where no transformed function runs that could.
        self.uncompared: dict[tuple[int, Any, str], set[str]] = {}
        # By axis and rank: the result of `members`.
        self._members: dict[tuple[tuple[str, ...], int], tuple[int, ...]] = {}

    @property
    def rank(self) -> int:
        """The rank that runs."""
        # A program that reads it may differ from rank to rank.
        note_axes_read(self.axes)
        return here(self).rank

    def check(self, axis: Axis) -> tuple[str, ...]:
        """Returns the axes named in ``axis``; raises unless each is there, and once."""
        if not isinstance(axis, (str, tuple, list)):
            raise TypeError(
                f"axis={axis!r}: an axis of a mesh is a name, or a tuple of names, "
                f"such as {next(iter(self.axes), 'data')!r}; this is {self}"
            )
        names = self.expand(axis) if self.names else axis_names(axis)
        for name in names:
            if name not in self.axes:
                near = did_you_mean(str(name), {**self.axes, **self.names})
                raise ValueError(f'unknown axis "{name}"{near}: this is {self}')
        if len(set(names)) != len(names) or not names:
            over = f", of {names}" if self.names else ""
            raise ValueError(
                f"each axis is named once, and at least one: got {axis!r}{over}"
            )
        return names

    def expand(self, axis: Axis) -> tuple[str, ...]:
        """Returns the axes that names stand for; an unknown name stands for itself.

        >>> mesh = Mesh({"data": 2, "model": 2}, "abstract", names={"all": ("data",)})
        >>> mesh.expand(("all", "model"))
        ('data', 'model')
        """
        pieces = (self.names.get(name, (name,)) for name in axis_names(axis))
        return tuple(itertools.chain.from_iterable(pieces))

    def on(self, backend: str, link: Link | None = None) -> Mesh:
        """Returns a mesh of the same axes and names on another backend."""
        return Mesh(self.axes, backend, link, self.names)

    def axis_size(self, axis: Axis) -> int:
        """Returns the number of ranks along ``axis``: the product over its names."""
        return math.prod(self.axes[name] for name in self.check(axis))

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Returns the coordinate of ``rank`` (default: the one here) on every axis."""
        remainder, by_axis = self.rank if rank is None else rank, {}
        for name, size in reversed(self.axes.items()):  # the last axis varies fastest
            remainder, by_axis[name] = divmod(remainder, size)
        return {name: by_axis[name] for name in self.axes}

    def coordinate(self, axis: Axis, rank: int | None = None) -> int:
        """Returns the index of ``rank`` along ``axis``, the first name the slowest."""
        names = self.check(axis)
        # A program that reads its own coordinate may differ along these axes.
        if rank is None:
            note_axes_read(names)
            rank = here(self).rank
        coordinates = self.coordinates(rank)
        return row_major((coordinates[name], self.axes[name]) for name in names)

    def members(self, axis: Axis, rank: int | None = None) -> tuple[int, ...]:
        """Returns the ranks that differ from ``rank`` only along ``axis``, in order."""
        names, rank = self.check(axis), self.rank if rank is None else rank
        # All ranks along an axis have the same members: their entries are made at once.
        if (names, rank) not in self._members:
            fixed, ranges = self.coordinates(rank), [range(self.axes[n]) for n in names]
            ranks = tuple(
                self.rank_at({**fixed, **dict(zip(names, index, strict=True))})
                for index in itertools.product(*ranges)
            )
            self._members.update(dict.fromkeys([(names, r) for r in ranks], ranks))
        return self._members[names, rank]

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """Returns the rank at these coordinates, one for every axis."""
        return row_major((coordinates[name], n) for name, n in self.axes.items())

    def __repr__(self) -> str:
        names = f", names={self.names}" if self.names else ""
        return f"Mesh({self.axes}, {self.backend!r}{names})"


@dataclass(frozen=True)
class Here:
    """The rank that runs: its mesh, and its connection to the other ranks.

    Args:
        mean_axes: the axes of ``shard``, over which the loss is a mean of the ranks'
            losses; over others it is one value.
        compared: whether the ranks have compared their programs.
        independent_axes: the axes along which ranks train copies of their own
            (``local_sgd``): collectives over them are refused.

    ``groups`` caches the results of `groups.get_group`, `RankGroup` by axis.
    """

    mesh: Mesh
    rank: int
    link: Link
    mean_axes: tuple[str, ...] = ()
    compared: bool = False
    independent_axes: tuple[str, ...] = ()
    groups: dict[Axis, Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )


_AXES_READ: ContextVar[set[str] | None] = ContextVar("fsfunc_asked", default=None)


def note_axes_read(axes: Iterable[str]) -> None:
    """Records that the program reads the rank's coordinates along these axes.

    Ranks of an abstract mesh with equal coordinates along them run the same program,
    and only one of these is run.
    """
    if (axes_read := _AXES_READ.get()) is not None:
        axes_read.update(axes)


def noting_axes_read(axes_read: set[str] | None) -> Scoped:
    """Inside, :func:`note_axes_read` adds to this set (None: axes are ignored)."""
    return Scoped(_AXES_READ, axes_read)


def check_mesh(mesh: Mesh, caller: str) -> Mesh:
    """Returns ``mesh``, the argument of the function ``caller``, if it is a mesh.

    Raises:
        TypeError: it is none; says how to make one.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{caller} needs a mesh, got {mesh!r}: ff.make_mesh({{'data': 4}}) makes "
            "one of 4 ranks, which differ along the axis 'data'"
        )
    return mesh


# The mesh over processes that was made last: this process is one of its ranks, and
# calls outside ``spmd`` use it. Empty, or of one item.
_PROCESS_MESH: list[Mesh] = []
HERE: ContextVar[Here | None] = ContextVar("fsfunc_here", default=None)


def here(mesh: Mesh | None = None) -> Here:
    """Returns the rank that runs, on ``mesh`` or on that of the enclosing ``spmd``.

    Raises:
        NoMesh: no mesh is given (simulated, vmap and abstract ones need ``spmd``).
        ValueError: ``mesh`` has another number of ranks than are running.
    """
    current = HERE.get()
    # Outside of ``spmd`` this process can only be a rank if the mesh is over processes.
    if current is None:
        mesh = mesh or (_PROCESS_MESH[-1] if _PROCESS_MESH else None)
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
    if mesh is None or mesh is current.mesh:
        return current
    # A transform may name another mesh of the same ranks, with axes of its own.
    if mesh.size != current.mesh.size:
        raise ValueError(
            f"{mesh} has {mesh.size} ranks, but {current.mesh.size} are running "
            f"({current.mesh}): pass spmd the mesh that the transforms name"
        )
    return replace(current, mesh=mesh, link=current.link.for_mesh(mesh))


def maybe_here() -> Here | None:
    """Returns the rank that runs; None without a mesh."""
    try:
        return here()
    except NoMesh:
        return None


def averaged_axes() -> tuple[str, ...]:
    """Returns the axes of the enclosing ``shard``, over which the loss is a mean."""
    current = maybe_here()
    return () if current is None else current.mean_axes


def set_process_mesh(mesh: Mesh) -> Mesh:
    """Makes ``mesh`` the mesh of calls in this process outside ``spmd``; returns it."""
    _PROCESS_MESH[:] = [mesh]
    return mesh


def set_here(this_rank: Here) -> Scoped:
    """Returns a context in which :func:`here` returns ``this_rank``."""
    return Scoped(HERE, this_rank)

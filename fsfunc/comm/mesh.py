"""A mesh: named axes over ranks, and the rank that is asking.

A :class:`Mesh` is geometry (which rank lies where) and the name of its backend. Who
is asking is a :class:`Here` in a context variable: ``spmd`` sets it for every rank
that this process hosts.
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

Axis = str | tuple[str, ...]


class NoMesh(RuntimeError):
    """A mesh is needed, and none is in sight."""


def axis_names(axis: Axis) -> tuple[str, ...]:
    """The names in ``axis``, always as a tuple.

    >>> axis_names("data"), axis_names(("data", "node"))
    (('data',), ('data', 'node'))
    """
    return (axis,) if isinstance(axis, str) else tuple(axis)


class Mesh:
    """Ranks ``0 .. size-1`` in row-major order over named axes.

    Args:
        axes: name to size, the first axis varying slowest.
        backend: ``"processes"``, ``"simulated"``, ``"abstract"`` or ``"vmap"``.
        link: what moves this process's data (only for ``"processes"``).

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
        """The names in ``axis``, each an axis of this mesh and named once."""
        if not isinstance(axis, (str, tuple, list)):
            raise TypeError(
                f"axis={axis!r}: an axis of a mesh is a name, or a tuple of names, "
                f"such as {next(iter(self.axes), 'data')!r}; this is {self}"
            )
        names = axis_names(axis)
        for name in names:
            if name not in self.axes:
                raise ValueError(f'unknown axis "{name}": this is {self}')
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"each axis is named once, and at least one: got {axis!r}")
        return names

    def axis_size(self, axis: Axis) -> int:
        """The number of ranks along ``axis`` (the product over several names)."""
        return math.prod(self.axes[name] for name in self.check(axis))

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The coordinate of ``rank`` (default: the one that runs) on every axis."""
        if rank is None:
            rank = self.rank
        rest = rank
        found = {}
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
        """The rank that lies at these coordinates, one for every axis."""
        return row_major((coordinates[name], n) for name, n in self.axes.items())

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, {self.backend!r})"


@dataclass(frozen=True)
class Here:
    """The rank that runs: its mesh, and the link that carries its data.

    Args:
        mean: the axes over which the loss is the mean of the ranks' own, as ``shard``
            makes it; over others it is one value.
        compared: whether the ranks know that they run one program.
        apart: the axes along which each rank trains by itself: what runs here sends
            nothing over them.

    ``groups`` keeps what `groups.group` has made for this rank, by axis.
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
    """Notes that what runs depends on its coordinates on these axes.

    Ranks of an abstract mesh that differ on no axis that is asked for run the same
    program, and one of them stands for all.
    """
    if (seen := _ASKED.get()) is not None:
        seen.update(axes)


def asking(seen: set[str] | None) -> Scoped:
    """Adds to ``seen`` the axes that are asked for inside (None: ignores them)."""
    return Scoped(_ASKED, seen)


def check_mesh(mesh: Any, who: str) -> Mesh:
    """``mesh``, which ``who`` was given.

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
        NoMesh: none is given (``spmd`` does on a simulated, vmap or abstract mesh).
        ValueError: ``mesh`` and the running ranks differ in number.
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
    if mesh.backend == found.mesh.backend == "processes":
        moves = getattr(found.link, "moves", True)  # or we are at the planning of it
        # A mesh's own link has the groups of its own axes.
        link = mesh.link if moves else found.link
        return replace(found, mesh=mesh, link=link)
    return replace(found, mesh=mesh)


def maybe_here() -> Here | None:
    """The rank that runs; None where no mesh is in sight."""
    try:
        return here()
    except NoMesh:
        return None


def averaged_axes() -> tuple[str, ...]:
    """The axes over which the loss is a mean: those of the ``shard`` around."""
    at = maybe_here()
    return () if at is None else at.mean


def remember(mesh: Mesh) -> Mesh:
    """``mesh``, which is from now on that of bare calls in this process."""
    _PROCESSES[:] = [mesh]
    return mesh


def place_here(value: Here) -> Scoped:
    """Makes ``value`` the answer of :func:`here` for the calls within."""
    return Scoped(HERE, value)

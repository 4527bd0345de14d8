"""Running a program on a mesh: ``make_mesh``, ``spmd`` and ``local_batch``.

A script calls ``make_mesh`` once, and runs its main function by ``spmd(main, mesh)()``:
on this process's rank, or on all ranks of a mesh that this process hosts. Here one
chooses the backend; nothing after this knows which it is.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch.distributed as dist

# Its functions have the group of all processes as a default argument: the group that
# there is on import. So it is imported while there is none. Imported later, as by
# checkpoints, they would hold that group for ever.
import torch.distributed.nn.functional  # noqa: F401
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.backends.abstract import run_abstract, run_vmapped
from fsfunc.comm.folding import fold_axes
from fsfunc.comm.groups import get_group
from fsfunc.comm.ledgers import note_ranks
from fsfunc.comm.mesh import (
    Axis,
    Here,
    Mesh,
    check_mesh,
    here,
    note_axes_read,
    set_here,
    set_process_mesh,
)
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.printing.tables import Report
from fsfunc.sharded.inputs import check_function, refuse
from fsfunc.sharded.leaf_tables import ranks_table

if TYPE_CHECKING:
    from fsfunc.comm.backends.processes import ProcessLink

_R = TypeVar("_R")
_Tree = TypeVar("_Tree")

Backend: TypeAlias = Literal["processes", "simulated", "abstract", "vmap"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@atexit.register
def _end_gloo() -> None:
    """Ends gloo's threads before Python ends.

    A thread frees a collective's tensors some time after the wait for it is over, and
    needs the GIL for that. Once Python ends it cannot have the GIL, and the whole
    process ends by SIGABRT.

    This is registered on import of fsfunc, so it runs after everything that registers
    later, such as saves in the background. A fork unregisters it: there it would wait
    for threads that the fork does not have.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


os.register_at_fork(
    after_in_child=lambda: dist.is_initialized() and atexit.unregister(_end_gloo)
)


class PerRank(list[_R]):
    """One value for each rank hosted here, in rank order, as ``spmd`` returns them.

    On an abstract mesh it has one value for each distinct program. ``ranks`` are the
    ranks that ran: each stands for all ranks that have the same coordinates as it along
    the axes ``asked``.

    IPython and notebooks show states, and other trees with sharded leaves, as a table
    of the bytes that each rank has.
    """

    ranks: tuple[int, ...] | None = None
    asked: tuple[str, ...] = ()

    def unzip(self) -> tuple[PerRank[Any], ...]:
        """Returns the columns of a list of tuples: ``states, metrics = out.unzip()``.

        >>> PerRank([(1, "a"), (2, "b")]).unzip()
        ([1, 2], ['a', 'b'])
        """
        columns = tuple(PerRank(column) for column in zip(*self, strict=True))
        for column in columns:
            column.ranks, column.asked = self.ranks, self.asked
        return columns

    def of(self, rank: int, mesh: Mesh) -> _R:
        """Returns the value of one rank of an abstract mesh."""
        # Ranks with equal coordinates along the axes that the program read ran as one.
        place = lambda r: [mesh.coordinates(r)[a] for a in self.asked]  # noqa: E731
        index = [place(r) for r in self.ranks or (0,)].index(place(rank))
        return self[index]

    def _report(self) -> Report | None:
        if self.ranks is None and len(self) == 1:  # a process does not say which
            return ranks_table(self, ["this rank"])
        return ranks_table(self, [f"rank {r}" for r in self.ranks or range(len(self))])

    def _repr_html_(self) -> str | None:
        report = self._report()
        return None if report is None else report._repr_html_()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # IPython's text
        report = None if cycle else self._report()
        if report is not None:
            printer.text(str(report))
        else:
            printer.text("[...]") if cycle else printer.pretty([*self])


@api_boundary
def make_mesh(
    axes: Mapping[str, int],
    backend: Backend | None = None,
    *,
    folded: Mapping[str, int] | None = None,
    timeout: float | timedelta | None = None,
    shared_memory: bool = True,
) -> Mesh:
    """Makes a mesh of named axes over ranks.

    Over processes every rank makes it, and all raise if their meshes differ.

    Args:
        axes: name to size; the first axis varies slowest over the ranks.
        backend: ``"processes"`` (torch.distributed: the default under ``torchrun`` or
            with a process group), ``"simulated"`` (threads that run one at a time: the
            default elsewhere), ``"abstract"`` (nothing is sent or computed, any size)
            or ``"vmap"`` (all ranks in one batched call; pure functions only).
        folded: a second view of the same ranks, as name to size: that of experts beside
            that of attention. ``make_mesh({"data": 2, "context": 2, "model": 2},
            folded={"expert_data": 2, "expert": 4})`` numbers the same 8 ranks twice,
            row by row, and an axis of either view may be named wherever one is. Those
            of one view together give its number of ranks; an axis of both views bears
            one name. Collectives and ``shard`` over axes of both views that share ranks
            are refused, as is a tensor split twice over the same ranks. ``mesh.axes``
            are the finest axes of both views, by which layouts and ledgers are printed,
            and ``mesh.names`` what the others stand for.
        timeout: over processes, how long a rank waits for others before it raises, in
            seconds or as a timedelta, for every group of the mesh; None: as long as
            the process group does (30 minutes by default). The error, a RuntimeError,
            says where each rank is. After half of that time (5 minutes at most, or
            ``FSFUNC_WATCHDOG`` seconds) the same is printed to stderr. On other
            backends it has no effect.
        shared_memory: whether tensors on the CPU go between processes of one host
            through memory that they share (on Linux), or as between hosts by gloo. Two
            that cannot (of two users, or without a descriptor left) warn, and send by
            gloo.

    A mesh is closed after an error: to continue, every rank calls
    ``torch.distributed.destroy_process_group()`` and makes another one. A forked
    process, such as a data loader's worker, is no rank.

    Raises:
        TypeError: ``axes`` or ``folded`` is no mapping, or the timeout no time.
        ValueError: an unknown backend, a bad size or timeout, or another number of
            processes than the mesh has; views of unlike numbers of ranks, or whose axes
            overlap in no number of whole rows.
        CollectiveMismatch: the processes' meshes differ.
        TimeoutError: ranks do not join in time; names them.
        PeerFailed (a RuntimeError): one ends or stops while all join; names it.

    >>> make_mesh({"data": 4, "pipe": 2}, "simulated").size
    8
    >>> make_mesh({"data": 2, "model": 2}, "simulated", folded={"expert": 4}).names
    {'expert': ('data', 'model')}
    """
    for view in (axes, {} if folded is None else folded):
        if not isinstance(view, Mapping):
            raise TypeError(f"a mesh needs axes as {{name: size}}, got {view!r}")
    if backend is None:
        launched = "WORLD_SIZE" in os.environ and "RANK" in os.environ
        up = dist.is_available() and dist.is_initialized()
        backend = "processes" if launched or up else "simulated"
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: it is one of {BACKENDS}")
    limit = _limit(timeout)
    geometry = Mesh(axes, backend)
    if folded is not None:
        Mesh(folded, backend)  # which checks the names and sizes
        finest, names = fold_axes(axes, folded)
        geometry = Mesh(finest, backend, names=names)
    if backend != "processes":
        return geometry
    from fsfunc.comm.backends.processes import connect

    size, names = geometry.size, geometry.names
    link = connect(geometry.axes, size, limit, shared_memory, names)
    mesh = geometry.on(backend, link)
    # A group for each set and order of axes, now: all processes must make torch's
    # groups together, in one order, and later a rank may be alone in needing one.
    names = tuple(mesh.axes)
    for count in range(1, len(names) + 1):
        for chosen in itertools.permutations(names, count):
            every = {mesh.members(chosen, rank) for rank in range(mesh.size)}
            link.connect(sorted(every))
    return set_process_mesh(mesh)


def _limit(timeout: float | timedelta | None) -> timedelta | None:
    """Returns a timeout as torch.distributed takes it."""
    if timeout is None:
        return None
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if not limit > timedelta(0):
        raise ValueError(f"timeout={timeout!r}: seconds, more than none")
    return limit


@api_boundary
def spmd(fn: Callable[..., _R], mesh: Mesh) -> Callable[..., PerRank[_R]]:
    """Returns a function that runs ``fn`` on every rank that this process hosts.

    ``spmd(fn, mesh)(*args)`` returns the ranks' results in rank order. Each rank gets
    the same ``args``, but from a list that ``spmd`` returned each takes its own item,
    so ``out = spmd(step, mesh)(out, batch)`` continues with every rank's state.

    On an abstract mesh all tensors are fake, and nothing is sent or computed. One rank
    runs for each distinct program: ranks run the same one, unless their coordinates
    differ along an axis whose coordinate ``fn`` reads, as a pipeline does.

    Raises:
        The first error of any rank, with a note of the rank; every rank then stops.
        Deadlock, CollectiveMismatch: simulated ranks that cannot continue.
        RuntimeError: simulated ranks run in another thread.

    >>> import fsfunc as ff
    >>> ff.spmd(lambda: ff.axis_index("data"), ff.make_mesh({"data": 3}))()
    [0, 1, 2]
    """
    check_mesh(mesh, "spmd")
    check_function(fn, "spmd")

    @api_boundary
    @functools.wraps(fn)
    def run(*args: Any) -> PerRank:
        on_ranks = _abstract if mesh.backend == "abstract" else _hosted
        # Backward passes run in this thread: in a device's they would have no rank.
        # Not by `in_one_thread`: an interrupt that comes inside a context manager's own
        # code would leave autograd's threads off for the caller.
        before = _torch.uses_device_threads()
        try:
            _torch.set_uses_device_threads(False)
            return on_ranks(fn, mesh, args)
        finally:
            _torch.set_uses_device_threads(before)

    return run


def _hosted(fn: Callable[..., Any], mesh: Mesh, args: Sequence[Any]) -> PerRank:
    """Returns the results of all ranks that this process hosts."""
    is_process = mesh.backend == "processes"
    hosted = 1 if is_process else mesh.size
    note_ranks([mesh.rank] if is_process else range(mesh.size))
    for a in args:
        if isinstance(a, PerRank) and len(a) != hosted:
            raise ValueError(
                f"a list of {len(a)} ranks' values cannot go to {mesh}, which has "
                f"{hosted} here"
            )
    by_rank = [
        [a[i] if isinstance(a, PerRank) else a for a in args] for i in range(hosted)
    ]
    if is_process:
        link = cast("ProcessLink", mesh.link)
        with set_here(Here(mesh, link.rank, link)):
            try:
                results = PerRank([fn(*by_rank[0])])
                link.end()  # under FSFUNC_CHECK=1 all ranks must have come to an end
                return results
            except BaseException as error:
                link.note_raised(error)  # the others ask this rank what became of it
                raise
    if mesh.backend == "vmap":
        return PerRank(run_vmapped(mesh, fn, by_rank))
    from fsfunc.comm.backends.simulated import run_simulated

    return PerRank(run_simulated(mesh, fn, by_rank))


def _abstract(fn: Callable[..., Any], mesh: Mesh, args: Sequence[Any]) -> PerRank:
    """Returns one result for each distinct program of an abstract mesh."""
    per_rank = [a for a in args if isinstance(a, PerRank)]
    for a in per_rank:
        ranks = a.ranks or (0,)
        # A slice, or what another mesh returned, lacks the value of a rank of this one.
        if len(a) != len(ranks) or ranks[-1] >= mesh.size:
            raise ValueError(
                f"a list of {len(a)} ranks' values cannot go to {mesh}: it takes what "
                "spmd returned for this very mesh, whole"
            )
    asked = {axis for a in per_rank for axis in a.asked}

    def args_of(rank: int) -> list[Any]:
        return [a.of(rank, mesh) if isinstance(a, PerRank) else a for a in args]

    by_rank = run_abstract(mesh, fn, args_of, asked)
    results = PerRank(by_rank.values())
    results.ranks, results.asked = (
        tuple(by_rank),
        tuple(a for a in mesh.axes if a in asked),
    )
    return results


@api_boundary
def local_batch(batch: _Tree, mesh: Mesh, axis: Axis, uneven: bool = False) -> _Tree:
    """Returns this rank's part, along dim 0, of a batch that every rank has whole.

    Args:
        batch: a tree of tensors that agree in dim 0; other leaves pass through.
        axis: one name or several, the first varying slowest.
        uneven: allow parts that differ in size by one (return ``ff.Weighted`` from the
            loss then, so that the mean is exact).

    Raises:
        ValueError: the axis does not divide dim 0, and ``uneven`` is not set.
        TypeError: a numpy array or a sparse tensor, which would not be cut.

    Cost: nothing is sent and nothing is copied: the parts are views.

    >>> import fsfunc as ff, torch
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> ff.spmd(lambda: ff.local_batch(torch.arange(4), mesh, "data").tolist(), mesh)()
    [[0, 1], [2, 3]]
    """
    size = check_mesh(mesh, "local_batch").axis_size(axis)
    tree.shown(batch, "local_batch", "is given")
    refuse("array sparse", "local_batch", batch)
    paths, leaves, treedef = tree.flatten_with_paths(batch)
    sizes = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.ndim == 0:
            raise ValueError(f"batch leaf {path!r} is a scalar: it has no dim 0 to cut")
        sizes[path] = leaf.shape[0]
        if leaf.shape[0] % size and not uneven:
            raise ValueError(
                f"cannot cut batch leaf {path!r} of shape {tuple(leaf.shape)} over "
                f"axis {axis!r} of size {size} along dim 0: {leaf.shape[0]} is not a "
                f"multiple of {size}; pass uneven=True, with ff.Weighted from the loss"
            )
    if len(set(sizes.values())) > 1:
        raise ValueError(f"batch leaves differ in dim 0: {sizes}")
    # Parts of one size are alike on all ranks of a plan; others are not.
    if any(n % size for n in sizes.values()):
        note_axes_read(mesh.check(axis))
    index = get_group(axis, here(mesh)).position

    def part(x: Tensor) -> Tensor:
        if mesh.backend == "vmap":  # the index is a batched tensor, one for all ranks
            return x.unflatten(0, (size, x.shape[0] // size))[index]
        return x.tensor_split(size)[index]

    return tree.unflatten(
        treedef, [part(x) if isinstance(x, Tensor) else x for x in leaves]
    )

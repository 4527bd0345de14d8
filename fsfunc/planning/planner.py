"""``plan``: a step is run where nothing is computed or sent, and recorded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.backends.abstract import AbstractLink, naming_value_reads
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.launch import spmd
from fsfunc.comm.mesh import Here, Mesh, check_mesh, here, maybe_here, note_axes_read
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.comm.traffic import Ledger
from fsfunc.core.frames import frame, inside, title
from fsfunc.optim.optimizer import Optimizer
from fsfunc.planning.device_kernels import kernels_of
from fsfunc.planning.events import Started, Waited
from fsfunc.planning.observer import Observer
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.runtime.memory import counting
from fsfunc.runtime.scopes import gc_paused
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.spent import refuse_spent
from fsfunc.state.initialization import init_state
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.train_state import TrainState
from fsfunc.tracing.runs import shadows, without_data
from fsfunc.transforms.donation import restore
from fsfunc.transforms.local.averaging import LocalState

_TOLD = (
    "the step that is planned",
    ", and in a plan nothing has one. Move it out of the step (what is only shown can "
    "be read off the metrics afterwards), or make it a torch.where",
)


@api_boundary
def plan(
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    layouts: LayoutRules | None = None,
    device: str = "cpu",
    every_microbatch: bool = False,
) -> Plan:
    """Plan ``step(*args)``: every collective, FLOP and byte, before it runs.

    The step runs on fake tensors and nothing is sent, so the mesh may have any size,
    and the parameters need not fit into memory.

    In two forms: ``plan(step, state, batch)``, inside ``spmd(main, mesh)`` on any mesh,
    is this rank's plan (on real ranks nothing is computed, and the state is not
    changed); and ``plan(step, init_fn, optimizer, batch, mesh=mesh)`` makes the state
    too, as ``init_state`` does, and plans every distinct program of the mesh.

    Args:
        step: any function that transforms take: a step, a loss, or a function of your
            own that calls collectives.
        args: its arguments: a state, real or fake, and a batch. Or a function that
            returns the whole parameters (or these), an optimizer, and this rank's own
            batch (or a function that returns it).
        mesh: the mesh to plan for, of any backend; by default that of the transforms of
            ``step``, or one rank.
        layouts: how parameters are split, as in ``init_state``, if the state is made
            here.
        device: "cuda" plans the kernels of a GPU, and the tensors that they save, where
            they differ from those of the CPU.
        every_microbatch: run each microbatch of `accumulate` and `pipeline`. Otherwise
            one that finds memory as the one before it did is noted to do the same: a
            loss that counts its own calls, and computes something else in a later one,
            has to be planned with True.

    Returns:
        a :class:`Plan`; ``plan[rank]`` is one rank's program.

    Raises:
        RuntimeError: the step reads a tensor's value; names the line.
        ValueError: tensors of a device that this torch cannot run; another ``device``.

    Cost: some 50 microseconds an operator, and memory for the events alone.

    >>> import torch, fsfunc as ff
    >>> layer = ff.unit(lambda p, x: torch.tanh(x @ p))
    >>> def loss(params, x):
    ...     for p in params:
    ...         x = layer(p, x)
    ...     return x.sum()
    >>> mesh = ff.make_mesh({"data": 1024}, "abstract")
    >>> optimizer = ff.sharded_adam(1e-3)
    >>> step = ff.shard(optimizer(ff.value_and_grad(loss)), mesh, "data")
    >>> init = lambda: [torch.zeros(64, 64) for _ in range(3)]
    >>> found = ff.plan(step, init, optimizer, torch.zeros(4, 64))
    >>> found.count("all_gather"), found.bytes("data", "psum_scatter")
    (4, 49104)
    """
    at = maybe_here() if mesh is None else None
    check_function(step, "plan")
    makes = len(args) == 3 and isinstance(args[1], Optimizer)
    if layouts and not makes:
        raise ValueError(
            "plan(layouts=...) of a state that is laid out already: give layouts to "
            "the place or init_state that made it"
        )

    kernels = kernels_of(device)

    def main() -> Plan:
        given = _made(step, args, layouts) if makes else args
        observer = Observer(kernels=kernels, every=every_microbatch)
        return _here(step, given, here(), observer)

    with gc_paused():
        found = _everywhere(main, _mesh_of(step, mesh)) if at is None else main()
    return replace(found, step=title(step))


def _mesh_of(step: Any, mesh: Mesh | None) -> Mesh:
    """An abstract mesh like the one given, or the one that the transforms name."""
    if mesh is None:
        named = [getattr(h, "mesh", None) for h in getattr(step, "interpretations", ())]
        mesh = next((m for m in named if m is not None), None)
    return Mesh({} if mesh is None else check_mesh(mesh, "plan").axes, "abstract")


def _everywhere(main: Callable[[], Plan], mesh: Mesh) -> Plan:
    """The plans of every distinct program of a mesh, as one."""
    found = spmd(main, mesh)()
    alike = mesh.size // len(found)
    ranks = (replace(p.ranks[0], alike=alike) for p in found)
    return Plan(mesh, tuple(ranks), found.asked)


def _made(
    step: Any, args: Sequence[Any], layouts: LayoutRules | None
) -> tuple[Any, ...]:
    """The state and the batch, of the functions that make them."""
    init, optimizer, batch = args
    batch = batch() if callable(batch) else batch
    _check_devices(batch)
    if (mode := _torch.fake_mode()) is not None:
        batch = shadows(mode, batch)
    with naming_value_reads(*_TOLD):
        return init_state(step, init, optimizer, batch, layouts=layouts), batch


def _here(step: Any, args: Sequence[Any], at: Here, observer: Observer) -> Plan:
    """The plan of this rank."""
    found, asked = _planned(step, args, at, observer)
    note_axes_read(asked)
    axes = tuple(a for a in at.mesh.axes if a in asked)
    count = math.prod(at.mesh.axes[a] for a in axes)
    return Plan(at.mesh, (replace(found, alike=at.mesh.size // count),), axes)


def _planned(
    step: Any, args: Sequence[Any], at: Here, observer: Observer
) -> tuple[RankPlan, set[str]]:
    log, asked = Ledger(), set[str]()
    refuse_spent(args)
    _check_devices(args)
    now = replace(at, link=PlannedLink(at.rank, observer, log))
    with (
        without_data(args, now, log=log, asked=asked, told=_TOLD) as mode,
        counting(observer),
    ):
        args = shadows(mode, args)
        leaves = []
        for leaf, tensors in _leaves(args):
            observer.given(leaf.kind, tensors)
            leaves.append(leaf)
            del tensors  # the step may let go of a buffer that the state keeps
        try:
            mine = None if frame().at is None else now
            with (
                inside(frame().replace(tracer=observer, at=mine)),
                observer.kernels(),
                observer,
            ):
                out = step(*args)
        finally:
            restore(args)  # a donated step marks what is the caller's
        observer.measure_copies()
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, TrainState | LocalState):
                for leaf, tensors in _leaves((value,)):
                    observer.count_as(leaf.kind, tensors)
        book = observer.book
        book.close()
    events = observer.chains.whole(book.events) if observer.compiled else book.events
    found = RankPlan(
        at.rank, 1, at.mesh.coordinates(at.rank), events, book.kinds,
        leaves, log.records, observer.calls, observer.derived, book.turns,
    )  # fmt: skip
    return found, asked


# What the step is given


def _check_devices(values: Any) -> None:
    for x in tree.leaves(values):
        if isinstance(x, Tensor):
            fake_modes.check_device(_torch.device_of(x))


def _leaves(args: Any) -> Iterator[tuple[PlannedLeaf, list[Tensor]]]:
    """Each tensor among the arguments, and the memory that it lies in."""
    for i, value in enumerate(args):
        head = "" if i == 0 else "batch" if i == 1 else f"argument {i}"
        paths, leaves, _ = tree.flatten_with_paths(value, is_leaf=is_sharded)
        for path, x in zip(paths, leaves, strict=True):
            if not isinstance(x, Tensor | Sharded):
                continue
            kind = _kind(i, value, path)
            path = "/".join(part for part in (head, path) if part)
            layout = x.layout if isinstance(x, Sharded) else None
            shard = x.packed if isinstance(x, Sharded) else None
            flat = None if layout is None else layout.flat
            unit = "" if flat is None else flat.buffer.partition(":")[0]
            if shard is not None and layout is not None:  # a view of its buffer
                at = [id(m) for m in shard.members].index(id(layout))
                start, stop = shard.ranges[at]
                size = (stop - start) * shard.flat.element_size()
                tensors = [shard.flat, *([] if shard.whole is None else [shard.whole])]
            else:
                local = x.local if isinstance(x, Sharded) else x
                size = local.numel() * local.element_size()
                tensors = [local]
            shape = tuple(int(n) for n in x.shape)
            yield PlannedLeaf(path, kind, shape, x.dtype, size, layout, unit), tensors


def _kind(i: int, value: Any, path: str) -> str:
    """The kind of memory that a leaf of argument ``i`` is."""
    if i > 0:
        return "buffers"
    if not isinstance(value, TrainState | LocalState):
        return "parameters"
    head = path.removeprefix("copies/").partition("/")[0]
    kinds = {"params": "parameters", "opt_state": "moments", "slow": "moments"}
    return kinds.get(head, "buffers")


class _NotedMove(Handle):
    """A collective or transfer that is noted again when it is waited for.

    Until then it holds ``x``, as links do that read it.
    """

    def __init__(self, work: Handle, number: int, observer: Observer, x: Any):
        self.work, self.number, self.observer = work, number, observer
        self.x: Tensor | None = x
        self.over = self.asked = False
        observer.link.moves.add(self)

    def wait(self) -> Tensor:
        if not self.over:
            self.over, self.x = True, None
            self.observer.book.events.append(Waited(self.number))
        return self.work.wait()

    def done(self) -> bool:
        """False when asked first: when others come is unknown, so it takes one more."""
        over, self.asked = self.over or self.asked, True
        self.x = None if over else self.x
        return over


class PlannedLink(AbstractLink):
    """Notes in the observer's book when each transfer starts and is waited for.

    Args:
        log: the ledger into which the collectives are written, each just before.
    """

    def __init__(self, rank: int, observer: Observer, log: Ledger):
        super().__init__(rank)
        self.observer, self.log, self.count = observer, log, 0
        self.moves: weakref.WeakSet[_NotedMove] = weakref.WeakSet()
        observer.link = self

    def under_way(self) -> list[_NotedMove]:
        """The transfers that somebody may still wait for."""
        return [move for move in self.moves if not move.over]

    def _noted(self, work: Handle, part: str, ranks: Any, x: Tensor) -> Handle:
        record = None if part == "asked for" else self.log.records[-1]
        event = Started(self.count, part, ranks, record)
        self.observer.book.events.append(event)
        self.count += 1
        return _NotedMove(work, event.number, self.observer, x)

    def start(self, op: str, x: Tensor, where: Any, **how: Any) -> Handle:
        return self._noted(super().start(op, x, where, **how), "issued", where.ranks, x)

    def send(self, x: Tensor, where: Any, to: int, name: str = "") -> Handle:
        way = (self.rank, where.ranks[to])
        return self._noted(super().send(x, where, to), "sent", way, x)

    def receive(self, like: Tensor, where: Any, source: int, name: str = "") -> Handle:
        work, way = (
            super().receive(like, where, source),
            (where.ranks[source], self.rank),
        )
        return self._noted(work, "asked for", way, like)

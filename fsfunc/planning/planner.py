"""``plan``: runs a step where nothing is computed or sent, and records it.

`plan` calls the step on fake tensors, once for each distinct program of the mesh. Three
things stand in its way, and write into one `observer.Book`:

- a `PlannedLink` in place of the rank's link: each transfer as it starts and is waited
  for;
- an `observer.Observer`, as a dispatch mode: each operator, each storage;
- the same observer as the frame's tracer: which unit and microbatch they belong to.

The events become a `plans.RankPlan`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc._torch import fake_modes
from fsfunc.comm.backends.abstract import AbstractLink, naming_value_reads
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.launch import spmd
from fsfunc.comm.mesh import Here, Mesh, check_mesh, here, maybe_here, note_axes_read
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.comm.traffic import Ledger
from fsfunc.core.frames import frame, inside, title
from fsfunc.optim.optimizer import Optimizer
from fsfunc.planning.call_copies import StepNotes, with_copies
from fsfunc.planning.device_kernels import kernels_of
from fsfunc.planning.equal_calls import EqualCalls
from fsfunc.planning.events import Started, Waited
from fsfunc.planning.observer import Observer
from fsfunc.planning.plans import Plan, PlannedLeaf, RankPlan
from fsfunc.runtime.memory import counting
from fsfunc.runtime.scopes import Scoped, gc_paused
from fsfunc.sharded.inputs import check_function
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.state.initialization import init_state
from fsfunc.state.layout_rules import LayoutRules
from fsfunc.state.train_state import TrainState
from fsfunc.tracing.groups import EqualRun
from fsfunc.tracing.runs import EQUAL_CALLS, shadows, without_data
from fsfunc.transforms.donation import restore
from fsfunc.transforms.local.averaging import LocalState
from fsfunc.tree.types import PyTree

# What an error says of a tensor whose value is read, before and after the line.
_VALUE_READ = (
    "the step that is planned",
    ", and in a plan nothing has one. Move it out of the step (what is only shown can "
    "be read off the metrics afterwards), or make it a torch.where",
)


@api_boundary
def plan(
    step: Callable[..., Any],
    *args: PyTree,
    mesh: Mesh | None = None,
    layouts: LayoutRules | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    every_microbatch: bool = False,
) -> Plan:
    """Plans ``step(*args)``: every collective, FLOP and byte, before it runs.

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
            has to be planned with True. Then each unit call runs, too: otherwise one of
            those that are given the same shapes, as the state is laid out; and of
            layers in a row under ``shard``, each called with what the one before has
            returned, the first and the last six. With a state that is given, by
            ``plan(step, state, batch)``, each unit call runs in any case.

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
    >>> planned = ff.plan(step, init, optimizer, torch.zeros(4, 64))
    >>> planned.count("all_gather"), planned.bytes("data", "psum_scatter")
    (4, 49104)
    """
    outer_place = maybe_here() if mesh is None else None
    check_function(step, "plan")
    makes_state = len(args) == 3 and isinstance(args[1], Optimizer)
    if layouts and not makes_state:
        raise ValueError(
            "plan(layouts=...) of a state that is laid out already: give layouts to "
            "the place or init_state that made it"
        )

    kernels = kernels_of(device)

    def main() -> Plan:
        def arguments() -> tuple[PyTree, tuple[EqualRun, ...]]:
            equal_calls = None if every_microbatch else EqualCalls()
            with Scoped(EQUAL_CALLS, equal_calls):
                given = _make_arguments(step, args, layouts) if makes_state else args
            return given, () if equal_calls is None else equal_calls.runs

        def run(given: PyTree, equal_runs: Sequence[EqualRun]) -> Plan | None:
            observer = Observer(
                kernels=kernels,
                every_microbatch=every_microbatch,
                equal_runs=equal_runs,
            )
            try:
                return _plan_here(step, given, here(), observer)
            except Exception:
                # Calls are unlike, or the step met what stood for one: what it raises
                # by itself, it raises again.
                if not observer.left_out_calls.is_used:
                    raise
                return None

        given, equal_runs = arguments()
        if (planned := run(given, equal_runs)) is None:
            # The step has written into a state without data. Another one is kept, as it
            # takes all ranks to make it, and others may have no unlike calls.
            if not here().link.moves_data:
                given, _ = arguments()
            planned = run(given, ())
        assert planned is not None, "no call was left out, so none can be unlike"
        return planned

    # Inside `spmd` the plan is of this rank; outside it is of every distinct program.
    with gc_paused():
        if outer_place is None:
            planned = _plan_everywhere(main, _mesh_of(step, mesh))
        else:
            planned = main()
    return replace(planned, step=title(step))


def _mesh_of(step: Callable[..., PyTree], mesh: Mesh | None) -> Mesh:
    """Returns an abstract mesh like the one given, or like that of the transforms."""
    if mesh is None:
        meshes = [
            getattr(h, "mesh", None) for h in getattr(step, "interpretations", ())
        ]
        mesh = next((m for m in meshes if m is not None), None)
    if mesh is None:
        return Mesh({}, "abstract")
    return check_mesh(mesh, "plan").on("abstract")


def _plan_everywhere(main: Callable[[], Plan], mesh: Mesh) -> Plan:
    """Returns the plans of every distinct program of a mesh, as one."""
    # An abstract mesh runs `main` for rank 0, and for others only along the axes whose
    # coordinate it read (`note_axes_read`).
    plans = spmd(main, mesh)()
    n_alike = mesh.size // len(plans)
    ranks = (replace(p.ranks[0], alike=n_alike) for p in plans)
    return Plan(mesh, tuple(ranks), plans.asked)


def _make_arguments(
    step: Callable[..., PyTree], args: Sequence[Any], layouts: LayoutRules | None
) -> tuple[PyTree, ...]:
    """Returns the state and the batch, made by the functions that make them."""
    init, optimizer, batch = args
    batch = batch() if callable(batch) else batch
    _check_devices(batch)
    if (mode := _torch.fake_mode()) is not None:
        batch = shadows(mode, batch)
    with naming_value_reads(*_VALUE_READ):
        return init_state(step, init, optimizer, batch, layouts=layouts), batch


def _plan_here(
    step: Callable[..., PyTree], args: Sequence[PyTree], place: Here, observer: Observer
) -> Plan:
    """Returns the plan of this rank."""
    rank_plan, varying_axes = _run_step(step, args, place, observer)
    note_axes_read(varying_axes)
    axes = tuple(a for a in place.mesh.axes if a in varying_axes)
    n_programs = math.prod(place.mesh.axes[a] for a in axes)
    return Plan(
        place.mesh, (replace(rank_plan, alike=place.mesh.size // n_programs),), axes
    )


def _run_step(
    step: Callable[..., PyTree], args: Sequence[PyTree], place: Here, observer: Observer
) -> tuple[RankPlan, set[str]]:
    """Runs the step on fake tensors.

    Returns:
        its plan, and the axes along which it read this rank's coordinate: ranks that
        differ along other axes alone run the same program.
    """
    log, varying_axes = Ledger(), set[str]()
    refuse_unusable(args)
    _check_devices(args)
    planned_place = replace(place, link=PlannedLink(place.rank, observer, log))
    with (
        without_data(
            args,
            planned_place,
            log=log,
            asked_axes=varying_axes,
            read_error=_VALUE_READ,
        ) as mode,
        counting(observer),
    ):
        args = shadows(mode, args)
        leaves = []
        for leaf, tensors in _leaves(args):
            observer.record_given(leaf.kind, tensors)
            leaves.append(leaf)
            del tensors  # else a buffer that a donated step frees would stay counted
        try:
            frame_place = None if frame().here is None else planned_place
            with (
                inside(frame().replace(tracer=observer, here=frame_place)),
                observer.kernels(),
                observer,
            ):
                returned = step(*args)
        finally:
            restore(args)  # a donated step has marked the caller's leaves as spent
        observer.measure_copies()
        # What the step returned as its new state is parameters and moments, and no
        # activations.
        for value in returned if isinstance(returned, tuple) else (returned,):
            if isinstance(value, TrainState | LocalState):
                for leaf, tensors in _leaves((value,)):
                    observer.count_as(leaf.kind, tensors)
        book = observer.book
        book.close()  # what is freed from here on is no part of the step
    observer.left_out_calls.check_over()
    events: list[Any] = book.events
    if observer.compiled:
        events = observer.chains.merged(events)
    noted = StepNotes(events, book.turns, book.kinds, log.records)
    if observer.left_out_calls.is_used:
        noted = with_copies(noted, len(book.sizes), observer.link.count)  # type: ignore
    rank_plan = RankPlan(
        place.rank, 1, place.mesh.coordinates(place.rank), noted.events, noted.kinds,
        leaves, noted.records, observer.calls, observer.derived, noted.turns,
    )  # fmt: skip
    return rank_plan, varying_axes


# What the step is given


def _check_devices(values: PyTree) -> None:
    leaves = tree.leaves(values, is_leaf=is_sharded)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    devices = {x.device for x in leaves if isinstance(x, Sharded)}
    for device in devices.union(map(_torch.device_of, tensors)):
        fake_modes.check_device(device)


def _leaves(
    args: Sequence[PyTree],
) -> Iterator[tuple[PlannedLeaf, list[Tensor]]]:
    """Yields each tensor among the arguments, and the tensors of its memory.

    Those of a packed buffer come with the first leaf that lies in it.
    """
    packed_bytes: dict[int, dict[int, int]] = {}  # by buffer and layout, of the part
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
            flat_layout = None if layout is None else layout.flat
            unit = "" if flat_layout is None else flat_layout.buffer.partition(":")[0]
            if shard is not None and layout is not None:  # one of several in a buffer
                tensors = []
                if id(shard) not in packed_bytes:
                    width = shard.flat.element_size()
                    packed_bytes[id(shard)] = {
                        member: (stop - start) * width
                        for member, (start, stop) in shard.spans.items()
                    }
                    wholes = [] if shard.whole is None else [shard.whole]
                    tensors = [shard.flat, *wholes]
                size, shape = packed_bytes[id(shard)][id(layout)], layout.shape
            else:
                local = x.local if isinstance(x, Sharded) else x
                size = local.numel() * local.element_size()
                tensors, shape = [local], tuple(map(int, x.shape))
            yield PlannedLeaf(path, kind, shape, x.dtype, size, layout, unit), tensors


def _kind(i: int, value: PyTree, path: str) -> str:
    """Returns what the memory of a leaf of argument ``i`` is for."""
    if i > 0:
        return "buffers"
    if not isinstance(value, TrainState | LocalState):
        return "parameters"
    head = path.removeprefix("copies/").partition("/")[0]
    kinds = {"params": "parameters", "opt_state": "moments", "slow": "moments"}
    return kinds.get(head, "buffers")


class _PlannedTransfer(Handle):
    """The handle of a transfer, which also records when it is waited for.

    Until then it keeps ``x`` alive, as a real link does while it reads its memory.
    """

    def __init__(self, work: Handle, number: int, observer: Observer, x: Tensor):
        self.work, self.number, self.observer = work, number, observer
        self.x: Tensor | None = x
        self.is_over = self.was_asked = False
        observer.link.in_flight.add(self)  # type: ignore

    def wait(self) -> Tensor:
        if not self.is_over:
            self.is_over, self.x = True, None
            self.observer.book.events.append(Waited(self.number))
        return self.work.wait()

    def done(self) -> bool:
        """Returns False when asked first, then True.

        When the other ranks come is unknown on paper: a transfer is taken to last
        until somebody asks a second time.
        """
        is_over, self.was_asked = self.is_over or self.was_asked, True
        self.x = None if is_over else self.x
        return is_over


class PlannedLink(AbstractLink):
    """A link that sends nothing, and records when transfers start and are waited for.

    Args:
        observer: in whose book it records them.
        log: the ledger, into which the caller has just written each collective.

    Attributes:
        count: the number of transfers so far, from which they have their numbers.
        in_flight: the handles that are still alive.
    """

    observer: Observer
    log: Ledger
    count: int

    def __init__(self, rank: int, observer: Observer, log: Ledger):
        super().__init__(rank)
        self.observer, self.log, self.count = observer, log, 0
        self.in_flight: weakref.WeakSet[_PlannedTransfer] = weakref.WeakSet()
        observer.link = self

    def under_way(self) -> list[_PlannedTransfer]:
        """Returns the transfers that somebody may still wait for."""
        return [move for move in self.in_flight if not move.is_over]

    def _note(
        self, work: Handle, part: str, ranks: tuple[int, ...], x: Tensor
    ) -> Handle:
        record = None if part == "asked for" else self.log.records[-1]
        event = Started(self.count, part, ranks, record)
        self.observer.book.events.append(event)
        self.count += 1
        return _PlannedTransfer(work, event.number, self.observer, x)

    def start(self, op: str, x: Tensor, where: RankGroup, **options: Any) -> Handle:
        return self._note(
            super().start(op, x, where, **options), "issued", where.ranks, x
        )

    def send(self, x: Tensor, where: RankGroup, to: int, name: str = "") -> Handle:
        ranks = (self.rank, where.ranks[to])
        return self._note(super().send(x, where, to), "sent", ranks, x)

    def receive(
        self, like: Tensor, where: RankGroup, source: int, name: str = ""
    ) -> Handle:
        work, ranks = (
            super().receive(like, where, source),
            (where.ranks[source], self.rank),
        )
        return self._note(work, "asked for", ranks, like)

"""Runs of a step that keep what each unit is given, computes, returns, and owes.

An observer is the innermost interpretation of every unit call, so it sees parameters
that are gathered, and recomputes. A unit's values pass through identity nodes of its
own (`_Passed`), whose backward notes the cotangent. Around the step, `Watching` notes
what gradient calls return.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.collective_ops import ignoring_axes
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Mesh, maybe_here
from fsfunc.core.execution_context import running
from fsfunc.core.frames import (
    Counter,
    Frame,
    Interpretation,
    frame,
    inside,
    recording,
    transformed,
)
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.units import Call
from fsfunc.sharded.leaf import is_sharded
from fsfunc.sharded.placements import row_major
from fsfunc.state.unsharding import unshard
from fsfunc.testing.recomputed_values import Computing, Made, first_unlike
from fsfunc.testing.step_runs import Calls


class UnitRun(NamedTuple):
    """A run of a unit, the same in runs of the step under other transforms.

    Args:
        call: of the step, from 0.
        segment: 1, 3, ... in its gradient calls; 0, 2, ... between them.
        time: how often the segment made a call of these numbers before.
        numbers, path: as those of :class:`fsfunc.core.units.Call`.
    """

    call: int
    segment: int
    time: int
    numbers: tuple[int, ...]
    path: tuple[str, ...]


class Slot(NamedTuple):
    """A value of a unit's run.

    Args:
        backward: whether it is the cotangent of the value.
        kind: "parameter", "input", "output", or "returned", by the transforms around
            it; ``leaf``: the path there. Of a run without a path: "loss".
    """

    run: UnitRun
    backward: bool
    kind: str
    leaf: str


class Part(NamedTuple):
    """A part of the global batch, by its number among ``count``, and by microbatch."""

    index: int
    count: int
    micro: tuple[int, int]


class NotedValue(NamedTuple):
    """A value, and what its cotangent is to be divided by for that of the mean loss.

    Args:
        losses: how many losses are averaged; ``cotangent``: what the backward of this
            one began from.
    """

    value: Tensor
    losses: int
    cotangent: float


Ranks = dict[int, NotedValue]


@dataclass
class KeptValues:
    """Counts the bytes of all values that a search keeps.

    Args:
        most: how many it may keep; None: any number.
    """

    most: int | None = None
    total: int = 0

    @property
    def too_many(self) -> bool:
        return self.most is not None and self.total > self.most

    def keep(self, x: Tensor) -> Tensor:
        """Returns a copy; raises MemoryError where that would be too many bytes."""
        self.total += x.numel() * x.element_size()
        if self.too_many:
            raise MemoryError(f"a search may keep {self.most} bytes of values")
        return x.detach().clone()


@dataclass(eq=False)
class RunLog:
    """What was seen in the calls of a step.

    Args:
        mesh: that of its ranks, None on one device.
        axes: those along which the batch is cut.
        kept: counts the bytes of what is seen.

    Attributes:
        values: by slot and part, those of each rank that ran the unit.
        recomputed: by run and part, the first value of each rank's recompute that its
            forward had otherwise.
        reduced: by (call, segment, leaf, or None for the loss), what a gradient call
            gave on each rank.
        weighted: the (call, segment) of losses with weights; ``folded``: by those of
            pipelines, by how much less their cotangents are to be divided.
        called: the runs of units, each at its first time.
        averages: whether a transform takes means over ranks.
        outs: by rank, what each call returned.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    kept: KeptValues = field(default_factory=KeptValues)
    values: dict[Slot, dict[Part, Ranks]] = field(default_factory=dict)
    recomputed: dict[UnitRun, dict[Part, dict[int, Made]]] = field(default_factory=dict)
    reduced: dict[tuple[int, int, str | None], dict[int, Tensor]] = field(
        default_factory=dict
    )
    weighted: set[tuple[int, int]] = field(default_factory=set)
    folded: dict[tuple[int, int], int] = field(default_factory=dict)
    called: set[UnitRun] = field(default_factory=set)
    averages: bool = False
    outs: Any = ()

    def place(self, rank: int) -> tuple[int, int]:
        """The place of a rank's rows in the batch, and the number of such places."""
        if self.mesh is None or not self.axes:
            return 0, 1
        return self.mesh.coordinate(self.axes, rank), self.mesh.axis_size(self.axes)

    def contributed(self, slot: Slot, seen: NotedValue) -> Tensor:
        """What a cotangent adds to that of the mean loss; a value as it is."""
        if not slot.backward:
            return seen.value
        where = slot.run.call, slot.run.segment
        losses = seen.losses // self.folded.get(where, 1)
        by = seen.cotangent * (1 if where in self.weighted else losses)
        return seen.value if by == 1 else seen.value / by

    def takes_mean(self, slot: Slot) -> bool:
        """True of a loss of which transforms take the mean over parts."""
        if slot.kind != "loss" or slot.run[:2] in self.weighted:
            return False
        return self.averages or any(p.micro[1] > 1 for p in self.values[slot])

    def note(self, slot: Slot, part: Part, rank: int, seen: NotedValue) -> None:
        by_rank = self.values.setdefault(slot, {}).setdefault(part, {})
        by_rank.setdefault(rank, seen)


def observe(
    step: Callable[..., Any],
    mesh: Mesh | None,
    axes: tuple[str, ...],
    how: Calls,
    state: Any,
    batch: Any,
    kept: KeptValues,
) -> RunLog:
    """Returns what is seen in calls of a step, on one device or on simulated ranks."""
    seen = RunLog(mesh, axes, kept)
    watched = transformed(step, Watching(seen))
    if mesh is None:
        seen.outs = [how.on_one(watched, state, batch)]
    else:
        seen.outs = how.on_ranks(watched, mesh, axes, state, batch).outs
    return seen


def unseen() -> bool:
    """True where nothing is noted: tensors have no data, or stand for several."""
    levels = _torch.functorch_active() or _torch.forward_ad_active()
    return levels or recording()


def _is_hidden(f: Frame) -> bool:
    """True where a step is recorded, or compiled as a whole."""
    whole = f.compiler is not None and f.compiler.whole
    return f.tracer is not None or whole


def _rank() -> int:
    at = maybe_here()
    return 0 if at is None else at.rank


@dataclass
class _Position:
    """How far a rank is."""

    call: int = -1
    segment: int = 0
    cotangent: float = 1.0
    times: defaultdict[Any, int] = field(default_factory=lambda: defaultdict(int))


class Watching(Interpretation):
    """The outermost interpretation: it makes the observer the innermost one."""

    called = "watched"

    def __init__(self, seen: RunLog):
        self.seen, self.observer = seen, _Observer(seen)

    def recorded(self, recorder: Any) -> Interpretation:
        return Interpretation()

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        if unseen():
            return super().call(f, args, keywords)
        now = self.observer.now[_rank()]
        now.call, now.segment = now.call + 1, 0
        now.times.clear()
        self.observer.forwards[_rank()].clear()
        outer = frame()
        # Calls outside of gradient calls are numbered from 0 too.
        own = outer.replace(handlers=(*outer.handlers, self), counter=Counter())
        with inside(_watched(own, self.observer)):
            return f(*args, **keywords)

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if _is_hidden(call.frame):
            return run

        def watched(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
            if unseen():
                return run(params, *inputs, **keywords)
            one = _Run(self.observer, call.frame, (call.numbers, call.path), "around")
            out = run(params, *inputs, **keywords)
            for path, x in zip(*tree.flatten_with_paths(out)[:2], strict=True):
                if isinstance(x, Tensor):
                    one.note("returned", path, x)
            return out

        return watched

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def watched(call: GradientCall) -> Outcome:
            if unseen() or frame().in_loss or _is_hidden(frame()):
                return run(call)
            rank = _rank()
            now = self.observer.now[rank]
            now.segment += 1
            outcome = run(call)
            # The axes of our collectives are not the loss's.
            with silence(), ignoring_axes():
                total, grads = outcome.mean()
                grads = unshard(grads)
            paths, leaves, _ = tree.flatten_with_paths(grads)
            where = now.call, now.segment
            each = [(None, total), *zip(paths, leaves, strict=True)]
            for leaf, x in each:
                if isinstance(x, Tensor):
                    by_rank = self.seen.reduced.setdefault((*where, leaf), {})
                    by_rank[rank] = self.seen.kept.keep(x)
            now.segment += 1
            return outcome

        return watched


class _Watched(Frame):
    """A frame whose innermost interpretation is an observer, whatever enters later."""

    observer: Interpretation

    @property
    def handlers(self) -> tuple[Interpretation, ...]:  # type: ignore[override]
        others = (h for h in self.__dict__["handlers"] if h is not self.observer)
        return (*others, self.observer)


def _watched(f: Frame, observer: Interpretation) -> _Watched:
    new = object.__new__(_Watched)
    new.__dict__.update(f.__dict__, observer=observer)
    return new


class _Observer(Interpretation):
    """The innermost interpretation: it notes the values of units."""

    called = "observed"

    def __init__(self, seen: RunLog):
        self.seen = seen
        self.now: defaultdict[int, _Position] = defaultdict(_Position)
        # By rank, of forwards in this call of the step, that a recompute may follow:
        # what was given, and computed.
        self.forwards: defaultdict[int, dict[Any, list[Made]]] = defaultdict(dict)

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def observed(call: GradientCall) -> Outcome:
            if unseen() or frame().in_loss or _is_hidden(frame()):
                return run(call)
            now = self.now[_rank()]
            now.cotangent = call.cotangent
            outcome, f = run(call), frame()
            if outcome.weight is not None:
                self.seen.weighted.add((now.call, now.segment))
            total = outcome.total
            if call.runner is not None:  # a pipeline's, of all microbatches
                if outcome.count == 1:  # the division is in what each began from
                    self.seen.folded[now.call, now.segment] = f.micro[-1][1]
                f = f.replace(micro=f.micro[:-1])
                if outcome.weight is None:
                    total = total / outcome.count
            _Run(self, f, ((), ()), "loss").note("loss", "", total)
            return outcome

        return observed

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if _is_hidden(call.frame):
            return run

        def observed(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
            if unseen():
                return run(params, *inputs, **keywords)
            one = _Run(self, call.frame, (call.numbers, call.path))
            # A compiler would take the mode for a part of the function.
            compiled = call.frame.compiler or _torch.is_compiled_function(call.unit.fn)
            return one(run, params, inputs, keywords, looks=not compiled)

        return observed


class _Run:
    """One run of a unit, whose values are noted.

    Args:
        f: the frame in which it is called.
        call: its numbers and its path.
        around: of what else than the unit's body this is.
    """

    def __init__(self, observer: _Observer, f: Frame, call: Any, around: str = ""):
        self.rank = _rank()
        self.observer, self.again = observer, running().recompute
        seen, now = observer.seen, observer.now[self.rank]
        # There a frame numbers microbatches otherwise than their rows lie.
        names = [h.called for h in f.handlers]
        within = names[names.index("pipeline") :] if "pipeline" in names else ()
        self.in_order = "accumulate" not in within
        place = seen.place(self.rank)
        index, count = row_major((place, *f.micro)), math.prod(n for _, n in f.micro)
        micro = row_major(f.micro), count
        self.part = Part(index, place[1] * count, micro)
        seen.averages = seen.averages or bool(f.batch_places)
        ranks = math.prod(n for _, n in f.batch_places) if f.batch_places else place[1]
        self.scale = ranks * count, now.cotangent
        where = now.call, now.segment, *call
        counted = (*where, self.part, self.again, around)
        run = UnitRun(*where[:2], now.times[counted], *where[2:])
        now.times[counted] += 1
        self.run, self.key = run, (run, self.part, self.rank)

    def __call__(
        self,
        run: Callable[..., Any],
        params: Any,
        inputs: Any,
        keywords: Any,
        looks: bool,
    ) -> Any:
        self.observer.seen.called.add(self.run._replace(time=0))
        given: list[Made] = []
        params = self._given("parameter", params, given)
        named = {**{str(i): x for i, x in enumerate(inputs)}, **keywords}
        named = self._given("input", named, given)
        inputs = [named.pop(str(i)) for i in range(len(inputs))]
        computing = Computing(self.run.numbers, self.observer.seen.kept.keep)
        try:
            with computing if looks else nullcontext():
                out = run(params, *inputs, **named)
        finally:  # a recompute ends, by an exception, with the last value that it saves
            before = self.observer.forwards[self.rank]
            made = [*given, *computing.values]
            if not self.again:
                before[self.key] = made
            elif (first := before.pop(self.key, None)) is not None:
                if (unlike := first_unlike(first, made)) is not None:
                    by_part = self.observer.seen.recomputed.setdefault(self.run, {})
                    by_part.setdefault(self.part, {})[self.rank] = unlike
        paths, leaves, structure = tree.flatten_with_paths(out)
        for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if isinstance(x, Tensor):
                self.note("output", path, x)
                if x.requires_grad and torch.is_grad_enabled():
                    leaves[i] = _Passed.apply(x, self._owed("output", path), True)
        return tree.unflatten(structure, leaves)

    def _given(self, kind: str, values: Any, given: list[Made]) -> Any:
        """The values, of which the cotangents will be noted."""
        paths, leaves, structure = tree.flatten_with_paths(values, is_leaf=is_sharded)
        passed: dict[int, Any] = {}  # a tensor that is given twice stays one
        for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if not isinstance(x, Tensor):
                continue
            self.note(kind, path, x)
            name = f"{kind} {path!r}" if path else kind
            given.append(Made(name, -1, self.observer.seen.kept.keep(x)))
            if id(x) not in passed:
                tracked = x.requires_grad and torch.is_grad_enabled()
                owed = self._owed(kind, path)
                passed[id(x)] = _Passed.apply(x, owed, False) if tracked else x
            leaves[i] = passed[id(x)]
        return tree.unflatten(structure, leaves)

    def note(self, kind: str, path: str, x: Tensor, backward: bool = False) -> None:
        if not self.again and self.in_order:
            slot = Slot(self.run, backward, kind, path)
            log = self.observer.seen
            log.note(
                slot, self.part, self.rank, NotedValue(log.kept.keep(x), *self.scale)
            )

    def _owed(self, kind: str, path: str) -> Callable[[Tensor], None]:
        return lambda g: self.note(kind, path, g, backward=True)


class _Passed(torch.autograd.Function):
    """The identity, whose backward notes the cotangent that passes.

    A Function, and not a hook on a view: a pipeline takes views for what they are of,
    and adds to a parameter's gradient beneath them.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x: Tensor, owed: Callable[[Tensor], None], returned: bool
    ) -> Tensor:
        ctx.owed = owed
        # What a unit returned may be written into later, which views forbid.
        return x.detach() if returned else x.view_as(x)

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        ctx.owed(g)
        return g, None, None

"""Runs of a step under observers that save the values of all units.

``first_difference`` observes each of two steps; ``observed_differences.py`` compares
the logs. Of every unit call a log has parameters, inputs, outputs, and all their
cotangents; of every gradient call the loss and the gradients:

    OuterObserver( shard( remat( ... _InnermostObserver( unit ))))

The innermost interpretation of a unit call sees gathered parameters, and recomputes. It
passes values through identity nodes (`_NoteCotangent`), whose backward notes the
cotangent. The outermost sees what the transforms make of a unit's output, and what
gradient calls return.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from fsfunc.testing.recomputed_values import UnitRecorder, UnitValue, find_unlike
from fsfunc.testing.step_runs import StepCaller
from fsfunc.tree.types import PyTree


class UnitRun(NamedTuple):
    """Names a run of a unit, by names that are equal under all transforms.

    Args:
        call: the number of the step's call, from 0.
        segment: 1, 3, ... in its gradient calls; 0, 2, ... between them.
        repeat: how often the segment had a call of these numbers before.
        numbers, path: those of the :class:`fsfunc.core.units.Call`.
    """

    call: int
    segment: int
    repeat: int
    numbers: tuple[int, ...]
    path: tuple[str, ...]


class ValueKey(NamedTuple):
    """Names a value of a unit's run, or its cotangent.

    Args:
        is_cotangent: whether it is the cotangent of the value.
        kind: "parameter", "input", "output", or "returned" (the output after the
            transforms around the unit); "loss" of a gradient call.
        leaf: the path of the leaf in that.
    """

    run: UnitRun
    is_cotangent: bool
    kind: str
    leaf: str


class BatchPart(NamedTuple):
    """A part of the global batch: the rows of one rank's microbatch.

    Args:
        index, count: its number among all parts.
        microbatch: (index, count) among those of its rank.
    """

    index: int
    count: int
    microbatch: tuple[int, int]


class ObservedValue(NamedTuple):
    """A value, with what scales its cotangent.

    Args:
        losses: the number of losses of parts that the step's loss is the mean of.
        cotangent: the number from which the backward of this part's loss started.
    """

    value: Tensor
    losses: int
    cotangent: float


Ranks = dict[int, ObservedValue]  # by rank


RunKey = tuple[UnitRun, BatchPart, int]  # with the rank


@dataclass
class ValueBudget:
    """Counts the bytes of all values that a search saves.

    Args:
        limit: how many it may save; None: any number.
    """

    limit: int | None = None
    total_bytes: int = 0

    @property
    def is_exceeded(self) -> bool:
        return self.limit is not None and self.total_bytes > self.limit

    def copy(self, x: Tensor) -> Tensor:
        """Copies a value; raises MemoryError if that would exceed the limit."""
        self.total_bytes += x.numel() * x.element_size()
        if self.is_exceeded:
            raise MemoryError(f"a search may keep {self.limit} bytes of values")
        return x.detach().clone()


@dataclass(eq=False)
class RunLog:
    """What was observed in the calls of a step.

    Args:
        mesh: the mesh of its ranks, None on one device.
        axes: the axes along which the batch is cut.
        budget: counts the bytes of the values.

    Attributes:
        values: by key and part, the value on each rank that ran the unit.
        recomputed: by run and part, the first value of each rank's recompute that
            differs from its forward.
        gradient_results: by (call, segment, leaf; None is the loss), what a gradient
            call returned on each rank.
        weighted_losses: the (call, segment) of gradient calls with a ``Weighted`` loss.
        pipelined_losses: by (call, segment) of a pipeline that divides its cotangents
            by the number of microbatches itself, that number.
        unit_runs: all runs of units, with ``repeat`` 0.
        averages_ranks: whether a transform takes means over ranks.
        outputs: for each rank, what each call returned.
    """

    mesh: Mesh | None = None
    axes: tuple[str, ...] = ()
    budget: ValueBudget = field(default_factory=ValueBudget)
    values: dict[ValueKey, dict[BatchPart, Ranks]] = field(default_factory=dict)
    recomputed: dict[UnitRun, dict[BatchPart, dict[int, UnitValue]]] = field(
        default_factory=dict
    )
    gradient_results: dict[tuple[int, int, str | None], dict[int, Tensor]] = field(
        default_factory=dict
    )
    weighted_losses: set[tuple[int, int]] = field(default_factory=set)
    pipelined_losses: dict[tuple[int, int], int] = field(default_factory=dict)
    unit_runs: set[UnitRun] = field(default_factory=set)
    averages_ranks: bool = False
    outputs: Sequence[Sequence[PyTree]] = ()

    def rows_index(self, rank: int) -> tuple[int, int]:
        """Returns (index, count) of a rank's rows among the parts of the batch."""
        if self.mesh is None or not self.axes:
            return 0, 1
        return self.mesh.coordinate(self.axes, rank), self.mesh.axis_size(self.axes)

    def contribution(self, key: ValueKey, observed: ObservedValue) -> Tensor:
        """Returns what a cotangent adds to the mean loss's; other values unchanged.

        The cotangent is divided by the number from which the part's backward started,
        such as the scale of a loss. It is also divided by the number of losses of which
        the step takes the mean, unless these are ``Weighted``.
        """
        if not key.is_cotangent:
            return observed.value
        gradient_call = key.run.call, key.run.segment
        losses = observed.losses // self.pipelined_losses.get(gradient_call, 1)
        divisor = observed.cotangent * (
            1 if gradient_call in self.weighted_losses else losses
        )
        return observed.value if divisor == 1 else observed.value / divisor

    def takes_mean(self, key: ValueKey) -> bool:
        """Returns whether it is a loss that transforms average over parts."""
        if key.kind != "loss" or key.run[:2] in self.weighted_losses:
            return False
        return self.averages_ranks or any(
            part.microbatch[1] > 1 for part in self.values[key]
        )

    def note(
        self, key: ValueKey, part: BatchPart, rank: int, observed: ObservedValue
    ) -> None:
        by_rank = self.values.setdefault(key, {}).setdefault(part, {})
        by_rank.setdefault(rank, observed)


def observe(
    step: Callable[..., Any],
    mesh: Mesh | None,
    axes: tuple[str, ...],
    caller: StepCaller,
    state: PyTree,
    batch: Sequence[PyTree],
    budget: ValueBudget,
) -> RunLog:
    """Calls a step under observers, on one device or on simulated ranks."""
    log = RunLog(mesh, axes, budget)
    observed_step = transformed(step, OuterObserver(log))
    if mesh is None:
        log.outputs = [caller.on_one_device(observed_step, state, batch)]
    else:
        log.outputs = caller.on_ranks(observed_step, mesh, axes, state, batch).outputs
    return log


def without_values() -> bool:
    """Returns whether values cannot be read: in recordings and ``torch.func``."""
    is_transformed = _torch.functorch_active() or _torch.forward_ad_active()
    return is_transformed or recording()


def _is_hidden(f: Frame) -> bool:
    """Returns whether a step is being recorded, or compiled as a whole."""
    compiles_step = f.compiler is not None and f.compiler.whole
    return f.tracer is not None or compiles_step


def _current_rank() -> int:
    here = maybe_here()
    return 0 if here is None else here.rank


@dataclass
class _Position:
    """How far a rank has come in the step, to name what it runs next.

    Args:
        call, segment: as in ``UnitRun``.
        cotangent: the number from which the gradient call's backward starts.
        times: how often each run of a unit was seen.
    """

    call: int = -1
    segment: int = 0
    cotangent: float = 1.0
    times: defaultdict[tuple[Any, ...], int] = field(
        default_factory=lambda: defaultdict(int)
    )


class OuterObserver(Interpretation):
    """The outermost interpretation of a step, which enters the innermost one too."""

    called = "watched"

    log: RunLog
    observer: _InnermostObserver

    def __init__(self, log: RunLog):
        self.log, self.observer = log, _InnermostObserver(log)

    def recorded(self, recorder: Any) -> Interpretation:
        return Interpretation()  # a recording has no values

    def call(
        self, f: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        if without_values():
            return super().call(f, args, keywords)
        position = self.observer.positions[_current_rank()]
        position.call, position.segment = position.call + 1, 0
        position.times.clear()
        self.observer.forwards[_current_rank()].clear()
        outer = frame()
        # Calls outside of gradient calls are numbered from 0 too.
        observed_frame = outer.replace(
            handlers=(*outer.handlers, self), counter=Counter()
        )
        with inside(_observe_innermost(observed_frame, self.observer)):
            return f(*args, **keywords)

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if _is_hidden(call.frame):
            return run

        def observed(params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
            if without_values():
                return run(params, *inputs, **keywords)
            observed_run = _ObservedRun(
                self.observer, call.frame, (call.numbers, call.path), "around"
            )
            out = run(params, *inputs, **keywords)
            for path, x in zip(*tree.flatten_with_paths(out)[:2], strict=True):
                if isinstance(x, Tensor):
                    observed_run.note("returned", path, x)
            return out

        return observed

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def observed(call: GradientCall) -> Outcome:
            if without_values() or frame().in_loss or _is_hidden(frame()):
                return run(call)
            rank = _current_rank()
            position = self.observer.positions[rank]
            position.segment += 1
            outcome = run(call)
            # These collectives are the test's: they are in no ledger, and their axes
            # must not count among those that the loss is reduced over.
            with silence(), ignoring_axes():
                total, grads = outcome.mean()
                grads = unshard(grads)
            paths, leaves, _ = tree.flatten_with_paths(grads)
            place = position.call, position.segment
            results = [(None, total), *zip(paths, leaves, strict=True)]
            for leaf, x in results:
                if isinstance(x, Tensor):
                    by_rank = self.log.gradient_results.setdefault((*place, leaf), {})
                    by_rank[rank] = self.log.budget.copy(x)
            position.segment += 1
            return outcome

        return observed


class _ObservedFrame(Frame):
    """A frame whose innermost interpretation is an observer, whatever enters later.

    Transforms inside the step, such as ``remat`` within ``shard``, add handlers after
    it; ``handlers`` puts it last each time.
    """

    observer: Interpretation

    @property
    def handlers(self) -> tuple[Interpretation, ...]:  # type: ignore[override]
        others = (h for h in self.__dict__["handlers"] if h is not self.observer)
        return (*others, self.observer)


def _observe_innermost(f: Frame, observer: Interpretation) -> _ObservedFrame:
    observed_frame = object.__new__(_ObservedFrame)
    observed_frame.__dict__.update(f.__dict__, observer=observer)
    return observed_frame


class _InnermostObserver(Interpretation):
    """The innermost interpretation, which notes the values of units."""

    called = "observed"

    def __init__(self, log: RunLog):
        self.log = log
        self.positions: defaultdict[int, _Position] = defaultdict(_Position)
        # By rank, the arguments and values of each forward run in this call of the
        # step: a recompute may follow, which is compared with it.
        self.forwards: defaultdict[int, dict[RunKey, list[UnitValue]]] = defaultdict(
            dict
        )

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def observed(call: GradientCall) -> Outcome:
            if without_values() or frame().in_loss or _is_hidden(frame()):
                return run(call)
            position = self.positions[_current_rank()]
            position.cotangent = call.cotangent
            outcome, f = run(call), frame()
            if outcome.weight is not None:
                self.log.weighted_losses.add((position.call, position.segment))
            total = outcome.total
            # A pipeline's gradient call runs all microbatches. If its count is 1 it has
            # divided each one's cotangent by their number already.
            if call.runner is not None:
                if outcome.count == 1:
                    self.log.pipelined_losses[position.call, position.segment] = (
                        f.micro[-1][1]
                    )
                f = f.replace(micro=f.micro[:-1])
                if outcome.weight is None:
                    total = total / outcome.count
            _ObservedRun(self, f, ((), ()), "loss").note("loss", "", total)
            return outcome

        return observed

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if _is_hidden(call.frame):
            return run

        def observed(params: PyTree, /, *inputs: PyTree, **keywords: PyTree) -> PyTree:
            if without_values():
                return run(params, *inputs, **keywords)
            observed_run = _ObservedRun(self, call.frame, (call.numbers, call.path))
            # A compiler would take the mode for a part of the function.
            compiled = call.frame.compiler or _torch.is_compiled_function(call.unit.fn)
            return observed_run(
                run, params, inputs, keywords, records_values=not compiled
            )

        return observed


class _ObservedRun:
    """One run of a unit, or of a loss, whose values are noted.

    Args:
        f: the frame in which it is called.
        numbers_and_path: those of the call.
        around: "" for the unit's body; else what is observed: "around" (the unit with
            its transforms) or "loss". It keeps the counts of repeats apart.
    """

    def __init__(
        self,
        observer: _InnermostObserver,
        f: Frame,
        numbers_and_path: tuple[tuple[int, ...], tuple[str, ...]],
        around: str = "",
    ):
        self.rank = _current_rank()
        self.observer, self.is_recompute = observer, running().recompute
        log, position = observer.log, observer.positions[self.rank]
        # ``accumulate`` within ``pipeline`` numbers microbatches in another order than
        # their rows have in the batch: no part can be named.
        transforms = [h.called for h in f.handlers]
        has_pipeline = "pipeline" in transforms
        inner_transforms = (
            transforms[transforms.index("pipeline") :] if has_pipeline else ()
        )
        self.in_order = "accumulate" not in inner_transforms
        rows_index = log.rows_index(self.rank)
        index = row_major((rows_index, *f.micro))
        count = math.prod(n for _, n in f.micro)
        microbatch = row_major(f.micro), count
        self.part = BatchPart(index, rows_index[1] * count, microbatch)
        log.averages_ranks = log.averages_ranks or bool(f.batch_places)
        rank_count = (
            math.prod(n for _, n in f.batch_places) if f.batch_places else rows_index[1]
        )
        # The step's loss is the mean of as many losses: see ``RunLog.contribution``.
        self.cotangent_scale = rank_count * count, position.cotangent
        place = position.call, position.segment, *numbers_and_path
        repeat_key = (*place, self.part, self.is_recompute, around)
        run = UnitRun(*place[:2], position.times[repeat_key], *place[2:])
        position.times[repeat_key] += 1
        self.run, self.run_key = run, (run, self.part, self.rank)

    def __call__(
        self,
        run: Callable[..., Any],
        params: PyTree,
        inputs: Sequence[PyTree],
        keywords: dict[str, PyTree],
        records_values: bool,
    ) -> PyTree:
        self.observer.log.unit_runs.add(self.run._replace(repeat=0))
        arguments: list[UnitValue] = []
        params = self._observe_arguments("parameter", params, arguments)
        named = {**{str(i): x for i, x in enumerate(inputs)}, **keywords}
        named = self._observe_arguments("input", named, arguments)
        inputs = [named.pop(str(i)) for i in range(len(inputs))]
        recorder = UnitRecorder(self.run.numbers, self.observer.log.budget.copy)
        try:
            with recorder if records_values else nullcontext():
                out = run(params, *inputs, **named)
        # A recompute leaves the unit by an exception, once the last value that the
        # backward needs is there.
        finally:
            forwards = self.observer.forwards[self.rank]
            values = [*arguments, *recorder.values]
            if not self.is_recompute:
                forwards[self.run_key] = values
            elif (forward := forwards.pop(self.run_key, None)) is not None:
                if (unlike_value := find_unlike(forward, values)) is not None:
                    by_part = self.observer.log.recomputed.setdefault(self.run, {})
                    by_part.setdefault(self.part, {})[self.rank] = unlike_value
        paths, leaves, structure = tree.flatten_with_paths(out)
        for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if isinstance(x, Tensor):
                self.note("output", path, x)
                if x.requires_grad and torch.is_grad_enabled():
                    leaves[i] = _NoteCotangent.apply(
                        x, self._cotangent_noter("output", path), True
                    )
        return tree.unflatten(structure, leaves)

    def _observe_arguments(
        self, kind: str, values: Any, arguments: list[UnitValue]
    ) -> Any:
        """Notes a unit's arguments; returns them with nodes that note cotangents."""
        paths, leaves, structure = tree.flatten_with_paths(values, is_leaf=is_sharded)
        tracked_tensors: dict[int, Tensor] = {}  # one passed twice stays one tensor
        for i, (path, x) in enumerate(zip(paths, leaves, strict=True)):
            if not isinstance(x, Tensor):
                continue
            self.note(kind, path, x)
            name = f"{kind} {path!r}" if path else kind
            arguments.append(UnitValue(name, -1, self.observer.log.budget.copy(x)))
            if id(x) not in tracked_tensors:
                tracked = x.requires_grad and torch.is_grad_enabled()
                note_cotangent = self._cotangent_noter(kind, path)
                tracked_tensors[id(x)] = (
                    _NoteCotangent.apply(x, note_cotangent, False) if tracked else x
                )
            leaves[i] = tracked_tensors[id(x)]
        return tree.unflatten(structure, leaves)

    def note(self, kind: str, path: str, x: Tensor, is_cotangent: bool = False) -> None:
        if not self.is_recompute and self.in_order:
            key = ValueKey(self.run, is_cotangent, kind, path)
            log = self.observer.log
            log.note(
                key,
                self.part,
                self.rank,
                ObservedValue(log.budget.copy(x), *self.cotangent_scale),
            )

    def _cotangent_noter(self, kind: str, path: str) -> Callable[[Tensor], None]:
        return lambda g: self.note(kind, path, g, is_cotangent=True)


class _NoteCotangent(torch.autograd.Function):
    """The identity, whose backward notes the cotangent that passes."""

    # A Function, and not a hook on a view: a pipeline takes a view for its base, and
    # adds to the parameter's gradient beneath the hook.

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, note_cotangent: Callable[[Tensor], None], returned: bool
    ) -> Tensor:
        ctx.note_cotangent = note_cotangent
        # The step may write into what a unit returned; autograd forbids writing into a
        # view made in a custom Function.
        return x.detach() if returned else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.note_cotangent(g)
        return g, None, None

"""The interpretation of unit calls and gradient calls by ``pipeline``."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.collective_ops import declare_type
from fsfunc.comm.groups import RankGroup, get_group
from fsfunc.comm.mesh import Mesh, here, note_axes_read
from fsfunc.core.autodiff import differentiate, tracked
from fsfunc.core.frames import Counter, Frame, Interpretation, frame, inside
from fsfunc.core.losses import loss_parts
from fsfunc.core.outcomes import BatchArgnums, GradientCall, Leaves, Outcome
from fsfunc.core.units import Call
from fsfunc.pipelining.actions import Schedule, ScheduleError, listing, owners
from fsfunc.pipelining.microbatches import (
    Microbatch,
    blank,
    combined,
    cut_batch,
    everywhere,
    folded,
    forwarded,
    joined,
    sum_shared,
    summed,
)
from fsfunc.pipelining.runtime import Worker
from fsfunc.pipelining.sample_gradients import SampleGradients
from fsfunc.pipelining.schedules import forward_only
from fsfunc.pipelining.stage_plans import Cut, Cuts, Stages
from fsfunc.pipelining.transfers import with_transfers
from fsfunc.pipelining.verification import verify
from fsfunc.runtime.generators import draw_number
from fsfunc.runtime.memory import BufferPool
from fsfunc.sharded.layout import Owned
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.tracing.programs import Program
from fsfunc.tracing.recorder import Recorder
from fsfunc.tracing.runs import Noted
from fsfunc.transforms.microbatches import Microbatches


@dataclass(eq=False, repr=False)
class Pipelining(Interpretation):
    """Interprets unit calls and gradient calls as a pipeline."""

    mesh: Mesh
    axis: str
    n: int
    schedule: Schedule
    stages: Stages
    batch_argnums: BatchArgnums | None

    lays_out = True
    called = "pipeline"

    def __post_init__(self) -> None:
        self.owners = owners(self.schedule)
        self.cuts = Cuts(self.stages, self.owners, self.axis)
        self.same_batch = (self.axis,)
        self.pools: dict[int, BufferPool] = defaultdict(BufferPool)

    @functools.cached_property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        stages = None if self.stages is None else tuple(self.stages)
        return (
            ("axis", self.axis),
            ("n_microbatches", self.n),
            ("batch_argnums", self.batch_argnums),
            ("stages", stages),
            ("schedule", listing(self.schedule).replace("\n", " | ")),
        )

    @property
    def shown(self) -> Iterable[tuple[str, Any]]:
        return [item for item in super().shown if item[0] != "schedule"]

    def learn(self, other: Pipelining) -> None:
        """Takes over the programs: later ones are cut as those were."""
        self.cuts.learn(other.cuts)

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def recorded(self, recorder: Recorder) -> Interpretation:
        return RecordedPipelining(self, recorder)

    # A call of the transformed function

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Runs ``f`` in reach of this interpretation; a loss, as a forward pass."""
        before = frame()
        for other in before.handlers:
            if isinstance(other, Pipelining) or self.axis in getattr(other, "axes", ()):
                raise ValueError(
                    f"pipeline over {self.axis!r} inside {type(other).__name__} over "
                    f"{getattr(other, 'axes', ())}: there is one pipeline, and an axis "
                    "of its own"
                )
        at = self.here(self.mesh)
        note_axes_read((self.axis,))
        # The counter numbers the gradient calls.
        handlers = (*before.handlers, self)
        found = before.replace(handlers=handlers, at=at, counter=Counter())
        with inside(found):
            try:
                out = f(*args, **keywords)
            except _Outside as outside:
                if outside.handler is not self:
                    raise
                if found.counter.count > 1:  # gradient calls came before
                    raise RuntimeError(_BOTH) from None
                if torch.is_grad_enabled() and tracked((args, keywords)):
                    raise RuntimeError(_FORWARD) from None
                out = self._forward(f, args, keywords)
        self.ran(at)
        return out

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if not call.frame.staged:
            if _torch.transforms_active():
                raise RuntimeError(_STOCK)
            raise _Outside(self)

        def held(params: Any, /, *inputs: Any, **keywords: Any) -> Any:
            params = tree.map(self._held, params, is_leaf=is_sharded)
            return run(params, *inputs, **keywords)

        return held

    def _held(self, leaf: Any) -> Any:
        """A leaf that this rank owns, as the tensor that it is."""
        if not isinstance(leaf, Sharded):
            return leaf
        self.cuts.check_leaf(leaf, self.mesh.coordinate(self.axis))
        alone = leaf.layout.parts == leaf.layout.owned
        return leaf.local if alone else leaf

    # Forward alone

    def _forward(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        outer, call = frame(), GradientCall(f, (0,), False, args, keywords)
        batches = self._batches(call)
        within = outer.replace(micro=(*outer.micro, (0, self.n)))
        if outer.seed is None and any(_draws(b.cut.program) for b in batches):
            within = within.replace(seed=draw_number())  # as in a gradient call
        worker = Worker(
            lambda out: (out, None, None), batches, self.owners, self._where(),
            within, len(outer.micro), (),
        )  # fmt: skip
        found = [returned for returned, _, _ in self._run(worker, forward_only)]
        out = forwarded(found, [b.share for b in batches])
        return _own(everywhere(out, worker.where, self.owners[-1]))

    # Gradient calls

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def pipelined(call: GradientCall) -> Outcome:
            f = frame()
            if self._is_within(f):
                raise RuntimeError(_BOTH)
            if _torch.transforms_active() or call.create_graph and f.in_loss:
                raise RuntimeError(_STOCK)
            if call.create_graph:
                raise RuntimeError(_TRACKED)
            if call.argnums and self.schedule == forward_only(self.schedule):
                raise ScheduleError(_NO_BACKWARD)
            depth = len(f.micro)
            # A place for ours: what is inside it is done for each microbatch.
            micro = (*f.micro, (0, self.n))
            again = any(i for i, _ in f.micro)  # the call before, on another part
            number = f.counter.count - 1 if again else f.counter.next()
            how = functools.partial(self._differentiate, depth, number)
            with inside(f.replace(micro=micro)):
                return run(call.replace(runner=how))

        return pipelined

    def _is_within(self, f: Frame) -> bool:
        """True inside a loss whose unit calls are placed on stages."""
        return f.staged

    def _differentiate(self, depth: int, number: int, call: GradientCall) -> Outcome:
        """Computes a gradient call by the actions of this rank."""
        f = frame()
        leaves = Leaves(call.args, call.argnums, call.packed, call.parts)
        picked = [x.detach().requires_grad_() for x in leaves.tensors]
        args = leaves.args(picked)
        values = [*picked, *leaves.every_part(args)]
        cut = self._by_parameters(call.replace(args=args))
        batches, count = folded(self._batches(cut, number))
        where = self._where()
        evaluates = not call.argnums

        def read(returned: Any) -> Any:
            total, weight, aux = loss_parts(returned, call.has_aux)
            return total, *tree.map(_detached, (weight, aux))

        worker = Worker(
            read, batches, self.owners, where, f, depth, values,
            self.pools[here(self.mesh).rank], call.seed,
        )  # fmt: skip
        observers = [h for h in f.handlers if h.observes and not evaluates]
        if observers:
            worker.samples = SampleGradients(observers, call, leaves, picked, worker)
        if not batches[0].cut.stages:
            return differentiate(call)
        for _, runtime in f.runtimes:
            runtime.begin()
        results = self._run(worker, *[forward_only] * evaluates)
        for _, runtime in f.runtimes:  # before ranks wait for the loss of the last one
            runtime.end_backward(f.micro[:depth])
        result = combined(results, [b.share for b in batches])
        total, weight, aux = _own(everywhere(result, where, self.owners[-1]))
        grads = leaves.grads([summed(x, self.n) for x in picked])
        due = () if evaluates else (functools.partial(sum_shared, f, where, leaves),)
        if worker.samples is not None:
            worker.samples.end(total, weight)
        return Outcome(total, weight, grads, aux, count, due, grads, call.cotangent)

    def _by_parameters(self, call: GradientCall) -> GradientCall:
        """Returns a call that evaluates a loss as one by its parameters.

        What is differentiated is what a pipeline takes for parameters; of a loss that
        is only evaluated, the first argument that is not cut.
        """
        if call.argnums:
            return call
        cut = Microbatches(call, self.n, self.batch_argnums, self.called)
        whole = [i for i in range(len(call.args)) if not cut.is_cut(i)]
        if not whole:
            raise TypeError(_NO_PARAMETERS)
        return call.replace(argnums=tuple(whole[:1]))

    def _cut(self, call: GradientCall) -> list[Microbatch]:
        return cut_batch(call, self.n, self.batch_argnums)

    def _batches(self, call: GradientCall, number: int = 0) -> list[Microbatch]:
        """The microbatches of a step's ``number``-th gradient call, with programs."""
        of = self.cuts.of
        batches = [replace(b, cut=of(b.call, number)) for b in self._cut(call)]
        first = tuple(call.argnums) == (0,)  # what a program has as its parameters
        params = call.args[0] if first else [call.args[i] for i in call.argnums]
        self.cuts.check([b.cut for b in batches], params)
        return batches

    def _where(self) -> RankGroup:
        return get_group(self.axis, here(self.mesh))

    def _run(
        self,
        worker: Worker,
        of: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    ) -> list[Any]:
        """The results of each microbatch's loss, blanks where the last stage is not.

        Blanks too where a tracer only records programs and types: no stage runs then.
        """
        batches, where = worker.microbatches, worker.where
        between = frozenset[tuple[int, int]]().union(*(b.cut.messages for b in batches))
        actions = _explicit(of(self.schedule), between)[where.index]
        outputs = [b.cut.program.loss.outputs for b in batches]
        found = [worker.read(blank(o)) for o in outputs]  # or no rank begins
        tracer = frame().tracer
        if tracer is None or tracer.complete:
            worker.run(actions)
            if where.index == self.owners[-1]:
                found = [worker.results[m] for m in range(self.n)]
        return found


@functools.lru_cache(maxsize=256)
def _explicit(made: Schedule, between: frozenset[tuple[int, int]]) -> Schedule:
    """The schedule with its sends and receives."""
    if all(action.is_compute for row in made for action in row):
        return with_transfers(made, between)
    verify(made, edges=between)
    return made


class _Outside(BaseException):
    """A unit was called outside every gradient call: a forward pass alone."""

    def __init__(self, handler: Pipelining):
        self.handler = handler


class RecordedPipelining(Noted, Pipelining):
    """``pipeline`` while a step is recorded: of each unit call is noted where it runs.

    Args:
        cut: that of the loss which runs now, if one does; one microbatch of it.
    """

    call = Pipelining.call

    def __init__(self, handler: Pipelining, recorder: Recorder, cut: Cut | None = None):
        self.__dict__.update(handler.__dict__)
        self.handler, self.recorder, self.cut = handler, recorder, cut

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        noted = self.cut is not None
        return (Noted if noted else Pipelining).unit(self, run, call)

    def owner(self, number: int) -> tuple[Owned, ...]:
        stage = 0 if self.cut is None else self.cut.producers[number]
        return (Owned(self.axis, len(self.schedule), self.owners[stage]),)

    def _is_within(self, f: Frame) -> bool:
        return self.cut is not None

    def _forward(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        parts = self._cut(GradientCall(f, (0,), False, args, keywords))
        call = parts[0].call
        with inside(self._running(self.cuts.of(call), counter=Counter())):
            found = f(*call.args, **call.keywords)
        returned = self._of_all(found, parts, 0)
        return forwarded(returned, [b.share for b in parts])

    def _differentiate(self, depth: int, number: int, call: GradientCall) -> Outcome:
        parts = self._cut(self._by_parameters(call))
        part = parts[0].call
        found = self.cuts.of(part, number)
        if not found.stages:
            return differentiate(call)
        with inside(self._running(found)):
            one = differentiate(call.replace(args=part.args, keywords=part.keywords))
        if not call.has_aux:
            return one
        returned = self._of_all((one.total, one.aux), parts, number)
        values = [loss_parts(x, True)[2] for x in returned]
        return one.replace(aux=joined(values, [b.share for b in parts]))

    def _of_all(self, first: Any, parts: list[Microbatch], number: int) -> list[Any]:
        """What each microbatch returns: as the first, or blank where rows are fewer."""
        return [
            first
            if b.share == parts[0].share
            else blank(self.cuts.of(b.call, number).program.loss.outputs)
            for b in parts
        ]

    def _running(self, cut: Cut, **changes: Any) -> Frame:
        """The frame in which a loss runs that is cut so."""
        f, mine = frame(), RecordedPipelining(self.handler, self.recorder, cut)
        handlers = tuple(mine if h is self else h for h in f.handlers)
        return f.replace(handlers=handlers, **changes)


def _own(out: Any) -> Any:
    """A pipeline's results, typed as this rank's own."""
    return tree.map(lambda x: declare_type(x, "V") if isinstance(x, Tensor) else x, out)


def _draws(program: Program) -> bool:
    """True if a loss draws random numbers, in its units or between them."""
    return bool(program.draws) or any(call.draws for call in program.calls)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


_FORWARD = (
    "pipeline(loss) is a forward pass, of which autograd sees nothing: differentiate "
    "inside it, by pipeline(ff.value_and_grad(loss))"
)
_STOCK = (
    "a pipeline must own the gradient call, but here torch.func or autograd around it "
    "differentiates: use ff.value_and_grad inside the function that pipeline is given"
)
_TRACKED = (
    "an argument of this gradient call requires grad, as an nn.Parameter does, or "
    "comes from one that does; autograd sees nothing of a pipeline: use "
    "ff.value_and_grad inside the function that pipeline is given, and give it "
    "parameters .detach()ed"
)
_NO_BACKWARD = (
    "the schedule has forward actions alone, and this is a gradient call, which needs "
    "B, or I and W, of every stage and microbatch; evaluation is ff.value(loss)"
)
_NO_PARAMETERS = (
    "ff.value(loss) in a pipeline is given no parameters by position: the first "
    "positional argument that is not the batch is what its units read, as in "
    'value(loss, batch_argnums="x")(params, x=x)'
)
_BOTH = (
    "this function calls units both inside and outside a gradient call, and pipeline "
    "runs either a train step or a forward pass: evaluate by ff.value(loss) in the "
    "step, or by a pipeline(loss) of its own"
)

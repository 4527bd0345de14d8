"""The interpretation of unit calls and gradient calls by ``pipeline``.

`pipelines.pipeline` puts a `Pipelining` into the frame around the user's train step,
or around a loss, which is then a forward pass alone. The step runs on every rank; at
its gradient call `_differentiate`

1. cuts the batch into microbatches, and the traced loss into stages (`_batches`);
2. runs this rank's actions of the schedule (`_run`, `runtime.Worker`);
3. sums the microbatches' results and broadcasts them from the last stage's rank;
4. returns the gradients of this rank's stages, as sums that `Outcome` divides.

While a state is laid out, a `RecordedPipelining` is in its place: no stage runs, and
the recorder learns on which rank each unit call will run.
"""

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
from fsfunc.core.autodiff import any_requires_grad, differentiate
from fsfunc.core.frames import Counter, Frame, Interpretation, frame, inside
from fsfunc.core.losses import loss_parts
from fsfunc.core.outcomes import BatchArgnums, GradientCall, Leaves, Outcome
from fsfunc.core.units import Call
from fsfunc.pipelining.actions import Schedule, ScheduleError, listing, owners
from fsfunc.pipelining.microbatches import (
    Microbatch,
    blank,
    broadcast_results,
    combine_results,
    cut_batch,
    fold_mean,
    join_forwards,
    join_values,
    sum_shared,
    summed_grad,
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
from fsfunc.tree.types import Leaf, PyTree


@dataclass(eq=False, repr=False)
class Pipelining(Interpretation):
    """Interprets unit calls and gradient calls as a pipeline.

    Args:
        axis: the mesh axis along which the stages lie.
        schedule: a row of actions for each rank, perhaps with its transfers.
        stages: where the loss is cut, as the user gave it.
        batch_argnums: the arguments of gradient calls that are cut, if given.
    """

    mesh: Mesh
    axis: str
    n_microbatches: int
    schedule: Schedule
    stages: Stages
    batch_argnums: BatchArgnums | None

    lays_out = True
    called = "pipeline"

    def __post_init__(self) -> None:
        self.owners: tuple[int, ...] = owners(self.schedule)
        self.cuts: Cuts = Cuts(self.stages, self.owners, self.axis)
        self.same_batch: tuple[str, ...] = (self.axis,)
        # By rank: simulated ranks share this object. Kept from step to step, so that
        # gradients find the memory of the last ones.
        self.pools: dict[int, BufferPool] = defaultdict(BufferPool)

    @functools.cached_property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        stages = None if self.stages is None else tuple(self.stages)
        return (
            ("axis", self.axis),
            ("n_microbatches", self.n_microbatches),
            ("batch_argnums", self.batch_argnums),
            ("stages", stages),
            ("schedule", listing(self.schedule).replace("\n", " | ")),
        )

    @property
    def shown(self) -> Iterable[tuple[str, Any]]:
        # A schedule of many actions would fill the title of a step.
        return [entry for entry in super().shown if entry[0] != "schedule"]

    def learn(self, other: Pipelining) -> None:
        """Adopts another rank's traced programs: later ones are cut as those were."""
        self.cuts.learn(other.cuts)

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def recorded(self, recorder: Recorder) -> Interpretation:
        return RecordedPipelining(self, recorder)

    # A call of the transformed function

    def call(
        self, f: Callable[..., PyTree], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> PyTree:
        """Runs ``f`` with this interpretation in force; a loss, as a forward pass.

        Whether ``f`` is a train step or a loss shows when its first unit is called: in
        a loss that happens outside every gradient call. The call is then left
        (`_Outside`), and the loss starts anew as a forward pass.
        """
        outer = frame()
        for enclosing in outer.handlers:
            if isinstance(enclosing, Pipelining) or self.axis in getattr(
                enclosing, "axes", ()
            ):
                raise ValueError(
                    f"pipeline over {self.axis!r} inside {type(enclosing).__name__} "
                    f"over {getattr(enclosing, 'axes', ())}: there is one pipeline, "
                    "and an axis of its own"
                )
        position = self.here(self.mesh)
        note_axes_read((self.axis,))
        # A new counter, which numbers the gradient calls within this one.
        handlers = (*outer.handlers, self)
        inner = outer.replace(handlers=handlers, here=position, counter=Counter())
        with inside(inner):
            try:
                returned = f(*args, **keywords)
            except _Outside as outside:
                if outside.handler is not self:
                    raise
                if inner.counter.count > 1:  # gradient calls came before
                    raise RuntimeError(_BOTH) from None
                if torch.is_grad_enabled() and any_requires_grad((args, keywords)):
                    raise RuntimeError(_FORWARD) from None
                returned = self._forward(f, args, keywords)
        self.ran(position)
        return returned

    def unit(self, run: Callable[..., PyTree], call: Call) -> Callable[..., PyTree]:
        # Within a staged loss a `StageRun` is outermost, and lets through the unit
        # calls of its stage alone.
        if not call.frame.staged:
            if _torch.transforms_active():
                raise RuntimeError(_STOCK)
            raise _Outside(self)

        def run_with_local(
            params: PyTree, /, *inputs: PyTree, **keywords: PyTree
        ) -> PyTree:
            params = tree.map(self._as_local, params, is_leaf=is_sharded)
            return run(params, *inputs, **keywords)

        return run_with_local

    def _as_local(self, leaf: Leaf) -> Leaf:
        """Returns a leaf of this rank's stages as a tensor, if nothing else cuts it."""
        if not isinstance(leaf, Sharded):
            return leaf
        self.cuts.check_leaf(leaf, self.mesh.coordinate(self.axis))
        alone = leaf.layout.parts == leaf.layout.owners
        return leaf.local if alone else leaf

    # Forward alone

    def _forward(
        self, f: Callable[..., PyTree], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> PyTree:
        """Runs a loss by the schedule's forward actions alone."""
        outer, call = frame(), GradientCall(f, (0,), False, args, keywords)
        batches = self._batches(call)
        inner = outer.replace(micro=(*outer.micro, (0, self.n_microbatches)))
        if outer.seed is None and any(_draws(b.cut.program) for b in batches):
            inner = inner.replace(seed=draw_number())  # as in a gradient call
        worker = Worker(
            lambda returned: (returned, None, None), batches, self.owners,
            self._rank_group(), inner, len(outer.micro), (),
        )  # fmt: skip
        returned = [x for x, _, _ in self._run(worker, forward_only)]
        joined = join_forwards(returned, [b.share for b in batches])
        return _as_varying(
            broadcast_results(joined, worker.rank_group, self.owners[-1])
        )

    # Gradient calls

    def gradient(
        self, run: Callable[[GradientCall], Outcome]
    ) -> Callable[[GradientCall], Outcome]:
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
            # (index, count) of each enclosing loop over microbatches. Loops of
            # transforms inside come after ours, as they run in each microbatch.
            micro = (*f.micro, (0, self.n_microbatches))
            # In a later part of an enclosing `accumulate` the gradient call is the one
            # before, on other rows: it has the same number, and the same program.
            is_later_part = any(i for i, _ in f.micro)
            number = f.counter.count - 1 if is_later_part else f.counter.next()
            runner = functools.partial(self._differentiate, depth, number)
            with inside(f.replace(micro=micro)):
                return run(call.replace(runner=runner))

        return pipelined

    def _is_within(self, f: Frame) -> bool:
        """Returns whether a loss runs whose unit calls are placed on stages."""
        return f.staged

    def _differentiate(self, depth: int, number: int, call: GradientCall) -> Outcome:
        """Computes a gradient call by the actions of this rank."""
        f = frame()
        leaves = Leaves(call.args, call.argnums, call.packed, call.parts)
        grad_leaves = [x.detach().requires_grad_() for x in leaves.tensors]
        args = leaves.args(grad_leaves)
        with_parts = [*grad_leaves, *leaves.every_part(args)]
        # All microbatches read the same leaves, so ``.grad`` is the sum over them.
        by_parameters = self._by_parameters(call.replace(args=args))
        batches, count = fold_mean(self._batches(by_parameters, number))
        rank_group = self._rank_group()
        evaluates = not call.argnums

        def read(returned: PyTree) -> tuple[Tensor, Tensor | None, PyTree]:
            total, weight, aux = loss_parts(returned, call.has_aux)
            return total, *tree.map(_detached, (weight, aux))

        worker = Worker(
            read, batches, self.owners, rank_group, f, depth, with_parts,
            self.pools[here(self.mesh).rank], call.initial_cotangent,
        )  # fmt: skip
        observers: list[Any] = [h for h in f.handlers if h.observes and not evaluates]
        if observers:
            worker.samples = SampleGradients(
                observers, call, leaves, grad_leaves, worker
            )
        if not batches[
            0
        ].cut.stages:  # a penalty of parameters alone: no units, no rows
            return differentiate(call)
        for _, runtime in f.runtimes:
            runtime.begin_forward()
        results = self._run(worker, *[forward_only] * evaluates)
        # Reductions of `shard` start before the ranks wait for the last one's loss.
        for _, runtime in f.runtimes:
            runtime.end_backward(f.micro[:depth])
        summed_result = combine_results(results, [b.share for b in batches])
        total, weight, aux = _as_varying(
            broadcast_results(summed_result, rank_group, self.owners[-1])
        )
        grads = leaves.grads([summed_grad(x, self.n_microbatches) for x in grad_leaves])
        # The psum of leaves that stages of several ranks use is due once, when an
        # enclosing `accumulate` has summed all its microbatches, not in each.
        due = (
            () if evaluates else (functools.partial(sum_shared, f, rank_group, leaves),)
        )
        if worker.samples is not None:  # with the loss that every rank knows now
            worker.samples.end(total, weight)
        return Outcome(total, weight, grads, aux, count, due, grads, call.cotangent)

    def _by_parameters(self, call: GradientCall) -> GradientCall:
        """Returns a call that says which arguments are the parameters.

        They are what is differentiated. Of a loss that is only evaluated
        (``ff.value``), they are the first argument that is not cut.
        """
        if call.argnums:
            return call
        microbatches = Microbatches(
            call, self.n_microbatches, self.batch_argnums, self.called
        )
        uncut = [i for i in range(len(call.args)) if not microbatches.is_cut(i)]
        if not uncut:
            raise TypeError(_NO_PARAMETERS)
        return call.replace(argnums=tuple(uncut[:1]))

    def _cut(self, call: GradientCall) -> list[Microbatch]:
        return cut_batch(call, self.n_microbatches, self.batch_argnums)

    def _batches(self, call: GradientCall, number: int = 0) -> list[Microbatch]:
        """Returns the microbatches of a step's gradient call, with their programs.

        Args:
            number: the call's place among the gradient calls of the step.
        """
        cut_for = self.cuts.cut_for
        batches = [replace(b, cut=cut_for(b.call, number)) for b in self._cut(call)]
        one_tree = tuple(call.argnums) == (
            0,
        )  # as `stage_plans` names parameters' paths
        params = call.args[0] if one_tree else [call.args[i] for i in call.argnums]
        self.cuts.check([b.cut for b in batches], params)
        return batches

    def _rank_group(self) -> RankGroup:
        return get_group(self.axis, here(self.mesh))

    def _run(
        self,
        worker: Worker,
        select: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    ) -> list[tuple[PyTree, Tensor | None, PyTree]]:
        """Returns the results of each microbatch's loss, on the last stage's rank.

        Other ranks get blanks of the same shapes, into which `everywhere` broadcasts.
        So does every rank while a tracer only records programs and types: no stage
        runs then.

        Args:
            select: returns the actions of the schedule to run, such as `forward_only`.
        """
        batches, rank_group = worker.microbatches, worker.rank_group
        edges = frozenset[tuple[int, int]]().union(*(b.cut.messages for b in batches))
        actions = _explicit(select(self.schedule), edges)[rank_group.index]
        outputs = [b.cut.program.loss.outputs for b in batches]
        # Before any message: on blanks, `read` refuses a wrong loss on every rank.
        results = [worker.read(blank(x)) for x in outputs]
        tracer = frame().tracer
        if tracer is None or tracer.complete:
            worker.run(actions)
            if rank_group.index == self.owners[-1]:
                results = [worker.results[m] for m in range(self.n_microbatches)]
        return results


@functools.lru_cache(maxsize=256)
def _explicit(schedule: Schedule, edges: frozenset[tuple[int, int]]) -> Schedule:
    """Returns the schedule with its sends and receives, proven for these edges."""
    if all(action.is_compute for row in schedule for action in row):
        return with_transfers(schedule, edges)
    verify(schedule, edges=edges)
    return schedule


class _Outside(BaseException):
    """Raised when a unit is called outside every gradient call: ``f`` is a loss.

    Not an Exception: the user's function must not swallow it.
    """

    def __init__(self, handler: Pipelining):
        self.handler = handler


class RecordedPipelining(Noted, Pipelining):
    """``pipeline`` while a step is recorded: notes on which rank each unit call runs.

    One microbatch of the loss is enough: the layout of parameters does not depend on
    rows.

    Args:
        cut: the stages of the loss that runs now; None outside a loss.
    """

    handler: Pipelining
    recorder: Recorder
    cut: Cut | None

    call = Pipelining.call

    def __init__(self, handler: Pipelining, recorder: Recorder, cut: Cut | None = None):
        # It shares the cuts: what is traced while recording is found in the run.
        self.__dict__.update(handler.__dict__)
        self.handler, self.recorder, self.cut = handler, recorder, cut

    def unit(self, run: Callable[..., PyTree], call: Call) -> Callable[..., PyTree]:
        in_loss = self.cut is not None
        return (Noted if in_loss else Pipelining).unit(self, run, call)

    def owner(self, number: int) -> tuple[Owned, ...]:
        stage = 0 if self.cut is None else self.cut.stage_of_call[number]
        return (Owned(self.axis, len(self.schedule), self.owners[stage]),)

    def _is_within(self, f: Frame) -> bool:
        return self.cut is not None

    def _forward(
        self, f: Callable[..., PyTree], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> PyTree:
        parts = self._cut(GradientCall(f, (0,), False, args, keywords))
        call = parts[0].call
        with inside(self._running(self.cuts.cut_for(call), counter=Counter())):
            returned_first = f(*call.args, **call.keywords)
        all_returned = self._returned_by_all(returned_first, parts, 0)
        return join_forwards(all_returned, [b.share for b in parts])

    def _differentiate(self, depth: int, number: int, call: GradientCall) -> Outcome:
        parts = self._cut(self._by_parameters(call))
        first_call = parts[0].call
        cut = self.cuts.cut_for(first_call, number)
        if not cut.stages:
            return differentiate(call)
        with inside(self._running(cut)):
            outcome = differentiate(
                call.replace(args=first_call.args, keywords=first_call.keywords)
            )
        if not call.has_aux:
            return outcome
        all_returned = self._returned_by_all(
            (outcome.total, outcome.aux), parts, number
        )
        auxes = [loss_parts(x, True)[2] for x in all_returned]
        return outcome.replace(aux=join_values(auxes, [b.share for b in parts]))

    def _returned_by_all(
        self, first: PyTree, parts: list[Microbatch], number: int
    ) -> list[PyTree]:
        """Returns what each microbatch's loss would: the first's, or blanks.

        Blanks where rows are fewer, as rows beside a loss are joined to those of all.
        """
        return [
            first
            if b.share == parts[0].share
            else blank(self.cuts.cut_for(b.call, number).program.loss.outputs)
            for b in parts
        ]

    def _running(self, cut: Cut, **changes: Any) -> Frame:
        """Returns the frame in which a loss runs that is cut so."""
        f, within_loss = frame(), RecordedPipelining(self.handler, self.recorder, cut)
        handlers = tuple(within_loss if h is self else h for h in f.handlers)
        return f.replace(handlers=handlers, **changes)


def _as_varying(results: PyTree) -> PyTree:
    """Declares results as varying (V), as a loss of this rank's rows is.

    While types are checked no stage runs, so the check sees blanks and finds no type.
    """
    return tree.map(
        lambda x: declare_type(x, "V") if isinstance(x, Tensor) else x, results
    )


def _draws(program: Program) -> bool:
    """Returns whether a loss draws random numbers, in its units or between them."""
    return bool(program.draws) or any(call.draws for call in program.calls)


def _detached(x: Leaf) -> Leaf:
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

"""``Sharding``, the interpretation of ``shard``: how it runs three kinds of calls.

====================  ============  ==================================================
a call of             runs through  which
====================  ============  ==================================================
the sharded function  ``call``      checks it, packs leaves, makes a `ShardRuntime`
a unit                ``unit``      is `unit_calls.call_unit`: gather, run, free
a gradient            ``gradient``  has a runtime of its own; sums become means
====================  ============  ==================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.groups import get_group
from fsfunc.comm.mesh import Here, Mesh, here
from fsfunc.core.frames import Frame, Interpretation, frame, inside
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.reduction_hooks import (
    GradientObserver,
    GradientSteps,
    ReductionFeedback,
)
from fsfunc.core.tracers import FirstCalls, signature
from fsfunc.core.units import Call
from fsfunc.runtime.host_copies import wait_for_copies
from fsfunc.runtime.memory import pool_of
from fsfunc.sharded.inputs import arguments, refuse
from fsfunc.sharded.leaf import FlatShard, Parts, is_sharded
from fsfunc.sharded.packing import repack_leaves
from fsfunc.sharded.plain_leaves import check_laid_out, lay_returned
from fsfunc.sharded.spent import refuse_unusable
from fsfunc.transforms.gradients import (
    Gradients,
    average_outcome,
    buffers_to_sum,
    mark_updated,
)
from fsfunc.transforms.ownership import Ownership, enter_tracked
from fsfunc.transforms.shard_options import GroupTable, ShardOptions
from fsfunc.transforms.shard_runtime import ShardRuntime
from fsfunc.transforms.unit_calls import call_unit
from fsfunc.tree.types import Leaf, PyTree

Function = Callable[..., PyTree]
Args = tuple[PyTree, ...]
Keywords = dict[str, PyTree]
Flattened = tuple[list[Leaf], tree.TreeDef]
RunGradient = Callable[[GradientCall], Outcome]


class Sharding(Interpretation):
    """The interpretation of ``shard``.

    Args:
        options: the arguments of ``shard``.
        first_calls: the check of a call with arguments of new shapes.

    Attributes:
        compared_whole: the gradient calls whose replicated leaves were compared: rank,
            number of these leaves, and ``argnums``.
        uncompared: see `gradient_checks`.
    """

    options: ShardOptions
    mesh: Mesh
    axis: tuple[str, ...]
    axes: tuple[str, ...]
    zero: int

    lays_out = ends_alike = repeats_calls = True
    called = "shard"

    def __init__(self, options: ShardOptions, first_calls: FirstCalls):
        self.first_calls = first_calls
        self.options, self.mesh, self.axis = options, options.mesh, options.axis
        self.axes, self.zero = options.axes, options.zero
        # What is joined by itself must have the same bits. A gather of shared buffers
        # holds more memory, and an inexact message rounds by what else is in it.
        default = None if options.zero == 0 and options.reduction.exact else 0
        given = options.min_bytes
        self.min_bytes: int | None = default if given is None else given
        self.compared_whole: frozenset[tuple[int, int, tuple[int, ...]]] = frozenset()
        self.uncompared: dict[Any, set[str]] = {}

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return self.options.configuration

    @property
    def shown(self) -> list[tuple[str, Any]]:
        return self.options.shown

    # A call of the transformed function

    def call(self, f: Function, args: Args, keywords: Keywords) -> PyTree:
        """Runs ``f`` with this interpretation in force; packs leaves that it made.

        In order: the arguments are checked (`enter`; the first time of their kind
        `tracing.type_check` runs ``f`` without data) and packed, a runtime is made,
        ``f`` runs, and its result is compared, packed and laid out.
        """
        leaves, treedef = tree.flatten((args, keywords), is_leaf=is_sharded)
        state_def = treedef.child(0).child(0) if args else None
        state = leaves[: state_def.num_leaves] if state_def else []
        entered = self.enter(self, f, args, keywords, (leaves, treedef), state)
        this_rank, tracer = entered.here or here(self.mesh), entered.tracer
        coordinates = this_rank.mesh.coordinates(this_rank.rank)
        with inside(entered):
            # A user's own `tree.map` over a state leaves parts that lie in no buffer: a
            # runtime gathers and sums whole buffers.
            if repack_leaves(leaves, coordinates):
                args, keywords = tree.unflatten(treedef, leaves)
            ownership = Ownership(state, leaves)
            runtime = self._make_runtime(leaves, this_rank.rank, ownership)
            where = partial(get_group, self.axes, this_rank)
            if tracer is not None:
                args, keywords = tracer.mark_numbers((args, keywords))
            elif enter_tracked(leaves, ownership, where):
                args, keywords = tree.unflatten(treedef, leaves)
            runtimes = (*entered.runtimes, (self, runtime))
            context = self.first_calls.begin_call((args[1:], keywords), entered)
            try:
                with inside(entered.replace(runtimes=runtimes)), context:
                    out = f(*args, **keywords)
            except BaseException:
                # Whoever catches the error may write offloaded parameters on the host,
                # which copies to the GPU may still read.
                wait_for_copies(failed=True)
                raise
            runtime.gathers.close()
            if tracer is not None:
                tracer.on_return(args, out)
            if self.first_calls.ran_without_data:
                self.first_calls.check_returned(out)
            self.ran(this_rank)
            out_leaves, out_def = tree.flatten(out, is_leaf=is_sharded)
            if repack_leaves(out_leaves, coordinates):
                out = tree.unflatten(out_def, out_leaves)
            # The next call must find a layout on every leaf of the state.
            if not all(map(is_sharded, out_leaves)):
                before = state_def, state, self.first_calls.rank_local_paths
                out = lay_returned(out, out_leaves, out_def, *before)
            self.first_calls.compare_state(f, entered, state_def, out, context)
            # Later calls run the graph of the whole step, which compares on its own.
            if entered.compiler is not None and entered.compiler.whole:
                entered.compiler.compares(self.first_calls, f, entered, out_def)  # type: ignore[attr-defined]
            return out

    def enter(
        self,
        handler: Interpretation,
        f: Function,
        args: Args,
        keywords: Keywords,
        flat: Flattened,
        state: Sequence[Leaf] = (),
    ) -> Frame:
        """Checks a call of ``f``; returns its frame, to which ``handler`` is added.

        Args:
            handler: this interpretation, or the one that a tracer uses in its place.
            flat: the leaves and the structure of ``(args, keywords)``.
            state: the leaves of the first argument, which must have layouts.
        """
        outer = frame()
        # Leaves are split, and gradients averaged, along an axis once.
        for other in outer.handlers:
            taken = set(getattr(other, "axes", ())) & set(self.axes)
            if taken:
                raise ValueError(
                    f"two transforms over one axis: {sorted(taken)} is taken by an "
                    "outer one; shard each axis once"
                )
        this_rank = self.here(self.mesh)
        self._check(f, args, keywords, this_rank, flat, state)
        this_rank = replace(this_rank, mean_axes=(*this_rank.mean_axes, *self.axes))
        coordinates = this_rank.mesh.coordinates(this_rank.rank)
        places = tuple((coordinates[a], self.mesh.axes[a]) for a in self.axes)
        return outer.replace(
            handlers=(*outer.handlers, handler),
            here=this_rank,
            batch_places=(*outer.batch_places, *places),
            drawing_units=outer.drawing_units | self.first_calls.drawing_units,
        )

    def recorded(self, recorder: Any) -> Interpretation:
        return recorder.noted(self)

    def _check(
        self,
        f: Function,
        args: Args,
        keywords: Keywords,
        this_rank: Here,
        flat: Flattened,
        state: Sequence[Leaf] = (),
    ) -> None:
        """Checks a call with arguments of a new kind, before it runs.

        Under ``torch.func.vmap`` that of one row; on a vmap mesh no types.
        """
        # Every call comes here; of a kind that is known it goes on at once.
        tracer, key, on_vmap = frame().tracer, None, self.mesh.backend == "vmap"
        if not on_vmap:
            try:
                key = signature(*flat)
            except RuntimeError:
                # A donated leaf refuses to tell its shape: named here by its path.
                for argument in (*args, keywords):
                    refuse_unusable(argument)
                raise
            if tracer is None and self.first_calls.was_checked(this_rank.rank, key):
                return
        # A plan, whose link moves no data, takes a batch on "meta" too.
        if this_rank.link.moves_data:
            names = arguments(len(args) - 1, 1)
            refuse("array meta", "a sharded function", args[1:], *names)
        if on_vmap:
            return
        # A call within a run without data is checked by the tracer of that run.
        if tracer is not None:
            tracer.on_call(key, args, keywords, (*this_rank.mean_axes, *self.axes))
            return
        if _torch.fake_active():
            return
        # The first real call of a kind is run without data before it. What is under
        # torch.func must have a meaning by itself too: it is run without, on one row.
        check_laid_out(state, args)
        if _torch.functorch_active():
            args, keywords = tree.map(_unwrap, (args, keywords), is_leaf=is_sharded)
            with _torch.outside_transforms():
                flat = tree.flatten((args, keywords), is_leaf=is_sharded)
                self._check(f, args, keywords, this_rank, flat)
        else:
            refuse("array meta sparse", "a sharded function", args[:1], *arguments(1))
            call = lambda *args, **keywords: self.call(f, args, keywords)  # noqa: E731
            axes = (*this_rank.mean_axes, *self.axes)
            self.first_calls.check(call, args, keywords, this_rank, axes)
        self.first_calls.mark_checked(this_rank.rank, [key])

    def _make_runtime(
        self,
        leaves: Sequence[Leaf],
        rank: int,
        ownership: Ownership,
        **of_gradient_call: Any,
    ) -> ShardRuntime:
        """Makes the runtime of a call with these leaves."""
        coordinates = self.mesh.coordinates(rank)
        packed = [x.packed for x in filter(is_sharded, leaves)]
        buffers = dict.fromkeys([b for b in packed if b is not None])
        shards = [b for b in buffers if self.options.gathers(b.members[0])]
        runtime = ShardRuntime(
            GroupTable(self.options, here(self.mesh)),
            self.options,
            pool=pool_of(self.mesh, rank),
            coordinates=coordinates,
            shards=shards,
            ownership=ownership,
            **of_gradient_call,
        )
        self._check_places(shards, coordinates, runtime.groups)
        return runtime

    def _check_places(
        self, shards: Iterable[FlatShard], coords: dict[str, int], groups: GroupTable
    ) -> None:
        """Raises if a buffer is that of another rank, or of another number of them."""
        for shard in shards:
            # The lookup makes the groups, now: a backward does not know the mesh.
            where = groups[shard.split_axes].where
            # Else a gather would mix up ranges, or wait for ranks that do not exist.
            size = shard.place.size
            fits = size == 1 or where is not None and size == where.size
            if not (fits and shard.coordinates.items() <= coords.items()):
                raise ValueError(
                    f"{shard.members[0]} is the part of {dict(shard.coordinates)} of "
                    f"{size} ranks, but this is {coords} of {self.mesh}: give each "
                    "rank its own part (a list that spmd returned, passed on whole), "
                    "or place the whole tensors anew"
                )

    # Unit calls

    def unit(self, run: Function, call: Call) -> Function:
        if call.frame.whole:  # an enclosing unit has gathered its parameters
            return run
        runtime, tracer = call.frame.runtime_of(self), call.frame.tracer
        run = run if tracer is None else tracer.wrap_gathered(call, run)
        return partial(call_unit, self.options, runtime, run, call)

    # Gradient calls

    def gradient(self, run: RunGradient) -> RunGradient:
        return partial(self._differentiate, run)

    def _differentiate(self, run: RunGradient, call: GradientCall) -> Outcome:
        """Runs a gradient call with a runtime of its own."""
        this_rank, f = here(self.mesh), frame()
        coordinates = this_rank.mesh.coordinates(this_rank.rank)
        leaves, treedef = tree.flatten((call.args, call.keywords), is_leaf=is_sharded)
        # Parameters that the step has computed, as by `tree.map`, lie in no buffer yet.
        if repack_leaves(leaves, coordinates):
            args, keywords = tree.unflatten(treedef, leaves)
            call = call.replace(args=args, keywords=keywords)
        runtime = self._begin_gradient_call(call, leaves, this_rank)
        outer = f.runtime_of(self)
        runtime.add_to(call.earlier_grads)
        # This runtime takes the place of that of the call around, whose unit calls
        # have no part in this backward.
        others = [(h, state) for h, state in f.runtimes if h is not self]
        with inside(f.replace(runtimes=(*others, (self, runtime)))):
            # Autograd is not to differentiate by these: the backward of each unit hands
            # their gradients to `sums`.
            packed = {**call.packed, **runtime.summed}
            outcome = run(
                call.replace(packed=packed, parts=runtime.parts, earlier_grads=None)
            )
        # In this order: `close` waits for copies of the sums to a store too.
        runtime.sums.finish()
        runtime.gathers.close()
        outer.index_after = runtime.next_index
        outer.advance(f.micro)
        return self._end_gradient_call(call, outcome, runtime)

    def _begin_gradient_call(
        self, call: GradientCall, leaves: Sequence[Leaf], this_rank: Here
    ) -> ShardRuntime:
        """Makes the runtime of a gradient call; compares replicated leaves once."""
        f, differentiated = frame(), [call.args[i] for i in call.argnums]
        summed, plain_count = {}, 0
        # A gradient that is differentiated itself needs autograd's graph of its sum.
        if not (call.composable or f.create_graph):
            summed, plain_count = buffers_to_sum(differentiated, self.options)
        observers = [h for h in f.handlers if isinstance(h, GradientObserver)]
        feedback = [h for h in f.handlers if isinstance(h, ReductionFeedback)]
        if len(feedback) > 1:
            raise ValueError(_TWICE.format(*(h.called for h in feedback)))
        for h in feedback:
            h.check(self.options.reduction)
        parts = {} if call.parts is None else call.parts
        outer = f.runtime_of(self)
        runtime = self._make_runtime(
            leaves,
            this_rank.rank,
            outer.ownership,
            steps=self._find_steps(summed, parts),
            observers=observers,
            feedback=feedback[-1] if feedback else None,
            first_index=outer.next_index,
            differentiated=differentiated,
            summed=summed,
            parts=parts,
        )
        # The mean of a replicated leaf's gradient is right only if all ranks have the
        # same leaf: compared once, as it costs a message.
        key = this_rank.rank, plain_count, call.argnums
        if plain_count and this_rank.link.moves_data and key not in self.compared_whole:
            where = get_group(self.axes, this_rank)
            self.first_calls.compare_whole(differentiated, runtime.averages, where)
            self.compared_whole |= {key}
        return runtime

    def _end_gradient_call(
        self, call: GradientCall, outcome: Outcome, runtime: ShardRuntime
    ) -> Outcome:
        """Returns the outcome with the sums of the runtime as mean gradients."""
        f, differentiated = frame(), tuple(call.args[i] for i in call.argnums)
        # The type check refuses much that a step may not do with a rank's own parts.
        # Within `internal()` it knows that the library computes, which may.
        with internal():
            gradients = Gradients(differentiated, outcome.grads, runtime)
            gradients.take_parts()
        # `check_observed` only compares: it computes nothing that a tracer would see.
        if runtime.sums.observed:
            gradients.check_observed()
        # The tracer is told in between. Gradients of parts that the loss read outside
        # units are still this rank's own, and are typed so; `take_sums` then adds them
        # to the sums of units' gradients, which are means over the ranks.
        if (tracer := f.tracer) is not None:
            is_replicated = f.runtime_of(self).ownership.is_replicated
            tracer.on_gradient(differentiated, gradients.trees(), is_replicated)
        with internal():
            gradients.take_sums()
            grads = gradients.trees()
        local_total = None if tracer is None else outcome.total
        # Sums of the runtime's own may be written in place by `accumulate`.
        writable = grads if runtime.sums_all else None
        summed = bool(runtime.sums.began_as_means)
        outcome = outcome.replace(
            grads=grads, writable=writable, includes_earlier=summed
        )
        steps = runtime.sums.steps
        # Marked when all is summed and divided: a leaf that raises cannot be divided.
        if steps is not None and steps.done:
            outcome = outcome.replace(
                after_mean=lambda grads: mark_updated(grads, differentiated, steps)
            )
        outcome = average_outcome(outcome, gradients, here(self.mesh))
        if tracer is not None:
            before = local_total, call.args, call.keywords
            value = outcome.total, outcome.aux
            tracer.on_reduced(differentiated, outcome.grads, before, value)
        return outcome

    def _find_steps(
        self, summed: dict[int, FlatShard], parts: Parts
    ) -> GradientSteps | None:
        """Returns the updates to make in the backward, by ``step_in_backward``.

        Raises:
            ValueError: gradients are not complete there: at zero=1, or within
                ``accumulate`` or another ``shard``.
        """
        f = frame()
        steps = [h for h in f.handlers if isinstance(h, GradientSteps)]
        # A gradient that a loss takes is not the one by which parameters are updated.
        if not steps or f.in_loss:
            return None
        if self.zero == 1:
            raise ValueError(_LATE)
        shardings = [h for h in f.handlers if isinstance(h, Sharding)]
        if f.micro or len(shardings) > 1:
            raise ValueError(_AROUND)
        return steps[-1].for_call(summed, parts)


def _unwrap(x: Leaf) -> Leaf:
    """Returns a leaf outside of ``torch.func``; of one that it maps over, a row."""
    if is_sharded(x):
        return x.with_local(_torch.first_row(x.local))
    return _torch.first_row(x) if isinstance(x, Tensor) else x


_LATE = (
    "step_in_backward at zero=1, which reduces gradients when the backward ends: "
    "zero=2 keeps parameters whole too, and reduces gradients as they appear"
)
_AROUND = (
    "step_in_backward in a shard within accumulate or another shard, which sum its "
    "gradients once more: shard(accumulate(step, n), mesh, axes) over all axes at "
    "once, or with replicate=, sums them before the step"
)
_TWICE = "{} and {} both override gradient reduction; use one"

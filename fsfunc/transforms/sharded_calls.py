"""``Sharding``, the interpretation of ``shard``.

How it runs a call of the transformed function, a unit call, and a gradient call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.groups import group
from fsfunc.comm.mesh import Here, here
from fsfunc.core.frames import Frame, Interpretation, frame, inside
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.reduction_hooks import (
    GradientObserver,
    GradientSteps,
    ReductionFeedback,
)
from fsfunc.core.tracers import FirstCalls, signature
from fsfunc.core.units import Call
from fsfunc.runtime.host_copies import settle
from fsfunc.runtime.memory import pool_of
from fsfunc.sharded.inputs import arguments, refuse
from fsfunc.sharded.leaf import FlatShard, Parts, is_sharded
from fsfunc.sharded.packing import repacked
from fsfunc.sharded.plain_leaves import check_laid_out, laid_returned
from fsfunc.sharded.spent import refuse_spent
from fsfunc.transforms.gradients import Gradients, averaged, shown, summed_here
from fsfunc.transforms.ownership import Ownership, enter_tracked
from fsfunc.transforms.shard_options import GroupTable, ShardOptions
from fsfunc.transforms.shard_runtime import ShardRuntime
from fsfunc.transforms.unit_calls import call_unit


class Sharding(Interpretation):
    """The interpretation of ``shard``.

    Args:
        options: the arguments of ``shard``.
        first_calls: the check of a call with arguments of new shapes.

    ``compared_whole``: the gradient calls whose replicated leaves were compared, by
    rank, the number of these leaves, and ``argnums``.
    """

    lays_out = ends_alike = True
    called = "shard"

    def __init__(self, options: ShardOptions, first_calls: FirstCalls):
        self.first_calls = first_calls
        self.cut, self.mesh, self.axis = options, options.mesh, options.axis
        self.axes, self.zero = options.axes, options.zero
        self.min_bytes = options.min_bytes
        self.compared_whole: frozenset[Any] = frozenset()
        self.uncompared: dict[Any, set[str]] = {}  # see `gradient_checks`

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return self.cut.configuration

    @property
    def shown(self) -> list[tuple[str, Any]]:
        return self.cut.shown

    # A call of the transformed function

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Runs ``f`` with this interpretation in force; packs leaves that it made.

        In order: the arguments are checked (`entered`; the first time of their kind
        `tracing.type_check` runs ``f`` without data) and packed, a runtime is made,
        ``f`` runs, and its result is compared, packed and laid out.
        """
        leaves, treedef = tree.flatten((args, keywords), is_leaf=is_sharded)
        given = treedef.child(0).child(0) if args else None
        state = leaves[: given.num_leaves] if given else []
        found = self.entered(self, f, args, keywords, (leaves, treedef), state)
        at, tracer = found.at or here(self.mesh), found.tracer
        coordinates = at.mesh.coordinates(at.rank)
        with inside(found):
            if repacked(leaves, coordinates):
                args, keywords = tree.unflatten(treedef, leaves)
            ownership = Ownership(state, leaves)
            runtime = self._runtime(leaves, at.rank, ownership)
            where = partial(group, self.axes, at)
            if tracer is not None:
                args, keywords = tracer.heard((args, keywords))
            elif enter_tracked(leaves, ownership, where):
                args, keywords = tree.unflatten(treedef, leaves)
            runtimes = (*found.runtimes, (self, runtime))
            call = self.first_calls.begins((args[1:], keywords), found)
            try:
                with inside(found.replace(runtimes=runtimes)), call:
                    out = f(*args, **keywords)
            except BaseException:
                # Whoever catches it may write parameters on the host.
                settle(failed=True)
                raise
            runtime.gathers.close()
            if tracer is not None:
                tracer.returned(args, out)
            if self.first_calls.ran:
                self.first_calls.check_returned(out)
            self.ran(at)
            made, outdef = tree.flatten(out, is_leaf=is_sharded)
            if repacked(made, coordinates):
                out = tree.unflatten(outdef, made)
            if not all(map(is_sharded, made)):
                before = given, state, self.first_calls.own_paths
                out = laid_returned(out, made, outdef, *before)
            self.first_calls.compare_state(f, found, given, out, call)
            if found.compiler is not None and found.compiler.whole:
                found.compiler.compares(self.first_calls, f, found, outdef)
            return out

    def entered(
        self,
        handler: Interpretation,
        f: Callable[..., Any],
        args: Any,
        keywords: Any,
        flat: tuple[list[Any], tree.TreeDef],
        state: Sequence[Any] = (),
    ) -> Frame:
        """Checks a call of ``f``; returns its frame, to which ``handler`` is added.

        Args:
            flat: the leaves and the structure of ``(args, keywords)``.
            state: the leaves of the first argument, which must have layouts.
        """
        before = frame()
        for other in before.handlers:
            taken = set(getattr(other, "axes", ())) & set(self.axes)
            if taken:
                raise ValueError(
                    f"two transforms over one axis: {sorted(taken)} is taken by an "
                    "outer one; shard each axis once"
                )
        at = self.here(self.mesh)
        self._check(f, args, keywords, at, flat, state)
        at = replace(at, mean=(*at.mean, *self.axes))
        mine = at.mesh.coordinates(at.rank)
        places = tuple((mine[a], self.mesh.axes[a]) for a in self.axes)
        return before.replace(
            handlers=(*before.handlers, handler),
            at=at,
            varies=(*before.varies, *places),
            drawing=before.drawing | self.first_calls.drawing,
        )

    def recorded(self, recorder: Any) -> Interpretation:
        return recorder.noted(self)

    def _check(
        self, f: Any, args: Any, keywords: Any, at: Here, flat: Any, state: Any = ()
    ) -> None:
        """Checks a call with arguments of a new kind, before it runs.

        Under ``torch.func.vmap`` that of one row; on a vmap mesh no types.
        """
        # Every call comes here; of a kind that is known it goes on at once.
        tracer, key, apart = frame().tracer, None, self.mesh.backend == "vmap"
        if not apart:
            try:
                key = signature(*flat)
            except RuntimeError:
                for given in (*args, keywords):
                    refuse_spent(given)
                raise
            if tracer is None and self.first_calls.knows(at.rank, key):
                return
        if at.link.moves:
            names = arguments(len(args) - 1, 1)
            refuse("array meta", "a sharded function", args[1:], *names)
        if apart:
            return
        # Within a run without data its tracer hears of the call, and checks it there.
        if tracer is not None:
            tracer.called(key, args, keywords, (*at.mean, *self.axes))
            return
        if _torch.fake_active():
            return
        # The first real call of a kind is run without data before it. What torch.func
        # transforms must have a meaning by itself.
        check_laid_out(state, args)
        if _torch.functorch_active():
            args, keywords = tree.map(_plain, (args, keywords), is_leaf=is_sharded)
            with _torch.outside_transforms():
                flat = tree.flatten((args, keywords), is_leaf=is_sharded)
                self._check(f, args, keywords, at, flat)
        else:
            refuse("array meta sparse", "a sharded function", args[:1], *arguments(1))
            call = lambda *args, **keywords: self.call(f, args, keywords)  # noqa: E731
            axes = (*at.mean, *self.axes)
            self.first_calls.check(call, args, keywords, at, axes)
        self.first_calls.learn(at.rank, [key])

    def _runtime(
        self, leaves: Sequence[Any], rank: int, ownership: Ownership, **more: Any
    ) -> ShardRuntime:
        """A runtime for a call with these leaves."""
        coordinates = self.mesh.coordinates(rank)
        packed = [x.packed for x in filter(is_sharded, leaves)]
        buffers = dict.fromkeys([b for b in packed if b is not None])
        shards = [b for b in buffers if self.cut.gathers(b.members[0])]
        runtime = ShardRuntime(
            GroupTable(self.cut, here(self.mesh)),
            self.cut,
            pool=pool_of(self.mesh, rank),
            coordinates=coordinates,
            shards=shards,
            ownership=ownership,
            **more,
        )
        self._check_places(shards, coordinates, runtime.groups)
        return runtime

    def _check_places(
        self, shards: Iterable[FlatShard], at: dict[str, int], groups: GroupTable
    ) -> None:
        """Raises if a buffer is that of another rank, or of another number of them."""
        for shard in shards:
            where = groups[shard.split_axes].where  # made here: a backward has no mesh
            own, size = shard.coordinates, shard.place.size
            fits = size == 1 or where is not None and size == where.size
            if not (fits and own.items() <= at.items()):
                raise ValueError(
                    f"{shard.members[0]} is the part of {dict(own)} of {size} "
                    f"ranks, but this is {at} of {self.mesh}: give each rank its own "
                    "part (a list that spmd returned, passed on whole), or place the "
                    "whole tensors anew"
                )

    # Unit calls

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if call.frame.whole:  # an enclosing unit has gathered its parameters
            return run
        runtime, tracer = call.frame.runtime_of(self), call.frame.tracer
        run = run if tracer is None else tracer.within(call, run)
        return partial(call_unit, self.cut, runtime, run, call)

    # Gradient calls

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self._differentiated, run)

    def _differentiated(self, run: Callable[..., Any], call: GradientCall) -> Outcome:
        """Runs a gradient call with a runtime of its own."""
        at, f = here(self.mesh), frame()
        coordinates = at.mesh.coordinates(at.rank)
        leaves, treedef = tree.flatten((call.args, call.keywords), is_leaf=is_sharded)
        if repacked(leaves, coordinates):
            args, keywords = tree.unflatten(treedef, leaves)
            call = call.replace(args=args, keywords=keywords)
        runtime, outer = self._begun(call, leaves, at), f.runtime_of(self)
        runtime.add_to(call.into)
        # In place of the runtime of the call around.
        others = [(h, theirs) for h, theirs in f.runtimes if h is not self]
        with inside(f.replace(runtimes=(*others, (self, runtime)))):
            packed = {**call.packed, **runtime.summed}
            outcome = run(call.replace(packed=packed, parts=runtime.parts, into=None))
        runtime.sums.finish()
        runtime.gathers.close()
        outer.later = runtime.passed
        outer.go_on(f.micro)
        return self._ended(call, outcome, runtime)

    def _begun(
        self, call: GradientCall, leaves: Sequence[Any], at: Here
    ) -> ShardRuntime:
        """The runtime of a gradient call."""
        f, chosen = frame(), [call.args[i] for i in call.argnums]
        summed, plain = {}, 0
        if not (call.composable or f.create_graph):
            summed, plain = summed_here(chosen, self.cut)
        observers = [h for h in f.handlers if isinstance(h, GradientObserver)]
        feedback = [h for h in f.handlers if isinstance(h, ReductionFeedback)]
        if len(feedback) > 1:
            raise ValueError(_TWICE.format(*(h.called for h in feedback)))
        for h in feedback:
            h.check(self.cut.reduction)
        parts = {} if call.parts is None else call.parts
        outer = f.runtime_of(self)
        runtime = self._runtime(
            leaves,
            at.rank,
            outer.ownership,
            steps=self._steps(summed, parts),
            observers=observers,
            feedback=feedback[-1] if feedback else None,
            first=outer.passed,
            differentiated=chosen,
            summed=summed,
            parts=parts,
        )
        key = at.rank, plain, call.argnums
        if plain and at.link.moves and key not in self.compared_whole:
            where = group(self.axes, at)
            self.first_calls.compare_whole(chosen, runtime.averages, where)
            self.compared_whole |= {key}
        return runtime

    def _ended(
        self, call: GradientCall, outcome: Outcome, runtime: ShardRuntime
    ) -> Outcome:
        """The outcome with the sums of the runtime as mean gradients."""
        f, chosen = frame(), [call.args[i] for i in call.argnums]
        with internal():
            found = Gradients(chosen, outcome.grads, runtime)
            found.take_parts()
        if runtime.sums.observed:
            found.check_observed()
        if (tracer := f.tracer) is not None:
            replicated = f.runtime_of(self).ownership.is_replicated
            tracer.gradient(tuple(chosen), found.trees(), replicated)
        with internal():
            found.take_sums()
            grads = found.trees()
        total = None if tracer is None else outcome.total
        own, summed = grads if runtime.sums_all else None, bool(runtime.sums.earlier)
        outcome = outcome.replace(grads=grads, own=own, summed=summed)
        steps = runtime.sums.steps
        if steps is not None and steps.done:
            by = tuple(chosen)
            outcome = outcome.replace(shown=lambda grads: shown(grads, by, steps))
        outcome = averaged(outcome, found, here(self.mesh))
        if tracer is not None:
            of, value = (total, call.args, call.keywords), (outcome.total, outcome.aux)
            tracer.reduced(tuple(chosen), outcome.grads, of, value)
        return outcome

    def _steps(
        self, summed: dict[int, FlatShard], parts: Parts
    ) -> GradientSteps | None:
        """The updates to make during the backward, if ``step_in_backward`` asks for it.

        Raises:
            ValueError: gradients are not complete there: at zero=1, or within
                ``accumulate`` or another ``shard``.
        """
        f = frame()
        found = [h for h in f.handlers if isinstance(h, GradientSteps)]
        if not found or f.in_loss:
            return None
        if self.zero == 1:
            raise ValueError(_LATE)
        within = [h for h in f.handlers if isinstance(h, Sharding)]
        if f.micro or len(within) > 1:
            raise ValueError(_AROUND)
        return found[-1].for_call(summed, parts)


def _plain(x: Any) -> Any:
    """A leaf without what ``torch.func`` wraps it in; of one that it maps, a row."""
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

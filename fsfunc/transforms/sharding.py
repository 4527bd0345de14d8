"""``shard``: parameters, gradients and moments in parts, one per rank (ZeRO 0 to 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.attribution import internal
from fsfunc.comm.collective_ops import hearing
from fsfunc.comm.comparison import Lines
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.mesh import Axis, Here, Mesh, check_mesh, here
from fsfunc.core.alike import check_alike, heard_here
from fsfunc.core.frames import Frame, Interpretation, composable, frame, inside
from fsfunc.core.observation import Observation
from fsfunc.core.outcomes import GradientCall, Outcome
from fsfunc.core.units import Call
from fsfunc.optim.backward_steps import BackwardSteps
from fsfunc.runtime.buffer_pool import pool_of
from fsfunc.sharded.donated import refuse_spent
from fsfunc.sharded.inputs import arguments, check_integer, refuse
from fsfunc.sharded.leaf import FlatShard, Parts, is_sharded
from fsfunc.sharded.packing import repack, repacked
from fsfunc.sharded.rank_local import mark_rank_local
from fsfunc.tracing.recorder import Noted, Recorder
from fsfunc.tracing.steadiness import check_data
from fsfunc.tracing.type_check import check, knows, learn, signature
from fsfunc.transforms.gradients import (
    averaged,
    beside,
    check_observed,
    check_whole,
    collected,
    kept_here,
    shown,
    stepped,
)
from fsfunc.transforms.messages.residuals import Feedback
from fsfunc.transforms.messages.wire import Gather, Reduction
from fsfunc.transforms.ownership import Ownership
from fsfunc.transforms.shard_runtime import ShardRuntime
from fsfunc.transforms.transforming import transformed
from fsfunc.transforms.unit_calls import CutAxes, call_unit

__all__ = ["Sharding", "shard"]


def shard(
    f: Callable[..., Any],
    mesh: Mesh,
    axis: Axis,
    *,
    zero: int = 3,
    replicate: Axis | None = None,
    reshard_after_forward: bool = True,
    min_bytes: int = 0,
    reduce_each: bool = False,
    gather: Gather | None = None,
    reduction: Reduction | None = None,
) -> Callable[..., Any]:
    """``f`` with its units' parameters in parts over ``axis``, one part per rank.

    Each unit gathers its parameters, runs, and forgets them; its backward gathers
    again, without computing again, and reduces the gradients. The loss is this rank's
    own mean; value and gradient are those of the mean over the ranks.

    Args:
        f: a unit, a loss, or a train step.
        axis: the mesh axis, or several, over which the data vary.
        zero: 3: parameters, gradients and moments in parts. 2: parameters whole,
            gradients reduced as they appear. 1: the same, reduced when the backward
            ends. 0: everything whole, gradients all-reduced unit by unit.
        replicate: a further axis over which the parts are repeated (HSDP).
        reshard_after_forward: at zero=3, False keeps what the forward gathered.
        min_bytes: neighbouring units below this size share one buffer.
        reduce_each: of an ``accumulate`` within, reduces each microbatch's gradients
            over ``axis``, and holds parts meanwhile; over ``replicate`` the sum of
            them is summed once. Else both are done once, of whole gradients.
        gather, reduction: how parameters and gradients travel, where that is not as
            they are, such as ``ff.QuantizedGather()``: see ``Gather``, ``Reduction``.

    Raises:
        ValueError: an unknown axis, ``zero`` outside 0..3, an axis taken twice;
            ``reduce_each`` at zero=1, which reduces when the backward ends; a
            ``gather`` or ``reduction`` that is not for these.

    Cost, a rank and step, for P bytes of parameters and a = (n-1)/n: zero=3 gathers
    each unit twice, but for the last one and those whose backward reads no parameter,
    and reduces each once: at most 3aP. zero 1 and 2: one gather and one reduction a
    unit, 2aP. zero=0: one all-reduce a unit, 2aP. Besides, one psum of the loss. Over
    r replicas one all-reduce of each part, 2(r-1)/r of its bytes. Reductions and sums
    over replicas run beside the backward of the units that follow.

    Source: ZeRO (Rajbhandari et al., 2020), sections 5 and 7; FairScale's FSDP.

    >>> import torch, fsfunc as ff
    >>> mesh = ff.make_mesh({"data": 2}, "simulated")
    >>> unit = ff.unit(lambda p, x: x @ p["w"])
    >>> def main():
    ...     f = ff.shard(lambda p, x: unit(p, x).sum(), mesh, "data")
    ...     params = ff.place(f, {"w": torch.ones(3, 1)}, torch.ones(2, 3))
    ...     return params["w"].local.tolist(), f(params, torch.ones(2, 3)).item()
    >>> ff.spmd(main, mesh)()
    [([1.0, 1.0], 6.0), ([1.0], 6.0)]
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r}: it is 0, 1, 2 or 3")
    check_integer(min_bytes, "min_bytes", 0)
    names = check_mesh(mesh, "shard").check(axis)
    copies = () if replicate is None else mesh.check(replicate)
    if set(names) & set(copies):
        raise ValueError(f"replicate={replicate!r} repeats an axis of {axis!r}")
    if reduce_each and zero == 1:
        raise ValueError(
            "reduce_each=True at zero=1, which reduces once, when the backward ends: "
            "zero=2 keeps parameters whole too, and reduces gradients as they appear"
        )
    handler = Sharding(
        mesh,
        names,
        zero,
        copies,
        reshard_after_forward,
        min_bytes,
        reduce_each,
        gather=gather,
        reduction=reduction,
    )
    return transformed(f, handler)


class Sharding(Interpretation):
    """What ``shard`` makes of unit and gradient calls.

    Args:
        mesh, axis, zero, copies, reshard, min_bytes, reduce_each: what ``shard`` is
            asked.
        gather, reduction: how buffers travel, see ``wire``.

    By rank, ``claims``: what a step that was tried says is the same on all of them;
    and ``compared_whole``: of which whole leaves they compared the values, told by how
    many there were in which arguments.
    """

    lays_out = True
    called = "shard"

    def __init__(
        self,
        mesh: Mesh,
        axis: tuple[str, ...],
        zero: int = 3,
        copies: tuple[str, ...] = (),
        reshard: bool = True,
        min_bytes: int = 0,
        reduce_each: bool = False,
        *,
        gather: Gather | None = None,
        reduction: Reduction | None = None,
    ):
        self.mesh, self.axis, self.zero, self.copies = mesh, axis, zero, copies
        self.cut = CutAxes(mesh, axis, copies)
        self.min_bytes, self.reduce_each = min_bytes, reduce_each
        self.holds = not reshard
        self.how_gathered = Gather() if gather is None else gather
        self.how_reduced = Reduction() if reduction is None else reduction
        self.claims: dict[int, Lines] = {}
        self.compared_whole: frozenset[Any] = frozenset()
        self.rank_local: set[str] = set()  # paths of the state that is returned
        self.new = True  # nothing was returned as yet
        self.how_gathered.check(axis)
        self.how_reduced.check(axis, zero)

    @property
    def configuration(self) -> tuple[tuple[str, Any], ...]:
        return (
            ("axis", self.axis),
            ("zero", self.zero),
            ("replicate", self.copies),
            ("reshard_after_forward", not self.holds),
            ("min_bytes", self.min_bytes),
            ("reduce_each", self.reduce_each),
            ("gather", self.how_gathered),
            ("reduction", self.how_reduced),
        )

    @property
    def axes(self) -> tuple[str, ...]:
        return self.cut.every

    # A call of the transformed function

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        """Runs ``f`` in reach of this interpretation; what it changed is packed."""
        found = self.entered(self, f, args, keywords)
        at = found.at or here(self.mesh)
        coordinates = at.mesh.coordinates(at.rank)
        with inside(found):
            leaves, treedef = tree.flatten((args, keywords), is_leaf=is_sharded)
            if repacked(leaves, coordinates):
                args, keywords = tree.unflatten(treedef, leaves)
            runtime = self._runtime(leaves, at.rank, Ownership(args))
            runtimes = (*found.runtimes, (self, runtime))
            with inside(replace(found, runtimes=runtimes)):
                out = f(*args, **keywords)
            runtime.close()
            if found.tracer is not None:
                found.tracer.returned(args, out)
            elif self.rank_local:
                self._mark(out)
            if self.new:
                self.new = _torch.fake_active()
                check_data(() if self.new else out)
            self.ran(at)
            return repack(out, coordinates)

    def entered(
        self, handler: Interpretation, f: Callable[..., Any], args: Any, keywords: Any
    ) -> Frame:
        """The frame in which a call of ``f`` runs, of which ``handler`` is one more."""
        before = frame()
        for other in before.handlers:
            taken = set(getattr(other, "axes", ())) & set(self.axes)
            if taken:
                raise ValueError(
                    f"two transforms over one axis: {sorted(taken)} is taken by an "
                    "outer one; shard each axis once"
                )
        at = self.here(self.mesh)
        self._check(f, args, keywords, at)
        at = replace(at, mean=(*at.mean, *self.axes))
        return replace(before, handlers=(*before.handlers, handler), at=at)

    def recorded(self, recorder: Recorder) -> Interpretation:
        return _Recorded(self, recorder)

    def _check(self, f: Any, args: Any, keywords: Any, at: Here) -> None:
        """Has a call of new shapes tried without data, before anything of it runs."""
        if at.link.moves:
            refuse(
                "array meta",
                "a sharded function",
                args[1:],
                *arguments(len(args) - 1, 1),
            )
        if self.mesh.backend == "vmap":
            return
        try:
            key = signature(args, keywords)
        except RuntimeError:
            for given in (*args, keywords):
                refuse_spent(given)
            raise
        if (tracer := frame().tracer) is not None:
            tracer.called(key, args, keywords, (*at.mean, *self.axes))
            return
        if _torch.functorch_active() or _torch.fake_active():
            return
        if not knows(self, at.rank, key):
            refuse(
                "array meta sparse",
                "a sharded function",
                args[:1],
                *arguments(1),
            )
            call = lambda *args, **keywords: self.call(f, args, keywords)  # noqa: E731
            axes, again = (*at.mean, *self.axes), not knows(self, at.rank)
            seen = check(call, args, keywords, at, axes, again=again)
            self.claims[at.rank] = seen.claims
            self.rank_local |= seen.rank_local
            learn(self, at.rank, [key])

    def _mark(self, out: Any) -> None:
        """Marks what the state that is returned holds of each rank's own."""
        state = out[0] if isinstance(out, tuple) and out else out
        paths, leaves, _ = tree.flatten_with_paths(state, is_leaf=is_sharded)
        for path, x in zip(paths, leaves, strict=True):
            if path in self.rank_local and isinstance(x, Tensor):
                mark_rank_local(x)

    def _runtime(
        self, leaves: Sequence[Any], rank: int, ownership: Ownership, **more: Any
    ) -> ShardRuntime:
        """The runtime of a call that is given these leaves."""
        at = here(self.mesh)
        where = group(self.axis, at)
        replicas = group(self.copies, at) if self.copies else None
        coordinates = self.mesh.coordinates(rank)
        shards: dict[int, FlatShard] = {}
        for x in leaves:
            if is_sharded(x) and (shard := x.packed) is not None:
                if id(shard) not in shards:
                    plain = shard.place.axes in (self.axis, ())
                    if plain or self.cut.own(shard.members[0]):
                        shards[id(shard)] = shard
        runtime = ShardRuntime(
            where,
            replicas,
            zero=self.zero,
            holds=self.holds,
            gather=self.how_gathered,
            reduction=self.how_reduced,
            pool=pool_of(self.mesh, rank),
            coordinates=coordinates,
            shards=shards.values(),
            ownership=ownership,
            reduce_each=self.reduce_each,
            **more,
        )
        for shard in shards.values():
            where = runtime.routes[shard.split_axes].where
            self._check_place(shard, coordinates, where)
        return runtime

    def _check_place(
        self, shard: FlatShard, at: dict[str, int], where: RankGroup | None
    ) -> None:
        """Raises where a buffer is another rank's, or one of other ranks."""
        own, size = shard.coordinates, shard.place.size
        alike = size == 1 or where is not None and size == where.size
        for axis, i in own.items():
            alike = alike and at[axis] == i
        tracer = frame().tracer
        if not alike and (tracer is None or tracer.complete):  # or in another's place
            raise ValueError(
                f"{shard.members[0]} is the part of {dict(own)} of {size} "
                f"ranks, but this is {at} of {self.mesh}: give each rank its own "
                "part (a list that spmd returned, passed on whole), or place the "
                "whole tensors anew"
            )

    # Unit calls

    def unit(self, run: Callable[..., Any], call: Call) -> Callable[..., Any]:
        if call.frame.whole:  # its parameters are plain tensors, and its own
            return run
        runtime = call.frame.runtime_of(self)
        return partial(call_unit, self.cut, self.holds, runtime, run, call)

    # Gradient calls

    def gradient(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def sharded(call: GradientCall) -> Outcome:
            at, f = here(self.mesh), frame()
            given = (call.args, call.keywords)
            leaves, treedef = tree.flatten(given, is_leaf=is_sharded)
            if repacked(leaves, at.mesh.coordinates(at.rank)):
                args, keywords = tree.unflatten(treedef, leaves)
                call = replace(call, args=args, keywords=keywords)
            runtime, outer = self._begun(call, leaves, at), f.runtime_of(self)
            heard = heard_here()
            sizes = tuple((a, self.mesh.axes[a]) for a in self.axes)
            where = tuple((self.mesh.coordinate(a, at.rank), n) for a, n in sizes)
            # In place of the plain call's: a loss is under one mean of ours.
            others = [(h, kept) for h, kept in f.runtimes if h is not self]
            within = replace(
                f,
                runtimes=(*others, (self, runtime)),
                varies=(*f.varies, *where),
            )
            with inside(within):
                kept = {**call.packed, **runtime.keeps}
                with hearing(heard):
                    outcome = run(replace(call, packed=kept, parts=runtime.parts))
            runtime.finish()
            if all(i == n - 1 for i, n in f.micro):  # of a loop, the last
                outer.goes_on_from(runtime)
            return self._ended(call, outcome, runtime, heard)

        return sharded

    def _begun(
        self, call: GradientCall, leaves: Sequence[Any], at: Here
    ) -> ShardRuntime:
        """What gathers and sums for a gradient call, which is about to run."""
        f, chosen = frame(), [call.args[i] for i in call.argnums]
        composed = call.create_graph or composable()
        plainly = (self.axis, ())
        keeps, plain = {}, 0
        if not composed:
            keeps, plain = kept_here(chosen, plainly, self.cut.own)
        observers = [h for h in f.handlers if isinstance(h, Observation)]
        feedback = [h for h in f.handlers if isinstance(h, Feedback)]
        if len(feedback) > 1:
            raise ValueError(_TWICE.format(*(h.called for h in feedback)))
        for h in feedback:
            h.check(self.how_reduced)
        parts = {} if call.parts is None else call.parts
        outer = f.runtime_of(self)
        runtime = self._runtime(
            leaves,
            at.rank,
            outer.ownership,
            steps=self._steps(keeps, parts),
            observers=observers,
            feedback=feedback[-1] if feedback else None,
            first=outer.passed,
            differentiated=chosen,
            keeps=keeps,
            parts=parts,
        )
        key = at.rank, plain, call.argnums
        if plain and at.link.moves and key not in self.compared_whole:
            claims = self.claims.get(at.rank, ())
            check_whole(runtime, claims, group(runtime.mean_axes, at))
            self.compared_whole |= {key}
        return runtime

    def _ended(
        self,
        call: GradientCall,
        outcome: Outcome,
        runtime: ShardRuntime,
        heard: set[str] | None,
    ) -> Outcome:
        """What it gave, with what the runtime summed in its places, as means."""
        f, chosen = frame(), [call.args[i] for i in call.argnums]
        with internal():
            direct = beside(outcome.grads, chosen, runtime)
        if runtime.sums.observers:
            check_observed(direct, chosen, runtime)
        if f.tracer is not None:
            whose = f.runtime_of(self).ownership.is_one_value
            f.tracer.gradient(tuple(chosen), direct, whose)
        with internal():
            grads = collected(direct, chosen, runtime)
        for axis in sorted(heard or ()):
            whose = runtime.ownership.is_one_value
            check_alike(self, call.fn, chosen, grads, whose, axis)
        total = None if f.tracer is None else outcome.total
        outcome = outcome.but(grads)
        if done := stepped(runtime):
            by = tuple(chosen)
            outcome = replace(outcome, shown=lambda grads: shown(grads, by, done))
        outcome = averaged(outcome, runtime, here(self.mesh))
        if f.tracer is not None:
            of, value = (total, call.args, call.keywords), (outcome.total, outcome.aux)
            f.tracer.reduced(tuple(chosen), outcome.grads, of, value)
        return outcome

    def _steps(self, keeps: dict[int, FlatShard], parts: Parts) -> BackwardSteps | None:
        """Who steps buffers while the backward runs, if anybody."""
        f = frame()
        found = [h for h in f.handlers if isinstance(h, BackwardSteps)]
        steps = found[-1].begin(keeps, parts) if found and not f.in_loss else None
        if found and not f.in_loss:
            if self.zero == 1:
                raise ValueError(_LATE)
            within = [h for h in f.handlers if isinstance(h, Sharding)]
            if f.micro or len(within) > 1:
                raise ValueError(_AROUND)
        return steps


class _Recorded(Noted):
    """``shard`` while a step is recorded: unit calls are noted, nothing is gathered."""

    def call(self, f: Callable[..., Any], args: Any, keywords: Any) -> Any:
        with inside(self.handler.entered(self, f, args, keywords)):
            return f(*args, **keywords)


_LATE = (
    "step_in_backward at zero=1, which reduces gradients when the backward ends: "
    "zero=2 keeps parameters whole too, and reduces gradients as they appear"
)
_AROUND = (
    "step_in_backward in a shard within accumulate or another shard, which sum its "
    "gradients once more: shard(accumulate(step, n), mesh, axes) over all axes at "
    "once, or with replicate=, sums them before the step"
)
_TWICE = "{} and {} both take in hand how gradients are summed, of one step: keep one"

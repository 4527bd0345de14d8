"""Gradients of single microbatches in a pipeline, for ``observe_gradients``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.outcomes import GradientCall, Leaves, Outcome
from fsfunc.core.reduction_hooks import UNSEEN
from fsfunc.pipelining.microbatches import Microbatch
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import is_sharded


class Placed(Protocol):
    """What of a `runtime.Worker` says where which microbatches run."""

    microbatches: Sequence[Microbatch]
    owners: Sequence[int]
    where: RankGroup


class SampleGradients:
    """Shows observers each microbatch's gradients, as this rank's stages make them.

    Those of packed buffers are shown by the ``shard`` that reduces them. The others are
    kept apart for each microbatch; those of a leaf of several stages are summed first.

    Args:
        observers: ``GradientObserver`` handlers.
        call: the gradient call; ``leaves``: what it differentiates; ``values``: those
            that autograd differentiates.
        worker: the `runtime.Worker` that will run its microbatches.

    Raises:
        LawError: a gradient call without units, which every rank of the pipeline
            computes; microbatches of different numbers of rows; a leaf that stages on
            several ranks use, each of which has a part of its gradient.
    """

    def __init__(
        self,
        observers: Sequence[Any],
        call: GradientCall,
        leaves: Leaves,
        values: Sequence[Tensor],
        worker: Placed,
    ):
        batches, owners = worker.microbatches, worker.owners
        share, stages = batches[0].share, batches[0].cut.stages
        if not stages:
            raise LawError(UNSEEN.format("a pipeline runs another gradient call"))
        if any(batch.share != share for batch in batches):
            raise LawError(UNSEEN.format("microbatches have unlike numbers of rows"))
        self.observers, self.values, self.count = observers, values, len(batches)
        # By stage of this rank, the values that it uses; by value, how many do.
        self.used: dict[int, list[int]] = {s: [] for s in range(len(owners))}
        self.users: list[int] = []
        self.axes: list[tuple[str, ...]] = []
        self.held: dict[tuple[int, int], tuple[int, Tensor | None]] = {}
        paths = tree.paths([call.args[i] for i in call.argnums], is_leaf=is_sharded)
        if tuple(call.argnums) == (0,):  # what the program has as its parameters
            paths = [path.partition("/")[2] for path in paths]
        for i in (*leaves.tensor_positions, *leaves.packed_positions):
            mine = [s.number for s in stages if paths[i] in s.leaves | s.reads]
            if len({owners[s] for s in mine}) > 1:
                why = f"stages on several ranks use {paths[i]!r}"
                raise LawError(UNSEEN.format(why))
            if i in leaves.tensor_positions:
                for s in mine:
                    self.used[s].append(len(self.users))
                self.users.append(len(mine))
                leaf = leaves.leaves[i]
                self.axes.append(leaf.layout.split_axes if is_sharded(leaf) else ())
        flats = [leaves.leaves[i].packed.flat for i in leaves.packed_positions]
        known = [*values, *(space_of(x).on_device(x) for x in flats)]
        for observer in observers:
            observer.begins(call.replace(cotangent=call.cotangent * share))
            observer.lies_along(worker.where.axis, known)

    @contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around what adds the gradients of a stage and microbatch to the values'."""
        sums = [x.grad for x in self.values]
        for x in self.values:
            x.grad = None
        yield
        for k, (x, before) in enumerate(zip(self.values, sums, strict=True)):
            g = x.grad
            if k in self.used[stage]:
                self._show(k, microbatch, g)
            elif g is not None:
                raise RuntimeError(f"stage {stage} reads what its program does not")
            if before is not None:
                x.grad = before if g is None else before.add_(g)

    def _show(self, k: int, microbatch: int, g: Tensor | None) -> None:
        """Shows what a stage adds to a value's gradient, with what others added."""
        due, held = self.held.pop((k, microbatch), (self.users[k], None))
        if held is not None:
            g = held if g is None else held.add_(g)
        if due > 1:
            own = g.clone() if held is None and g is not None else g
            self.held[k, microbatch] = due - 1, own
        elif g is not None:
            for observer in self.observers:
                observer.see(g, self.axes[k])

    def end(self, total: Tensor, weight: Tensor | None) -> None:
        """Counts the samples of a loss with this outcome."""
        for observer in self.observers:
            for _ in range(self.count):
                observer.ends(Outcome(total, weight, (), None))

"""Gradients of single microbatches in a pipeline, for ``observe_gradients``.

A pipeline sums the gradients of all microbatches in ``.grad``. An observer, such as
`optim.adaptive_scale`, is to see each microbatch's own: so `runtime.Worker` puts
`SampleGradients.observing` around each backward, which sets the sums aside and adds
them again after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from fsfunc import tree
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.typed_maps import LawError
from fsfunc.core.outcomes import GradientCall, Leaves, Outcome
from fsfunc.core.reduction_hooks import UNSEEN
from fsfunc.pipelining.microbatches import Microbatch
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.sharded.leaf import is_sharded


class SampleObserver(Protocol):
    """An observer of gradients, as `optim.adaptive_scale` makes it."""

    def begins(self, call: GradientCall) -> None: ...
    def lies_along(self, axes: tuple[str, ...], leaves: Sequence[Tensor]) -> None: ...
    def see(self, gradient: Tensor, axes: tuple[str, ...]) -> None: ...
    def ends(self, outcome: Outcome) -> None: ...


class Placed(Protocol):
    """The fields of a `runtime.Worker` that say where which microbatches run."""

    microbatches: Sequence[Microbatch]
    owners: Sequence[int]
    rank_group: RankGroup


class SampleGradients:
    """Shows observers each microbatch's gradients, as this rank's stages make them.

    Gradients of packed buffers are not shown here, but by the ``shard`` that reduces
    them. If several stages use a leaf, their parts of its gradient are summed before
    they are shown.

    Args:
        observers: what is shown the gradients.
        call: the gradient call.
        leaves: what the call differentiates.
        grad_leaves: those of ``leaves`` that autograd differentiates.
        worker: the `runtime.Worker` that will run the call's microbatches.

    Raises:
        LawError: a gradient call without units, which every rank of the pipeline
            computes; microbatches of different numbers of rows; a leaf that stages on
            several ranks use, each of which has a part of its gradient.
    """

    observers: Sequence[SampleObserver]
    grad_leaves: Sequence[Tensor]

    def __init__(
        self,
        observers: Sequence[SampleObserver],
        call: GradientCall,
        leaves: Leaves,
        grad_leaves: Sequence[Tensor],
        worker: Placed,
    ):
        batches, owners = worker.microbatches, worker.owners
        share, stages = batches[0].share, batches[0].cut.stages
        if not stages:
            raise LawError(UNSEEN.format("a pipeline runs another gradient call"))
        if any(batch.share != share for batch in batches):
            raise LawError(UNSEEN.format("microbatches have unlike numbers of rows"))
        self.observers, self.grad_leaves = observers, grad_leaves
        self.n_samples: int = len(batches)
        # By stage, the indices of the leaves that it uses; by leaf, how many stages do.
        self.used_by_stage: dict[int, list[int]] = {s: [] for s in range(len(owners))}
        self.n_users: list[int] = []
        self.axes: list[tuple[str, ...]] = []
        # By leaf and microbatch: the stages still to come, and the sum so far.
        self.partial_sums: dict[tuple[int, int], tuple[int, Tensor | None]] = {}
        paths = tree.paths([call.args[i] for i in call.argnums], is_leaf=is_sharded)
        if tuple(call.argnums) == (0,):  # what the program has as its parameters
            paths = [path.partition("/")[2] for path in paths]
        for i in (*leaves.tensor_positions, *leaves.packed_positions):
            stages_reading = [
                s.number for s in stages if paths[i] in s.leaves | s.reads
            ]
            if len({owners[s] for s in stages_reading}) > 1:
                reason = f"stages on several ranks use {paths[i]!r}"
                raise LawError(UNSEEN.format(reason))
            if i in leaves.tensor_positions:
                for s in stages_reading:
                    self.used_by_stage[s].append(len(self.n_users))
                self.n_users.append(len(stages_reading))
                leaf = leaves.leaves[i]
                self.axes.append(leaf.layout.split_axes if is_sharded(leaf) else ())
        flats = [leaves.leaves[i].packed.flat for i in leaves.packed_positions]
        known_tensors = [*grad_leaves, *(space_of(x).on_device(x) for x in flats)]
        for observer in observers:
            observer.begins(call.replace(cotangent=call.cotangent * share))
            observer.lies_along(worker.rank_group.axis, known_tensors)

    @contextmanager
    def observing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Surrounds a backward, and shows what it adds to the leaves' ``.grad``.

        Args:
            stage, microbatch: whose backward it is.
        """
        sums = [x.grad for x in self.grad_leaves]
        for x in self.grad_leaves:
            x.grad = None
        yield
        for k, (x, sum_before) in enumerate(zip(self.grad_leaves, sums, strict=True)):
            g = x.grad
            if k in self.used_by_stage[stage]:
                self._show_when_complete(k, microbatch, g)
            elif g is not None:
                raise RuntimeError(f"stage {stage} reads what its program does not")
            # In place, as the backward itself would have added it.
            if sum_before is not None:
                x.grad = sum_before if g is None else sum_before.add_(g)

    def _show_when_complete(self, k: int, microbatch: int, g: Tensor | None) -> None:
        """Shows the gradient of leaf ``k`` once all stages that use it have added."""
        n_left, partial = self.partial_sums.pop(
            (k, microbatch), (self.n_users[k], None)
        )
        if partial is not None:
            g = partial if g is None else partial.add_(g)
        if n_left > 1:
            # A copy, as this tensor may become part of ``.grad``, which is written.
            partial_sum = g.clone() if partial is None and g is not None else g
            self.partial_sums[k, microbatch] = n_left - 1, partial_sum
        elif g is not None:
            for observer in self.observers:
                observer.see(g, self.axes[k])

    def end(self, total: Tensor, weight: Tensor | None) -> None:
        """Tells the observers that the samples of a loss with this outcome are done."""
        for observer in self.observers:
            for _ in range(self.n_samples):
                observer.ends(Outcome(total, weight, (), None))

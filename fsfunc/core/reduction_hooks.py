"""Interfaces of transforms that take part in the reductions of ``shard``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.core.frames import Interpretation
from fsfunc.sharded.leaf import FlatShard, Parts


class GradientSteps(Interpretation):
    """Updates each buffer as soon as its gradient is summed; see ``step_in_backward``.

    ``done``: the buffers that were updated, by identity. ``why_spent``: the error for a
    read of a gradient that was used for that.
    """

    observes = True
    why_spent = ""
    done: dict[int, FlatShard]

    def for_call(
        self, keeps: dict[int, FlatShard], parts: Parts
    ) -> GradientSteps | None:
        """The object for one gradient call; None if it has no buffers to update.

        Args:
            keeps: the buffers whose gradients it sums; ``parts``: parts of their leaves
                that are read outside units.
        """
        raise NotImplementedError

    def takes(self, shard: FlatShard) -> bool:
        """True if a buffer is to be updated, now that its gradients are summed."""
        raise NotImplementedError

    def step(self, shard: FlatShard, grad: Tensor, mean_size: int) -> None:
        """Updates a buffer by its gradient, which may be overwritten.

        Args:
            mean_size: the number of ranks' gradients that it is the sum of.
        """
        raise NotImplementedError


class ReductionFeedback(Interpretation):
    """Sends gradients in place of ``shard``'s reduction; see ``error_feedback``."""

    def check(self, how: Any) -> None:
        """Raises if reductions of this kind lose nothing.

        Args:
            how: the ``Reduction`` of the ``shard`` around it.
        """

    def send(
        self,
        how: Any,
        buffer: Tensor,
        shard: FlatShard,
        where: RankGroup,
        whole: bool,
    ) -> Handle:
        """Starts the reduction of a gradient, in place of ``how.send``."""
        raise NotImplementedError


class GradientObserver(Interpretation):
    """Is shown gradients of this rank, each once, before they are reduced."""

    observes = True

    def see(self, gradient: Tensor, axes: tuple[str, ...]) -> None:
        """Called with the gradient of a packed buffer, or of a leaf.

        Args:
            axes: those over which the leaf is split, and not by ``shard``.
        """
        raise NotImplementedError


UNSEEN = (
    "observe_gradients has no rank's own gradient to show here: {}. Take the gradients "
    "by ff.value_and_grad of a mean, in units, under shard, accumulate and pipeline"
)


class Observed:
    """The gradients of one gradient call, to show to observers when complete."""

    def __init__(self, observers: Sequence[GradientObserver]):
        self.observers = observers
        # By buffer and microbatch: the number of calls still to come, the sum so far.
        self.unseen: dict[Any, tuple[int, Tensor | None]] = {}
        self.shown: set[Any] = set()

    def expect(self, calls: Sequence[Any]) -> None:
        """Adds a unit call, whose gradients will come."""
        for call in calls:
            if call.summed_by_runtime:
                key = id(call.shard), call.micro
                if key in self.shown:
                    raise RuntimeError(f"{call.name}: its gradient was observed before")
                self.unseen[key] = self.unseen.get(key, (0, None))[0] + 1, None

    def joined(self, call: Any, shard: FlatShard) -> None:
        """Removes a call whose gradient comes with that of the call before it."""
        key = id(shard), call.micro
        count, held = self.unseen[key]
        self.unseen[key] = count - 1, held

    def show(self, call: Any, shard: FlatShard, buffer: Tensor) -> None:
        """Adds a gradient, and shows the sum of one microbatch when it is complete."""
        key = id(shard), call.micro
        count, held = self.unseen.pop(key)
        if held is not None:
            buffer = held.add_(buffer)
        if count > 1:
            self.unseen[key] = count - 1, buffer.clone() if held is None else held
            return
        self.shown.add(key)
        for observer in self.observers:
            observer.see(buffer, shard.split_axes)

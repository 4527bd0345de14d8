"""Interfaces of transforms that take part in the reductions of ``shard``.

``shard`` sums the gradients of each packed buffer in the backward pass, as soon as the
last unit call that reads the buffer has given its own. A `GradientObserver` sees each
gradient before, a `ReductionFeedback` sends it, and `GradientSteps` update by the sum.
Optimizers and messages implement these; the interfaces are here, as ``shard`` finds
their objects in the frame alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.core.frames import Interpretation
from fsfunc.sharded.leaf import FlatShard, Parts


class GradientSteps(Interpretation):
    """Updates each buffer as soon as its gradient is summed; see ``step_in_backward``.

    Attributes:
        done: by identity, the buffers that were updated.
        why_consumed: the error for a read of a gradient that an update has used up.
    """

    observes = True
    why_consumed = ""
    done: dict[int, FlatShard]

    def for_call(
        self, summed_buffers: dict[int, FlatShard], parts: Parts
    ) -> GradientSteps | None:
        """Returns the object for one gradient call; None if it has nothing to update.

        Args:
            summed_buffers: by id, the buffers whose gradients the call sums.
            parts: receives parts of their leaves that are read outside units.
        """
        raise NotImplementedError

    def takes(self, shard: FlatShard) -> bool:
        """Returns whether to update a buffer, now that its gradients are summed."""
        raise NotImplementedError

    def step(self, shard: FlatShard, grad: Tensor, mean_size: int) -> None:
        """Updates a buffer by its gradient, which may be overwritten.

        Args:
            mean_size: the number of ranks' gradients that it is the sum of.
        """
        raise NotImplementedError


class ReductionFeedback(Interpretation):
    """Sends gradients in place of ``shard``'s reduction; see ``error_feedback``."""

    def check(self, reduction: Any) -> None:
        """Raises if reductions of this kind lose nothing.

        Args:
            reduction: the ``Reduction`` of the ``shard`` around it.
        """

    def send(
        self,
        reduction: Any,
        buffer: Tensor,
        shard: FlatShard,
        where: RankGroup,
        whole: bool,
    ) -> Handle:
        """Starts the reduction of a gradient, in place of ``reduction.send``.

        Args:
            reduction: the ``Reduction`` of the ``shard`` around it.
            buffer: this rank's gradient of the whole buffer.
            shard: the buffer.
            where: the ranks to sum over.
            whole: whether each rank receives the whole sum, and not its range of it.
        """
        raise NotImplementedError


class GradientObserver(Interpretation):
    """Is shown gradients of this rank, each once, before they are reduced."""

    observes = True

    def see(self, gradient: Tensor, axes: tuple[str, ...]) -> None:
        """Called with the gradient of a packed buffer, or of a leaf.

        Args:
            axes: the axes over which the leaf is split by its layout, not by ``shard``.
        """
        raise NotImplementedError


UNSEEN = (
    "observe_gradients has no rank's own gradient to show here: {}. Take the gradients "
    "by ff.value_and_grad of a mean, in units, under shard, accumulate and pipeline"
)


class BufferCall(Protocol):
    """A buffer that a unit call has gathered: see `gathers.GatheredCall`."""

    name: str
    micro: tuple[tuple[int, int], ...]
    summed_by_runtime: bool

    @property
    def shard(self) -> FlatShard | None: ...


class Observed:
    """The gradients of one gradient call, to show to observers when complete.

    A buffer that several unit calls read has a gradient of each. Observers see their
    sum, once a microbatch.
    """

    def __init__(self, observers: Sequence[GradientObserver]):
        self.observers = observers
        # By buffer and microbatch: the number of calls still to come, the sum so far.
        self.pending: dict[Any, tuple[int, Tensor | None]] = {}
        self.shown: set[Any] = set()

    def expect(self, calls: Sequence[BufferCall]) -> None:
        """Adds the buffers of a unit call, whose gradients will come."""
        for call in calls:
            if call.summed_by_runtime:
                key = id(call.shard), call.micro
                # Its part would be missing in the sum that observers have seen.
                if key in self.shown:
                    raise RuntimeError(f"{call.name}: its gradient was observed before")
                self.pending[key] = self.pending.get(key, (0, None))[0] + 1, None

    def joined(self, call: BufferCall, shard: FlatShard) -> None:
        """Removes a call whose gradient comes with that of the call before it."""
        key = id(shard), call.micro
        count, sum_so_far = self.pending[key]
        self.pending[key] = count - 1, sum_so_far

    def show(self, call: BufferCall, shard: FlatShard, buffer: Tensor) -> None:
        """Adds a gradient, and shows the sum of one microbatch when it is complete."""
        key = id(shard), call.micro
        count, sum_so_far = self.pending.pop(key)
        if sum_so_far is not None:
            buffer = sum_so_far.add_(buffer)
        if count > 1:
            # A copy: the buffer goes on to be reduced, maybe in place.
            first = buffer.clone() if sum_so_far is None else sum_so_far
            self.pending[key] = count - 1, first
            return
        self.shown.add(key)
        for observer in self.observers:
            observer.see(buffer, shard.split_axes)

"""The state of a sharded call on one rank: gathered buffers, and reduced gradients.

A :class:`~fsfunc.sharded.leaf.Sharded` leaf lies in a packed buffer, a
:class:`~fsfunc.sharded.leaf.FlatShard`. A unit call that reads it has a
:class:`GatheredCall` for that buffer. The :class:`ShardRuntime` of the enclosing call
gathers the buffer, and reduces its gradient.

`unit_calls` calls these methods for each unit call, in this order::

    before_forward    gathers its buffers, prefetches those of the next call
    after_forward     notes the call, for the way back
    before_backward   gathers its buffers again, prefetches those of the call before
    after_backward    drops them
    add_gradient      packs the gradients of a buffer, and starts their reduction

``gathers`` has gathered and prefetched buffers, ``sums`` the reduced gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.casts import Casts
from fsfunc.core.execution_context import running
from fsfunc.core.frames import frame
from fsfunc.core.reduction_hooks import (
    GradientObserver,
    GradientSteps,
    ReductionFeedback,
)
from fsfunc.runtime.memory import BufferPool
from fsfunc.sharded.leaf import FlatShard, Parts, is_sharded
from fsfunc.sharded.packing import complete_shards
from fsfunc.transforms.gathers import (
    Calls,
    GatheredCall,
    Gathers,
    Lifetime,
    Micro,
)
from fsfunc.transforms.gradient_sums import GradientSums
from fsfunc.transforms.messages.wire import pack_parts
from fsfunc.transforms.ownership import Ownership
from fsfunc.transforms.shard_options import GroupTable, ShardOptions
from fsfunc.tree.types import Leaf, PyTree


class ShardRuntime:
    """The state of a call of a sharded function, or of a gradient call, on one rank.

    Args:
        groups: the process groups of each buffer.
        options: those of ``shard``.
        pool: memory for gathers and reductions.
        shards: the packed buffers among the arguments.
        ownership: which plain tensors are replicated.
        coordinates: this rank's, on the axes of the mesh.
        first_index: the number of unit calls of the program before this call.
        differentiated: the arguments that a gradient call differentiates.
        summed: by id, the buffers whose gradients are summed here, not by autograd.
        parts: the parts of their leaves that are read outside units.
        observers, feedback, steps: see ``GradientSums``.

    Attributes:
        index_after: ``first_index`` of what follows the gradient call that ran last.
        prefetches: whether a gather ahead of its use saves time.
        call_counts: the number of unit calls so far, by microbatch.
        microbatches_begun: those whose forward pass has begun.
        returned_calls: by microbatch, the unit calls that have returned, in order: the
            backward visits them in reverse.
    """

    groups: GroupTable
    options: ShardOptions
    zero: int
    pool: BufferPool
    coordinates: dict[str, int]
    ownership: Ownership
    first_index: int
    index_after: int

    def __init__(
        self,
        groups: GroupTable,
        options: ShardOptions,
        *,
        pool: BufferPool,
        coordinates: dict[str, int],
        shards: Iterable[FlatShard],
        ownership: Ownership,
        first_index: int = 0,
        differentiated: Sequence[PyTree] = (),
        summed: dict[int, FlatShard] | None = None,
        parts: Parts | None = None,
        observers: Sequence[GradientObserver] = (),
        feedback: ReductionFeedback | None = None,
        steps: GradientSteps | None = None,
    ):
        self.groups, self.options, self.zero = groups, options, options.zero
        self.pool, self.coordinates, self.ownership = pool, coordinates, ownership
        self.differentiated = differentiated
        # A partial result is worth its memory only where a backward will gather again.
        stores_partial = self.zero == 3 and options.reshard_after_forward is not False
        stores_partial = stores_partial and bool(differentiated)
        self.gathers: Gathers = Gathers(groups, shards, options, pool, stores_partial)
        defers = self.gathers.offloads
        self.prefetches: bool = groups.where.size > 1 or defers
        self.first_index = self.index_after = first_index
        self.call_counts: dict[Micro, int] = {}
        self.microbatches_begun: set[Micro] = set()
        self.returned_calls: dict[Micro, list[Calls]] = {}
        self.summed: dict[int, FlatShard] = {} if summed is None else summed
        self.parts: Parts = {} if parts is None else parts
        self.sums: GradientSums = GradientSums(
            groups,
            options,
            pool,
            defers,
            observers=observers,
            feedback=feedback,
            steps=steps,
        )

    def averages(self, x: Tensor) -> bool:
        """Returns whether `Gradients` averages the gradient of ``x`` at the end."""
        return bool(self.differentiated) and self.ownership.is_replicated(x)

    @property
    def sums_all(self) -> bool:
        """Whether all gradients of the call are summed here, in memory of its own."""
        leaves = tree.leaves(self.differentiated, is_leaf=is_sharded)
        sharded = list(filter(is_sharded, leaves))
        if not {x.packed for x in sharded} <= set(self.summed.values()):
            return False
        return not any(isinstance(x, Tensor) for x in filterfalse(is_sharded, leaves))

    def add_to(self, earlier: PyTree | None) -> None:
        """Begins the sums with gradients of earlier microbatches, if all are here.

        Then each gradient is added to them as it comes, and a rank has one copy of its
        gradients instead of two.

        Args:
            earlier: the trees of these gradients, means over the ranks.
        """
        # Not while types are checked: the sum is typed as this rank's part of a mean,
        # and the check refuses to add a unit's derivative, still the rank's own, to it.
        tracer = frame().tracer
        if earlier is None or not self.sums_all or tracer and not tracer.complete:
            return
        arguments = tuple(self.differentiated)
        leaves, treedef = tree.flatten(arguments, is_leaf=is_sharded)
        gradients: list[Leaf] = treedef.flatten_up_to(earlier)  # type: ignore[arg-type]
        groups = complete_shards(gradients)
        sums = {id(leaves[i[0]].packed): shard.flat for i, shard in groups}
        if sums.keys() == self.summed.keys():
            self.sums.add_to(sums)

    @property
    def next_index(self) -> int:
        """The number of unit calls of the program so far."""
        return max(self.call_counts.values(), default=self.first_index)

    def advance(self, micro: Micro) -> None:
        """Moves past a gradient call, when the last of its microbatches is over.

        Each microbatch makes the same unit calls, which the program has once.
        """
        if all(i == n - 1 for i, n in micro):
            self.first_index, self.call_counts = self.index_after, {}

    def begin_forward(self) -> None:
        """Begins a forward pass, and drops what the last one left.

        Raises:
            RuntimeError: the same microbatch runs twice, whose gradients are summed.
        """
        micro = frame().micro
        if self.summed and micro in self.microbatches_begun:
            raise RuntimeError(_TWICE_SUMMED)
        self.microbatches_begun.add(micro)
        self.gathers.drop(self.gathers.live_calls)
        self.gathers.live_calls, self.returned_calls, self.call_counts = [], {}, {}
        # Memory that reductions took is no use here, where activations take the most:
        # with it zero 1 and 2 peaked 6 to 13 % higher. Zero 0, which saves no memory,
        # keeps it: new pages for the next backward cost some page faults.
        if self.zero:
            self.pool.trim(2)
            self.groups.where.link.trim()

    def before_forward(
        self,
        calls: Calls,
        shards: Sequence[FlatShard],
        casts: Casts | None,
        recompute: bool,
    ) -> Calls:
        """Gathers the buffers of a unit call, and prefetches those of the next one.

        Args:
            calls: what to gather; ``shards``: the rank's range of each.
            casts: the dtypes of ``precision``, for the next call.
            recompute: whether a backward runs the call a second time.

        Returns:
            ``calls``; in a recompute those of the first run.
        """
        # Of offloaded parameters a reduction was deferred until now, when the memory of
        # the last unit is free: the device has no room for both.
        if self.sums.deferred:
            self.sums.reduce_deferred()
        if recompute:
            return self._before_recompute(calls, shards)
        previous, self.gathers.live_calls = self.gathers.live_calls, calls
        # The buffers of the last unit are dropped here, not as it returns: this one may
        # share them (`min_bytes`), and the backward begins with those of the last unit.
        droppable = [c for c in previous if c.lifetime is not Lifetime.BACKWARD]
        for call, shard in zip(calls, shards, strict=True):
            if torch.is_grad_enabled() and self.options.retains(call.name, shard):
                call.lifetime = Lifetime.BACKWARD
            # Units that share a buffer gather it once, and reduce it once, in
            # `add_gradient`.
            if shard.is_shared:
                for c in previous:
                    call.adopt_buffer(c)
                call.shares_previous = call.full is not None
            if call.shares_previous:
                continue
            self.gathers.ensure_whole(call, shard, droppable)
        if droppable:
            self.gathers.drop(droppable)
        if self.sums.steps is not None:
            self.sums.note_read(calls, torch.is_grad_enabled())
        micro = calls[0].micro
        index = self.call_counts.get(micro, self.first_index)
        self.call_counts[micro] = index + 1
        # After this unit's own gather, as messages arrive in the order of sending; and
        # before the unit runs, whose computation hides it.
        if self.prefetches:
            self.gathers.prefetch_next(index, shards, casts)
        return calls

    def _before_recompute(self, calls: Calls, shards: Sequence[FlatShard]) -> Calls:
        """Gathers the buffers of a recompute; returns the calls of the first run."""
        all_calls, index = self.find_call(calls[0])
        # The calls of the first run go on: they may have the buffer still, and their
        # own backward will drop it.
        first_run = all_calls[index] if index >= 0 else []
        calls = [
            next((c for c in first_run if c.shard is s), call)
            for call, s in zip(calls, shards, strict=True)
        ]
        for call, shard in zip(calls, shards, strict=True):
            if call.full is None:
                # After an update in place the recompute would run on new parameters.
                call.check_version(shard)
                self.gathers.ensure_whole(call, shard)
        # Unlike in a forward, the buffer of the unit that ran last is not dropped: its
        # own backward is still to come, which drops it.
        live = self.gathers.live_calls
        known = set(map(id, live))
        self.gathers.live_calls = [*live, *(c for c in calls if id(c) not in known)]
        # `_prefetch_back` drops the calls after this one. In a recomputed outer unit
        # some may follow, whose backward is still to come.
        if index == len(all_calls) - 1:
            self._prefetch_back(all_calls, index)
        return calls

    def after_forward(self, calls: Calls) -> None:
        """Notes that a call has returned: the backward visits calls in reverse."""
        # By microbatch, as a pipeline has several in flight.
        self.returned_calls.setdefault(calls[0].micro, []).append(calls)
        if self.sums.observed is not None:
            self.sums.observed.expect(calls)

    # Backward

    def find_call(self, call: GatheredCall) -> tuple[list[Calls], int]:
        """Returns the calls of its forward pass, and its position there, or -1."""
        all_calls = self.returned_calls.get(call.micro, [])
        # From the end, as `_prefetch_back` has taken off the calls after this one.
        index = len(all_calls) - 1
        while index >= 0 and all_calls[index][0].key != call.key:
            index -= 1
        return all_calls, index

    def _prefetch_back(self, all_calls: list[Calls], index: int) -> None:
        """Takes off the calls after position ``index``; prefetches the one before."""
        if index < 0:
            return
        del all_calls[index + 1 :]
        if index > 0 and self.prefetches:
            before = all_calls[index - 1]
            # Not for a unit whose backward reads no parameter, such as a sum.
            if before[0].gathers_again or running().recompute:
                # Not what the forward has kept, by `reshard_after_forward=False`.
                for c in before:
                    if c.full is None and (shard := c.shard) is not None:
                        current = all_calls[index]
                        self.gathers.prefetch(shard, c.dtype, current, backward=True)

    def before_backward(self, calls: Calls, shards: Sequence[FlatShard]) -> None:
        """Gathers the buffers of a call again, as its backward begins."""
        if self.sums.deferred:
            self.sums.reduce_deferred()
        # Some have it already: kept from the forward, or taken from the call after.
        if calls[0].gathers_again:
            for call, shard in zip(calls, shards, strict=True):
                if call.full is None:
                    call.full = self.gathers.gather_again(shard, call)
        self._prefetch_back(*self.find_call(calls[0]))

    def after_backward(self, calls: Calls) -> Calls:
        """Drops the buffers of a call whose backward is over; returns the one before.

        Buffers that it shares with the call before are kept.
        """
        all_calls, index = self.find_call(calls[0])
        before = all_calls[index - 1] if index > 0 else []
        # The backward of the call before comes next, and would gather it once more.
        for call in calls:
            if call.shares_previous:
                for c in before:
                    c.adopt_buffer(call)
        self.gathers.drop(calls, before)
        return before

    def add_gradient(
        self,
        call: GatheredCall,
        shard: FlatShard,
        grads: Sequence[Tensor | None],
        before: Calls,
    ) -> Tensor | None:
        """Packs the gradient of one buffer, and adds it to ``sums``.

        Args:
            grads: the gradients of the views of the buffer.
            before: the unit call before, which may share the buffer.

        Returns:
            None; or, if autograd sums the gradient (not ``call.summed_by_runtime``),
            the packed gradient, which is still to be reduced.
        """
        later, call.later_gradient = call.later_gradient, None
        buffer = self.sums.pack(call, shard, grads, later)
        # Units that share a buffer send one message: the gradient is handed to the call
        # before, whose backward comes later, until the first of them sends the sum.
        if call.shares_previous:
            for c in before:
                if c.shard is shard and c.summed_by_runtime == call.summed_by_runtime:
                    c.later_gradient = buffer
                    if call.summed_by_runtime and self.sums.observed is not None:
                        self.sums.observed.joined(call, shard)
                    return None
        # Kept in parts so far, as in a compiled step nothing is written in place.
        if self.sums.packs_in_graph:
            buffer = pack_parts(buffer, shard, call.dtypes.reduced)
        if not call.summed_by_runtime:
            return buffer
        self.sums.add(call, shard, buffer)
        return None

    def end_backward(self, micro: Micro) -> None:
        """Reduces what is left when the backward pass of the last microbatch is over.

        Args:
            micro: the enclosing microbatches.
        """
        # Before that, sums wait for the gradients of other microbatches.
        if all(i == n - 1 for i, n in micro[self.sums.depth :]):
            self.sums.finish()


_TWICE_SUMMED = (
    "a transform within shard takes the gradient of one call twice, and shard would "
    "sum both for the parameters of units: put it around, as in mine(shard(step))"
)

"""The state of a sharded call on one rank: gathered buffers, and reduced gradients.

A :class:`~fsfunc.sharded.leaf.Sharded` leaf lies in a packed buffer, a
:class:`~fsfunc.sharded.leaf.FlatShard`. A unit call that reads it has a
:class:`GatheredCall` for that buffer. The :class:`ShardRuntime` of the enclosing call
gathers the buffer, and reduces its gradient.

`unit_calls` calls four methods for each unit call: ``take`` before its forward, then
``after_forward``, ``before_backward`` and ``after_backward``, followed by
``gradient_of`` for each buffer. ``gathers`` has gathered and prefetched buffers,
``sums`` the reduced gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor

from fsfunc import tree
from fsfunc.core.casts import Casts
from fsfunc.core.execution_context import running
from fsfunc.core.frames import frame
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
from fsfunc.transforms.messages.wire import as_buffer
from fsfunc.transforms.ownership import Ownership
from fsfunc.transforms.shard_options import GroupTable, ShardOptions


class ShardRuntime:
    """The state of a call of a sharded function, or of a gradient call, on one rank.

    Args:
        groups: the process groups of each buffer.
        options: those of ``shard``.
        pool: memory for gathers and reductions.
        shards: the packed buffers among the arguments.
        ownership: which plain tensors are replicated.
        first: the number of unit calls of the program before this call; ``later``:
            also of the gradient call that ran last.
        differentiated: the arguments that a gradient call differentiates.
        summed: by id, the buffers whose gradients are summed here, not by autograd;
            ``parts`` has the parts of their leaves that are read outside units.
        how_summed: ``observers``, ``feedback``, ``steps``: see ``GradientSums``.
    """

    def __init__(
        self,
        groups: GroupTable,
        options: ShardOptions,
        *,
        pool: BufferPool,
        coordinates: dict[str, int],
        shards: Iterable[FlatShard],
        ownership: Ownership,
        first: int = 0,
        differentiated: Sequence[Any] = (),
        summed: dict[int, FlatShard] | None = None,
        parts: Parts | None = None,
        **how_summed: Any,
    ):
        self.groups, self.options, self.zero = groups, options, options.zero
        self.pool, self.coordinates, self.ownership = pool, coordinates, ownership
        self.differentiated = differentiated
        again = self.zero == 3 and options.reshard_after_forward is not False
        again = again and bool(differentiated)
        self.gathers = Gathers(groups, shards, options, pool, again)
        defers = self.gathers.offloads
        self.looks = groups.where.size > 1 or defers  # whether it prefetches
        self.first = self.later = first
        self.count: dict[Micro, int] = {}  # unit calls so far, by microbatch
        self.passes: set[Any] = set()  # microbatches whose forward pass has begun
        self.calls: dict[Micro, list[Calls]] = {}  # unit calls, as they returned
        self.summed = {} if summed is None else summed
        self.parts: Parts = {} if parts is None else parts
        self.sums = GradientSums(groups, options, pool, defers, **how_summed)

    def averages(self, x: Tensor) -> bool:
        """True if ``gradients`` averages the gradient of ``x`` when this call ends."""
        return bool(self.differentiated) and self.ownership.is_replicated(x)

    @property
    def sums_all(self) -> bool:
        """True if all gradients of the call are summed here, in memory of its own."""
        leaves = tree.leaves(self.differentiated, is_leaf=is_sharded)
        sharded = list(filter(is_sharded, leaves))
        if not {x.packed for x in sharded} <= set(self.summed.values()):
            return False
        return not any(isinstance(x, Tensor) for x in filterfalse(is_sharded, leaves))

    def add_to(self, into: Any) -> None:
        """Begins the sums with gradients of earlier microbatches, if all are here."""
        tracer = frame().tracer
        if into is None or not self.sums_all or tracer and not tracer.complete:
            return
        given = tuple(self.differentiated)
        leaves, treedef = tree.flatten(given, is_leaf=is_sharded)
        found: list[Any] = treedef.flatten_up_to(into)  # type: ignore[arg-type]
        groups = complete_shards(found)
        sums = {id(leaves[at[0]].packed): shard.flat for at, shard in groups}
        if sums.keys() == self.summed.keys():
            self.sums.add_to(sums)

    @property
    def passed(self) -> int:
        """The number of unit calls of the program so far."""
        return max(self.count.values(), default=self.first)

    def go_on(self, micro: Micro) -> None:
        """Counts a gradient call as passed, when the last of its microbatches is."""
        if all(i == n - 1 for i, n in micro):
            self.first, self.count = self.later, {}

    def begin(self) -> None:
        """Begins a forward pass, and drops what the last one left.

        Raises:
            RuntimeError: the same microbatch runs twice, whose gradients are summed.
        """
        micro = frame().micro
        if self.summed and micro in self.passes:
            raise RuntimeError(_AGAIN)
        self.passes.add(micro)
        self.gathers.drop(self.gathers.recent)
        self.gathers.recent, self.calls, self.count = [], {}, {}
        if self.zero:  # to save memory, at the cost of some page faults
            self.pool.trim(2)
            self.groups.where.link.trim()

    def take(
        self,
        calls: Calls,
        shards: Sequence[FlatShard],
        casts: Casts | None,
        recompute: bool,
    ) -> Calls:
        """Gathers the buffers of a unit call, and prefetches those of the next one."""
        if self.sums.waiting:
            self.sums.settle()
        if recompute:
            return self._take_again(calls, shards)
        old, self.gathers.recent = self.gathers.recent, calls
        goes = [c for c in old if c.lifetime is not Lifetime.BACKWARD]
        for call, shard in zip(calls, shards, strict=True):
            if torch.is_grad_enabled() and self.options.holds(call.name, shard):
                call.lifetime = Lifetime.BACKWARD
            if shard.is_shared:
                for c in old:
                    call.take_over(c)
                call.shares_previous = call.full is not None
            if call.shares_previous:
                continue
            self.gathers.bring(call, shard, goes)
        if goes:
            self.gathers.drop(goes)
        if self.sums.steps is not None:
            self.sums.reads(calls, torch.is_grad_enabled())
        micro = calls[0].micro
        at = self.count.get(micro, self.first)
        self.count[micro] = at + 1
        if self.looks:
            self.gathers.send_ahead(at, shards, casts)
        return calls

    def _take_again(self, calls: Calls, shards: Sequence[FlatShard]) -> Calls:
        """Gathers the buffers of a recompute; returns the calls of the first run."""
        every, at = self.find(calls[0])
        first = every[at] if at >= 0 else []
        calls = [
            next((c for c in first if c.shard is s), call)
            for call, s in zip(calls, shards, strict=True)
        ]
        for call, shard in zip(calls, shards, strict=True):
            if call.full is None:
                call.check(shard)
                self.gathers.bring(call, shard)
        # The last unit's buffer stays, for its own backward, which drops it.
        held = self.gathers.recent
        among = set(map(id, held))
        self.gathers.recent = [*held, *(c for c in calls if id(c) not in among)]
        if at == len(every) - 1:  # not one of several in an outer unit
            self._look_back(every, at)
        return calls

    def after_forward(self, calls: Calls) -> None:
        """Notes that a call has returned: the backward visits calls in reverse.

        By microbatch, as a pipeline has several in flight.
        """
        self.calls.setdefault(calls[0].micro, []).append(calls)
        if self.sums.observed is not None:
            self.sums.observed.expect(calls)

    # Backward

    def find(self, call: GatheredCall) -> tuple[list[Calls], int]:
        """The calls of the call's forward pass, and its position there, or -1."""
        every = self.calls.get(call.micro, [])
        at = len(every) - 1
        while at >= 0 and every[at][0].key != call.key:
            at -= 1
        return every, at

    def _look_back(self, every: list[Calls], at: int) -> None:
        """Drops the calls after position ``at``, and prefetches for the one before."""
        if at < 0:
            return
        del every[at + 1 :]
        if at > 0 and self.looks:
            before = every[at - 1]
            if before[0].gathers_again or running().recompute:
                for c in before:
                    if c.full is None and (shard := c.shard) is not None:
                        self.gathers.send_for(shard, c.dtype, every[at], back=True)

    def before_backward(self, calls: Calls, shards: Sequence[FlatShard]) -> None:
        """Gathers the buffers of a call again, as its backward begins."""
        if self.sums.waiting:
            self.sums.settle()
        if calls[0].gathers_again:
            for call, shard in zip(calls, shards, strict=True):
                if call.full is None:
                    call.full = self.gathers.gather_again(shard, call)
        self._look_back(*self.find(calls[0]))

    def after_backward(self, calls: Calls) -> Calls:
        """Drops the buffers of a call whose backward is over; returns the one before.

        Buffers that it shares with the call before are kept.
        """
        every, at = self.find(calls[0])
        before = every[at - 1] if at > 0 else []
        for call in calls:
            if call.shares_previous:
                for c in before:
                    c.take_over(call)
        self.gathers.drop(calls, before)
        return before

    def gradient_of(
        self,
        call: GatheredCall,
        shard: FlatShard,
        grads: Sequence[Tensor | None],
        before: Calls,
    ) -> Tensor | None:
        """Packs the gradient of one buffer, and adds it to ``sums``.

        Where autograd takes it, that is not ``call.summed_here``, returns the packed
        gradient, which is still to be reduced.
        """
        later, call.later_gradient = call.later_gradient, None
        buffer = self.sums.collect(call, shard, grads, later)
        if call.shares_previous:
            for c in before:
                if c.shard is shard and c.summed_here == call.summed_here:
                    c.later_gradient = buffer  # the call before reduces it
                    if call.summed_here and self.sums.observed is not None:
                        self.sums.observed.joined(call, shard)
                    return None
        if self.sums.joins:
            buffer = as_buffer(buffer, shard, call.dtypes.reduced)
        if not call.summed_here:
            return buffer
        self.sums.add(call, shard, buffer)
        return None

    def end_backward(self, micro: Micro) -> None:
        """Reduces what is left when the backward pass of the last microbatch is over.

        Args:
            micro: the enclosing microbatches.
        """
        if all(i == n - 1 for i, n in micro[self.sums.depth :]):
            self.sums.finish()


_AGAIN = (
    "a transform within shard takes the gradient of one call twice, and shard would "
    "sum both for the parameters of units: put it around, as in mine(shard(step))"
)

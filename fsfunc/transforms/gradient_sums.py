"""Gradients of packed buffers in one gradient call: packed, reduced and summed.

The backward of each unit call hands its gradients over (`ShardRuntime.add_gradient`).
Those of one buffer are packed into one tensor, and take this way::

    pack -> add -> (accumulating) -> reducing -> (summing_replicas) -> grads
                   microbatches to   over the    over the copies of    by the id
                   come              axis        this rank's range     of a buffer

With offloaded parameters a gradient first waits in ``deferred`` until the unit's memory
is free; in a pipeline in ``held``, until the stage before has its derivative.
`Gradients.take_sums` puts ``grads`` into the tree of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.attribution import label
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import to_strided
from fsfunc.core.frames import frame
from fsfunc.core.reduction_hooks import (
    GradientObserver,
    GradientSteps,
    Observed,
    ReductionFeedback,
)
from fsfunc.core.tracers import Carried
from fsfunc.runtime import host_copies
from fsfunc.runtime.host_copies import wait_for
from fsfunc.runtime.memory import BufferPool, count_as
from fsfunc.runtime.memory_spaces import OFFLOADED_STORAGES, space_of
from fsfunc.sharded.leaf import FlatShard
from fsfunc.transforms.gathers import Calls, GatheredCall, Packed
from fsfunc.transforms.messages.wire import (
    Reduction,
    divisor_before_sum,
    gradients_by_offset,
)
from fsfunc.transforms.microbatches import warn_narrow
from fsfunc.transforms.shard_options import GroupTable, ShardOptions

Grads = Sequence[Tensor | None]
_Key = tuple[int, tuple[int, ...]]  # a buffer's id, and the numbers of a unit call


class GradientSums:
    """The gradients of packed buffers in one gradient call, on one rank.

    Args:
        groups: the process groups of each buffer.
        options: those of ``shard``; at ``zero=1`` all is reduced in the end.
        pool: memory for reductions.
        defers: whether a reduction waits until the unit's memory is freed, and ends
            before the next unit: with offloaded parameters the device has no room for
            both.
        observers: are shown this rank's gradients before they are reduced.
        feedback: sends gradients with the error of earlier reductions, if any.
        steps: updates a buffer when its gradients are summed, if any.

    For ``accumulate`` loops inside, the microbatches' gradients are summed before they
    are reduced; with ``reduce_each`` each is reduced, and the sum of the parts is
    summed over replicas. One reduction is in flight at a time, and one sum over
    replicas: each runs beside the backward of the next unit. A pipeline has its
    derivatives go first, by `order_reductions`.

    Attributes:
        grads: by the id of a buffer, its summed gradient so far.
        began_as_means: the buffers whose ``grads`` began with means of earlier
            microbatches.
        float16_divisor: the divisor of a float16 gradient before it is sent.
        packs_in_graph: whether a whole step is compiled, so that packing is a part of
            its graph, where nothing is written in place.
        unfinished_calls: with ``steps``, by the id of a buffer, the numbers of the unit
            calls that have read it and whose gradients are still to come.
        depth: the number of loops over microbatches around the gradient call.
        accumulating: gradients that wait for those of other microbatches.
        deferred: those that wait for the unit's memory, see ``defers``.
        held: those whose reduction begins when a derivative has been sent.
        holds: whether reductions are held now.
        most_in_flight: the number of reductions in flight at a time.
        reducing: those whose reduction is in flight; ``summing_replicas``: those whose
            sum over replicas is.
    """

    groups: GroupTable
    pool: BufferPool
    defers: bool
    zero: int
    reduce_each: bool
    reduction: Reduction
    steps: GradientSteps | None
    exact: bool
    depth: int

    def __init__(
        self,
        groups: GroupTable,
        options: ShardOptions,
        pool: BufferPool,
        defers: bool,
        *,
        observers: Sequence[GradientObserver] = (),
        feedback: ReductionFeedback | None = None,
        steps: GradientSteps | None = None,
    ):
        self.groups, self.pool, self.defers = groups, pool, defers
        self.zero, self.reduce_each = options.zero, options.reduce_each
        self.reduction = reduction = options.reduction
        self.send: Callable[..., Handle] = (
            reduction.send if feedback is None else partial(feedback.send, reduction)
        )
        self.steps, self.exact = steps, reduction.exact and feedback is None
        self.observed: Observed | None = Observed(observers) if observers else None
        self.float16_divisor: int = divisor_before_sum(groups.mean_size)
        compiler, self.depth = frame().compiler, len(frame().micro)
        self.packs_in_graph: bool = compiler is not None and compiler.whole
        self.grads: dict[int, Tensor] = {}
        self.began_as_means: frozenset[int] = frozenset()
        self.unfinished_calls: dict[int, set[tuple[int, ...]]] = {}
        self.accumulating: dict[Hashable, _BufferGradient] = {}
        self.deferred: list[_BufferGradient] = []
        self.held: list[_BufferGradient] = []
        self.holds, self.most_in_flight = False, 1.0
        self.reducing: list[_BufferGradient] = []
        self.summing_replicas: list[_BufferGradient] = []

    def add_to(self, earlier_by_buffer: dict[int, Tensor]) -> None:
        """Begins with gradients of earlier microbatches, which grow in place.

        Args:
            earlier_by_buffer: by the id of a buffer, the sum of their means over ranks.
        """
        self.grads, self.began_as_means = (
            dict(earlier_by_buffer),
            frozenset(earlier_by_buffer),
        )

    def note_read(self, calls: Calls, has_graph: bool) -> None:
        """Notes that a unit call reads buffers, so that its gradients will come.

        Args:
            has_graph: whether grad is enabled.
        """
        for call in calls:
            # With a graph, the gradient of a shared buffer comes with that of the call
            # before. A run without one is repeated by `remat`, and its recompute hands
            # over its own.
            if (
                not (has_graph and call.shares_previous)
                and (shard := call.shard) is not None
            ):
                self.unfinished_calls.setdefault(id(shard), set()).add(call.key)

    def pack(
        self,
        call: GatheredCall,
        shard: FlatShard,
        grads: Grads,
        later: Packed | None,
    ) -> Packed:
        """Packs gradients into one buffer, in the dtype of the reduction.

        Args:
            later: the packed gradient of later calls that share the buffer, to which
                these are added; None: they are added to the sum of earlier microbatches
                where it lies, if there is one.

        Returns:
            the buffer; in a graph the parts of it, which `pack_parts` makes one.
        """
        if self.packs_in_graph:
            return gradients_by_offset(call.views, grads, call.dtypes.reduced, later)
        sum_so_far = None
        if later is None and self.accumulating:
            sum_so_far = self._sum_so_far(call, shard)
        later = sum_so_far if later is None else later
        buffer = self._allocate(call, shard) if later is None else later
        count_as("gradients", [buffer, *grads])
        targets, sources, repeated, end = [], [], [], 0
        buffer_offset = buffer.storage_offset()
        for (shape, stride, offset), g in zip(call.views, grads, strict=True):
            if g is None or not g.numel():
                continue
            g = g if g.layout == torch.strided else to_strided(g)
            # A leaf that the unit was given twice: added below, as `_foreach_copy_`
            # would leave one of the two gradients.
            if offset < end:
                if sum_so_far is None:
                    repeated.append((targets[-1], g))
                else:  # the sum of one microbatch, before it is added to the others'
                    sources[-1] = sources[-1].to(buffer.dtype) + g.to(buffer.dtype)
                continue
            # The memory is a pool's: where no gradient is written, it must be zero.
            if offset > end and later is None:
                buffer[end:offset].zero_()
            end = offset + g.numel()
            targets.append(buffer.as_strided(shape, stride, buffer_offset + offset))
            sources.append(g)
        is_stored = bool(sources and OFFLOADED_STORAGES) and space_of(buffer).offloaded
        if targets and later is not None:
            dtype, device = buffer.dtype, _torch.device_of(buffer)
            # In a store the host adds: the copy of the later gradients must be over.
            wait_for(buffer)
            sources = [g if g.dtype == dtype else g.to(dtype) for g in sources]
            sources = [g.to(device) for g in sources] if is_stored else sources
            torch._foreach_add_(targets, sources)
        elif targets and is_stored:  # a reader of the buffer waits for these copies
            space_of(buffer).copy_all(targets, sources, buffer)
        elif targets:
            torch._foreach_copy_(targets, sources)
        if end < len(buffer) and later is None:
            buffer[end:].zero_()
        for target, g in repeated:
            wait_for(buffer)
            target.add_(g.to(_torch.device_of(target), target.dtype))
        return buffer

    def _sum_so_far(self, call: GatheredCall, shard: FlatShard) -> Tensor | None:
        """Returns the sum of other microbatches' gradients, if it can be added to.

        A buffer of their own would be one write and one read more of all gradients.
        """
        # Observers see each microbatch's, and calls that share a buffer hand on theirs;
        # with ``reduce_each`` the sum is one of ranges, offloaded it is not here.
        apart = self.reduce_each or self.defers or self.observed is not None
        if apart or call.shares_previous or not call.summed_by_runtime:
            return None
        before = self.accumulating.get((id(shard), call.key))
        return before.tensor if before and before.dtype == call.dtypes.reduced else None

    def _allocate(self, call: GatheredCall, shard: FlatShard) -> Tensor:
        """Returns uninitialised memory for the gradient of a whole packed buffer."""
        # The reduction before this one ends first: this gradient may have its memory,
        # so that the pool holds one buffer for both.
        while self.reducing and self.most_in_flight == 1:
            self._finish_reduction()
        space, count = shard.space, shard.place.size * shard.place.chunk
        where = self.groups[shard.split_axes].where
        if where is not None and where.size > 1:
            like = space.on_device(shard.flat)
            return self.pool.get(count, call.dtypes.reduced, like)
        # Without a reduction it becomes the gradient itself, and a pool might hand out
        # a larger buffer than that needs.
        return space.new_empty(shard.flat, [count], call.dtypes.reduced)

    def add(self, call: GatheredCall, shard: FlatShard, buffer: Tensor) -> None:
        """Adds the gradient of one call, and reduces the sum when it is complete."""
        if self.observed is not None:
            self.observed.show(call, shard, wait_for(buffer))
        # A count, not the last index: a pipeline may run the backwards of microbatches
        # in any order.
        due = 1
        for _, n in call.micro[self.depth :]:
            due *= n
        key = id(shard), call.key
        gradient = _BufferGradient(
            shard, buffer, buffer.dtype, call.name, key, due, call.dtypes.gradient
        )
        del buffer  # only `gradient` refers to it now, so that its memory can be freed
        # One reduction of the microbatches' sum costs less than one of each; at zero=1
        # even a single one waits until `finish`.
        if not self.reduce_each and (due > 1 or self.zero == 1):
            if self._accumulate(gradient):
                return
            gradient.count = gradient.due = 1
        self._reduce(gradient)

    def _accumulate(self, gradient: _BufferGradient) -> bool:
        """Adds a gradient to that of other microbatches; returns whether more are due.

        Then the sum stays in ``accumulating``. At zero=1 it stays there until `finish`.
        """
        before = self.accumulating.pop(gradient.key, None)
        if before is not None:
            warn_narrow(gradient.tensor, gradient.due)
            space, stored = space_of(before.tensor), before.tensor
            # The sum so far lies where this gradient was computed, or, with offloaded
            # parameters, in their store.
            if _torch.device_of(gradient.tensor) == _torch.device_of(stored):
                if stored is not gradient.tensor:  # else `pack` has added to it
                    wait_for(gradient.tensor).add_(wait_for(stored))
            else:
                # No wait on the host: memory of the store is reused in the order of
                # copies, or by a reader that waits for this one.
                gradient.tensor.add_(space.fetch(stored, waits=False))
            gradient.count += before.count
        if gradient.count >= gradient.due and self.zero != 1:
            return False
        # With offloaded parameters the sum lies in their store between microbatches.
        gradient.tensor = gradient.shard.space.put(gradient.tensor, waits=False)
        self.accumulating[gradient.key] = gradient
        return True

    def _reduce(self, gradient: _BufferGradient, waits: bool = False) -> None:
        """Starts a reduction, and waits for the one before; or defers or holds it.

        Args:
            waits: whether it is not deferred, and waited for too.
        """
        if (self.defers or self.holds) and not waits:
            (self.deferred if self.defers else self.held).append(gradient)
            return
        shard, buffer = gradient.shard, gradient.tensor
        where = self.groups[shard.split_axes].where
        # Half of the mean's divisor before the sum, half after: `divisor_before_sum`.
        if buffer.dtype == torch.float16:
            wait_for(buffer).div_(self.float16_divisor)
        # An inexact reduction, or a feedback, encodes floating dtypes; others are sent
        # as they are.
        if where is not None and where.size > 1:
            encodes = self.exact or self.reduction.encodes(buffer.dtype)
            send = self.send if encodes else Reduction().send
            gradient.handle = send(buffer, shard, where, shard.place.size == 1)
        self.reducing.append(gradient)
        # One reduction runs beside the next unit's backward: a second one would hold
        # another whole buffer.
        del gradient, buffer
        while self.reducing and (waits or len(self.reducing) > self.most_in_flight):
            self._finish_reduction()

    def order_reductions(self, holds: bool, others_wait: bool) -> None:
        """Begins the reductions that were held; says how the next ones are ordered.

        A stage of a pipeline has the sums of all microbatches as its last backward
        begins, so that reductions cost no memory by coming later. With ``reduce_each``
        or offloaded parameters it has not: there each one begins and ends in its turn.

        Args:
            holds: whether those to come are held until the next call of this.
            others_wait: whether other ranks wait for what this one has still to send:
                then no reduction is waited for.
        """
        if self.reduce_each or self.defers:
            return
        self.holds, self.most_in_flight = False, float("inf") if others_wait else 1
        while self.held:
            with label(self.held[0].name, "backward"):
                self._reduce(self.held.pop(0))
        self.holds = holds

    def reduce_deferred(self) -> None:
        """Reduces deferred gradients, one buffer after the other."""
        # Each ends before the next one starts: the device has no room for two.
        while self.deferred:
            with label(self.deferred[0].name, "backward"):
                self._reduce(self.deferred.pop(0), waits=True)
                while self.summing_replicas:
                    self._finish_replica_sum()

    def _finish_reduction(self) -> None:
        """Waits for the reduction that was started first, and decodes its result."""
        gradient = self.reducing.pop(0)
        if gradient.handle is not None:
            sent, arrived = gradient.tensor, gradient.handle.wait()
            # References are dropped here and below, so that what arrived is freed as
            # soon as it is cast.
            gradient.handle = gradient.tensor = None  # type: ignore[assignment]
            flat = gradient.shard.flat
            # In the wider of both dtypes: a sum is rounded once, when it is a mean.
            wide = torch.promote_types(gradient.dtype, flat.dtype)
            encodes = self.exact or self.reduction.encodes(flat.dtype)
            reduction = self.reduction if encodes else Reduction()
            summed = reduction.decode(arrived, wide, flat.numel())
            if arrived is not sent:
                self.pool.spoil(sent)
            del sent, arrived
            gradient.tensor = summed
            del summed
        gradient.is_reduced = True
        # More are due here with `reduce_each` alone: others are reduced as whole sums.
        if gradient.due > 1 and self._accumulate(gradient):
            return
        self._sum_over_replicas(gradient)

    def _sum_over_replicas(self, gradient: _BufferGradient) -> None:
        """Starts the sum over replicas, if any, and waits for the one before."""
        replicas = self.groups[gradient.shard.split_axes].replicas
        if replicas is None or replicas.size == 1:
            self._store_sum(gradient)
            return
        local = space_of(gradient.tensor).fetch(gradient.tensor, waits=False)
        gradient.handle = replicas.start("psum", local, name=gradient.shard.name)
        gradient.tensor = None  # type: ignore[assignment]
        del local
        self.summing_replicas.append(gradient)
        if len(self.summing_replicas) > 1:
            self._finish_replica_sum()

    def _finish_replica_sum(self) -> None:
        gradient = self.summing_replicas.pop(0)
        if gradient.handle is not None:
            gradient.tensor, gradient.handle = gradient.handle.wait(), None
        self._store_sum(gradient)

    def _store_sum(self, gradient: _BufferGradient) -> None:
        """Adds a buffer's summed gradient to ``grads``, or updates the buffer by it.

        What is stored is a mean over the n ranks (of this gradient, which was summed),
        or the sum, which `Gradients.take_sums` divides at the end, all at once:

        ====================================  ===========  =========================
        the gradient                          is stored    because
        ====================================  ===========  =========================
        is added to earlier microbatches'     as the mean  these are means
        has another dtype than its parameter  as the mean  it is rounded once
        is of float16 parameters              as the mean  float16 cannot hold a sum
        is reduced in float16, of others      as the sum   the result's dtype can
        is any other                          as the sum   one division for them all
        ====================================  ===========  =========================

        A gradient in float16 was divided by ``float16_divisor`` before its reduction:
        what is stored as a sum is multiplied by it again.
        """
        shard, grad = gradient.shard, gradient.tensor
        earlier = self.grads.get(id(gradient.shard))
        gradient.tensor = None  # type: ignore[assignment]
        count_as("gradients", [grad])
        param_dtype, space = shard.flat.dtype, shard.space
        mean_size = self.groups.mean_size
        dtype = param_dtype if earlier is None else earlier.dtype
        if gradient.result_dtype not in (None, param_dtype):
            dtype = gradient.result_dtype
        divided_by = self.float16_divisor if gradient.dtype == torch.float16 else 1
        adds_to_means = id(shard) in self.began_as_means
        is_mean = dtype != param_dtype or param_dtype == torch.float16 or adds_to_means
        if is_mean:
            wait_for(grad)
            if dtype != param_dtype:  # divided in at least float32, rounded by `put`
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            if mean_size != divided_by:
                grad = grad.div_(mean_size / divided_by)
        if space.offloaded or grad.dtype != dtype:  # to where its parameters are
            # Python goes on while it is copied. What reads it on the host waits: the
            # code below, steps, or `close`, before the gradient call returns.
            grad = space.put(grad, dtype, waits=False)
            count_as("gradients", [] if space.offloaded else [grad])
        if divided_by > 1 and not is_mean:
            wait_for(grad).mul_(divided_by)
        if earlier is not None:
            wait_for(grad)
            wait_for(earlier)
            # Unit calls of one buffer may ask for gradients of different dtypes: what
            # an earlier one stored as a sum becomes a mean, as this one is.
            if earlier.dtype != dtype:
                is_sum = (
                    earlier.dtype == param_dtype != torch.float16 and not adds_to_means
                )
                earlier = (
                    earlier.div_(mean_size) if is_sum and mean_size > 1 else earlier
                )
                earlier = space.put(earlier, dtype)
            grad = earlier.add_(grad)
        self.grads[id(shard)] = grad
        # `step_in_backward`: the buffer is updated as soon as every unit call that has
        # read it has handed over its gradient.
        if self.steps is not None:
            calls_to_come = self.unfinished_calls.setdefault(id(shard), set())
            calls_to_come.discard(gradient.key[1])
            if not calls_to_come and self.steps.takes(shard):
                del self.grads[id(shard)]
                # It writes parameters too, which copies from the store may still read.
                host_copies.wait_for_copies()
                self.steps.step(shard, grad, 1 if is_mean else mean_size)

    def carried(self) -> Carried:
        """Returns what one microbatch hands on to the next: sums, and their counts."""
        incomplete = [gradient.tensor for gradient in self.accumulating.values()]
        return Carried([*incomplete, *self.grads.values()], self.accumulating)

    def finish(self) -> None:
        """Reduces and waits for all that is left, so that ``grads`` has the sums."""
        # At zero=1, or if some microbatches' backward did not reach a unit: sums that
        # were never reduced. (Those of `reduce_each` were, and come below.)
        unreduced = [k for k, g in self.accumulating.items() if not g.is_reduced]
        for key in unreduced:
            gradient = self.accumulating.pop(key)
            gradient.count = gradient.due = 1
            with label(gradient.name, "backward"):
                gradient.tensor = space_of(gradient.tensor).fetch(
                    gradient.tensor, waits=False
                )
                self._reduce(gradient)
                del gradient  # else its memory would live until the next one's is made
            self.reduce_deferred()
        self.reduce_deferred()
        while self.reducing:
            self._finish_reduction()
        for gradient in self.accumulating.values():
            with label(gradient.name, "backward"):
                self._sum_over_replicas(gradient)
        self.accumulating.clear()
        while self.summing_replicas:
            self._finish_replica_sum()
        if self.observed is not None and self.observed.pending:
            raise RuntimeError("a unit call's gradient never came: nothing to observe")


@dataclass(slots=True, eq=False)
class _BufferGradient:
    """The gradient of one buffer, from accumulation through reduction.

    Args:
        tensor: its values: of the whole buffer until they are reduced, then of this
            rank's range.
        dtype: that of the packed gradient.
        name: that of the unit call; ``key``: the buffer's id and the call's numbers.
        due: the number of microbatches to accumulate; ``count``: those so far.
        result_dtype: the dtype of the result, if not that of the parameters.
        handle: of the reduction, or of the sum over replicas, in flight.
    """

    shard: FlatShard
    tensor: Tensor
    dtype: torch.dtype
    name: str
    key: _Key
    due: int
    result_dtype: torch.dtype | None
    count: int = 1
    is_reduced: bool = False
    handle: Handle | None = None

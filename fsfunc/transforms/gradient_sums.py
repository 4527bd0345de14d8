"""Gradients of packed buffers in one gradient call: packed, reduced and summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from fsfunc.transforms.gathers import Calls, GatheredCall
from fsfunc.transforms.messages.wire import Reduction, by_offset, divided_before
from fsfunc.transforms.microbatches import warn_narrow
from fsfunc.transforms.shard_options import GroupTable, ShardOptions

Grads = Sequence[Tensor | None]


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
    replicas: each runs beside the backward of the next unit.
    """

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
        self.reduction = how = options.reduction
        self.send = how.send if feedback is None else partial(feedback.send, how)
        self.steps, self.exact = steps, how.exact and feedback is None
        self.observed = Observed(observers) if observers else None
        self.before = divided_before(groups.mean_size)
        compiler, self.depth = frame().compiler, len(frame().micro)
        self.joins = compiler is not None and compiler.whole
        self.grads: dict[int, Tensor] = {}  # by the identity of a buffer
        self.earlier: frozenset[int] = frozenset()  # those that began with means
        # By the id of a buffer: the unit calls that have read it, and whose gradients
        # are still to come.
        self.open: dict[int, set[Any]] = {}
        # Gradients that wait for those of other microbatches; that are deferred; whose
        # reduction is in flight; whose sum over replicas is.
        self.partial: dict[Any, _BufferGradient] = {}
        self.waiting: list[_BufferGradient] = []
        self.reducing: list[_BufferGradient] = []
        self.summing: list[_BufferGradient] = []

    def add_to(self, sums: dict[int, Tensor]) -> None:
        """Begins with sums of earlier microbatches' means, which grow in place."""
        self.grads, self.earlier = dict(sums), frozenset(sums)

    def reads(self, calls: Calls, graph: bool) -> None:
        """Notes that a unit call reads buffers; ``graph``: whether grad is enabled."""
        for call in calls:
            if (
                not (graph and call.shares_previous)
                and (shard := call.shard) is not None
            ):
                self.open.setdefault(id(shard), set()).add(call.key)

    def collect(
        self, call: GatheredCall, shard: FlatShard, grads: Grads, later: Any
    ) -> Any:
        """Packs gradients into one buffer, in the dtype of the reduction.

        Args:
            later: what it returned of later calls that share the buffer.

        Returns:
            the buffer; in a graph the parts of it, which `as_buffer` makes one.
        """
        if self.joins:
            return by_offset(call.views, grads, call.dtypes.reduced, later)
        buffer = self._room(call, shard) if later is None else later
        count_as("gradients", [buffer, *grads])
        targets, sources, again, at = [], [], [], 0
        start = buffer.storage_offset()
        for (shape, steps, offset), g in zip(call.views, grads, strict=True):
            if g is None or not g.numel():
                continue
            g = g if g.layout == torch.strided else to_strided(g)
            if offset < at:  # a leaf that the unit was given twice
                again.append((targets[-1], g))
                continue
            if offset > at and later is None:
                buffer[at:offset].zero_()
            at = offset + g.numel()
            targets.append(buffer.as_strided(shape, steps, start + offset))
            sources.append(g)
        stored = bool(sources and OFFLOADED_STORAGES) and space_of(buffer).offloaded
        if targets and later is not None:
            kind, where = buffer.dtype, _torch.device_of(buffer)
            wait_for(buffer)  # where it is stored, the host adds
            sources = [g if g.dtype == kind else g.to(kind) for g in sources]
            sources = [g.to(where) for g in sources] if stored else sources
            torch._foreach_add_(targets, sources)
        elif targets and stored:  # who reads the buffer waits for it
            space_of(buffer).copy_all(targets, sources, buffer)
        elif targets:
            torch._foreach_copy_(targets, sources)
        if at < len(buffer) and later is None:
            buffer[at:].zero_()
        for target, g in again:
            wait_for(buffer)
            target.add_(g.to(_torch.device_of(target), target.dtype))
        return buffer

    def _room(self, call: GatheredCall, shard: FlatShard) -> Tensor:
        """A buffer for the gradient of a whole packed buffer."""
        while self.reducing:  # its buffer may be used for this one
            self._receive()
        home, count = shard.space, shard.place.size * shard.place.chunk
        where = self.groups[shard.split_axes].where
        if where is not None and where.size > 1:
            return self.pool.get(count, call.dtypes.reduced, home.on_device(shard.flat))
        # It becomes the gradient: no larger memory than that.
        return home.new_empty(shard.flat, [count], call.dtypes.reduced)

    def add(self, call: GatheredCall, shard: FlatShard, buffer: Tensor) -> None:
        """Adds the gradient of one call, and reduces the sum when it is complete."""
        if self.observed is not None:
            self.observed.show(call, shard, wait_for(buffer))
        due = 1  # a count: the backwards of microbatches may run in any order
        for _, n in call.micro[self.depth :]:
            due *= n
        key = id(shard), call.key
        one = _BufferGradient(
            shard, buffer, buffer.dtype, call.name, key, due, call.dtypes.gradient
        )
        del buffer
        if not self.reduce_each and (due > 1 or self.zero == 1):
            if self._awaits_others(one):
                return
            one.count = one.due = 1
        self._reduce(one)

    def _awaits_others(self, one: _BufferGradient) -> bool:
        """Adds a gradient to that of other microbatches; True if more are due."""
        before = self.partial.pop(one.key, None)
        if before is not None:
            warn_narrow(one.grad, one.due)
            home, grad = space_of(before.grad), before.grad
            if _torch.device_of(one.grad) == _torch.device_of(grad):
                wait_for(one.grad).add_(wait_for(grad))
            else:  # its memory is used again by a copy, or by who waits for this one
                one.grad.add_(home.fetch(grad, waits=False))
            one.count += before.count
        if one.count >= one.due and self.zero != 1:
            return False
        # Till it is added to the next one's, or fetched.
        one.grad = one.shard.space.put(one.grad, waits=False)
        self.partial[one.key] = one
        return True

    def _reduce(self, one: _BufferGradient, now: bool = False) -> None:
        """Starts a reduction, and waits for the one before; or defers it.

        With ``now``, waits for this one too.
        """
        if self.defers and not now:
            self.waiting.append(one)
            return
        shard, buffer = one.shard, one.grad
        where = self.groups[shard.split_axes].where
        if buffer.dtype == torch.float16:
            wait_for(buffer).div_(self.before)
        if where is not None and where.size > 1:
            encoded = self.exact or self.reduction.encodes(buffer.dtype)
            send = self.send if encoded else Reduction().send
            one.work = send(buffer, shard, where, shard.place.size == 1)
        self.reducing.append(one)
        if now or len(self.reducing) > 1:
            del one, buffer
            self._receive()

    def settle(self) -> None:
        """Reduces deferred gradients, one buffer after the other."""
        while self.waiting:
            with label(self.waiting[0].name, "backward"):
                self._reduce(self.waiting.pop(0), now=True)
                while self.summing:
                    self._keep_first()

    def _receive(self) -> None:
        """Waits for the reduction that was started first, and decodes its result."""
        one = self.reducing.pop(0)
        if one.work is not None:
            sent, arrived = one.grad, one.work.wait()
            one.work = one.grad = None  # frees what arrived as soon as it is cast
            flat = one.shard.flat
            wide = torch.promote_types(one.dtype, flat.dtype)  # till it is a mean
            encoded = self.exact or self.reduction.encodes(flat.dtype)
            how = self.reduction if encoded else Reduction()
            grad = how.decode(arrived, wide, flat.numel())
            if arrived is not sent:
                self.pool.spoil(sent)
            del sent, arrived
            one.grad = grad
            del grad
        one.reduced = True
        if one.due > 1 and self._awaits_others(one):
            return
        self._sum_over_replicas(one)

    def _sum_over_replicas(self, one: _BufferGradient) -> None:
        """Starts the sum over replicas, if any, and waits for the one before."""
        replicas = self.groups[one.shard.split_axes].replicas
        if replicas is None or replicas.size == 1:
            self._keep(one)
            return
        grad = space_of(one.grad).fetch(one.grad, waits=False)
        one.work, one.grad = replicas.start("psum", grad, name=one.shard.name), None
        del grad
        self.summing.append(one)
        if len(self.summing) > 1:
            self._keep_first()

    def _keep_first(self) -> None:
        one = self.summing.pop(0)
        if one.work is not None:
            one.grad, one.work = one.work.wait(), None
        self._keep(one)

    def _keep(self, one: _BufferGradient) -> None:
        """Adds a buffer's summed gradient to ``grads``, or updates the buffer by it.

        What is kept is a mean over the n ranks (of this gradient, which was summed), or
        the sum, which `Gradients.take_sums` divides at the end, all at once:

        ====================================  ===========  =========================
        the gradient                          is kept as   because
        ====================================  ===========  =========================
        is added to earlier microbatches'     the mean     these are means
        has another dtype than its parameter  the mean     it is rounded once
        is of float16 parameters              the mean     float16 cannot hold a sum
        is reduced in float16, of others      the sum      the result's dtype can
        is any other                          the sum      one division for them all
        ====================================  ===========  =========================

        What was reduced in float16 was divided by ``self.before`` when it was sent.
        """
        shard, grad, earlier = one.shard, one.grad, self.grads.get(id(one.shard))
        one.grad = None
        count_as("gradients", [grad])
        own, home, n = shard.flat.dtype, shard.space, self.groups.mean_size
        dtype = own if earlier is None else earlier.dtype
        if one.result not in (None, own):
            dtype = one.result
        divided = self.before if one.dtype == torch.float16 else 1
        continues = id(shard) in self.earlier
        is_mean = dtype != own or own == torch.float16 or continues
        if is_mean:
            wait_for(grad)
            if dtype != own:  # rounded once
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grad = grad.div_(n / divided) if n != divided else grad
        if home.offloaded or grad.dtype != dtype:  # to where its parameters are
            # Read on the host below, by steps, or after the gradient call: `close`
            # waits for it.
            grad = home.put(grad, dtype, waits=False)
            count_as("gradients", [] if home.offloaded else [grad])
        if divided > 1 and not is_mean:
            wait_for(grad).mul_(divided)
        if earlier is not None:
            wait_for(grad)
            wait_for(earlier)
            if earlier.dtype != dtype:  # of calls that asked for another dtype
                is_sum = earlier.dtype == own != torch.float16 and not continues
                earlier = earlier.div_(n) if is_sum and n > 1 else earlier
                earlier = home.put(earlier, dtype)
            grad = earlier.add_(grad)
        self.grads[id(shard)] = grad
        if self.steps is not None:
            calls_to_come = self.open.setdefault(id(shard), set())
            calls_to_come.discard(one.key[1])
            if not calls_to_come and self.steps.takes(shard):
                del self.grads[id(shard)]
                # It writes parameters too, which were fetched.
                host_copies.wait_for_copies()
                self.steps.step(shard, grad, 1 if is_mean else n)

    def carried(self) -> Carried:
        """What is kept from one microbatch to the next; incomplete sums count them."""
        partial = [one.grad for one in self.partial.values()]
        return Carried([*partial, *self.grads.values()], self.partial)

    def finish(self) -> None:
        """Reduces and waits for all that is left: ``grads`` has the sums then."""
        for key in [key for key, one in self.partial.items() if not one.reduced]:
            one = self.partial.pop(key)
            one.count = one.due = 1
            with label(one.name, "backward"):
                one.grad = space_of(one.grad).fetch(one.grad, waits=False)
                self._reduce(one)
                del one
            self.settle()
        self.settle()
        while self.reducing:
            self._receive()
        for one in self.partial.values():
            with label(one.name, "backward"):
                self._sum_over_replicas(one)
        self.partial.clear()
        while self.summing:
            self._keep_first()
        if self.observed is not None and self.observed.unseen:
            raise RuntimeError("a unit call's gradient never came: nothing to observe")


@dataclass(slots=True, eq=False)
class _BufferGradient:
    """The gradient of one buffer, from accumulation through reduction.

    Args:
        dtype: that of the packed gradient; ``name``, ``key``: those of the unit call.
        due: the number of microbatches to accumulate; ``count``: those so far.
        result: the dtype of the result, if not that of the parameters.
    """

    shard: FlatShard
    grad: Any
    dtype: torch.dtype
    name: str
    key: Any
    due: int
    result: torch.dtype | None
    count: int = 1
    reduced: bool = False
    work: Handle | None = None

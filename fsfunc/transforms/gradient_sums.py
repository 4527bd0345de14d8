"""Where the gradients of one sharded call go: collected, reduced, summed, kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.attribution import label
from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import strided
from fsfunc.core.frames import frame
from fsfunc.core.observation import Observation
from fsfunc.optim.backward_steps import BackwardSteps
from fsfunc.runtime.buffer_pool import BufferPool
from fsfunc.runtime.memory_kinds import count_as
from fsfunc.runtime.stores import beside, brought, empty_beside, lies, like_device
from fsfunc.sharded.leaf import FlatShard
from fsfunc.transforms.gathered_calls import Calls, GatheredCall
from fsfunc.transforms.messages.residuals import Feedback
from fsfunc.transforms.messages.wire import Reduction
from fsfunc.transforms.routes import Routes

__all__ = ["GradientSums"]


class GradientSums:
    """The gradients by packed buffers of one gradient call, on one rank.

    Args:
        routes: whom a buffer's ranges go to.
        zero: as ``shard`` was asked: at 1 all is reduced in the end.
        reduction: how buffers travel; ``pool``: memory for that.
        offloads: whether some parameters lie beside the device.
        reduce_each: whether each microbatch of loops within is reduced.
        observers: who is to see this rank's gradients before they are reduced.
        feedback: adds what earlier reductions lost on the way, if anybody.
        steps: who steps a buffer once all of its gradients are summed, if anybody.

    Of ``accumulate`` loops within, the microbatches' gradients are summed before they
    are reduced; with ``reduce_each`` each is reduced over the ranks that cut a buffer,
    and the sum of the parts is summed over replicas. One reduction is in flight at a
    time, and one sum over replicas: each runs beside the backward of the next unit.
    Where parameters lie beside the device, it has no room for that: what is to reduce
    waits until the unit's own memory is gone, and is over before the next one's comes.

    After ``finish``, ``grads`` has the sums over the ranks, by identity of the buffer.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        zero: int,
        reduction: Reduction,
        pool: BufferPool,
        offloads: bool,
        reduce_each: bool = False,
        observers: Sequence[Observation] = (),
        feedback: Feedback | None = None,
        steps: BackwardSteps | None = None,
    ):
        where, self.replicas, _ = routes[()]
        self.routes, self.zero, self.pool = routes, zero, pool
        self.how_reduced, self.offloads = reduction, offloads
        self.size = where.size  # type: ignore[union-attr]
        self.mean_size = self.size * (
            1 if self.replicas is None else self.replicas.size
        )
        self.before = _divided_before(self.mean_size)
        self.depth = len(frame().micro)
        self.reduce_each = reduce_each
        self.observers, self.feedback, self.steps = observers, feedback, steps
        self.open: dict[int, set[Any]] = {}  # unit calls that still read a buffer
        # What observers are still to see: how many calls give it, and the sum so far.
        self.unseen: dict[Any, tuple[int, Tensor | None]] = {}
        self.grads: dict[int, Tensor] = {}
        self.given: dict[int, torch.dtype] = {}  # in which they are, if not their own
        self.due: dict[Any, tuple[FlatShard, Tensor, str, int]] = {}
        self.waiting: list[Reducing] = []
        self.reducing: list[Reducing] = []
        self.partly: dict[Any, tuple[Reducing, Tensor, int]] = {}  # not all are there
        self.summing: list[tuple[Reducing, Handle]] = []  # over replicas

    def reads(self, calls: Calls, graph: bool) -> None:
        """Hears of a unit call that reads buffers, with a graph or not."""
        for call in calls:
            if not (graph and call.shared) and (shard := call.shard) is not None:
                self.open.setdefault(id(shard), set()).add(call.key)

    def expect(self, calls: Calls) -> None:
        """Hears of a unit call whose gradients observers will see."""
        for call in calls:
            if call.keeps and not call.shared:  # else a neighbour gives it
                key = id(call.shard), call.micro
                self.unseen[key] = self.unseen.get(key, (0, None))[0] + 1, None

    def collect(
        self, call: GatheredCall, shard: FlatShard, grads: Sequence[Tensor | None]
    ) -> Tensor:
        """The gradients in one buffer, in the dtype of the reduction."""
        while self.reducing:  # its buffer is what this one may lie in
            self._finish()
        place, dtype = shard.place, call.reduce
        count = place.size * place.chunk
        where = self.routes[shard.split_axes].where
        if where is not None and where.size > 1:
            like = like_device(shard.flat) if self.offloads else shard.flat
            buffer = self.pool.get(count, dtype, like)
        else:  # it becomes the gradient: no larger memory than that
            away = self.offloads and lies(shard.flat) is not None
            buffer = shard.flat.new_empty(0 if away else count, dtype=dtype)
            if away:
                buffer = empty_beside(shard.flat, dtype, scratch=True)
        count_as("gradients", [buffer, *grads])
        targets, sources, again, at = [], [], [], 0
        start = buffer.storage_offset()
        for (shape, steps, offset), g in zip(call.views, grads, strict=True):
            if g is None or not g.numel():
                continue
            g = g if g.layout == torch.strided else strided(g)
            if offset < at:  # a leaf that the unit was given twice
                again.append((targets[-1], g))
                continue
            if offset > at:
                buffer[at:offset].zero_()
            at = offset + g.numel()
            targets.append(buffer.as_strided(shape, steps, start + offset))
            sources.append(g)
        if at < count:
            buffer[at:].zero_()
        if targets:
            torch._foreach_copy_(targets, sources)
        for target, g in again:
            target.add_(g)
        return buffer

    def add(self, call: GatheredCall, shard: FlatShard, buffer: Tensor) -> None:
        """Takes the gradient of one call, which it reduces when all are there."""
        if self.observers:
            self._show(call, shard, buffer)
        if call.given not in (None, shard.flat.dtype):
            self.given[id(shard)] = call.given
        due = 1  # counted, not numbered: microbatches may come back in any order
        for _, n in call.micro[self.depth :]:
            due *= n
        key, count = (id(shard), call.key), 1
        if self.reduce_each and due > 1:
            self._reduce(Reducing(shard, buffer, call.name, key, due))
            return
        if key in self.due:
            _, held, _, before = self.due.pop(key)
            away = self.offloads and lies(shard.flat) is not None
            if away:
                buffer = buffer.add_(held.to(buffer.device))
            else:
                buffer = held.add_(buffer)
            count = before + 1
        if count < due or self.zero == 1:
            if self.offloads and lies(shard.flat) and not lies(buffer):
                buffer = beside(shard.flat, buffer)
            self.due[key] = shard, buffer, call.name, count
        else:
            self._reduce(Reducing(shard, buffer, call.name, key))

    def _show(self, call: GatheredCall, shard: FlatShard, buffer: Tensor) -> None:
        """Has observers see the gradient of one microbatch, once all calls gave it."""
        key = id(shard), call.micro
        count, held = self.unseen.pop(key)
        if held is not None:
            buffer = held.add_(buffer)
        if count > 1:
            self.unseen[key] = count - 1, buffer.clone() if held is None else held
            return
        for observer in self.observers:
            observer.see(buffer, shard.split_axes)

    def _reduce(self, one: Reducing, now: bool = False) -> None:
        """Puts a reduction in flight, and waits for the one before; or has it wait.

        With ``now`` it is waited for itself.
        """
        if self.offloads and not now:
            self.waiting.append(one)
            return
        shard, buffer = one.shard, one.buffer
        where = self.routes[shard.split_axes].where
        if buffer.dtype == torch.float16:
            buffer.div_(self.before)
        if where is not None and where.size > 1:
            how, whole = self.how_reduced, shard.place.size == 1
            if self.feedback is None:
                sent = how.encode(buffer, where.size)
                one.work = how.move(sent, where, whole, shard.name)
            else:
                one.work = self.feedback.move(how, buffer, shard, where, whole)
        self.reducing.append(one)
        if now or len(self.reducing) > 1:
            del one, buffer
            self._finish()

    def settle(self) -> None:
        """Reduces what waits for it, one buffer after the other."""
        while self.waiting:
            with label(self.waiting[0].name, "backward"):
                self._reduce(self.waiting.pop(0), now=True)
                while self.summing:
                    self._keep_first()

    def _finish(self) -> None:
        """Takes in the reduction that was put in flight first."""
        one = self.reducing.pop(0)
        arrived = grad = one.buffer
        if one.work is not None:
            arrived = one.work.wait()
            one.work = None  # or it holds what arrived, while that is cast
            flat = one.shard.flat
            wide = torch.promote_types(one.dtype, flat.dtype)  # till it is a mean
            grad = self.how_reduced.decode(arrived, wide, flat.numel())
        if self.size > 1 and arrived is not one.buffer:
            self.pool.spoil(one.buffer)
        del arrived
        one.buffer, count = None, 1
        if one.key in self.partly:
            _, held, before = self.partly.pop(one.key)
            grad, count = held.add_(grad.to(held.device)), before + 1
        if count < one.due:
            if self.offloads and lies(one.shard.flat) and not lies(grad):
                grad = beside(one.shard.flat, grad)
            self.partly[one.key] = one, grad, count
            return
        if self.replicas is None:
            self._keep(one, grad)
        else:
            self._sum_over_replicas(one, grad)

    def _sum_over_replicas(self, one: Reducing, grad: Tensor) -> None:
        """Puts the sum in flight, where there are any, and waits for the one before."""
        replicas = self.routes[one.shard.split_axes].replicas
        if replicas is None or replicas.size == 1:
            self._keep(one, grad)
            return
        if self.offloads and lies(grad):
            grad = brought(grad)
        self.summing.append((one, replicas.start("psum", grad, what=one.shard.name)))
        del grad
        if len(self.summing) > 1:
            self._keep_first()

    def _keep_first(self) -> None:
        one, work = self.summing.pop(0)
        grad = work.wait()
        del work
        self._keep(one, grad)

    def _keep(self, one: Reducing, grad: Tensor) -> None:
        """Adds a buffer's summed gradient to those that are there."""
        shard = one.shard
        count_as("gradients", [grad])
        own = shard.flat.dtype
        given, by = self.given.get(id(shard), own), self.mean_size
        halved = self.before if one.dtype == torch.float16 else 1
        # A mean at once, where that dtype might not hold the sum.
        if mean := given != own or own == torch.float16:
            if given != own:  # rounded once
                grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
            grad = grad.div_(by / halved) if by != halved else grad
        if self.offloads and lies(shard.flat):  # to where its parameters are
            if not lies(grad) or grad.dtype != given:
                grad = beside(shard.flat, grad.to(given))
        elif grad.dtype != given:
            grad = grad.to(given)
            count_as("gradients", [grad])
        if halved > 1 and not mean:
            grad.mul_(halved)
        before = self.grads.get(id(shard))
        if before is not None:
            if before.dtype != given:  # of calls that asked for another dtype
                summed = before.dtype == own != torch.float16
                before = _cast(before.div_(by) if summed and by > 1 else before, given)
            grad = before.add_(grad)
        self.grads[id(shard)] = grad
        if self.steps is not None:
            still = self.open.setdefault(id(shard), set())
            still.discard(one.key[1])
            if not still and self.steps.takes(shard):
                del self.grads[id(shard)]
                self.steps.step(shard, grad, 1 if mean else by)

    def finish(self) -> None:
        """Waits for all that is due; ``grads`` then has the sums over the ranks."""
        for key, (shard, buffer, name, _) in self.due.items():
            with label(name, "backward"):
                away = self.offloads and self.size > 1 and lies(buffer)
                buffer = brought(buffer) if away else buffer
                one = Reducing(shard, buffer, name, key)
                del buffer
                self._reduce(one)
                del one
            self.settle()
        self.due.clear()
        self.settle()
        while self.reducing:
            self._finish()
        for one, grad, _ in self.partly.values():
            with label(one.name, "backward"):
                self._sum_over_replicas(one, grad)
        self.partly.clear()
        while self.summing:
            self._keep_first()
        if self.unseen:
            raise RuntimeError("a unit call's gradient never came: nothing to observe")


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if lies(x) is None else beside(x, x.to(dtype))


class Reducing:
    """A buffer's gradient on its way to the ranks that keep it.

    Args:
        name, key: of the unit call.
        due: of how many microbatches such are summed before replicas are.
    """

    __slots__ = ("shard", "buffer", "dtype", "name", "key", "due", "work")

    def __init__(
        self, shard: FlatShard, buffer: Tensor, name: str, key: Any, due: int = 1
    ):
        self.shard, self.name, self.key, self.due = shard, name, key, due
        self.buffer: Any = buffer
        self.dtype = buffer.dtype
        self.work: Handle | None = None


def _divided_before(n: int) -> int:
    """By what float16 gradients are divided before ``n`` of them are summed.

    Their sum would overflow where their mean does not, and divided by ``n`` at once
    they would vanish: so half of it comes before, half after. (FairScale's rule.)

    >>> [_divided_before(n) for n in (1, 2, 3, 4, 6, 8)]
    [1, 2, 2, 2, 4, 4]
    """
    before = 1
    while n % before == 0 and n > before * before:
        before *= 2
    return before

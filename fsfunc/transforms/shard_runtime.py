"""A sharded call as it runs on one rank: what is gathered, and where gradients go.

A leaf's way to its gradient: a :class:`~fsfunc.sharded.leaf.Sharded` leaf lies in a
:class:`~fsfunc.sharded.leaf.FlatShard`; a unit call that reads it has a
:class:`GatheredCall` of that buffer; the :class:`ShardRuntime` of the call around
gathers the buffer, and reduces the gradient that comes back.

Of a unit call it hears four times: ``take`` before its function runs,
``after_forward``, ``before_backward``, ``after_backward`` (with ``gradient_of`` each
buffer). Gathers under way are in ``gathering``; ``sums`` has the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.backends.link import Done, Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.core.casts import Casts
from fsfunc.core.frames import frame, running
from fsfunc.runtime.buffer_pool import BufferPool
from fsfunc.runtime.memory_kinds import count_as
from fsfunc.runtime.stores import (
    LIES,
    ahead,
    lies,
    like_device,
)
from fsfunc.sharded.leaf import FlatShard, Parts
from fsfunc.transforms.gathered_calls import Calls, GatheredCall, Micro
from fsfunc.transforms.gradient_sums import GradientSums
from fsfunc.transforms.messages.wire import (
    Gather,
    KeptGather,
    Reduction,
    check_decoded,
)
from fsfunc.transforms.ownership import Ownership
from fsfunc.transforms.routes import Routes

__all__ = ["ShardRuntime"]


class _Near(NamedTuple):
    """A gather that left something to gather from again."""

    shard: FlatShard
    version: int
    wanted: torch.dtype
    first: KeptGather
    count: int  # of what arrived
    like: Tensor  # of its dtype, where it lies

    def shows(self, shard: FlatShard, dtype: torch.dtype) -> bool:
        """Whether it is of what ``shard`` is now, in ``dtype``."""
        return self.version == shard.version and self.wanted == dtype


class ShardRuntime:
    """One gradient call, or one plain call, of a sharded function on one rank.

    Args:
        where: the group over which parameters are cut; ``replicas``: the group over
            which the cut parameters are repeated, if any.
        zero: as ``shard`` was asked; ``holds``: whether backwards find buffers whole.
        gather, reduction: how buffers travel.
        pool: memory for gathers and reductions.
        shards: the buffers that the call was given.
        ownership: whose its plain tensors are.
        first: how many unit calls of the program came before.
        differentiated: the arguments that a gradient call differentiates.
        keeps: by identity, the buffers whose gradients are summed here, in ``sums``;
            ``parts`` has the parts of their leaves that are used beside units.
        how_summed: ``reduce_each``, ``observers``, ``feedback``, ``steps``: see
            ``GradientSums``.
    """

    def __init__(
        self,
        where: RankGroup,
        replicas: RankGroup | None,
        *,
        zero: int,
        holds: bool,
        gather: Gather,
        reduction: Reduction,
        pool: BufferPool,
        coordinates: dict[str, int],
        shards: Iterable[FlatShard],
        ownership: Ownership,
        first: int = 0,
        differentiated: Sequence[Any] = (),
        keeps: dict[int, FlatShard] | None = None,
        parts: Parts | None = None,
        **how_summed: Any,
    ):
        self.where, self.replicas, self.zero, self.holds = where, replicas, zero, holds
        self.how_gathered, self.how_reduced = gather, reduction
        self.rounds = not gather.exact  # what is floating
        self.pool, self.coordinates, self.ownership = pool, coordinates, ownership
        self.differentiated = differentiated
        self.routes = Routes(where, replicas)
        self.size = where.size
        self.mean_axes = (*(() if replicas is None else replicas.axis), *where.axis)
        self.mean_size = self.size * (1 if replicas is None else replicas.size)
        self.named: dict[str, list[FlatShard]] = {}  # several, of trees laid out alike
        for shard in shards:
            self.named.setdefault(shard.buffer, []).append(shard)
        self.copy = 0  # which of them is read
        # Whether some of it lies beside the device; asked of none where nothing does.
        every = [x for alike in self.named.values() for x in alike] if LIES else []
        self.offloads = any(lies(x.flat) for x in every)
        self.first = first
        self.count: dict[Micro, int] = {}  # unit calls so far, by microbatch
        self.gathering: dict[str, tuple[GatheredCall, Handle, Tensor]] = {}
        self.recent: Calls = []
        self.passes: set[Any] = set()  # those that began, by microbatch
        self.calls: dict[Micro, list[Calls]] = {}  # in the order of their outputs
        self.keeps = {} if keeps is None else keeps
        self.parts: Parts = {} if parts is None else parts
        self.sums = GradientSums(
            self.routes,
            zero=zero,
            reduction=reduction,
            pool=pool,
            offloads=self.offloads,
            **how_summed,
        )
        # Where gathers leave something to gather from again: what they were.
        self.near: dict[int, _Near] = {}
        self.regathers = zero == 3 and not holds and bool(differentiated)

    def averages(self, x: Tensor) -> bool:
        """Whether the gradient call will average the gradient of a whole parameter."""
        return bool(self.differentiated) and self.ownership.is_one_value(x)

    @property
    def passed(self) -> int:
        """How many unit calls of the program there were, up to here."""
        return self.first + max(self.count.values(), default=0)

    def goes_on_from(self, inner: ShardRuntime) -> None:
        """A gradient call within has made its unit calls."""
        self.first = inner.passed - max(self.count.values(), default=0)

    def begin(self) -> None:
        """A forward pass starts: what the last one left over is forgotten.

        Raises:
            RuntimeError: one that was there already, whose gradients are summed here.
        """
        micro = frame().micro
        if self.keeps and micro in self.passes:
            raise RuntimeError(_AGAIN)
        self.passes.add(micro)
        self.drop(self.recent)
        self.recent, self.calls, self.count = [], {}, {}
        if self.zero == 3:  # memory before the odd page fault
            self.pool.trim(2)
            self.where.link.trim()

    def close(self) -> None:
        """Takes in what is still in flight, and forgets every buffer."""
        self.drop(self.recent)
        self.recent = []
        for call, work, _ in self.gathering.values():
            work.wait()
            self.drop([call])
        self.gathering.clear()
        self.near.clear()

    # Gathers

    def _whole(self, shard: FlatShard, dtype: torch.dtype) -> Tensor | None:
        """The whole buffer where this rank has it without a gather."""
        if shard.place.size == 1 and shard.flat.dtype == dtype:
            away = self.offloads and lies(shard.flat) is not None
            return None if away else shard.flat.detach()
        if shard.whole is None or not shard.shows(dtype):
            return None
        return shard.whole

    def _bring(self, shard: FlatShard, dtype: torch.dtype) -> Tensor:
        """A rank's range on the device, of one that lies beside it."""
        flat = shard.flat.detach()
        found = self.pool.get(flat.numel(), dtype, like_device(flat))
        count_as("gathered", [found])
        return found.copy_(flat)

    def start(self, shard: FlatShard, dtype: torch.dtype) -> tuple[Tensor, Handle]:
        """Puts a gather in flight, and says where it will arrive."""
        place, how = shard.place, self.how_gathered
        away = self.offloads and lies(shard.flat) is not None
        if place.size == 1:  # cut over no axis: a cast is all that is needed
            source = shard.flat.detach()
            source = self._bring(shard, dtype) if away else source.to(dtype)
            return source, Done(source)
        where = self.routes[shard.split_axes].where
        lossy = self.rounds and shard.flat.is_floating_point()
        near = self.near.get(id(shard)) if self.near else None
        if near is not None and near.shows(shard, dtype):
            full = self.pool.get(near.count, near.like.dtype, near.like)
            count_as("gathered", [full])
            return full, near.first.again(full)
        if self.rounds and not lossy:  # indices and masks have no rounding
            how = _PLAIN
        if away and type(how) is Gather and where is not None:
            return self._gather_in_place(shard, dtype, where)
        flat = self._bring(shard, shard.flat.dtype) if away else shard.flat.detach()
        source = how.encode(flat, dtype)
        del flat
        full = None if lossy else shard.whole
        if full is None or full.dtype != dtype:
            full = self.pool.get(place.size * source.numel(), source.dtype, source)
            count_as("gathered", [full])
        out = full
        if full is shard.whole:
            if _torch.storage_key(full) == _torch.storage_key(shard.flat):
                # The state lies in it, and stays what it is: `.data` has a version of
                # its own. (Any other buffer's tells graphs that it was written.)
                out = full.data
        if where is None or where.size == 1:
            return full, Done(out.copy_(source))
        work = how.move(source, where, out, shard.name)
        if self.regathers and isinstance(work, KeptGather):
            count = place.size * source.numel()
            self.near[id(shard)] = _Near(
                shard, shard.version, dtype, work, count, source.new_empty(0)
            )
        return full, work

    def _gather_in_place(
        self, shard: FlatShard, dtype: torch.dtype, where: RankGroup
    ) -> tuple[Tensor, Handle]:
        """A range beside the device is brought right to where it is to arrive."""
        flat, place = shard.flat.detach(), shard.place
        full = self.pool.get(place.size * flat.numel(), dtype, like_device(flat))
        count_as("gathered", [full])
        source = full.tensor_split(place.size)[where.index].copy_(flat)
        if where.size == 1:
            return full, Done(full)
        return full, _PLAIN.move(source, where, full, shard.name)

    def arrived(self, shard: FlatShard, full: Tensor, dtype: torch.dtype) -> Tensor:
        """What has arrived, as the whole buffer."""
        if self.rounds and shard.place.size > 1 and shard.flat.is_floating_point():
            count, how = shard.place.chunk, self.how_gathered
            full = how.decode(full, dtype, count)
            check_decoded(how, full, count * shard.place.size, dtype)
            count_as("gathered", [full])
        if self.zero in (1, 2):  # the state keeps it, until it changes
            shard.keep(full)
        return full

    def gather(self, shard: FlatShard, dtype: torch.dtype) -> Tensor:
        """What is in flight, or a gather that is waited for."""
        flight = self.gathering.pop(shard.buffer, None)
        if flight is not None:
            call, work, _ = flight
            work.wait()
            if call.full is not None and call.shows(shard, dtype):
                return self.arrived(shard, call.full, dtype)
            self.drop([call])
        full, work = self.start(shard, dtype)
        work.wait()
        return self.arrived(shard, full, dtype)

    def gather_again(self, shard: FlatShard, call: GatheredCall) -> Tensor:
        """The same for a backward, which wants what the forward had."""
        call.check(shard)
        whole = self._whole(shard, call.dtype)
        return self.gather(shard, call.dtype) if whole is None else whole

    def _send_for(self, shard: FlatShard, dtype: torch.dtype, now: Calls) -> None:
        """Puts the gather of a buffer in flight, unless a neighbour ``now`` has it."""
        name = shard.buffer
        if name in self.gathering:
            return
        if self.size == 1:
            ahead(shard.flat)
            return
        if "+" in name and any(c.shows(shard, c.dtype) for c in now):
            return
        if self._whole(shard, dtype) is None:
            call = GatheredCall("", (), (), shard, [], dtype)
            call.full, work = self.start(shard, dtype)
            # What is sent is held to the end, on all ranks alike: no donated step
            # writes into it meanwhile.
            self.gathering[name] = call, work, shard.flat.detach()

    def take(
        self, calls: Calls, shards: Sequence[FlatShard], casts: Casts | None
    ) -> Calls:
        """Brings in what a unit call reads, and sends for what the next one will."""
        if self.offloads:
            self.sums.settle()
        if running().recompute:
            return self._take_again(calls, shards)
        old, self.recent = self.recent, calls
        holds = self.holds and torch.is_grad_enabled()
        for call, shard in zip(calls, shards, strict=True):
            if "+" in shard.buffer:
                for c in old:
                    call.take_over(c)
                call.shared = call.full is not None
            if call.shared:
                continue
            call.full = self._whole(shard, call.dtype)
            call.lasts = call.full is not None
            if call.full is None:
                if not holds:
                    self.drop(old)  # before the new one is waited for
                call.full = self.gather(shard, call.dtype)
                call.lasts = shard.whole is call.full
        if not holds:
            self.drop(old)
        if self.sums.steps is not None:
            self.sums.reads(calls, torch.is_grad_enabled())
        micro = calls[0].micro
        at = self.count.get(micro, 0)
        self.count[micro] = at + 1
        if self.size > 1 or self.offloads:
            self._prefetch(self.first + at, shards, casts)
        return calls

    def _prefetch(
        self, at: int, shards: Sequence[FlatShard], casts: Casts | None
    ) -> None:
        """Sends for what comes after the program's call number ``at``."""
        order = shards[0].members[0].order
        if at + 1 >= len(order) or order[at] != tuple(map(_BUFFER, shards)):
            return
        for shard in shards:
            for i, other in enumerate(self.named.get(shard.buffer, ())):
                self.copy = i if other is shard else self.copy
        for name in order[at + 1]:
            alike = self.named.get(name, ())
            if self.copy < len(alike):
                shard = alike[self.copy]
                self._send_for(shard, _dtype(shard, casts), self.recent)

    def _take_again(self, calls: Calls, shards: Sequence[FlatShard]) -> Calls:
        """The same for a recompute: the calls of the first run, which last."""
        every, at = self.find(calls[0])
        first = every[at] if at >= 0 else []
        calls = [
            next((c for c in first if c.shard is s), call)
            for call, s in zip(calls, shards, strict=True)
        ]
        for call, shard in zip(calls, shards, strict=True):
            if call.full is None:
                call.full = self.gather_again(shard, call)
                away = self.offloads and lies(shard.flat) is not None
                alone = shard.place.size == 1 and not away
                call.lasts = shard.whole is call.full or alone
        # The last unit's buffer is held still, for its own backward; each call's
        # backward drops what the call took.
        held = self.recent
        self.recent = [*held, *(c for c in calls if not _among(c, held))]
        if at == len(every) - 1:  # not one of several in an outer unit
            self._look_back(every, at)
        return calls

    def after_forward(self, calls: Calls) -> None:
        """A call's outputs are out: the backward comes by in the reverse of this.

        Microbatch by microbatch: a pipeline has several under way.
        """
        if not running().recompute:
            self.calls.setdefault(calls[0].micro, []).append(calls)
            if self.sums.observers:
                self.sums.expect(calls)

    def drop(self, calls: Iterable[GatheredCall], but: Calls | None = None) -> None:
        """Forgets gathered buffers; what ``but`` has of them lasts."""
        for call in calls:
            full, call.full = call.full, None
            if full is not None and not call.lasts and self.pool.poison:
                if not any(full is c.full for c in (*self.recent, *(but or ()))):
                    self.pool.spoil(full)

    # Backward

    def find(self, call: GatheredCall) -> tuple[list[Calls], int]:
        """The forward pass that the call was in, and where; -1: in none any more."""
        every = self.calls.get(call.micro, [])
        at = len(every) - 1
        while at >= 0 and every[at][0].key != call.key:
            at -= 1
        return every, at

    def _look_back(self, every: list[Calls], at: int) -> None:
        """The calls after this one are done; the one before it comes next."""
        if at < 0:
            return
        del every[at + 1 :]
        if at > 0 and (self.size > 1 or self.offloads):
            before = every[at - 1]
            if before[0].forgets or running().recompute:
                for c in before:
                    if c.full is None and (shard := c.shard) is not None:
                        if self.offloads:  # no room beside a unit and its gradients
                            ahead(shard.flat)
                        else:
                            self._send_for(shard, c.dtype, every[at])

    def before_backward(self, calls: Calls, shards: Sequence[FlatShard]) -> None:
        """The cotangents of a call's outputs are here: gather again, look back."""
        if self.offloads:
            self.sums.settle()
        if calls[0].forgets:
            for call, shard in zip(calls, shards, strict=True):
                if call.full is None:
                    call.full = self.gather_again(shard, call)
        self._look_back(*self.find(calls[0]))

    def after_backward(self, calls: Calls) -> Calls:
        """A call's gradients are out: its buffers go, but for those of a neighbour.

        Returns the calls before it.
        """
        every, at = self.find(calls[0])
        before = every[at - 1] if at > 0 else []
        for call in calls:
            if call.shared:
                for c in before:
                    c.take_over(call)
        self.drop(calls, before)
        return before

    def gradient_of(
        self,
        call: GatheredCall,
        shard: FlatShard,
        grads: Sequence[Tensor | None],
        before: Calls,
    ) -> Tensor | None:
        """Takes in one buffer's gradient; returns the buffer that is still to reduce.

        That is where the runtime does not keep it, and autograd carries it on.
        """
        buffer = self.sums.collect(call, shard, grads)
        if call.grad is not None:
            buffer.add_(call.grad)
            self.pool.spoil(call.grad)
            call.grad = None
        if call.shared:
            for c in before:
                if c.shard is shard and c.keeps == call.keeps:
                    c.grad = buffer  # the call before reduces it
                    return None
        if not call.keeps:
            return buffer
        self.sums.add(call, shard, buffer)
        return None

    def finish(self) -> None:
        """Waits for all that is due; ``sums.grads`` then has all sums."""
        self.sums.finish()
        self.close()


_AGAIN = (
    "a transform within shard takes the gradient of one call twice, and shard would "
    "sum both for the parameters of units: put it around, as in mine(shard(step))"
)
_BUFFER = attrgetter("buffer")
_PLAIN = Gather()


def _dtype(shard: FlatShard, casts: Casts | None) -> torch.dtype:
    """In which dtype a buffer is gathered, as far as is known before the call."""
    own = shard.flat.dtype
    if casts is None or not own.is_floating_point:
        return own
    return (shard.members[0].compute or own) if casts.overrides else casts.compute


def _among(call: GatheredCall, calls: Calls) -> bool:
    return any(call is c for c in calls)

"""The gathers of one sharded call on one rank: in flight, arrived, held, dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.backends.link import Done, Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.core.casts import Casts
from fsfunc.runtime.buffer_pool import BufferPool
from fsfunc.runtime.memory_kinds import count_as
from fsfunc.runtime.stores import LIES, ahead, lies, like_device
from fsfunc.sharded.leaf import FlatShard
from fsfunc.transforms.gathered_calls import Calls, GatheredCall
from fsfunc.transforms.messages.wire import Gather, KeptGather, check_decoded
from fsfunc.transforms.routes import Routes

__all__ = ["Gathers"]


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


class Gathers:
    """What is gathered for one call, and what was sent for.

    Args:
        routes: whom the ranges of a buffer go to.
        shards: the buffers that the call was given.
        how: how they travel.
        pool: memory for what arrives.
        zero: as ``shard`` was asked.
        again: whether what a gather leaves to gather from again is kept.

    ``recent`` are the unit calls that hold their buffers now: the last one, and those
    that a backward recomputes.
    """

    def __init__(
        self,
        routes: Routes,
        shards: Iterable[FlatShard],
        how: Gather,
        pool: BufferPool,
        zero: int,
        again: bool,
    ):
        self.routes, self.how, self.pool, self.zero = routes, how, pool, zero
        self.again = again
        self.recent: Calls = []
        self.size = routes[()].where.size  # type: ignore[union-attr]
        self.rounds = not how.exact  # what is floating
        self.named: dict[str, list[FlatShard]] = {}  # several, of trees laid out alike
        for shard in shards:
            self.named.setdefault(shard.buffer, []).append(shard)
        self.copy = 0  # which of them is read
        # Whether some of it lies beside the device; asked of none where nothing does.
        every = [x for alike in self.named.values() for x in alike] if LIES else []
        self.offloads = any(lies(x.flat) for x in every)
        self.flights: dict[str, tuple[GatheredCall, Handle, Tensor]] = {}
        # Where gathers leave something to gather from again: what they were.
        self.near: dict[int, _Near] = {}

    def close(self) -> None:
        """Takes in what is still in flight, and forgets every buffer."""
        self.drop(self.recent)
        self.recent = []
        for call, work, _ in self.flights.values():
            work.wait()
            self.drop([call])
        self.flights.clear()
        self.near.clear()

    def drop(self, calls: Iterable[GatheredCall], but: Calls | None = None) -> None:
        """Forgets gathered buffers; what ``but`` has of them lasts."""
        for call in calls:
            full, call.full = call.full, None
            if full is not None and not call.lasts and self.pool.poison:
                if not any(full is c.full for c in (*self.recent, *(but or ()))):
                    self.pool.spoil(full)

    def whole(self, shard: FlatShard, dtype: torch.dtype) -> Tensor | None:
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
        place, how = shard.place, self.how
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
        watched = lossy and not flat.is_inference()
        version = flat._version if watched else 0
        source = how.encode(flat, dtype)
        if watched and flat._version != version:
            raise RuntimeError(
                f"{how}.encode changed the part of {shard.name} that it was given in "
                "place: these are the parameters; work on a copy"
            )
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
        if self.again and isinstance(work, KeptGather):
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
            count, how = shard.place.chunk, self.how
            full = how.decode(full, dtype, count)
            check_decoded(how, full, count * shard.place.size, dtype)
            count_as("gathered", [full])
        if self.zero in (1, 2):  # the state keeps it, until it changes
            shard.keep(full)
        return full

    def gather(self, shard: FlatShard, dtype: torch.dtype) -> Tensor:
        """What is in flight, or a gather that is waited for."""
        flight = self.flights.pop(shard.buffer, None)
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
        whole = self.whole(shard, call.dtype)
        return self.gather(shard, call.dtype) if whole is None else whole

    def send_for(self, shard: FlatShard, dtype: torch.dtype, now: Calls) -> None:
        """Puts the gather of a buffer in flight, unless a neighbour ``now`` has it."""
        name = shard.buffer
        if name in self.flights:
            return
        if self.size == 1:
            ahead(shard.flat)
            return
        if "+" in name and any(c.shows(shard, c.dtype) for c in now):
            return
        if self.whole(shard, dtype) is None:
            call = GatheredCall("", (), (), shard, [], dtype)
            call.full, work = self.start(shard, dtype)
            # What is sent is held to the end, on all ranks alike: no donated step
            # writes into it meanwhile.
            self.flights[name] = call, work, shard.flat.detach()

    def send_ahead(
        self, at: int, shards: Sequence[FlatShard], casts: Casts | None
    ) -> None:
        """Sends for what comes after the program's call ``at``, the last one."""
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
                self.send_for(shard, _dtype(shard, casts), self.recent)


_BUFFER = attrgetter("buffer")
_PLAIN = Gather()


def _dtype(shard: FlatShard, casts: Casts | None) -> torch.dtype:
    """In which dtype a buffer is gathered, as far as is known before the call."""
    own = shard.flat.dtype
    if casts is None or not own.is_floating_point:
        return own
    return (shard.members[0].compute or own) if casts.overrides else casts.compute

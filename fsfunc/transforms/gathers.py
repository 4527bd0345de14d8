"""The gathers of one sharded call on one rank: in flight, arrived, held, dropped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.backends.link import Done, Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.core.casts import Casts
from fsfunc.runtime import host_copies
from fsfunc.runtime.memory import BufferPool, count_as
from fsfunc.runtime.memory_spaces import any_offloaded, space_of
from fsfunc.sharded.layout import View
from fsfunc.sharded.leaf import FlatShard
from fsfunc.transforms.messages.wire import Gather, KeptGather, check_decoded
from fsfunc.transforms.shard_options import GroupTable, ShardOptions

Micro = tuple[tuple[int, int], ...]


class Lifetime(Enum):
    """Who frees the gathered buffer of a unit call, and when."""

    CALL = "the next unit call, as its own buffer takes the memory"
    BACKWARD = "the backward of the call: the buffer is kept from its forward"
    STATE = "nobody: the buffer belongs to the state, and is not reused either"


class BufferDtypes(NamedTuple):
    """The dtypes of a packed buffer on its way through a unit call.

    Args:
        gathered: that of the gathered parameters.
        reduced: that in which the gradient is sent and summed.
        gradient: that of the summed gradient; None: that of the parameters.
    """

    gathered: torch.dtype
    reduced: torch.dtype
    gradient: torch.dtype | None = None


class GatheredCall:
    """The gathered buffer of one unit call, and how its gradient is reduced.

    Autograd nodes reference the runtime, and the runtime references these objects. To
    avoid a reference cycle (which would keep gradients alive until garbage collection)
    they reference no autograd graph: the FlatShard, which may have one, by weakref.

    Args:
        name, key, micro: the unit call's name, numbers and microbatches.
        shard: the buffer; ``views``: where the leaves that the call reads are in it.
        dtypes: those of the gather and of the reduction.
        summed_here: the runtime sums the gradient, and not autograd.

    Attributes:
        full: the gathered buffer, until it is dropped.
        lifetime: who drops it.
        shares_previous: ``full`` is that of the call before, a small unit beside this.
        gathers_again: saved views of ``full`` were dropped: the backward gathers.
        later_gradient: that of later calls that share the buffer, packed.
    """

    full: Tensor | None = None
    lifetime = Lifetime.CALL
    shares_previous = gathers_again = False
    later_gradient: Any = None

    def __init__(
        self,
        name: str,
        key: tuple[int, ...],
        micro: Micro,
        shard: FlatShard,
        views: list[View],
        dtypes: BufferDtypes,
        summed_here: bool = False,
    ):
        self.name, self.key, self.micro, self.views = name, key, micro, views
        self.dtype, self.dtypes, self.summed_here = dtypes[0], dtypes, summed_here
        self._shard, self._version = weakref.ref(shard), shard.version

    @property
    def shard(self) -> FlatShard | None:
        """The buffer, while it is referenced elsewhere."""
        return self._shard()

    def shows(self, shard: FlatShard, dtype: torch.dtype) -> bool:
        """True if ``full`` has the values of ``shard``, in ``dtype``."""
        same = self.full is not None and self._shard() is shard
        return same and self.dtype == dtype and self._version == shard.version

    def take_over(self, other: GatheredCall) -> None:
        """Takes the gathered buffer of ``other``, if it is that of this call too."""
        same = self._shard() is other._shard() and self.dtype == other.dtype
        if self.full is None and same and self._version == other._version:
            self.full, self.lifetime = other.full, other.lifetime

    def check(self, shard: FlatShard) -> None:
        """Raises if the parameters were overwritten since they were gathered."""
        if self._version != shard.version:
            raise RuntimeError(
                f"{shard.members[0].name!r} and its buffer were overwritten since a "
                "unit used them, by a donated step or a load, and the backward of that "
                "unit would gather the new values: take the gradients before the update"
            )

    def parameters(self) -> list[Tensor]:
        """The leaves, as views of the whole buffer."""
        if (full := self.full) is None:
            raise RuntimeError(
                f"unit {self.name!r} reads a buffer that is not gathered"
            )
        start, leaves = full.storage_offset(), []
        for shape, steps, offset in self.views:
            leaves.append(full.as_strided(shape, steps, start + offset))
        return leaves


# One for each buffer that a unit call reads: nearly always one.
Calls = list[GatheredCall]


class _Near(NamedTuple):
    """A gather that kept a partial result, from which to re-gather in backward."""

    shard: FlatShard
    shows: tuple[int, torch.dtype]  # its version, and the dtype of the gather
    first: KeptGather
    count: int  # the elements that arrived
    like: Tensor  # an empty tensor of their dtype and device


class _Coming(Handle):
    """A fetch that was sent ahead, for which the stream waits that reads it."""

    awaited = False

    def __init__(self, full: Tensor, end: Any):
        self.full, self.end = full, end
        self.stream = host_copies.GPU.current_stream(full)

    def wait(self) -> Tensor:
        host_copies.wait_for_ahead(self.full, self.end)
        self.awaited = True
        return self.full

    def __del__(self) -> None:
        if not self.awaited:  # an error came first; its memory may be free next
            host_copies.wait_for_ahead(self.full, self.end, self.stream)

    def done(self) -> bool:
        return self.end.query()


class Gathers:
    """The gathered buffers of a call of a sharded function, and its gathers in flight.

    Args:
        groups: the process groups of each buffer.
        shards: the packed buffers among the arguments.
        options: those of ``shard``.
        pool: memory for what arrives.
        again: whether partial results of a ``KeptGather`` are kept for the backward.

    ``recent`` are the unit calls whose buffers are alive: the last one, and those that
    a backward recomputes.
    """

    def __init__(
        self,
        groups: GroupTable,
        shards: Iterable[FlatShard],
        options: ShardOptions,
        pool: BufferPool,
        again: bool,
    ):
        self.groups, self.zero = groups, options.zero
        # Those that are kept with the state are written again by the next gather.
        self.pool = pool if self.zero == 3 else BufferPool()
        self.how = how = options.gather
        self.again = again
        self.recent: Calls = []
        self.size = groups.where.size
        self.rounds = not how.exact  # whether buffers that it encodes are
        # By the name of the buffer; several, if trees of one layout are arguments.
        self.named: dict[str, list[FlatShard]] = {}
        for shard in shards:
            self.named.setdefault(shard.buffer, []).append(shard)
        self.copy = 0  # the position of the one that is in use
        every = [x for alike in self.named.values() for x in alike]
        self.offloads = any_offloaded() and any(x.space.offloaded for x in every)
        self.flights: dict[str, tuple[GatheredCall, Handle, Tensor]] = {}
        # By the id of a buffer: its gather, if it kept a partial result.
        self.near: dict[int, _Near] = {}

    def close(self) -> None:
        """Waits for gathers in flight and for copies, and drops every buffer."""
        self.drop(self.recent)
        self.recent = []
        for call, work, _ in self.flights.values():
            work.wait()
            self.drop([call])
        self.flights.clear()
        self.near.clear()
        # What follows may write parameters on the host, and read gradients there.
        host_copies.wait_for_copies()

    def drop(self, calls: Iterable[GatheredCall], but: Calls | None = None) -> None:
        """Drops the gathered buffers of ``calls``, except for those of ``but``."""
        for call in calls:
            full, call.full = call.full, None
            if self.pool.poison and call.lifetime is not Lifetime.STATE:
                beside = (*self.recent, *(but or ()))
                if full is not None and not any(full is c.full for c in beside):
                    self.pool.spoil(full)

    def whole(self, shard: FlatShard, dtype: torch.dtype) -> Tensor | None:
        """The whole buffer, if this rank has it without a gather."""
        if shard.place.size == 1 and shard.flat.dtype == dtype:
            if not (self.offloads and shard.space.offloaded):
                return shard.flat.detach()
        return None if shard.whole is None or not shard.shows(dtype) else shard.whole

    def start(
        self, shard: FlatShard, dtype: torch.dtype, ahead: bool = False
    ) -> tuple[Tensor, Handle]:
        """Starts a gather; returns the buffer that it fills, and its handle.

        Args:
            ahead: whether what comes next on the device is not to wait for a fetch.
        """
        if shard.place.size == 1:  # split over no axis: a cast is all that is needed
            if ahead:
                return self._fetched_ahead(shard, dtype)
            source = self._fetched(shard, dtype, full=shard.whole)
            return source, Done(source)
        near = self.near.get(id(shard)) if self.near else None
        if near is not None and near.shows == (shard.version, dtype):
            full = self.pool.get(near.count, near.like.dtype, near.like)
            count_as("gathered", [full], shard.buffer)
            return full, near.first.again(full)
        where: Any = self.groups[shard.split_axes].where
        how, full, source = self.how, shard.whole, None
        if self.rounds and how.encodes(shard.flat.dtype):
            source, full = self._encoded(shard, dtype), None
        elif self.rounds:  # sent as they are
            how = _PLAIN
        if full is None or source is None and full.dtype != dtype:
            like = shard.flat if source is None else source
            # By what is sent: an offloaded range stands for its device by no elements.
            count = where.size * like.numel()
            kind = dtype if source is None else like.dtype
            like = space_of(like).on_device(like) if self.offloads else like
            full = self.pool.get(count, kind, like)
            count_as("gathered", [full], shard.buffer)
        out = full
        if full is shard.whole:
            if _torch.storage_key(full) == _torch.storage_key(shard.flat):
                # The values of the state, which lies in it, do not change; `.data` has
                # a version counter of its own, so no graph takes it for written.
                out = full.data
        if source is None:
            source = self._fetched(shard, dtype, where, out)
        work = how.move(source, where, out, shard.name)
        if self.again and isinstance(work, KeptGather):
            now, like = (shard.version, dtype), source.new_empty(0)
            self.near[id(shard)] = _Near(shard, now, work, full.numel(), like)
        return full, work

    def _fetched(
        self,
        shard: FlatShard,
        dtype: torch.dtype,
        where: RankGroup | None = None,
        full: Tensor | None = None,
    ) -> Tensor:
        """This rank's range on the device; from a store it goes into ``full``."""
        flat = shard.flat.detach()
        if not self.offloads or not (home := shard.space).offloaded:
            return flat if flat.dtype == dtype else flat.to(dtype)
        if full is None or full.dtype != dtype:
            full = self.pool.get(len(flat), dtype, home.on_device(flat))
            count_as("gathered", [full], shard.buffer)
        elif where is not None:
            full = full.tensor_split(where.size)[where.index]
        # It is written next by an update, which waits, or after `close`.
        return home.fetch(flat, dtype, full, waits=False)

    def _fetched_ahead(
        self, shard: FlatShard, dtype: torch.dtype
    ) -> tuple[Tensor, Handle]:
        """The whole buffer on a GPU, whose copy runs beside the unit before."""
        flat, full = shard.flat.detach(), shard.whole
        if full is None or full.dtype != dtype:
            full = self.pool.get(len(flat), dtype, shard.space.on_device(flat))
            count_as("gathered", [full], shard.buffer)
        return full, _Coming(full, host_copies.send_ahead(full, flat))

    def _encoded(self, shard: FlatShard, dtype: torch.dtype) -> Tensor:
        """This rank's range, encoded by the message."""
        flat = self._fetched(shard, shard.flat.dtype)
        version = 0 if flat.is_inference() else flat._version
        source = self.how.encode(flat, dtype)
        if not flat.is_inference() and flat._version != version:
            raise RuntimeError(
                f"{self.how}.encode changed the part of {shard.name} that it was given "
                "in place: these are the parameters; work on a copy"
            )
        return source

    def arrived(self, shard: FlatShard, full: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole buffer, decoded from what has arrived."""
        how = self.how
        if self.rounds and shard.place.size > 1 and how.encodes(shard.flat.dtype):
            count = shard.place.chunk
            full = how.decode(full, dtype, count)
            check_decoded(how, full, count * shard.place.size, dtype)
            count_as("gathered", [full], shard.buffer)
        if self.zero in (1, 2):  # kept with the state, until that changes
            shard.keep(full)
        return full

    def bring(
        self, call: GatheredCall, shard: FlatShard, old: Calls | None = None
    ) -> None:
        """Sets the whole buffer of a call, which is gathered if it is not there.

        Args:
            old: calls whose buffers are dropped before that, and taken off the list.
        """
        call.full, in_state = self.whole(shard, call.dtype), True
        if call.full is None:
            while old:
                self.drop([old.pop()])
            call.full = self.gather(shard, call.dtype)
            in_state = shard.whole is call.full
        if in_state:
            call.lifetime = Lifetime.STATE
        elif call.lifetime is Lifetime.STATE:  # a recompute, after it was written
            call.lifetime = Lifetime.CALL

    def gather(self, shard: FlatShard, dtype: torch.dtype) -> Tensor:
        """The result of the gather in flight, or of a new one."""
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
        """The whole buffer for a backward, with the values that the forward had."""
        call.check(shard)
        whole = self.whole(shard, call.dtype)
        return self.gather(shard, call.dtype) if whole is None else whole

    def send_for(
        self, shard: FlatShard, dtype: torch.dtype, now: Calls, back: bool = False
    ) -> None:
        """Starts the gather of a buffer ahead of its use, unless ``now`` shares it.

        In the backward (``back``) an offloaded buffer is only read ahead: beside a unit
        and its gradients the device has no room for it.
        """
        name = shard.buffer
        if name in self.flights or self.whole(shard, dtype) is not None:
            return
        alone = self.size == 1 and shard.place.size == 1  # it gathers from nobody
        beside = alone and not back and shard.space.comes_beside(shard.flat)
        if not beside and (self.size == 1 or back and self.offloads):
            shard.space.read_ahead(shard.flat)
            return
        if not (shard.is_shared and any(c.shows(shard, c.dtype) for c in now)):
            dtypes = BufferDtypes(dtype, dtype)
            call = GatheredCall("", (), (), shard, [], dtypes)
            call.full, work = self.start(shard, dtype, beside)
            # Its range is kept alive, so that no donated step writes into it meanwhile.
            self.flights[name] = call, work, shard.flat.detach()

    def send_ahead(
        self, at: int, shards: Sequence[FlatShard], casts: Casts | None
    ) -> None:
        """Prefetches the buffers of the unit call after ``at`` in the program."""
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
                dtype = shard.flat.dtype if casts is None else _dtype(shard, casts)
                self.send_for(shard, dtype, self.recent)


_BUFFER = attrgetter("buffer")
_PLAIN = Gather()


def _dtype(shard: FlatShard, casts: Casts) -> torch.dtype:
    """The dtype in which a buffer will be gathered, as far as it is known before."""
    own = shard.flat.dtype
    if not own.is_floating_point:
        return own
    return (shard.members[0].compute or own) if casts.overrides else casts.compute

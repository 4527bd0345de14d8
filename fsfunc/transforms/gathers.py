"""The gathered buffers of one call of a sharded function, on one rank.

A packed buffer is gathered before a unit call that reads it, and dropped when the next
unit takes its own; the backward gathers it again::

    prefetch_next        start_gather       wait, decode        the unit runs   drop
    (the unit before) -> in flight       -> whole buffer     -> reads views  -> freed

`shard_runtime` decides when; `unit_calls` makes a `GatheredCall` for each buffer that a
unit call reads, and passes the views of it to the unit. `Gathers` has those that are in
flight or alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.backends.link import Done, Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.core.casts import Casts
from fsfunc.core.frames import frame
from fsfunc.runtime import host_copies
from fsfunc.runtime.memory import BufferPool, count_as
from fsfunc.runtime.memory_spaces import any_offloaded, space_of
from fsfunc.sharded.layout import View
from fsfunc.sharded.leaf import FlatShard
from fsfunc.transforms.messages.wire import Gather, KeptGather, check_decoded
from fsfunc.transforms.shard_options import GroupTable, ShardOptions

# (index, count) in each enclosing loop over microbatches, outermost first.
Micro = tuple[tuple[int, int], ...]

# The gradients of a buffer's leaves, packed: a tensor, the whole buffer; or, where a
# whole step is compiled, a dict of its parts by offset.
Packed: TypeAlias = Any


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
        name: that of the unit call; ``key``: its number within each enclosing unit.
        micro: (index, count) in each enclosing loop over microbatches.
        shard: the buffer; ``views``: where the leaves that the call reads are in it.
        dtypes: those of the gather and of the reduction.
        summed_by_runtime: whether the runtime sums the gradient, and not autograd.

    Attributes:
        full: the gathered buffer, until it is dropped.
        lifetime: who drops it.
        shares_previous: whether ``full`` is that of the unit call before this one: with
            ``min_bytes`` small neighbouring units share a buffer.
        gathers_again: whether the backward gathers the buffer again, as views of
            ``full`` that autograd saved were replaced by their places.
        later_gradient: the gradient of later calls that share the buffer.
    """

    name: str
    key: tuple[int, ...]
    micro: Micro
    views: list[View]
    dtype: torch.dtype
    dtypes: BufferDtypes

    full: Tensor | None = None
    lifetime: Lifetime = Lifetime.CALL
    shares_previous = gathers_again = False
    later_gradient: Packed | None = None

    def __init__(
        self,
        name: str,
        key: tuple[int, ...],
        micro: Micro,
        shard: FlatShard,
        views: list[View],
        dtypes: BufferDtypes,
        summed_by_runtime: bool = False,
    ):
        self.name, self.key, self.micro, self.views = name, key, micro, views
        self.dtype, self.dtypes = dtypes[0], dtypes
        self.summed_by_runtime = summed_by_runtime
        self._shard, self._version = weakref.ref(shard), shard.version

    @property
    def shard(self) -> FlatShard | None:
        """The buffer, while it is referenced elsewhere."""
        return self._shard()

    def is_of(self, shard: FlatShard, dtype: torch.dtype) -> bool:
        """Returns whether ``full`` has the values of ``shard``, in ``dtype``."""
        same = self.full is not None and self._shard() is shard
        return same and self.dtype == dtype and self._version == shard.version

    def adopt_buffer(self, other: GatheredCall) -> None:
        """Takes the gathered buffer of ``other``, if it is that of this call too."""
        same = self._shard() is other._shard() and self.dtype == other.dtype
        if self.full is None and same and self._version == other._version:
            self.full, self.lifetime = other.full, other.lifetime

    def check_version(self, shard: FlatShard) -> None:
        """Raises if the parameters were overwritten since they were gathered."""
        if self._version != shard.version:
            raise RuntimeError(
                f"{shard.members[0].name!r} and its buffer were overwritten since a "
                "unit used them, by a donated step or a load, and the backward of that "
                "unit would gather the new values: take the gradients before the update"
            )

    def parameter_views(self) -> list[Tensor]:
        """Returns the leaves that the call reads, as views of the whole buffer."""
        if (full := self.full) is None:
            raise RuntimeError(
                f"unit {self.name!r} reads a buffer that is not gathered"
            )
        buffer_offset, leaves = full.storage_offset(), []
        for shape, stride, offset in self.views:
            leaves.append(full.as_strided(shape, stride, buffer_offset + offset))
        return leaves


# One for each buffer that a unit call reads: nearly always one.
Calls = list[GatheredCall]


class _PartialGather(NamedTuple):
    """A gather whose partial result is stored, for the backward to start from.

    Args:
        shard: the buffer, which keeps its id from reuse while the entry lives.
        version: of the parameters that were gathered, with the dtype of the gather.
        handle: starts the same gather again.
        count: the number of elements that arrived.
        like: an empty tensor of their dtype and device.
    """

    shard: FlatShard
    version: tuple[int, torch.dtype]
    handle: KeptGather
    count: int
    like: Tensor


class _FetchAhead(Handle):
    """A copy from a store to a GPU that runs beside what the GPU computes.

    Args:
        full: the buffer that it fills.
        end: what `host_copies.send_ahead` returned for it.
    """

    awaited = False

    def __init__(self, full: Tensor, end: Any):
        self.full, self.end = full, end
        self.stream = host_copies.GPU.current_stream(full)

    def wait(self) -> Tensor:
        # Only the stream that reads the buffer waits; Python goes on.
        host_copies.wait_for_ahead(self.full, self.end)
        self.awaited = True
        return self.full

    def __del__(self) -> None:
        # An error came before `wait`. Without waiting the allocator could hand out the
        # memory while the copy still writes to it.
        if not self.awaited:
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
        stores_partial: whether the partial result of a ``KeptGather`` is stored, for
            the backward to gather from.

    Attributes:
        message: the ``Gather`` that encodes, sends and decodes.
        is_inexact: whether ``message`` changes what it sends, of dtypes it encodes.
        live_calls: the unit calls whose buffers are alive: the last one, and those
            that a backward recomputes.
        by_name: the buffers by their names; several have one name where trees of one
            layout are arguments, such as the parameters and a copy of them.
        tree_index: the position, in ``by_name``, of the tree that was read last.
        in_flight: by the buffer's name, a gather that was sent ahead: what it gathers,
            its handle, and the rank's range.
        partial_gathers: by the id of a buffer, its gather with a partial result.
        left_out: the buffers of unit calls that a plan does not run.
        offloads: whether some buffer lies in a store beside the device.
    """

    groups: GroupTable
    zero: int
    message: Gather

    def __init__(
        self,
        groups: GroupTable,
        shards: Iterable[FlatShard],
        options: ShardOptions,
        pool: BufferPool,
        stores_partial: bool,
    ):
        self.groups, self.zero = groups, options.zero
        # A buffer that stays with the state (zero 1 and 2) is written in place by the
        # next gather, while another process of the host may still read what this one
        # sent from the pool: it lies in memory of its own.
        self.pool: BufferPool = pool if self.zero == 3 else BufferPool()
        self.message = message = options.gather
        self.stores_partial = stores_partial
        self.live_calls: Calls = []
        self.axis_size: int = groups.where.size
        self.is_inexact: bool = not message.exact
        self.by_name: dict[str, list[FlatShard]] = {}
        for shard in shards:
            self.by_name.setdefault(shard.buffer, []).append(shard)
        self.tree_index: int = 0
        buffers = [x for same_name in self.by_name.values() for x in same_name]
        tracer = frame().tracer
        self.left_out: Set[str] = set() if tracer is None else tracer.left_out
        self.offloads: bool = any_offloaded() and any(
            x.space.offloaded for x in buffers
        )
        self.in_flight: dict[str, tuple[GatheredCall, Handle, Tensor]] = {}
        self.partial_gathers: dict[int, _PartialGather] = {}

    def close(self) -> None:
        """Waits for gathers in flight and for copies, and drops every buffer."""
        self.drop(self.live_calls)
        self.live_calls = []
        # Also gathers that no unit has read: until they end they write their memory.
        for call, handle, _ in self.in_flight.values():
            handle.wait()
            self.drop([call])
        self.in_flight.clear()
        self.partial_gathers.clear()
        # What follows may write parameters on the host, and read gradients there.
        host_copies.wait_for_copies()

    def drop(self, calls: Iterable[GatheredCall], sharing: Calls | None = None) -> None:
        """Drops the gathered buffers of ``calls``.

        Args:
            sharing: calls that may still use one of them.
        """
        for call in calls:
            full, call.full = call.full, None
            # With the tests' poison a read of a dropped buffer yields NaN. One that
            # neighbouring units share lives on while any of their calls has it.
            if self.pool.poison and call.lifetime is not Lifetime.STATE:
                users = (*self.live_calls, *(sharing or ()))
                if full is not None and not any(full is c.full for c in users):
                    self.pool.spoil(full)

    def local_whole(self, shard: FlatShard, dtype: torch.dtype) -> Tensor | None:
        """Returns the whole buffer if this rank has it without a gather."""
        # Split over no axis, the range is the whole; in a store, or of another dtype,
        # it must be copied, which `start_gather` does.
        if shard.place.size == 1 and shard.flat.dtype == dtype:
            if not (self.offloads and shard.space.offloaded):
                return shard.flat.detach()
        return (
            None if shard.whole is None or not shard.is_cached(dtype) else shard.whole
        )

    def start_gather(
        self, shard: FlatShard, dtype: torch.dtype, ahead: bool = False
    ) -> tuple[Tensor, Handle]:
        """Starts a gather; returns the buffer that it fills, and its handle.

        Args:
            ahead: whether a copy from a store runs beside what the device computes
                next, which does not wait for it.
        """
        if shard.place.size == 1:  # split over no axis: a cast is all that is needed
            if ahead:
                return self._fetch_ahead(shard, dtype)
            source = self._fetch_range(shard, dtype, full=shard.whole)
            return source, Done(source)
        # A hierarchical gather stored what came from other nodes: the backward repeats
        # the part within the node alone, unless the parameters have changed since.
        partial = self.partial_gathers.get(id(shard)) if self.partial_gathers else None
        if partial is not None and partial.version == (shard.version, dtype):
            full = self.pool.get(partial.count, partial.like.dtype, partial.like)
            count_as("gathered", [full], shard.buffer)
            return full, partial.handle.again(full)
        where: Any = self.groups[shard.split_axes].where
        message, full, source = self.message, shard.whole, None
        if self.is_inexact and message.encodes(shard.flat.dtype):
            # What arrives is encoded: it does not go into the state's whole buffer.
            source, full = self._encode_range(shard, dtype), None
        elif self.is_inexact:  # integers and complex numbers are sent as they are
            message = _PLAIN
        # The state has no whole buffer to gather into, or none of this dtype.
        if full is None or source is None and full.dtype != dtype:
            like = shard.flat if source is None else source
            # The count is of what is sent, as `on_device` returns an empty tensor in
            # place of an offloaded range.
            count = where.size * like.numel()
            sent_dtype = dtype if source is None else like.dtype
            like = space_of(like).on_device(like) if self.offloads else like
            full = self.pool.get(count, sent_dtype, like)
            count_as("gathered", [full], shard.buffer)
        out = full
        if full is shard.whole:
            if _torch.storage_key(full) == _torch.storage_key(shard.flat):
                # The gather writes the other ranks' ranges around the state, which
                # lies in the same storage and does not change. `.data` has a version
                # counter of its own, so no graph takes the state for overwritten.
                out = full.data
        if source is None:
            source = self._fetch_range(shard, dtype, where, out)
        handle = message.move(source, where, out, shard.name)
        # It has what came from other nodes: the backward sends within the node alone.
        if self.stores_partial and isinstance(handle, KeptGather):
            version, like = (shard.version, dtype), source.new_empty(0)
            entry = _PartialGather(shard, version, handle, full.numel(), like)
            self.partial_gathers[id(shard)] = entry
        return full, handle

    def _fetch_range(
        self,
        shard: FlatShard,
        dtype: torch.dtype,
        where: RankGroup | None = None,
        full: Tensor | None = None,
    ) -> Tensor:
        """Returns this rank's range on the device, in ``dtype``.

        Args:
            where: the ranks of the gather, if there is one.
            full: the whole buffer: a copy from a store goes into this rank's part of it
                (to all of it without ``where``), so that the gather is in place.
        """
        flat = shard.flat.detach()
        if not self.offloads or not (home := shard.space).offloaded:
            return flat if flat.dtype == dtype else flat.to(dtype)
        # A whole buffer of another dtype (parameters are cast) cannot take the copy.
        if full is None or full.dtype != dtype:
            full = self.pool.get(len(flat), dtype, home.on_device(flat))
            count_as("gathered", [full], shard.buffer)
        elif where is not None:
            full = full.tensor_split(where.size)[where.index]
        # Python does not wait: the store is written next by an update, which waits for
        # its copies, or after `close`, which waits for all.
        return home.fetch(flat, dtype, full, waits=False)

    def _fetch_ahead(
        self, shard: FlatShard, dtype: torch.dtype
    ) -> tuple[Tensor, Handle]:
        """Starts a copy from a store to a GPU, which runs beside the unit before."""
        flat, full = shard.flat.detach(), shard.whole
        # The state's whole buffer (zero 1 and 2) takes the copy, if it has the dtype.
        if full is None or full.dtype != dtype:
            full = self.pool.get(len(flat), dtype, shard.space.on_device(flat))
            count_as("gathered", [full], shard.buffer)
        return full, _FetchAhead(full, host_copies.send_ahead(full, flat))

    def _encode_range(self, shard: FlatShard, dtype: torch.dtype) -> Tensor:
        """Returns this rank's range, encoded by the message."""
        flat = self._fetch_range(shard, shard.flat.dtype)
        # An `encode` of the user's might write in place: that would change parameters.
        version = 0 if flat.is_inference() else flat._version
        source = self.message.encode(flat, dtype)
        if not flat.is_inference() and flat._version != version:
            raise RuntimeError(
                f"{self.message}.encode changed the part of {shard.name} that it was "
                "given in place: these are the parameters; work on a copy"
            )
        return source

    def decode(self, shard: FlatShard, full: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the whole buffer, decoded from ``full``, which has arrived."""
        message = self.message
        # What one rank has whole was not encoded, nor were integers or complex numbers.
        if (
            self.is_inexact
            and shard.place.size > 1
            and message.encodes(shard.flat.dtype)
        ):
            count = shard.place.chunk
            full = message.decode(full, dtype, count)
            check_decoded(message, full, count * shard.place.size, dtype)
            count_as("gathered", [full], shard.buffer)
        # Parameters are whole at zero 1 and 2: the gathered buffer stays with the state
        # until the rank's range is written.
        if self.zero in (1, 2):
            shard.cache_gathered(full)
        return full

    def ensure_whole(
        self, call: GatheredCall, shard: FlatShard, droppable: Calls | None = None
    ) -> None:
        """Sets the whole buffer of a call, which is gathered if it is not there.

        Args:
            droppable: calls whose buffers are dropped before a gather, which then finds
                their memory free, and which are taken off the list.
        """
        call.full, in_state = self.local_whole(shard, call.dtype), True
        if call.full is None:
            while droppable:
                self.drop([droppable.pop()])
            call.full = self.gather(shard, call.dtype)
            # At zero 1 and 2 `decode` has given it to the state, if its dtype allows.
            in_state = shard.whole is call.full
        if in_state:
            call.lifetime = Lifetime.STATE
        elif call.lifetime is Lifetime.STATE:
            # A recompute after the state was written: what it gathers belongs to the
            # call alone.
            call.lifetime = Lifetime.CALL

    def gather(self, shard: FlatShard, dtype: torch.dtype) -> Tensor:
        """Returns the whole buffer, from the gather in flight or from a new one."""
        prefetched = self.in_flight.pop(shard.buffer, None)
        if prefetched is not None:
            call, handle, _ = prefetched
            handle.wait()
            if call.full is not None and call.is_of(shard, dtype):
                return self.decode(shard, call.full, dtype)
            # `prefetch_next` guessed wrong: this is another tree's buffer of the name,
            # or in another dtype, or has older values.
            self.drop([call])
        full, handle = self.start_gather(shard, dtype)
        handle.wait()
        return self.decode(shard, full, dtype)

    def gather_again(self, shard: FlatShard, call: GatheredCall) -> Tensor:
        """Returns the whole buffer for a backward, with the forward's values."""
        call.check_version(shard)
        whole = self.local_whole(shard, call.dtype)
        return self.gather(shard, call.dtype) if whole is None else whole

    def prefetch(
        self, shard: FlatShard, dtype: torch.dtype, calls: Calls, backward: bool = False
    ) -> None:
        """Starts the gather of a buffer ahead of its use.

        Args:
            calls: the unit calls that run meanwhile: a buffer that one of them has is
                not gathered.
            backward: whether it is the backward that will use it.
        """
        name = shard.buffer
        if name in self.in_flight or self.local_whole(shard, dtype) is not None:
            return
        # One rank gathers from nobody. A copy from its host may run beside what the GPU
        # computes; but in the backward the device has no room for an offloaded buffer
        # beside those of a unit and its gradients. There a mapped file is read ahead
        # into the host's memory.
        alone = self.axis_size == 1 and shard.place.size == 1
        overlaps = alone and not backward and shard.space.comes_beside(shard.flat)
        if not overlaps and (self.axis_size == 1 or backward and self.offloads):
            shard.space.read_ahead(shard.flat)
            return
        # The next unit takes over a buffer that it shares with one of `calls`. Each of
        # these is asked by its own dtype, as `dtype` may be a wrong guess: the buffer
        # would be gathered for nothing.
        if not (shard.is_shared and any(c.is_of(shard, c.dtype) for c in calls)):
            dtypes = BufferDtypes(dtype, dtype)
            call = GatheredCall("", (), (), shard, [], dtypes)
            call.full, handle = self.start_gather(shard, dtype, overlaps)
            # The range stays referenced, as a donated step writes in place where nobody
            # else has a reference: it would change what is being sent.
            self.in_flight[name] = call, handle, shard.flat.detach()

    def prefetch_next(
        self, index: int, shards: Sequence[FlatShard], casts: Casts | None
    ) -> None:
        """Prefetches the buffers of the unit call that follows in the program.

        Args:
            index: the position of the call that runs, in the recorded order.
            shards: the buffers that it reads.
        """
        order = shards[0].members[0].order
        # Out of the recorded order (in a branch that was not recorded) the next call is
        # not known. A prefetch that no unit reads is dropped: it costs time alone.
        if index + 1 >= len(order) or order[index] != tuple(map(_BUFFER, shards)):
            return
        # Names are recorded, not trees: of several trees of one layout (parameters and
        # their average) the next unit most likely reads the one that this unit reads.
        for shard in shards:
            for i, other in enumerate(self.by_name.get(shard.buffer, ())):
                self.tree_index = i if other is shard else self.tree_index
        # A buffer may lie in fewer trees, as only some leaves have a copy: no guess.
        following = index + 1
        while self.left_out and self.left_out >= {*order[following]}:
            following += 1
        for name in order[following]:
            same_name = self.by_name.get(name, ())
            if self.tree_index < len(same_name):
                shard = same_name[self.tree_index]
                dtype = shard.flat.dtype if casts is None else _dtype(shard, casts)
                self.prefetch(shard, dtype, self.live_calls)


_BUFFER = attrgetter("buffer")
_PLAIN = Gather()


def _dtype(shard: FlatShard, casts: Casts) -> torch.dtype:
    """Returns the dtype in which a buffer will be gathered.

    With ``precision(overrides=...)`` that depends on the unit call, which is still to
    come: it is guessed by what was recorded for the first leaf. A wrong guess costs a
    second gather.
    """
    stored = shard.flat.dtype
    if not stored.is_floating_point:
        return stored
    return (shard.members[0].compute or stored) if casts.overrides else casts.compute

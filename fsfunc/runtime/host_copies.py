"""Copies between the host's memory and a GPU, which go on while Python does.

Offloaded states and activations move so: `memory_spaces.Store.copy` calls `send`, and a
prefetch `send_ahead`. A copy is put into the current stream, from and to pinned memory,
and a cast is computed on the device. What waits for it:

- kernels and copies of the same stream come after it anyway;
- a copy in another stream, of the same host memory, waits for it on the device;
- memory on the device is not used again in other streams until it is over
  (``record_stream``); that of a copy sent ahead is its reader's, whose stream waits for
  the copy (`wait_for_ahead`);
- pinned memory that is freed stays with torch's allocator, or `stores`, until it is
  over;
- **Python, before it reads or writes that host memory**: by `wait_for` one tensor, or
  by `wait_for_copies` for all. Gradient calls, sharded calls and updates end with that,
  as any code may come next: so outside of them no copy is under way.

Memory of a pool that never reaches Python (what units save for their backward) is left
out of `wait_for_copies` by ``private``; code that gets it next waits for it.

Host memory that is not pinned, such as a mapped file, is copied by the driver through
pinned memory of its own: into it before the call returns, and from it soon after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.memory import StorageTable

_PIECE = 1 << 23  # elements that are cast at once, as each is there twice then


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy that may be under way.

    Args:
        end: the event after it.
        stream: the stream that it was put into.
        alive: host memory that is not pinned, which must not be freed until the end.
    """

    end: torch.cuda.Event
    stream: torch.cuda.Stream
    alive: Tensor | None


class CUDA:
    """The streams and events of a GPU, as copies need them; tests replace it.

    ``out`` and ``x`` are the target and the source of a copy, ``host`` and ``there``
    the tensor on the host and that on the device.
    """

    def crosses(self, out: Tensor, x: Tensor) -> bool:
        """Returns whether ``x`` is to be copied between the host and a GPU."""
        if out.is_cuda is x.is_cuda or isinstance(out, _torch.FakeTensor):
            return False
        return "cpu" in (out.device.type, x.device.type)

    def host_and_device(self, out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the one on the host, and the one on the device."""
        return (x, out) if out.is_cuda else (out, x)

    def is_on_gpu(self, x: Tensor) -> bool:
        """Returns whether ``x`` lies on a GPU."""
        return x.is_cuda

    def current_stream(self, there: Tensor) -> torch.cuda.Stream:
        """Returns the current stream of the device of ``there``."""
        return torch.cuda.current_stream(there.device)

    def copy(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x, non_blocking=True)

    def copy_all(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(outs), list(xs), non_blocking=True)

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Returns an event after all that ``stream`` has been given so far."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def record_stream(self, there: Tensor, stream: torch.cuda.Stream) -> None:
        """Has memory, once freed, not be used again before ``stream`` has read it."""
        there.record_stream(stream)

    def is_pinned(self, host: Tensor) -> bool:
        return host.is_pinned()

    def pin(self, address: int, size: int, device: torch.device) -> bool:
        """Pins memory; returns False if the system refuses, as by ``ulimit -l``."""
        cuda: Any = torch.cuda.cudart()
        with torch.cuda.device(device):  # else GPU 0 gets a context too
            refused = int(cuda.cudaHostRegister(address, size, 0))
            if refused:
                # CUDA reports the error once more, at the next call: to a launch that
                # is made for this, not to the user's.
                with suppress(RuntimeError):
                    torch.ones(1, device=device)
        return not refused

    def unpin(self, address: int, device: torch.device) -> None:
        """Unpins memory, after the copies that it is part of."""
        # An error is of an earlier kernel, and is raised where its results are read.
        with suppress(RuntimeError), torch.cuda.device(device):
            self.synchronize(device)
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(address)

    def synchronize(self, device: torch.device) -> None:
        """Waits until all work of the device is over, in any stream."""
        torch.cuda.synchronize(device)

    def in_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Inside, ``stream`` is the current one."""
        return torch.cuda.stream(stream)

    def set_stream(self, stream: torch.cuda.Stream) -> None:
        """Makes it the current stream of its device, in this thread."""
        torch.cuda.set_stream(stream)

    def side_stream(self, there: Tensor) -> torch.cuda.Stream:
        """Returns the stream in which copies run ahead, one for each device."""
        if there.device not in _SIDE_STREAMS:
            _SIDE_STREAMS[there.device] = torch.cuda.Stream(there.device)
        return _SIDE_STREAMS[there.device]


GPU = CUDA()
_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_LAST_COPY = StorageTable[_Copy]()  # by the storage of host memory
_UNDER_WAY: list[_Copy] = []  # those that `wait_for_copies` waits for, in order


def crosses(out: Tensor, x: Tensor) -> bool:
    """Returns whether :func:`send` copies ``x`` to ``out`` while Python goes on."""
    return GPU.crosses(out, x)


def can_copy_beside(host: Tensor, there: Tensor) -> bool:
    """Returns whether a copy of ``host`` can run beside what a device computes.

    Memory that is not pinned the driver copies in the calling thread.
    """
    return crosses(there, host) and GPU.is_pinned(host)


def send(out: Tensor, x: Tensor, private: bool = False, ahead: bool = False) -> Tensor:
    """Copies ``x`` into ``out``, between the host and a device; returns ``out``.

    Args:
        private: whether Python never reads the one on the host, and writes it after
            `wait_for` alone: `wait_for_copies` does not wait for this copy.
        ahead: whether the reader of ``out`` calls `wait_for_ahead`.
    """
    host, there = GPU.host_and_device(out, x)
    stream = _begin(host, there)
    try:
        if out.dtype == x.dtype or x.numel() <= _PIECE or not _are_flat(out, x):
            GPU.copy(out, x)
        else:  # in pieces, as a cast makes a second copy of its piece on the device
            for a, b in zip(out.split(_PIECE), x.split(_PIECE), strict=True):
                GPU.copy(a, b)
    finally:  # if a piece has no room, those before it are under way
        if not ahead:
            GPU.record_stream(there, stream)
        _end(host, stream, private, out is host)
    return out


def send_all(outs: Sequence[Tensor], xs: Sequence[Tensor], host: Tensor) -> None:
    """Copies tensors of a device into parts of ``host``."""
    stream = _begin(host, xs[0])
    try:
        GPU.copy_all(outs, xs)
    finally:
        for x in xs:
            GPU.record_stream(x, stream)
        _end(host, stream, False, True)


def send_ahead(out: Tensor, x: Tensor) -> torch.cuda.Event:
    """Copies host memory ``x`` to a device beside what it computes.

    Returns:
        the end of the copy. The code that reads ``out`` passes it to
        :func:`wait_for_ahead`. If nobody reads ``out``, the stream in which it was made
        must wait before ``out`` is freed.
    """
    # Not by `record_stream`: torch would not use the memory again before an event is
    # over, and a host that runs ahead would take new memory for each unit. By the waits
    # memory is used again in the order of its stream.
    side, current = GPU.side_stream(out), GPU.current_stream(out)
    # The memory of `out` was another tensor's, whose kernels may still be in `current`.
    side.wait_stream(current)
    try:
        with GPU.in_stream(side):
            send(out, x, ahead=True)
            return GPU.record_event(side)
    except BaseException:
        current.wait_stream(side)
        raise


def wait_for_ahead(
    out: Tensor, end: torch.cuda.Event, stream: torch.cuda.Stream | None = None
) -> None:
    """Lets a stream, by default the current one, wait for a copy sent ahead."""
    stream = GPU.current_stream(out) if stream is None else stream
    stream.wait_event(end)
    GPU.record_stream(out, stream)


def wait_for_last_copy(there: Tensor, host: Tensor) -> None:
    """Lets the current stream wait for the last copy of ``host``, into ``there``."""
    GPU.record_stream(there, _begin(host, there))


def wait_for(host: Tensor) -> Tensor:
    """Waits until no copy of this host memory is under way; returns it."""
    if _LAST_COPY.facts and (last := _LAST_COPY.get(host)) is not None:
        last.end.synchronize()
    return host


# A thread begins in the default streams, where nothing waits for what the caller's
# streams were given. So tensors go to a thread with one of the following.


def current_streams(tensors: Iterable[Tensor]) -> list[torch.cuda.Stream]:
    """Returns the current streams of the GPUs that tensors lie on."""
    return list(
        {x.device: GPU.current_stream(x) for x in tensors if GPU.is_on_gpu(x)}.values()
    )


def record_ends(tensors: Iterable[Tensor]) -> list[torch.cuda.Event]:
    """Returns events after all work of these streams so far, to ``synchronize`` with.

    Cost: the caller waits for nothing.
    """
    return [GPU.record_event(stream) for stream in current_streams(tensors)]


def enter(streams: Iterable[torch.cuda.Stream]) -> None:
    """Has the rest of this thread work in streams, of `current_streams`."""
    for stream in streams:
        GPU.set_stream(stream)


def wait_for_copies(failed: bool = False) -> None:
    """Waits until no copy is under way but private ones.

    Args:
        failed: whether an error is about to be raised. Then errors of the GPU are not:
            each wait raises them again, and they would take its place.
    """
    while _UNDER_WAY:
        # Removed when it is over, not before: another thread may wait by this list too.
        first = _UNDER_WAY[0]
        with suppress(RuntimeError) if failed else nullcontext():
            first.end.synchronize()
        with suppress(ValueError):  # another thread has removed it
            _UNDER_WAY.remove(first)


def _are_flat(out: Tensor, x: Tensor) -> bool:
    return out.ndim == x.ndim == 1 and len(out) == len(x)


def _begin(host: Tensor, there: Tensor) -> torch.cuda.Stream:
    """Lets the current stream wait for the last copy of ``host``, if in another."""
    stream = GPU.current_stream(there)
    if (last := _LAST_COPY.get(host)) is not None and last.stream != stream:
        stream.wait_event(last.end)
    return stream


def _end(host: Tensor, stream: torch.cuda.Stream, private: bool, to_host: bool) -> None:
    """Notes a copy that was put into ``stream``."""
    end, pinned = GPU.record_event(stream), GPU.is_pinned(host)
    if not pinned and (private or to_host):
        end.synchronize()  # the driver has copied in this call, or nearly
        return
    last_copy = _Copy(end, stream, None if pinned else host)
    # By storage, and without the tensor: the table would keep its own key alive.
    _LAST_COPY[host] = replace(last_copy, alive=None)
    if not private:
        while _UNDER_WAY and (first := _UNDER_WAY[0]).end.query():
            with suppress(ValueError):  # another thread has removed it
                _UNDER_WAY.remove(first)
        _UNDER_WAY.append(last_copy)

"""Copies between the host's memory and a GPU, which go on while Python does.

Such a copy is put into the current stream, from and to pinned memory, and a cast is
computed on the device. Who waits for what:

- kernels and copies of the same stream come after it anyway;
- a copy in another stream, of the same host memory, waits for it on the device;
- memory on the device is kept from reuse in other streams until it is over, or, of a
  copy that was sent ahead, by its reader, whose stream waits for it (`arrive`);
- pinned memory that is freed is kept by torch's allocator, or by `stores`, until it is
  over;
- **Python, before it reads or writes that host memory**: `wait_for` one tensor, or
  `settle` all. Gradient calls, sharded calls and updates end with that, as what comes
  next may be anybody's: so outside of them no copy is under way.

Memory of a pool that never reaches Python (what units save for their backward) is left
out of `settle` by ``private``; whoever is given it next waits for it.

Host memory that is not pinned, such as a mapped file, is copied by the driver through
pinned memory of its own: into it before the call returns, and from it soon after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.runtime.memory import StorageTable

_PIECE = 1 << 23  # elements that are cast at once, as each is there twice


@dataclass(frozen=True, eq=False)
class _Copy:
    """A copy that may be under way: the end of it, and memory that it needs till then.

    Args:
        stream: that of the copy; ``held``: host memory that is not pinned.
    """

    end: Any
    stream: Any
    held: Tensor | None


class CUDA:
    """The streams and events of a GPU, as copies need them; tests have another one."""

    def crosses(self, out: Tensor, x: Tensor) -> bool:
        """True if ``x`` is to be copied between the host and a GPU."""
        if out.is_cuda is x.is_cuda or isinstance(out, _torch.FakeTensor):
            return False
        return "cpu" in (out.device.type, x.device.type)

    def here(self, out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The one on the host, and the one on the device."""
        return (x, out) if out.is_cuda else (out, x)

    def has(self, x: Tensor) -> bool:
        """True if ``x`` lies on a GPU."""
        return x.is_cuda

    def stream(self, there: Tensor) -> Any:
        """The current stream of the device of ``there``."""
        return torch.cuda.current_stream(there.device)

    def copy(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x, non_blocking=True)

    def copy_all(self, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(outs), list(xs), non_blocking=True)

    def end(self, stream: Any) -> Any:
        """What is over when all is that ``stream`` has been given so far."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def keep(self, there: Tensor, stream: Any) -> None:
        """Keeps memory from reuse until ``stream`` is through with it."""
        there.record_stream(stream)

    def is_pinned(self, host: Tensor) -> bool:
        return host.is_pinned()

    def pin(self, address: int, size: int, device: torch.device) -> bool:
        """Pins memory; False where the system refuses, as by ``ulimit -l``."""
        cuda: Any = torch.cuda.cudart()
        with torch.cuda.device(device):  # else GPU 0 gets a context too
            refused = int(cuda.cudaHostRegister(address, size, 0))
            if refused:
                # CUDA keeps the error for whoever asks next: that is a kernel's launch.
                with suppress(RuntimeError):
                    torch.ones(1, device=device)
        return not refused

    def unpin(self, address: int, device: torch.device) -> None:
        """Unpins memory that nobody copies any more."""
        # An error is that of a kernel before, and is raised where its results are read.
        with suppress(RuntimeError), torch.cuda.device(device):
            self.finish(device)
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(address)

    def finish(self, device: torch.device) -> None:
        """Waits till all is over that the device was given, by anybody."""
        torch.cuda.synchronize(device)

    def inside(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def enter(self, stream: Any) -> None:
        """Makes it the current stream of its device, in this thread."""
        torch.cuda.set_stream(stream)

    def side(self, there: Tensor) -> Any:
        """The stream in which copies run ahead, one for each device."""
        if there.device not in _SIDES:
            _SIDES[there.device] = torch.cuda.Stream(there.device)
        return _SIDES[there.device]


GPU = CUDA()
_SIDES: dict[torch.device, Any] = {}
_LAST = StorageTable[_Copy]()  # of host memory: its last copy
_OPEN: list[_Copy] = []  # those that `settle` waits for


def crosses(out: Tensor, x: Tensor) -> bool:
    """True if ``x`` is copied to ``out`` while Python goes on, by :func:`send`."""
    return GPU.crosses(out, x)


def beside(host: Tensor, there: Tensor) -> bool:
    """True if a copy of ``host`` can run beside what the device of ``there`` computes.

    The driver copies other memory than pinned one by the calling thread.
    """
    return crosses(there, host) and GPU.is_pinned(host)


def send(out: Tensor, x: Tensor, private: bool = False, ahead: bool = False) -> Tensor:
    """Copies ``x`` into ``out``, between the host and a device; returns ``out``.

    Args:
        private: whether Python never reads the one on the host, and writes it after
            `wait_for` alone: `settle` does not wait for this copy.
        ahead: whether `arrive` keeps the memory on the device.
    """
    host, there = GPU.here(out, x)
    stream = _begin(host, there)
    try:
        if out.dtype == x.dtype or x.numel() <= _PIECE or not _are_flat(out, x):
            GPU.copy(out, x)
        else:  # the device has room for few elements in both dtypes
            for a, b in zip(out.split(_PIECE), x.split(_PIECE), strict=True):
                GPU.copy(a, b)
    finally:  # if that has no room, what came before is under way
        if not ahead:  # in another stream it is not used again before
            GPU.keep(there, stream)
        _end(host, stream, private, out is host)
    return out


def send_all(outs: Sequence[Tensor], xs: Sequence[Tensor], host: Tensor) -> None:
    """Copies tensors of a device into parts of ``host``."""
    stream = _begin(host, xs[0])
    try:
        GPU.copy_all(outs, xs)
    finally:
        for x in xs:
            GPU.keep(x, stream)
        _end(host, stream, False, True)


def send_ahead(out: Tensor, x: Tensor) -> Any:
    """Copies host memory ``x`` to a device beside what it computes.

    Returns:
        the end of the copy. Who reads ``out`` gives it to :func:`arrive`; if nobody
        does, that is told the stream in which ``out`` was made, before that is free. So
        memory is used again in the order of its stream. (If torch kept it until an
        event is over, a host that runs ahead would take new memory for each unit.)
    """
    side, current = GPU.side(out), GPU.stream(out)
    # The memory of `out` was another's, whose kernels may still be in `current`.
    side.wait_stream(current)
    try:
        with GPU.inside(side):
            send(out, x, ahead=True)
            return GPU.end(side)
    except BaseException:
        current.wait_stream(side)
        raise


def arrive(out: Tensor, end: Any, stream: Any = None) -> None:
    """Lets a stream, by default the current one, wait for a copy sent ahead."""
    stream = GPU.stream(out) if stream is None else stream
    stream.wait_event(end)
    GPU.keep(out, stream)


def follow(there: Tensor, host: Tensor) -> None:
    """Lets the current stream wait for the last copy of ``host``, into ``there``."""
    GPU.keep(there, _begin(host, there))


def wait_for(host: Tensor) -> Tensor:
    """Waits till no copy of this host memory is under way; returns it."""
    if _LAST.facts and (last := _LAST.get(host)) is not None:
        last.end.synchronize()
    return host


# A thread begins in the default streams: nothing there comes after what the caller's
# streams were given. So who hands tensors to a thread hands one of these with them.


def streams_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The current streams of the devices that tensors lie on; none of the host's."""
    return list({x.device: GPU.stream(x) for x in tensors if GPU.has(x)}.values())


def ends_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The ends of what these streams were given so far; ``synchronize`` waits for one.

    Cost: the caller waits for nothing.
    """
    return [GPU.end(stream) for stream in streams_of(tensors)]


def enter(streams: Iterable[Any]) -> None:
    """Has the rest of this thread work in streams, of `streams_of`."""
    for stream in streams:
        GPU.enter(stream)


def settle(failed: bool = False) -> None:
    """Waits till no copy is under way but private ones.

    Args:
        failed: whether an error is to be raised next: a GPU's own, of which each wait
            tells again, does not take its place.
    """
    while _OPEN:
        # Off the list when it is over: another thread may be about to rely on it.
        first = _OPEN[0]
        with suppress(RuntimeError) if failed else nullcontext():
            first.end.synchronize()
        with suppress(ValueError):
            _OPEN.remove(first)


def _are_flat(out: Tensor, x: Tensor) -> bool:
    return out.ndim == x.ndim == 1 and len(out) == len(x)


def _begin(host: Tensor, there: Tensor) -> Any:
    """Lets the current stream wait for the last copy of ``host``, if in another."""
    stream = GPU.stream(there)
    if (last := _LAST.get(host)) is not None and last.stream != stream:
        stream.wait_event(last.end)
    return stream


def _end(host: Tensor, stream: Any, private: bool, to_host: bool) -> None:
    """Notes a copy that was put into ``stream``."""
    end, pinned = GPU.end(stream), GPU.is_pinned(host)
    if not pinned and (private or to_host):
        end.synchronize()  # it is over, or as good as that
        return
    one = _Copy(end, stream, None if pinned else host)
    # By storage. A copy holds no pinned memory: that would never be free again.
    _LAST[host] = replace(one, held=None)
    if not private:
        while _OPEN and (first := _OPEN[0]).end.query():
            with suppress(ValueError):  # another thread has taken it off
                _OPEN.remove(first)
        _OPEN.append(one)

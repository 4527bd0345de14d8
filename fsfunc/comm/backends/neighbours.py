"""Messages between the processes of one host, through memory that they share.

The sender leaves its data in shared memory and says where, in a few bytes on a Unix
socket (a *record*). The receiver copies the data out, or reduces them where they are,
and answers that they are free:

    sender:   copies x to its memory, (number, group, tag, offset, bytes) ->
    receiver: reads the sender's memory, copies or reduces     <- (-number, 0, 0, 0, 0)

A message moves while either process waits for one, or sends one; it needs no thread,
and is copied at most twice. ``channels`` calls this for ranks of one host.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock, RLock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc.comm.backends.shared_memory import SharedMemory, SharedPool

# number (0: the data follow on the socket; negative: read), group, tag, offset, bytes
_RECORD = struct.Struct("<qqqqq")
_SMALL = 1024  # bytes that are sent on the socket; they need no answer
_LARGE = 1 << 20  # bytes whose pages are worth a system call
_SLICE = 0.1  # seconds between two looks of a wait, as another thread may read for it
CLOSED = "closed its connection"
HUNG_UP = "hung up, as another rank has ended"

# number, offset in the sender's memory (of number 0 the data themselves), bytes
Message = tuple[int, Any, int]
Key = tuple[int, int]  # of a message: its group and its tag


class Disconnected(RuntimeError):
    """A message to or from another process does not get there; ``rank`` is which."""

    def __init__(self, rank: int, why: str):
        super().__init__(why)
        self.rank = rank


class Delivery:
    """A message that is sent or received; ``wait`` as that of torch.distributed.

    Args:
        other: the `Neighbour` that it goes to, or comes from.
        ranks: those of its group.
    """

    def __init__(self, other: Neighbour, ranks: Sequence[int]):
        self.other, self.ranks = other, ranks

    def over(self) -> bool:
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Returns whether ``wait`` returns, or raises, at once."""
        self.other.host.progress()
        return self.over() or not self.other.open

    def wait(self) -> None:
        """Waits until it is over.

        Raises:
            Disconnected: the other process ends, or does not come in time; then the
                connections to all ``ranks`` of the group are closed.
        """
        if not self.over():
            self.other.host.until(self)


class Sent(Delivery):
    """A message that is sent.

    It is over when its record has left for the socket; an answered one when the other
    process has read its data.

    Args:
        number: that of an answered message, or 0.
    """

    def __init__(self, other: Neighbour, ranks: Sequence[int], number: int):
        super().__init__(other, ranks)
        self.number, self.end = number, other.queued  # the bytes up to its record's end

    def over(self) -> bool:
        return self.number not in self.other.unread and self.other.pushed >= self.end


class Received(Delivery):
    """A message that is copied to ``into`` when it comes."""

    message: Message | None = None

    def __init__(self, other: Neighbour, ranks: Sequence[int], into: Tensor):
        super().__init__(other, ranks)
        self.into = into

    def take(self, message: Message) -> None:
        number, offset, size = message
        # Of another size it is not copied, beyond the end of `into`: `wait` raises.
        if fits := size == self.into.nbytes:
            source = self.other.memory.start + offset if number else offset
            ctypes.memmove(self.into.data_ptr(), source, size)
        # Set after the copy: it tells the thread that waits, which may be another one.
        self.message = message
        if fits:
            self.other.mark_read(message)

    def over(self) -> bool:
        return self.message is not None

    def wait(self) -> None:
        super().wait()
        # Two different calls have one tag if 16 bits of their digests are equal. As
        # `Disconnected` the error closes the mesh, and its report names the rank.
        if self.message and (size := self.message[2]) != self.into.nbytes:
            rank = self.other.rank
            why = f"rank {rank} sent {size} bytes, not {self.into.nbytes}"
            raise Disconnected(rank, why)


class Borrowed(Received):
    """A message that is read in the sender's memory, until ``give_back``.

    ``into`` has its shape and dtype, and is not written.
    """

    def take(self, message: Message) -> None:
        self.message = message

    @property
    def data(self) -> Tensor:
        assert self.message is not None, "its wait is not over"
        number, offset, _ = self.message
        shape, dtype = self.into.shape, self.into.dtype
        if number:
            return self.other.memory.view(offset, shape, dtype)
        return torch.frombuffer(bytearray(offset), dtype=dtype).view(shape)

    def give_back(self) -> None:
        assert self.message is not None, "its wait is not over"
        with self.other.host.lock:
            # The pages of the two that were read last stay mapped: the next reduction
            # often reads the same buffers. A step at zero=0 takes 1.2 % less time than
            # if each reduction unmapped its own.
            self.other.mark_read(self.message, last=2)


class Neighbour:
    """Another process of this host.

    Args:
        memory: its memory, where this one reads its messages.
    """

    def __init__(
        self,
        host: Neighbours,
        rank: int,
        connection: socket.socket,
        memory: SharedMemory,
    ):
        self.host, self.rank = host, rank
        self.socket, self.memory = connection, memory
        self.descriptor = connection.fileno()  # a closed socket has none to tell
        self.number = 0  # of the last message to it
        self.unread: dict[int, Tensor] = {}  # by number, what it has not read yet
        self.out = bytearray()  # what the socket has not taken yet
        self.queued = self.pushed = 0  # bytes that came to `out`, and that left it
        self.incomplete = bytearray()  # the part of a record that has come
        self.expected: dict[Key, deque[Received]] = defaultdict(deque)
        self.early: dict[Key, deque[Message]] = defaultdict(deque)  # before a receive
        self.open = True
        self.why = CLOSED  # the error's text once it is not open

    def send(self, key: Key, x: Tensor, read_only: bool, answered: bool) -> int:
        """Sends contiguous ``x``, which may be written again at once.

        Args:
            read_only: nobody will write ``x`` again: it is not copied if it lies in
                shared memory.
            answered: whether the work is over only when the other has the data.

        Returns:
            the number of an answered message, or 0.
        """
        size = x.nbytes
        # A small message goes with its record: no memory is held, and no answer comes
        # back. An answered one needs a number to be answered, and goes through memory.
        if size <= _SMALL and not answered:
            data = ctypes.string_at(x.data_ptr(), size)
            self._queue(_RECORD.pack(0, *key, 0, size) + data)
            self.push()
            return 0
        offset = self.host.memory.offset(x) if read_only else None
        # The caller may write `x` again, or the other process cannot see it.
        if offset is None:
            x = self.host.copy(x)
            offset = self.host.memory.offset(x)
        self.number += 1
        # Odd if answered: the receiver sees by it that this one waits for the answer.
        number = 2 * self.number + answered
        self.unread[number] = x  # so the pool does not hand out its memory again
        self._queue(_RECORD.pack(number, *key, offset, size))
        self.push()
        return number if answered else 0

    def expect(self, key: Key, work: Received) -> None:
        """Has the next message under ``key`` go to ``work``."""
        if early := self.early.get(key):
            message = early.popleft()
            if not early:
                del self.early[key]
            work.take(message)
        else:
            self.expected[key].append(work)

    def mark_read(self, message: Message, last: int = 0) -> None:
        """Answers that the data of a message have been read, and are free.

        Args:
            last: of how many messages, with this one, the pages stay mapped.
        """
        number, offset, size = message
        if number:
            if size >= _LARGE:
                self.memory.leave(offset, size, last)
            self._queue(_RECORD.pack(-number, 0, 0, 0, 0))
            # At once if the sender waits for it, or the data are large, as the sender
            # can then use their memory again. Other answers go with the next message,
            # which saves a system call.
            if number % 2 or size >= _LARGE or len(self.out) >= _SMALL:
                with suppress(Disconnected):  # it has ended, and needs no answer
                    self.push()

    def _queue(self, data: bytes) -> None:
        self.out += data
        self.queued += len(data)

    def push(self) -> None:
        """Sends as much as the socket takes.

        Raises:
            Disconnected: the other process has ended.
        """
        try:
            while self.out:
                n = self.socket.send(self.out)
                del self.out[:n]
                self.pushed += n
        except BlockingIOError:
            pass  # until the other reads; `progress` sends the rest
        except OSError as error:
            # Or each later `progress` would try again, and look every millisecond.
            self.out.clear()
            raise Disconnected(self.rank, f"{self.why}: {error}") from error

    def read(self) -> None:
        """Reads what has come on the socket, and delivers the messages in it."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a reset: it ended before it had read all
        # Unregistered: a closed socket can be read at any time, so no poll would wait.
        if not data and self.open:
            self.open = False
            self.host.poll.unregister(self.descriptor)
        self.incomplete += data
        while len(self.incomplete) >= _RECORD.size:
            number, group, tag, offset, size = _RECORD.unpack_from(self.incomplete)
            end = _RECORD.size + (0 if number else size)
            # The socket is a stream of bytes: one read may end within a message.
            if len(self.incomplete) < end:
                break
            if not number:
                offset = bytes(self.incomplete[_RECORD.size : end])
            del self.incomplete[:end]
            if number < 0:
                del self.unread[-number]
            else:
                self._deliver((group, tag), (number, offset, size))

    def _deliver(self, key: Key, message: Message) -> None:
        if receives := self.expected.get(key):
            work = receives.popleft()
            if not receives:
                del self.expected[key]
            work.take(message)
        else:
            self.early[key].append(message)


class Neighbours:
    """The other processes of this host, by rank.

    Args:
        memory: this process's shared memory.
        others: by rank, a connection and its shared memory.
        limit: how many seconds to wait for a message.
    """

    def __init__(
        self,
        memory: SharedMemory,
        others: Mapping[int, tuple[socket.socket, SharedMemory]],
        limit: float,
    ):
        self.limit, self.memory = limit, memory
        self.pool = SharedPool(self.memory, self.progress)
        self.poll = select.poll()  # unlike epoll it needs no descriptor
        self.lock, self.polls = RLock(), Lock()
        self.by_rank: dict[int, Neighbour] = {}
        self.by_socket: dict[int, Neighbour] = {}
        for rank, (connection, other_memory) in others.items():
            connection.setblocking(False)
            self.poll.register(connection, select.POLLIN)
            other = Neighbour(self, rank, connection, other_memory)
            self.by_rank[rank] = self.by_socket[other.descriptor] = other
        connections = [c for c, _ in others.values()]
        self.close = weakref.finalize(self, _close, connections, self.memory)
        _ALL.add(self)

    def copy(self, x: Tensor) -> Tensor:
        """Copies the bytes of contiguous ``x`` to shared memory."""
        shared = self.pool.get(x.nbytes, torch.uint8, None)
        ctypes.memmove(shared.data_ptr(), x.data_ptr(), x.nbytes)
        return shared

    def close_with(self, process_group: dist.ProcessGroup) -> None:
        """Closes the connections when torch drops a process group."""
        weakref.finalize(process_group, self.close)

    def progress(self, seconds: float = 0) -> None:
        """Sends and reads what can be; waits for up to some seconds for what comes."""
        with self.lock:
            for other in self.by_rank.values():
                with suppress(Disconnected):  # `until` raises for those who wait for it
                    other.push()
                # The poll waits for input alone. What the socket has not taken is tried
                # again soon.
                if other.out:
                    seconds = min(seconds, _SLICE / 100)
        if not self.polls.acquire(blocking=False):  # another thread reads for this one
            time.sleep(min(seconds, _SLICE / 100))
            return
        # Without `lock`: other threads send and post receives while this one waits.
        try:
            ready = self.poll.poll(1000 * seconds)
        finally:
            self.polls.release()
        with self.lock:
            for descriptor, _ in ready:
                self.by_socket[descriptor].read()

    def until(self, work: Delivery) -> None:
        """Waits for a delivery; see its ``wait``."""
        other, deadline = work.other, time.monotonic() + self.limit
        self.progress()
        while not work.over():
            remaining = deadline - time.monotonic()
            if not other.open:
                raise Disconnected(other.rank, other.why)
            # As gloo does at a timeout: whoever waits for these ranks hears of it at
            # once, and not after a timeout of its own.
            if remaining <= 0:
                self.hang_up(work.ranks, "timed out")
                raise Disconnected(other.rank, "timed out")
            self.progress(min(remaining, _SLICE))
            # The other rank may itself wait for a message of another mesh, which this
            # process has still to send.
            if self.limit - remaining > _SLICE:
                for mesh in _ALL - {self}:
                    mesh.progress()

    def gone(self) -> list[int]:
        """Returns the ranks that closed their connections, if this one did not."""
        self.progress()
        others = self.by_rank.values()
        return [o.rank for o in others if not o.open and o.why == CLOSED]

    def hang_up(self, ranks: Sequence[int], why: str) -> None:
        """Ends every wait for these ranks, in any thread, here and there."""
        for rank in ranks:
            if (other := self.by_rank.get(rank)) is not None:
                other.why = why
                # Not `close`, which would wake no thread that waits in a poll. Both
                # ends read an end of the stream.
                with suppress(OSError):  # it is closed already
                    other.socket.shutdown(socket.SHUT_RDWR)


def _close(connections: Sequence[socket.socket], memory: SharedMemory) -> None:
    memory.ended = True  # before its tensors go, which others may still have to read
    for connection in connections:
        connection.close()


_ALL: weakref.WeakSet[Neighbours] = weakref.WeakSet()  # of this process


def _close_in_fork() -> None:
    """Closes a fork's copies: while they are open, a rank that ended seems alive."""
    for neighbours in _ALL:
        neighbours.close()


os.register_at_fork(after_in_child=_close_in_fork)

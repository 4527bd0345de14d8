"""The processes of one host find each other, and exchange sockets and memory.

Two processes are on one host if they run under one kernel and in one network namespace:
only there can their sockets meet. ``processes.connect`` calls this once for a mesh:

1. Each process opens a `Door`, a listening socket, and all gather the addresses.
2. A rank *knocks* at the doors of lower ranks of its host: it connects, and sends the
   door's key, its rank and the descriptor of its shared memory. The other *admits* it
   and answers with its own descriptor.
3. All gather, twice, which ranks each one has reached. Two ranks of which either did
   not reach the other warn, and send by gloo.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from fsfunc.comm.attribution import warn
from fsfunc.comm.backends.neighbours import Neighbours
from fsfunc.comm.backends.shared_memory import SharedMemory, shared_file

_KNOCK = struct.Struct("<16sq")  # the key of a door, and the rank that knocks
_RANK = struct.Struct("<q")
_PROCESS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED returns them
_LINUX = hasattr(os, "memfd_create")
_BACKLOG = 1024  # how many may wait before a door
_PATIENCE = 30.0  # seconds for a place at a door, and for answers
_TICK = 0.01  # seconds between two looks at sockets
# The status of another rank, in a byte: nothing yet, reached, or an error's number.
_UNKNOWN, _REACHED = 0, 255
_OTHER_USER = errno.EPERM


class GatheredBytes(Protocol):
    """Bytes of every rank, on their way."""

    def done(self) -> bool: ...

    def wait(self) -> list[list[int]]:
        """Returns the bytes of each rank, by rank."""
        ...


class Address(NamedTuple):
    """Where a door is; the key is sent to the ranks alone."""

    host: str
    name: str
    key: str


class Door:
    """A socket by which the other processes of a host reach this one.

    Args:
        opens: whether to open one.

    ``address`` is to be sent to them. It is "" if none is open: this process then sends
    by gloo alone.

    Warns:
        RuntimeWarning: the system refuses the shared file or the socket.
    """

    def __init__(self, opens: bool):
        self.address, self.file = "", -1
        self.socket: socket.socket | None = None
        # Elsewhere than on Linux there is no `memfd_create`: gloo is all that there is,
        # and nobody is warned. On Linux a refusal, as in a sandbox or without
        # descriptors, makes messages slower, and the user may be able to mend it:
        # `_warn` tells.
        if opens and _LINUX:
            try:
                self._open()
            except OSError as error:
                self.close()
                _warn("processes of this host", str(error))

    def _open(self) -> None:
        self.file = shared_file()
        self.socket, name = socket.socket(socket.AF_UNIX), uuid.uuid4().hex
        self.socket.bind(f"\0fsfunc-{name}")  # the NUL: a name of the kernel, no file
        self.socket.listen(_BACKLOG)
        self.socket.setblocking(False)
        self.address = " ".join(Address(host(), name, secrets.token_hex(16)))

    def meet(
        self,
        rank: int,
        addresses: Mapping[int, str],
        limit: float,
        gather: Callable[[bytes], GatheredBytes],
    ) -> Neighbours | None:
        """Connects to the processes of this host; every rank of every host calls it.

        Args:
            addresses: of every rank.
            limit: how many seconds to wait for a message.
            gather: starts a gather of bytes, of equal lengths, of every rank.

        Warns:
            RuntimeWarning: messages to some rank of this host go by gloo; says why.
        """
        doors = {r: Address(*a.split()) for r, a in addresses.items() if a}
        # No two ranks have a host in common. All see the same addresses, so none of
        # them starts the gathers below.
        if max(Counter(a.host for a in doors.values()).values(), default=0) < 2:
            return None
        on_host = {r: a for r, a in doors.items() if rank in doors and r != rank}
        on_host = {r: a for r, a in on_host.items() if a.host == doors[rank].host}
        # The others wait up to `limit` for this rank's first gather, which it starts
        # after its knocks: these may take only a part of that.
        patience = min(limit / 4, _PATIENCE)
        encounter = _Encounter(self, rank, len(addresses), on_host, patience)
        try:
            if on_host:
                encounter.knock()
            knocked = gather(bytes(encounter.status))
            # The backlog of this door may be full. A rank that waits for a place in it
            # has not started its gather: it is admitted here, or the gather would not
            # end.
            while not knocked.done():
                encounter.admit()
            encounter.finish(knocked.wait())
            # Once more: a rank may have failed to read the answer to its knock. Of each
            # pair both must send the same way.
            statuses = gather(bytes(encounter.status)).wait()
        except BaseException:
            encounter.close(on_host)
            raise
        unreached = [
            r for r in on_host if {encounter.status[r], statuses[r][rank]} != {_REACHED}
        ]
        ranks_by_reason = defaultdict[str, list[int]](list)
        for r in unreached:
            ranks_by_reason[encounter.reason(r, statuses[r][rank])].append(r)
        # A warning for each reason: one for each rank would be many, and alike.
        for reason, ranks in ranks_by_reason.items():
            _warn(f"ranks {ranks} of this host", reason)
        encounter.close(unreached)
        if not encounter.others or encounter.memory is None:
            return None
        return Neighbours(encounter.memory, encounter.others, limit)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class _Encounter:
    """A rank at its own door and at those of lower ranks.

    Args:
        on_host: the doors of the others of this host.
        patience: how many seconds to wait for a place at a door, and for answers.

    ``status`` has a byte for each rank, and ``others`` the ranks that are connected.
    """

    def __init__(
        self,
        door: Door,
        rank: int,
        n: int,
        on_host: Mapping[int, Address],
        patience: float,
    ):
        self.door, self.rank, self.on_host = door, rank, on_host
        self.patience = patience
        self.status = bytearray(n)
        self.others: dict[int, tuple[socket.socket, SharedMemory]] = {}
        self.strangers: list[socket.socket] = []  # connected, but not named yet
        # By rank, where this one knocked.
        self.unanswered: dict[int, socket.socket] = {}
        self.key = bytes.fromhex(Address(*door.address.split()).key) if on_host else b""
        self.memory: SharedMemory | None = None

    def knock(self) -> None:
        """Connects to every lower rank, and sends it this one's memory."""
        # Without memory of its own it knocks nowhere: its status tells the others why.
        try:
            self.memory = SharedMemory(os.dup(self.door.file))
        except OSError as error:
            self._fail(self.on_host, error)
            return
        deadline = time.monotonic() + self.patience
        # Of each pair the higher rank knocks: two knocks would make two connections.
        for other in sorted(r for r in self.on_host if r < self.rank):
            connection = None
            try:
                connection = self._connect(self.on_host[other].name, deadline)
                # Before anything is sent: with the descriptor another user could read
                # and write all that this process sends.
                if not _is_same_user(connection):
                    raise PermissionError(_OTHER_USER, "another user's")
                key = bytes.fromhex(self.on_host[other].key)
                knock = _KNOCK.pack(key, self.rank)
                socket.send_fds(connection, [knock], [self.door.file])
            except OSError as error:  # messages to that rank alone go by gloo
                self._fail([other], error)
                if connection is not None:
                    connection.close()
                continue
            self.unanswered[other], self.status[other] = connection, _REACHED

    def _connect(self, name: str, deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        while True:
            try:
                connection.connect(f"\0fsfunc-{name}")
                return connection
            except BlockingIOError:  # the backlog of that door is full
                if time.monotonic() > deadline:
                    connection.close()
                    raise
                # That rank may itself wait for a place at this door: without this the
                # two would wait for each other.
                self.admit()
            except OSError:
                connection.close()
                raise

    def admit(self) -> None:
        """Takes a connection at the door, and what has come on the others."""
        poll, door = select.poll(), self.door.socket
        connections = [*self.strangers, *self.unanswered.values()]
        for listened in connections if door is None else [door, *connections]:
            poll.register(listened, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * _TICK)}
        for connection in [s for s in self.strangers if s.fileno() in ready]:
            self.strangers.remove(connection)
            self._admit_rank(connection)
        for other, connection in [*self.unanswered.items()]:
            if connection.fileno() in ready:
                del self.unanswered[other]
                self._read_answer(other, connection)
        if door is not None and door.fileno() in ready:
            try:
                self.strangers.append(door.accept()[0])
            except BlockingIOError:
                pass  # who knocked has gone
            # No descriptor is left, so nobody else can come in. The closed door refuses
            # those who wait, who would otherwise wait until their deadline.
            except OSError as error:
                self._fail([r for r in self.on_host if not self.status[r]], error)
                door.close()
                self.door.socket = None

    def _admit_rank(self, connection: socket.socket) -> None:
        """Reads a knock, and answers it if it is a rank's; disconnects anybody else."""
        descriptors, flags, same_user = [], 0, _is_same_user(connection)
        try:
            if same_user:
                parts = socket.recv_fds(connection, _KNOCK.size, 1)
                knock, descriptors, flags, _ = parts
            else:  # to know which rank it is: another user's memory is not taken
                knock = connection.recv(_KNOCK.size)
        except OSError:
            connection.close()
            return
        key, rank = _KNOCK.unpack(knock.ljust(_KNOCK.size, b"\0")[: _KNOCK.size])
        # Any process of this host can connect, and a rank knocks once: who has another
        # key, or names a rank that came already, is a stranger.
        if key != self.key or rank not in self.on_host or self.status[rank]:
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return
        try:
            if not same_user:
                raise PermissionError(_OTHER_USER, "another user's")
            memory = _map_memory(descriptors, flags)
            socket.send_fds(connection, [_RANK.pack(self.rank)], [self.door.file])
        except OSError as error:
            self._fail([rank], error)
            connection.close()
            return
        self.others[rank], self.status[rank] = (connection, memory), _REACHED

    def _read_answer(self, rank: int, connection: socket.socket) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(connection, _RANK.size, 1)
            if not data:  # the other closed the connection instead of an answer
                raise ConnectionResetError(errno.ECONNRESET, "sent away")
            self.others[rank] = connection, _map_memory(descriptors, flags)
        except OSError as error:
            self._fail([rank], error)
            connection.close()

    def finish(self, statuses: list[list[int]]) -> None:
        """Waits for the ranks that have knocked here, and for every answer.

        Args:
            statuses: by rank, the status that it has of each rank.
        """
        # By their statuses, as a rank that could not connect never comes.
        deadline = time.monotonic() + self.patience
        knocked = [
            r
            for r in self.on_host
            if r > self.rank and statuses[r][self.rank] == _REACHED
        ]
        while self.unanswered or not all(self.status[r] for r in knocked):
            if time.monotonic() > deadline:
                late = [*self.unanswered, *(r for r in knocked if not self.status[r])]
                self._fail(late, TimeoutError(errno.ETIMEDOUT, "late"))
                break
            self.admit()

    def _fail(self, ranks: Iterable[int], error: OSError) -> None:
        for rank in list(ranks):
            self.status[rank] = min(error.errno or errno.EIO, _REACHED - 1)

    def reason(self, rank: int, other_status: int) -> str:
        """Returns why ``rank`` is not reached.

        Args:
            other_status: the status that ``rank`` has of this rank.
        """
        status, failed = self.status[rank], other_status not in (_UNKNOWN, _REACHED)
        # If the other rank fails and closes its door, this rank sees one of these. They
        # do not tell why: the other's own error does.
        shut = errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE, errno.ECONNREFUSED
        is_effect = status in (_UNKNOWN, _REACHED, *shut)
        failed_rank = rank if failed and is_effect else self.rank
        number = other_status if failed_rank == rank else status
        if number == _OTHER_USER:
            return "another user's processes"
        return f"rank {failed_rank}: {os.strerror(number)}"

    def close(self, ranks: Iterable[int]) -> None:
        """Closes the connections to these ranks, and to all that are no rank."""
        for rank in list(ranks):
            if rank in self.others:
                self.others.pop(rank)[0].close()
        for connection in [*self.strangers, *self.unanswered.values()]:
            connection.close()


def _warn(others: str, reason: str) -> None:
    warn(
        f"no memory to share with {others} ({reason}): messages to them go by gloo, as "
        "by make_mesh(shared_memory=False)",
        RuntimeWarning,
    )


def host() -> str:
    """Names this boot of the kernel, and the network namespace in it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _is_same_user(connection: socket.socket) -> bool:
    """Returns whether a process of the same user is at the other end."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PROCESS.size)
    return _PROCESS.unpack(peer)[1] == os.getuid()


def _map_memory(descriptors: list[int], flags: int) -> SharedMemory:
    """Maps the memory whose descriptor has come.

    Raises:
        OSError: this process can have no more descriptors, or addresses.
    """
    if not descriptors:
        is_cut = flags & socket.MSG_CTRUNC  # the kernel had to drop it
        number = errno.EMFILE if is_cut else errno.EPROTO
        raise OSError(number, os.strerror(number))
    return SharedMemory(descriptors[0])

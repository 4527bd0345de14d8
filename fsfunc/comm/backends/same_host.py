"""The processes of one host find each other, and exchange sockets and memory.

Two processes are on one host if they run under one kernel and in one network namespace:
only there can their sockets meet.
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
_PROCESS = struct.Struct("3i")  # its number, its user and his group, as Linux says them
_LINUX = hasattr(os, "memfd_create")
_CROWD = 1024  # how many may wait before a door
_PATIENCE = 30.0  # seconds for what no rank has to compute for
_TICK = 0.01  # seconds between two looks at what others say meanwhile
# What a rank says of another one: nothing yet, that all is well, or an error's number.
_UNASKED, _WELL = 0, 255
_TWO_USERS = errno.EPERM


class Sayings(Protocol):
    """What every rank says, on its way."""

    def done(self) -> bool: ...

    def wait(self) -> list[list[int]]:
        """By rank, the bytes that it said."""
        ...


class Address(NamedTuple):
    """Where a door is; the key is told to the ranks alone."""

    host: str
    name: str
    key: str


class Door:
    """A socket by which the other processes of a host reach this one.

    Args:
        opens: whether they may.

    ``address`` is what to tell them, in words; "" without a door.

    Warns:
        RuntimeWarning: this system refuses what it takes; then there is none.
    """

    def __init__(self, opens: bool):
        self.address, self.file = "", -1
        self.socket: socket.socket | None = None
        if opens and _LINUX:
            try:
                self._open()
            except OSError as error:
                self.close()
                _warn("processes of this host", str(error))

    def _open(self) -> None:
        self.file = shared_file()
        self.socket, name = socket.socket(socket.AF_UNIX), uuid.uuid4().hex
        self.socket.bind(f"\0fsfunc-{name}")  # without a file
        self.socket.listen(_CROWD)
        self.socket.setblocking(False)
        self.address = " ".join(Address(host(), name, secrets.token_hex(16)))

    def meet(
        self,
        rank: int,
        addresses: Mapping[int, str],
        limit: float,
        tell: Callable[[bytes], Sayings],
    ) -> Neighbours | None:
        """The processes whose address is on this host; all of all hosts call it.

        Two that do not come together, such as those of two users, both learn it.

        Args:
            addresses: of every rank.
            limit: how many seconds to wait for a message.
            tell: has every rank told what each of them gives it, of equal lengths.

        Warns:
            RuntimeWarning: messages to one of this host go by gloo; says why.
        """
        doors = {r: Address(*a.split()) for r, a in addresses.items() if a}
        if max(Counter(a.host for a in doors.values()).values(), default=0) < 2:
            return None  # as every rank knows
        there = {r: a for r, a in doors.items() if rank in doors and r != rank}
        there = {r: a for r, a in there.items() if a.host == doors[rank].host}
        # Much less than the others wait for what this one then tells them.
        patience = min(limit / 4, _PATIENCE)
        meeting = _Meeting(self, rank, len(addresses), there, patience)
        try:
            if there:
                meeting.knock()
            reached = tell(bytes(meeting.said))
            while not reached.done():
                meeting.admit()  # somebody may stand before a door with a crowd
            meeting.finish(reached.wait())
            every = tell(bytes(meeting.said)).wait()
        except BaseException:
            meeting.close(there)
            raise
        apart = [r for r in there if {meeting.said[r], every[r][rank]} != {_WELL}]
        reasons = defaultdict[str, list[int]](list)
        for r in apart:
            reasons[meeting.reason(r, every[r][rank])].append(r)
        for why, ranks in reasons.items():
            _warn(f"ranks {ranks} of this host", why)
        meeting.close(apart)
        if not meeting.others or meeting.memory is None:
            return None
        return Neighbours(meeting.memory, meeting.others, limit)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class _Meeting:
    """A rank at its own door and at those of lower ranks.

    Args:
        there: the doors of the others of this host.
        patience: how many seconds to wait for what takes none.

    ``said`` has by rank what this one says of it, and ``others`` who have come.
    """

    def __init__(
        self,
        door: Door,
        rank: int,
        n: int,
        there: Mapping[int, Address],
        patience: float,
    ):
        self.door, self.rank, self.there, self.patience = door, rank, there, patience
        self.said = bytearray(n)
        self.others: dict[int, tuple[socket.socket, SharedMemory]] = {}
        self.strangers: list[socket.socket] = []  # they have not said who they are
        self.unanswered: dict[int, socket.socket] = {}
        self.key = bytes.fromhex(Address(*door.address.split()).key) if there else b""
        self.memory: SharedMemory | None = None

    def knock(self) -> None:
        """Connects to every lower rank, and leaves this one's memory there."""
        try:
            self.memory = SharedMemory(os.dup(self.door.file))
        except OSError as error:
            self._fail(self.there, error)
            return
        limit = time.monotonic() + self.patience
        for other in sorted(r for r in self.there if r < self.rank):
            connection = None
            try:
                connection = self._connected(self.there[other].name, limit)
                if not _is_ours(connection):
                    raise PermissionError(_TWO_USERS, "another user's")
                key = bytes.fromhex(self.there[other].key)
                knock = _KNOCK.pack(key, self.rank)
                socket.send_fds(connection, [knock], [self.door.file])
            except OSError as error:
                self._fail([other], error)
                if connection is not None:
                    connection.close()
                continue
            self.unanswered[other], self.said[other] = connection, _WELL

    def _connected(self, name: str, limit: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        while True:
            try:
                connection.connect(f"\0fsfunc-{name}")
                return connection
            except BlockingIOError:  # as many as it holds wait before that door
                if time.monotonic() > limit:
                    connection.close()
                    raise
                self.admit()
            except OSError:
                connection.close()
                raise

    def admit(self) -> None:
        """Takes those in who stand before the door, and what they say."""
        poll, door = select.poll(), self.door.socket
        waiting = [*self.strangers, *self.unanswered.values()]
        for one in waiting if door is None else [door, *waiting]:
            poll.register(one, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * _TICK)}
        for one in [s for s in self.strangers if s.fileno() in ready]:
            self.strangers.remove(one)
            self._hear(one)
        for other, one in [*self.unanswered.items()]:
            if one.fileno() in ready:
                del self.unanswered[other]
                self._answered(other, one)
        if door is not None and door.fileno() in ready:
            try:
                self.strangers.append(door.accept()[0])
            except BlockingIOError:
                pass  # it has gone
            except OSError as error:  # no descriptor: nobody else can come in
                self._fail([r for r in self.there if not self.said[r]], error)
                door.close()
                self.door.socket = None

    def _hear(self, connection: socket.socket) -> None:
        """Takes in a rank; anybody else is sent away, and forgotten."""
        descriptors, flags, ours = [], 0, _is_ours(connection)
        try:
            if ours:
                parts = socket.recv_fds(connection, _KNOCK.size, 1)
                said, descriptors, flags, _ = parts
            else:  # only to know whom to tell, and nothing of its memory
                said = connection.recv(_KNOCK.size)
        except OSError:
            connection.close()
            return
        key, rank = _KNOCK.unpack(said.ljust(_KNOCK.size, b"\0")[: _KNOCK.size])
        if key != self.key or rank not in self.there or self.said[rank]:
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return
        try:
            if not ours:
                raise PermissionError(_TWO_USERS, "another user's")
            memory = _mapped(descriptors, flags)
            socket.send_fds(connection, [_RANK.pack(self.rank)], [self.door.file])
        except OSError as error:
            self._fail([rank], error)
            connection.close()
            return
        self.others[rank], self.said[rank] = (connection, memory), _WELL

    def _answered(self, rank: int, connection: socket.socket) -> None:
        try:
            said, descriptors, flags, _ = socket.recv_fds(connection, _RANK.size, 1)
            if not said:
                raise ConnectionResetError(errno.ECONNRESET, "sent away")
            self.others[rank] = connection, _mapped(descriptors, flags)
        except OSError as error:
            self._fail([rank], error)
            connection.close()

    def finish(self, rows: list[list[int]]) -> None:
        """Waits for who has knocked, as the ranks say, and for every answer."""
        limit = time.monotonic() + self.patience
        knocked = [
            r for r in self.there if r > self.rank and rows[r][self.rank] == _WELL
        ]
        while self.unanswered or not all(self.said[r] for r in knocked):
            if time.monotonic() > limit:
                late = [*self.unanswered, *(r for r in knocked if not self.said[r])]
                self._fail(late, TimeoutError(errno.ETIMEDOUT, "late"))
                break
            self.admit()

    def _fail(self, ranks: Iterable[int], error: OSError) -> None:
        for rank in list(ranks):
            self.said[rank] = min(error.errno or errno.EIO, _WELL - 1)

    def reason(self, rank: int, says: int) -> str:
        """The reason why ``rank``, which ``says`` its own, is not reached."""
        mine, told = self.said[rank], says not in (_UNASKED, _WELL)
        # What this rank meets when the other shuts its door says nothing of why.
        shut = errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE, errno.ECONNREFUSED
        whose = rank if told and mine in (_UNASKED, _WELL, *shut) else self.rank
        number = says if whose == rank else mine
        if number == _TWO_USERS:
            return "another user's processes"
        return f"rank {whose}: {os.strerror(number)}"

    def close(self, ranks: Iterable[int]) -> None:
        """Lets go of these ranks, and of all who are none."""
        for rank in list(ranks):
            if rank in self.others:
                self.others.pop(rank)[0].close()
        for one in [*self.strangers, *self.unanswered.values()]:
            one.close()


def _warn(whom: str, why: str) -> None:
    warn(
        f"no memory to share with {whom} ({why}): messages to them go by gloo, as by "
        "make_mesh(shared_memory=False)",
        RuntimeWarning,
    )


def host() -> str:
    """This kernel's run, and the network namespace on it."""
    run = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{run}/{os.stat('/proc/self/ns/net').st_ino}"


def _is_ours(connection: socket.socket) -> bool:
    """True if the same user's process is at the other end."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PROCESS.size)
    return _PROCESS.unpack(said)[1] == os.getuid()


def _mapped(descriptors: list[int], flags: int) -> SharedMemory:
    """The memory whose descriptor has come.

    Raises:
        OSError: this process can have no more descriptors, or addresses.
    """
    if not descriptors:
        cut = flags & socket.MSG_CTRUNC
        number = errno.EMFILE if cut else errno.EPROTO
        raise OSError(number, os.strerror(number))
    return SharedMemory(descriptors[0])

"""The processes of one host find each other, and exchange sockets and memory.

Two processes are on one host if they run under one kernel and in one network namespace:
only there can their sockets meet.
"""

from __future__ import annotations

import os
import socket
import struct
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from fsfunc.comm.backends.neighbours import Neighbours
from fsfunc.comm.backends.shared_memory import shared_file

_RANK = struct.Struct("<q")
_PROCESS = struct.Struct("3i")  # its number, its user and his group, as Linux says them
_LINUX = hasattr(os, "memfd_create")


class Door:
    """A socket by which the other processes of a host reach this one.

    Args:
        opens: whether they may.

    ``address`` is what to tell them: the host, and a name on it; "" without a door.

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
                warnings.warn(
                    f"no memory to share with processes of this host ({error}): "
                    "messages to them go by gloo, as by make_mesh(shared_memory=False)",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _open(self) -> None:
        self.file = shared_file()
        self.socket, name = socket.socket(socket.AF_UNIX), uuid.uuid4().hex
        self.socket.bind(f"\0fsfunc-{name}")  # without a file
        self.socket.listen(1024)
        self.address = f"{host()} {name}"

    def meet(
        self, rank: int, addresses: Mapping[int, str], limit: float
    ) -> Neighbours | None:
        """The processes whose address is on this host; all of them call it.

        Args:
            limit: how many seconds to wait for each.

        Raises:
            OSError: one does not come, or its memory finds no addresses here.
        """
        here, _, _ = self.address.partition(" ")
        told = {r: a.split() for r, a in addresses.items() if a}
        there = {r: name for r, (where, name) in told.items() if where == here}
        if not there.keys() - {rank}:
            return None
        file, door = self.file, self.socket
        assert door is not None, "an address is of an open door"
        found: dict[int, socket.socket] = {}
        for other in sorted(r for r in there if r < rank):
            found[other] = connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(limit)
            connection.connect(f"\0fsfunc-{there[other]}")
            socket.send_fds(connection, [_RANK.pack(rank)], [file])
        memories = {}
        door.settimeout(limit)
        for _ in range(sum(r > rank for r in there)):
            connection = next(c for c in _callers(door) if _is_ours(c))
            connection.settimeout(limit)
            name, memory = _received(connection)
            found[name], memories[name] = connection, memory
            socket.send_fds(connection, [_RANK.pack(rank)], [file])
        for other in sorted(r for r in there if r < rank):
            _, memories[other] = _received(found[other])
        others = {r: (found[r], memories[r]) for r in sorted(found)}
        return Neighbours(os.dup(file), others, limit)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _callers(door: socket.socket) -> Iterator[socket.socket]:
    while True:
        yield door.accept()[0]


def host() -> str:
    """This kernel's run, and the network namespace on it."""
    run = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{run}/{os.stat('/proc/self/ns/net').st_ino}"


def _is_ours(connection: socket.socket) -> bool:
    """True if the same user's process is at the other end; closes it otherwise."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PROCESS.size)
    if _PROCESS.unpack(said)[1] == os.getuid():
        return True
    connection.close()
    return False


def _received(connection: socket.socket) -> tuple[int, int]:
    """The rank at the other end, and the descriptor of its memory."""
    said, descriptors, _, _ = socket.recv_fds(connection, _RANK.size, 1)
    if len(said) < _RANK.size or not descriptors:
        raise ConnectionError("a process of this host has ended")
    return _RANK.unpack(said)[0], descriptors[0]

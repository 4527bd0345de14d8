"""Two hosts on this machine: network namespaces, with a slow link between them.

A namespace lives as long as the process that holds it, which ends with this one, so
that nothing is left behind however it ends. Both ends of the link are `wire`, a veth
pair, each shaped by a token bucket (`tc tbf`): `mbit` in either direction.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LINK = "wire"
CLONE_NEWNET = 0x40000000  # Linux setns, unshare: of a network namespace
FRAME = 66  # bytes of headers: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12
# A header has one size: selective acknowledgements would make some of them longer.
HELD = "echo 0 > /proc/sys/net/ipv4/tcp_sack; echo held; exec cat"
PATIENCE = 10.0  # seconds for one command of iproute2


class NotAllowed(RuntimeError):
    """This process may not make network namespaces, or shape what they send."""


class Counted(NamedTuple):
    """What the kernel has counted at one end of the link, and TCP's repetitions."""

    sent: int
    sent_packets: int
    received: int
    received_packets: int
    repeated: int

    def since(self, before: Counted) -> Counted:
        return Counted(*(b - a for a, b in zip(before, self, strict=True)))

    @property
    def stream(self) -> int:
        """Bytes without the headers of frames, both ways: what programs wrote."""
        packets = self.sent_packets + self.received_packets
        return self.sent + self.received - FRAME * packets


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Gives the paths of two namespaces, joined by a link that is not shaped yet.

    Raises:
        NotAllowed: with what the system said.
    """
    with contextlib.ExitStack() as held:
        pids = [held.enter_context(_namespace()) for _ in range(2)]
        ends = [f"{LINK} netns {pid}" for pid in pids]
        _run(f"ip link add name {ends[0]} type veth peer name {ends[1]}")
        for i, pid in enumerate(pids):
            _run("ip link set lo up", pid)
            _run(f"ip link set {LINK} addrgenmode none", pid)  # no chatter of IPv6
            _run(f"ip addr add 10.0.0.{i + 1}/24 dev {LINK}", pid)
            # One frame a packet: else the kernel counts one header for many.
            _run(f"ip link set {LINK} up gso_max_segs 1", pid)
        yield [f"/proc/{pid}/ns/net" for pid in pids]


def shape(hosts: list[str], mbit: float) -> None:
    """Lets `mbit` Mbit/s through, in either direction, and drops nothing early."""
    for host in hosts:
        limits = f"rate {mbit}mbit burst 32kb limit 4mb"
        _run(f"tc qdisc replace dev {LINK} root tbf {limits}", _holder(host))


def join(host: str) -> None:
    """Moves this thread, and those that it will start, to a host's network."""
    handle = os.open(host, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {host}")
    finally:
        os.close(handle)
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def counted() -> Counted:
    """The counters of this host's end of the link, and of its TCP."""
    here = Path("/proc/thread-self/net")  # those of this thread's namespace
    lines = (line.split(":") for line in (here / "dev").read_text().splitlines())
    found = {line[0].strip(): line[1].split() for line in lines if len(line) > 1}[LINK]
    names, values = (
        line.split()
        for line in (here / "snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    repeated = dict(zip(names, values, strict=True))["RetransSegs"]
    return Counted(*(int(x) for x in (found[8], found[9], *found[:2], repeated)))


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Gives the process that holds a new namespace: it ends when its input does."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", HELD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as holder:
        assert holder.stdout and holder.stderr
        try:
            if not holder.stdout.readline():
                raise NotAllowed(holder.stderr.read().decode().strip())
            yield holder.pid
        finally:
            holder.kill()


def _holder(host: str) -> int:
    return int(Path(host).parts[2])


def _run(command: str, pid: int | None = None) -> None:
    within = [] if pid is None else ["nsenter", f"--net=/proc/{pid}/ns/net"]
    try:
        done = subprocess.run(
            [*within, *command.split()],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except OSError as error:  # no iproute2
        raise NotAllowed(str(error)) from error
    if done.returncode:
        raise NotAllowed(f"{command}: {done.stderr.strip()}")

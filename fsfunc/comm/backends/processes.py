"""Real processes over torch.distributed: NCCL where there are GPUs, gloo elsewhere.

``make_mesh`` calls `connect` in each process, which returns its `ProcessLink`. On the
CPU, processes of one host exchange messages through memory that they share (see
``neighbours``), and processes of two hosts by gloo.

What ranks compare. A collective outside transformed functions (called by hand, by
``unshard``, by ``global_norm`` of a state), and those of the first call of a function
that was neither placed nor given to ``init_state``, are sent with a header of 512 bytes
that describes them: if headers differ, every rank raises. Mistakes are likely there,
and one more message costs little. A transformed step is compared as a program, once
(see ``comparison``), and its thousands of collectives have no headers, unless
``FSFUNC_CHECK=1`` is set: then every collective and every transfer has one. On the CPU
a header is sent at the same time as the data; on NCCL before it, and transfers have
none.

Different collectives without headers are never matched on the CPU (see ``exchange``):
the ranks wait until the group's timeout, and raise. A rank that waits in vain asks the
others where they are (see ``watchdog``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsfunc import _torch
from fsfunc._torch.versions import all_gather_single
from fsfunc.comm.attribution import current_label, source_line
from fsfunc.comm.backends.channels import Channel
from fsfunc.comm.backends.exchange import Exchange, compare_gathered, pack_header
from fsfunc.comm.backends.link import (
    CollectiveCall,
    CollectiveMismatch,
    GroupOfRanks,
    Handle,
    Link,
    PeerFailed,
    call_signature,
    checks_every_call,
    digest,
)
from fsfunc.comm.backends.neighbours import HUNG_UP, Disconnected, Neighbours
from fsfunc.comm.backends.point_to_point import Transfers
from fsfunc.comm.backends.process_collectives import Pairs, issue
from fsfunc.comm.backends.process_groups import (
    ANSWERS,
    Groups,
    ask_store,
    hang_up,
    is_of_others,
    is_torn,
    meet,
    within,
)
from fsfunc.comm.backends.same_host import Door
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.mesh import Mesh
from fsfunc.comm.operations import OPERATIONS
from fsfunc.comm.watch.watchdog import FlightRecord, patience_of, the_watchdog
from fsfunc.runtime.memory import BufferPool


class ProcessLink(Link):
    """This process's connection; c10d groups are made once, in one order everywhere.

    Args:
        axes: those of its mesh.
        timeout: how long the groups that it makes wait for a rank.
    """

    def __init__(self, axes: Sequence[str], timeout: timedelta | None = None) -> None:
        self.rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        self.world = _unlinked_group(axes, ranks, self.rank)
        self.pool = BufferPool()  # for what transforms send
        self.results = BufferPool()
        self.neighbours: Neighbours | None = None  # the processes of this host
        self.fake = dist.get_backend() == "fake"  # torch's backend that sends nothing
        self.paired = not self.fake  # whether CPU tensors are sent pair by pair
        self.device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.checks = checks_every_call()
        self.issued: Counter[tuple[int, ...]] = Counter()  # collectives, by ranks
        self.used: dict[tuple[int, ...], GroupOfRanks] = {}  # groups that issued any
        self.groups = Groups(timeout).use_world()
        self.patience = patience_of(self.groups.timeout)
        if self.groups.timeout is not None:
            self.timeout = self.groups.timeout.total_seconds()
        self.watchdog = the_watchdog()
        # Ranks ask each other where they are by the store in which they met. Of a
        # process group that the user made, torch has it.
        if dist.get_world_size() > 1 and not self.fake:
            store = _STORE_OF.get(dist.group.WORLD) or _torch.default_store()
            self.watchdog.join(self.rank, dist.get_world_size(), store)
        self.flight, self.board = self.watchdog.flight, self.watchdog.mailbox
        self.dropped: list[Exchange] = []  # before they were over
        self.transfers = Transfers(self.groups, self.checks, self.flight)

    def use_neighbours(self, neighbours: Neighbours | None) -> None:
        """Uses the processes of this host, until torch drops its group."""
        self.neighbours = self.transfers.neighbours = neighbours
        # What transforms send lies in shared memory then, and is not copied to it.
        if neighbours is not None:
            self.pool = neighbours.pool
            neighbours.close_with(dist.group.WORLD)  # type: ignore[arg-type]

    def connect(self, rank_tuples: Sequence[tuple[int, ...]]) -> None:
        """Makes the c10d group of each rank tuple; all processes call this alike."""
        make_groups = []
        for ranks in rank_tuples:
            # NCCL's own collectives join results in the order of the group's ranks,
            # which torch would sort. On gloo messages go pair by pair, by index along
            # the axis, and need no order.
            unsorted = list(ranks) != sorted(ranks) and dist.get_backend() != "gloo"
            order: Any = {"sort_ranks": False} if unsorted else {}
            if len(ranks) > 1:
                make_groups.append(partial(self.groups.make, ranks, **order))

        def make() -> None:
            for make_group in make_groups:
                make_group()
            self.transfers.connect(rank_tuples)

        _make_groups(self.world, make)

    def for_mesh(self, mesh: Mesh) -> Link:
        return mesh.link or self  # which has the groups of its own axes

    def send(self, x: Tensor, group: GroupOfRanks, to: int, name: str = "") -> Handle:
        return self._issue_or_close(self.transfers.send, x, group, to, name)

    def receive(
        self, like: Tensor, group: GroupOfRanks, source: int, name: str = ""
    ) -> Handle:
        return self._issue_or_close(self.transfers.receive, like, group, source, name)

    def _issue_or_close(
        self, issue: Callable[..., Handle], *args: Any, **kwargs: Any
    ) -> Handle:
        """Returns what ``issue`` does, which sends this rank's part of a call.

        Three errors close the mesh, as ranks may then be at different places: a closed
        connection, whose error names the rank, a mismatch, and an interrupt.
        """
        try:
            return issue(*args, **kwargs)
        except PeerFailed:
            raise  # of a wait, which has closed the mesh
        except RuntimeError as error:
            record = self.flight.records[-1]
            if is_torn(error):
                other = error.rank if isinstance(error, Disconnected) else None
                failed = self.watchdog.failed(record, other, error)
                self.close(record.call, failed)
                raise failed from error
            if isinstance(error, CollectiveMismatch):
                self.close(record.call, error)
            # Any other error is of the call itself, as a TypeError is: the mesh is
            # closed or destroyed already, or torch refuses the tensor. Such a call
            # raises on every rank alike, so all are still at one place.
            raise
        except KeyboardInterrupt as error:  # some of its messages may have been sent
            self.close(self.flight.records[-1].call, error)
            raise

    def close(self, call: CollectiveCall | str, error: BaseException) -> None:
        message = f". It says: {str(error)[:1000]}" if str(error) else ""
        why = (
            f"this mesh is closed since {type(error).__name__} in {call}, as its ranks "
            "may be at different places; to go on, call torch.distributed."
            f"destroy_process_group() and ff.make_mesh on each{message}"
        )
        self.groups.close(why)
        self.transfers.down.close(why)
        # What is under way raises in its wait, at once: its messages may never come.
        for other in list(self.flight.records):
            if other.link() is self and not other.ended:
                other.failed = True

    def _finish_dropped(self) -> None:
        """Waits for what an error, or a caller, dropped while it was under way."""
        # In the order of their calls: they were dropped in any, and the second hop of
        # an all-reduce runs in its wait, to which all ranks must come in one order.
        while self.dropped:
            oldest = min(self.dropped, key=lambda exchange: exchange.record.begun)
            oldest.wait()
            self.dropped.remove(oldest)

    def note_raised(self, error: BaseException) -> None:
        """Notes that ``error`` left the program of this rank: others may ask."""
        self.watchdog.note_raised(error)

    def end(self) -> None:
        """Compares that all ranks have ended, under ``FSFUNC_CHECK=1``.

        Otherwise a rank that skipped a step would end without an error, and only the
        others would raise.
        """
        if self.checks and self.paired and self.device == "cpu":
            # Headers have tags of their own, so "end" meets whatever another rank
            # calls. On NCCL, which has no tags, it would be matched with another's
            # data.
            for group in list(self.used.values()):
                self.start("end", torch.empty(0, device="cpu"), group).wait()

    def gone(self) -> list[int]:
        """Returns the ranks of this host that have closed their connections."""
        return [] if self.neighbours is None else self.neighbours.gone()

    def hang_up(self, ranks: tuple[int, ...]) -> None:
        """Ends this process's waits for ``ranks``, one of which has gone."""
        if self.neighbours is not None:
            self.neighbours.hang_up(ranks, HUNG_UP)
        with contextlib.suppress(RuntimeError):  # the group is gone already
            if (process_group := self.groups.get(ranks)) is not None:
                hang_up(process_group, [r for r in ranks if r != self.rank])

    def trim(self) -> None:
        self.results.trim(0)

    def start(
        self,
        op: str,
        x: Tensor,
        group: GroupOfRanks,
        *,
        out: Tensor | None = None,
        name: str = "",
        any_order: bool = False,
        read_only: bool = False,
        **kwargs: Any,
    ) -> Handle:
        x, process_group = x.detach(), self.groups.get(group.ranks)
        if self.dropped:
            self._finish_dropped()
        if self.checks:  # a user's collective, which has no buffer, has its unit's name
            name = name or current_label()[0]
        # Of three ranks and more an all-reduce in two hops sends fewer bytes; of a
        # small tensor messages count, and one hop has fewer. The second hop runs in the
        # wait, to which all ranks must then come in one order.
        if group.size > 2 and x.numel() >= 1024 and op in OPERATIONS:
            by_pairs = x.device.type == "cpu" and self.paired
            if by_pairs and OPERATIONS[op].all_reduces:
                kwargs = {"hops": 1 if any_order else 2}
        signature = call_signature(op, kwargs, group.axis, x, name)
        number = self.issued[group.ranks]
        self.issued[group.ranks] += 1
        if not number:
            self.used[group.ranks] = group
        record = self.flight.begin(signature, group, number)
        return self._issue_or_close(
            self._issue, record, group, x, out, process_group, read_only, **kwargs
        )

    def _issue(
        self,
        record: FlightRecord,
        group: GroupOfRanks,
        x: Tensor,
        out: Tensor | None,
        process_group: dist.ProcessGroup | None,
        read_only: bool,
        **kwargs: Any,
    ) -> Handle:
        op, compared = record.signature[0], group.compared and not self.checks
        if x.device.type == "cpu" and self.paired:
            channel = Channel(process_group, group.ranks, self.neighbours)
            pairs = Pairs(record, group, channel, self.results, compared, read_only)
            return pairs.start(op, x, out, **kwargs)
        # Before the data, as NCCL has no tags: it would match unlike collectives. The
        # fake backend sends nothing.
        if not compared and not self.fake:
            record.line = source_line()
            header = pack_header(record, digest(record.signature)).to(x.device)
            compare_gathered(header, process_group, group.ranks)
        works, finish = issue(op, x, group, out, process_group, **kwargs)
        return Exchange([(None, work) for work in works], finish, x, record, group)


def connect(
    axes: Mapping[str, int],
    size: int,
    timeout: timedelta | None = None,
    shared_memory: bool = True,
    names: Mapping[str, tuple[str, ...]] | None = None,
) -> ProcessLink:
    """Connects this process to the others of a mesh of ``size`` ranks.

    Args:
        names: the mesh's names for several axes.
        timeout: that of all groups of the mesh; None: that of the process group, which
            the user may have started.
        shared_memory: whether processes of one host exchange messages through it.

    Raises:
        ValueError: the number of processes is not that of the mesh.
        RuntimeError: there is no process group, and torchrun's variables are not set.
    """
    if not dist.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            raise RuntimeError(
                'a mesh over "processes" needs torchrun, or init_process_group before '
                'it; in one process use backend="simulated"'
            )
        world = int(os.environ["WORLD_SIZE"])
        _check_size(axes, size, world)
        # NCCL sends from the current device, which would be the first one on every
        # rank.
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        rank = int(os.environ["RANK"])
        store = meet(rank, world, timeout)
        _begin(axes, backend, store, rank, world, timeout)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no such stderr
        if not faulthandler.is_enabled():
            faulthandler.enable()  # prints the line if a signal ends the process
    link = ProcessLink(tuple(axes), timeout)
    _compare_meshes(axes, names, link, shared_memory)
    _check_size(axes, size, dist.get_world_size())
    return link


def _begin(
    axes: Mapping[str, int],
    backend: str,
    store: dist.Store,
    rank: int,
    world: int,
    timeout: timedelta | None,
) -> None:
    """Makes the process group of all ranks, which have met in ``store``.

    Raises:
        PeerFailed: one of them has gone, or is stopped; names it.
    """
    limit, watchdog = timeout or dist.default_pg_timeout, the_watchdog()
    # Before the group: a rank that waits in vain while it is made can ask the others.
    if world > 1:
        ask_store(rank, world, limit, lambda: watchdog.join(rank, world, store))
    options = {"rank": rank, "world_size": world, "timeout": timeout}
    group = _unlinked_group(axes, tuple(range(world)), rank)
    begin = partial(dist.init_process_group, backend, store=store, **options)
    _make_groups(group, lambda: within(limit.total_seconds() + ANSWERS, begin))
    _STORE_OF[dist.group.WORLD] = store


# By the process group that was made here, the store in which its ranks have met.
_STORE_OF: weakref.WeakKeyDictionary[Any, dist.Store] = weakref.WeakKeyDictionary()


def _unlinked_group(
    axes: Iterable[str], ranks: tuple[int, ...], rank: int
) -> RankGroup:
    """Returns a group for error reports alone, of ranks that have no link yet."""
    return RankGroup(tuple(axes), ranks, rank, rank, None)  # type: ignore[arg-type]


def _make_groups(group: GroupOfRanks, make: Callable[[], object]) -> None:
    """Calls ``make``, which makes groups of the ranks of ``group``.

    Raises:
        PeerFailed: another rank has gone, or is stopped; names it.
    """
    watchdog, nothing = the_watchdog(), torch.empty(0, device="cpu")
    signature = call_signature("make_mesh", {}, group.axis, nothing, "")
    record = watchdog.flight.begin(signature, group, 0)
    record.waits()
    try:
        make()
    except (RuntimeError, TimeoutError) as error:
        if not is_of_others(error):  # an error of this process: no rank is to blame
            raise
        raise watchdog.failed(record, None, error) from error
    finally:
        record.ended = time.monotonic()


def _compare_meshes(
    axes: Mapping[str, int],
    names: Mapping[str, tuple[str, ...]] | None,
    link: ProcessLink,
    shared_memory: bool,
) -> None:
    """Raises on every rank if their meshes differ, or one makes none.

    The processes of one host find each other by the same messages.
    """
    world, n = dist.group.WORLD, dist.get_world_size()
    if link.fake or n == 1:
        return
    options = f", names={names}" if names else ""
    options += ", FSFUNC_CHECK=1" if link.checks else ""
    options += "" if shared_memory else ", shared_memory=False"
    text = f"makes a mesh {dict(axes)}, timeout {link.groups.timeout}{options}"
    mesh_digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    door = Door(shared_memory and dist.get_backend() == "gloo")
    # After the digest: each rank's address is its own.
    text += f"\n{door.address}"
    header, ranks = pack_header(text, mesh_digest).to(link.device), tuple(range(n))
    group = RankGroup(tuple(axes), ranks, link.rank, link.rank, link)
    record = link.flight.begin(
        call_signature("make_mesh", {}, group.axis, header, ""), group, 0
    )
    record.waits()
    try:
        texts = compare_gathered(header, world, ranks, "ranks make unlike meshes")
        addresses = {r: text.partition("\n")[2] for r, text in texts.items()}
        gather_bytes = partial(_ByteGather, n, world)
        neighbours = door.meet(link.rank, addresses, link.timeout, gather_bytes)
        link.use_neighbours(neighbours)
    except CollectiveMismatch:  # a RuntimeError, which says already what differs
        raise
    # Another rank's: two of these are OSErrors too. Any other OSError is this
    # process's.
    except (RuntimeError, TimeoutError, ConnectionError) as error:
        raise link.watchdog.failed(record, None, error) from error
    except OSError as error:
        raise RuntimeError(
            f"cannot share memory with other processes of this host: {error}; with "
            "make_mesh(..., shared_memory=False) they send by gloo's sockets"
        ) from error
    finally:
        door.close()
    record.ended = time.monotonic()


class _ByteGather:
    """A gather of some bytes of each rank, on its way by gloo."""

    def __init__(
        self, n: int, process_group: dist.ProcessGroup | None, local_bytes: bytes
    ):
        row = torch.frombuffer(bytearray(local_bytes), dtype=torch.uint8)
        self.rows = torch.empty(n, len(local_bytes), dtype=torch.uint8, device="cpu")
        self.work: Any = all_gather_single(
            self.rows.view(-1), row, group=process_group, async_op=True
        )

    def done(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> list[list[int]]:
        self.work.wait()
        return self.rows.tolist()


def _check_size(axes: Mapping[str, int], size: int, world: int) -> None:
    if size != world:
        raise ValueError(
            f"the mesh {dict(axes)} has {size} ranks, but there are {world} processes: "
            f"choose axes whose product is {world}, or --nproc-per-node {size}"
        )

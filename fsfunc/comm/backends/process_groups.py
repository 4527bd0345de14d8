"""The process groups of a mesh: their rendezvous, closing, and end.

``processes.connect`` lets the ranks meet in a store (`meet`), and a link makes and asks
for torch's groups here (`Groups`).

A store for one attempt. torchrun may give restarted workers the store that those before
them wrote to (torch 2.13 does, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1), with
the old addresses of gloo or NCCL. So the ranks first agree on a new prefix.

A group is closed after an error. Ranks may then be at different collectives, whose
messages could be matched, as a tag is used again after 4,096 collectives.

Groups belong to torch, and are referred to weakly. A group has threads. If a mesh kept
one alive beyond `destroy_process_group`, a thread would free a tensor while Python
ends, which ends the process by SIGABRT.

A call to torch's store sends a question and reads the answer, and waits for ever if the
process that has the store is stopped: so it is made in a thread, with a limit.
"""

from __future__ import annotations

import contextvars
import errno
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from fsfunc import _torch
from fsfunc.comm.backends.neighbours import Disconnected
from fsfunc.comm.watch.watchdog import NO_DESCRIPTOR, out_of_descriptors

_T = TypeVar("_T")
ANSWERS = 5.0  # seconds for a store to answer after all that it waits for
_LAST = 0.5  # seconds for rank 0, which has the store, to tell the others who is late
_LAUNCHED = timedelta(minutes=5)  # in which all that torchrun starts at once have come


def meet(rank: int, size: int, timeout: timedelta | None) -> dist.Store:
    """Returns the store of the processes of this attempt, once all have joined.

    It is that of torchrun's agent, else one that rank 0 has.

    Args:
        timeout: how long to wait for a rank; those of torchrun, which may import for
            longer, are waited for at least five minutes.

    Raises:
        TimeoutError: ranks do not come, or the store does not answer; names them.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(f"{name} is not set: where do the ranks meet?")
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timeout or (_LAUNCHED if launched else dist.default_pg_timeout)
    limit = max(limit, _LAUNCHED) if launched else limit
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server, seconds = rank == 0 and not launched, limit.total_seconds()
    ask = partial(ask_store, rank, size, limit)

    def make_store() -> dist.Store:
        # Stored: on rank 0 the server ends with this object, and others may still ask
        # it.
        if address not in _STORES:
            _STORES[address] = dist.TCPStore(
                *address,
                size,
                is_server,
                limit,
                wait_for_workers=False,
                multi_tenant=True,
            )
        return _STORES[address]

    store = ask(make_store)
    return ask(lambda: fresh(store, rank, size, seconds))


def ask_store(rank: int, size: int, limit: timedelta, call: Callable[[], _T]) -> _T:
    """Returns ``call()``, which asks the store in which the ranks meet.

    Raises:
        TimeoutError: the store does not answer, or has gone; names who has it.
    """
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return within(limit.total_seconds() + ANSWERS, call)
    except (dist.DistError, Unanswered) as error:
        if out_of_descriptors():  # this process is to blame, not who has the store
            raise OSError(errno.EMFILE, f"rank {rank}: {NO_DESCRIPTOR}") from error
        if rank == 0 and not launched:  # it has the store: no other is to blame
            raise
        owner = "the launcher" if launched else "rank 0"
        is_silent = isinstance(error, Unanswered)
        state = "is stopped, or out of reach" if is_silent else "has gone"
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TimeoutError(
            f"{owner} did not join rank {rank} of {size}, or {state}; it keeps the "
            f"store at {address}: {str(error).splitlines()[0]}"
        ) from error


_STORES: dict[tuple[str, int], dist.Store] = {}  # by address; as long as this process


def fresh(store: dist.Store, rank: int, size: int, patience: float) -> dist.Store:
    """Returns ``store`` under a prefix that only the ranks of this attempt know.

    Each rank writes a random number; rank 0 lists those that it finds, until every rank
    has confirmed its own number in that list. Numbers of an earlier attempt are never
    confirmed.

    Raises:
        TimeoutError: a rank does not come.

    Cost: a few messages to the store.
    """
    own_number, deadline = uuid.uuid4().hex, time.monotonic() + patience
    store.set(f"here/{rank}", own_number)

    def read(key: str) -> str:  # `get` alone would wait until the key is set
        return store.get(key).decode() if store.check([key]) else ""

    def name_late_ranks() -> str:
        if own_number not in numbers.split(","):
            return "rank 0"  # or it would have listed this rank
        late = ", ".join(
            f"rank {r}" for r in range(size) if read(f"seen/{r}") != numbers
        )
        if rank == 0:
            store.set("late", f"{numbers}\n{late}")
            time.sleep(_LAST)
        return late

    late_ranks = ""
    while not late_ranks:
        # Each turn anew: numbers that are found at first may be of an earlier attempt.
        if rank == 0:
            store.set("list", ",".join(read(f"here/{r}") for r in range(size)))
        numbers = read("list")
        if own_number in numbers.split(","):
            store.set(f"seen/{rank}", numbers)
            if rank == 0 and all(read(f"seen/{r}") == numbers for r in range(size)):
                store.set("agreed", numbers)
            if read("agreed") == numbers:
                name = uuid.uuid5(uuid.NAMESPACE_OID, numbers)
                return dist.PrefixStore(f"attempt/{name}", store)
            late_numbers, _, names = read("late").partition("\n")
            late_ranks = names if late_numbers == numbers else ""  # of this attempt
        if time.monotonic() > deadline:
            late_ranks = late_ranks or name_late_ranks()
        time.sleep(0.01)
    raise TimeoutError(
        f"{late_ranks} did not join rank {rank} of {size} in {patience:.0f} s"
    )


class _MeshGroup:
    """A process group for as long as torch has it, and until an error closes it.

    ``get()`` returns it, or None; once it is closed, it raises.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.get: Callable[[], dist.ProcessGroup | None] = lambda: None
        if group is not None:
            self.get = weakref.ref(group)
        self.reason = ""  # why it is closed
        _GROUPS.add(self)

    def close(self, why: str) -> None:
        def refuse() -> NoReturn:
            raise RuntimeError(self.reason)

        self.reason = self.reason or why
        self.get = refuse


_GROUPS: weakref.WeakSet[_MeshGroup] = weakref.WeakSet()  # all of this process
# That of all ranks, by torch's: meshes share it, and an error on one closes it for all.
_WORLD: weakref.WeakKeyDictionary[dist.ProcessGroup, _MeshGroup] = (
    weakref.WeakKeyDictionary()
)


class Groups:
    """Groups by the ranks in them, for as long as torch has them.

    Args:
        timeout: how long they wait for a rank. None: as long as the group of all
            ranks; torch gives that group's timeout to no other group by itself.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._by_ranks: dict[tuple[int, ...], _MeshGroup] = {}
        self.timeout = timeout or _torch.group_timeout(dist.group.WORLD)

    def use_world(self) -> Groups:
        """Takes the group of all ranks that is there already, if it waits as long.

        Raises:
            RuntimeError: an error of another mesh has closed it.
        """
        world: Any = dist.group.WORLD
        group = _WORLD.setdefault(world, _MeshGroup(world))
        group.get()
        if self.timeout == _torch.group_timeout(world):
            self._by_ranks[tuple(range(dist.get_world_size()))] = group
        return self

    def make(self, ranks: tuple[int, ...], **options: Any) -> None:
        """Makes the group of ``ranks``, once; all processes must call it alike."""
        if ranks not in self._by_ranks:
            make = partial(dist.new_group, list(ranks), self.timeout, **options)
            # torch's fake groups have no timeout, and nothing to wait for.
            limit = self.timeout
            group: Any = (
                make()
                if limit is None
                else within(limit.total_seconds() + ANSWERS, make)
            )
            # To ranks outside of it torch gives a marker, not a group.
            is_member = dist.get_rank() in ranks
            self._by_ranks[ranks] = _MeshGroup(group if is_member else None)

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Returns the group of ``ranks``, with this rank in it; None if none was made.

        Raises:
            RuntimeError: it was destroyed, or is closed.
        """
        if ranks not in self._by_ranks:
            return None
        group = self._by_ranks[ranks].get()
        if group is None or not dist.is_initialized():
            raise RuntimeError(
                f"the process group of ranks {list(ranks)} is gone "
                "(destroy_process_group): make the mesh anew, after init_process_group"
            )
        return group

    def close(self, why: str) -> None:
        """Has all later collectives raise, unless an earlier error has closed them."""
        for group in self._by_ranks.values():
            group.close(why)


def _close_in_fork() -> None:
    """Has a fork refuse collectives and free no group.

    A fork has none of gloo's threads, and would wait for them for ever.
    """
    if not dist.is_initialized():
        return
    why = (
        f"process {os.getpid()} is a fork of process {os.getppid()}, which is rank "
        f"{dist.get_rank()}: a fork, such as a worker of a data loader, is no rank and "
        "has no collectives. Call them in the process that made the mesh"
    )
    for group in _GROUPS:
        group.close(why)
    _torch.never_free_process_groups()


os.register_at_fork(after_in_child=_close_in_fork)


def hang_up(group: dist.ProcessGroup, others: Sequence[int]) -> None:
    """Ends every wait of this process in a gloo group, from another thread.

    Gloo has no call for that. But a wait that times out closes the connections of its
    group, which ends all other waits: so this makes a wait that does. One for each of
    the ``others``, as a wait for a rank that has ended returns at once, and closes
    none.
    """
    unused_tag = 2**31 - 1  # nothing is ever sent under it
    for other in others if dist.get_backend(group) == "gloo" else ():
        try:
            byte = torch.zeros(1, device="cpu")
            work: Any = dist.irecv(byte, other, group, unused_tag)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # it timed out, as it is meant to, or that rank has ended


def is_of_others(error: BaseException) -> bool:
    """Returns whether an error in making groups says that another rank does not come.

    Else it is this process's own, such as that it can have no more descriptors.
    """
    text, others = str(error), (dist.DistError, TimeoutError)
    return isinstance(error, others) or any(part in text for part in _OTHERS)


# In gloo's and NCCL's messages, without their first letters: either case occurs.
_OTHERS = ("imed out", "imeout", "onnection closed", "onnection reset", "onnect failed")


def is_torn(error: RuntimeError) -> bool:
    """Returns whether an error says that a connection is closed.

    torch raises gloo's as plain RuntimeErrors, which only their text tells from others.
    """
    text = str(error)
    return isinstance(error, Disconnected) or "gloo" in text or "pair closure" in text


class Unanswered(TimeoutError):
    """A call that has not returned in time; its thread still waits for the answer."""


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Returns ``call()``, made in a thread of its own.

    Raises:
        Unanswered: it takes longer; nothing can end it, so it goes on in that thread.

    >>> within(5, lambda: 3)
    3
    """
    over = threading.Event()
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    context = contextvars.copy_context()
    # A daemon: a thread that still waits must not keep Python from ending.
    thread = threading.Thread(target=context.run, args=(run,), daemon=True)
    thread.start()
    if not over.wait(seconds):
        raise Unanswered(f"timed out: no answer in {seconds:.0f} s")
    thread.join()
    try:
        if errors:
            raise errors[0]
        return results[0]
    finally:
        # The error's traceback refers to this frame: a circle would delay the freeing
        # of its tensors until the collector runs.
        errors.clear()

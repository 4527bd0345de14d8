"""The process groups of a mesh: where they meet, and who keeps them.

A store for one attempt. torchrun may show the workers that it restarts the very store
that those before them wrote to (torch 2.13 does, unless
TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1), and with it where gloo, or NCCL, listened
then. So the ranks first agree on a prefix that nobody used before.

Groups that torch owns. A group has threads. One that outlived `destroy_process_group`,
because a mesh still holds its group, would let go of a tensor while Python ends, and
with that end the process by SIGABRT.
"""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsfunc import _torch

__all__ = ["Groups", "agent_store", "fresh", "hang_up", "is_torn"]

_PATIENCE = 300.0  # seconds for all ranks to come


def agent_store() -> Any:
    """The store of torchrun's agent, under a prefix of this attempt; None elsewhere."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return fresh(dist.TCPStore(host, port, size, is_master=False), rank, size)


def fresh(store: Any, rank: int, size: int, patience: float = _PATIENCE) -> Any:
    """``store`` under a prefix that the ranks of this attempt alone share.

    Each rank leaves a number of its own; rank 0 lists those that it finds until every
    rank has found its own number in that very list. What an earlier attempt left has
    other numbers, and nobody to confirm it.

    Raises:
        TimeoutError: a rank does not come.

    Cost: a few messages to the store.
    """
    mine, limit = uuid.uuid4().hex, time.monotonic() + patience
    store.set(f"here/{rank}", mine)

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    while time.monotonic() < limit:
        if rank == 0:
            store.set("list", ",".join(read(f"here/{r}") for r in range(size)))
        found = read("list")
        if mine in found.split(","):
            store.set(f"seen/{rank}", found)
            if rank == 0 and all(read(f"seen/{r}") == found for r in range(size)):
                store.set("agreed", found)
            if read("agreed") == found:
                name = uuid.uuid5(uuid.NAMESPACE_OID, found)
                return dist.PrefixStore(f"attempt/{name}", store)
        time.sleep(0.01)
    raise TimeoutError(
        f"rank {rank} of {size} waited {patience:.0f} s for the others to start"
    )


class Groups:
    """Groups by the ranks in them, for as long as torch has them.

    Args:
        timeout: how long they wait for a rank. None: as long as the group of all
            ranks, whose own timeout torch gives to no other group.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._found: dict[tuple[int, ...], Callable[[], Any]] = {}
        self.timeout = timeout or _torch.group_timeout(dist.group.WORLD)

    def use_world(self) -> Groups:
        """Takes the group of all ranks that is there already, if it waits as long."""
        world = dist.group.WORLD
        if self.timeout == _torch.group_timeout(world):
            self._found[tuple(range(dist.get_world_size()))] = weakref.ref(world)
        return self

    def make(self, ranks: tuple[int, ...], **options: Any) -> None:
        """Makes the group of ``ranks``, once; all processes call this alike."""
        if ranks not in self._found:
            group: Any = dist.new_group(list(ranks), self.timeout, **options)
            mine = dist.get_rank() in ranks  # others get a mark, and never ask for it
            self._found[ranks] = weakref.ref(group) if mine else lambda: None

    def get(self, ranks: tuple[int, ...]) -> Any:
        """The group of ``ranks``, which this rank is one of; None where none was made.

        Raises:
            RuntimeError: it was destroyed.
        """
        if ranks not in self._found:
            return None
        group = self._found[ranks]()
        if group is None or not dist.is_initialized():
            raise RuntimeError(
                f"the process group of ranks {list(ranks)} is gone "
                "(destroy_process_group): make the mesh anew, after init_process_group"
            )
        return group


def hang_up(group: Any, others: Sequence[int]) -> None:
    """Ends every wait of this process in a gloo group, from another thread.

    Gloo has no call for that. But one wait that lasts too long closes the connections
    of its whole group, and all others that wait there are told: so this is one. It is
    for each of the ``others``, as one that has ended is waited for no time at all.
    """
    nobodys = 2**31 - 1  # a tag that is never sent
    for other in others if dist.get_backend(group) == "gloo" else ():
        try:
            work: Any = dist.irecv(torch.zeros(1), other, group, nobodys)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass


def is_torn(error: RuntimeError) -> bool:
    """Whether it says that a connection of gloo's is closed."""
    text = str(error)
    return "gloo" in text or "pair closure" in text

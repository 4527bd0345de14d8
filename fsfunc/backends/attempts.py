"""A store for the ranks of one attempt, whatever the store at hand remembers.

torchrun may show the workers that it restarts the very store that those before them
wrote to (torch 2.13 does, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is 1), and with it
where gloo, or NCCL, listened then. So the ranks first agree on a prefix that nobody
used before.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import torch.distributed as dist

__all__ = ["agent_store", "fresh"]

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

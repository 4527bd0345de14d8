"""The c10d groups of a mesh, which torch owns.

A group has threads. One that outlived `destroy_process_group`, because a mesh still
holds its group, would let go of a tensor while Python ends, and with that end the
process by SIGABRT.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsfunc import _torch

__all__ = ["Groups"]


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

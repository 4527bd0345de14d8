"""The c10d groups of a mesh, which torch owns.

A group has threads. One that outlived `destroy_process_group`, because a mesh still
holds its group, would let go of a tensor while Python ends, and with that end the
process by SIGABRT.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["Groups"]


class Groups:
    """Groups by the ranks in them, for as long as torch has them."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], Callable[[], Any]] = {}

    @classmethod
    def of_world(cls) -> Groups:
        """The one that is there already, of all ranks."""
        groups, world = cls(), tuple(range(dist.get_world_size()))
        groups._found[world] = weakref.ref(dist.group.WORLD)
        return groups

    def make(self, ranks: tuple[int, ...], **options: Any) -> None:
        """Makes the group of ``ranks``, once; all processes call this alike."""
        if ranks not in self._found:
            group: Any = dist.new_group(list(ranks), **options)
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

"""Layout of 8-bit codes: by buffer, in whole blocks of the rank's part."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsfunc.comm.mesh import here
from fsfunc.optim.leaves import local, trainable
from fsfunc.runtime.block_codes import padded
from fsfunc.runtime.memory_spaces import moments_store, space_of
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import side_by_side
from fsfunc.sharded.placements import Split, room

__all__ = ["CodeGroup", "groups_of", "zero_codes"]


@dataclass
class CodeGroup:
    """Leaves whose moments lie side by side, and where on the rank each begins."""

    starts: dict[int, int]  # by the leaf's position
    room: int  # elements, padding of blocks included, on each rank that has any
    used: int  # those before the padding, on this rank
    first: Any

    @property
    def here(self) -> int:
        return 0 if is_sharded(self.first) and _absent(self.first.layout) else self.room


def groups_of(
    leaves: Sequence[Any], paths: Sequence[str]
) -> tuple[list[CodeGroup], int]:
    """Leaves by buffer, and a number that tells their layouts, alike on all ranks.

    By their layouts alone, whether they lie in the buffer just now or on their own.
    """
    active = [i for i, x in enumerate(leaves) if trainable(x)]
    flat = [i for i in active if is_sharded(leaves[i]) and leaves[i].layout.flat]
    loose = [[i] for i in active if i not in set(flat)]
    groups, said = [], []
    for members in [*side_by_side(leaves, flat), *loose]:
        first = leaves[members[0]]
        starts = dict.fromkeys(members, 0)
        if not is_sharded(first):
            size = used = first.numel()
        elif first.layout.flat is None:
            size = room(first.layout.shape, first.layout.parts)
            used = local(first).numel()
        else:
            size, at = first.layout.flat.chunk, here().mesh.coordinates()
            spans = {i: leaves[i].layout.buffer_range(at) for i in members}
            starts = {i: start for i, (start, _) in spans.items()}
            used = max(stop for _, stop in spans.values())
        groups.append(CodeGroup(starts, padded(size), used, first))
        for i in members:
            x = leaves[i]
            said.append(f"{paths[i]} {x.layout if is_sharded(x) else tuple(x.shape)}")
        said.append("")
    return groups, zlib.crc32("\n".join(said).encode())


def _absent(layout: Layout) -> bool:
    return bool(layout.owned) and layout.block(here().mesh.coordinates()) is None


def zero_codes(group: CodeGroup, per: int, dtype: torch.dtype) -> Any:
    """A zero for each ``per`` elements, laid out as what each rank has of its own."""
    first, count = group.first, group.room // per
    device = space_of(local(first)).on_device(local(first)).device
    if not is_sharded(first) or not first.layout.axes:
        return _zeros((count,), dtype, device)
    owned = first.layout.owned
    apart = {p.axis for p in owned}
    over = {a: n for a, n in first.layout.sizes.items() if a not in apart}
    splits = [Split(k, axis, n) for k, (axis, n) in enumerate(over.items())]
    shape = (*over.values(), count)
    layout = Layout(shape, dtype, (*owned, *splits), first.layout.name)
    part = layout.local_shape(here().mesh.coordinates())
    return Sharded(_zeros(part, dtype, device), layout)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the device, or where `init_state` wants moments to lie."""
    if (store := moments_store()) is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return store.empty(math.prod(shape), dtype, device).view(shape).zero_()

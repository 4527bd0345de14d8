"""The layout of 8-bit codes in a buffer, and a step by chunks of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch
from fsfunc.comm.mesh import here
from fsfunc.optim.block_codes import BLOCK, CHUNK, Coder, chance, padded
from fsfunc.optim.leaves import local, trainable
from fsfunc.optim.matching import Matched
from fsfunc.optim.places import fetched, meeting
from fsfunc.runtime.generators import mix
from fsfunc.runtime.memory_spaces import moments_store, space_of
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import side_by_side
from fsfunc.sharded.placements import Split, room


@dataclass
class CodeGroup:
    """Leaves whose moments lie side by side, and where on the rank each begins."""

    starts: dict[int, int]  # by the leaf's position
    room: int  # elements, padding of blocks included, on each rank that has any
    used: int  # those before the padding, on this rank
    first: Any


def groups_of(
    leaves: Sequence[Any], paths: Sequence[str]
) -> tuple[list[CodeGroup], int]:
    """Leaves by buffer, and a number that tells their layouts, alike on all ranks.

    By their layouts alone, whether they lie in the buffer just now or on their own.
    """
    active = [i for i, x in enumerate(leaves) if trainable(x)]
    is_flat = lambda x: bool(is_sharded(x) and x.layout.flat)  # noqa: E731
    flat = [i for i in active if is_flat(leaves[i])]
    loose = [[i] for i in active if not is_flat(leaves[i])]
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


class Stretch(NamedTuple):
    """A stretch of parameters and gradients, and where its moments begin."""

    param: Tensor
    grad: Tensor
    start: int
    decay: float


def stretches(
    matched: Matched, new: Any, decays: Sequence[float], groups: Sequence[CodeGroup]
) -> dict[int, list[Stretch]]:
    """By group, what is to be updated, in as few stretches as may be."""
    place = {
        i: (k, start) for k, g in enumerate(groups) for i, start in g.starts.items()
    }
    grads, found = matched.buffers[1].tensors, {}
    for decay, k, j in matched.cuts(decays):
        i = matched.active[matched.members[k][0] if j is None else j]
        group, start = place[i]
        if j is None:
            packed = matched.buffers[0].groups[k][1] is not None
            param, grad, start = new.tensors[k], grads[k], 0 if packed else start
        else:
            param, grad = local(new.leaves[j]), local(matched.trees[1][i])
        found.setdefault(group, []).append(Stretch(param, grad, start, decay))
    return found


Moved = Sequence[tuple[Tensor, Tensor]]  # codes or scales: the old, the new

MEAN, SQUARE = Coder(signed=True), Coder(signed=False)


class CodedStep:
    """A step of moments in 8 bits: codes are read and written a chunk at a time.

    Args:
        kernel: the step of what is decoded.
        coders: of each moment.
        count: of updates, which decides how codes are rounded.
    """

    def __init__(
        self, kernel: Callable[..., None], coders: Sequence[Coder], count: int
    ):
        self.kernel, self.coders, self.count = kernel, coders, count
        self.scratch: dict[torch.device, Tensor] = {}

    def write(
        self, number: int, group: CodeGroup, cuts: Sequence[Stretch], where: Moved
    ) -> None:
        """The step of a group; blocks of which nothing is updated keep their codes.

        ``where``: codes and scales of each moment in turn, old and new; these begin as
        the old ones are.
        """
        tensors = [t for pair in where for t in pair]
        tensors += [t for cut in cuts for t in (cut.param, cut.grad)]
        if (device := meeting(tensors)) is not None:
            self._write_on(device, number, group, cuts, where)
            return
        for start, stop in _blocks(cuts):
            param = cuts[0].param
            size = stop - start
            size = min(CHUNK, size) if param.device.type == "cpu" else size
            for begin in range(start, stop, size):
                chunk = _range(where, begin, min(size, stop - begin))
                self._write_chunk(number, group, cuts, chunk, begin)
                if isinstance(param, _torch.FakeTensor):
                    return  # nothing is written, and each chunk is as the first

    def _write_on(
        self,
        device: torch.device,
        number: int,
        group: CodeGroup,
        cuts: Sequence[Stretch],
        where: Moved,
    ) -> None:
        """The same on the device, where some tensors are offloaded."""
        come = lambda x: fetched(x, device, waits=True)  # noqa: E731
        mine = [c._replace(param=come(c.param), grad=come(c.grad)) for c in cuts]
        # What was brought is a copy, to be written over.
        work = [come(old) for old, _ in where]
        each = zip(work, where, strict=True)
        made = [new if x is old else x for x, (old, new) in each]
        self.write(number, group, mine, list(zip(work, made, strict=True)))
        pairs = [(c.param, m.param) for c, m in zip(cuts, mine, strict=True)]
        pairs += [(new, x) for (_, new), x in zip(where, made, strict=True)]
        for target, source in pairs:
            if target is not source:
                target.copy_(source)

    def _write_chunk(
        self,
        number: int,
        group: CodeGroup,
        cuts: Sequence[Stretch],
        where: Moved,
        begin: int,
    ) -> None:
        moments, spare = self._room(where[0][0])
        rows = list(zip(moments, self.coders, where[::2], where[1::2], strict=True))
        for x, coder, (old, _), (scales, _) in rows:
            coder.decode(old, scales, x, spare)
        for cut in cuts:
            _step(self.kernel, cut, moments, begin)
        for k, (x, coder, (_, new), (_, scales)) in enumerate(rows):
            x[max(group.used - begin, 0) :].zero_()
            if isinstance(x, _torch.FakeTensor):
                refuse_in_graph("moments in 8 bits are rounded by chance")
                dither = spare
            else:
                seed = mix(self.count, number, k, begin)
                dither = chance(x.device, len(x), seed)
            coder.encode(x, new, scales, dither, spare)

    def _room(self, codes: Tensor) -> tuple[list[Tensor], Tensor]:
        """A float32 tensor like codes for each moment, and one int32: made once."""
        count, device = len(codes), codes.device
        rows = self.scratch.get(device)
        if rows is None or rows.shape[1] < count:
            size = max(count, CHUNK) if device.type == "cpu" else count
            shape = 1 + len(self.coders), size
            rows = self.scratch[device] = torch.empty(shape, device=device)
        *moments, spare = (row[:count] for row in rows)
        return moments, spare.view(torch.int32)


def _blocks(cuts: Sequence[Stretch]) -> list[tuple[int, int]]:
    """The ranges, in whole blocks, that stretches touch."""
    found: list[tuple[int, int]] = []
    for cut in sorted(cuts, key=lambda cut: cut.start):
        if not cut.param.numel():
            continue
        start = cut.start // BLOCK * BLOCK
        stop = padded(cut.start + cut.param.numel())
        if found and start <= found[-1][1]:
            start, stop = found[-1][0], max(stop, found.pop()[1])
        found.append((start, stop))
    return found


def _range(where: Moved, begin: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales, old and new, of ``count`` elements."""
    blocks = slice(begin // BLOCK, (begin + count) // BLOCK)
    spans = (slice(begin, begin + count), blocks) * (len(where) // 2)
    return [(old[s], new[s]) for (old, new), s in zip(where, spans, strict=True)]


def _step(
    kernel: Callable[..., None], cut: Stretch, moments: Sequence[Tensor], begin: int
) -> None:
    """Writes one step of the elements of a stretch that lie within the chunk."""
    low = max(cut.start, begin)
    high = min(cut.start + cut.param.numel(), begin + moments[0].numel())
    if high <= low:
        return
    whole = cut.param if cut.param.is_contiguous() else cut.param.contiguous()
    target = whole.view(-1)[low - cut.start : high - cut.start]
    grad = cut.grad.reshape(-1)[low - cut.start : high - cut.start]
    wide = torch.promote_types(target.dtype, torch.float32)
    parts = [x[low - begin : high - begin] for x in moments]
    row = [x.to(wide).contiguous() for x in (target, grad, *parts)]
    kernel(*([x] for x in row), weight_decay=cut.decay)
    for x, made in zip((target, *parts), (row[0], *row[2:]), strict=True):
        if x is not made:
            x.copy_(made)
    if whole is not cut.param:
        cut.param.copy_(whole)

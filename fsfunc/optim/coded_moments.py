"""Moments in 8 bits: decoded for an update, block by block, and encoded after it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.mesh import here
from fsfunc.core.frames import frame, inside
from fsfunc.optim.in_place import count_write, overlap, targets
from fsfunc.optim.leaves import (
    Mask,
    Tree,
    along,
    composable,
    local,
    paths_of,
    trainable,
)
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Optimizer, check_params_given
from fsfunc.runtime.block_codes import BLOCK, CHUNK, Coder, chance, padded
from fsfunc.runtime.generators import mix
from fsfunc.runtime.stores import (
    LIES,
    brought,
    empty_beside,
    lies,
    like_device,
    moments_store,
)
from fsfunc.sharded.donated import Donation, Everything
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import side_by_side
from fsfunc.sharded.placements import Split, room

__all__ = ["Codes", "CodedAdamState", "with_coded_moments"]


class Codes(NamedTuple):
    """Moments in 8 bits: by buffer, uint8 codes and float32 scales of their blocks."""

    codes: tuple[Any, ...]
    scales: tuple[Any, ...]


class CodedAdamState(NamedTuple):
    """An `AdamState` with moments in 8 bits.

    ``places`` tells how the parameters lay for which they were made: a block's scale
    is of what one rank holds side by side, so they fit no other mesh.
    """

    count: int
    mu: Codes
    nu: Codes
    places: int


@dataclass
class _Group:
    """Leaves whose moments lie side by side, and where on the rank each begins."""

    starts: dict[int, int]  # by the leaf's position
    room: int  # elements, padding of blocks included, on each rank that has any
    first: Any

    @property
    def here(self) -> int:
        return 0 if is_sharded(self.first) and _absent(self.first.layout) else self.room


def _groups(leaves: Sequence[Any], paths: Sequence[str]) -> tuple[list[_Group], int]:
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
            size = first.numel()
        elif first.layout.flat is None:
            size = room(first.layout.shape, first.layout.parts)
        else:
            size, at = first.layout.flat.chunk, here().mesh.coordinates()
            starts = {i: leaves[i].layout.buffer_range(at)[0] for i in members}
        groups.append(_Group(starts, padded(size), first))
        for i in members:
            place = (
                leaves[i].layout if is_sharded(leaves[i]) else tuple(leaves[i].shape)
            )
            said.append(f"{paths[i]} {place}")
        said.append("")
    return groups, zlib.crc32("\n".join(said).encode())


def _absent(layout: Layout) -> bool:
    return bool(layout.owned) and layout.block(here().mesh.coordinates()) is None


def _zeros(group: _Group, per: int, dtype: torch.dtype) -> Any:
    """A zero for each ``per`` elements, laid out as what each rank has of its own."""
    first, count = group.first, group.room // per
    device = like_device(local(first)).device
    if not is_sharded(first) or not first.layout.axes:
        return _made((count,), dtype, device)
    owned = first.layout.owned
    apart = {p.axis for p in owned}
    over = {a: n for a, n in first.layout.sizes.items() if a not in apart}
    splits = [Split(k, axis, n) for k, (axis, n) in enumerate(over.items())]
    shape = (*over.values(), count)
    layout = Layout(shape, dtype, (*owned, *splits), first.layout.name)
    shape = layout.local_shape(here().mesh.coordinates())
    return Sharded(_made(shape, dtype, device), layout)


def _made(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on the device, or where `init_state` wants moments to lie."""
    if (store := moments_store()) is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return store.empty(math.prod(shape), dtype, device).view(shape).zero_()


@dataclass(frozen=True, eq=False)
class _Coded:
    """The functions of such an optimizer."""

    name: str
    kernel: Callable[[Any], Callable[..., None]]
    weight_decay: float
    mask: Mask | None

    def init(self, params: Tree) -> CodedAdamState:
        leaves, treedef = tree.flatten(params, is_sharded)
        groups, places = _groups(leaves, paths_of(treedef))

        def codes() -> Codes:
            return Codes(
                tuple(_zeros(g, 1, torch.uint8) for g in groups),
                tuple(_zeros(g, BLOCK, torch.float32) for g in groups),
            )

        return CodedAdamState(0, codes(), codes(), places)

    def update(self, grads: Tree, state: CodedAdamState, params: Tree = None):
        like = grads if params is None else params
        if self.weight_decay:
            check_params_given(params, self.name)
        nothing = tree.map(_nothing, like, is_leaf=is_sharded)
        plain = _Coded(self.name, self.kernel, 0.0, None)
        with inside(_not_donated()):
            updates, after = plain.prepare(grads, state, nothing)()
        if self.weight_decay:
            matched = Matched.of(like, updates)
            rate = self.kernel(state).keywords["lr"]  # type: ignore[attr-defined]
            decays = matched.decays(self.weight_decay, self.mask)
            less = lambda p, u, decay: [u - rate * decay * p]  # noqa: E731
            (updates,) = matched.composed(less, decays)
        return _where_given(updates, grads, like), after

    def prepare(self, grads: Tree, state: CodedAdamState, params: Tree):
        matched = Matched.of(params, grads)
        if composable() or matched.differentiated:
            raise RuntimeError(
                f"{self.name} with moments in 8 bits: somebody differentiates this "
                "update, and codes have no derivative: leave moment_dtype out"
            )
        groups, places = _groups(matched.trees[0], paths_of(matched.treedef))
        if places != state.places:
            raise ValueError(
                f"{self.name}: moments in 8 bits were made for parameters that lay in "
                "another way. A block's scale is of what one rank holds, so they fit "
                "no other mesh, zero or units: make them by init(params) of parameters "
                "laid out as these (ff.init_state does), and load them there"
            )
        decays = matched.decays(self.weight_decay, self.mask)
        donation = frame().donated
        if donation is not None and overlap(matched):
            donation = None
        kernel = self.kernel(state)

        def commit() -> tuple[Tree, CodedAdamState]:
            taken: tuple[list[Any], list[Any]] = [], []
            with torch.no_grad():
                (new,) = targets(matched, [matched.trees[0]], donation, taken)
                count_write(new.tensors)
                held = [_targets(x, donation, taken) for x in _columns(state)]
                cuts = _cuts(matched, new, decays, groups)
                for i, group in enumerate(groups):
                    where = [(_flat(old[i]), _flat(to[i])) for old, to in held]
                    _write(kernel, group, cuts.get(i, []), where, (state.count, i))
            if donation is not None:
                donation.take(*taken)
            made = [tuple(to) for _, to in held]
            mu, nu = Codes(*made[:2]), Codes(*made[2:])
            after = CodedAdamState(state.count + 1, mu, nu, places)
            return matched.restore(new.leaves, matched.trees[0]), after

        return commit


class _Stretch(NamedTuple):
    """A stretch of parameters and gradients, and where its moments begin."""

    param: Tensor
    grad: Tensor
    start: int
    decay: float


def _cuts(
    matched: Matched, new: Any, decays: Sequence[float], groups: Sequence[_Group]
) -> dict[int, list[_Stretch]]:
    """By group, what is to be updated, in as few stretches as may be."""
    place = {
        i: (k, start) for k, g in enumerate(groups) for i, start in g.starts.items()
    }
    grads, found = matched.buffers[1].tensors, {}
    for k, members in enumerate(matched.members):
        each = [decays[j] for j in members]
        if each.count(each[0]) == len(each):
            packed = matched.buffers[0].groups[k][1] is not None
            group, start = place[matched.active[members[0]]]
            cut = _Stretch(new.tensors[k], grads[k], 0 if packed else start, each[0])
            found.setdefault(group, []).append(cut)
            continue
        for j in members:
            i = matched.active[j]
            group, start = place[i]
            g = local(matched.trees[1][i])
            cut = _Stretch(local(new.leaves[j]), g, start, decays[j])
            found.setdefault(group, []).append(cut)
    return found


_MEAN, _SQUARE = Coder(signed=True), Coder(signed=False)


def _write(
    kernel: Callable[..., None],
    group: _Group,
    cuts: Sequence[_Stretch],
    where: Sequence[tuple[Tensor, Tensor]],
    stream: tuple[int, int],
) -> None:
    """One step of a group: codes are read and written a chunk at a time.

    ``where``: codes and scales of the mean and of the mean square, old and new.
    """
    if not any(cut.param.numel() for cut in cuts):
        for old, new in where:
            if old is not new:
                new.copy_(old)
        return
    tensors = [t for pair in where for t in pair]
    tensors += [t for cut in cuts for t in (cut.param, cut.grad)]
    beside = [lies(t) is not None for t in tensors] if LIES else []
    if any(beside) and not all(beside):
        _write_here(kernel, group, cuts, where, stream)
        return
    device, fake = cuts[0].param.device, isinstance(cuts[0].param, _torch.FakeTensor)
    one = len(cuts) == 1
    size = CHUNK if device.type == "cpu" and one else group.room
    size = min(size, group.room)
    work = [torch.empty(size, device=device) for _ in range(2)]
    for begin in range(0, group.room, size):
        count = min(size, group.room - begin)
        rows = [_range(where[k : k + 2], begin, count) for k in (0, 2)]
        mean, square = (w[:count] for w in work)
        for x, coder, ((codes, _), (scales, _)) in zip(
            (mean, square), (_MEAN, _SQUARE), rows, strict=True
        ):
            coder.decode(codes, scales, x)
        for cut in cuts:
            _step(kernel, cut, mean, square, begin)
        end = max((c.start + c.param.numel() for c in cuts), default=0) - begin
        for k, (x, coder) in enumerate(((mean, _MEAN), (square, _SQUARE))):
            if end < count:
                x[max(end, 0) :].zero_()
            (_, codes), (_, scales) = rows[k]
            if fake:
                dither = torch.zeros(count, dtype=torch.int32, device=device)
            else:
                dither = chance(device, count, mix(*stream, k, begin))
            coder.encode(x, codes, scales, dither)
        if fake:  # nothing is written, and each chunk is as the first
            return


def _write_here(
    kernel: Callable[..., None],
    group: _Group,
    cuts: Sequence[_Stretch],
    where: Sequence[tuple[Tensor, Tensor]],
    stream: tuple[int, int],
) -> None:
    """The same on the device, where some of it lies beside that."""
    come = lambda x: x if lies(x) is None else brought(x)  # noqa: E731
    mine = [c._replace(param=come(c.param), grad=come(c.grad)) for c in cuts]
    # What was brought is a copy, to be written over.
    work = [come(old) for old, _ in where]
    made = [new if x is old else x for x, (old, new) in zip(work, where, strict=True)]
    _write(kernel, group, mine, list(zip(work, made, strict=True)), stream)
    pairs = [(c.param, m.param) for c, m in zip(cuts, mine, strict=True)]
    pairs += [(new, x) for (_, new), x in zip(where, made, strict=True)]
    for target, source in pairs:
        if target is not source:
            target.copy_(source)


def _range(
    pairs: Sequence[tuple[Tensor, Tensor]], begin: int, count: int
) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales, old and new, of ``count`` elements."""
    (codes, its), (scales, their) = pairs
    blocks = slice(begin // BLOCK, (begin + count) // BLOCK)
    span = slice(begin, begin + count)
    return [(codes[span], its[span]), (scales[blocks], their[blocks])]


def _step(
    kernel: Callable[..., None], cut: _Stretch, mean: Tensor, square: Tensor, begin: int
) -> None:
    """Writes one step of the elements of a stretch that lie within the chunk."""
    low = max(cut.start, begin)
    high = min(cut.start + cut.param.numel(), begin + mean.numel())
    if high <= low:
        return
    whole = cut.param if cut.param.is_contiguous() else cut.param.contiguous()
    target = whole.view(-1)[low - cut.start : high - cut.start]
    grad = cut.grad.reshape(-1)[low - cut.start : high - cut.start]
    wide = torch.promote_types(target.dtype, torch.float32)
    moments = [x[low - begin : high - begin] for x in (mean, square)]
    row = [x.to(wide).contiguous() for x in (target, grad, *moments)]
    kernel(*([x] for x in row), weight_decay=cut.decay)
    for x, made in zip((target, *moments), (row[0], *row[2:]), strict=True):
        if x is not made:
            x.copy_(made)
    if whole is not cut.param:
        cut.param.copy_(whole)


def _columns(state: CodedAdamState) -> list[Sequence[Any]]:
    return [state.mu.codes, state.mu.scales, state.nu.codes, state.nu.scales]


def _flat(leaf: Any) -> Tensor:
    return local(leaf).view(-1)


def _targets(
    old: Sequence[Any],
    donation: Donation | None,
    taken: tuple[list[Any], list[Any]],
) -> tuple[Sequence[Any], list[Any]]:
    """Codes as they are, and those to write: over the same memory where it is ours."""
    tensors = [local(x) for x in old]
    if donation is None:
        mine = [False] * len(old)
    elif isinstance(donation, Everything):
        return old, list(old)
    else:
        donation.look()
        mine = donation.may_write(tensors)
    new = []
    for x, own in zip(old, mine, strict=True):
        if own:
            new.append(x.twin() if is_sharded(x) else x.detach())
            taken[0].append(x)
            taken[1].append(new[-1])
        else:
            fresh = empty_beside(local(x))
            new.append(x.with_local(fresh) if is_sharded(x) else fresh)
    return old, new


def _nothing(leaf: Any) -> Any:
    """Zeros in place of parameters: what a step adds to them is then the update."""
    if not trainable(leaf):
        return leaf
    zeros = torch.zeros_like(local(leaf), dtype=torch.float32)
    return leaf.with_local(zeros) if is_sharded(leaf) else zeros


def _not_donated() -> Any:
    return replace(frame(), donated=None)


def _where_given(updates: Tree, grads: Tree, like: Tree) -> Tree:
    """``updates`` of leaves that have a gradient, None for others."""
    leaves, treedef = tree.flatten(like, is_sharded)
    columns = [along(like, treedef, t, "gradients") for t in (updates, grads)]
    rows = zip(leaves, *columns, strict=True)
    return tree.unflatten(
        treedef, [u if g is not None and trainable(p) else None for p, u, g in rows]
    )


def with_coded_moments(
    name: str,
    kernel: Callable[[Any], Callable[..., None]],
    weight_decay: float,
    mask: Mask | None,
) -> Optimizer:
    """The optimizer of a kernel of Adam's kind, whose moments are kept in 8 bits.

    Args:
        kernel: ``kernel(state)(params, grads, mu, nu, weight_decay=)`` writes one step
            into lists of dense tensors; it has the rate as ``keywords["lr"]``.
        weight_decay, mask: which decay a leaf has.
    """
    made = _Coded(name, kernel, weight_decay, mask)
    return Optimizer(made.init, made.update, prepare=made.prepare)

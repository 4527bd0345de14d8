"""Moments in 8 bits: decoded for an update, block by block, and encoded after it.

Numbers in blocks of 256 share a scale; each is a small float, rounded by chance. A code
has 3 bits of mantissa, and the rest but a sign for an exponent: so its error is
relative to the number itself, not to the largest of the block as with even steps. A
moving average changes by less than a code's step at a time; rounded to the nearest one
it would stand still for ever. Rounded up or down by chance it moves as it should in the
mean.

Below are the coder of a block, the layout of codes in a buffer, the step by chunks of
them, and the codec that an `ElementRule` is given.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.mesh import here
from fsfunc.core.frames import composable
from fsfunc.optim.element_rules import CHUNK, Codec, ElementRule, Scaled
from fsfunc.optim.in_place import Writing, count_write
from fsfunc.optim.leaves import Tree, check_width, local, paths_of, split, trainable
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Phases, update_of
from fsfunc.optim.places import (
    copied_to,
    device_with,
    fetched,
    kept_zeros,
    meeting,
    room_like,
)
from fsfunc.runtime.generators import seed63
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import side_by_side
from fsfunc.sharded.placements import Split, room

BLOCK = 256
"""Elements that share a scale."""


_CUT = 20  # bits of a float32's mantissa that a code has no room for
_TOP = 1.875  # the largest number of exponent 0 and 3 bits of mantissa
_SIGN = -(1 << 31)  # the bit of an int32, or a float32
_ONE = 127 << 3  # sign, exponent and 3 bits of mantissa of 1.0


def padded(count: int) -> int:
    """The least multiple of `BLOCK` that is not below ``count``."""
    return -(-count // BLOCK) * BLOCK


def chance(device: torch.device, count: int, seed: int) -> Tensor:
    """``count`` random numbers below 2^20, int32, which follow from ``seed``.

    A range of a table of twice `CHUNK` numbers: it is read from the cache, which is ten
    times as fast as to draw. A longer one begins anew.
    """
    table = _table(str(device))
    start = seed % CHUNK
    if start + count <= len(table):
        return table[start : start + count]
    return table.repeat(-(-(start + count) // len(table)))[start : start + count]


@lru_cache(maxsize=8)
def _table(device: str) -> Tensor:
    with _torch.beneath_all_modes(), torch.inference_mode(False):
        draw = torch.Generator().manual_seed(0)
        made = torch.randint(1 << _CUT, (2 * CHUNK,), generator=draw, device="cpu")
        return made.to(torch.device(device), torch.int32)


class Coder:
    """Codes of numbers with a sign, or of such as are never negative.

    With a sign the smallest step is 2^-18 of the block's largest number, without one
    2^-34; and there what is above 0 never becomes 0.

    Both use ``spare`` memory, and no operation that is slow on a CPU: fresh memory
    costs a page fault for 1024 numbers, and mixed dtypes are not vectorized.

    >>> coder, x = Coder(signed=True), torch.linspace(-1, 1, 256)
    >>> codes, scales = torch.empty(256, dtype=torch.uint8), torch.empty(1)
    >>> dither, spare = torch.zeros(2, 256, dtype=torch.int32)
    >>> coder.encode(x.clone(), codes, scales, dither, spare)
    >>> found = coder.decode(codes, scales, torch.empty(256), spare)
    >>> bool(((found - x).abs() <= x.abs() / 8 + 2.0**-18).all())
    True
    """

    def __init__(self, signed: bool):
        self.signed = signed
        exponents = 15 if signed else 31
        self.base = _ONE - (exponents << 3)  # of code 0
        self.last = 127 if signed else 255
        self.zero = 2.0**-exponents  # what code 0 stands for, and is taken off

    def encode(
        self, x: Tensor, codes: Tensor, scales: Tensor, dither: Tensor, spare: Tensor
    ) -> None:
        """Writes ``x`` as codes.

        A block with an infinity or a NaN comes back with one.

        Args:
            x: float32 [n], n a multiple of `BLOCK`; it is written over.
            codes: uint8 [n].
            scales: float32 [n / BLOCK].
            dither: int32 [n], below 2^20.
            spare: int32 [n], written over.
        """
        if self.signed:
            torch.bitwise_and(x.view(torch.int32), _SIGN, out=spare)
        rows = (x.abs_() if self.signed else x).view(-1, BLOCK)
        torch.amax(rows, 1, out=scales)
        scales.mul_(1 / _TOP)
        rows.div_(scales.unsqueeze(1)).add_(self.zero)  # 0 / 0: any code, times 0
        bits = x.view(torch.int32).add_(dither).bitwise_right_shift_(_CUT)
        # Nothing that is positive may become 0: a step is divided by its root.
        bits.sub_(self.base).clamp_(0 if self.signed else 1, self.last)
        if self.signed:
            bits.bitwise_or_(spare.bitwise_right_shift_(24))  # the lowest byte is ours
        codes.copy_(bits)

    def decode(
        self, codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor
    ) -> Tensor:
        """The numbers of ``codes``, in ``out``, float32 [n]; ``spare`` as above."""
        bits = out.view(torch.int32).copy_(codes)
        if self.signed:
            torch.bitwise_left_shift(bits, 24, out=spare)
            bits.bitwise_and_(127)
        bits.add_(self.base).bitwise_left_shift_(_CUT)
        out.sub_(self.zero)
        if self.signed:
            bits.bitwise_or_(spare.bitwise_and_(_SIGN))
        out.view(-1, BLOCK).mul_(scales.unsqueeze(1))
        return out


@dataclass
class CodeGroup:
    """Leaves whose moments lie side by side, and where on the rank each begins."""

    starts: dict[int, int]  # by the leaf's position
    room: int  # elements, padding of blocks included, on each rank that has any
    used: int  # those before the padding, on this rank
    first: Any

    @property
    def is_split(self) -> bool:
        """True if ranks have parts of them."""
        return is_sharded(self.first) and bool(self.first.layout.axes)


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
    device = device_with(first)
    if not group.is_split:
        return kept_zeros((count,), dtype, device)
    owned = first.layout.owned
    apart = {p.axis for p in owned}
    over = {a: n for a, n in first.layout.sizes.items() if a not in apart}
    splits = [Split(k, axis, n) for k, (axis, n) in enumerate(over.items())]
    shape = (*over.values(), count)
    layout = Layout(shape, dtype, (*owned, *splits), first.layout.name)
    part = layout.local_shape(here().mesh.coordinates())
    return Sharded(kept_zeros(part, dtype, device), layout)


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
        # By device, and apart for parts of leaves and for whole ones: what holds a part
        # for a while is typed as one ever after.
        self.scratch: dict[tuple[torch.device, bool], Tensor] = {}

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
                copied_to(target, source)

    def _write_chunk(
        self,
        number: int,
        group: CodeGroup,
        cuts: Sequence[Stretch],
        where: Moved,
        begin: int,
    ) -> None:
        moments, spare = self._room(where[0][0], group.is_split)
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
                seed = seed63(self.count, number, k, begin)
                dither = chance(x.device, len(x), seed)
            coder.encode(x, new, scales, dither, spare)

    def _room(self, codes: Tensor, is_split: bool) -> tuple[list[Tensor], Tensor]:
        """A float32 tensor like codes for each moment, and one int32: made once."""
        count, device = len(codes), codes.device
        rows = self.scratch.get((device, is_split))
        if rows is None or rows.shape[1] < count:
            size = max(count, CHUNK) if device.type == "cpu" else count
            shape = 1 + len(self.coders), size
            rows = torch.empty(shape, device=device)
            self.scratch[device, is_split] = rows
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


class Codes(NamedTuple):
    """Moments in 8 bits: by buffer, uint8 codes and float32 scales of their blocks."""

    codes: tuple[Any, ...]
    scales: tuple[Any, ...]


def is_coded(state: Any) -> bool:
    """True for a state with moments in 8 bits."""
    return isinstance(state, tuple) and hasattr(state, "coders")


def decoded(state: Any) -> Any:
    """A state with the moments themselves, in float32: what this rank holds of each."""
    count, *kept, places = state
    pairs = zip(kept, state.coders, strict=True)
    return type(state)(count, *(_decoded(x, coder) for x, coder in pairs), places)


def encoded(state: Any, wide: Any) -> Any:
    """Such moments as codes, which lie as those of ``state`` do."""
    count, *kept, places = state
    made = [
        _encoded(codes, x, coder, seed63(count, k))
        for k, (codes, x, coder) in enumerate(
            zip(kept, wide[1:-1], state.coders, strict=True)
        )
    ]
    return type(state)(count, *made, places)


def _decoded(kept: Codes, coder: Coder) -> Any:
    found = []
    for codes, scales in zip(*kept, strict=True):
        codes = _flat(codes)
        out, spare = codes.float(), codes.int()  # both are written over
        if codes.numel():
            coder.decode(codes, _flat(scales), out, spare)
        found.append(out)
    return tuple(found)


def _encoded(kept: Codes, wide: Any, coder: Coder, seed: int) -> Codes:
    made: tuple[list[Any], list[Any]] = [], []
    for codes, scales, x in zip(*kept, wide, strict=True):
        new = [space_of(t).empty_like(t) for t in map(local, (codes, scales))]
        if x.numel():
            dither, (code, scale) = chance(x.device, x.numel(), seed), map(_flat, new)
            coder.encode(x.clone(), code, scale, dither, torch.empty_like(dither))
        for column, old, t in zip(made, (codes, scales), new, strict=True):
            column.append(old.with_local(t) if is_sharded(old) else t)
    return Codes(*map(tuple, made))


class Coded(Codec):
    """Moments in 8 bits, with a scale for each block of what one rank holds.

    Args:
        state: as a rule's, with how the parameters lay behind, and a coder for each
            moment in its class.
    """

    elementwise = False  # codes lie by buffer, and are stepped all at once

    def __init__(self, state: Callable[..., Any]):
        super().__init__()
        self.state = state

    def init(self, rule: ElementRule, params: Tree) -> Any:
        check_width(params, torch.uint8)
        leaves, treedef = tree.flatten(params, is_sharded)
        groups, places = groups_of(leaves, paths_of(treedef))

        def codes() -> Codes:
            return Codes(
                tuple(zero_codes(g, 1, torch.uint8) for g in groups),
                tuple(zero_codes(g, BLOCK, torch.float32) for g in groups),
            )

        return self.state(0, *(codes() for _ in range(rule.moments)), places)

    def phases(
        self, rule: ElementRule, grads: Tree, state: Any, params: Tree, adds: bool
    ) -> Phases:
        if not adds:
            rule.matched(grads, params, ())  # which checks that parameters are given
            like = grads if params is None else params
            start = tree.map(lambda x: _wide(x, rule), like, is_leaf=is_sharded)
            apply = partial(self.phases, rule, adds=True)
            done = update_of(apply, grads, state, start)
            yield
            return done
        matched = rule.matched(grads, params, ())
        if composable() or matched.differentiated:
            raise RuntimeError(
                f"{rule.name} with moments in 8 bits: this update is differentiated, "
                "and codes have no derivative: leave moment_dtype out"
            )
        groups, places = groups_of(matched.trees[0], paths_of(matched.treedef))
        if places != state.places:
            raise ValueError(
                f"{rule.name}: moments in 8 bits were made for parameters of other "
                "layouts. A scale is of a block of what one rank has, so they fit no "
                "other mesh, zero or units: make them by init(params) of parameters "
                "with these layouts (ff.init_state does), and load them there"
            )
        decays, count = rule.decays(matched), state.count
        kernel = rule.writer(count)
        yield
        writing = Writing(matched)
        with torch.no_grad():
            (new,) = writing.targets([matched.trees[0]])
            count_write(new.tensors)
            columns = [column for codes in state[1:-1] for column in codes]
            held = [(x, writing.target(list(x), split([x])[0]).leaves) for x in columns]
            cuts = stretches(matched, new, decays, groups)
            step = CodedStep(kernel, state.coders, count)
            for i, group in enumerate(groups):
                where = [(_flat(old[i]), _flat(to[i])) for old, to in held]
                step.write(i, group, cuts.get(i, []), where)
        writing.end()
        made = [tuple(to) for _, to in held]
        moments = [Codes(*made[k : k + 2]) for k in range(0, len(made), 2)]
        params = matched.restore(new.leaves, matched.trees[0])
        return params, self.state(count + 1, *moments, places)


def codec_of(
    dtype: torch.dtype | None,
    coded: Callable[..., Any],
    scaled: Callable[..., Any] | None = None,
) -> Codec:
    """The codec of a ``moment_dtype``; that of float16 has a scale where given."""
    if dtype == torch.uint8:
        return Coded(coded)
    if dtype == torch.float16 and scaled is not None:
        return Scaled(scaled)
    return Codec(dtype)


def _flat(leaf: Any) -> Tensor:
    return local(leaf).view(-1)


def _wide(leaf: Any, rule: ElementRule) -> Any:
    """A parameter in float32, or zeros in its place where none decays."""
    if not trainable(leaf):
        return leaf
    x = local(leaf).detach()
    wide = room_like(x, torch.float32)
    wide = wide.copy_(x) if rule.weight_decay else wide.zero_()
    return leaf.with_local(wide) if is_sharded(leaf) else wide

"""Moments in 8 bits: decoded for an update, chunk by chunk, and encoded after it.

A code is a small float: a sign where there is one, 3 bits of mantissa, and the rest for
an exponent. 256 numbers share a scale, a float32. So the error of a code is relative to
the number itself, and not to the largest one of its block as with even steps. A moving
average changes by less than the step between two codes at a time. Rounded to the
nearest code it would stand still for ever, so it is rounded up or down at random: in
the mean it moves as it should.

Below are the coder of a block (`Coder`), the layout of codes in a buffer (`CodeGroup`),
the step by chunks of them (`CodedStep`), and `CodedCodec`, which runs an `ElementRule`
on them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from fsfunc import _torch, tree
from fsfunc.comm.mesh import here
from fsfunc.core.frames import composable
from fsfunc.optim.element_rules import CHUNK, Codec, ElementRule, Kernel, ScaledCodec
from fsfunc.optim.in_place import Target, Writing, count_write
from fsfunc.optim.leaves import (
    Tree,
    check_parts_dtype,
    flat_buffers,
    local_tensor,
    paths_of,
    trainable,
)
from fsfunc.optim.matching import Matched
from fsfunc.optim.optimizer import Phases, State, update_from_apply
from fsfunc.optim.places import (
    copy_to,
    device_with,
    fetch_to,
    meeting_device,
    state_zeros,
    step_memory_like,
)
from fsfunc.runtime.generators import seed63
from fsfunc.runtime.memory_spaces import space_of
from fsfunc.runtime.scopes import refuse_in_graph
from fsfunc.sharded.layout import Layout
from fsfunc.sharded.leaf import Sharded, is_sharded
from fsfunc.sharded.packing import group_loose_leaves
from fsfunc.sharded.placements import OfRank, largest_block
from fsfunc.tree.types import Leaf, PyTree

BLOCK = 256
"""Elements that share a scale."""


# A float32 has 1 bit of sign, 8 of exponent and 23 of mantissa.
_CUT_BITS = 20  # bits of the mantissa that a code has no room for
_LARGEST_MANTISSA = 1.875  # the largest number of exponent 0 and 3 bits of mantissa
_SIGN_BIT = -(1 << 31)  # of an int32, or a float32
_ONE_BITS = 127 << 3  # the upper 12 bits of 1.0: exponent, and 3 bits of mantissa


def round_up_to_block(count: int) -> int:
    """Returns the least multiple of `BLOCK` that is not below ``count``."""
    return -(-count // BLOCK) * BLOCK


def dither_bits(device: torch.device, count: int, seed: int) -> Tensor:
    """Returns ``count`` random numbers below 2^20, int32, that follow from ``seed``."""
    # A range of a table of twice `CHUNK` numbers: it is read from the cache, which is
    # ten times as fast as to draw. A longer range repeats the table.
    table = _dither_table(str(device))
    start = seed % CHUNK
    if start + count <= len(table):
        return table[start : start + count]
    return table.repeat(-(-(start + count) // len(table)))[start : start + count]


@lru_cache(maxsize=8)
def _dither_table(device: str) -> Tensor:
    # It stays for the process, so no mode of the first caller's may be in it.
    with _torch.beneath_all_modes(), torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(
            1 << _CUT_BITS, (2 * CHUNK,), generator=generator, device="cpu"
        )
        return numbers.to(torch.device(device), torch.int32)


class Coder:
    """Encodes numbers with a sign, or numbers that are never negative.

    With a sign the smallest step is 2^-18 of the block's largest number, without one
    2^-34; and there a number above 0 never becomes 0.

    Both directions work in ``spare`` memory, and by no operation that is slow on a CPU:
    fresh memory costs a page fault for 1024 numbers, and mixed dtypes are not
    vectorized.

    >>> coder, x = Coder(signed=True), torch.linspace(-1, 1, 256)
    >>> codes, scales = torch.empty(256, dtype=torch.uint8), torch.empty(1)
    >>> dither, spare = torch.zeros(2, 256, dtype=torch.int32)
    >>> coder.encode(x.clone(), codes, scales, dither, spare)
    >>> decoded = coder.decode(codes, scales, torch.empty(256), spare)
    >>> bool(((decoded - x).abs() <= x.abs() / 8 + 2.0**-18).all())
    True
    """

    def __init__(self, signed: bool):
        self.signed = signed
        exponents = 15 if signed else 31
        # A code is the distance of a float's upper bits from those of code 0.
        self.first_bits = _ONE_BITS - (exponents << 3)
        self.last_code = 127 if signed else 255
        # Added before, and taken off after: so code 0 stands for 0 itself.
        self.offset: float = 2.0**-exponents

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
            torch.bitwise_and(x.view(torch.int32), _SIGN_BIT, out=spare)
        rows = (x.abs_() if self.signed else x).view(-1, BLOCK)
        torch.amax(rows, 1, out=scales)
        scales.mul_(1 / _LARGEST_MANTISSA)
        # In a block of zeros 0 / 0 gives any code: it is multiplied by a scale of 0.
        rows.div_(scales.unsqueeze(1)).add_(self.offset)
        # Adding a random number to the bits that are cut off rounds up with the
        # probability that they are of the whole.
        bits = x.view(torch.int32).add_(dither).bitwise_right_shift_(_CUT_BITS)
        # A mean square above 0 may not become 0: a step is divided by its root.
        bits.sub_(self.first_bits).clamp_(0 if self.signed else 1, self.last_code)
        if self.signed:
            # The sign to bit 7; the copy to uint8 drops what lies above.
            bits.bitwise_or_(spare.bitwise_right_shift_(24))
        codes.copy_(bits)

    def decode(
        self, codes: Tensor, scales: Tensor, out: Tensor, spare: Tensor
    ) -> Tensor:
        """Writes the numbers of ``codes`` into ``out``, float32 [n]; returns it."""
        bits = out.view(torch.int32).copy_(codes)
        if self.signed:
            torch.bitwise_left_shift(bits, 24, out=spare)
            bits.bitwise_and_(127)
        bits.add_(self.first_bits).bitwise_left_shift_(_CUT_BITS)
        out.sub_(self.offset)
        if self.signed:
            bits.bitwise_or_(spare.bitwise_and_(_SIGN_BIT))
        out.view(-1, BLOCK).mul_(scales.unsqueeze(1))
        return out


@dataclass
class CodeGroup:
    """Leaves whose moments lie side by side, in common blocks.

    Args:
        starts: by the leaf's position, where its elements on this rank begin.
        size: elements on each rank that has any, rounded up to whole blocks.
        used: those of this rank, without the padding.
        first: the first of these leaves.
    """

    starts: dict[int, int]
    size: int
    used: int
    first: Leaf

    @property
    def is_split(self) -> bool:
        """Whether ranks hold parts of the leaves."""
        return is_sharded(self.first) and bool(self.first.layout.axes)


def code_groups(
    leaves: Sequence[Leaf], paths: Sequence[str]
) -> tuple[list[CodeGroup], int]:
    """Groups leaves by buffer; returns the groups and a checksum of their layouts.

    Both follow from the layouts alone, whether leaves lie in their buffer just now or
    in memory of their own. The checksum is the same on all ranks.
    """
    active = [i for i, x in enumerate(leaves) if trainable(x)]
    is_flat = lambda x: bool(is_sharded(x) and x.layout.flat)  # noqa: E731
    flat = [i for i in active if is_flat(leaves[i])]
    single = [[i] for i in active if not is_flat(leaves[i])]
    groups, lines = [], []
    for members in [*group_loose_leaves(leaves, flat), *single]:
        first = leaves[members[0]]
        starts = dict.fromkeys(members, 0)
        if not is_sharded(first):
            size = used = first.numel()
        elif first.layout.flat is None:
            size = largest_block(first.layout.shape, first.layout.parts)
            used = local_tensor(first).numel()
        else:
            size, coordinates = first.layout.flat.chunk, here().mesh.coordinates()
            spans = {i: leaves[i].layout.buffer_range(coordinates) for i in members}
            starts = {i: start for i, (start, _) in spans.items()}
            used = max(stop for _, stop in spans.values())
        groups.append(CodeGroup(starts, round_up_to_block(size), used, first))
        for i in members:
            x = leaves[i]
            lines.append(f"{paths[i]} {x.layout if is_sharded(x) else tuple(x.shape)}")
        lines.append("")
    return groups, zlib.crc32("\n".join(lines).encode())


def zero_codes(group: CodeGroup, per: int, dtype: torch.dtype) -> Sharded | Tensor:
    """Returns one zero for each ``per`` elements of a group.

    If the group is split they are a row of a larger tensor, one for each rank: codes of
    two ranks have no common blocks.
    """
    first, count = group.first, group.size // per
    device = device_with(first)
    if not group.is_split:
        return state_zeros((count,), dtype, device)
    owned = first.layout.owners
    owned_axes = {p.axis for p in owned}
    split_sizes = {a: n for a, n in first.layout.sizes.items() if a not in owned_axes}
    splits = [OfRank(k, axis, n) for k, (axis, n) in enumerate(split_sizes.items())]
    shape = (*split_sizes.values(), count)
    layout = Layout(shape, dtype, (*owned, *splits), first.layout.name)
    local_shape = layout.local_shape(here().mesh.coordinates())
    return Sharded(state_zeros(local_shape, dtype, device), layout)


class Stretch(NamedTuple):
    """Parameters and gradients in a row, and where in their group they begin."""

    param: Tensor
    grad: Tensor
    start: int
    decay: float


def find_stretches(
    matched: Matched,
    params: Target,
    decays: Sequence[float],
    groups: Sequence[CodeGroup],
) -> dict[int, list[Stretch]]:
    """Returns what is to be updated, by group, in as few stretches as possible.

    Args:
        params: the parameters to write.
    """
    group_and_start = {
        i: (k, start) for k, g in enumerate(groups) for i, start in g.starts.items()
    }
    grads = matched.buffers[1].tensors
    by_group: dict[int, list[Stretch]] = {}
    for decay, k, j in matched.cut_by_decay(decays):
        i = matched.active[matched.leaf_positions[k][0] if j is None else j]
        group, start = group_and_start[i]
        if j is None:
            is_packed = matched.buffers[0].groups[k][1] is not None
            param, grad, start = params.tensors[k], grads[k], 0 if is_packed else start
        else:
            param = local_tensor(params.leaves[j])
            grad = local_tensor(matched.trees[1][i])
        by_group.setdefault(group, []).append(Stretch(param, grad, start, decay))
    return by_group


CodePairs = Sequence[tuple[Tensor, Tensor]]  # (old, new) codes or scales, in turn

MEAN, SQUARE = Coder(signed=True), Coder(signed=False)


class CodedStep:
    """A step of moments in 8 bits: codes are read and written a chunk at a time.

    Args:
        kernel: the step of decoded moments; see `ElementRule`.
        coders: of each moment.
        count: of updates, which decides how codes are rounded.
    """

    kernel: Kernel
    coders: Sequence[Coder]
    count: int

    def __init__(self, kernel: Kernel, coders: Sequence[Coder], count: int):
        self.kernel, self.coders, self.count = kernel, coders, count
        # By device, and apart for parts of leaves and for whole ones: the type check
        # takes memory that held a part once for a part ever after.
        self.scratch: dict[tuple[torch.device, bool], Tensor] = {}

    def write(
        self,
        number: int,
        group: CodeGroup,
        stretches: Sequence[Stretch],
        pairs: CodePairs,
    ) -> None:
        """Writes the step of a group; blocks without an update keep their codes.

        Args:
            number: of the group, which decides how codes are rounded too.
            pairs: (old, new) codes and (old, new) scales of each moment in turn; the
                new ones begin as copies of the old ones, or are the same memory.
        """
        tensors = [t for pair in pairs for t in pair]
        tensors += [t for s in stretches for t in (s.param, s.grad)]
        if (device := meeting_device(tensors)) is not None:
            self._write_on(device, number, group, stretches, pairs)
            return
        for start, stop in _touched_blocks(stretches):
            param = stretches[0].param
            size = stop - start
            # A CPU's cache holds a chunk for all of the some twenty operations on it.
            size = min(CHUNK, size) if param.device.type == "cpu" else size
            for begin in range(start, stop, size):
                chunk = _slice_pairs(pairs, begin, min(size, stop - begin))
                self._write_chunk(number, group, stretches, chunk, begin)
                if isinstance(param, _torch.FakeTensor):
                    return  # nothing is written, and each chunk is as the first

    def _write_on(
        self,
        device: torch.device,
        number: int,
        group: CodeGroup,
        stretches: Sequence[Stretch],
        pairs: CodePairs,
    ) -> None:
        """Does `write` on the device, if some of the tensors are offloaded."""
        fetch = lambda x: fetch_to(x, device, waits=True)  # noqa: E731
        fetched = [
            s._replace(param=fetch(s.param), grad=fetch(s.grad)) for s in stretches
        ]
        # A tensor that was fetched is a copy, so its new value is written over it.
        old_codes = [fetch(old) for old, _ in pairs]
        new_codes = [
            new if x is old else x
            for x, (old, new) in zip(old_codes, pairs, strict=True)
        ]
        self.write(number, group, fetched, list(zip(old_codes, new_codes, strict=True)))
        copies = [(s.param, f.param) for s, f in zip(stretches, fetched, strict=True)]
        copies += [(new, x) for (_, new), x in zip(pairs, new_codes, strict=True)]
        for target, source in copies:
            if target is not source:
                copy_to(target, source)

    def _write_chunk(
        self,
        number: int,
        group: CodeGroup,
        stretches: Sequence[Stretch],
        pairs: CodePairs,
        begin: int,
    ) -> None:
        """Decodes a chunk that begins at ``begin``, updates and encodes it."""
        moments, spare = self._scratch_like(pairs[0][0], group.is_split)
        rows = list(zip(moments, self.coders, pairs[::2], pairs[1::2], strict=True))
        for x, coder, (old, _), (scales, _) in rows:
            coder.decode(old, scales, x, spare)
        for stretch in stretches:
            _step_stretch(self.kernel, stretch, moments, begin)
        for k, (x, coder, (_, new), (_, scales)) in enumerate(rows):
            # Padding must not count in the largest number of a block.
            x[max(group.used - begin, 0) :].zero_()
            if isinstance(x, _torch.FakeTensor):
                refuse_in_graph("moments in 8 bits are rounded by chance")
                dither = spare
            else:
                seed = seed63(self.count, number, k, begin)
                dither = dither_bits(x.device, len(x), seed)
            coder.encode(x, new, scales, dither, spare)

    def _scratch_like(
        self, codes: Tensor, is_split: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Returns a float32 tensor like codes for each moment, and one int32."""
        count, device = len(codes), codes.device
        rows = self.scratch.get((device, is_split))
        if rows is None or rows.shape[1] < count:
            size = max(count, CHUNK) if device.type == "cpu" else count
            shape = 1 + len(self.coders), size
            rows = torch.empty(shape, device=device)
            self.scratch[device, is_split] = rows
        *moments, spare = (row[:count] for row in rows)
        return moments, spare.view(torch.int32)


def _touched_blocks(stretches: Sequence[Stretch]) -> list[tuple[int, int]]:
    """Returns the (start, stop) of whole blocks that stretches touch, merged."""
    ranges: list[tuple[int, int]] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        if not stretch.param.numel():
            continue
        start = stretch.start // BLOCK * BLOCK
        stop = round_up_to_block(stretch.start + stretch.param.numel())
        if ranges and start <= ranges[-1][1]:
            start, stop = ranges[-1][0], max(stop, ranges.pop()[1])
        ranges.append((start, stop))
    return ranges


def _slice_pairs(
    pairs: CodePairs, begin: int, count: int
) -> list[tuple[Tensor, Tensor]]:
    """Returns the codes and scales, old and new, of ``count`` elements."""
    blocks = slice(begin // BLOCK, (begin + count) // BLOCK)
    spans = (slice(begin, begin + count), blocks) * (len(pairs) // 2)
    return [(old[s], new[s]) for (old, new), s in zip(pairs, spans, strict=True)]


def _step_stretch(
    kernel: Kernel, stretch: Stretch, moments: Sequence[Tensor], begin: int
) -> None:
    """Writes the step of those elements of a stretch that lie in a chunk.

    Args:
        moments: the chunk, decoded; it begins at ``begin``.
    """
    first, param = stretch.start, stretch.param
    low = max(first, begin)
    high = min(first + param.numel(), begin + moments[0].numel())
    if high <= low:
        return
    dense = param if param.is_contiguous() else param.contiguous()
    target = dense.view(-1)[low - first : high - first]
    grad = stretch.grad.reshape(-1)[low - first : high - first]
    wide = torch.promote_types(target.dtype, torch.float32)
    parts = [x[low - begin : high - begin] for x in moments]
    row = [x.to(wide).contiguous() for x in (target, grad, *parts)]
    kernel(*([x] for x in row), weight_decay=stretch.decay)
    for x, new in zip((target, *parts), (row[0], *row[2:]), strict=True):
        if x is not new:
            x.copy_(new)
    if dense is not param:
        param.copy_(dense)


class Codes(NamedTuple):
    """A moment in 8 bits: by buffer, uint8 codes and float32 scales of their blocks."""

    codes: tuple[Leaf, ...]
    scales: tuple[Leaf, ...]


def is_coded(state: PyTree) -> bool:
    """Returns whether ``state`` is an optimizer's with moments in 8 bits."""
    return isinstance(state, tuple) and hasattr(state, "coders")


def decode_state(state: State) -> State:
    """Returns a state with float32 tensors in place of codes, this rank's parts."""
    count, *moments, places = state
    pairs = zip(moments, state.coders, strict=True)
    return type(state)(count, *(_decode_moment(x, coder) for x, coder in pairs), places)


def encode_state(state: State, decoded: State) -> State:
    """Encodes what `decode_state` returned, laid out as the codes of ``state``."""
    count, *moments, places = state
    encoded = [
        _encode_moment(codes, tensors, coder, seed63(count, k))
        for k, (codes, tensors, coder) in enumerate(
            zip(moments, decoded[1:-1], state.coders, strict=True)
        )
    ]
    return type(state)(count, *encoded, places)


def _decode_moment(moment: Codes, coder: Coder) -> tuple[Tensor, ...]:
    tensors = []
    for codes, scales in zip(*moment, strict=True):
        codes = _flat_local(codes)
        out, spare = codes.float(), codes.int()  # both are written over
        if codes.numel():
            coder.decode(codes, _flat_local(scales), out, spare)
        tensors.append(out)
    return tuple(tensors)


def _encode_moment(
    moment: Codes, tensors: tuple[Tensor, ...], coder: Coder, seed: int
) -> Codes:
    columns: tuple[list[Leaf], list[Leaf]] = [], []
    for codes, scales, x in zip(*moment, tensors, strict=True):
        new = [space_of(t).empty_like(t) for t in map(local_tensor, (codes, scales))]
        if x.numel():
            dither, (code, scale) = (
                dither_bits(x.device, x.numel(), seed),
                map(_flat_local, new),
            )
            coder.encode(x.clone(), code, scale, dither, torch.empty_like(dither))
        for column, old, t in zip(columns, (codes, scales), new, strict=True):
            column.append(old.with_local(t) if is_sharded(old) else t)
    return Codes(*map(tuple, columns))


class CodedCodec(Codec):
    """Stores moments in 8 bits, with a scale for each block of what one rank holds.

    Args:
        state: makes the state, as that of a rule, with a checksum of the parameters'
            layouts at its end; its class has a coder for each moment, ``coders``.
    """

    elementwise = False  # codes lie by buffer, and are stepped all at once
    state: Callable[..., State]

    def __init__(self, state: Callable[..., State]):
        super().__init__()
        self.state = state

    def init(self, rule: ElementRule, params: Tree) -> State:
        check_parts_dtype(params, torch.uint8)
        leaves, treedef = tree.flatten(params, is_sharded)
        groups, places = code_groups(leaves, paths_of(treedef))

        def codes() -> Codes:
            return Codes(
                tuple(zero_codes(g, 1, torch.uint8) for g in groups),
                tuple(zero_codes(g, BLOCK, torch.float32) for g in groups),
            )

        return self.state(0, *(codes() for _ in range(rule.moments)), places)

    def phases(
        self,
        rule: ElementRule,
        grads: Tree,
        state: State,
        params: Tree,
        returns_params: bool,
    ) -> Phases:
        if not returns_params:
            rule.match_trees(grads, params, ())  # checks that parameters are given
            # Codes are only ever written, so an update is the difference that a step
            # makes to float32 copies of the parameters.
            like = grads if params is None else params
            start = tree.map(lambda x: _wide_param(x, rule), like, is_leaf=is_sharded)
            apply = partial(self.phases, rule, returns_params=True)
            updates = update_from_apply(apply, grads, state, start)
            yield
            return updates
        matched = rule.match_trees(grads, params, ())
        if composable() or matched.differentiated:
            raise RuntimeError(
                f"{rule.name} with moments in 8 bits: this update is differentiated, "
                "and codes have no derivative: leave moment_dtype out"
            )
        groups, places = code_groups(matched.trees[0], paths_of(matched.treedef))
        if places != state.places:
            raise ValueError(
                f"{rule.name}: moments in 8 bits were made for parameters of other "
                "layouts. A scale is of a block of what one rank has, so they fit no "
                "other mesh, zero or units: make them by init(params) of parameters "
                "with these layouts (ff.init_state does), and load them there"
            )
        decays, count = rule.leaf_decays(matched), state.count
        kernel = rule.kernel_at(count)
        yield
        writing = Writing(matched)
        with torch.no_grad():
            (target,) = writing.targets([matched.trees[0]])
            count_write(target.tensors)
            # Codes, scales, codes, ...: each a column of leaves, one for each group.
            columns = [column for codes in state[1:-1] for column in codes]
            old_and_new = [
                (x, writing.target(list(x), flat_buffers([x])[0]).leaves)
                for x in columns
            ]
            stretches = find_stretches(matched, target, decays, groups)
            step = CodedStep(kernel, state.coders, count)
            for i, group in enumerate(groups):
                pairs = [
                    (_flat_local(old[i]), _flat_local(new[i]))
                    for old, new in old_and_new
                ]
                step.write(i, group, stretches.get(i, []), pairs)
        writing.finish()
        new_columns = [tuple(new) for _, new in old_and_new]
        moments = [
            Codes(*new_columns[k : k + 2]) for k in range(0, len(new_columns), 2)
        ]
        params = matched.restore(target.leaves, matched.trees[0])
        return params, self.state(count + 1, *moments, places)


def codec_of(
    dtype: torch.dtype | None,
    coded_state: Callable[..., State],
    scaled_state: Callable[..., State] | None = None,
) -> Codec:
    """Returns the codec of a ``moment_dtype``.

    Args:
        coded_state: makes the state of moments in 8 bits.
        scaled_state: makes that of float16 moments with a scale; without it these have
            no scale.
    """
    if dtype == torch.uint8:
        return CodedCodec(coded_state)
    if dtype == torch.float16 and scaled_state is not None:
        return ScaledCodec(scaled_state)
    return Codec(dtype)


def _flat_local(leaf: Leaf) -> Tensor:
    return local_tensor(leaf).view(-1)


def _wide_param(leaf: Leaf, rule: ElementRule) -> Leaf:
    """Returns a parameter in float32, or zeros in its place if none decays."""
    if not trainable(leaf):
        return leaf
    x = local_tensor(leaf).detach()
    wide = step_memory_like(x, torch.float32)
    wide = wide.copy_(x) if rule.weight_decay else wide.zero_()
    return leaf.with_local(wide) if is_sharded(leaf) else wide

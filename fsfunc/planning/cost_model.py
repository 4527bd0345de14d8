"""The cost model: seconds of operators, memory, collectives and messages.

`simulation` asks it for each event of a plan, `outlines` for a stack's collectives. It
knows no sharding scheme: an operator costs its arithmetic or its bytes, whichever takes
longer, and its launch; a collective costs what a ring over its ranks takes::

    seconds(mm)         = max(flops / (peak · efficiency), bytes / bandwidth) + launch
    seconds(all_gather) = bytes sent / slowest link on the ring + steps · latency
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from fsfunc.comm.ledgers import Record
from fsfunc.comm.operations import OPERATIONS, MessageRounds
from fsfunc.planning.events import Op
from fsfunc.planning.machines import Hardware
from fsfunc.tree.structure import did_you_mean


def op_seconds(op: Op, hardware: Hardware, attention: str | None = None) -> float:
    """Returns the seconds of an operator, without the first touch of what it makes.

    A product takes flops / (peak · efficiency), read from the curve at the size
    (b·m·k·n)**(1/3): the cube of equal work. A batch counts as more work of one
    product, as that is how it fills a chip; where its entries are too small to reuse
    what they read, their bytes bound it. Where the hardware gives its ``processors``,
    the efficiency is multiplied by :func:`fill`. An attention takes flops / (peak ·
    :func:`attention_share`), of half the flops under a causal mask. Neither is faster
    than its bytes over the memory's bandwidth, which, or a rate of its own, is all that
    another operator takes. Beside the device (``op.store``) its bytes over the rate of
    that store are all: nothing goes on meanwhile. To all of it comes the overhead of
    one operator, unless there are ``processors``: then the host launches it meanwhile.

    Args:
        op: the operator.
        hardware: the device that it runs on.
        attention: the generation of its kernels; None: the likeliest.

    Raises:
        ValueError: a product of a dtype whose peak the hardware does not give; an
            attention of a generation, or a store, that it does not know.

    >>> import torch
    >>> from fsfunc.planning.hardware import A100_40
    >>> mm = Op("aten.mm", 2 * 4096**3, 6 * 4096**2, torch.bfloat16, (1, *[4096] * 3))
    >>> f"{op_seconds(mm, A100_40) * 1e6:.0f} us"
    '638 us'
    """
    store_rate = _store_rate(op, hardware)
    rate = store_rate or hardware.rates.get(op.name, hardware.bandwidth)
    seconds = op.bytes / rate
    if op.flops and not store_rate:
        seconds = max(seconds, _computing(op, hardware, attention))
    return seconds if hardware.processors else seconds + hardware.overhead


def _store_rate(op: Op, hardware: Hardware) -> float | None:
    """Returns bytes/s of tensors beside the device; None for those on it."""
    if not op.store or (op.store == "host" and op.store not in hardware.stores):
        return None
    if op.store not in hardware.stores:
        raise ValueError(
            f'{op.name} has tensors in the store "{op.store}", of which '
            f"{hardware.name} gives no rate: replace(hardware, stores="
            f'{{"{op.store}": (bytes/s of copies, bytes/s of computing, bytes), ...}})'
        )
    copied, computed, _ = hardware.stores[op.store]
    return copied if op.crosses else computed


def arithmetic(op: Op) -> tuple[str, int]:
    """Returns the name of the dtype that an operator computes in, and its FLOPs there.

    A complex product is four real ones, where torch counts it as one.
    """
    dtype, flops = op.dtype, op.flops
    if dtype.is_complex:
        dtype, flops = dtype.to_real(), 4 * flops
    return str(dtype).removeprefix("torch."), flops


def _computing(op: Op, hardware: Hardware, attention: str | None) -> float:
    """Returns the seconds of an operator's arithmetic alone."""
    name, flops = arithmetic(op)
    peak = hardware.peak.get(name)
    if peak is None:
        raise ValueError(
            f"{op.name} computes in {name}, and {hardware.name} gives no peak for it, "
            f"only for {', '.join(hardware.peak)}: "
            f'replace(hardware, peak={{"{name}": FLOP/s, ...}})'
        )
    if "_attention" in op.name:
        share = attention_share(op, hardware, attention)
        return flops * (0.5 if op.causal else 1.0) / (peak * share)
    side = (op.flops / 2) ** (1 / 3)  # of a product, (b·m·k·n)**(1/3)
    share = hardware.efficiency_at(side)
    if hardware.processors and len(op.dims) == 4:
        share *= fill(*op.dims, hardware.processors)
    return flops / (peak * share)


# A processor computes one tile of the result at a time. cuBLAS's 16-bit kernels have
# these tiles for large products, and split k if tiles are fewer than processors
# (NVIDIA, Matrix Multiplication Background, 2023: tile and wave quantisation).
_TILES = ((128, 256), (256, 128), (128, 128))
_SPLITS = (1, 2, 4, 8)
# What filling and draining a tile's pipeline takes, in elements of k: an assumption,
# which the published runs bear out.
_DEPTH = 96


@functools.lru_cache(maxsize=4096)
def fill(batch: int, m: int, k: int, n: int, processors: int) -> float:
    """Returns the share of a chip that [batch, m, k] @ [batch, k, n] keeps busy.

    It is result / (waves · processors · tile) · k / (k + 96). Lost are: what tiles
    compute beyond the edge, processors without a tile in the last wave, and the time to
    fill a tile's pipeline. The best counts of three tiles, with k cut into 1, 2, 4 or 8
    parts that run side by side.

    >>> f"{fill(1, 128, 4096, 256 * 108, 108):.3f}, {fill(1, 128, 4096, 257, 108):.3f}"
    '0.977, 0.125'
    """
    best = 0.0
    for rows, columns in _TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        for splits in _SPLITS if tiles < processors else (1,):
            waves = math.ceil(tiles * splits / processors)
            busy = batch * m * n * splits / (waves * processors * rows * columns)
            depth = k / splits
            best = max(best, busy * depth / (depth + _DEPTH))
    return best


# FlashAttention-2 (Dao 2023, fig. 5 to 7) and -3 (Shah et al. 2024, fig. 5 and 6):
# under a mask, sequences of 512 reach half of the rate of infinite ones, and heads of
# 64 about four fifths of that of heads of 128.
_HALF_LENGTH, _SMALL_HEAD, _SMALL_SHARE = 512, 128, 0.8


def attention_share(op: Op, hardware: Hardware, generation: str | None) -> float:
    """Returns the share of peak that a fused attention reaches.

    That of its kernels' generation, forward or backward, over 1 + 512 / length, and 0.8
    of it where heads are smaller than 128; or the hardware's one share for all. The
    memory-efficient kernel has the rate of FlashAttention-1 (Dao 2023, fig. 4 to 7:
    xFormers' kernel, which torch's is), but beside FlashAttention-3: there cuDNN's
    kernels take masks, and heads of unlike sizes, too.

    Raises:
        ValueError: a generation that the hardware does not know; names those it does.
    """
    attention = hardware.attention
    if not isinstance(attention, Mapping):
        return attention
    if generation is not None and generation not in attention:
        raise ValueError(
            f'{hardware.name} knows no attention "{generation}"'
            f"{did_you_mean(generation, attention)}; it knows: {', '.join(attention)}"
        )
    generation = generation or next(iter(attention))
    if "_efficient_attention" in op.name and generation != "fa3":
        generation = "fa1" if "fa1" in attention else generation
    shares = attention[generation]
    share = shares["backward" in op.name]
    if op.dims:
        _, _, keys, head = op.dims
        share *= (_SMALL_SHARE if head < _SMALL_HEAD else 1.0) / (
            1 + _HALF_LENGTH / keys
        )
    return share


def taken_seconds(size: int, hardware: Hardware, op: str) -> float:
    """Returns the seconds of memory's first touch and its return to the system.

    Only what an operator makes costs that. What the step was given was touched before,
    and what is allocated empty is a buffer of a collective, which is used again. All of
    it is free under a caching allocator (``hardware.fresh`` is None).

    Args:
        size: bytes.
        hardware: the device.
        op: the operator that allocated it, as in a plan's ``Allocated``.

    >>> from fsfunc.planning.hardware import H100, replace
    >>> slow = replace(H100, fresh=2e9)
    >>> [taken_seconds(10**9, h, "aten.mm.default") for h in (H100, slow)]
    [0.0, 0.5]
    >>> [taken_seconds(10**9, slow, op) for op in ("", "aten.empty.out")]
    [0.0, 0.0]
    """
    if hardware.fresh is None or not op or "empty" in op:
        return 0.0
    return size / hardware.fresh


def collective_seconds(
    record: Record, ranks: Sequence[int], hardware: Hardware
) -> float:
    """Returns the seconds of a collective, from the moment when all ranks issued it.

    What a rank sends by the ledger goes over the slowest link on its way: at each
    level of the network, one edge of the ring leaves each group of the level below.
    The group's other ranks send as much in collectives of their own: so k members of a
    node of r get k/r of its bandwidth. An all-to-all is no ring, nor is what the
    hardware calls ``pairwise``: each of the k sends for itself what leaves the node.

    A ring takes a message's latency for each of its n-1 steps: at each level, as many
    as it has groups of the level below, less one for each of its own. A psum goes up a
    tree and down again, which sends as much in 2 log2 n steps. Messages of a ppermute
    go at once, and those of what is ``pairwise``: twice, of a psum.

    Args:
        record: the ledger's record of it on one rank.
        ranks: all that take part, by their numbers on the mesh.
        hardware: the network, on which ranks lie in order.

    Raises:
        ValueError: hardware without levels, or whose outermost level ends before the
            last of ``ranks``.

    Source: Patarasuk and Yuan (2009) for the ring; Sanders, Speck and Träff (2009) for
    two trees that together have its bandwidth.

    >>> import torch
    >>> from fractions import Fraction
    >>> from fsfunc.planning.hardware import A100_40
    >>> gather = Record("all_gather", ("data",), Fraction(10**9), torch.bfloat16)
    >>> f"{collective_seconds(gather, range(8), A100_40) * 1e3:.2f} ms"
    '4.19 ms'
    >>> f"{collective_seconds(gather, range(16), A100_40) * 1e3:.2f} ms"
    '25.06 ms'
    """
    n = len(ranks)
    if n < 2:
        return 0.0
    sent_bytes, slowest, latency = float(record.bytes), 0.0, 0.0
    pairwise = record.op in hardware.pairwise
    reduces, rounds = OPERATIONS[record.op].all_reduces, OPERATIONS[record.op].rounds
    # By group of the level below: how many of `ranks` are in it. At first each rank is
    # a group of its own.
    inner_groups, inner_width = {rank: 1 for rank in ranks}, 1
    for level in hardware.levels:
        outer_groups: dict[int, int] = {}
        for rank in ranks:
            group = rank // level.ranks if level.ranks else 0
            outer_groups[group] = outer_groups.get(group, 0) + 1
        steps = len(inner_groups) - len(outer_groups)
        if steps:
            members = min(inner_groups.values())
            leaving = sent_bytes
            if pairwise or rounds is MessageRounds.PAIRS:
                leaving = sent_bytes * members * (n - members) / (n - 1)
            slowest = max(slowest, leaving * inner_width / (level.bandwidth * members))
            if reduces:  # up a tree and down again
                steps = 2 * math.ceil(
                    math.log2(-(-len(inner_groups) // len(outer_groups)))
                )
            if pairwise or rounds is MessageRounds.ONE:
                latency = max(latency, level.latency * (1 + reduces))
            else:
                latency += level.latency * steps
        if len(outer_groups) == 1:  # all ranks are in one group: the way ends here
            measured_rate = hardware.rates.get(record.op)
            return (
                max(slowest, sent_bytes / measured_rate if measured_rate else 0.0)
                + latency
            )
        inner_groups, inner_width = outer_groups, level.ranks
    raise ValueError(_too_small(hardware, max(ranks)))


def message_seconds(size: float, source: int, target: int, hardware: Hardware) -> float:
    """Returns the seconds of a message of ``size`` bytes from one rank to another.

    Between groups it gets one rank's share of the bandwidth that leaves the sender's
    group, as the others there send messages of their own.

    Raises:
        ValueError: as :func:`collective_seconds`.

    >>> from fsfunc.planning.hardware import H100
    >>> message_seconds(450e6, 0, 7, H100), message_seconds(50e6, 7, 8, H100)
    (0.0012534, 0.001264)
    """
    width = 1
    for level in hardware.levels:
        if level.ranks == 0 or source // level.ranks == target // level.ranks:
            return size * width / level.bandwidth + level.latency
        width = level.ranks
    raise ValueError(_too_small(hardware, max(source, target)))


def _too_small(hardware: Hardware, rank: int) -> str:
    if not hardware.levels:
        return (
            f"{hardware.name} has no links: replace(hardware, levels=[Level(ranks=0, "
            "bandwidth=bytes/s, latency=seconds)])"
        )
    return (
        f"rank {rank} lies outside of {hardware.name}, whose outermost level has "
        f"{hardware.levels[-1].ranks} ranks: give that level ranks=0, for all there are"
    )

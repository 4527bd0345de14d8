"""``measure_hardware``: the machine at hand, as an estimate wants it described.

All that is timed runs on all ranks at once, as a step does: cores, caches, memory and
links that they share are measured as shared. Nothing here knows of a sharding scheme.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch

from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Here, Mesh, here, maybe_here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.planning.events import Allocated, Op, Ran
from fsfunc.planning.hardware import PAIRWISE
from fsfunc.planning.machines import Hardware, Level
from fsfunc.planning.observer import Observer
from fsfunc.planning.timed_calls import (
    Sizes,
    Stopwatch,
    attention,
    chain,
    layer,
    specimens,
)

# Of all the time: what each part may take.
OVERHEAD, MEMORY, PRODUCTS, ATTENTION, OPERATORS = 0.02, 0.08, 0.25, 0.1, 0.3
SLOW_PAGES = 0.25  # a first touch that costs less than this share of the work is none
MOST_TURNS = 16  # sets of tensors that no cache holds together
SENDING = ("all_gather", "psum_scatter", "psum")
ALONE, BESIDE = 0.15, 0.1  # of collectives: by themselves, and beside products
MOST_BUFFERS = 16
PASSES = 3  # over everything: what disturbs one pass is not in the median


@api_boundary
def measure_hardware(
    mesh: Mesh | None = None, *, name: str = "this machine", seconds: float = 5.0
) -> Hardware:
    """The machine at hand as :class:`Hardware`, equal on every rank.

    Alone it measures one process, which has no links. On a mesh of processes every rank
    calls it, and the links between them are measured as one level, through the
    library's own collectives.

    Times are lower quartiles of many, averaged over the ranks, and the median of three
    passes. Products of three
    layouts, as a layer's forward and its two gradients have them, give the peak and the
    curve; attention runs forward and backward, under a causal mask. Operators are timed
    one by one on activations; the first touch of the memory that they take is told
    apart. A product beside a transfer shows how far they overlap.

    Args:
        mesh: of processes; None: that of the ``spmd`` around the call, if any.
        name: of what is returned.
        seconds: about how long it may take; less than 2 measures badly.

    Raises:
        ValueError: a mesh of ranks that are no processes, which send nothing; seconds
            not above 0.

    Cost: about ``seconds`` on every rank; some hundred collectives, in no ledger.
    """
    if not seconds > 0:
        raise ValueError(f"seconds is above 0, got {seconds!r}")
    at, cuda = _place(mesh), torch.cuda.is_available()
    kind = torch.device("cuda", torch.cuda.current_device()) if cuda else None
    watch = Stopwatch(kind or torch.device("cpu"), at, seconds / PASSES)
    with torch.no_grad():
        found = [_measured(watch, Sizes.of(watch.device)) for _ in range(PASSES)]
    paired = at is not None and getattr(at.link, "paired", False) and not cuda
    ways = PAIRWISE if paired else ()
    return Hardware(name=name, **peaked(middle(found)), pairwise=ways)


def _measured(watch: Stopwatch, sizes: Sizes) -> dict[str, Any]:
    """All fields but the name, measured once."""
    small, length = torch.ones(4, device=watch.device), 20
    # A call alone is subtracted from what is measured; autograd's share is a step's.
    alone = watch(lambda: small + small, OVERHEAD / 2, batch=50)
    overhead = watch(chain(watch.device, length), OVERHEAD / 2) / (2 * length)
    fields: dict[str, Any] = {"overhead": alone, **_memory(watch, sizes)}
    fields |= _products(watch, sizes, alone)
    bare = Hardware(name="", **fields, attention=1.0, levels=())
    fields["attention"] = _attention(watch, sizes, bare)
    rates, levels = _rates(watch, sizes, bare), ()
    if watch.where is not None:
        links = _links(watch, watch.where, sizes)
        rates, levels = {**rates, **links.rates}, (links.level,)
        fields["overlap"] = links.overlap
    return {**fields, "overhead": overhead, "rates": rates, "levels": levels}


def peaked(fields: dict[str, Any]) -> dict[str, Any]:
    """The same rates of products, of which the largest is the peak.

    Each pass has a peak of its own, perhaps at another size than the others'.
    """
    top = max(share for _, share in fields["efficiency"])
    peak = {name: rate * top for name, rate in fields["peak"].items()}
    curve = [(n, share / top) for n, share in fields["efficiency"]]
    return {**fields, "peak": peak, "efficiency": curve}


def middle(found: Sequence[Any]) -> Any:
    """Of values of one structure, each number's median; None where most are."""
    first = found[0]
    if isinstance(first, dict):
        return {key: middle([one[key] for one in found]) for key in first}
    if isinstance(first, (list, tuple)):
        return [middle(column) for column in zip(*found, strict=True)]
    if isinstance(first, Level):
        latency = middle([level.latency for level in found])
        bandwidth = middle([level.bandwidth for level in found])
        return dataclasses.replace(first, bandwidth=bandwidth, latency=latency)
    numbers = [one for one in found if one is not None]
    return statistics.median_high(numbers) if 2 * len(numbers) > len(found) else None


def _place(mesh: Mesh | None) -> Here | None:
    at = maybe_here() if mesh is None else here(mesh)
    if at is None:
        return None
    if at.mesh.backend != "processes":
        raise ValueError(
            f"the ranks of {at.mesh} are no processes, so there are no links to "
            "measure: measure outside of spmd, or on a mesh of processes"
        )
    return at


# Memory


def _memory(watch: Stopwatch, sizes: Sizes) -> dict[str, Any]:
    """Size and bandwidth of memory, and the cost of its first touch."""
    large = [torch.ones(sizes.memory, device=watch.device) for _ in range(3)]
    streamed = watch(lambda: torch.add(large[0], large[1], out=large[2]), MEMORY / 2)
    x, out = large[0][: sizes.touched], large[2][: sizes.touched]
    warm = watch(lambda: torch.add(x, x, out=out), MEMORY / 4)
    touched = watch(lambda: torch.add(x, x), MEMORY / 4) - warm
    return {
        "memory": _capacity(watch),
        "bandwidth": 3 * large[0].nbytes / streamed,
        "fresh": x.nbytes / touched if touched > SLOW_PAGES * warm else None,
    }


def _capacity(watch: Stopwatch) -> int:
    if watch.device.type == "cuda":
        return torch.cuda.get_device_properties(watch.device).total_memory
    alone = watch.where.size if watch.where is not None else 1
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", alone))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // max(sharing, 1)


# Products and attention


def _products(watch: Stopwatch, sizes: Sizes, overhead: float) -> dict[str, Any]:
    """Peaks of all dtypes, and the curve of the one that training uses."""
    main = _main_dtype(watch)
    rates = [_rate(watch, n, main, sizes, overhead) for n in sizes.products]
    peak = max(rates)
    peaks = {_name(main): peak}
    there = rates[sizes.products.index(sizes.other)] / peak
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        if dtype != main:
            reached = _rate(watch, sizes.other, dtype, sizes, overhead)
            peaks[_name(dtype)] = reached / there
    curve = [(n, r / peak) for n, r in zip(sizes.products, rates, strict=True)]
    return {"peak": peaks, "efficiency": curve}


def _main_dtype(watch: Stopwatch) -> torch.dtype:
    return torch.bfloat16 if watch.device.type == "cuda" else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rate(
    watch: Stopwatch, n: int, dtype: torch.dtype, sizes: Sizes, overhead: float
) -> float:
    """FLOP/s of products [n, n] @ [n, n], over the layouts that training has."""
    turns = max(1, min(MOST_TURNS, sizes.memory // n**2))
    call = layer(n, turns, watch.device, dtype)
    spent = watch(call, PRODUCTS / (len(sizes.products) + 3)) - 3 * overhead
    return 3 * 2 * n**3 / max(spent, 1e-9)


def _attention(watch: Stopwatch, sizes: Sizes, bare: Hardware) -> float:
    dtype = _main_dtype(watch)
    call = attention(sizes, watch.device, dtype)
    ops, aside = _observed(call, bare)
    flops = sum(op.flops * (0.5 if op.causal else 1.0) for op in ops)
    spent = watch(call, ATTENTION) - aside
    return min(1.0, flops / max(spent, 1e-9) / bare.peak[_name(dtype)])


# Operators


def _observed(call: Callable[[], Any], bare: Hardware) -> tuple[list[Op], float]:
    """The operators of a call, and the seconds that are not their own work."""
    observer = Observer()
    observer.ignores_silence = True  # also where no ledger is open
    with observer:
        kept = call()
    events = observer.book.events
    del kept
    ops = [event.op for event in events if isinstance(event, Ran)]
    taken = sum(event.bytes for event in events if isinstance(event, Allocated))
    touched = taken / bare.fresh if bare.fresh else 0.0
    return ops, len(ops) * bare.overhead + touched


def _rates(watch: Stopwatch, sizes: Sizes, bare: Hardware) -> dict[str, float]:
    """bytes/s of each operator that a step has beside its products."""
    calls, rates = specimens(sizes, watch.device), {}
    for call in calls:
        ops, aside = _observed(call, bare)
        if (
            len(ops) != 1
        ):  # the device makes it of others, which have rates of their own
            continue
        spent = watch(call, OPERATORS / len(calls))
        # Where nearly all is first touch, what is left is noise: no less than a tenth.
        rates[ops[0].name] = ops[0].bytes / max(spent - aside, 0.1 * spent)
    return rates


# Links


class _Links(NamedTuple):
    """The links between ranks as one level, bytes/s of each collective, the overlap."""

    level: Level
    rates: dict[str, float]
    overlap: float


def _links(watch: Stopwatch, where: RankGroup, sizes: Sizes) -> _Links:
    """Measures the links.

    Each collective is timed alone, on buffers of several sizes, which gives a latency
    and a rate; and beside a product that outlasts it, as a step issues it, which gives
    what it adds to the product's time. What it does not add is the overlap. Where cores
    copy what they send it may add more than it takes alone: then the rate is that of
    what it adds.
    """
    rates, added, latency = {}, [], 0.0
    paired = watch.device.type == "cpu" and getattr(where.link, "paired", False)
    for op in SENDING:
        sent, spent = [], []
        for size in sizes.messages:
            start, share = _sending(watch, where, op, size, sizes)
            sent.append(share)
            each = ALONE / len(SENDING) / len(sizes.messages)
            spent.append(watch.together(lambda start=start: start().wait(), each))
        least, slope = line(sent, spent)
        start, _ = _sending(watch, where, op, sizes.messages[-2], sizes)
        added.append(_added(watch, start, spent[-2], sizes))
        rates[op] = 1 / slope / max(1.0, added[-1])
        if op == "all_gather":  # in one step where it is pairwise
            latency = least / (1 if paired else where.size - 1)
    level = Level(ranks=0, bandwidth=max(rates.values()), latency=latency)
    return _Links(level, rates, min(1.0, max(0.0, 1 - sum(added) / len(added))))


def _sending(
    watch: Stopwatch, where: RankGroup, op: str, size: int, sizes: Sizes
) -> tuple[Callable[[], Any], float]:
    """Starts a collective of whole buffers of ``size`` bytes; what a rank sends of one.

    Buffers take turns, so that no cache holds them: a step uses each of its own once.
    """
    n = where.size
    count = max(size // 4 // n, 1)
    turns = min(MOST_BUFFERS, -(-4 * sizes.memory // size))
    wholes = [torch.ones(n * count, device=watch.device) for _ in range(turns)]
    parts = [x[:count].clone() for x in wholes]
    turn = cycle(zip(wholes, parts, strict=True))

    def start() -> Any:
        whole, part = next(turn)
        with silence():
            if op == "all_gather":
                return where.start(op, part, out=whole)
            return where.start(op, whole)

    return start, wholes[0].nbytes * (n - 1) / n * (2 if op == "psum" else 1)


def _added(
    watch: Stopwatch, start: Callable[[], Any], alone: float, sizes: Sizes
) -> float:
    """The time that a transfer adds to products beside it, over its time alone."""
    share, side = BESIDE / len(SENDING) / 3, sizes.other
    x, y = (torch.randn(side, side, device=watch.device) for _ in range(2))
    out = torch.empty_like(x)
    one = watch.together(lambda: torch.mm(x, y, out=out), share)
    times = max(1, round(2 * alone / one))

    def compute() -> None:
        for _ in range(times):
            torch.mm(x, y, out=out)

    def both() -> None:
        work = start()
        compute()
        work.wait()

    return (watch.together(both, share) - watch.together(compute, share)) / alone


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(start, slope) of the line through the points, of least relative error.

    Where noise leaves no slope, all that the longest transfer took is its bytes'.
    """
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    x0 = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y0 = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    rows = list(zip(weights, xs, ys, strict=True))
    slope = sum(w * (x - x0) * (y - y0) for w, x, y in rows) / sum(
        w * (x - x0) ** 2 for w, x, _ in rows
    )
    if slope <= 0:
        longest = max(range(len(xs)), key=lambda i: xs[i])
        return 0.0, ys[longest] / xs[longest]
    return max(y0 - slope * x0, 0.0), slope

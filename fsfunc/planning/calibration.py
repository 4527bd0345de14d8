"""``measure_hardware``: the machine at hand, measured as a `machines.Hardware`.

It times calls (`timed_calls`) on all ranks at once, as a step runs them: so cores,
caches, memory and links that ranks share are measured as shared. What a call computes
and moves is seen by an `observer.Observer`; the rest of its time is subtracted::

    rate of an operator = its bytes / (time - launch - first touch of what it allocates)
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsfunc.comm.backends.link import Handle
from fsfunc.comm.groups import RankGroup
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Here, Mesh, here, maybe_here
from fsfunc.comm.tracebacks import api_boundary
from fsfunc.planning.events import Allocated, Op, Ran
from fsfunc.planning.hardware import (
    HOST_MARGIN,
    MARGIN,
    PAIRWISE,
    PINNED_MARGIN,
    PROCESS,
    TAKEN,
)
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

# The shares of all the time that the parts may take.
OVERHEAD, MEMORY, PRODUCTS, ATTENTION, OPERATORS = 0.02, 0.08, 0.25, 0.1, 0.3
SLOW_PAGES = 0.25  # a first touch counts if it costs this share of the work or more
MOST_TURNS = 16  # at most so many sets of tensors take turns, to miss the caches
SENDING = ("all_gather", "psum_scatter", "psum")
# The shares of the time for collectives: by themselves, and beside products.
ALONE, BESIDE = 0.15, 0.1
MOST_BUFFERS = 16
PINNED = 2**17  # bytes from which on malloc gives memory back, as tensors need it
PASSES = 3  # over everything: what disturbs one pass is not in the median


@api_boundary
def measure_hardware(
    mesh: Mesh | None = None, *, name: str = "this machine", seconds: float = 5.0
) -> Hardware:
    """Measures the machine at hand; returns a :class:`Hardware`, equal on every rank.

    Alone it measures one process, which has no links. On a mesh of processes every rank
    calls it, and the links between them are measured as one level, through the
    library's own collectives.

    A time is the lower quartile of many, averaged over the ranks, and of three passes
    the median. Products of three layouts, those of a layer's forward and its two
    gradients, give the peak and the curve. Attention runs forward and backward, under a
    causal mask. Operators are timed one by one on activations; the first touch of the
    memory that they allocate is subtracted. A product beside a transfer shows how far
    they overlap. ``memory`` is a rank's part of what there is, less what its process
    holds when this is called: the interpreter and torch, and tensors made before.
    Its ``margin`` on a host is smaller where ``MALLOC_MMAP_THRESHOLD_`` is set, to 128
    KiB or less: then freed tensors go back to the system, as plans have it.

    Args:
        mesh: a mesh of processes; None: that of the ``spmd`` around the call, if any.
        name: the name of the hardware that is returned.
        seconds: about how long it may take; less than 2 measures badly.

    Raises:
        ValueError: a mesh of ranks that are no processes, which send nothing; seconds
            not above 0.

    Cost: about ``seconds`` on every rank; some hundred collectives, in no ledger.
    """
    if not seconds > 0:
        raise ValueError(f"seconds is above 0, got {seconds!r}")
    place, cuda = _place(mesh), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else None
    watch = Stopwatch(device or torch.device("cpu"), place, seconds / PASSES)
    # A first step brings more, such as the code of kernels, if none was run yet.
    process = 0 if cuda else max(PROCESS, int(watch.largest(_resident_bytes())))
    with torch.no_grad():
        passes = [_measured(watch, Sizes.of(watch.device)) for _ in range(PASSES)]
    is_paired = place is not None and getattr(place.link, "paired", False) and not cuda
    pairwise = PAIRWISE if is_paired else ()
    fields = rescale_to_peak(medians(passes))
    # What is no tensor: on a host the process itself, on a card what is in TAKEN.
    fields["memory"] = max(1, fields["memory"] - (TAKEN if cuda else process))
    fields |= {"process": process, "margin": MARGIN if cuda else _host_margin()}
    return Hardware(name=name, **fields, pairwise=pairwise)


def _measured(watch: Stopwatch, sizes: Sizes) -> dict[str, Any]:
    """Returns all fields of a ``Hardware`` but the name, measured once."""
    small, length = torch.ones(4, device=watch.device), 20
    # A call without autograd is what each measured call has beside its work. A step's
    # operators also make graph nodes and run backward: theirs is the mean of a chain.
    call_overhead = watch(lambda: small + small, OVERHEAD / 2, batch=50)
    overhead = watch(chain(watch.device, length), OVERHEAD / 2) / (2 * length)
    fields: dict[str, Any] = {"overhead": call_overhead, **_memory(watch, sizes)}
    fields |= _products(watch, sizes, call_overhead)
    without_links = Hardware(name="", **fields, attention=1.0, levels=())
    fields["attention"] = _attention(watch, sizes, without_links)
    rates, levels = _rates(watch, sizes, without_links), ()
    if watch.rank_group is not None:
        links = _links(watch, watch.rank_group, sizes)
        rates, levels = {**rates, **links.rates}, (links.level,)
        fields["overlap"] = links.overlap
    return {**fields, "overhead": overhead, "rates": rates, "levels": levels}


def rescale_to_peak(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns fields in which the largest share of the efficiency curve is 1.

    Each pass has its peak at a size of its own: so the medians of the shares may all be
    below 1, and the peak is scaled by the largest.
    """
    top_share = max(share for _, share in fields["efficiency"])
    peak = {name: rate * top_share for name, rate in fields["peak"].items()}
    curve = [(n, share / top_share) for n, share in fields["efficiency"]]
    return {**fields, "peak": peak, "efficiency": curve}


def medians(values: Sequence[Any]) -> Any:
    """Returns each number's median, over values of one structure; None if most are."""
    first = values[0]
    if isinstance(first, dict):
        return {key: medians([value[key] for value in values]) for key in first}
    if isinstance(first, (list, tuple)):
        return [medians(column) for column in zip(*values, strict=True)]
    if isinstance(first, Level):
        latency = medians([level.latency for level in values])
        bandwidth = medians([level.bandwidth for level in values])
        return dataclasses.replace(first, bandwidth=bandwidth, latency=latency)
    numbers = [value for value in values if value is not None]
    return statistics.median_high(numbers) if 2 * len(numbers) > len(values) else None


def _place(mesh: Mesh | None) -> Here | None:
    place = maybe_here() if mesh is None else here(mesh)
    if place is None:
        return None
    if place.mesh.backend != "processes":
        raise ValueError(
            f"the ranks of {place.mesh} are no processes, so there are no links to "
            "measure: measure outside of spmd, or on a mesh of processes"
        )
    return place


# Memory


def _memory(watch: Stopwatch, sizes: Sizes) -> dict[str, Any]:
    """Returns the size and bandwidth of memory, and the rate of its first touch."""
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
    n_ranks = watch.rank_group.size if watch.rank_group is not None else 1
    n_sharing = int(os.environ.get("LOCAL_WORLD_SIZE", n_ranks))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // max(n_sharing, 1)


def _host_margin() -> float:
    """Returns the share to keep free, by what the environment told glibc's malloc."""
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    is_pinned = threshold.isdecimal() and int(threshold) <= PINNED
    return PINNED_MARGIN if is_pinned else HOST_MARGIN


def _resident_bytes() -> int:
    """Returns the bytes that this process holds in memory; 0 where none tells."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Products and attention


def _products(watch: Stopwatch, sizes: Sizes, overhead: float) -> dict[str, Any]:
    """Returns the peaks of all dtypes, and the curve of the one that training uses.

    Other dtypes are measured at one size alone, and scaled by the curve's share there.
    """
    main_dtype = _main_dtype(watch)
    rates = [_rate(watch, n, main_dtype, sizes, overhead) for n in sizes.products]
    peak = max(rates)
    peaks = {_name(main_dtype): peak}
    share_at_other = rates[sizes.products.index(sizes.other)] / peak
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        if dtype != main_dtype:
            reached = _rate(watch, sizes.other, dtype, sizes, overhead)
            peaks[_name(dtype)] = reached / share_at_other
    curve = [(n, r / peak) for n, r in zip(sizes.products, rates, strict=True)]
    return {"peak": peaks, "efficiency": curve}


def _main_dtype(watch: Stopwatch) -> torch.dtype:
    return torch.bfloat16 if watch.device.type == "cuda" else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rate(
    watch: Stopwatch, n: int, dtype: torch.dtype, sizes: Sizes, overhead: float
) -> float:
    """Returns FLOP/s of products [n, n] @ [n, n], over the layouts of training."""
    n_sets = max(1, min(MOST_TURNS, sizes.memory // n**2))
    call = layer(n, n_sets, watch.device, dtype)
    seconds = watch(call, PRODUCTS / (len(sizes.products) + 3)) - 3 * overhead
    return 3 * 2 * n**3 / max(seconds, 1e-9)


def _attention(watch: Stopwatch, sizes: Sizes, bare: Hardware) -> float:
    dtype = _main_dtype(watch)
    call = attention(sizes, watch.device, dtype)
    ops, other_seconds = _observed(call, bare)
    flops = sum(op.flops * (0.5 if op.causal else 1.0) for op in ops)
    seconds = watch(call, ATTENTION) - other_seconds
    return min(1.0, flops / max(seconds, 1e-9) / bare.peak[_name(dtype)])


# Operators


def _observed(call: Callable[[], Any], bare: Hardware) -> tuple[list[Op], float]:
    """Returns the operators of a call, and the seconds that are not their own work."""
    observer = Observer()
    observer.ignores_silence = True  # also where no ledger is open
    with observer:
        output = call()
    events = observer.book.events
    del output
    ops = [event.op for event in events if isinstance(event, Ran)]
    allocated_bytes = sum(
        event.bytes for event in events if isinstance(event, Allocated)
    )
    touch_seconds = allocated_bytes / bare.fresh if bare.fresh else 0.0
    return ops, len(ops) * bare.overhead + touch_seconds


def _rates(watch: Stopwatch, sizes: Sizes, bare: Hardware) -> dict[str, float]:
    """Returns bytes/s of each operator that a step has beside its products."""
    calls, rates = specimens(sizes, watch.device), {}
    for call in calls:
        ops, other_seconds = _observed(call, bare)
        # The device may compose an operator of others, which have their own rates.
        if len(ops) != 1:
            continue
        seconds = watch(call, OPERATORS / len(calls))
        # Where nearly all is first touch, what is left is noise: no less than a tenth.
        rates[ops[0].name] = ops[0].bytes / max(seconds - other_seconds, 0.1 * seconds)
    return rates


# Links


class _Links(NamedTuple):
    """The links between ranks as one level, bytes/s of each collective, the overlap."""

    level: Level
    rates: dict[str, float]
    overlap: float


def _links(watch: Stopwatch, rank_group: RankGroup, sizes: Sizes) -> _Links:
    """Measures the links.

    Each collective is timed alone, on buffers of several sizes, which gives a latency
    and a rate. Then it is timed beside a product that outlasts it, as a step issues it:
    what it adds to the product's time, over its time alone, is 1 - overlap. Where
    CPU cores copy the data, a transfer may add more time than it takes alone; its rate
    is lowered then.
    """
    rates, added_shares, latency = {}, [], 0.0
    paired = watch.device.type == "cpu" and getattr(rank_group.link, "paired", False)
    for op in SENDING:
        sent_bytes, seconds = [], []
        for size in sizes.messages:
            start, bytes_of_one = _sending(watch, rank_group, op, size, sizes)
            sent_bytes.append(bytes_of_one)
            time_share = ALONE / len(SENDING) / len(sizes.messages)
            seconds.append(
                watch.time_transfer(lambda start=start: start().wait(), time_share)
            )
        latency_of_op, slope = fit_line(sent_bytes, seconds)
        start, _ = _sending(watch, rank_group, op, sizes.messages[-2], sizes)
        added_shares.append(_added(watch, start, seconds[-2], sizes))
        rates[op] = 1 / slope / max(1.0, added_shares[-1])
        if op == "all_gather":  # in one step where it is pairwise
            latency = latency_of_op / (1 if paired else rank_group.size - 1)
    level = Level(ranks=0, bandwidth=max(rates.values()), latency=latency)
    return _Links(
        level, rates, min(1.0, max(0.0, 1 - sum(added_shares) / len(added_shares)))
    )


def _sending(
    watch: Stopwatch, rank_group: RankGroup, op: str, size: int, sizes: Sizes
) -> tuple[Callable[[], Handle], float]:
    """Returns a function that starts a collective, and the bytes that a rank sends.

    The collective is of a whole buffer of ``size`` bytes. Several buffers take turns,
    so that no cache holds them: a step uses each of its buffers once.
    """
    n = rank_group.size
    count = max(size // 4 // n, 1)
    n_buffers = min(MOST_BUFFERS, -(-4 * sizes.memory // size))
    wholes = [torch.ones(n * count, device=watch.device) for _ in range(n_buffers)]
    shards = [x[:count].clone() for x in wholes]
    buffers = cycle(zip(wholes, shards, strict=True))

    def start() -> Handle:
        whole, shard = next(buffers)
        with silence():
            if op == "all_gather":
                return rank_group.start(op, shard, out=whole)
            return rank_group.start(op, whole)

    return start, wholes[0].nbytes * (n - 1) / n * (2 if op == "psum" else 1)


def _added(
    watch: Stopwatch, start: Callable[[], Handle], alone: float, sizes: Sizes
) -> float:
    """Returns what a transfer adds to products beside it, over its time alone."""
    time_share, n = BESIDE / len(SENDING) / 3, sizes.other
    x, y = (torch.randn(n, n, device=watch.device) for _ in range(2))
    out = torch.empty_like(x)
    product_seconds = watch.time_transfer(lambda: torch.mm(x, y, out=out), time_share)
    n_products = max(1, round(2 * alone / product_seconds))

    def compute() -> None:
        for _ in range(n_products):
            torch.mm(x, y, out=out)

    def both() -> None:
        work = start()
        compute()
        work.wait()

    return (
        watch.time_transfer(both, time_share) - watch.time_transfer(compute, time_share)
    ) / alone


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Returns (start, slope) of the line of least relative error through points.

    If noise leaves no slope, the start is 0 and the largest x gives the slope: all of
    the longest transfer's time is counted as its bytes'.
    """
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    rows = list(zip(weights, xs, ys, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in rows) / sum(
        w * (x - mean_x) ** 2 for w, x, _ in rows
    )
    if slope <= 0:
        longest = max(range(len(xs)), key=lambda i: xs[i])
        return 0.0, ys[longest] / xs[longest]
    return max(mean_y - slope * mean_x, 0.0), slope

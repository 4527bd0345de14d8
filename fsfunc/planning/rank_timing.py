"""Timing on all ranks at once: calls, and the links between processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from typing import Any

import torch

from fsfunc.comm.collectives import pmax, pmean
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Here
from fsfunc.planning.machines import Level
from fsfunc.planning.sample_operators import Sizes

FEWEST = 3


class Stopwatch:
    """Times calls on all ranks at once; every rank reads the same.

    Args:
        device: where the calls compute.
        at: which rank of which mesh this is; None: a process alone.
        seconds: for all that is timed together.
    """

    def __init__(self, device: torch.device, at: Here | None, seconds: float):
        self.device, self.seconds = device, seconds
        self.where: RankGroup | None = None
        if at is not None and at.mesh.size > 1:
            self.where = group(tuple(at.mesh.axes), at)

    def __call__(self, call: Callable[[], Any], share: float, batch: int = 1) -> float:
        """Seconds of a call: the lower quartile of many, averaged over the ranks.

        Ranks start together and go on for a ``share`` of all the time, so that each is
        measured beside the others. Calls above the median show other programs.

        Args:
            batch: calls between two looks at the clock.
        """
        batch *= 10 if self.device.type == "cuda" else 1
        self._once(call, batch)
        self.mean(0.0)
        times, end = [], time.perf_counter() + share * self.seconds
        while len(times) < FEWEST or time.perf_counter() < end:
            times.append(self._once(call, batch))
        return self.mean(sorted(times)[len(times) // 4])

    def together(self, call: Callable[[], Any], share: float) -> float:
        """Seconds of a call that sends: the median of many, as all ranks make it.

        Not a quartile: that one rank comes late is what sending costs.
        """
        self._once(call, 1)
        first = max(self.most(self._once(call, 1)), 1e-9)
        count = max(FEWEST, int(share * self.seconds / first))
        return self.mean(median(self._once(call, 1) for _ in range(count)))

    def mean(self, value: float) -> float:
        """The mean over all ranks; also where they wait for each other."""
        return self._over_ranks(pmean, value)

    def most(self, value: float) -> float:
        """The largest of all ranks."""
        return self._over_ranks(pmax, value)

    def _over_ranks(self, collective: Callable[..., Any], value: float) -> float:
        if self.where is None:
            return value
        x = torch.tensor([value], dtype=torch.float64, device=self.device)
        with silence():
            return float(collective(x, self.where.axis).item())

    def _once(self, call: Callable[[], Any], batch: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        self._wait()
        return (time.perf_counter() - start) / batch

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


SENDING = ("all_gather", "psum_scatter", "psum")
ALONE, BESIDE = 0.15, 0.1  # of all the time
MOST_BUFFERS = 16


def links(
    watch: Stopwatch, where: RankGroup, sizes: Sizes
) -> tuple[Level, dict[str, float], float]:
    """(the links as one level, bytes/s of each collective, overlap).

    Each collective is timed alone, on buffers of several sizes, which gives a latency
    and a rate; and beside a product that outlasts it, as a step issues it, which gives
    what it adds to the product's time. What it does not add is the overlap. Where cores
    copy what they send it may add more than it takes alone: then the rate is that of
    what it adds.
    """
    rates, added, latency = {}, [], 0.0
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
        if op == "all_gather":
            latency = least / (where.size - 1)
    level = Level(ranks=0, bandwidth=max(rates.values()), latency=latency)
    return level, rates, min(1.0, max(0.0, 1 - sum(added) / len(added)))


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

"""Timing calls on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from fsfunc.comm.collectives import pmax, pmean
from fsfunc.comm.groups import RankGroup, group
from fsfunc.comm.ledgers import silence
from fsfunc.comm.mesh import Here

__all__ = ["Watch"]

FEWEST = 3


class Watch:
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

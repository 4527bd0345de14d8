"""One rank's side of hosts.py: trains by each step, and counts what it sends."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compared import peers
from compared.models import Size
from compared.peers import Competitor
from slow_link import links
from slow_link.steps import AXES, COMPETITORS, EVERY, NEAR, Stream

import fsfunc as ff
from fsfunc.comm.ledgers import Record
from fsfunc.planning.calibration import measure_hardware

# Seconds in which the last acknowledgements have gone, and what TCP sends again: of one
# that comes late after its least timeout, 0.2.
QUIET = 0.5
LAST = 8  # steps whose mean loss is told
# What a frame of 1514 bytes has for programs.
PAYLOAD = (1514 - links.FRAME) / 1514


def train(task: dict[str, Any]) -> dict[str, Any]:
    """What was measured of each of the task's competitors, in turn."""
    alone, found = Alone(task), {}
    alone.meet()
    machine = _machine(task)
    for name in task["competitors"]:
        stream = Stream(Size(**task["size"]), task["rank"], task["ranks"])
        every = EVERY if name in ("local_sgd", "slowmo") else 1
        made = COMPETITORS[name](stream)
        found[name] = _trained(made, stream, task["seconds"], every)
        window = max(every, task["window"])
        calls = len(found[name]["losses"]) + found[name]["steps"]
        found[name] |= _counted(made, stream, alone, window, calls)
        if machine is not None and made.plan is not None and not stream.rank:
            plans = made.plan()
            seconds = {id(p): ff.estimate(p, machine).seconds for p in plans}
            found[name]["estimate"] = statistics.mean(seconds[id(p)] for p in plans)
        found[name]["load"] = os.getloadavg()[0]
        del made
    return found


# ------------------------------------------------------------------------ training


def _trained(
    made: Competitor, stream: Stream, seconds: float, every: int
) -> dict[str, Any]:
    """The first two losses; that after as many seconds more, and the times of steps.

    Where ranks meet `every` so many steps, a time is the mean of as many.
    """
    first = [peers.mean_over_ranks(made.step())]
    stream.advance()
    losses, times = [made.step()], []
    first.append(peers.mean_over_ranks(losses[0]))
    begin = time.perf_counter()
    while count := _more(begin + seconds - time.perf_counter(), times):
        for _ in range(count):
            stream.advance()
            start = time.perf_counter()
            losses.append(made.step())
            times.append(time.perf_counter() - start)
    last = losses[-LAST:]
    known = [x.item() for x in last if x is not None]
    mean = torch.tensor(statistics.mean(known)) if known else None
    groups = [times[i : i + every] for i in range(0, len(times), every)]
    means = [statistics.mean(group) for group in groups if len(group) == every]
    return {
        "losses": first,
        "loss": peers.mean_over_ranks(mean),
        "steps": len(times),
        "times": means,
    }


def _more(left: float, times: list[float]) -> int:
    """Steps to make before the clock is looked at again: the same on every rank."""
    each = statistics.median(times) if times else 0.0
    slowest = torch.tensor([-left, each], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    left, each = -slowest[0].item(), slowest[1].item()
    if not times:
        return EVERY if left > 0 else 0
    return 0 if left < each / 2 else max(1, int(0.7 * left / each))


# ------------------------------------------------------------------------ counting


class Alone:
    """A place where ranks meet without a message: a file."""

    def __init__(self, task: dict[str, Any]):
        self.ranks, self.times = task["ranks"], 0
        self.store = dist.FileStore(str(Path(task["folder"]) / "alone"), self.ranks)

    def meet(self) -> None:
        self.times += 1
        self.store.add(str(self.times), 1)
        while self.store.add(str(self.times), 0) < self.ranks:
            time.sleep(0.005)

    def counters(self) -> links.Counted:
        """What the kernel has counted, while nobody sends."""
        self.meet()
        time.sleep(QUIET)
        found = links.counted()
        self.meet()
        return found


def compares(call: int) -> bool:
    """Whether ranks of fsfunc compare something in a step's n-th call.

    In calls 1, 2, 4, 8 and so on their batches and states; in the call after, now and
    then, their programs.
    """
    return any(not n & (n - 1) for n in (call, call - 1))


def _counted(
    made: Competitor, stream: Stream, alone: Alone, window: int, calls: int
) -> dict[str, Any]:
    """What a step sends: by the kernel, over the link, and by this rank's ledger.

    Of steps in which nothing is compared: those messages are in no ledger.
    """
    while any(compares(calls + i) for i in range(1, window + 1)):
        stream.advance()
        made.step()
        calls += 1
    before = alone.counters()
    with ff.ledger() as log:
        for _ in range(window):
            stream.advance()
            made.step()
    link = alone.counters().since(before)
    levels: dict[str, float] = {}
    for record in log.records:
        name = " x ".join(record.axis)
        levels[name] = levels.get(name, 0.0) + float(record.bytes) / window
    records = log.records if made.sent is None else []
    crossed, messages = crossing(records, stream.rank)
    return {
        "sent": link.sent / window,
        "received": link.received / window,
        "stream": link.stream / window,
        "repeated": link.repeated / window,
        "ledger": levels,
        "crossed": crossed / window,
        "messages": messages / window,
        "closed": made.sent,
    }


def crossing(records: Iterable[Record], rank: int) -> tuple[float, int]:
    """Bytes and messages of a rank's records that go to the other host.

    The ledger counts what a ring sends. On gloo a rank sends its part to each other
    one by itself: as many bytes, but more of them leave a host. A reduction of few
    numbers is one message to each, of all of them; of many, a scatter and a gather.
    A message of a pipeline (ppermute) has an answer, of one byte.
    """
    crossed, messages = 0.0, 0
    mesh = ff.make_mesh(AXES, "abstract")
    for record in records:
        ranks = mesh.members(record.axis, rank)
        n, away = len(ranks), sum(r // NEAR != rank // NEAR for r in ranks)
        sent, each = float(record.bytes), 1
        if n > 2 and record.op in ("psum", "pmax", "pmin"):
            whole = sent * n / (2 * (n - 1))
            if whole < 1024 * record.dtype.itemsize:
                sent = (n - 1) * whole
            else:
                each = 2
        crossed += sent * away / (n - 1) if n > 1 else 0.0
        messages += away * each
        if record.op == "ppermute":
            crossed, messages = crossed + away, messages + away
    return crossed, messages


# ---------------------------------------------------------------------- estimating


def _machine(task: dict[str, Any]) -> ff.Hardware | None:
    """This machine as measured by all ranks at once, with the link as a level.

    A transfer that waits for a slow link takes no core: it goes on beside computing.
    """
    if not task["measuring"]:
        return None
    found = measure_hardware(seconds=task["measuring"])
    ff.make_mesh(AXES, "processes")
    one, spent = torch.ones(1), []
    for _ in range(20):
        begin = time.perf_counter()
        ff.psum(one, "node")
        spent.append(time.perf_counter() - begin)
    latency = statistics.median(spent) / 2  # there and back, as an estimate has it
    across = ff.Level(0, task["mbit"] * 1e6 / 8 * PAYLOAD, latency)
    within = dataclasses.replace(ff.hardware.CPU.levels[0], ranks=NEAR)
    return ff.hardware.replace(found, levels=(within, across), overlap=1.0)

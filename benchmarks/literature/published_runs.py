"""Published training throughput beside what ``ff.estimate`` says of closed forms.

``python benchmarks/published.py`` prints it; ``--runs PATH`` reads other rows of the
same columns as ``published_training.csv``, and then nothing else is planned.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean

from literature.closed_forms import Run, plan_of, read

from fsfunc.planning.estimation import Estimate, estimate
from fsfunc.planning.hardware import Level, named, replace
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan

CALIBRATION = Path(__file__).with_name("published_training.csv")
NETWORK = 0.8  # of a network's rate, as `hardware` has of NCCL's rings
DIFFER = 0.03  # of two runs, from where on their order means something


@dataclass(frozen=True)
class Judged:
    """A run, what was published of it and what is estimated."""

    run: Run
    family: str
    found: Estimate
    rule_of_thumb: float  # tokens/s a GPU

    @property
    def predicted(self) -> float:
        """Tokens/s of one GPU."""
        return (self.found.tokens_per_second or 0.0) / self.run.gpus

    @property
    def published(self) -> float:
        return self.run.published_tokens_per_s_per_gpu

    @property
    def error(self) -> float:
        """The natural logarithm of predicted over published."""
        return math.log(self.predicted / self.published)

    @property
    def rough(self) -> float:
        """The same of the rule of thumb."""
        return math.log(self.rule_of_thumb / self.published)

    @property
    def inside(self) -> bool:
        """True if what was published lies in the estimate's band."""
        return abs(self.error) <= self.found.width


def runs_of(path: Path) -> list[Run]:
    """The runs of a file, whose lines that begin with # are comments."""
    lines = [x for x in path.read_text().splitlines() if x.strip() and x[0] != "#"]
    return [read(row) for row in csv.DictReader(lines)]


def machine_of(run: Run) -> Hardware:
    """The hardware of a run, with the network that its row gives.

    Raises:
        ValueError: a GPU that ``ff.hardware`` does not name.
    """
    short = run.hardware.removesuffix("-80") if run.hardware[0] != "A" else run.hardware
    found = named(short)
    if run.internode_gbit_per_node:
        inner, outer = found.levels
        rate = run.internode_gbit_per_node * 1e9 / 8 * NETWORK
        found = replace(found, levels=(inner, Level(0, rate, outer.latency)))
    return found


@cache
def _planned(run: Run) -> Plan:
    return plan_of(run)


def judged(run: Run, products: float | None = None) -> Judged:
    """A run's estimate, with another share of the peak for ``products`` if given."""
    machine = machine_of(run)
    if products is not None:
        machine = replace(machine, efficiency=((1.0, products),))
    how = {"tokens": run.tokens, "attention": run.attention}
    found = estimate(_planned(run), machine, **how)
    rough = run.tokens / run.gpus / (found.rule_of_thumb or math.nan)
    return Judged(run, machine.name.partition("-")[0], found, rough)


def fitted(runs: Sequence[Run]) -> float:
    """The share of the peak of large products with which the mean error is none."""
    share = machine_of(runs[0]).efficiency[0][1]
    for _ in range(6):  # a step's time is some 0.75 products, so this ends quickly
        share = min(1.0, share * math.exp(-mean(judged(r, share).error for r in runs)))
    return share


def left_out(runs: Sequence[Run]) -> list[float]:
    """The error of each run by a fit of the others on GPUs of its family."""
    found = []
    for run in runs:
        others = [r for r in runs if r is not run and r.hardware == run.hardware]
        found.append(judged(run, fitted(others) if others else None).error)
    return found


def in_order(rows: Sequence[Judged]) -> tuple[int, int]:
    """(pairs of runs in the right order, pairs): of one GPU and size of model."""
    right = pairs = 0
    for a, b in combinations(rows, 2):
        apart = math.log(a.published / b.published)
        alike = a.family == b.family and 0.5 < a.run.params / b.run.params < 2
        if alike and abs(apart) > DIFFER:
            pairs += 1
            right += apart * (a.predicted - b.predicted) > 0
    return right, pairs


def summary(rows: Sequence[Judged]) -> list[tuple[str, int, float, float, int]]:
    """(which runs, how many, mean |log| of ours, of the rule of thumb, in the band)."""
    keys: list[tuple[str, Callable[[Judged], bool]]] = [("all", lambda j: True)]
    for family in dict.fromkeys(j.family for j in rows):
        keys.append((family, lambda j, f=family: j.family == f))
    for kind in dict.fromkeys(j.run.kind for j in rows):
        keys.append((kind, lambda j, k=kind: j.run.kind == k))
    found = []
    for name, belongs in keys:
        some = [j for j in rows if belongs(j)]
        ours = mean(abs(j.error) for j in some)
        rough = mean(abs(j.rough) for j in some)
        found.append((name, len(some), ours, rough, sum(j.inside for j in some)))
    return found


def show(path: Path | None = None) -> list[dict[str, float | str]]:
    """Prints the table of a file's runs, and returns its rows."""
    runs = runs_of(path or CALIBRATION)
    rows = [judged(run) for run in runs]
    head = f"{'run':40}{'tokens/s a GPU':>15}{'published':>10}{'ratio':>7}"
    print(f"{head}{'6ND':>7}{'band':>12}{'MFU':>6}{'HFU':>6}")
    for j in rows:
        r, e = j.run, j.found
        name = f"{r.model} {r.gpus} x {r.hardware} {r.strategy} remat={r.remat}"
        band = f"{math.exp(-e.width):.2f}-{math.exp(e.width):.2f}"
        print(
            f"{name[:39]:40}{j.predicted:15.0f}{j.published:10.0f}"
            f"{math.exp(j.error):7.2f}{math.exp(j.rough):7.2f}{band:>12}"
            f"{e.mfu:6.0%}{e.share_of_peak:6.0%}"
        )
    print()
    for name, count, ours, rough, inside in summary(rows):
        print(
            f"{name:12}{count:4} runs: mean |log| {ours:.3f}, rule of thumb "
            f"{rough:.3f}; {inside} in the band"
        )
    right, pairs = in_order(rows)
    if pairs:
        print(f"{right} of {pairs} pairs in the right order")
    if path is None:
        found = [abs(x) for x in left_out(runs)]
        print(f"leaving one out: mean |log| {mean(found):.3f}, most {max(found):.3f}")
    return [
        {
            "model": j.run.model, "hardware": j.run.hardware, "kind": j.run.kind,
            "predicted": j.predicted, "published": j.published, "log": j.error,
            "rule_of_thumb_log": j.rough, "width": j.found.width,
        }
        for j in rows
    ]  # fmt: skip


def show_fit() -> None:
    """Prints what `hardware` has to know of these runs, a number a family."""
    runs = runs_of(CALIBRATION)
    for card in dict.fromkeys(r.hardware for r in runs):
        some = [r for r in runs if r.hardware == card]
        peak = machine_of(some[0]).peak["bfloat16"]
        rates = [
            math.log(6 * r.params * r.published_tokens_per_s_per_gpu / peak)
            for r in some
        ]
        print(
            f"{card}: large products {fitted(some):.3f} of the peak, "
            f"6ND {math.exp(mean(rates)):.3f}"
        )

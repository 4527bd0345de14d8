"""Published training throughput beside what ``ff.estimate`` says of closed forms.

``python benchmarks/published.py`` prints it: of the ten runs of
`published_training.csv`, and of those of `published_parallel.csv`. ``--runs PATH``
reads other rows of the same columns, and then nothing else is planned.

One number of each family of GPUs is fitted, the share of the peak that large products
reach: so that the mean error is none over the runs whose ``part`` is "fit", of which
those that differ in their number of GPUs alone count as one. Those that are "held out"
were not looked at for it. Each source is also
left out, and judged by a fit of all the others on its GPUs (`without_source`).
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

from literature.closed_forms import Run, plan_of, read
from literature.layer_kernels import attention_of

from fsfunc.planning.estimation import Estimate, estimate
from fsfunc.planning.hardware import Level, named, replace
from fsfunc.planning.machines import Hardware
from fsfunc.planning.plans import Plan

CALIBRATION = Path(__file__).with_name("published_training.csv")
PARALLEL = Path(__file__).with_name("published_parallel.csv")
NETWORK = 0.8  # of a network's rate, as `hardware` has of NCCL's rings
DIFFER = 0.03  # of two runs, from where on their order means something
STEP = 1.05  # by how much products are sped up, to see what a step gains


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


def judged(run: Run, faster: float = 1.0, attention: str | None = "") -> Judged:
    """A run's estimate.

    Args:
        faster: how many times the hardware's share of the peak products reach.
        attention: the generation of its kernels; None: nobody says; "": the run's.
    """
    return _judged(run, faster, attention_of(run) if attention == "" else attention)


@cache
def _judged(run: Run, faster: float, attention: str | None) -> Judged:
    machine = machine_of(run)
    if faster != 1:
        share = min(1.0, machine.efficiency[0][1] * faster)
        machine = replace(machine, efficiency=((1.0, share),))
    found = _estimated(run, machine, attention)
    rough = run.tokens / run.gpus / (found.rule_of_thumb or math.nan)
    # What each stream does fills the memory, and is not looked at.
    found = dataclasses.replace(found, spans=[], waits=[])
    return Judged(run, machine.name.partition("-")[0], found, rough)


def _estimated(run: Run, machine: Hardware, attention: str | None) -> Estimate:
    """The estimate of a run's step.

    Of a pipeline of P stages it is that of 2P microbatches, and of as many more as
    there are, each of which takes what the last P took: from P on a schedule repeats.
    """
    few, more = run.pp, 2 * run.pp
    if run.pp == 1 or run.microbatches <= more:
        plan, tokens = _planned(run), run.tokens
        return estimate(plan, machine, tokens=tokens, attention=attention)
    found = []
    for count in (few, more):
        part = dataclasses.replace(run, microbatches=count)
        plan = _planned(part)
        found.append(estimate(plan, machine, tokens=part.tokens, attention=attention))
    first, last = found
    times = (run.microbatches - more) / (more - few)

    def whole(of: Callable[[Estimate], float]) -> float:
        return of(last) + times * (of(last) - of(first))

    seconds = whole(lambda e: e.seconds)
    return dataclasses.replace(
        last,
        seconds=seconds,
        compute=whole(lambda e: e.compute),
        exposed=whole(lambda e: e.exposed),
        bubble=whole(lambda e: e.bubble),
        flops_per_second=whole(lambda e: e.flops_per_second * e.seconds) / seconds,
        share_of_peak=whole(lambda e: e.share_of_peak * e.seconds) / seconds,
        mfu=whole(lambda e: e.mfu * e.seconds) / seconds,
        tokens_per_second=run.tokens / seconds,
        rule_of_thumb=whole(lambda e: e.rule_of_thumb or math.nan),
    )


_LAST: dict[Run, Plan] = {}


def _planned(run: Run) -> Plan:
    """The run's plan: the last two are kept, as some have 100,000 events."""
    if run not in _LAST:
        if len(_LAST) > 1:
            del _LAST[next(iter(_LAST))]
        _LAST[run] = plan_of(run)
    return _LAST[run]


def gain(run: Run) -> float:
    """How a step's speed grows with that of its products, as a power: at most 1."""
    gained = judged(run, STEP).error - judged(run).error
    return gained / math.log(STEP)


def _of_setups(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    """The mean of a value: runs that differ in their number of GPUs count as one."""
    setups: dict[tuple[Any, ...], list[float]] = {}
    for r in runs:
        setup = (r.source, r.model, r.hardware, r.seq, r.remat)
        setups.setdefault(setup, []).append(value(r))
    return mean(map(mean, setups.values()))


def correction(runs: Sequence[Run]) -> float:
    """How many times faster products are to be, for a mean error of none."""
    error = _of_setups(runs, lambda run: judged(run).error)
    return math.exp(-error / _of_setups(runs, gain))


def fitted(runs: Sequence[Run]) -> float:
    """The share of the peak of large products with which the mean error is none."""
    return machine_of(runs[0]).efficiency[0][1] * correction(runs)


def _error(run: Run, others: Sequence[Run]) -> float:
    """The error of a run by a fit of the others; by the hardware's without any."""
    if not others:
        return judged(run).error
    return judged(run).error + gain(run) * math.log(correction(others))


def left_out(runs: Sequence[Run]) -> list[float]:
    """The error of each run by a fit of the others on GPUs of its family."""
    return [
        _error(run, [r for r in runs if r is not run and r.hardware == run.hardware])
        for run in runs
    ]


def without_source(runs: Sequence[Run]) -> list[float]:
    """The error of each run by a fit of all other sources' on its family of GPUs.

    By the hardware as it is where no other source has such GPUs.
    """
    families = {run: judged(run).family for run in runs}
    faster: dict[tuple[str, str], float] = {}  # by source and family, the others' fit
    for run in runs:
        key = run.source, families[run]
        others = [r for r in runs if families[r] == key[1] and r.source != key[0]]
        if key not in faster:
            faster[key] = correction(others) if others else 1.0
    return [
        judged(run).error + gain(run) * math.log(faster[run.source, families[run]])
        for run in runs
    ]


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
    of: list[Callable[[Judged], str]] = [
        lambda j: j.family, lambda j: j.run.kind, lambda j: j.run.scheme,
        lambda j: j.run.source,
    ]  # fmt: skip
    for key in of:
        names = dict.fromkeys(map(key, rows))
        if len(names) > 1:
            keys += [(n, lambda j, n=n, key=key: key(j) == n) for n in names]
    found = []
    for name, belongs in keys:
        some = [j for j in rows if belongs(j)]
        ours = mean(abs(j.error) for j in some)
        rough = mean(abs(j.rough) for j in some)
        found.append((name, len(some), ours, rough, sum(j.inside for j in some)))
    return found


def table(rows: Sequence[Judged]) -> None:
    """Prints a line a run."""
    head = f"{'run':46}{'tokens/s a GPU':>15}{'published':>10}{'ratio':>7}"
    print(f"{head}{'6ND':>7}{'band':>12}{'MFU':>6}{'HFU':>6}")
    for j in rows:
        r, e = j.run, j.found
        parts = {"tp": r.tp, "pp": r.pp, "cp": r.cp, "vp": r.vp}
        shared = " ".join(f"{key}{n}" for key, n in parts.items() if n > 1)
        how = f"{r.strategy} {shared}".strip() + " compiled" * r.compiled
        name = f"{r.model} {r.gpus} x {r.hardware} {how} remat={r.remat}"
        band = f"{math.exp(-e.width):.2f}-{math.exp(e.width):.2f}"
        print(
            f"{name[:45]:46}{j.predicted:15.0f}{j.published:10.0f}"
            f"{math.exp(j.error):7.2f}{math.exp(j.rough):7.2f}{band:>12}"
            f"{e.mfu:6.0%}{e.share_of_peak:6.0%}"
        )


def summarise(rows: Sequence[Judged]) -> None:
    """Prints the mean errors: of all, and of each GPU, kind, scheme and source."""
    print()
    for name, count, ours, rough, inside in summary(rows):
        print(
            f"{name:20}{count:4} runs: mean |log| {ours:.3f}, rule of thumb "
            f"{rough:.3f}; {inside} in the band"
        )
    right, pairs = in_order(rows)
    if pairs:
        print(f"{right} of {pairs} pairs in the right order")


def show(path: Path | None = None, quick: bool = False) -> list[dict[str, float | str]]:
    """Prints the tables of a file's runs, or of both known ones, and returns the rows.

    Args:
        quick: plans one of the others a source, and no pipelines.
    """
    runs = runs_of(path or CALIBRATION)
    rows = [judged(run) for run in runs]
    table(rows)
    summarise(rows)
    if path is None:
        found = [abs(x) for x in left_out(runs)]
        print(f"leaving one out: mean |log| {mean(found):.3f}, most {max(found):.3f}")
        rows += _show_others(rows, quick)
    return [
        {
            "model": j.run.model, "hardware": j.run.hardware, "kind": j.run.kind,
            "predicted": j.predicted, "published": j.published, "log": j.error,
            "rule_of_thumb_log": j.rough, "width": j.found.width,
            "source": j.run.source, "part": j.run.part,
        }
        for j in rows
    ]  # fmt: skip


def _show_others(ten: Sequence[Judged], quick: bool) -> list[Judged]:
    """Prints the other known runs, the errors of all, and of each source left out."""
    more = runs_of(PARALLEL)
    if quick:
        first = {run.source: run for run in reversed(more) if run.pp == 1}
        more = list(first.values())
    else:
        for run in more:  # each plan is made once, for both rates
            judged(run, STEP), judged(run)
    rows = [judged(run) for run in more]
    print()
    table(rows)
    both, runs = [*ten, *rows], [*(j.run for j in ten), *more]
    summarise(both)
    for part in dict.fromkeys(run.part for run in runs):
        some = [j for j in both if j.run.part == part]
        print(
            f"{part}: {len(some)} runs, mean |log| {_size(j.error for j in some):.3f}"
        )
    unsaid = [judged(run, attention=None) for run in runs if attention_of(run)]
    told = [judged(j.run) for j in unsaid]
    print(
        f"attention's generation told: mean |log| {_size(j.error for j in told):.3f}, "
        f"by default {_size(j.error for j in unsaid):.3f}"
    )
    if not quick:
        _show_without_source(runs)
    return rows


def _show_without_source(runs: Sequence[Run]) -> None:
    """Prints errors of runs whose source was left out: by GPU, kind and source."""
    errors = dict(zip(runs, without_source(runs), strict=True))
    print("each source left out of the fit:")
    of: list[Callable[[Run], str]] = [
        lambda r: "all", lambda r: judged(r).family, lambda r: r.kind,
        lambda r: r.source,
    ]  # fmt: skip
    for key in of:
        for name in dict.fromkeys(map(key, runs)):
            some = [errors[run] for run in runs if key(run) == name]
            bias, most = math.exp(mean(some)), max(map(abs, some))
            print(
                f"  {name:20}{len(some):4} runs: mean |log| {_size(some):.3f}, ratio "
                f"{bias:.2f}, most {most:.3f}"
            )


def _size(errors: Iterable[float]) -> float:
    return mean(map(abs, errors))


def fit_runs() -> list[Run]:
    """The runs that `hardware`'s numbers are fitted to."""
    runs = [*runs_of(CALIBRATION), *runs_of(PARALLEL)]
    return [run for run in runs if run.part == "fit"]


def show_fit() -> None:
    """Prints what `hardware` has to know of these runs, a number a family."""
    runs = fit_runs()
    for run in runs:
        judged(run, STEP), judged(run)
    for family in dict.fromkeys(judged(run).family for run in runs):
        some = [run for run in runs if judged(run).family == family]
        peak = machine_of(some[0]).peak["bfloat16"]

        def rate(run: Run, peak: float = peak) -> float:
            return math.log(6 * run.params * run.published_tokens_per_s_per_gpu / peak)

        print(
            f"{family}: large products {fitted(some):.3f} of the peak, "
            f"6ND {math.exp(_of_setups(some, rate)):.3f}"
        )

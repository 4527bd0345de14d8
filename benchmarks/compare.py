"""fsfunc beside torch's parallelism of data, stages and layers, in one run: medians.

    python benchmarks/compare.py [--quick] [--peers] [--only KEYS] [--rounds N]
                                 [--ranks N] [--shape NAME] [--bf16]
                                 [--min-bytes N] [--gloo] [--json PATH]

Two processes (``--ranks``) of one thread each: the peers on gloo, fsfunc through shared
memory, or on gloo too with `--gloo`. A byte-level GPT from the same
parameters, the same batches and the same AdamW on both sides; the losses of the first
two steps must agree or the run fails. A step's time is that of the slowest rank. Ratios
are ours over theirs, the median of the rounds', below one is faster; the floor is the
same model's step on one device without communication, timed in the same processes and
rounds. Ratios are of donated steps (`ff.donate`), with the pure step's beside them.

A pipeline's ranks share one batch, that of all ranks, in microbatches of one sequence;
both sides are cut at the same units. Its floor is one device's step on the whole batch
divided by the ranks: what is over it is bubbles, uneven stages and communication. So is
that of layers that are split over the ranks (tensor and sequence parallel).

`--quick` is a rehearsal on a tiny model: every row, no meaning in the numbers; what
compiles is traced, and its operators run one by one.
`--shape` takes another model (SHAPES in compared/models.py), `--bf16` casts parameters
to bfloat16 for what is computed, on one device and at zero=3. `--min-bytes` is given to
`ff.shard`: neighbouring units below it share a message, as DDP's buckets of 25 MB do.
`--peers` measures the peers alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from compared.measuring import (
    ENVIRONMENT,
    Load,
    import_seconds,
    medians,
    run_workers,
    slowest,
)
from compared.models import FULL, SHAPES, TINY, Size
from compared.report import render
from compared.rows import ROWS, Row, named_rows

IN_BF16 = ("one_device", "zero3", "zero3_remat")
CHAINS = (4, 36)  # lengths whose difference is the cost of one more unit call


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured."""

    size: Size
    rounds: int
    warmup: int
    imports: int
    peers_only: bool
    ranks: int = 2
    bf16: bool = False
    min_bytes: int | None = None
    gloo: bool = False
    kernels: bool = True

    def run(self, kind: str, *, ranks: int = 1, **more: Any) -> list[Any]:
        steps = (self.rounds + self.warmup) * len(more.get("competitors", "x"))
        patience = 30 + 20 * steps if self.kernels else 60
        named = [*more.get("competitors", ()), more.get("competitor", "")]
        patience += 90 * sum("compiled" in n or "jit" in n for n in named)
        task = {
            "kind": kind,
            "size": dataclasses.asdict(self.size),
            "rounds": self.rounds,
            "warmup": self.warmup,
            "ours": not self.peers_only,
            "bf16": self.bf16,
            "min_bytes": self.min_bytes,
            "gloo": self.gloo,
            "kernels": self.kernels,
            "patience": patience,
            **more,
        }
        return run_workers(task, ranks=ranks, timeout=patience)


Measured = dict[str, dict[str, Any]]


def measure(rows: list[Row], plan: Plan) -> Measured:
    """For every group that `rows` name, what was measured of each competitor."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        names = groups.setdefault(row.group, [])
        names += [n for n in row.competitors(plan.peers_only) if n not in names]
    measured: Measured = {}
    for group, names in groups.items():
        print(f"measuring {group}: {', '.join(names)}", file=sys.stderr, flush=True)
        measured[group] = _measure(group, names, plan)
    return measured


def _measure(group: str, names: list[str], plan: Plan) -> dict[str, Any]:
    if group == "memory":
        return {name: _memory(name, plan) for name in names}
    if group == "adam":
        (answer,) = plan.run("adam", rounds=4 * plan.rounds)
        return _medians(answer["times"])
    if group == "hooks":
        (answer,) = plan.run("hooks", rounds=5 * plan.rounds, units=CHAINS)
        return _marginal(medians(answer["times"]))
    if plan.peers_only and group in ("import", "example"):
        return {}
    if group == "import":
        seconds = import_seconds(
            "fsfunc", after="torch", runs=plan.imports, timeout=60.0
        )
        return {"import": {"seconds": seconds}}
    if group == "example":
        (answer,) = plan.run("example", rounds=4 * plan.rounds)
        return _medians(answer["times"])
    return _steps(names, plan, ranks=1 if group.endswith("one_device") else plan.ranks)


def _steps(names: list[str], plan: Plan, *, ranks: int) -> dict[str, Any]:
    answers = plan.run("steps", ranks=ranks, competitors=names)
    losses = answers[0]["losses"]
    floors = ("plain", "compiled")
    check_losses(losses, alike=[n for n in names if ranks == 1 or n not in floors])
    times = slowest([answer["times"] for answer in answers])
    return {
        name: {
            "seconds": median,
            "times": times[name],
            "sent_bytes": answers[0]["sent"][name],
            "losses": losses[name],
        }
        for name, median in medians(times).items()
    }


def check_losses(losses: dict[str, list[float]], *, alike: list[str]) -> None:
    """Raises unless all compute the same: the first loss, and after one update.

    The floor does not average gradients over ranks, so it is left out of `alike` there.
    """
    names = list(losses)
    checks = ((0, names, 1e-5), (1, alike, 1e-4))
    for step, those, tolerance in checks:
        values = {name: losses[name][step] for name in those}
        low, high = min(values.values()), max(values.values())
        if not high - low <= tolerance * abs(high):
            raise RuntimeError(f"losses of step {step + 1} differ: {values}")


def _memory(name: str, plan: Plan) -> dict[str, Any]:
    """Peak resident bytes over those after the imports; of the larger rank."""
    # Without kernels no peak means anything: one step shows that it is read.
    counts = {"rounds": 3} if plan.kernels else {"rounds": 1, "warmup": 1}
    answers = plan.run("memory", ranks=plan.ranks, competitor=name, **counts)
    largest = max(answers, key=lambda a: a["peak"] - a["after_imports"])
    return {"bytes": largest["peak"] - largest["after_imports"], **largest}


def _medians(times: dict[str, list[float]]) -> dict[str, Any]:
    found = medians(times)
    return {name: {"seconds": found[name], "times": times[name]} for name in times}


def _marginal(seconds: dict[str, float]) -> dict[str, Any]:
    """Seconds that sharding adds to one more unit call, for either side."""
    few, many = CHAINS

    def slope(name: str) -> float:
        missing = f"{name} {many}" not in seconds
        if missing:
            return float("nan")
        return (seconds[f"{name} {many}"] - seconds[f"{name} {few}"]) / (many - few)

    sides = {"fully_shard": "modules", "shard": "units"}
    return {
        side: {"seconds": slope(side) - slope(bare), "bare_seconds": slope(bare)}
        for side, bare in sides.items()
        if f"{side} {many}" in seconds
    }


def results(rows: list[Row], measured: Measured, ranks: int) -> list[dict[str, Any]]:
    """One record a row, as printed and as written to JSON."""
    return [row.result(measured[row.group], ranks) for row in rows]


def settings(plan: Plan, others: float) -> dict[str, Any]:
    return {
        "size": dataclasses.asdict(plan.size),
        "parameters": plan.size.parameters,
        "ranks": plan.ranks,
        "bf16": plan.bf16,
        "min_bytes": plan.min_bytes,
        "gloo": plan.gloo,
        "others": others,
        "backend": "gloo",
        "environment": ENVIRONMENT,
        "rounds": plan.rounds,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "peers_sent": "closed form; fsfunc's by its ledger",
    }


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny model, 1 round")
    parser.add_argument("--peers", action="store_true", help="the peers alone")
    parser.add_argument("--only", metavar="KEYS", help="keys of rows, with commas")
    parser.add_argument("--rounds", type=int, help="timed steps of each competitor")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--shape", choices=SHAPES, help="of another model")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--min-bytes", type=int, help="given to ff.shard")
    parser.add_argument("--gloo", action="store_true", help="no shared memory")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write results here")
    chosen = parser.parse_args(argv)
    chosen.rows = named_rows(parser, chosen.only, ROWS)
    others = [row.key for row in chosen.rows if row.key not in IN_BF16]
    if chosen.bf16 and others:
        parser.error(f"--bf16 --only {','.join(IN_BF16)}: not {', '.join(others)}")
    return chosen


def main(argv: list[str] | None = None) -> None:
    chosen = arguments(argv)
    quick = chosen.quick
    plan = Plan(
        size=SHAPES[chosen.shape] if chosen.shape else TINY if quick else FULL,
        rounds=chosen.rounds or (1 if quick else 7),
        # Two losses are compared. Then calls 9 to 15 are timed: in 1, 2, 4, 8, 16, 17
        # and so on `shard` compares states, or types, which is no part of other steps.
        warmup=2 if quick else 7,
        imports=1 if quick else 7,
        peers_only=chosen.peers,
        ranks=chosen.ranks,
        bf16=chosen.bf16,
        min_bytes=chosen.min_bytes,
        gloo=chosen.gloo,
        kernels=not quick,
    )
    with Load() as load:
        measured = measure(chosen.rows, plan)
    found, given = (
        results(chosen.rows, measured, plan.ranks),
        settings(plan, load.others),
    )
    print(render(found, measured, given))
    if chosen.json:
        record = {"settings": given, "rows": found, "measured": measured}
        chosen.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

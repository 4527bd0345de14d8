"""How fsfunc's own work grows: with units, with leaves, with ranks.

    python benchmarks/scaling.py [--quick] [--json PATH]

Work is counted, not timed: the calls of Python functions and of torch's operators that
one rank makes, so that a busy machine gives the same figures. Steps are counted warm,
beside the first state (which records the step and checks it). Of each series the growth
is fitted: work = a + b n^e, with `a` what is left at n = 0 by the two smallest n. An
exponent of 1 is work for each unit, leaf or rank.

Ranks are simulated, and their work is that of all of them: n ranks that gather from one
another have at least n times as much.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from compared.report import number, table

import fsfunc as ff


@dataclass(frozen=True)
class Series:
    """Work at several sizes, and the exponent with which it grows."""

    what: str
    of: str
    sizes: list[int]
    work: list[int]

    @property
    def exponent(self) -> float:
        """The slope of log(work - rest) against log(size), by least squares."""
        (n0, n1), (w0, w1) = self.sizes[:2], self.work[:2]
        rest = max(0.0, w0 - n0 * (w1 - w0) / (n1 - n0))
        xs = [math.log(n) for n in self.sizes[1:]]
        ys = [math.log(max(w - rest, 1.0)) for w in self.work[1:]]
        return statistics.linear_regression(xs, ys).slope


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts calls of Python functions and built-in ones, in all threads begun here."""
    calls = [0]

    def count(frame: Any, event: str, arg: Any) -> None:
        calls[0] += event in ("call", "c_call")

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@ff.unit
def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    for w in p:
        x = x * w
    return x


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for p in params:
        x = layer(p, x)
    return x.sum()


def work(units: int, leaves: int, ranks: int) -> dict[str, int]:
    """Calls of the first state and of a warm step, of all ranks."""
    optimizer = ff.chain(ff.clip_by_global_norm(1.0), ff.sharded_adam(1e-3))

    def train(state: Any, x: torch.Tensor) -> Any:
        loss, grads = ff.value_and_grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads, optimizer), loss

    mesh = ff.make_mesh({"data": ranks}, "simulated")
    params = [[torch.ones(4) for _ in range(leaves)] for _ in range(units)]

    def state() -> Any:
        step = ff.donate(ff.shard(ff.remat(train), mesh, "data", zero=3))
        x = torch.ones(2, 4)
        return step, ff.init_state(step, params, optimizer, x), x

    def moved(given: Any) -> Any:
        step, state, x = given
        return step, step(state, x)[0], x

    found = {}
    with counted() as calls:
        made = ff.spmd(state, mesh)()
    found["first state"] = calls[0]
    made = ff.spmd(moved, mesh)(made)
    with counted() as calls:
        ff.spmd(moved, mesh)(made)
    found["warm step"] = calls[0]
    return found


def series(of: str, sizes: list[int], at: Callable[[int], Any]) -> list[Series]:
    found = [work(*at(n)) for n in sizes]
    return [
        Series(what, of, sizes, [each[what] for each in found]) for what in found[0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write results here")
    chosen = parser.parse_args()
    units, leaves = [10, 30, 100, 300, 1000], [10, 30, 100, 300, 1000]
    ranks = [2, 4, 16, 64, 256]
    if chosen.quick:
        units, leaves, ranks = [4, 8, 16], [4, 8, 16], [2, 4, 8]
    work(2, 2, 2)  # what is made once
    every = [
        *series("units", units, lambda n: (n, 2, 2)),
        *series("leaves of 10 units", leaves, lambda n: (10, n, 2)),
        *series("simulated ranks", ranks, lambda n: (2, 2, n)),
    ]
    body = [
        [
            s.what,
            s.of,
            *[f"{n}: {w:,}" for n, w in zip(s.sizes, s.work, strict=True)],
            number(s.exponent),
        ]
        for s in every
    ]
    sizes = [f"size {i + 1}" for i in range(len(units))]
    print(table(["calls of", "with", *sizes, "exponent"], body))
    if chosen.json:
        made = [asdict(s) | {"exponent": s.exponent} for s in every]
        chosen.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()

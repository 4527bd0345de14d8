"""The last layer with its cross-entropy: ours in tiles, and torch's of whole logits.

    python benchmarks/vocabulary.py [--tokens 4096] [--features 512] [--classes 131072]

Value and both gradients in fp32, in turns, A B A B. Beside a round's time stands the
time that it ran on processors, which a busy machine changes less; peaks are of resident
memory, above what inputs take. ``again`` is ours where a number for each token comes
back, so that logits are made twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from compared.measuring import peak_resident, resident

import fsfunc as ff


def sides(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> dict[str, Callable]:
    tiled = ff.nn.linear_cross_entropy
    return {
        "plain": lambda: F.cross_entropy(F.linear(x, w), y),
        "ours": lambda: tiled(x, w, y),
        "again": lambda: tiled(x, w, y, reduction="none").mean(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--classes", type=int, default=2**17)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", default="plain,ours,again")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.features).requires_grad_()
    w = torch.empty(args.classes, args.features).normal_(0, 0.02).requires_grad_()
    y = torch.randint(args.classes, (args.tokens,))
    chosen = {name: f for name, f in sides(x, w, y).items() if name in args.sides}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    ran: dict[str, list[float]] = {name: [] for name in chosen}
    peaks: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, loss in chosen.items():
            before = resident()
            with peak_resident() as peak:
                start, mine = time.perf_counter(), time.process_time()
                value = loss()
                grads = torch.autograd.grad(value, (x, w))
                seconds[name].append(time.perf_counter() - start)
                ran[name].append(time.process_time() - mine)
                peaks[name] = max(peaks.get(name, 0), peak() - before)
            del value, grads
    found = {"seconds": seconds, "processor seconds": ran, "peak": peaks}
    if "plain" in chosen:
        found["ratios to plain"] = {
            name: {
                what: statistics.median(
                    a / b for a, b in zip(rows[name], rows["plain"], strict=True)
                )
                for what, rows in (("seconds", seconds), ("processor seconds", ran))
            }
            | {"peak": peaks[name] / peaks["plain"]}
            for name in chosen
        }
    print(json.dumps(found | {"load": os.getloadavg()[0]}, indent=1))


if __name__ == "__main__":
    main()

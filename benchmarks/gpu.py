"""fsfunc on one GPU beside plain torch and FSDP2, in bf16, over NCCL at one rank.

    python benchmarks/gpu.py [--width 2048] [--layers 16] [--length 2048]
                             [--sequences 4] [--rounds 10] [--json PATH]

Parameters, moments and reductions are fp32, computation is bf16, on every side: plain
torch casts its parameters inside the step, FSDP2 by MixedPrecisionPolicy, fsfunc by
`ff.precision`. Competitors step in turn (A B A B ...) and each step ends with a
synchronisation. Peaks are the allocator's, of a steady step, with one competitor alive
at a time. The share is that of the card's matrix rate, which is measured first, by
products of large bf16 matrices.

At one rank nothing is sent: what is seen is each side's own work on the host and the
device. `--device cpu` rehearses the script with a tiny model, without meaning.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compared import ours, peers
from compared.measuring import alternate, medians
from compared.models import QUICK, Size
from compared.report import number, table

COMPETITORS = [
    "plain",
    "fsdp2",
    "zero0",
    "zero3",
    "zero3_pure",
    "fsdp2_checkpoint",
    "zero3_remat",
]
AGAINST = {
    "zero0": "plain",
    "zero3": "fsdp2",
    "zero3_pure": "fsdp2",
    "zero3_remat": "fsdp2_checkpoint",
}
WARMUP = 3


def build(name: str, size: Size, device: str) -> peers.Competitor:
    setting = peers.Setting(size, 0, 1, device=device, compute=torch.bfloat16)
    return {**peers.BUILDERS, **ours.BUILDERS}[name](setting)


def measure(size: Size, device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Times with all competitors alive, after each one's peak alone."""
    found: dict[str, dict[str, Any]] = {}
    for name in COMPETITORS:
        found[name] = {"peak_bytes": peak(name, size, device)}
    made = {name: build(name, size, device) for name in COMPETITORS}
    for name, competitor in made.items():
        losses = [competitor.step().item() for _ in range(WARMUP)]
        found[name]["losses"] = losses
    check_losses({name: f["losses"][0] for name, f in found.items()})
    calls = {name: synchronised(c.step, device) for name, c in made.items()}
    times = alternate(calls, rounds=rounds)
    for name, median in medians(times).items():
        found[name] |= {
            "seconds": median,
            "times": times[name],
            "tokens_per_second": size.tokens / median,
            "flops_per_second": size.flops() / median,
        }
    return found


def peak(name: str, size: Size, device: str) -> int | None:
    """Peak bytes allocated in a steady step, or None on a CPU."""
    if device == "cpu":
        return None
    competitor = build(name, size, device)
    for _ in range(WARMUP):
        competitor.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    competitor.step()
    torch.cuda.synchronize()
    highest = torch.cuda.max_memory_allocated()
    del competitor
    gc.collect()  # modules and their hooks hold each other
    torch.cuda.empty_cache()
    return highest


def synchronised(step: Callable[[], Any], device: str) -> Callable[[], None]:
    def run() -> None:
        step()
        if device != "cpu":
            torch.cuda.synchronize()

    return run


def check_losses(losses: dict[str, float]) -> None:
    """Raises unless the first losses agree as far as bf16 products let them."""
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= 2e-3 * abs(high):
        raise RuntimeError(f"losses of the first step differ: {losses}")


def matrix_rate(device: str) -> float:
    """FLOPs per second of products of square bf16 matrices: the best size's."""
    edges = (256,) if device == "cpu" else (4096, 8192, 16384)
    return max(_product_rate(edge, device) for edge in edges)


def _product_rate(edge: int, device: str, runs: int = 10) -> float:
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in "ab")
    out = torch.empty_like(a)
    product = synchronised(lambda: torch.mm(a, b, out=out), device)
    product()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - start)
    return 2 * edge**3 / statistics.median(seconds)


def render(found: dict[str, dict[str, Any]], rate: float) -> str:
    head = ["step", "against", "median s", "ratio", "to floor"]
    head += ["tokens/s", "TFLOP/s", "share", "peak GiB", "peak ratio"]
    floor = found["plain"]["seconds"]
    body = []
    for name, of in found.items():
        against = AGAINST.get(name, "")
        other = found.get(against)
        highest = of["peak_bytes"]
        body.append(
            [
                name,
                against,
                f"{of['seconds']:.4f}",
                number(of["seconds"] / other["seconds"] if other else None),
                number(of["seconds"] / floor),
                f"{of['tokens_per_second']:,.0f}",
                f"{of['flops_per_second'] / 1e12:.1f}",
                f"{of['flops_per_second'] / rate:.1%}",
                f"{highest / 2**30:.2f}" if highest else "",
                number(highest / other["peak_bytes"] if highest and other else None),
            ]
        )
    return table(head, body)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    given = arguments(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu.py needs a CUDA device, and torch "
            f"{torch.__version__} sees none; benchmarks/compare.py runs on a CPU"
        )
    size = Size(
        **{f.name: getattr(given, f.name) for f in dataclasses.fields(Size)}
        if given.device == "cuda"
        else dataclasses.asdict(QUICK)
    )
    card = "CPU" if given.device == "cpu" else torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo" if given.device == "cpu" else "nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=0,
            world_size=1,
        )
        try:
            rate = matrix_rate(given.device)
            found = measure(size, given.device, given.rounds)
        finally:
            dist.destroy_process_group()
    print(f"{card}, torch {torch.__version__}, bf16: {rate / 1e12:.1f} TFLOP/s")
    print(f"GPT of {size.parameters / 1e6:.0f}M parameters: {size}")
    print(render(found, rate))
    if given.json:
        record = {"card": card, "torch": torch.__version__, "matrix_rate": rate}
        record |= {"size": dataclasses.asdict(size), "measured": found}
        given.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

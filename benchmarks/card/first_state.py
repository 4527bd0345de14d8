"""The first state of a GPT of 1.6B parameters: `init_state`, beside `normal_` of it.

    python -m card.first_state [--device cpu] [--json PATH]

Both make the parameters in float32, by `normal_`, and Adam's two moments; in turn.
Then the state trains two steps, which shows that it can.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from card.one_rank import one_rank
from compared import ours
from compared.models import QUICK, Size, functional_loss, make_batch
from torch import Tensor

import fsfunc as ff
from fsfunc import tree

LARGE = Size(50304, 1600, layers=48, heads=25, length=1024, sequences=1)
STD = 0.02


def drawn(size: Size, device: str) -> dict[str, Any]:
    """The tree of `compared.models`, every matrix by its own `normal_`."""
    width = size.width

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, device=device).normal_(0, STD)

    def block() -> dict[str, Tensor]:
        return {
            "norm1": torch.ones(width, device=device),
            "qkv": draw(3 * width, width),
            "out": draw(width, width),
            "norm2": torch.ones(width, device=device),
            "up": draw(4 * width, width),
            "down": draw(width, 4 * width),
        }

    return {
        "embed": {"w": draw(size.vocabulary, width)},
        "blocks": [block() for _ in range(size.layers)],
        "head": {"w": draw(size.vocabulary, width)},
    }


def by_torch(size: Size, device: str) -> list[Any]:
    params = drawn(size, device)
    return [params, *(tree.map(torch.zeros_like, params) for _ in range(2))]


def steps(size: Size, device: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """(what makes the state, what trains it a step and returns (state, loss))."""
    mesh = ff.make_mesh({"data": 1}, "processes")
    train = ours.train_step(functional_loss(size, ff.unit, ff.remat))
    step = ff.precision(train, compute=torch.bfloat16, reduce=torch.float32)
    step = ff.shard(step, mesh, "data", zero=3)
    batch = make_batch(size, 0, device=device)
    optimizer = train.optimizer  # type: ignore[attr-defined]
    make = lambda: ff.init_state(  # noqa: E731
        step, lambda: drawn(size, device), optimizer, batch
    )
    donated = ff.donate(step)
    return make, lambda state: donated(state, batch)


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float, int | None]:
    """(what it returns, seconds, peak bytes beyond what was there)."""
    gc.collect()
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    made = call()
    if device != "cuda":
        return made, time.perf_counter() - start, None
    torch.cuda.synchronize()
    taken = time.perf_counter() - start
    return made, taken, torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    size, device = LARGE if args.device == "cuda" else QUICK, args.device
    record: dict[str, Any] = {"parameters": size.parameters, "rounds": []}

    def write() -> None:
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))

    with one_rank(device):
        make, train = steps(size, device)
        sides = {"plain": lambda: by_torch(size, device), "ours": make}
        state: Any = None
        for _ in range(args.rounds):
            for name, side in sides.items():
                state = None  # the last one's memory
                state, taken, peak = timed(side, device)
                found = {"side": name, "seconds": taken, "peak_bytes": peak}
                record["rounds"].append(found)
                print(json.dumps(found), flush=True)
                write()
        losses = []
        for _ in range(2):
            held, state = [state], None
            (state, loss), taken, peak = timed(lambda h=held: train(h.pop()), device)
            losses.append(loss.item())
            record["step"] = {"seconds": taken, "peak_bytes": peak, "losses": losses}
            print(json.dumps(record["step"]), flush=True)
        write()
    if not all(math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"losses {losses}")
    print(f"== {size.parameters / 1e9:.2f}B parameters: {said(record['rounds'])}")


def said(rounds: list[dict[str, Any]]) -> str:
    """Of each side the first and the fastest time, and the peak."""
    parts = []
    for side in ("ours", "plain"):
        some = [one for one in rounds if one["side"] == side]
        times = [one["seconds"] for one in some]
        text = f"{side} {min(times):.2f} s (first {times[0]:.2f})"
        if some[0]["peak_bytes"]:
            text += f", peak {max(one['peak_bytes'] for one in some) / 2**30:.2f} GiB"
        parts.append(text)
    return "; ".join(parts)


if __name__ == "__main__":
    main()

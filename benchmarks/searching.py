"""How long `search` takes: large models over all meshes, and many small stacks.

    python benchmarks/searching.py [--quick] [--only NAME ...] [--json PATH]

Processor time of this process, of six searches:

============  ==========================================================================
70B           a Llama on every mesh of 512 H100, 1,024 sequences of 4,096 a step
175B          GPT-3's sizes on every mesh of 128 H100, 1,536 sequences of 2,048 a step
175B, none    the same on cards of a quarter of the memory, on which no stack fits
175B, pipes   the same on the meshes with a pipeline of 32 stages alone
small         a small GPT on 2 ranks, of which every stack is planned
small, none   the same in three quarters of the memory of the least
============  ==========================================================================

`--quick` searches models of two layers on 8 ranks, and plans three stacks of each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compared.models import (
    QUICK,
    concatenate_flat,
    functional_loss,
    init_params,
    whole_batch,
)
from literature import llama_memory
from literature.llama_memory import Llama

import fsfunc as ff
from fsfunc.planning.hardware import CPU, H100
from fsfunc.planning.search_results import Search
from fsfunc.planning.stack_search import search

LARGE = Llama(8192, 80, 64, 8, 28672, 128256, 4096, 1024)
GPT_3 = Llama(12288, 96, 96, 96, 32768, 51200, 2048, 1536)
SMALL = Llama(64, 2, 4, 2, 128, 512, 32, 16)
PIPES = [{"data": 4, "pipe": 32}, {"pipe": 32, "data": 4}]
QUICK_PIPES = [{"data": 4, "pipe": 2}]


def search_large(
    size: Llama,
    ranks: int | list[dict[str, int]],
    quick: bool,
    memory: float | None = None,
) -> Search:
    """Searches the meshes of so many ranks for stacks of a Llama."""
    tokens = torch.empty(size.sequences, size.length, dtype=torch.int64, device="meta")
    return search(
        llama_memory.loss_of(size, concatenate_flat),
        ff.sharded_adam(1e-4),
        lambda: llama_memory.init_params(size),
        {"tokens": tokens, "targets": tokens.clone()},
        ranks,
        H100,
        memory,
        compute=torch.bfloat16,
        reduce=torch.float32,
        plans=3 if quick else None,
    )


def search_small(quick: bool, memory: float | None = None) -> Search:
    """Searches all stacks of a small GPT on two ranks; if ``quick``, plans three."""
    loss_fn = functional_loss(QUICK, ff.unit, lambda block: block)
    batch = whole_batch(QUICK, 2)
    init = lambda: init_params(QUICK)  # noqa: E731
    optimizer, plans = ff.sharded_adam(1e-4), 3 if quick else None
    return search(loss_fn, optimizer, init, batch, 2, CPU, memory, plans=plans)


def searches(quick: bool) -> dict[str, Callable[[], Search]]:
    """Returns the searches by name."""
    llama, llama_ranks = (SMALL, 8) if quick else (LARGE, 512)
    gpt, gpt_ranks = (SMALL, 8) if quick else (GPT_3, 128)
    little = 20e3 if quick else H100.memory / 4
    pipes = QUICK_PIPES if quick else PIPES
    return {
        "70B": lambda: search_large(llama, llama_ranks, quick),
        "175B": lambda: search_large(gpt, gpt_ranks, quick),
        "175B, none": lambda: search_large(gpt, gpt_ranks, quick, little),
        "175B, pipes": lambda: search_large(gpt, pipes, quick),
        "small": lambda: search_small(quick),
        "small, none": lambda: search_small(quick, 1.5e6),
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a model of two layers")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="PATH")
    given = parser.parse_args(arguments)
    rows = []
    for name, run in searches(given.quick).items():
        if given.only and name not in given.only:
            continue
        begun = time.process_time()
        try:
            found, said = run(), ""
        except ValueError as error:  # nothing fits
            found, said = None, str(error)
        seconds = time.process_time() - begun
        row = {"name": name, "seconds": seconds}
        if found is not None:
            planned, skipped = len(found.tried), len(found.skipped)
            best_of = [f"{c.seconds:.3g} s {c.stack}" for c in found.by_kind]
            row |= {"planned": planned, "best": str(found.best.stack)}
            row |= {"by_kind": best_of}
            said = f"{found}\n{planned} of {planned + skipped} stacks planned"
        rows.append(row)
        print(f"{said}\n{name}: {seconds:.1f} s of processor time\n", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()

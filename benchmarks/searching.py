"""How long `search` takes: a model of 70B over all meshes, and many small stacks.

    python benchmarks/searching.py [--quick] [--json PATH]

Processor time of this process. The first is Llama of 70B parameters on every mesh of
512 H100, sequences of 4,096, 1,024 of them a step; the second a small GPT on 2 ranks,
of which every stack is planned. `--quick` searches a model of two layers on 8 ranks.
"""

from __future__ import annotations

import argparse
import json
import time
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
SMALL = Llama(64, 2, 4, 2, 128, 512, 32, 16)


def large(quick: bool) -> Search:
    """Of a Llama over all meshes of so many ranks."""
    size, ranks = (SMALL, 8) if quick else (LARGE, 512)
    tokens = torch.empty(size.sequences, size.length, dtype=torch.int64, device="meta")
    return search(
        llama_memory.loss_of(size, concatenate_flat),
        ff.sharded_adam(1e-4),
        lambda: llama_memory.init_params(size),
        {"tokens": tokens, "targets": tokens.clone()},
        ranks,
        H100,
        compute=torch.bfloat16,
        reduce=torch.float32,
        plans=3 if quick else None,
    )


def small() -> Search:
    """Of a small GPT on two ranks, all that there is."""
    loss_fn = functional_loss(QUICK, ff.unit, lambda block: block)
    batch = whole_batch(QUICK, 2)
    init = lambda: init_params(QUICK)  # noqa: E731
    return search(loss_fn, ff.sharded_adam(1e-4), init, batch, 2, CPU)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a model of two layers")
    parser.add_argument("--json", type=Path, metavar="PATH")
    given = parser.parse_args(arguments)
    rows = []
    for name, run in (("all meshes", lambda: large(given.quick)), ("small", small)):
        begun = time.process_time()
        found = run()
        seconds = time.process_time() - begun
        planned, skipped = len(found.tried), len(found.skipped)
        stack = str(found.best.stack)
        rows.append(
            {"name": name, "seconds": seconds, "planned": planned, "best": stack}
        )
        of = f"{planned} of {planned + skipped} stacks planned"
        print(f"{found}\n{name}: {of}, {seconds:.0f} s of processor time\n", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()

"""What compiling takes, with an empty cache, beside torch's compiled blocks.

    python benchmarks/compiling.py [--layers 8] [--only KEYS] [--json PATH]

Each competitor of compare.py's compiled rows starts alone, with an empty folder for
what torch compiles (TORCHINDUCTOR_CACHE_DIR), and makes its first three steps: the
first of a whole step runs as it is, the second compiles. Processor seconds are those of
all ranks and of their compilers, which run one after another
(TORCHINDUCTOR_COMPILE_THREADS=1); a rank whose kernels another one has just built takes
those. `again` is a second start, which finds the cache. Ratio = ours / theirs, of
processor seconds.

`--quick` is a rehearsal: one layer, and kernels are made for one competitor alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from compared.measuring import run_workers
from compared.models import FULL, TINY, Size
from compared.report import number, table

PAIRS = {  # ours, and the same model with each block compiled
    "jit": ("ours_jit", "compiled"),
    "jit_whole": ("ours_jit_whole", "compiled"),
    "jit_zero0": ("zero0_jit", "ddp_compiled"),
    "jit_whole_zero0": ("zero0_jit_whole", "ddp_compiled"),
    "jit_zero3": ("zero3_jit", "fsdp2_compiled"),
    "jit_whole_zero3": ("zero3_jit_whole", "fsdp2_compiled"),
}


def measure(name: str, size: Size, *, again: bool, kernels: bool) -> dict[str, Any]:
    """Seconds of the first three steps of one competitor; ``again``: with its cache."""
    task = {
        "kind": "compiling",
        "size": dataclasses.asdict(size),
        "competitor": name,
        "ours": True,
        "kernels": kernels,
        "patience": 600,
    }
    ranks = 2 if "zero" in name or "ddp" in name or "fsdp" in name else 1
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        starts = [run_workers(task, ranks=ranks, timeout=600) for _ in range(1 + again)]
    first, *later = [
        {
            "seconds": max(answer["seconds"] for answer in answers),
            "processor seconds": sum(a["processor seconds"] for a in answers),
        }
        for answers in starts
    ]
    return {"name": name, **first, "again": later[0] if later else None}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a rehearsal")
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--again", action="store_true", help="start a second time")
    parser.add_argument("--only", help=f"of {', '.join(PAIRS)}, with commas")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write results here")
    chosen = parser.parse_args(argv)
    keys = chosen.only.split(",") if chosen.only else list(PAIRS)
    if unknown := [key for key in keys if key not in PAIRS]:
        parser.error(f"no pair {', '.join(unknown)}; there are {', '.join(PAIRS)}")
    size = TINY if chosen.quick else FULL
    layers = chosen.layers or (1 if chosen.quick else size.layers)
    size = dataclasses.replace(size, layers=layers)
    names = dict.fromkeys(name for key in keys for name in PAIRS[key])
    found = {}
    for name in names:
        kernels = not chosen.quick or name == "ours_jit"
        found[name] = measure(name, size, again=chosen.again, kernels=kernels)
    rows, body = [], []
    for key in keys:
        ours, theirs = (found[name] for name in PAIRS[key])
        ratio = ours["processor seconds"] / theirs["processor seconds"]
        rows.append({"key": key, "ours": ours, "theirs": theirs, "ratio": ratio})
        seconds = [f"{x['processor seconds']:.1f}" for x in (ours, theirs)]
        seconds += [f"{x['seconds']:.1f}" for x in (ours, theirs)]
        later = ours["again"] and f"{ours['again']['processor seconds']:.1f}"
        body.append([key, theirs["name"], *seconds, number(ratio), later or ""])
    head = ["compiling", "against", "ours, processor s", "theirs", "ours, s", "theirs"]
    print(f"{layers} layers of width {size.width}, empty cache")
    print(table([*head, "ratio", "again, processor s"], body))
    if chosen.json:
        chosen.json.write_text(json.dumps({"layers": layers, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

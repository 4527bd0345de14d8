"""Estimated against measured step times, and planned against resident memory, here.

    python benchmarks/foresight.py             2 processes, zero 0 to 3
    python benchmarks/foresight.py --quick     a small model, to see that it runs
    python benchmarks/foresight.py --memory    memory alone, of one and two processes

Each rank measures the machine, all at the same time, by `fsfunc`'s `measure_hardware`:
products, operators, memory, links. Then each scheme's step is planned and estimated,
and run. Nothing is fitted to a scheme. The estimate is of a donated step.

Memory is that of a process of its own for each scheme, by the kernel's high-water mark.
A process also holds what is no tensor: the interpreter, torch, the code of kernels.
That is what the same step of a tiny model comes to (`process`). A plan and that beside
what is resident are the ratio, twice: with malloc pinned to give freed tensors back
(`MALLOC_MMAP_THRESHOLD_=65536`), and as glibc starts it, which keeps freed memory in
its heap, between small objects that stay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compared.measuring import run_workers

SCHEMES = [
    {"zero": 0, "remat": False},
    {"zero": 1, "remat": False},
    {"zero": 2, "remat": False},
    {"zero": 3, "remat": False},
    {"zero": 3, "remat": True},
]


SMALL = {"zero": None, "remat": False}  # one device
PINNED = {True: "pinned", False: "as it is"}  # malloc's threshold


def name_of(scheme: dict[str, Any]) -> str:
    zero = "one device" if scheme["zero"] is None else f"zero={scheme['zero']}"
    return zero + (" + remat" if scheme["remat"] else "")


def occupied(
    size: Any, small: Any, ranks: int, rounds: int, pins: Iterable[bool] = PINNED
) -> list[dict[str, Any]]:
    """Prints planned and resident bytes of one device and of each scheme on ``ranks``.

    Args:
        pins: whether malloc's threshold is pinned: each of these in turn.

    Returns:
        the rows.
    """
    rows, processes = [], {}
    print("memory of rank 0, MB")
    print(f"{'step':18}processes  malloc   planned  process  resident  ratio")
    for scheme in (SMALL, *SCHEMES):
        count = 1 if scheme["zero"] is None else ranks
        for pinned in pins:
            task = {"kind": "occupy", "patience": 300, "scheme": scheme, "ours": True}
            task |= {"rounds": rounds, "pinned": pinned}

            def run(model: Any, task: Any = task, count: int = count) -> Any:
                with_size = task | {"size": vars(model)}
                return run_workers(with_size, ranks=count, timeout=300)[0]

            found = run(size)
            if (count, pinned) not in processes:
                tiny = run(small)
                processes[count, pinned] = tiny["resident"] - tiny["needed"]
            process = processes[count, pinned]
            row = {"name": name_of(scheme), "ranks": count, "malloc": PINNED[pinned]}
            row |= found | {"process": process}
            row["ratio"] = (row["needed"] + process) / row["resident"]
            rows.append(row)
            sizes = (row[key] / 1e6 for key in ("needed", "process", "resident"))
            told = f"{row['name']:18}{count:9}  {row['malloc']:8}"
            print("{}{:8.0f}{:9.0f}{:10.0f}".format(told, *sizes), end="")
            print(f"{row['ratio']:7.2f}", flush=True)
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints the table; returns its rows."""
    from compared.models import FULL, QUICK
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring")
    parser.add_argument("--memory", action="store_true", help="memory alone")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args(argv)
    size = QUICK if args.quick else FULL
    rounds = 1 if args.quick else 5
    # In a rehearsal each process is a fork, whose malloc is that of the first.
    pins = (True,) if args.quick else PINNED
    memory = occupied(size, QUICK, args.ranks, rounds, pins)
    if args.memory:
        if args.json:
            args.json.write_text(json.dumps({"memory": memory}, indent=1))
        return memory
    task = {
        "kind": "foresee",
        "patience": 300,
        "size": vars(size),
        "schemes": SCHEMES,
        "seconds": 1.0 if args.quick else args.seconds,
        "rounds": 1 if args.quick else args.rounds,
        "warmup": 1 if args.quick else 3,
        "ours": True,
    }
    found = run_workers(task, ranks=args.ranks, timeout=600)[0]

    table = Table(title=f"{args.ranks} ranks, {size.parameters / 1e6:.1f}M parameters")
    for head in ("step", "estimated", "measured", "ratio", "computing", "exposed"):
        table.add_column(head, justify="left" if head == "step" else "right")
    for row in found["rows"]:
        row["ratio"] = row["estimated"] / row["measured"]
        table.add_row(
            row["name"],
            *(f"{row[k]:.3f} s" for k in ("estimated", "measured")),
            f"{row['ratio']:.2f}",
            *(f"{row[k]:.3f} s" for k in ("compute", "exposed")),
        )
    console = Console()
    console.print(table)
    console.print(found["hardware"], markup=False, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps(found | {"memory": memory}, indent=1))
    return found["rows"]


if __name__ == "__main__":
    main()

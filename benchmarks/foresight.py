"""Estimated against measured step times, on this machine.

    python benchmarks/foresight.py             2 processes, zero 0 to 3
    python benchmarks/foresight.py --quick     a small model, to see that it runs

Each rank measures the machine, all at the same time, by `fsfunc`'s `measure_hardware`:
products, operators, memory, links. Then each scheme's step is planned and estimated,
and run. Nothing is fitted to a scheme. The estimate is of a donated step.
"""

from __future__ import annotations

import argparse
import json
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


def name_of(scheme: dict[str, Any]) -> str:
    return f"zero={scheme['zero']}" + (" + remat" if scheme["remat"] else "")


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
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args(argv)
    size = QUICK if args.quick else FULL
    task = {
        "kind": "foresee",
        "patience": 300,
        "size": vars(size),
        "schemes": SCHEMES,
        "seconds": 1.0 if args.quick else args.seconds,
        "rounds": 2 if args.quick else args.rounds,
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
        args.json.write_text(json.dumps(found, indent=1))
    return found["rows"]


if __name__ == "__main__":
    main()

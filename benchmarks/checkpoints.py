"""Saving and loading beside the disk itself and torch's own checkpoints: A B A B.

    python benchmarks/checkpoints.py [--gigabytes N] [--rounds N] [--quick]
                                     [--folder PATH] [--json PATH]

Two processes on gloo, one thread each: a GPT's parameters and its Adam moments under
`shard(zero=3)`, and the same model under FSDP2. Competitors take turns; a time is that
of the slowest rank, and rows are of medians.

- dd: each rank's share of the bytes, written from memory and synced to the disk
  (`conv=fdatasync`, as `ff.save` waits for it), or read back.
- DCP: `torch.distributed.checkpoint.save` and `load` with their defaults, of FSDP2's
  state (taken outside of the timing), loaded in place. `sync_files` is DCP's default.
- Before each load the files are dropped from the system's page cache
  (`posix_fadvise`), for every competitor. What lies below the system, such as the
  cache of a virtual disk's host, is not.
- `save_async` is timed until it returns, and waited for outside of the timing.

A disk's speed is rarely its own: the load of the machine is printed, and the spread of
the times is in the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compared.measuring import ENVIRONMENT, medians, run_workers, slowest
from compared.models import Size
from compared.report import duration, number, table

RANKS = 2
STATE = 3 * 4  # bytes a parameter: itself and two moments in fp32
DISK = 1 / 0.8  # of dd's time: at least 80 % of its speed


@dataclass(frozen=True)
class Row:
    """One line of the table: `ours` over `theirs`, and the ratio to stay under."""

    what: str
    against: str
    ours: str
    theirs: str
    bar: float


ROWS = [
    Row("save", "dd, written and synced", "save", "dd write", DISK),
    Row("load, nothing cached", "dd, read", "load", "dd read", DISK),
    Row("save", "DCP under FSDP2", "save", "dcp save", 1.0),
    Row("load into new memory", "DCP under FSDP2", "load", "dcp load", 1.0),
    Row("load in place", "DCP under FSDP2", "load in place", "dcp load", 1.0),
    Row("load in place", "dd, read", "load in place", "dd read", DISK),
    Row("save_async, the call", "save", "save_async", "save", 0.1),
]


def size_of(gigabytes: float, quick: bool) -> Size:
    """A GPT whose state has about so many bytes."""
    if quick:
        return Size(256, 64, layers=3, heads=4, length=16, sequences=1)
    one = Size(4096, 1024, layers=1, heads=16, length=16, sequences=1)
    rest = gigabytes * 1e9 / STATE - 2 * one.vocabulary * one.width
    layers = max(1, round(rest / one.block_parameters))
    return Size(4096, 1024, layers=layers, heads=16, length=16, sequences=1)


def measure(size: Size, rounds: int, folder: str) -> list[dict[str, Any]]:
    patience = 120 + 60 * rounds * max(1.0, STATE * size.parameters / 1e9)
    task = {
        "kind": "checkpoints",
        "size": asdict(size),
        "rounds": rounds,
        "patience": patience,
        "disk": folder,
    }
    return run_workers(task, ranks=RANKS, timeout=patience)


def results(seconds: dict[str, float]) -> list[dict[str, Any]]:
    found = []
    for row in ROWS:
        ratio = seconds[row.ours] / seconds[row.theirs]
        verdict = "bar" if ratio <= row.bar else "over"
        found.append(
            {
                **asdict(row),
                "ours_seconds": seconds[row.ours],
                "theirs_seconds": seconds[row.theirs],
                "ratio": ratio,
                "verdict": verdict,
            }
        )
    return found


def render(record: dict[str, Any]) -> str:
    nbytes, loads = record["bytes"], record["load_average"]
    head = ["what", "against", "ours", "theirs", "ratio", "bar", "within"]
    body = [
        [
            row["what"],
            row["against"],
            duration(row["ours_seconds"]),
            duration(row["theirs_seconds"]),
            number(row["ratio"]),
            f"{row['bar']:.2f}",
            row["verdict"],
        ]
        for row in record["rows"]
    ]
    each = [
        [
            name,
            "",
            duration(median),
            f"{min(record['times'][name]):.3f} to {max(record['times'][name]):.3f} s",
            f"{nbytes / median / 1e6:.0f} MB/s" if "async" not in name else "",
        ]
        for name, median in record["seconds"].items()
    ]
    return "\n".join(
        [
            f"{nbytes / 1e9:.2f} GB of state over {RANKS} processes, in "
            f"{record['folder']}, {record['rounds']} rounds, torch {record['torch']}",
            f"load average {loads[0]:.1f} before and {loads[1]:.1f} after, of "
            f"{record['cores']} cores",
            "ratio: ours / theirs, medians of alternating runs, the slowest rank's.",
            "",
            table(head, body),
            "",
            table(["competitor", "", "median", "spread", "speed"], each),
        ]
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the state")
    parser.add_argument("--rounds", type=int, help="timed runs of each competitor")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: 3 MB")
    parser.add_argument("--folder", help="on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write results here")
    chosen = parser.parse_args(argv)
    size = size_of(chosen.gigabytes, chosen.quick)
    rounds = chosen.rounds or (2 if chosen.quick else 7)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        answers = measure(size, rounds, folder)
    times = slowest([answer["times"] for answer in answers])
    seconds = medians(times)
    record = {
        "bytes": sum(answer["bytes"] for answer in answers),
        "dcp_bytes": answers[0]["dcp_bytes"],
        "parameters": size.parameters,
        "size": asdict(size),
        "rounds": rounds,
        "folder": str(Path(folder).parent),
        "load_average": [before, os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "environment": ENVIRONMENT,
        "torch": torch.__version__,
        "rows": results(seconds),
        "seconds": seconds,
        "times": times,
        "async_wait": statistics.median(answers[0]["waits"]),
    }
    print(render(record))
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

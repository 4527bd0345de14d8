"""fsfunc on one GPU beside plain torch, torch.compile and FSDP2, in bf16, in pairs.

    python benchmarks/gpu.py [--only PAIRS] [--limit SECONDS] [--rounds 7]
                             [--width 2048] [--layers 8] [--length 2048]
                             [--sequences 8] [--card JSON] [--json PATH [--add]]

Parameters, moments and reductions are fp32, computation is bf16, on every side: plain
torch casts its parameters inside the step, FSDP2 by MixedPrecisionPolicy, fsfunc by
`ff.precision`. All is over NCCL at one rank, where nothing is sent: what is seen is
each side's own work on the host and the device.

A pair has a process of its own, which ends with it; the next one's imports meanwhile.
Its two competitors step in turn (A B A B ...), a step ends with a synchronisation, and
the ratio is the median of the rounds'. A peak is the allocator's of one steady step,
less what the other one holds. The share is that of the card's matrix rate, which each
pair measures first. Beside the times and peaks stand those that `ff.plan` and
`ff.estimate` foresaw, of the data sheet's card and (`--card`) of the one measured.

A pair's row and JSON are written when it ends; one that fails or outlasts its limit
says so in its row. `--limit` begins no pair after so many seconds. `--device cpu`
rehearses the script with a tiny model, without meaning.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHAPE = {  # of the card's run
    "vocabulary": 32768,
    "width": 2048,
    "layers": 8,
    "heads": 16,
    "length": 2048,
    "sequences": 8,
}


@dataclass(frozen=True)
class Pair:
    """Two competitors of compared/, and how long they may take together.

    Args:
        layers: of the model, at most: a compiled step's compiling grows with them.
        again: rounds, at most, where a step takes long.
    """

    ours: str
    theirs: str
    limit: float = 40.0
    layers: int = 1000
    again: int = 1000


PAIRS = {
    "zero0": Pair("zero0", "plain"),
    "zero3": Pair("zero3", "fsdp2"),
    "zero3_remat": Pair("zero3_remat", "fsdp2_checkpoint"),
    "precision": Pair("ours", "plain"),  # and no other transform
    "donate": Pair("zero3", "zero3_pure"),
    "offload": Pair("zero3_offload", "zero3", again=4),
    "offload_fsdp2": Pair("zero3_offload", "fsdp2_offload", limit=60, again=3),
    "jit": Pair("zero3_jit", "fsdp2_compiled", limit=80),
    "whole": Pair("ours_jit_whole", "compiled_whole", limit=100, layers=4),
    "whole_zero3": Pair("zero3_jit_whole", "fsdp2_compiled", limit=100, layers=4),
}
COMPILED = ["jit", "whole", "whole_zero3"]
GROUPS = {"compiled": COMPILED, "eager": [n for n in PAIRS if n not in COMPILED]}


class Process:
    """The process of a pair: it imports, waits for `begin`, and writes its answer."""

    def __init__(self, name: str, task: dict[str, Any], folder: str):
        self.name, self.answer = name, Path(folder) / name
        given = json.dumps({**task, "pair": name, "answer": str(self.answer)})
        self.running = subprocess.Popen(
            [sys.executable, __file__, "--child", given], stdin=subprocess.PIPE
        )

    def finish(self, limit: float) -> dict[str, Any]:
        """Lets it begin; what it measured, until its end or the limit."""
        late = ""
        try:
            self.running.communicate(b"begin\n", timeout=limit)
        except subprocess.TimeoutExpired:
            late = f"not over in {limit:.0f} seconds"
        except OSError:
            pass  # it has ended already
        self.end()
        found = json.loads(self.answer.read_text()) if self.answer.exists() else {}
        if late:
            found["error"] = f"{late}: {found.get('doing', 'importing')}"
        elif self.running.returncode and "error" not in found:
            found["error"] = f"ended with {self.running.returncode}"
        return found

    def end(self) -> None:
        self.running.kill()
        self.running.wait()


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each pair's figures, printed and written as it ends."""
    start, found = time.monotonic(), {}
    if args.add and args.json and args.json.exists():
        found = json.loads(args.json.read_text())["pairs"]
    task = {k: getattr(args, k) for k in ("device", "rounds", *SHAPE)}
    task["card"] = str(args.card) if args.card else None
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        waiting = [Process(args.only[0], task, folder)]
        try:
            for i, name in enumerate(args.only):
                begun = time.monotonic()
                if begun - start >= args.limit:
                    found[name] = {"error": "not begun: the time was over"}
                else:
                    if i + 1 < len(args.only):  # imports while the card is at work
                        waiting.append(Process(args.only[i + 1], task, folder))
                    found[name] = waiting.pop(0).finish(limit_of(name, args))
                    found[name]["wall_seconds"] = time.monotonic() - begun
                print(rows(name, found[name]), flush=True)
                if args.json:
                    args.json.write_text(json.dumps({"pairs": found}, indent=1))
        finally:
            for process in waiting:
                process.end()
    return found


def limit_of(name: str, args: argparse.Namespace) -> float:
    """Seconds of a pair; a rehearsal's leave room for a busy machine."""
    slower = 5 if args.device == "cpu" else 1
    return args.pair_limit or slower * PAIRS[name].limit


# ------------------------------------------------------------------ what is printed

COLUMNS = (
    ("pair", 13), ("competitor", 26), ("median s", 9), ("ratio", 6), ("quartiles", 10),
    ("tokens/s", 10), ("TFLOP/s", 8), ("share", 6), ("peak GiB", 9), ("planned", 8),
    ("H100 s", 8), ("here s", 8),
)  # fmt: skip


def line(cells: list[str]) -> str:
    padded = [
        cell.ljust(width) if i < 2 else cell.rjust(width)
        for i, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True))
    ]
    return " ".join(padded).rstrip()


HEAD = line([name for name, _ in COLUMNS])


def rows(name: str, found: dict[str, Any]) -> str:
    """A line for each competitor, and what else is to be said."""
    lines = []
    for i, side in enumerate(found.get("sides", [])):
        seconds, rate = side.get("seconds"), found["matrix_rate"]
        flops = found["flops"] / seconds if seconds else None
        foreseen = side.get("foreseen", {})
        times = foreseen.get("seconds", {})
        low, _, high = found.get("quartiles", (0, 0, 0))
        lines.append(
            line(
                [
                    "" if i else name,
                    side["name"],
                    shown(seconds, "{:.4f}"),
                    "" if i else shown(found.get("ratio"), "{:.3f}"),
                    "" if i or not high else f"{low:.2f}-{high:.2f}",
                    shown(found["tokens"] / seconds if seconds else None, "{:,.0f}"),
                    shown(flops and flops / 1e12, "{:.1f}"),
                    shown(flops and flops / rate, "{:.1%}"),
                    shown(gib(side.get("peak_bytes")), "{:.2f}"),
                    shown(gib(foreseen.get("peak_bytes")), "{:.2f}"),
                    shown(times.get("sheet"), "{:.4f}"),
                    shown(times.get("measured"), "{:.4f}"),
                ]
            )
        )
    indent = " " * (COLUMNS[0][1] + 1)
    lines += [indent + note for note in found.get("notes", [])]
    if "error" in found:
        lines.append(f"{name.ljust(COLUMNS[0][1])} FAILED {found['error']}")
    return "\n".join(lines)


def shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def gib(count: float | None) -> float | None:
    return None if count is None else count / 2**30


def last_line(found: dict[str, dict[str, Any]], names: list[str]) -> str:
    right = [n for n in names if "error" not in found[n]]
    ratios = ", ".join(f"{n} {found[n].get('ratio', 0):.2f}" for n in right)
    return f"== {len(right)} of {len(names)} pairs; ours / theirs: {ratios}"


# --------------------------------------------------------------- a pair's own process


def child(task: dict[str, Any]) -> int:
    """Imports, waits for the parent's word, measures one pair."""
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # fsfunc's checkout
    from card import in_pairs

    if not sys.stdin.readline():
        return 0  # the parent has ended, or has no time for it
    return in_pairs.run(asdict(PAIRS[task["pair"]]), task)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    names = f"of {', '.join([*PAIRS, *GROUPS])}; by commas"
    parser.add_argument("--only", default="eager,compiled", metavar="PAIRS", help=names)
    parser.add_argument("--limit", type=float, default=1e9, metavar="SECONDS")
    parser.add_argument("--pair-limit", type=float, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=7)
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--card", type=Path, metavar="JSON", help="of card/about.py")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--add", action="store_true", help="to what the JSON has")
    args = parser.parse_args(argv)
    args.only = [n for name in args.only.split(",") for n in GROUPS.get(name, [name])]
    if unknown := [name for name in args.only if name not in PAIRS]:
        parser.error(f"no pair {', '.join(unknown)}; there are {', '.join(PAIRS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    found = measure(args)
    print(last_line(found, args.only))
    return any("error" in found[name] for name in args.only)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(json.loads(sys.argv[2])))
    sys.exit(main())

"""README's programs, and those of examples/README, with "cuda" as default device.

    python -m card.blocks [--device cpu] [--limit SECONDS] [--json PATH]

A program that raises does not stop those after it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # not within a program's time: an import cut short breaks others

import fsfunc  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> dict[str, str]:
    """The programs by page and number."""
    return {
        f"{page}, {i}": code
        for page in ("README.md", "examples/README.md")
        for i, code in enumerate(
            re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S), 1
        )
    }


def run(code: str, name: str, limit: int) -> str:
    """Runs it; "ok", or the last line of its error."""
    signal.alarm(limit)
    try:
        exec(compile(code, name, "exec"), {"__name__": "readme"})
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a kernel's error shows here
    except BaseException as error:
        traceback.print_exc()
        return traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
    finally:
        signal.alarm(0)
    return "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=int, help="seconds of a program")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    args.limit = args.limit or (20 if args.device == "cuda" else 100)
    signal.signal(signal.SIGALRM, late(args.limit))
    torch.set_default_device(args.device)
    found: dict[str, Any] = {}
    for name, code in blocks().items():
        print(f"-- {name}", flush=True)
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        said = run(code, name, args.limit)
        found[name] = {"said": said, "seconds": time.perf_counter() - start}
        if args.device == "cuda":  # 0: nothing of it was on the card
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
        print(f"-- {json.dumps(found[name])}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    right = sum(one["said"] == "ok" for one in found.values())
    wrong = [f"{k}: {v['said']}" for k, v in found.items()]
    wrong = [one for one in wrong if not one.endswith(": ok")]
    print(f"== {right} of {len(found)} ok", *wrong, sep="; ")
    return right < len(found)


def late(limit: int) -> Callable[..., None]:
    def raises(*_: Any) -> None:
        raise TimeoutError(f"not over in {limit} seconds")

    return raises


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # simulated ranks of a program that was late may still run

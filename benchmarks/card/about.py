"""The card: versions, rates, and the machine as an estimate wants it described.

python -m card.about [--device cpu] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from card.rates import copy_rates, matrix_rate

import fsfunc as ff
from fsfunc.planning.calibration import measure_hardware


def versions(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found |= {
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "card": about.name,
            "memory": about.total_memory,
            "processors": about.multi_processor_count,
            "capability": f"{about.major}.{about.minor}",
            "nvidia_smi": nvidia_smi(),
        }
    return found


def nvidia_smi() -> str:
    asked = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return (done.stdout or done.stderr).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=6.0, help="of measuring")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    record: dict[str, Any] = {}

    def hardware() -> dict[str, Any]:
        # The name of what is measured is no name of a data sheet.
        measured = measure_hardware(name="measured here", seconds=args.seconds)
        return json.loads(ff.hardware.to_json(measured))

    wanted: dict[str, Callable[[], Any]] = {
        "versions": lambda: versions(args.device),
        "matrix_rate": lambda: matrix_rate(args.device),
        "copies": lambda: copy_rates(args.device),
        "hardware": hardware,
    }
    failed = []
    for name, make in wanted.items():
        try:
            record[name] = make()
            print(f"{name}: {json.dumps(record[name])}", flush=True)
        except Exception:  # what is left says something too
            traceback.print_exc()
            failed.append(name)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))
    about, copies = record.get("versions", {}), record.get("copies", {})
    print(
        f"== {about.get('card', 'CPU')}, torch {torch.__version__}, "
        f"{record.get('matrix_rate', 0) / 1e12:.1f} TFLOP/s bf16, copies "
        f"{copies.get('device', 0) / 1e9:.0f} GB/s, of the host "
        f"{copies.get('pinned, to the device', 0) / 1e9:.1f} pinned"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())

"""One pair of gpu.py: two competitors on one device, in turn, and what was foreseen."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from card.one_rank import one_rank
from card.rates import matrix_rate
from compared import ours, peers
from compared.measuring import alternate, quartiles
from compared.models import QUICK, Size

import fsfunc as ff
from fsfunc.planning.events import Ran

WARMUP = 3  # with the peak and 7 rounds fewer than 17 calls, one that checks again
TOLERANCE = 2e-3  # between first losses: that of bf16 products


def run(pair: dict[str, Any], task: dict[str, Any]) -> int:
    """Measures; the answer has what there is also where something raises."""
    found: dict[str, Any] = {}
    answer = Path(task["answer"])

    def write(doing: str) -> None:
        found["doing"] = doing
        answer.with_suffix(".new").write_text(json.dumps(found))
        answer.with_suffix(".new").rename(answer)

    code = 1
    try:
        with one_rank(task["device"]):
            measure(pair, task, found, write)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        said = f"{type(error).__name__}: {text[0][:300]}"
        found["error"] = f"{said} ({found.get('doing', 'beginning')})"
    write("")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing of a step that failed is waited for


def measure(
    pair: dict[str, Any],
    task: dict[str, Any],
    found: dict[str, Any],
    write: Callable[[str], None],
) -> None:
    device = task["device"]
    size = size_of(pair, task)
    setting = peers.Setting(size, 0, 1, device=device, compute=torch.bfloat16)
    found |= {
        "device": "CPU" if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "size": dataclasses.asdict(size),
        "parameters": size.parameters,
        "tokens": size.tokens,
        "flops": size.flops(),
        "matrix_rate": matrix_rate(device),
        "sides": [],
        "notes": [],
    }
    made: dict[str, peers.Competitor] = {}
    for name in (pair["ours"], pair["theirs"]):
        side: dict[str, Any] = {"name": name}
        found["sides"].append(side)
        write(f"building {name}")
        start, before = time.perf_counter(), allocated(device)
        made[name] = {**peers.BUILDERS, **ours.BUILDERS}[name](setting)
        side["building_seconds"] = time.perf_counter() - start
        side["held_bytes"] = allocated(device) - before
        write(f"warming up {name}")
        start, step = time.perf_counter(), made[name].step
        side["losses"] = [float(step()) for _ in range(WARMUP)]  # type: ignore[arg-type]
        side["warming_seconds"] = time.perf_counter() - start
        side["peak_bytes"] = peak(step, device, before)
        write(f"after the warm-up of {name}")
    write("timing")
    calls = {name: synchronised(c.step, device) for name, c in made.items()}
    times = alternate(calls, rounds=min(task["rounds"], pair["again"]))
    for side in found["sides"]:
        side["times"] = times[side["name"]]
        side["seconds"] = statistics.median(side["times"])
    found["quartiles"] = quartiles(times[pair["ours"]], times[pair["theirs"]])
    found["ratio"] = found["quartiles"][1]
    write("planning")
    for side in found["sides"]:
        foresee(side, made[side["name"]], setting, task["card"], found["notes"])
        write("planning")
    bandwidth(found)
    losses = [side["losses"][0] for side in found["sides"]]
    if not max(losses) - min(losses) <= TOLERANCE * abs(max(losses)):
        raise RuntimeError(f"losses of the first step differ: {losses}")
    if not all(math.isfinite(x) for side in found["sides"] for x in side["losses"]):
        raise RuntimeError("a loss is not finite")


def size_of(pair: dict[str, Any], task: dict[str, Any]) -> Size:
    if task["device"] == "cpu":
        size = QUICK
    else:
        size = Size(**{f.name: task[f.name] for f in dataclasses.fields(Size)})
    return dataclasses.replace(size, layers=min(size.layers, pair["layers"]))


def allocated(device: str) -> int:
    gc.collect()  # modules and their hooks hold each other
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def peak(step: Callable[[], Any], device: str, before: int) -> int | None:
    """Peak bytes allocated in a steady step, beyond those before; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def synchronised(step: Callable[[], Any], device: str) -> Callable[[], None]:
    def run() -> None:
        step()
        if device != "cpu":
            torch.cuda.synchronize()

    return run


# ------------------------------------------------------------------- what was foreseen


def foresee(
    side: dict[str, Any],
    competitor: peers.Competitor,
    setting: peers.Setting,
    card: str | None,
    notes: list[str],
) -> None:
    """Plans the state at hand, and the CPU's tensors; estimates for two machines."""
    if competitor.plan is None:
        return
    name, tokens = side["name"], setting.size.tokens
    foreseen: dict[str, Any] = {"seconds": {}}
    side["foreseen"] = foreseen
    try:
        start = time.perf_counter()
        plan = competitor.plan()
        foreseen |= {
            "planning_seconds": time.perf_counter() - start,
            "peak_bytes": plan.peak_bytes,
            "offloaded_bytes": plan.offloaded_bytes,
            "flops": plan.flops,
            "crossing_bytes": crossing(plan),
        }
        for kind, machine in machines(card, setting.device).items():
            estimate = ff.estimate(plan, machine, tokens=tokens)
            foreseen["seconds"][kind] = estimate.seconds
            foreseen[f"{kind} low, high"] = [estimate.low, estimate.high]
    except Exception as error:
        traceback.print_exc()
        notes.append(f"plan of {name}: {shortly(error)}")
    try:
        kind = ours.BUILDERS[name].keywords  # type: ignore[attr-defined]
        elsewhere = ours.planned_on_cpu(setting, **kind)
    except Exception as error:
        traceback.print_exc()
        notes.append(f"plan of {name} on the CPU: {shortly(error)}")
        return
    foreseen["of the CPU's tensors"] = {
        "peak_bytes": elsewhere.peak_bytes,
        "flops": elsewhere.flops,
    }
    if "flops" in foreseen and foreseen["flops"] != elsewhere.flops:
        notes.append(
            f"plan of {name}: {foreseen['flops']:.4g} FLOPs here, "
            f"{elsewhere.flops:.4g} of the CPU's tensors"
        )
    if real := side["peak_bytes"]:
        notes.append(
            f"peak of {name}: planned {foreseen.get('peak_bytes', 0) / real:.3f} of "
            f"the measured, of the CPU's tensors {elsewhere.peak_bytes / real:.3f}; "
            f"state {side['held_bytes'] / 2**30:.2f} GiB"
        )


def shortly(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def machines(card: str | None, device: str) -> dict[str, Any]:
    """The data sheet's, and the one that card/about.py measured."""
    named = torch.cuda.get_device_name() if device == "cuda" else "H100"
    known = ("H100", "H200", "A100-80", "B200")
    sheet = next((k for k in known if k.partition("-")[0] in named), "H100")
    found = {"sheet": ff.hardware.named(sheet)}
    if card and Path(card).exists():
        fields = json.loads(Path(card).read_text()).get("hardware")
        if fields:
            measured = ff.hardware.from_json(json.dumps(fields))
            stores = measured.stores or found["sheet"].stores
            found["measured"] = ff.hardware.replace(measured, stores=stores)
    return found


def crossing(plan: Any) -> int:
    """Bytes that a step copies between the device and what lies beside it."""
    events = plan.on(None).events
    return sum(e.op.bytes for e in events if isinstance(e, Ran) and e.op.crosses)


def bandwidth(found: dict[str, Any]) -> None:
    """Says how fast an offloaded step copies, where there is one."""
    mine, other = found["sides"]
    moved = mine.get("foreseen", {}).get("crossing_bytes")
    if not moved:
        return
    more = mine["seconds"] - other["seconds"]
    text = f"{moved / 2**30:.2f} GiB cross a step, {moved / mine['seconds'] / 1e9:.2f}"
    text += " GB/s over all of it"
    if other["name"] == mine["name"].removesuffix("_offload") and more > 0:
        text += f", {moved / more / 1e9:.2f} GB/s over what it takes longer"
    found["notes"].append(text)

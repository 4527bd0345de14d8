"""One rank's side of foresight.py: measure the machine, estimate, run, and memory."""

from __future__ import annotations

import resource
import statistics
from typing import Any

import torch.distributed as dist
from compared.measuring import alternate
from compared.models import Size
from compared.ours import build
from compared.peers import Setting

import fsfunc as ff
from fsfunc.planning.allocation import fits
from fsfunc.planning.calibration import measure_hardware
from fsfunc.planning.estimation import estimate
from fsfunc.planning.hardware import CPU


def foresee(task: dict[str, Any]) -> dict[str, Any]:
    """For each scheme, the estimated and the measured seconds of a step."""
    size = Size(**task["size"])
    setting = Setting(size, task["rank"], task["ranks"])
    mesh = ff.make_mesh({"data": task["ranks"]}, backend="processes")
    made = {i: build(setting, **scheme) for i, scheme in enumerate(task["schemes"])}
    for _ in range(task["warmup"]):
        for competitor in made.values():
            competitor.step()
    hardware = measure_hardware(mesh, seconds=task["seconds"])
    calls = {str(i): competitor.step for i, competitor in made.items()}
    times = alternate(calls, rounds=task["rounds"], barrier=dist.barrier)
    rows = []
    for i, scheme in enumerate(task["schemes"]):
        plan = made[i].plan()
        found = estimate(plan, hardware, tokens=size.tokens * task["ranks"])
        rows.append(
            {
                "name": f"zero={scheme['zero']}" + " + remat" * scheme["remat"],
                "estimated": found.seconds,
                "measured": statistics.median(times[str(i)]),
                "compute": found.compute,
                "exposed": found.exposed,
                "peak": plan.peak_bytes,
            }
        )
    return {"rows": rows, "hardware": repr(hardware)}


def occupy(task: dict[str, Any]) -> dict[str, Any]:
    """Bytes that a scheme is planned to need, and the most that its process held.

    Resident is the kernel's high-water mark over the whole life of the process: its
    imports, the first state, the first step with its checks, and the others.
    """
    size = Size(**task["size"])
    competitor = build(Setting(size, task["rank"], task["ranks"]), **task["scheme"])
    for _ in range(task["rounds"]):
        competitor.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"needed": fits(competitor.plan(), CPU).needed, "resident": peak}

"""``python -m fsfunc hardware``: this machine, or the links of several processes."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fsfunc.cli.build_scripts import Refused, put, write_json
from fsfunc.comm.launch import make_mesh, spmd
from fsfunc.planning.calibration import measure_hardware
from fsfunc.planning.hardware import to_json
from fsfunc.planning.machines import Hardware
from fsfunc.show.estimates import description


def add_to(commands: Any) -> None:
    """Adds ``hardware`` to argparse's subparsers."""
    about = "this machine, measured, as an estimate wants it described"
    one = commands.add_parser(
        "hardware",
        help=about,
        description=f"Prints {about}. Under torchrun the links between its processes "
        "are measured too: torchrun --nproc-per-node 2 -m fsfunc hardware",
    )
    one.set_defaults(run=_run)
    add = one.add_argument
    add("--name", default="this machine", help="what tables call it")
    add("--seconds", type=float, default=5.0, help="that it may take (default: 5)")
    add("--json", type=Path, metavar="PATH", help="write it for plan --hardware")


def _run(options: argparse.Namespace) -> None:
    if not options.seconds > 0:
        raise Refused(f"--seconds is above 0: {options.seconds:g}")

    def measured() -> Hardware:
        return measure_hardware(name=options.name, seconds=options.seconds)

    mesh = None
    if {"RANK", "WORLD_SIZE"} <= set(os.environ):
        mesh = make_mesh({"data": int(os.environ["WORLD_SIZE"])})
    machine = measured() if mesh is None else spmd(measured, mesh)()[0]
    if mesh is not None and mesh.rank != 0:
        return
    put(description(machine))
    if options.json:
        write_json(options.json, json.loads(to_json(machine)))

"""``python -m fsfunc checkpoint``, ``consolidate`` and ``hardware``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsfunc.checkpoint.finding import metadata
from fsfunc.checkpoint.stored import CheckpointError
from fsfunc.cli.build_scripts import Refused, put, write_json
from fsfunc.comm.launch import make_mesh, spmd
from fsfunc.planning.calibration import measure_hardware
from fsfunc.planning.hardware import to_json
from fsfunc.planning.machines import Hardware
from fsfunc.printing.tables import of_bytes
from fsfunc.show.estimates import description
from fsfunc.show.shardings import checkpoint


def add_checkpoints(commands: Any) -> None:
    """Adds ``checkpoint`` and ``consolidate`` to argparse's subparsers."""
    lists = "the contents of a checkpoint"
    makes = "one safetensors file with every tensor of a checkpoint whole"
    look = commands.add_parser(
        "checkpoint",
        help=lists,
        description=f"Prints {lists}.",
        example=["checkpoint runs/step-200 --at params"],
    )
    join = commands.add_parser(
        "consolidate",
        help=makes,
        description=f"Writes {makes}.",
        example=["consolidate runs/step-200 model.safetensors --at params"],
    )
    look.set_defaults(run=_look)
    join.set_defaults(run=_consolidate)
    for one in (look, join):
        one.set_defaults(parser=one, takes_script=False)
        of = "a checkpoint, of any mesh"
        one.add_argument("path", type=Path, metavar="PATH", help=of)
        at = "the path of a subtree, such as params"
        one.add_argument("--at", default="", metavar="PATH", help=at)
    join.add_argument("file", type=Path, metavar="FILE", help="where the file will be")
    prove = "read all of it and compare the checksums"
    look.add_argument("--prove", action="store_true", help=prove)


def _look(options: argparse.Namespace) -> None:
    with _refusing():
        stored = metadata(options.path)
        put(checkpoint(stored, at=options.at))
        if options.prove:
            from fsfunc.checkpoint.reading import prove

            print(f"{of_bytes(prove(stored))} read: every checksum is right")


def _consolidate(options: argparse.Namespace) -> None:
    # DCP takes half a second to import.
    from fsfunc.checkpoint.safetensors import consolidate

    with _refusing():
        file = consolidate(options.path, options.file, at=options.at)
    print(f"{file} is written")


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointError, LookupError) as error:
        said = error.args[0] if isinstance(error, LookupError) else error
        raise Refused(str(said)) from None


def add_hardware(commands: Any) -> None:
    """Adds ``hardware`` to argparse's subparsers."""
    about = "this machine, measured, as an estimate wants it described"
    one = commands.add_parser(
        "hardware",
        help=about,
        description=f"Prints {about}. Under torchrun the links between its processes "
        "are measured too: torchrun --nproc-per-node 2 -m fsfunc hardware",
        example=["hardware --seconds 2 --json this.json"],
    )
    one.set_defaults(run=_measure, parser=one, takes_script=False)
    add = one.add_argument
    add("--name", default="this machine", help="what tables call it")
    add("--seconds", type=float, default=5.0, help="that it may take (default: 5)")
    add("--json", type=Path, metavar="PATH", help="write it for plan --hardware")


def _measure(options: argparse.Namespace) -> None:
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
